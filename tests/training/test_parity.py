"""Every update equals fairseq's: loss, gradient norm and every parameter."""

from __future__ import annotations

import functools
import itertools
import shutil
from pathlib import Path
from typing import Any

import helpers.parity as parity
import pytest
import torch
from fairseq.modules import layer_drop
from helpers.parity import (
    LS,
    NATIVE,
    NORMS,
    PRE_NORM,
    SHARED,
    TEXT,
    Systems,
    command_line,
    compare,
    permuted,
    train,
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return parity.write_corpus(tmp_path_factory.mktemp("corpus"))


@functools.cache
def natively(data: Path, updates: int, *flags: tuple[str, Any]) -> list[parity.Update]:
    """fairseq's run, for several tests."""
    return train(command_line(data, NATIVE, **dict(flags)), updates)


def check(corpus: Path, updates: int, **flags: Any) -> None:
    native = train(command_line(corpus, NATIVE, **flags), updates)
    compare(train(command_line(corpus, LS, **flags), updates), native)


@NORMS
@pytest.mark.parametrize("shared", [{}, SHARED], ids=["separate", "shared"])
def test_fifty_updates(corpus: Path, norm: dict[str, Any], shared: dict[str, Any]) -> None:
    native = train(command_line(corpus, NATIVE, **norm, **shared), 50)
    ours = train(command_line(corpus, LS, **norm, **shared), 50)
    compare(ours, native)
    # The run tests much: it learns, it clips most but not all updates, and the two micro-batches of
    # an update have different sizes.
    assert native[-1].logged["loss"] < 0.9 * native[0].logged["loss"]
    assert 0.5 < sum(update.norm > parity.FLAGS["clip-norm"] for update in native) / 50 < 1
    assert any(len(set(update.sample_sizes)) == 2 for update in native)


VARIANTS: dict[str, dict[str, Any]] = {
    "right-pad-source": {"left_pad_source": True},  # fairseq's flag inverts its default
    "gelu": {"activation_fn": "gelu"},
    "gelu_accurate": {"activation_fn": "gelu_accurate"},
    "learned-positions": {"encoder_learned_pos": True, "decoder_learned_pos": True},
    "no-positions": {"no_token_positional_embeddings": True},
    "layernorm-embedding": {"layernorm_embedding": True},
    "no-scale-embedding": {"no_scale_embedding": True},
    "decoder-shares-embeddings": {"share_decoder_input_output_embed": True},
    "no-decoder-final-norm": {**PRE_NORM, "no_decoder_final_norm": True},
    "pre-norm-encoder-only": {"encoder_normalize_before": True},
    "pre-norm-decoder-only": {"decoder_normalize_before": True},
    "other-decoder": {
        "encoder_embed_dim": 32,
        "decoder_embed_dim": 24,
        "decoder_ffn_embed_dim": 40,
        "decoder_attention_heads": 3,
        "decoder_layers": 3,
    },
    "decoder-output-dim": {"decoder_output_dim": 28, "decoder_layers": 1},
    "sentence-avg": {"sentence_avg": True},
    "left-pad-target": {"left_pad_target": True, "left_pad_source": True},
    "ignore-columns": {"left_pad_target": True, "ignore_prefix_size": 2, "report_accuracy": True},
    "ignore-prefix": {"ignore_prefix_size": 2},
    "report-accuracy": {"report_accuracy": True, "ignore_prefix_size": 1, "lr": 5e-3},
    "no-smoothing": {"label_smoothing": 0.0},
    "no-clipping": {"clip_norm": 0.0},
    "three-micro-batches": {"update_freq": 3},
    "adam-eps-betas": {"adam_eps": 1e-4, "adam_betas": "(0.8, 0.95)", "weight_decay": 0.0},
}


@pytest.mark.parametrize("flags", VARIANTS.values(), ids=VARIANTS)
def test_variants(corpus: Path, flags: dict[str, Any]) -> None:
    check(corpus, 6, **flags)


@pytest.mark.parametrize("left", [True, False])
def test_sources_are_padded_on_either_side(corpus: Path, left: bool) -> None:
    # test_fifty_updates and the variant right-pad-source rely on this.
    sources: list[torch.Tensor] = []

    def note(sample: dict[str, Any]) -> dict[str, Any]:
        sources.append(sample["net_input"]["src_tokens"])
        return sample

    argv = command_line(corpus, NATIVE, left_pad_source=None if left else True)
    train(argv, 2, change_batch=note)
    padded = [source for source in sources if source.eq(parity.PAD).any()]
    assert padded
    for source in padded:
        assert source[:, 0 if left else -1].eq(parity.PAD).any()
        assert not source[:, -1 if left else 0].eq(parity.PAD).any()


def test_accuracy_counts_right_answers(corpus: Path) -> None:
    history = train(command_line(corpus, LS, report_accuracy=True, lr=1e-2), 12)
    last = history[-1].output
    assert 0 < last["n_correct"] < last["total"] == last["ntokens"]
    assert "accuracy" in history[-1].logged


@NORMS
@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"checkpoint_activations": True},
        {"encoder_layerdrop": None},
        {"decoder_layerdrop": None},
    ],
    ids=["both", "recomputed", "decoder", "encoder"],
)
def test_layer_drop(
    corpus: Path, norm: dict[str, Any], flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's generator decides which layers are kept, for both models the same."""
    kept: list[int] = []
    draw = layer_drop.LayerDropModuleList.__iter__
    monkeypatch.setattr(
        layer_drop.LayerDropModuleList,
        "__iter__",
        lambda self: iter(_noting(kept, list(draw(self)))),
    )
    check(corpus, 8, **{"encoder_layerdrop": 0.6, "decoder_layerdrop": 0.6, **flags, **norm})
    assert {0, 1, 2} <= set(kept)  # some passes keep no layer at all


def _noting(kept: list[int], layers: list[Any]) -> list[Any]:
    kept.append(len(layers))
    return layers


RATES = {
    "dropout": 0.3,
    "attention_dropout": 0.2,
    "activation_dropout": 0.15,
    "layernorm_embedding": True,
}


@NORMS
@pytest.mark.parametrize("activation", ["gelu", "gelu_accurate"])
def test_dropout_acts_where_fairseqs_does(
    corpus: Path, norm: dict[str, Any], activation: str
) -> None:
    # Dropout that drops nothing but scales by 1 / (1 - p) shows a different place or rate. ReLU is
    # homogeneous, so it would hide whether dropout comes before or after the activation.
    flags = {**RATES, "activation_fn": activation, **norm}
    with parity.every_unit_kept():
        check(corpus, 6, **flags)
    plain = train(command_line(corpus, LS, **{**flags, "dropout": 0.0}), 1)
    with parity.every_unit_kept(), pytest.raises(parity.ParityError):
        compare(train(command_line(corpus, LS, **flags), 1), plain)


PRECISIONS = {
    "fp16": {"fp16": True, "fp16_no_flatten_grads": True},
    "memory-efficient-fp16": {"memory_efficient_fp16": True},
    "bf16": {"bf16": True},
    "memory-efficient-bf16": {"memory_efficient_bf16": True},
}


@pytest.mark.parametrize("flags", PRECISIONS.values(), ids=PRECISIONS)
def test_rules_of_mixed_precision(corpus: Path, flags: dict[str, Any]) -> None:
    # Loss scale, the copies of the parameters and clipping, which fp16 does by another rule.
    with parity.mixed_precision_in_float64():
        check(corpus, 8, fp16_init_scale=4, fp16_scale_window=3, **flags)


def test_relu_dropout_is_the_old_name(corpus: Path) -> None:
    with parity.every_unit_kept():
        check(corpus, 3, relu_dropout=0.2, activation_fn="gelu")


MIXTURES = [Systems(*s) for s in itertools.product(("ls", "native"), repeat=3) if "ls" in s]


@pytest.mark.parametrize("systems", MIXTURES, ids="-".join)
def test_every_mixture(corpus: Path, systems: Systems) -> None:
    flags = {**PRE_NORM, **SHARED, "report_accuracy": True, "ignore_prefix_size": 1}
    native = natively(corpus, 6, *flags.items())
    compare(train(command_line(corpus, systems, **flags), 6), native)


@pytest.mark.parametrize(
    "flags",
    [
        {"criterion": "cross_entropy", "label_smoothing": None},
        {"optimizer": "sgd", "momentum": 0.9, "adam_betas": None, "adam_eps": None},
    ],
    ids=["cross_entropy", "sgd"],
)
def test_fairseqs_other_criteria_and_optimizers(corpus: Path, flags: dict[str, Any]) -> None:
    ls = Systems("ls", "native" if "optimizer" in flags else "ls", "native")
    native = train(command_line(corpus, NATIVE, **flags), 4)
    compare(train(command_line(corpus, ls, **flags), 4), native)


@NORMS
def test_float32_is_as_close_as_another_order_of_rows(corpus: Path, norm: dict[str, Any]) -> None:
    def run(systems: Systems, change_batch: Any = None) -> list[parity.Update]:
        return train(command_line(corpus, systems, **norm), 24, torch.float32, change_batch)

    native = run(NATIVE)
    shuffled = [run(NATIVE, permuted(seed)) for seed in range(3)]
    ours = run(LS)
    found = parity.largest_deviation(ours, native)
    allowed = [parity.largest_deviation(other, native) for other in shuffled]
    for name, value, limits in zip(found._fields, found, zip(*allowed, strict=True), strict=True):
        assert 0 < value <= 4 * max(limits), f"{name} {value:.1e}, native {max(limits):.1e}"


DIRECTIONS = {
    "arch": "multilingual_transformer",
    "task": "multilingual_translation",
    "lang_pairs": "src-tgt,tgt-src",
    # With a source or target language, fairseq would translate instead of train.
    "source_lang": None,
    "target_lang": None,
}


@pytest.mark.parametrize(
    "shared",
    [{}, {"share_decoders": True}, {"share_encoders": True, "share_all_embeddings": True}],
    ids=["nothing", "decoders", "encoders-and-embeddings"],
)
def test_pairs_of_languages(corpus: Path, shared: dict[str, Any], tmp_path: Path) -> None:
    """Both directions: each update trains two models, which may share parameters."""
    flags = {**shared, **DIRECTIONS}
    if shared.get("share_all_embeddings"):
        shutil.copytree(corpus, tmp_path, dirs_exist_ok=True)
        corpus = tmp_path
        shutil.copy(corpus / "dict.src.txt", corpus / "dict.tgt.txt")

    def run(systems: Systems) -> list[parity.Update]:
        return train(command_line(corpus, systems, **flags), 24)

    native, ours = run(NATIVE), run(LS)
    # one for both pairs, in the captured step
    assert all(len(update.sample_sizes) == 1 for update in ours)
    for update in native:  # fairseq's task also counts each pair separately, and does not log that
        update.output = {k: v for k, v in update.output.items() if ":" not in k}
    compare(ours, native)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return parity.write_text(tmp_path_factory.mktemp("text"))


BREAKS = pytest.mark.parametrize("breaks", ["none", "complete", "complete_doc", "eos"])


@BREAKS
@pytest.mark.parametrize(
    "flags",
    [
        {"share_decoder_input_output_embed": True},
        {"decoder_normalize_before": True, "decoder_learned_pos": True, "activation_fn": "gelu"},
    ],
    ids=["post-norm-tied", "pre-norm-learned"],
)
def test_running_text(text: Path, breaks: str, flags: dict[str, Any]) -> None:
    flags = {**TEXT, "sample_break_mode": breaks, "lr": 3e-3, **flags}
    native = train(command_line(text, NATIVE, **flags), 30)
    ours = train(command_line(text, LS, **flags), 30)
    compare(ours, native)
    assert all(len(update.sample_sizes) == 1 for update in ours)  # with the captured step
    assert any(len(set(update.sample_sizes)) == 2 for update in native)
    losses = [update.logged["loss"] for update in native]
    assert sum(losses[-10:]) < 0.95 * sum(losses[:10])


TEXTS: dict[str, dict[str, Any]] = {
    "no-final-norm": {"decoder_normalize_before": True, "no_decoder_final_norm": True},
    "no-positions": {"no_token_positional_embeddings": True},
    "no-scale-embedding": {"no_scale_embedding": True},
    "layernorm-embedding": {"layernorm_embedding": True},
    "other-widths": {"decoder_input_dim": 20, "decoder_output_dim": 28},
    "gpt": {"arch": "transformer_lm_gpt", "attention_dropout": 0.0},
    "gpt3": {"arch": "transformer_lm_gpt3_small"},
    "label-smoothing": {"criterion": "label_smoothed_cross_entropy", "label_smoothing": 0.1},
    "sentence-avg": {"sentence_avg": True},
    "bos": {"add_bos_token": True, "max_target_positions": 13},
    "few-outputs": {"output_dictionary_size": 40},
    "fixed-length": {"pad_to_fixed_length": True},
    "shortened": {"sample_break_mode": "eos", "shorten_method": "truncate", "tokens_per_sample": 6},
}


@pytest.mark.parametrize("recomputed", [None, True])
def test_layer_drop_of_running_text(text: Path, recomputed: Any) -> None:
    flags = {**TEXT, "decoder_layerdrop": 0.5, "checkpoint_activations": recomputed}
    check(text, 6, **flags)


@pytest.mark.parametrize("flags", TEXTS.values(), ids=TEXTS)
def test_variants_of_running_text(text: Path, flags: dict[str, Any]) -> None:
    flags = {**TEXT, "sample_break_mode": "complete", **flags}
    native = train(command_line(text, NATIVE, **flags), 6)
    ours = train(command_line(text, LS, **flags), 6)
    compare(ours, native)
    assert all(len(update.sample_sizes) == 1 for update in ours)


def test_blocks_that_fill_a_batch_up_are_left_to_fairseqs_step(text: Path) -> None:
    flags = {**TEXT, "pad_to_fixed_bsz": True, "batch_size": 8, "max_tokens": None}
    native = train(command_line(text, NATIVE, **flags), 4)
    ours = train(command_line(text, LS, **flags), 4)
    compare(ours, native)
    assert all(len(update.sample_sizes) == 2 for update in ours)


# A smaller transformer_lm_wiki103 of fairseq.
WIKI103 = {
    **TEXT,
    "arch": "transformer_lm_wiki103",
    "criterion": "adaptive_loss",
    "ddp_backend": "legacy_ddp",
    "decoder_layers": 2,
    "adaptive_input_cutoff": "20,50",
    "adaptive_softmax_cutoff": "20,50",
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "adaptive_softmax_dropout": 0.0,
    "sample_break_mode": "complete",
}
ADAPTIVE: dict[str, dict[str, Any]] = {
    "wiki103": WIKI103,
    "learned-normed": {**WIKI103, "decoder_learned_pos": True, "layernorm_embedding": True},
    "no-positions": {**WIKI103, "no_token_positional_embeddings": True},
    "softmax": {**WIKI103, "arch": "transformer_lm", "adaptive_input_cutoff": None},
    "softmax-widths": {
        **WIKI103, "arch": "transformer_lm_gbw", "adaptive_input_cutoff": None,
        "decoder_input_dim": 20, "decoder_output_dim": 28,
    },
    "input": {
        **WIKI103, "arch": "transformer_lm", "adaptive_softmax_cutoff": None,
        "adaptive_input": True, "criterion": "cross_entropy",
    },
}  # fmt: skip


@pytest.mark.parametrize("optimizer", ["ls", "native"])
@pytest.mark.parametrize("flags", ADAPTIVE.values(), ids=ADAPTIVE)
def test_adaptive_inputs_and_softmax(text: Path, flags: dict[str, Any], optimizer: str) -> None:
    """fairseq's own modules compute them around our layers, in fairseq's own step."""
    criterion = "ls" if flags["criterion"] == "cross_entropy" else "native"
    native = natively(text, 20, *flags.items())
    ours = train(command_line(text, Systems("ls", optimizer, criterion), **flags), 20)
    compare(ours, native)
    assert all(len(update.sample_sizes) == 2 for update in ours)
    assert ours[-1].loss / ours[-1].sample_size < 0.95 * ours[0].loss / ours[0].sample_size


def test_dropout_of_adaptive_models_acts_where_fairseqs_does(text: Path) -> None:
    flags = {**WIKI103, **RATES, "adaptive_softmax_dropout": 0.2}
    with parity.every_unit_kept():
        native = train(command_line(text, NATIVE, **flags), 6)
        compare(train(command_line(text, Systems("ls", "ls", "native"), **flags), 6), native)


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_dropout_of_language_models_acts_where_fairseqs_does(text: Path, activation: str) -> None:
    flags = {**TEXT, **RATES, "activation_fn": activation}
    with parity.every_unit_kept():
        check(text, 6, **flags)


@pytest.mark.parametrize("systems", MIXTURES, ids="-".join)
def test_every_mixture_on_running_text(text: Path, systems: Systems) -> None:
    native = natively(text, 4, *TEXT.items())
    compare(train(command_line(text, systems, **TEXT), 4), native)


RECOMPUTED: dict[str, dict[str, Any]] = {
    "post-norm": {"activation_fn": "gelu"},
    "pre-norm-tied": {**PRE_NORM, **SHARED},
    "three-micro-batches": {"update_freq": 3},
    "pairs-of-languages": {**DIRECTIONS, "share_encoders": True},
    "running-text": {**TEXT, "share_decoder_input_output_embed": True},
    "running-text-pre-norm": {**TEXT, "decoder_normalize_before": True},
    "layerdrop": {"encoder_layerdrop": 0.5, "decoder_layerdrop": 0.5},  # in fairseq's own step
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", RECOMPUTED)
def test_recomputed_activations_change_no_bit(
    corpus: Path, text: Path, name: str, dtype: torch.dtype
) -> None:
    flags = {**RECOMPUTED[name], "dropout": 0.3, "attention_dropout": 0.2}
    data = text if name.startswith("running-text") else corpus

    def run(**more: Any) -> list[parity.Update]:
        return train(command_line(data, LS, **flags, activation_dropout=0.1, **more), 4, dtype)

    with parity.layers_in_backward() as none:
        kept = run()
    with parity.layers_in_backward() as layers:
        recomputed = run(checkpoint_activations=True)
    assert not none
    assert set(layers) == ({"EncoderLayer"} if data is text else {"EncoderLayer", "DecoderLayer"})
    for ours, expected in zip(recomputed, kept, strict=True):
        assert (ours.output, ours.norm) == (expected.output, expected.norm)
        assert len(ours.sample_sizes) == 1 or name == "layerdrop"  # in the captured step
        assert ours.parameters.keys() == expected.parameters.keys()
        for parameter, value in expected.parameters.items():
            assert torch.equal(ours.parameters[parameter], value), parameter


def test_cross_entropy_of_sentence_pairs(corpus: Path) -> None:
    flags = {"criterion": "cross_entropy", "label_smoothing": None}
    native = train(command_line(corpus, NATIVE, **flags), 6)
    ours = train(command_line(corpus, LS, **flags), 6)
    compare(ours, native)
    assert all(len(update.sample_sizes) == 1 for update in ours)
