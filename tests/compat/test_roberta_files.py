"""Trained RoBERTas, CamemBERTs and XLM-Rs from Python and by the commands, with our layers.

The published CamemBERT and XLM-R name the archs of RoBERTa, in the form of fairseq 0.9; here such
files are made from those of today.
"""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from pathlib import Path
from typing import Any

import helpers.parity as parity
import helpers.roberta_runs as roberta
import pytest
import torch
from helpers.cli_runs import succeed, unchanged

# isort: split
from fairseq.data.encoders.characters import Characters
from fairseq.models.roberta import CamembertModel, RobertaModel, XLMRModel

import lightseq_fairseq
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.checkpoints import names
from lightseq_fairseq.plugins.roberta import LSRobertaEncoder, LSRobertaModel
from lightseq_fairseq.python.roberta import RobertaModel as OurRobertaModel

TASKS = {
    "camembert": (CamembertModel, "masked_lm"),
    "xlmr": (XLMRModel, "multilingual_masked_lm"),
    "roberta": (RobertaModel, "masked_lm"),
}
TOKENS = torch.tensor([[0, 5, 9, 12, 2, 2, 7, 2], [0, 4, 11, 2, 2, 6, 2, 1]])
REAL = TOKENS != 1


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> roberta.Data:
    return roberta.binarise(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def pretrained(data: roberta.Data, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of our run."""
    return roberta.pretrain(data, tmp_path_factory.mktemp("pretrained")).parent


@pytest.fixture(scope="module")
def tuned(data: roberta.Data, pretrained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a classifier that we trained."""
    folder = tmp_path_factory.mktemp("tuned")
    roberta.tune(data.classes, pretrained / "checkpoint_last.pt", folder, *roberta.BY_ACCURACY)
    return folder


@pytest.fixture(scope="module", params=TASKS)
def old(
    data: roberta.Data, pretrained: Path, request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, Any]:  # fmt: skip
    """A folder as fairseq 0.9 published it, and fairseq's class of its models."""
    folder = tmp_path_factory.mktemp(request.param)
    state = torch.load(pretrained / "checkpoint_last.pt", weights_only=False)
    kind, task = TASKS[request.param]
    torch.save(roberta.in_old_form(state, task=task, data="/gone"), folder / "model.pt")
    (folder / "dict.txt").write_bytes((data.text / "dict.txt").read_bytes())
    return folder, kind


def load(kind: Any, folder: Path, data: Path | str, **options: Any) -> Any:
    options = {"checkpoint_file": "checkpoint_best.pt", "bpe": None, **options}
    found = kind.from_pretrained(str(folder), data_name_or_path=str(data), **options).eval()
    found.bpe = Characters(None)  # the only subwords that need no files
    return found


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two models have the same weights; fairseq marks old ones by another "version"."""
    weights = [{k: v for k, v in x.items() if not k.endswith(".version")} for x in (one, other)]
    assert weights[0].keys() == weights[1].keys()
    return all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def same(ours: Any, its: Any) -> None:
    """Both interfaces compute the same in float64."""
    assert type(ours.model) is LSRobertaModel and type(ours.model.encoder) is LSRobertaEncoder
    assert not isinstance(its.model, LSRobertaModel)
    has_mask = hasattr(its.task, "mask_idx")  # a classifier's task has none
    for sentence in ("abc <mask>", "<mask>e", "a<mask>bbcd") if has_mask else ():
        found, expected = (x.fill_mask(sentence, topk=8) for x in (ours, its))
        assert [x[::2] for x in found[:4]] == [x[::2] for x in expected[:4]]
        if len(expected) == 8:  # else fairseq has dropped marks, but not their probabilities
            assert [x[1] for x in found[:4]] == pytest.approx(
                [x[1] for x in expected[:4]], abs=1e-6
            )
    with torch.no_grad(), parity.native_in_float64():
        ours.double(), its.double()
        pairs = [(x.extract_features(TOKENS),) for x in (ours, its)]
        pairs = [
            (*features, *x.extract_features(TOKENS, return_all_hiddens=True), x.model(TOKENS)[0])
            for features, x in zip(pairs, (ours, its), strict=True)
        ]
        for one, other in zip(*pairs, strict=True):
            torch.testing.assert_close(one[REAL], other[REAL], rtol=0, atol=1e-10)
        for name in its.model.classification_heads:
            one, other = (x.predict(name, TOKENS) for x in (ours, its))
            torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_masked_text(data: roberta.Data, pretrained: Path) -> None:
    same(*(load(kind, pretrained, data.text) for kind in (OurRobertaModel, RobertaModel)))


def test_subwords_are_fairseqs(data: roberta.Data, pretrained: Path) -> None:
    options = {"checkpoint_file": "checkpoint_last.pt", "data_name_or_path": data.text}
    found = OurRobertaModel.from_pretrained(pretrained, **options, bpe="characters")
    assert isinstance(found.bpe, Characters)
    found = OurRobertaModel.from_pretrained(pretrained, **options, bpe=None)
    for method in (found.encode, found.fill_mask):
        with pytest.raises(UserError, match="loaded without subwords"):
            method("a <mask> b")


def test_words_that_are_not_in_the_dictionary_are_a_warning(
    data: roberta.Data, pretrained: Path
) -> None:
    model = load(OurRobertaModel, pretrained, data.text)
    with pytest.warns(UserWarning, match="1 of the 4 source tokens is not in the dictionary"):
        assert len(model.encode("abc?")) == 6
    with pytest.warns(UserWarning, match="a few rare ones are usual"):
        model.fill_mask("ab? <mask>")


def test_a_filled_mask_keeps_the_spaces(
    data: roberta.Data, pretrained: Path, tmp_path: Path
) -> None:
    (tmp_path / "codes").write_text("#version: 0.2\na b</w>\n")
    options = {"checkpoint_file": "checkpoint_last.pt", "data_name_or_path": data.text}
    options |= {"bpe": "subword_nmt", "bpe_codes": str(tmp_path / "codes")}
    ours = OurRobertaModel.from_pretrained(pretrained, **options).eval()
    found = ours.fill_mask("a b <mask> c", topk=3)
    assert len(found) == 3
    assert [text for text, _, _ in found] == [f"a b {token} c" for _, _, token in found]
    options["data_name_or_path"] = str(data.text)
    its = RobertaModel.from_pretrained(str(pretrained), **options).eval()
    expected = its.fill_mask("a b <mask> c", topk=6)[:3]
    assert [each[2] for each in expected] == [x[2] for x in found]


def test_gpt2s_subwords_need_packages(
    pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dict.txt").write_text("13 850\n262 80\nmadeupword0000 0\n")  # as GPT-2's
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="run pip install requests regex"):
        OurRobertaModel.from_pretrained(pretrained, "checkpoint_last.pt", tmp_path)


BAD_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"nonsense": 7}, "RobertaModel has no option nonsense"),
    ({"num_labels": 2}, "RobertaModel has no option num_labels"),
    ({"encoder_layer": 2}, "no option encoder_layer: did you mean encoder_layers"),
    ({"fp16": True}, r"fp16 is not an option of RobertaModel: call half\(\) of the model"),
    ({"device": "gpu"}, 'device is gpu: use "cpu" or "cuda"'),
    ({"device": "cuda:7"}, "device is cuda:7, but"),
    ({"bpe": "gpt2"}, "has no numbers of GPT-2's subwords: instead of"),
    ({"bpe": "subword_nmt"}, "bpe_codes is missing: set it"),
    ({"bpe": "subword_nmt", "bpe_codes": "gone"}, "gone does not exist: check bpe_codes"),
]


@pytest.mark.parametrize(("options", "sentence"), BAD_ARGUMENTS)
def test_arguments_that_are_refused(
    data: roberta.Data, pretrained: Path, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        OurRobertaModel.from_pretrained(pretrained, data.text, **options)
    with pytest.raises(UserError, match=r"RobertaModel.from_pretrained\(\)"):
        OurRobertaModel(pretrained)


def test_the_arguments_of_translator(
    data: roberta.Data, pretrained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(data.text.parent)
    file = pretrained / "checkpoint_best.pt"
    places: list[tuple[Any, ...]] = [
        (pretrained,), (file,), (file, data.text), (pretrained, f"./{data.text.name}"),
        (str(pretrained), file.name, str(data.text)),
    ]  # fmt: skip
    device = torch.device("cpu")
    first, *others = (OurRobertaModel.from_pretrained(*x, device=device) for x in places)
    assert first.bpe is None and repr(first).startswith("RobertaModel(LSRobertaModel, heads=[]")
    for other in others:
        assert equal(first.model.state_dict(), other.model.state_dict())


def test_input_that_methods_refuse(data: roberta.Data, pretrained: Path, tuned: Path) -> None:
    model, classifier = (
        load(OurRobertaModel, pretrained, data.text),
        load(OurRobertaModel, tuned, data.classes),
    )
    with torch.no_grad():
        assert torch.equal(
            model.extract_features([0, 5, 2]), model.extract_features(TOKENS[0, [0, 1, 4]])
        )
    for call, sentence in (
        (lambda: model.encode(["a", "b"]), r"encode\(\) takes a text, .* not a list"),
        (lambda: model.extract_features("text"), "not numbers of tokens: pass those of encode"),
        (lambda: model.extract_features([0, 999]), "must be from 0 to"),
        (lambda: model.predict("head", TOKENS), "no classification head named head: fine-tune"),
        (lambda: classifier.predict("head", TOKENS), f"named head: use {roberta.HEAD}"),
        (lambda: model.fill_mask("no mask"), "takes a text with one <mask>"),
        (lambda: classifier.fill_mask("a <mask>"), "This is a classifier"),
    ):
        with pytest.raises(UserError, match=sentence):
            call()


def test_classes(data: roberta.Data, tuned: Path) -> None:
    ours, its = (load(kind, tuned, data.classes) for kind in (OurRobertaModel, RobertaModel))
    assert list(ours.model.classification_heads) == [roberta.HEAD]
    same(ours, its)
    tokens = ours.encode("abc", "fe")
    assert ours.decode(tokens) == ["abc", "fe"]
    assert ours.predict(roberta.HEAD, tokens).shape == (1, 2)
    # As in fairseq's examples: a label of the dictionary.
    dictionary = ours.task.label_dictionary
    best = ours.predict(roberta.HEAD, tokens).argmax().item()
    assert dictionary.string([best + dictionary.nspecial]) in ("yes", "no")


def test_a_new_head_is_trained(data: roberta.Data, pretrained: Path) -> None:
    ours = load(OurRobertaModel, pretrained, data.text)
    ours.register_classification_head("new", num_classes=3)
    ours.train()
    loss = torch.nn.functional.nll_loss(ours.predict("new", TOKENS), torch.tensor([0, 2]))
    loss.backward()
    gradients = [ours.model.classification_heads["new"].dense.weight.grad,
                 ours.model.encoder.sentence_encoder.layers[0].fc1.weight.grad]  # fmt: skip
    assert all(gradient.abs().sum() > 0 for gradient in gradients)


def test_it_is_exported_lazily() -> None:
    assert lightseq_fairseq.RobertaModel is OurRobertaModel


def test_other_models_and_dictionaries_are_refused(
    data: roberta.Data, pretrained: Path, tmp_path: Path
) -> None:
    words = "--task language_modeling --arch transformer_lm --decoder-embed-dim 16 --max-update 1"
    small = "--decoder-layers 1 --decoder-attention-heads 2 --decoder-ffn-embed-dim 16 --cpu"
    limits = "--tokens-per-sample 16 --max-tokens 64 --num-workers 0 --optimizer adam"
    line = [*words.split(), *small.split(), *limits.split()]
    succeed("train", data.text, *line, "--save-dir", tmp_path / "lm")
    with pytest.raises(UserError, match="nothing does not exist: pass the folder with the ch"):
        OurRobertaModel.from_pretrained(tmp_path / "nothing")
    with pytest.raises(UserError, match="nothing does not exist: pass the folder with the dict"):
        load(OurRobertaModel, pretrained, tmp_path / "nothing")
    with pytest.raises(UserError, match=r"dict\.txt cannot be read: .* the dictionaries"):
        load(OurRobertaModel, pretrained, tmp_path)
    with pytest.raises(UserError, match=r"nothing\.pt cannot be read: pass the folder with nothi"):
        OurRobertaModel.from_pretrained(pretrained, "nothing.pt", data.text, bpe=None)
    with pytest.raises(UserError, match="no subwords named gtp2: set bpe to None or to one of b"):
        OurRobertaModel.from_pretrained(pretrained, "model.pt", data.text, bpe="gtp2")
    with pytest.raises(UserError, match="contains no RoBERTa but the arch transformer_lm: choose"):
        load(OurRobertaModel, tmp_path / "lm", data.text)
    first, second, *others = (data.text / "dict.txt").read_text().splitlines()
    (tmp_path / "dict.txt").write_text("\n".join([second, first, *others]) + "\n")
    with pytest.raises(UserError, match="The source dictionary is not the one that the checkpoint"):
        load(OurRobertaModel, pretrained, tmp_path)


def test_files_of_fairseq_train_build_ours(
    data: roberta.Data, pretrained: Path, tmp_path: Path
) -> None:
    """With our plugins in --user-dir fairseq-train writes our names."""
    state = torch.load(pretrained / "checkpoint_last.pt", weights_only=False)
    state["cfg"]["model"].arch = state["cfg"]["model"]._name = "ls_roberta_base"
    torch.save(state, tmp_path / "model.pt")
    ours = load(RobertaModel, tmp_path, data.text, checkpoint_file="model.pt")
    same(ours, load(RobertaModel, pretrained, data.text))


def test_published_files(old: tuple[Path, Any]) -> None:
    folder, kind = old
    same(*(load(k, folder, ".", checkpoint_file="model.pt") for k in (OurRobertaModel, kind)))


def test_published_files_equal_todays(
    old: tuple[Path, Any], pretrained: Path, data: roberta.Data
) -> None:
    models = (
        load(OurRobertaModel, old[0], ".", checkpoint_file="model.pt").model,
        load(OurRobertaModel, pretrained, data.text).model,
    )
    states = [model.state_dict() for model in models]
    assert equal(*states)


def test_published_files_are_fine_tuned(
    old: tuple[Path, Any], data: roberta.Data, tuned: Path, tmp_path: Path
) -> None:
    first = roberta.tune(data.classes, old[0] / "model.pt", tmp_path / "run", *roberta.BY_ACCURACY)
    paths = (folder / "checkpoint_last.pt" for folder in (tmp_path / "run", tuned))
    models = [torch.load(path, weights_only=False)["model"] for path in paths]
    assert len(first) == 14
    assert equal(*models)


def test_commands_read_published_files(
    old: tuple[Path, Any], data: roberta.Data, tuned: Path, tmp_path: Path
) -> None:
    """A classifier in the form of fairseq 0.9, as its roberta.large.mnli is."""
    state = torch.load(tuned / "checkpoint_best.pt", weights_only=False)
    path = tmp_path / "model.pt"
    torch.save(roberta.in_old_form(state, task="sentence_prediction"), path)
    cpu = ("--cpu", "--num-workers", "0")
    with roberta.logged() as found:
        succeed("validate", data.classes, "--path", path, *cpu)
        succeed("validate", data.classes, "--path", tuned / "checkpoint_best.pt", *cpu)
    assert found[0] == found[1] and found[0]["nsentences"] == 12
    succeed("average", "--inputs", path, path, "--output", tmp_path / "mean.pt")
    for source, name in ((path, "exported.pt"), (tmp_path / "mean.pt", "mean_exported.pt")):
        succeed("export", source, "--to", "fairseq", "--output", tmp_path / name)
        with unchanged():
            exported = load(RobertaModel, tmp_path, data.classes, checkpoint_file=name)
        assert equal(exported.model.state_dict(), state["model"])


@pytest.mark.parametrize(
    "arch", ["roberta", "roberta_base", "roberta_large", "roberta_prenorm", "xlm"]
)
def test_archs(arch: str) -> None:
    assert names.ls_arch(Namespace(arch=arch)) == (f"ls_{arch}", None)
    assert names.native_name("arch", f"ls_{arch}") == arch
