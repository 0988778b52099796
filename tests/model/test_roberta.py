"""``ls_roberta`` equals fairseq's RoBERTa: archs, names, initial values, outputs, gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helpers.parity as parity
import pytest
import torch
from fairseq.models import ARCH_MODEL_INV_REGISTRY
from fairseq.models.roberta import RobertaHubInterface
from helpers.parity import LS, MASKED, NATIVE, PAD, command_line

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.memory.parameters import as_one, with_spare_rows

ARCHS = ARCH_MODEL_INV_REGISTRY["roberta"]
VOCABULARY = parity.VOCABULARY + 1  # <mask>: no multiple of 8


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return parity.write_classes(tmp_path_factory.mktemp("classes"))


def build(data: Path, systems: parity.Systems, **flags: Any) -> tuple[Any, Any]:
    argv = command_line(data, systems, **{**MASKED, **flags})
    task, model, _ = parity.build(parity.parse(argv))
    return task, model


def pair(data: Path, **flags: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Our model and fairseq's with the same weights in float64, and a batch with pads."""
    flags = {"sample_break_mode": "eos", "mask_prob": 0.3, **flags}
    task, ours = build(data, LS, **flags)
    dataset = task.dataset("train")
    sample = dataset.collater([dataset[i] for i in range(8)])
    assert sample["net_input"]["src_tokens"].eq(PAD).any()
    return ours.double(), build(data, NATIVE, **flags)[1].double(), sample


def assert_same(ours: Any, native: Any) -> None:
    found, expected = ours.state_dict(), native.state_dict()
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


SIZES = {
    "encoder_embed_dim": None, "encoder_ffn_embed_dim": None, "encoder_attention_heads": None,
}  # fmt: skip


@pytest.mark.parametrize("arch", ARCHS)
def test_same_seed_same_model(text: Path, arch: str) -> None:
    flags = {**SIZES, "arch": arch, "seed": 42, "encoder_layers": 1}
    assert_same(*(build(text, s, **flags)[1] for s in (LS, NATIVE)))


VARIANTS: dict[str, dict[str, Any]] = {
    "post-norm": {},
    "pre-norm": {"arch": "roberta_prenorm"},
    "pre-norm-layernorm-embedding": {
        "encoder_normalize_before": True, "layernorm_embedding": True,
    },
    "untied": {"untie_weights_roberta": True},
    "relu": {"activation_fn": "relu"},
    "layers-to-keep": {"encoder_layers": 4, "encoder_layers_to_keep": "0,2,3"},
}  # fmt: skip


@pytest.mark.parametrize("flags", VARIANTS.values(), ids=VARIANTS)
def test_same_seed_same_variant(text: Path, flags: dict[str, Any]) -> None:
    assert_same(*(build(text, s, **flags)[1] for s in (LS, NATIVE)))


def test_same_seed_same_classification_head(classes: Path) -> None:
    flags = {**parity.CLASSES, "mask_prob": None}
    ours, native = (build(classes, s, **flags)[1] for s in (LS, NATIVE))
    assert_same(ours, native)
    assert "classification_heads.sentence_classification_head.dense.weight" in ours.state_dict()


@pytest.mark.parametrize("arch", ARCHS)
def test_architectures_are_fairseqs(text: Path, arch: str) -> None:
    flags = {**MASKED, **SIZES, "encoder_layers": None, "attention_dropout": None, "dropout": None}
    ours, native = (
        vars(parity.parse(command_line(text, systems, **{**flags, "arch": arch})).model)
        for systems in (LS, NATIVE)
    )
    assert ours["arch"] == f"ls_{native['arch']}"
    changed = {name for name in native if ours[name] != native[name]}
    assert changed == {"arch", "_name", "optimizer", "criterion"}


@pytest.mark.parametrize("flags", VARIANTS.values(), ids=VARIANTS)
def test_padded_interface(text: Path, flags: dict[str, Any]) -> None:
    ours, native, sample = pair(text, **flags)
    inputs, masked = sample["net_input"], sample["target"].ne(PAD)
    real = inputs["src_tokens"].ne(PAD)
    exact = {"rtol": 1e-12, "atol": 1e-12}
    with parity.native_in_float64():
        for options in ({}, {"features_only": True}, {"return_all_hiddens": True}):
            (found, extra), (expected, of_native) = (m(**inputs, **options) for m in (ours, native))
            torch.testing.assert_close(found[real], expected[real], **exact)
            assert found.shape == expected.shape
            states, expected_states = (e["inner_states"] or [] for e in (extra, of_native))
            assert len(states) == len(expected_states)
            for state, other in zip(states, expected_states, strict=True):
                torch.testing.assert_close(
                    state.transpose(0, 1)[real], other.transpose(0, 1)[real], **exact
                )
        assert states and masked.any()
        logits = [model(**inputs, masked_tokens=masked)[0] for model in (ours, native)]
        torch.testing.assert_close(*logits, **exact)
        assert logits[0].shape == (int(masked.sum()), VOCABULARY)
        for found in logits:
            (found.square().sum() / 100).backward()
    expected = dict(native.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, **exact)


@torch.no_grad()
def test_features_from_the_block_of_graphs(text: Path) -> None:
    """Where nothing is captured, the encoder reads the same block."""
    _, ours = build(text, LS)
    ours = ours.double().eval()
    pads = torch.tensor([[0, 5, 7, 2, PAD], [PAD, 0, PAD, 8, 2]])
    long = torch.randint(4, parity.VOCABULARY, (90, 12))
    long[::3, 7:] = PAD
    for tokens in (pads, long, pads[:, :1], pads[:0], pads[:0, :0], pads.new_full((2, 3), PAD)):
        expected = ours(tokens, features_only=True)[0]
        found = ours.encoder.graphs.features(ours.encoder.sentence_encoder, tokens)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        assert not found[tokens == PAD].any()


def test_heads_of_sentences(text: Path) -> None:
    ours, native, sample = pair(text, pooler_dropout=0.0)
    for model in (ours, native):
        torch.manual_seed(3)
        model.register_classification_head("kind", num_classes=3)
        model.double()
    tokens = sample["net_input"]["src_tokens"]
    with parity.native_in_float64():
        found, expected = (m(tokens, classification_head_name="kind")[0] for m in (ours, native))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        for loss in (found, expected):
            loss.square().sum().backward()
    others = dict(native.named_parameters())
    without = set()
    for name, parameter in ours.named_parameters():
        if others[name].grad is None:
            assert parameter.grad is None
            without.add(name)
        else:
            torch.testing.assert_close(parameter.grad, others[name].grad, rtol=1e-12, atol=1e-12)
    assert without == {n for n in others if n.startswith("encoder.lm_head")}
    assert {id(p) for p in ours.unused_by("kind")} == {
        id(p) for n, p in ours.named_parameters() if n in without
    }
    assert [n for n, p in ours.named_parameters() if id(p) in map(id, ours.unused_by(None))] == [
        n for n in others if n.startswith("classification_heads.")
    ]


def test_hub_interface(text: Path) -> None:
    task, ours = build(text, LS)
    native = build(text, NATIVE)[1]
    cfg = parity.parse(command_line(text, LS, **MASKED))
    found = []
    tokens = torch.tensor([0, 5, task.mask_idx, 7, 2])
    for model in (ours, native):
        hub = RobertaHubInterface(cfg, task, model).double().eval()
        torch.manual_seed(5)
        hub.register_classification_head("kind", num_classes=2)
        hub.double()
        with torch.no_grad(), parity.native_in_float64():
            found.append(
                [hub.extract_features(tokens), hub.predict("kind", tokens),
                 *hub.extract_features(tokens, return_all_hiddens=True)]
            )  # fmt: skip
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


def test_layout_of_parameters(text: Path) -> None:
    _, model = build(text, LS)
    model.register_classification_head("kind", num_classes=3)
    for changed in (model, model.double()):
        for group in changed.fused_groups():
            assert as_one(group).data_ptr() == group[0].data_ptr()
        head = changed.encoder.lm_head
        assert head.weight is changed.encoder.sentence_encoder.embed_tokens.weight
        for parameter in (head.weight, head.bias):
            whole = with_spare_rows(parameter)
            assert whole is not None
            assert len(whole) == 104 > len(parameter) == VOCABULARY
            assert not whole[VOCABULARY:].any()


def test_logits_are_views_and_gradients_find_their_spare_columns(text: Path) -> None:
    _, model = build(text, LS)
    logits = model(torch.tensor([[0, 5, 7, 2]]))[0]
    assert logits.shape[2] == VOCABULARY and logits.stride(1) == 104


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        ({"quant_noise_pq": 0.1}, "--quant-noise-pq"),
        ({"spectral_norm_classification_head": True}, "--spectral-norm-classification-head"),
        ({"mha_reg_scale_factor": 0.1}, "--mha-reg-scale-factor"),
        ({"ffn_reg_scale_factor": 0.1}, "--ffn-reg-scale-factor"),
        ({"mha_heads_to_keep": 1}, "--mha-heads-to-keep"),
        ({"ffn_blocks_to_remove": 1}, "--ffn-blocks-to-remove"),
        ({"activation_fn": "tanh"}, "--activation-fn tanh"),
    ],
)
def test_what_it_cannot_honour_is_refused(text: Path, flags: dict[str, Any], refused: str) -> None:
    with pytest.raises(UserError, match=rf"^ls_roberta does not support {refused} .*--native"):
        build(text, LS, **flags)
