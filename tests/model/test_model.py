"""``ls_transformer`` equals fairseq's Transformer: architectures, names, initial values,
outputs."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import helpers.parity as parity
import pytest
import torch
from fairseq.models import ARCH_MODEL_INV_REGISTRY
from fairseq.modules import LayerDropModuleList
from helpers.parity import LS, NATIVE, PAD, command_line
from torch import Tensor

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.memory.parameters import as_one
from lightseq_fairseq.plugins.unsupported import unsupported_option, unsupported_width

PRE_NORM = {"encoder_normalize_before": True, "decoder_normalize_before": True}
SMALL = {
    "encoder_embed_dim": 16,
    "encoder_ffn_embed_dim": 24,
    "encoder_attention_heads": 2,
    "encoder_layers": 2,
    "decoder_embed_dim": 16,
    "decoder_ffn_embed_dim": 24,
    "decoder_attention_heads": 2,
    "decoder_layers": 2,
}
EMBEDDINGS: dict[str, dict[str, Any]] = {
    "separate": {},
    "decoder-shared": {"share_decoder_input_output_embed": True},
    "all-shared": {"share_all_embeddings": True},
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return parity.write_corpus(tmp_path_factory.mktemp("corpus"), pairs=16)


def build(corpus: Path, systems: parity.Systems, **flags: Any) -> tuple[Any, Any]:
    """The task and the model of a command line, seeded."""
    task, model, _ = parity.build(parity.parse(command_line(corpus, systems, **flags)))
    return task, model


def pair(corpus: Path, **flags: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Our model and fairseq's with the same weights, and a batch."""
    task, ours = build(corpus, LS, **flags)
    native = build(corpus, NATIVE, **flags)[1]
    return ours.eval(), native.eval(), batch(task, 8)


def batch(task: Any, sentences: int) -> dict[str, Any]:
    dataset = task.dataset("train")
    inputs: dict[str, Any] = dataset.collater([dataset[i] for i in range(sentences)])["net_input"]
    return inputs


# Architectures and initial values


@pytest.mark.parametrize("shared", EMBEDDINGS.values(), ids=EMBEDDINGS)
@pytest.mark.parametrize("arch", ARCH_MODEL_INV_REGISTRY["transformer"])
def test_same_seed_same_model(corpus: Path, arch: str, shared: dict[str, Any]) -> None:
    ours, native = (
        build(corpus, systems, arch=arch, seed=42, **SMALL, **shared)[1].state_dict()
        for systems in (LS, NATIVE)
    )
    assert_same_state(ours, native)


def assert_same_state(ours: dict[str, Tensor], native: dict[str, Tensor]) -> None:
    assert list(ours) == list(native)
    for name, value in native.items():
        assert (ours[name].shape, ours[name].dtype) == (value.shape, value.dtype)
        # fairseq leaves these buffers uninitialised; they only mark a module's device.
        assert name.endswith("_float_tensor") or torch.equal(ours[name], value), name


@pytest.mark.parametrize("arch", ARCH_MODEL_INV_REGISTRY["transformer"])
def test_architectures_are_fairseqs(corpus: Path, arch: str) -> None:
    keep_arch = {name: None for name in parity.FLAGS if "coder" in name or name == "dropout"}
    ours, native = (
        vars(parity.parse(command_line(corpus, systems, **{**keep_arch, "arch": arch})).model)
        for systems in (LS, NATIVE)
    )
    named_ls = {"arch", "_name", "optimizer", "criterion"}
    assert {k: v for k, v in ours.items() if k not in named_ls} == {
        k: v for k, v in native.items() if k not in named_ls
    }


VARIANTS: dict[str, dict[str, Any]] = {
    "pre-norm": PRE_NORM,
    "learned-positions": {"encoder_learned_pos": True, "decoder_learned_pos": True},
    "layernorm-embedding": {"layernorm_embedding": True},
    "other-decoder": {"decoder_embed_dim": 24, "decoder_layers": 3, "decoder_output_dim": 12},
    "layer-drop": {"encoder_layerdrop": 0.5, "decoder_layerdrop": 0.5},
}


@pytest.mark.parametrize("flags", VARIANTS.values(), ids=VARIANTS)
def test_same_seed_same_variant(corpus: Path, flags: dict[str, Any]) -> None:
    ours, native = (build(corpus, s, **flags)[1].state_dict() for s in (LS, NATIVE))
    assert_same_state(ours, native)


@pytest.mark.parametrize("layers", [12, 24])
@pytest.mark.parametrize("norm", [{}, PRE_NORM], ids=["post-norm", "pre-norm"])
def test_deep_models_train(corpus: Path, layers: int, norm: dict[str, Any]) -> None:
    flags = {**SMALL, "encoder_layers": layers, "decoder_layers": layers, "dropout": 0.1, **norm}
    history = parity.train(command_line(corpus, LS, **flags), 2, torch.float32)
    # Only the pad's embedding keeps its values; every layer has changed.
    before, after = history[0].parameters, history[1].parameters
    still = [name for name, value in before.items() if torch.equal(value, after[name])]
    assert not still
    assert history[1].norm > 0


# Outputs


@pytest.mark.parametrize("norm", [{}, PRE_NORM], ids=["post-norm", "pre-norm"])
def test_padded_interface(corpus: Path, norm: dict[str, Any]) -> None:
    ours, native, inputs = pair(corpus, **norm)
    real = inputs["prev_output_tokens"].ne(PAD)
    assert not real.all()
    with torch.no_grad():
        for options in ({}, {"features_only": True}):
            (found, extra), (expected, _) = (m(**inputs, **options) for m in (ours, native))
            torch.testing.assert_close(found[real], expected[real], rtol=1e-5, atol=1e-5)
            assert found.shape == expected.shape
            assert set(extra) == {"attn", "inner_states"}
        packed, segments = ours(**inputs, packed=True)
        assert torch.equal(segments.pad(packed), ours(**inputs)[0])
        net_output = ours(**inputs)
        torch.testing.assert_close(
            ours.get_normalized_probs(net_output, log_probs=True)[real],
            native.get_normalized_probs(native(**inputs), log_probs=True)[real],
            rtol=1e-5, atol=1e-5,
        )  # fmt: skip


def test_parts_of_both_models_fit_together(corpus: Path) -> None:
    ours, native, inputs = pair(corpus, **PRE_NORM)
    source, previous = inputs["src_tokens"], inputs["prev_output_tokens"]
    real = previous.ne(PAD)
    with torch.no_grad():
        encoded = [m.encoder(source, src_lengths=inputs["src_lengths"]) for m in (ours, native)]
        mask = source.ne(PAD)
        found, expected = (e["encoder_out"][0].transpose(0, 1) for e in encoded)
        torch.testing.assert_close(found[mask], expected[mask], rtol=1e-5, atol=1e-5)
        expected = native.decoder(previous, encoded[1])[0][real]
        for encoder_out, decoder in ((encoded[0], native.decoder), (encoded[1], ours.decoder)):
            found = decoder(previous, encoder_out)[0][real]
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        # The way in which fairseq's non-autoregressive and alignment code calls the decoder.
        found, expected = (
            m.decoder(previous, e, full_context_alignment=True)[0][real]
            for m, e in zip((ours, native), encoded, strict=True)
        )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_batch_of_one_token(corpus: Path) -> None:
    ours, native, _ = pair(corpus)
    end = torch.tensor([[2]])
    inputs = {"src_tokens": end, "src_lengths": torch.tensor([1]), "prev_output_tokens": end}
    for model in (ours, native):
        model.train()(**inputs)[0].square().sum().backward()
    torch.testing.assert_close(ours(**inputs)[0], native(**inputs)[0], rtol=1e-5, atol=1e-5)
    expected = dict(native.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-3, atol=1e-4)


def test_longer_than_any_table_so_far(corpus: Path) -> None:
    # Sinusoidal positions are unlimited: their table grows with the longest sentence.
    ours, native, _ = pair(corpus)
    tokens = torch.full((1, 1500), 7)
    with torch.no_grad():
        found = ours(tokens, None, tokens[:, :1200])[0]
        expected = native(tokens, torch.tensor([1500]), tokens[:, :1200])[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert ours.max_positions() == native.max_positions()


def test_a_table_that_graphs_may_read_outlives_longer_sentences(corpus: Path) -> None:
    ours, _, inputs = pair(corpus)
    with torch.no_grad():
        expected = ours(**inputs)[0]
        small = [side._positions(1) for side in (ours.encoder, ours.decoder)]
        rows, places = [len(table) for table in small], [table.data_ptr() for table in small]
        values = [table.clone() for table in small]
        del small
        tokens = torch.full((1, max(rows) + 1), 7)
        ours(tokens, None, tokens)
        others = [torch.full((row, 16), torch.nan) for row in rows for _ in range(4)]
        assert not {other.data_ptr() for other in others} & set(places)
        for side, value in zip((ours.encoder, ours.decoder), values, strict=True):
            assert len(side._positions(1)) > len(value)
            assert torch.equal(side._outgrown[0], value)
        assert torch.equal(ours(**inputs)[0], expected)


def test_dropout_acts_in_training_and_follows_the_seed(corpus: Path) -> None:
    task, model = build(corpus, LS, dropout=0.3, attention_dropout=0.2, activation_dropout=0.1)
    inputs = batch(task, 8)

    def outputs(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        return [model(**inputs)[0].detach() for _ in range(2)]

    first = outputs(1)
    assert not torch.equal(*first)
    assert all(torch.equal(a, b) for a, b in zip(first, outputs(1), strict=True))
    assert not torch.equal(first[0], outputs(2)[0])
    model.eval()
    assert torch.equal(*outputs(1))


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_layers_that_are_dropped(corpus: Path, kept: int) -> None:
    """Attention is of the last layer; as in fairseq there is none if fewer layers run."""
    ours, native, inputs = pair(corpus, decoder_layers=2, decoder_layerdrop=0.5, dropout=0)
    real = inputs["prev_output_tokens"].ne(PAD)

    def layers(self: LayerDropModuleList) -> Iterator[Any]:
        return iter([*self._modules.values()][:kept])

    with mock.patch.object(LayerDropModuleList, "__iter__", layers):
        (found, its), (expected, attention) = (
            (logits[real], extra["attn"][0])
            for logits, extra in (model.train()(**inputs) for model in (ours, native))
        )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert (its is None) == (attention is None) == (kept < 2)
    if its is not None:
        torch.testing.assert_close(its[real], attention[real], rtol=1e-5, atol=1e-5)


def test_every_place_drops_by_its_own_bits(corpus: Path) -> None:
    _, model = build(corpus, LS, encoder_layers=3, decoder_layers=3, encoder_layerdrop=0.5)
    layers = [*model.encoder.layers.children(), *model.decoder.layers.children()]
    sites = sorted(layer.site for layer in layers)
    # Sites 0 and 1 belong to the embeddings; a decoder layer uses six.
    assert len(sites) == 6 and sites[0] >= 2
    assert all(b - a >= 6 for a, b in itertools.pairwise(sites))


# Weights


def test_weights_move_both_ways(corpus: Path) -> None:
    ours, native, inputs = pair(corpus, seed=1)
    other = build(corpus, NATIVE, seed=2)[1].eval()
    ours.load_state_dict(other.state_dict(), strict=True)
    native.load_state_dict(ours.state_dict(), strict=True)
    real = inputs["prev_output_tokens"].ne(PAD)
    with torch.no_grad():
        expected = other(**inputs)[0][real]
        torch.testing.assert_close(ours(**inputs)[0][real], expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(native(**inputs)[0][real], expected)


def test_weights_of_old_checkpoints(corpus: Path) -> None:
    # Stacked projections and numbered LayerNorms of early fairseq versions, and the dead parameters
    # of 0.12.2.
    ours = build(corpus, LS)[1]
    state = {name: value.clone() for name, value in ours.state_dict().items()}
    old = dict(state)
    for layer in ("encoder.layers.0", "decoder.layers.1"):
        for kind in ("weight", "bias"):
            parts = [old.pop(f"{layer}.self_attn.{part}_proj.{kind}") for part in "qkv"]
            old[f"{layer}.self_attn.in_proj_{kind}"] = torch.cat(parts)
        norms = ["self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"]
        if layer.startswith("encoder"):
            norms.pop(1)
        for place, norm in enumerate(norms):
            for kind in ("weight", "bias"):
                old[f"{layer}.layer_norms.{place}.{kind}"] = old.pop(f"{layer}.{norm}.{kind}")
    for dead in ("in_proj", "out_proj", "fc1", "fc2"):
        old[f"encoder.layers.1.{dead}_weight"] = torch.zeros(3)
        old[f"encoder.layers.1.{dead}_bias"] = torch.zeros(3)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
    ours.load_state_dict(old, strict=True)
    assert_same_state(ours.state_dict(), state)


def test_projections_of_one_gemm_are_neighbours(corpus: Path) -> None:
    _, model = build(corpus, LS, share_all_embeddings=True)

    def check(model: Any) -> None:
        groups = model.fused_groups()
        # weights and biases of 4 layers, and of the cross attention
        assert len(groups) == 2 * 4 + 2
        for group in groups:
            assert as_one(group).data_ptr() == group[0].data_ptr()

    check(model)
    for change in (lambda m: m.double(), lambda m: m.bfloat16(), lambda m: m.to("cpu").float()):
        model = change(model)
        check(model)
        tied = model.encoder.embed_tokens.weight
        assert tied is model.decoder.embed_tokens.weight
        assert tied is model.decoder.output_projection.weight
    state = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    state["decoder.embed_tokens.weight"] = state["encoder.embed_tokens.weight"]
    state["decoder.output_projection.weight"] = state["encoder.embed_tokens.weight"]
    model.load_state_dict(state)
    check(model)
    assert all(torch.equal(value, state[name]) for name, value in model.named_parameters())


def test_copies_live_by_themselves(corpus: Path) -> None:
    ours, _, inputs = pair(corpus)
    twin = copy.deepcopy(ours)
    with torch.no_grad():
        before = ours(**inputs)[0]
        assert torch.equal(twin(**inputs)[0], before)
        for parameter in twin.parameters():
            parameter.add_(1)
        assert torch.equal(ours(**inputs)[0], before)
    twin(**inputs)[0].sum().backward()
    assert all(parameter.grad is None for parameter in ours.parameters())
    assert all(parameter.grad is not None for parameter in twin.parameters())


# Precision


@pytest.mark.parametrize("flags", [{"bf16": True}, {"fp16": True, "fp16_no_flatten_grads": True}])
def test_sixteen_bits(corpus: Path, flags: dict[str, Any]) -> None:
    # The difference between 16-bit and 32-bit runs is at most twice fairseq's.
    def losses(systems: parity.Systems, **flags: Any) -> Tensor:
        history = parity.train(command_line(corpus, systems, **flags), 6, torch.float32)
        return torch.tensor([update.loss for update in history])

    exact = losses(NATIVE)
    ours, native = ((losses(s, **flags) - exact).abs() / exact for s in (LS, NATIVE))
    assert ours.max() <= 2 * native.max()
    assert native.max() < 0.02


# Unsupported options

REFUSED: dict[str, dict[str, Any]] = {
    "--adaptive-softmax-cutoff": {"adaptive_softmax_cutoff": "20,40"},
    "--adaptive-input": {"adaptive_input": True},
    "--quant-noise-pq": {"quant_noise_pq": 0.1},
    "--quant-noise-scalar": {"quant_noise_scalar": 0.1},
    "--no-cross-attention": {"no_cross_attention": True},
    "--cross-self-attention": {"cross_self_attention": True},
    "--offload-activations": {"offload_activations": True},
    "--base-layers": {"base_layers": 1},
    "--char-inputs": {"char_inputs": True},
    "--tie-adaptive-weights": {"tie_adaptive_weights": True},
    "--activation-fn tanh": {"activation_fn": "tanh"},
    "--ddp-backend fully_sharded": {"ddp_backend": "fully_sharded"},
    "--amp": {"amp": True},
}


@pytest.mark.parametrize("flag", REFUSED)
def test_refused_options_are_named(corpus: Path, flag: str) -> None:
    cfg = parity.parse(command_line(corpus, LS, **REFUSED[flag]))
    with pytest.raises(UserError) as caught:
        parity.build(cfg)
    message = str(caught.value)
    assert message.startswith(f"ls_transformer does not support {flag} (")
    assert message.endswith("or add --native to use fairseq's own layers.") and "\n" not in message


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_refused_attention_of_xformers(corpus: Path, side: str) -> None:
    name = f"{side}_xformers_att_config"
    args = parity.parse(command_line(corpus, LS)).model
    assert unsupported_option(args) is None
    setattr(args, name, "{'name': 'linformer'}")
    assert f"--{side}-xformers-att-config" in str(unsupported_option(args))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({}, None),
        ({"encoder_embed_dim": 20}, r"--encoder-embed-dim 20 \(on a GPU it must .* 8 up to 8192"),
        ({"decoder_ffn_embed_dim": 30}, "--decoder-ffn-embed-dim 30 .* a multiple of 8, but is 30"),
        (
            {"encoder_embed_dim": 24},
            "--encoder-attention-heads 2 .* multiple of 8 up to 128, but is 12",
        ),
        ({"encoder_embed_dim": 272}, "--encoder-attention-heads 2 .* but is 136"),
    ],
)
def test_widths_that_kernels_refuse_are_named(
    corpus: Path, flags: dict[str, Any], said: str | None
) -> None:
    """The error is raised when the model moves to a GPU, before the first batch."""
    refusal = unsupported_width(build(corpus, LS, **flags)[1].cfg)
    sentence = "" if refusal is None else refusal.sentence("ls_transformer")
    assert sentence == "" if said is None else re.search(said, sentence)


def test_embeddings_as_input_are_refused(corpus: Path) -> None:
    ours, _, inputs = pair(corpus)
    with pytest.raises(UserError, match="does not support token_embeddings: pass only src_tokens"):
        ours.encoder(inputs["src_tokens"], token_embeddings=torch.zeros(1))
    with pytest.raises(UserError, match="needs encoder_out: pass it"):
        ours.decoder(inputs["prev_output_tokens"])
