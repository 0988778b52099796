"""lightseq-export: stock fairseq, CTranslate2 and safetensors load the exports, and agree.

The tests import the optional packages themselves, because a machine that runs only the GPU tests
may not have them.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import helpers.digits as digits
import pytest
import torch
from helpers.cli_runs import SMALL, binarise, run, succeed
from helpers.golden import matches, refusals
from helpers.loaded import logits
from helpers.training_runs import in_a_fork, limit_files

# isort: split
from fairseq import checkpoint_utils
from fairseq.dataclass.configs import GenerationConfig
from fairseq.models.transformer import TransformerModel

State = dict[str, Any]
Translations = list[tuple[list[str], float]]  # words and the sum of their log-probabilities
SPLITS = ("valid", "test")


@pytest.fixture(scope="module")
def toy() -> digits.Toy:
    return digits.toy()


@pytest.fixture(scope="module")
def exported(toy: digits.Toy, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The export of the toy model with this --to; the dictionaries are found in the folder used in
    training."""
    folder = tmp_path_factory.mktemp("exported")

    def get(to: str, *options: str) -> Path:
        output = folder / "-".join([to, *options])
        if not output.exists():
            printed = succeed("export", toy.paths[-1], "--to", to, "--output", output, *options)
            assert printed == f"wrote {output}\n"
        return output

    return get


def read(path: Path) -> State:
    with torch.serialization.safe_globals([Namespace]):
        state: State = torch.load(path)
    return state


def by_fairseq(path: Path, beam: int, lenpen: float) -> Translations:
    """Translations by stock fairseq of the held-out sentences, also of those with unknown words."""
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(path)])
    assert type(model) is TransformerModel
    generator = task.build_generator([model], GenerationConfig(beam=beam, lenpen=lenpen))
    found: Translations = []
    for split in SPLITS:
        task.load_dataset(split)
        batches = task.get_batch_iterator(task.dataset(split), max_tokens=800)
        numbered = {}
        for sample in batches.next_epoch_itr(shuffle=False):
            for n, (best, *_) in zip(
                sample["id"].tolist(), task.inference_step(generator, [model], sample), strict=True
            ):
                words = task.target_dictionary.string(best["tokens"], extra_symbols_to_ignore=())
                numbered[n] = (words.split(), float(best["positional_scores"].sum()))
        found += [numbered[n] for n in sorted(numbered)]
    return found


class CTranslate2:
    """An exported model, and its translations of the sentences of ``by_fairseq``."""

    def __init__(self, model: Path, data: Path) -> None:
        from ctranslate2 import Translator

        self.translator = Translator(str(model), inter_threads=1, intra_threads=1)
        self.lines = [
            line.split()
            for split in SPLITS
            for line in (data / f"{split}.src-tgt.src").read_text().splitlines()
        ]

    def translations(self, beam: int, lenpen: float) -> list[list[str]]:
        options = {"beam_size": beam, "length_penalty": lenpen, "max_decoding_length": 200}
        results = self.translator.translate_batch(self.lines, **options)
        return [result.hypotheses[0] for result in results]

    def scored(self, shortest: int) -> Translations:
        """Greedy translations of at least so many words; the score is a sum with lenpen 0."""
        options = {"beam_size": 1, "length_penalty": 0, "min_decoding_length": shortest}
        results = self.translator.translate_batch(self.lines, return_scores=True, **options)
        return [(result.hypotheses[0], result.scores[0]) for result in results]

    def scores(self, translations: list[list[str]]) -> list[float]:
        """Sums of log-probabilities."""
        results = self.translator.score_batch(self.lines, translations)
        return [sum(result.log_probs) for result in results]


def test_fairseqs_file_is_native_and_complete(toy: digits.Toy, exported: Any) -> None:
    state, source = read(exported("fairseq")), read(toy.paths[-1])
    assert state["model"].keys() == toy.native.state_dict().keys() == source["model"].keys()
    for name, value in toy.ls.state_dict().items():
        assert torch.equal(state["model"][name], value) or "_float_tensor" in name, name
    weights = {value.data_ptr(): value for value in state["model"].values()}
    assert all(v.untyped_storage().nbytes() == v.nbytes for v in weights.values())
    assert "ls_" not in str({**state, "model": None}).replace("cells_", "")
    assert state["last_optimizer_state"] is None
    assert state["optimizer_history"] == source["optimizer_history"]
    assert state["cfg"]["model"].task == "translation"


@pytest.mark.parametrize(("beam", "lenpen"), [(1, 1.0), (4, 1.0), (4, 0.6)])
def test_ctranslate2_translates_as_fairseq(
    toy: digits.Toy, exported: Any, beam: int, lenpen: float
) -> None:
    """With the same limit of length. Each of the two searches may end at a translation that the
    other one would have replaced by a slightly better one."""
    found = by_fairseq(exported("fairseq"), beam, lenpen)
    words, scores = [words for words, _ in found], [score for _, score in found]
    model = CTranslate2(exported("ctranslate2"), toy.folder)
    assert len(words) == 2 * digits.SENTENCES
    assert len(set(map(tuple, words))) > digits.SENTENCES
    again = torch.tensor(model.scores(words))
    torch.testing.assert_close(again, torch.tensor(scores), rtol=0, atol=1e-4)

    others = model.translations(beam, lenpen)
    assert agreement(others, words) >= (1.0 if beam == 1 else 0.99)
    for mine, score, other, its in zip(words, scores, others, model.scores(others), strict=True):
        behind = score / (len(mine) + 1) ** lenpen - its / (len(other) + 1) ** lenpen
        assert other == mine or behind < 1e-3, (mine, other)


def test_scores_of_ctranslate2s_search_are_fairseqs_without_a_least_length(
    toy: digits.Toy, exported: Any
) -> None:
    """docs/checkpoints.md: by default it removes </s> before the softmax of the first step."""
    found = by_fairseq(exported("fairseq"), 1, 1.0)
    model = CTranslate2(exported("ctranslate2"), toy.folder)
    for shortest, agrees in ((0, True), (1, False)):
        pairs = list(zip(model.scored(shortest), found, strict=True))
        same = [(score, its) for (words, score), (others, its) in pairs if words == others]
        assert len(same) >= 0.99 * len(found)
        assert torch.allclose(*torch.tensor(same).T, rtol=0, atol=3e-5) is agrees
        # fairseq finds no empty translation, because its --min-len is 1.
        assert all(words == others or words == [] for (words, _), (others, _) in pairs)


def agreement(found: list[list[str]], expected: list[list[str]]) -> float:
    """The share of sentences with equal translations."""
    return sum(map(list.__eq__, found, expected)) / len(expected)


def test_ctranslate2s_own_converter_takes_fairseqs_file(
    toy: digits.Toy, exported: Any, tmp_path: Path
) -> None:

    own = by_its_own_converter(toy, exported, tmp_path / "own")
    assert own == contents(exported("ctranslate2"))


@pytest.mark.parametrize(("quantization", "size"), [("float16", 0.55), ("int8", 0.5)])
def test_quantised(
    toy: digits.Toy, exported: Any, tmp_path: Path, quantization: str, size: float
) -> None:
    """Translations with int8 depend on the CPU, but the exported file does not."""
    full = exported("ctranslate2")
    small = exported("ctranslate2", "--quantization", quantization)
    own = by_its_own_converter(toy, exported, tmp_path / "own", quantization=quantization)
    assert own == contents(small)
    of_full, of_small = (len(contents(path)["model.bin"]) for path in (full, small))
    assert of_small < size * of_full
    expected, found = (CTranslate2(path, toy.folder).translations(4, 1.0) for path in (full, small))
    assert len(found) == len(expected)
    if quantization == "float16":
        assert agreement(found, expected) >= 0.97


def by_its_own_converter(
    toy: digits.Toy, exported: Any, folder: Path, **options: str
) -> dict[str, bytes]:
    """The model that CTranslate2's own converter makes from our export to fairseq."""
    from ctranslate2.converters import FairseqConverter

    # The converter's --unsafe_deserialization does this; without it, it cannot read fairseq
    # checkpoints.
    with torch.serialization.safe_globals([Namespace]):
        FairseqConverter(str(exported("fairseq")), str(toy.folder)).convert(str(folder), **options)
    return contents(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_safetensors(toy: digits.Toy, exported: Any) -> None:
    from safetensors.torch import load_model

    folder = exported("safetensors")
    names = ["config.json", "dict.src.txt", "dict.tgt.txt", "model.safetensors"]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1
    config = json.loads((folder / "config.json").read_text())
    assert config["arch"] == config["options"]["arch"] == "transformer"
    for side, language in (("source", "src"), ("target", "tgt")):
        name = config["dictionaries"][side]
        assert (folder / name).read_bytes() == (toy.folder / f"dict.{language}.txt").read_bytes()
    model = TransformerModel.build_model(Namespace(**config["options"]), toy.task)
    load_model(model, str(folder / "model.safetensors"))
    expected = toy.native.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]) or "_float_tensor" in name, name


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return binarise(tmp_path_factory.mktemp("corpus"))


def test_a_run_that_found_its_languages_in_the_data(data: Path, tmp_path: Path) -> None:
    arch = ("--arch", "ls_transformer_tiny", "--optimizer", "ls_adam", "--lr", "0.01", "--bf16")
    succeed("train", data, *arch, *SMALL, "--save-dir", tmp_path / "run")
    source = tmp_path / "run" / "checkpoint_last.pt"
    for to in ("ctranslate2", "safetensors", "fairseq"):
        succeed("export", source, "--to", to)
    vocabulary = tmp_path / "run" / "checkpoint_last-ctranslate2" / "source_vocabulary.json"
    assert "w7" in json.loads(vocabulary.read_text())
    assert (tmp_path / "run" / "checkpoint_last-safetensors" / "dict.en.txt").is_file()
    output = tmp_path / "run" / "checkpoint_last-fairseq.pt"
    assert torch.equal(logits(output, ls=False), logits(source, ls=False))
    # fairseq's own training can resume from it.
    native = ("--native", "--arch", "transformer_tiny", "--optimizer", "adam", "--lr", "0.01")
    on = tmp_path / "on"
    succeed("train", data, *native, *SMALL, "--restore-file", output, "--save-dir", on,
            "--max-update", "5")  # fmt: skip
    counts = [
        entry["num_updates"] for entry in read(on / "checkpoint_last.pt")["optimizer_history"]
    ]
    assert counts == [3, 5]


def test_a_run_with_eval_bleu(data: Path, tmp_path: Path) -> None:
    arch = ("--arch", "ls_transformer_tiny", "--optimizer", "ls_adam", "--lr", "0.01")
    bleu = ("--eval-bleu", "--eval-bleu-args", '{"beam": 1, "max_len_b": 5}')
    succeed("train", data, *arch, *bleu, *SMALL, "--save-dir", tmp_path)
    with pytest.raises(UnpicklingError, match="numpy"):  # BLEU's counts
        read(tmp_path / "checkpoint_best.pt")
    average = tmp_path / "average.pt"
    succeed("average", "--inputs", tmp_path / "checkpoint_best.pt", tmp_path / "checkpoint_last.pt",
            "--output", average)  # fmt: skip
    for source in (tmp_path / "checkpoint_best.pt", tmp_path / "checkpoint_last.pt", average):
        for to in ("ctranslate2", "safetensors", "fairseq"):
            succeed("export", source, "--to", to)
    again = tmp_path / "average-fairseq.pt"
    assert torch.equal(logits(again, ls=False), logits(average, ls=False))
    succeed("export", again, "--to", "ctranslate2", "--output", tmp_path / "again")
    of_average, of_again = (
        (tmp_path / name / "model.bin").read_bytes() for name in ("average-ctranslate2", "again")
    )
    assert of_average == of_again


@pytest.mark.parametrize(
    "flags",
    [
        "--encoder-normalize-before --decoder-normalize-before --activation-fn gelu "
        "--encoder-learned-pos --decoder-learned-pos --decoder-layers 2",
        "--layernorm-embedding --no-scale-embedding --activation-fn gelu_accurate "
        "--share-decoder-input-output-embed --decoder-embed-dim 32 --decoder-output-dim 32",
    ],
    ids=["pre-norm", "post-norm"],
)
def test_ctranslate2_computes_other_models_too(data: Path, tmp_path: Path, flags: str) -> None:
    from ctranslate2 import Translator

    arch = ("--arch", "ls_transformer_tiny", "--optimizer", "ls_adam", "--lr", "0.1")
    succeed("train", data, *arch, *SMALL, *flags.split(), "--save-dir", tmp_path)
    source = tmp_path / "checkpoint_last.pt"
    succeed("export", source, "--to", "ctranslate2")
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(source)])
    tokens = torch.randint(4, 24, (2, 9), generator=torch.Generator().manual_seed(1))
    tokens[:, -1] = task.source_dictionary.eos()
    with torch.no_grad():
        scores = model.eval()(tokens[:1], torch.tensor([9]), tokens[1:].roll(1))[0][0]
    expected = scores.log_softmax(-1).gather(1, tokens[1][:, None])[:, 0]
    words = [
        [[words[i] for i in row[:-1].tolist()]]
        for words, row in zip((task.source_dictionary, task.target_dictionary), tokens, strict=True)
    ]
    translator = Translator(str(tmp_path / "checkpoint_last-ctranslate2"))
    (found,) = translator.score_batch(*words)
    torch.testing.assert_close(torch.tensor(found.log_probs), expected, rtol=0, atol=1e-5)
    assert expected.std() > 0.1


def test_an_old_checkpoint_gets_todays_names(toy: digits.Toy, tmp_path: Path) -> None:
    state = read(toy.paths[-1])
    args = state.pop("cfg")["model"]
    args.data = ["/gone"]  # a list, as in old checkpoints
    args.encoder_embed_path = "/gone/too"
    del args.task, args.encoder_learned_pos
    expected, model = state["model"], dict(state["model"])
    for name in expected:
        block, found, kind = name.rpartition("q_proj.")
        if found and "self_attn" in block:
            parts = [model.pop(f"{block}{p}_proj.{kind}") for p in "qkv"]
            model[f"{block}in_proj_{kind}"] = torch.cat(parts)
    path = tmp_path / "old.pt"
    state["optimizer_history"][0]["criterion_name"] = "CrossEntropyCriterion"
    torch.save({**state, "args": args, "model": {n: v.half() for n, v in model.items()}}, path)

    succeed("export", path, "--to", "fairseq", "--data", toy.folder)
    exported = read(tmp_path / "old-fairseq.pt")
    assert exported["args"].task == "translation"
    assert exported["model"].keys() == expected.keys()
    for name, value in exported["model"].items():
        assert value.dtype == torch.float32
        assert torch.equal(value, expected[name].half().float()) or "_float_tensor" in name, name
    succeed("export", path, "--to", "ctranslate2", "--data", toy.folder)
    assert (tmp_path / "old-ctranslate2" / "model.bin").is_file()


def of_arch(state: State) -> None:
    state["cfg"]["model"].arch = "fconv"


def of_dataclass(state: State) -> None:
    state["cfg"]["model"] = {"_name": "lstm_lm", "decoder_layers": 6}


def without_options(state: State) -> None:
    del state["cfg"]


def deeper(state: State) -> None:
    state["cfg"]["model"].encoder_layers += 1


def of_task(state: State) -> None:
    state["cfg"]["model"].task = "multilingual_translation"


def without_languages(state: State) -> None:
    for options in (vars(state["cfg"]["model"]), state["cfg"]["task"]):
        options["source_lang"] = options["target_lang"] = None


def mixed(state: State) -> None:
    """Pre-norm encoder and post-norm decoder, which fairseq supports and CTranslate2 does not."""
    state["cfg"]["model"].encoder_normalize_before = True
    for kind in ("weight", "bias"):
        state["model"][f"encoder.layer_norm.{kind}"] = torch.ones(64)


def silu(state: State) -> None:
    state["cfg"]["model"].activation_fn = "silu"


def original_lightseq(state: State) -> None:
    state["model"] = {"encoder.layers.0.para": torch.ones(3)}


KINDS = (of_arch, of_dataclass, without_options, deeper, of_task, without_languages, mixed)
CHANGES = {change.__name__: change for change in (*KINDS, silu, original_lightseq)}


@pytest.mark.parametrize(("line", "sentence"), refusals(__file__, "test_export"))
def test_what_cannot_be_exported_is_refused_and_nothing_written(
    toy: digits.Toy, tmp_path: Path, line: str, sentence: str
) -> None:
    change, *words = line.format(tmp_path).split()
    path = tmp_path / "changed.pt"
    state = read(toy.paths[-1])
    if change in CHANGES:
        CHANGES[change](state)
    if change == "text":
        path.write_text("no checkpoint")
    elif change != "none":
        torch.save(state["model"] if change == "weights" else state, path)
    for folder in ("other", "short", "broken", "empty"):
        (tmp_path / folder).mkdir()
        for side in ("src", "tgt") if folder != "empty" else ():
            shutil.copy(toy.folder / f"dict.{side}.txt", tmp_path / folder)
    source = (tmp_path / "other" / "dict.src.txt").read_text()
    (tmp_path / "other" / "dict.src.txt").write_text(source.replace("zwei", "zwo"))
    (tmp_path / "short" / "dict.tgt.txt").write_text("".join(f"{n} 1\n" for n in range(9)))
    (tmp_path / "broken" / "dict.src.txt").write_bytes(source.encode("latin-1"))
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    result = run("export", path, *words)
    assert result.exit_code == 2, result.exception
    assert matches(result.stderr, f"lightseq-export: error: {sentence}\n")
    assert result.stderr.count("\n") == 1
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    assert len(list(tmp_path.iterdir())) == 4 + path.exists()


@pytest.mark.parametrize("to", ["fairseq", "ctranslate2", "safetensors"])
def test_a_full_disk(toy: digits.Toy, tmp_path: Path, to: str) -> None:
    def work() -> None:
        limit_files(20_000, killed=False)
        result = run("export", toy.paths[-1], "--to", to, "--output", tmp_path / "out")
        assert result.exit_code == 2
        found = re.fullmatch(
            rf"lightseq-export: error: Cannot write {tmp_path}/\S+ \(.*File too large.*\): .*\n",
            result.stderr,
        )
        assert found is not None, result.stderr

    assert in_a_fork(work) == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("package", ["ctranslate2", "safetensors"])
def test_a_missing_package(
    toy: digits.Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    result = run("export", toy.paths[-1], "--to", package, "--output", tmp_path / "out")
    assert result.exit_code == 2
    assert f"error: --to {package} needs a package that is not installed" in result.stderr
    assert f"run pip install {package}.\n" in result.stderr
    assert not list(tmp_path.iterdir())
