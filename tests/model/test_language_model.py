"""``ls_transformer_lm`` equals fairseq's language model: archs, names, initial values, outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helpers.parity as parity
import pytest
import torch
from fairseq.models import ARCH_MODEL_INV_REGISTRY
from helpers.parity import LS, NATIVE, PAD, TEXT, command_line
from omegaconf import OmegaConf

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.memory.parameters import as_one, flat_buffers, with_spare_rows

SMALL = {**TEXT, "decoder_layers": 2, "decoder_attention_heads": 2}
ARCHS = ARCH_MODEL_INV_REGISTRY["transformer_lm"]
BANDS = {"adaptive_input_cutoff": "20,50", "adaptive_softmax_cutoff": "20,50"}


def build(text: Path, systems: parity.Systems, **flags: Any) -> tuple[Any, Any]:
    task, model, _ = parity.build(parity.parse(command_line(text, systems, **{**SMALL, **flags})))
    return task, model


def pair(text: Path, **flags: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Our model and fairseq's with the same weights in float64, and a batch with pads."""
    flags = {"sample_break_mode": "eos", "dropout": 0.0, **flags}
    task, ours = build(text, LS, **flags)
    dataset = task.dataset("train")
    inputs = dataset.collater([dataset[i] for i in range(8)])["net_input"]
    assert inputs["src_tokens"].eq(PAD).any()
    return ours.double(), build(text, NATIVE, **flags)[1].double(), inputs


@pytest.mark.parametrize("arch", ARCHS)
def test_same_seed_same_model(text: Path, arch: str) -> None:
    flags = {"arch": arch, "seed": 42}
    if arch.endswith("wiki103"):
        flags |= {**BANDS, "criterion": "adaptive_loss", "ddp_backend": "legacy_ddp"}
    systems = (LS._replace(criterion="native"), NATIVE)
    ours, native = (build(text, s, **flags)[1].state_dict() for s in systems)
    assert list(ours) == list(native)
    for name, value in native.items():
        assert name.endswith("_float_tensor") or torch.equal(ours[name], value), name


VARIANTS: dict[str, dict[str, Any]] = {
    "pre-norm": {"decoder_normalize_before": True},
    "no-final-norm": {"decoder_normalize_before": True, "no_decoder_final_norm": True},
    "learned-tied": {"decoder_learned_pos": True, "share_decoder_input_output_embed": True},
    "layernorm-embedding": {"layernorm_embedding": True},
    "other-widths": {"decoder_input_dim": 20, "decoder_output_dim": 12},
    "layer-drop": {"decoder_layerdrop": 0.5},
    "layers-to-keep": {"decoder_layers_to_keep": "0,3,4"},
    "few-outputs": {"output_dictionary_size": 40},
    "adaptive-input": {"adaptive_input": True, "adaptive_input_cutoff": "20,50"},
}


@pytest.mark.parametrize("flags", VARIANTS.values(), ids=VARIANTS)
def test_same_seed_same_variant(text: Path, flags: dict[str, Any]) -> None:
    ours, native = (build(text, s, **flags)[1].state_dict() for s in (LS, NATIVE))
    assert list(ours) == list(native)
    for name, value in native.items():
        assert name.endswith("_float_tensor") or torch.equal(ours[name], value), name


@pytest.mark.parametrize("arch", ARCHS)
def test_architectures_are_fairseqs(text: Path, arch: str) -> None:
    plain = {name: None for name in (*TEXT, *parity.FLAGS) if "coder" in name or name == "dropout"}
    flags = {**TEXT, **plain, "arch": arch}
    ours, native = (
        OmegaConf.to_container(parity.parse(command_line(text, systems, **flags)).model)
        for systems in (LS, NATIVE)
    )
    assert ours.pop("_name") == f"ls_{native.pop('_name')}"
    assert ours == native


# With --decoder-layerdrop each model draws which layers to keep.
@pytest.mark.parametrize("variant", [v for v in VARIANTS if "decoder_layerdrop" not in VARIANTS[v]])
def test_padded_interface(text: Path, variant: str) -> None:
    flags = VARIANTS[variant]
    ours, native, inputs = pair(text, **flags)
    real = inputs["src_tokens"].ne(PAD)
    with parity.native_in_float64():
        for options in ({}, {"features_only": True}):
            (found, extra), (expected, _) = (m(**inputs, **options) for m in (ours, native))
            torch.testing.assert_close(found[real], expected[real], rtol=1e-12, atol=1e-12)
            assert found.shape == expected.shape
            assert set(extra) == {"attn", "inner_states"}
        packed, segments = ours(**inputs, packed=True)
        padded = ours(**inputs)[0]
        torch.testing.assert_close(segments.pad(packed), padded, rtol=1e-12, atol=1e-12)
        assert not padded[~real].any()
        for model in (ours, native):
            (model(**inputs)[0][real].square().sum() / 100).backward()
    expected = dict(native.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-12, atol=1e-12)


def test_a_token_sees_what_stands_before_it(text: Path) -> None:
    ours, native, inputs = pair(text)
    tokens = inputs["src_tokens"]
    changed = tokens.clone()
    changed[:, 1:] = 7
    one_way, both_ways = (
        [
            ours.decoder.extract_features(x, None, full_context_alignment=full)[0][:, 0]
            for x in (tokens, changed)
        ]
        for full in (False, True)
    )
    assert torch.equal(*one_way)
    assert not torch.equal(*both_ways)
    expected = native.decoder.extract_features(tokens, None, full_context_alignment=True)[0][:, 0]
    torch.testing.assert_close(both_ways[0], expected, rtol=1e-12, atol=1e-12)


def test_layers_drop_by_their_own_bits_and_projections_are_neighbours(text: Path) -> None:
    _, model = build(text, LS)
    assert len({layer.site for layer in model.decoder.layers}) == 2
    for changed in (model, model.double()):
        groups = changed.fused_groups()
        assert len(groups) == 2 * 2  # weights and biases of two layers
        for group in groups:
            assert as_one(group).data_ptr() == group[0].data_ptr()


@pytest.mark.parametrize("tied", [True, False])
def test_logits_have_room_for_a_multiple_of_eight(text: Path, tied: bool) -> None:
    task, model = build(text, LS, **({"share_decoder_input_output_embed": True} if tied else {}))
    words = len(task.dictionary)
    assert words % 8
    for changed in (model, model.double()):
        weight = changed.decoder.output_projection.weight
        whole = with_spare_rows(weight)
        assert whole is not None and len(whole) % 8 == 0 and not whole[words:].any()
        (buffer,) = flat_buffers(changed.parameters())
        assert buffer.parameters[0] is weight
        logits = changed(torch.tensor([[2, 5, 7]]))[0]
        assert logits.shape[2] == words and logits.stride(1) == len(whole)


def test_token_by_token(text: Path) -> None:
    """Calls the decoder as fairseq's generators do, which also reorder hypotheses."""
    ours, native, inputs = pair(text)
    tokens = inputs["src_tokens"].clamp_min(PAD + 1)
    order = torch.tensor([2, 2, 0, 5, 7])
    found: list[list[torch.Tensor]] = []
    with parity.native_in_float64():
        for model in (ours.eval(), native.eval()):
            state: dict[Any, Any] = {}
            steps = [model.decoder(tokens[:, :n], incremental_state=state)[0] for n in (1, 2, 3)]
            model.decoder.reorder_incremental_state_scripting(state, order)
            last, extra = model.decoder(tokens[order][:, :4], incremental_state=state)
            assert extra["attn"] == [None]
            found.append([*steps, last])
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        ({"character_embeddings": True}, "--character-embeddings"),
        ({"scale_fc": True}, "--scale-fc"),
        ({"quant_noise_pq": 0.1}, "--quant-noise-pq"),
        ({"activation_fn": "tanh"}, "--activation-fn tanh"),
    ],
)
def test_what_it_cannot_honour_is_refused(text: Path, flags: dict[str, Any], refused: str) -> None:
    with pytest.raises(
        UserError, match=rf"^ls_transformer_lm\w* does not support {refused} .*--native"
    ):
        build(text, LS, **flags)
