"""``ls_bart`` equals fairseq's BART: archs, names, initial values, outputs, gradients, rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helpers.parity as parity
import pytest
import torch
from fairseq.models import ARCH_MODEL_INV_REGISTRY
from helpers.parity import LS, NATIVE, PAD, command_line
from torch.nn.utils.rnn import pad_sequence

from lightseq_fairseq.layers import draw_rng
from lightseq_fairseq.memory.packing import Granularity
from lightseq_fairseq.memory.parameters import with_spare_rows
from lightseq_fairseq.plugins import bart
from lightseq_fairseq.training.batch import packing

ARCHS = ARCH_MODEL_INV_REGISTRY["bart"]
SIZES = {f"{side}_{size}": None for side in ("encoder", "decoder")
         for size in ("embed_dim", "ffn_embed_dim", "attention_heads")}  # fmt: skip
EXACT = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return parity.write_corpus(tmp_path_factory.mktemp("corpus"))


def build(data: Path, systems: parity.Systems, **flags: Any) -> tuple[Any, Any]:
    argv = command_line(data, systems, **{"arch": "bart_base", **flags})
    task, model, _ = parity.build(parity.parse(argv))
    return task, model


def assert_same(ours: Any, native: Any) -> None:
    found, expected = ours.state_dict(), native.state_dict()
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("arch", ARCHS)
def test_archs_are_fairseqs(corpus: Path, arch: str) -> None:
    flags = {**SIZES, "encoder_layers": None, "decoder_layers": None, "dropout": None}
    ours, native = (
        vars(parity.parse(command_line(corpus, systems, **{**flags, "arch": arch})).model)
        for systems in (LS, NATIVE)
    )
    assert ours["arch"] == f"ls_{native['arch']}"
    changed = {name for name in native if ours[name] != native[name]}
    assert changed == {"arch", "_name", "optimizer", "criterion"}


VARIANTS: dict[str, dict[str, Any]] = {
    "bart": {},
    "mbart": {"arch": "mbart_base", **parity.PRE_NORM},
    "mbart-wmt20": {"arch": "mbart_base_wmt20", "activation_fn": "relu"},
    "no-positions": {"no_token_positional_embeddings": True, "layernorm_embedding": True},
}


@pytest.mark.parametrize("flags", VARIANTS.values(), ids=VARIANTS)
def test_same_seed_same_model(corpus: Path, flags: dict[str, Any]) -> None:
    assert_same(*(build(corpus, s, seed=42, **flags)[1] for s in (LS, NATIVE)))


@pytest.mark.parametrize("flags", VARIANTS.values(), ids=VARIANTS)
def test_padded_interface(corpus: Path, flags: dict[str, Any]) -> None:
    task, ours = build(corpus, LS, **flags)
    native = build(corpus, NATIVE, **flags)[1].double()
    dataset = task.dataset("train")
    sample = dataset.collater([dataset[i] for i in range(8)])
    inputs = sample["net_input"]
    real = inputs["prev_output_tokens"].ne(PAD)
    assert not real.all()
    ours = ours.double()
    with parity.native_in_float64():
        for options in ({"features_only": True}, {}):
            found, expected = (model(**inputs, **options)[0] for model in (ours, native))
            torch.testing.assert_close(found[real], expected[real], **EXACT)
        packed = ours(**inputs, packed=True)[0]
        torch.testing.assert_close(packed, found[real], **EXACT)
        for logits in (found, expected):
            (logits[real].square().sum() / 100).backward()
    others = dict(native.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, others[name].grad, **EXACT)


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return parity.write_classes(tmp_path_factory.mktemp("classes"))


CLASSES = {**parity.CLASSES, "arch": "bart_base", "add_prev_output_tokens": True,
           "decoder_layers": 2, "decoder_attention_heads": 2, "pooler_dropout": 0.0}  # fmt: skip
HEAD = "sentence_classification_head"


@pytest.mark.parametrize("tied", [True, False])
def test_heads_of_sentences(classes: Path, tied: bool) -> None:
    models = []
    for systems in (LS, NATIVE):
        cfg = parity.parse(command_line(classes, systems, **CLASSES))
        cfg.model.share_all_embeddings = cfg.model.share_decoder_input_output_embed = tied
        task, model, _ = parity.build(cfg)
        models.append(model)
    assert_same(*models)
    ours, native = (model.double() for model in models)
    dataset = task.dataset("train")
    sample = dataset.collater([dataset[i] for i in range(8)])
    assert sample["net_input"]["src_tokens"].eq(PAD).any()
    batch = packing(dataset, Granularity(64)).__getitems__(range(8)).open()
    assert len(batch["source"]["tokens"]) % 64 == 0  # rows and sentences that fill it up
    with parity.native_in_float64():
        found, expected = (
            model(**sample["net_input"], classification_head_name=HEAD)[0]
            for model in (ours, native)
        )
        torch.testing.assert_close(found, expected, **EXACT)
        packed = ours.class_outputs(batch, draw_rng(), HEAD)
        torch.testing.assert_close(packed[:8], expected, **EXACT)
        for outputs in (packed[:8], expected):
            outputs.square().sum().backward()
    unused = {id(parameter) for parameter in ours.unused_by(HEAD)}
    assert len(unused) == (0 if tied else 1)
    others = dict(native.named_parameters())
    for name, parameter in ours.named_parameters():
        assert (others[name].grad is None) == (id(parameter) in unused) == (parameter.grad is None)
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, others[name].grad, **EXACT)
    assert [n for n, p in ours.named_parameters() if id(p) in map(id, ours.unused_by(None))] == [
        name for name in others if name.startswith("classification_heads.")
    ]


def test_a_full_bucket_and_a_truncated_sentence(classes: Path) -> None:
    """A head reads the last </s> that is there."""
    task, ours = build(classes, LS, **CLASSES)
    dataset = task.dataset("train")
    batch = packing(dataset).__getitems__(range(4))
    source = batch.open()["source"]
    assert len(source["tokens"]) == source.segments.cu_seqlens[-1]  # no row fills it up
    source["tokens"][-1] = 9
    sentences = source["tokens"].split(source.segments.cu_seqlens.diff().tolist())
    tokens, previous = (
        pad_sequence([x.roll(by) for x in sentences], batch_first=True, padding_value=PAD)
        for by in (0, 1)
    )
    with torch.no_grad():
        expected = ours.eval()(tokens, None, previous, classification_head_name=HEAD)[0]
        found = ours.class_outputs(batch.open(), draw_rng(), HEAD)
    torch.testing.assert_close(found[:4], expected, rtol=1e-5, atol=1e-6)


def test_an_odd_vocabulary_has_spare_rows(corpus: Path) -> None:
    model = build(corpus, LS)[1]
    for changed in (model, model.double()):
        weight = changed.decoder.output_projection.weight
        assert weight is changed.encoder.embed_tokens.weight
        whole = with_spare_rows(weight)
        assert whole is not None and len(whole) == 104 and not whole[len(weight) :].any()


DUMMIES = ["madeupword0001", "madeupword0002"]


@pytest.mark.parametrize(
    ("kept", "more"),
    [
        ([], ["<mask>"]),  # as in fairseq
        (["madeupword0000"], [*DUMMIES, "<mask>"]),  # bart.base
        (["madeupword0000", "<mask>"], [*DUMMIES, "<mask>"]),  # its <mask> moves
        (["madeupword0000", "<mask>"], ["<mask>"]),
    ],
)
def test_rows_follow_the_words(
    corpus: Path, kept: list[str], more: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = parity.VOCABULARY + 1 + len(DUMMIES) + 1, parity.VOCABULARY + 1
    monkeypatch.setattr(bart, "_BASE_ROWS", sizes[0])
    monkeypatch.setattr(bart, "_BASE_WORDS", sizes[1])
    task, model = build(corpus, LS)
    names = [name for name, x in model.state_dict().items() if len(x) == parity.VOCABULARY]
    words = task.source_dictionary
    for word in kept:
        words.add_symbol(word)
    before = [*(word for word in words.symbols if word != "<mask>"), *more]
    table = torch.randn(len(before), 16)
    state = {**model.state_dict(), **dict.fromkeys(names, table)}
    model.upgrade_state_dict_named(state, "")
    assert len(names) == 3
    for name in names:
        assert torch.equal(state[name], table[[before.index(word) for word in words.symbols]])


@pytest.mark.parametrize("kept", [[], ["madeupword0000"]])
def test_a_file_without_the_words_is_not_cut(corpus: Path, kept: list[str]) -> None:
    """Another dictionary is an error when the file is loaded, also if dummies fill it up."""
    task, model = build(corpus, LS)
    for word in kept:
        task.source_dictionary.add_symbol(word)
    state = {name: torch.cat([x, x[:9]]) if len(x) == parity.VOCABULARY else x
             for name, x in model.state_dict().items()}  # fmt: skip
    rows = {name: len(x) for name, x in state.items()}
    model.upgrade_state_dict_named(state, "")
    assert {name: len(x) for name, x in state.items()} == rows
    with pytest.raises(RuntimeError, match=r"size mismatch for encoder\.embed_tokens"):
        model.load_state_dict(state)
