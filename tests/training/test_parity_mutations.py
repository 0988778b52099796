"""The parity runs find common mistakes: each mistake is made here on purpose.

A mutation changes one rule of our code at one place. With the same data, flags and number of
updates, the run must pass without the mutation and fail with it.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import helpers.parity as parity
import pytest
import torch
from helpers.mutations import Arguments, Patch, change_op, change_sample_size
from helpers.parity import LS, NATIVE, PAD, VOCABULARY, ParityError, command_line, compare, train
from torch import Tensor

from lightseq_fairseq import ops
from lightseq_fairseq.layers.node import Input
from lightseq_fairseq.layers.stack import layer_norm
from lightseq_fairseq.memory.gradients import DirectGradients
from lightseq_fairseq.memory.packing import Packed, PackedBatch
from lightseq_fairseq.ops.update_scalars import State
from lightseq_fairseq.plugins import transformer
from lightseq_fairseq.plugins.criterion import LabelSmoothedCrossEntropyCriterion as Criterion
from lightseq_fairseq.step import objectives
from lightseq_fairseq.step.adam_state import AdamState
from lightseq_fairseq.step.training_step import Count


@dataclass
class Mutation:
    """A mistake, and the run that shows it.

    Attributes:
        make: makes the mistake.
        flags: flags of the run, in addition to ``parity.FLAGS``.
        updates: the number of updates after which it shows. In the first update the learning rate
            is zero.
        context: a context manager around the run.
    """

    make: Callable[[Patch], None]
    flags: dict[str, Any] = field(default_factory=dict)
    updates: int = 1
    context: Callable[[], Any] = contextlib.nullcontext


MUTATIONS: dict[str, Mutation] = {}


def mutation(
    updates: int = 1, context: Callable[[], Any] = contextlib.nullcontext, **flags: Any
) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Adds the decorated function to MUTATIONS under its name."""

    def enter(make: Callable[[Patch], None]) -> Callable[[Patch], None]:
        MUTATIONS[make.__name__] = Mutation(make, flags, updates, context)
        return make

    return enter


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return parity.write_corpus(tmp_path_factory.mktemp("corpus"), pairs=24, longest=7)


@pytest.fixture(scope="module")
def native_runs() -> dict[str, list[parity.Update]]:
    return {}


# Label smoothing


@mutation(label_smoothing=0.2)
def smoothing_shared_by_all_classes(patch: Patch) -> None:
    # eps / V for all classes, as in torch, instead of eps / (V - 1) for all other classes.
    def change(a: Arguments) -> None:
        a["smoothing"] *= (VOCABULARY - 1) / VOCABULARY

    change_op(patch, "cross_entropy_fwd", change)
    change_op(patch, "cross_entropy_bwd", change)
    change_op(patch, "cross_entropy_fwd_bwd", change)


# Adam


@mutation(updates=3)
def eps_after_bias_correction(patch: Patch) -> None:
    # m' / (sqrt(v') + eps) with corrected m' and v', as in torch.
    def change(a: Arguments) -> None:
        a["eps"] *= (1 - a["beta2"] ** (int(a["step"]) + 1)) ** 0.5

    change_op(patch, "adam_step", change)


@mutation(updates=2)
def decay_without_learning_rate(patch: Patch) -> None:
    def change(a: Arguments) -> None:
        a["weight_decay"] /= max(float(a["lr"]), 1e-9)

    change_op(patch, "adam_step", change)


@mutation(updates=2)
def decay_in_the_gradient(patch: Patch) -> None:
    # L2 regularisation, as in Adam before AdamW.
    def change(a: Arguments) -> None:
        a["grad"] = a["grad"] + a["weight_decay"] * a["param"] / a["multiplier"]
        a["weight_decay"] = 0.0

    change_op(patch, "adam_step", change)


@mutation(updates=2)
def decay_spares_biases_and_norms(patch: Patch) -> None:
    update = AdamState.update

    def changed(self: AdamState, *arguments: Any) -> None:
        decay = self.group["lr"] * self.group["weight_decay"]
        before = [(p, p.detach().clone()) for p in self.buffer.parameters if p.dim() == 1]
        update(self, *arguments)
        with torch.no_grad():
            for parameter, value in before:
                parameter.add_(value, alpha=decay)

    patch.setattr(AdamState, "update", changed)


# Clipping


# 1e-6 is small compared with a norm near 1. A high learning rate and a large eps, with which Adam
# depends on the length of the gradient, show the mistake within a few updates; the usual values
# need ten or twenty.
HIGH_RATE = {"lr": 0.05, "adam_eps": 1e-2}


@mutation(updates=5, **HIGH_RATE)
def clip_without_eps(patch: Patch) -> None:
    change_op(patch, "adam_step", lambda a: a.update(clip_eps=0.0))


@mutation(updates=4, clip_norm=5.0)
def clip_not_capped(patch: Patch) -> None:
    # A gradient that is shorter than the limit is scaled up to it.
    def change(a: Arguments) -> None:
        limit, a["max_norm"] = a["max_norm"], 0.0
        total = a["norm"] * a["multiplier"]
        a["multiplier"] = a["multiplier"] * limit / (total + a["clip_eps"])

    change_op(patch, "adam_step", change)


@mutation()
def norm_logged_after_clipping(patch: Patch) -> None:
    update_scalars = ops.update_scalars

    def changed(state: Tensor, *arguments: Any, **named: Any) -> None:
        update_scalars(state, *arguments, **named)
        state[State.NORM].clamp_(max=parity.FLAGS["clip-norm"])

    patch.setattr(ops, "update_scalars", changed)


@mutation(
    updates=5,
    context=parity.mixed_precision_in_float64,
    fp16=True,
    fp16_no_flatten_grads=True,
    **HIGH_RATE,
)
def clip_of_fp16_as_of_fp32(patch: Patch) -> None:
    # max / (norm + 1e-6), where fp16 uses max / norm.
    change_op(patch, "adam_step", lambda a: a.update(clip_eps=1e-6))


# Sample size


@mutation(updates=2)
def sentences_for_tokens(patch: Patch) -> None:
    change_sample_size(patch, lambda self, counts: counts[Count.SENTENCES])


@mutation(updates=2, sentence_avg=True)
def tokens_for_sentences(patch: Patch) -> None:
    change_sample_size(patch, lambda self, counts: counts[Count.TOKENS])


@mutation(sentence_avg=True)
def nll_per_sentence(patch: Patch) -> None:
    native = Criterion.__mro__[1]

    def changed(cls: Any, logging_outputs: list[dict[str, Any]]) -> None:
        native.reduce_metrics([{**log, "ntokens": log["sample_size"]} for log in logging_outputs])

    patch.setattr(Criterion, "reduce_metrics", classmethod(changed))


@mutation()
def mean_of_every_micro_batch(patch: Patch) -> None:
    # Each micro-batch is divided by its own size, instead of the sum of all by the sum of their
    # sizes.
    loss = objectives.label_smoothed_cross_entropy

    def changed(logits: Tensor, labels: Tensor, *settings: Any) -> Any:
        losses, *rest = loss(logits, labels, *settings)
        losses.register_hook(lambda gradient: gradient / len(labels))
        return losses, *rest

    patch.setattr(objectives, "label_smoothed_cross_entropy", changed)
    change_sample_size(patch, lambda self, counts: parity.FLAGS["update-freq"])


@mutation()
def last_micro_batch_only(patch: Patch) -> None:
    # A gradient is overwritten instead of accumulated.
    write = DirectGradients.write
    patch.setattr(DirectGradients, "write", lambda self, _, part: write(self, False, part))


@mutation(ignore_prefix_size=2)
def ignored_prefix_leaves_the_sample_size(patch: Patch) -> None:
    def change(self: Any, counts: list[float]) -> float:
        ignored = self.trainer.get_criterion().ignore_prefix_size * counts[Count.SENTENCES]
        return counts[Count.SAMPLE_SIZE] - ignored

    change_sample_size(patch, change)


# The row of the pad token


def look_up_a_pad(patch: Patch, padding_idx: int | None) -> None:
    """Adds a pad token to the end of every batch, with a gradient for its row, as stale rows would
    have."""

    def change(a: Arguments) -> None:
        a["tokens"] = torch.cat([a["tokens"], a["tokens"].new_tensor([PAD])])
        a["positions"] = torch.cat([a["positions"], a["positions"].new_tensor([PAD])])
        a["dy"] = torch.cat([a["dy"], a["dy"].mean(0, keepdim=True)])
        if padding_idx is not None:
            a["padding_idx"] = padding_idx

    change_op(patch, "embedding_bwd", change)


@mutation()
def pad_row_learns_from_look_ups(patch: Patch) -> None:
    look_up_a_pad(patch, padding_idx=-1)


def test_looked_up_pad_does_no_harm(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The pad that pad_row_learns_from_look_ups adds is harmless if the op ignores the pad's row.
    native = train(command_line(corpus, NATIVE), 2)
    look_up_a_pad(monkeypatch, padding_idx=None)
    compare(train(command_line(corpus, LS), 2), native)


@mutation(share_all_embeddings=True)
def pad_row_does_not_learn_from_the_projection(patch: Patch) -> None:
    backward = ops.linear_bwd

    def changed(dy: Tensor, x: Tensor, weight: Tensor, dweight: Tensor, *rest: Any) -> Tensor:
        dx = backward(dy, x, weight, dweight, *rest)
        if VOCABULARY <= len(weight) < VOCABULARY + 8:  # with spare rows
            dweight[PAD] = 0
        return dx

    patch.setattr(ops, "linear_bwd", changed)


# Positions


@mutation()
def positions_count_pads(patch: Patch) -> None:
    # Positions count the columns of the padded batch: this is right for right-padded sources, but
    # not for left-padded ones.
    open_batch = PackedBatch.open

    def changed(self: PackedBatch, block: Tensor | None = None) -> Packed:
        packed = open_batch(self, block)
        if block is None:  # the batch is being filled
            return packed
        source = packed["source"].segments
        lengths = source.cu_seqlens.diff()
        pads = (source.max_len - lengths).repeat_interleave(lengths)
        moved = replace(source, positions=source.positions + pads)
        return {**packed, "source": replace(packed["source"], segments=moved)}

    patch.setattr(PackedBatch, "open", changed)


@mutation()
def positions_start_at_zero(patch: Patch) -> None:
    # The sinusoidal table is passed from the row of the first position on.
    change_embed(patch, lambda a: a.update(position_weight=a["position_weight"]._base))


def change_embed(patch: Patch, change: Callable[[Arguments], Any]) -> None:
    embed = transformer.embed_and_cast
    signature = inspect.signature(embed)

    def changed(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        after = change(bound.arguments)
        x = embed(*bound.args, **bound.kwargs)
        return Input(after(x.x)) if callable(after) else x

    patch.setattr(transformer, "embed_and_cast", changed)


# Dropout, in runs that keep every unit and scale it


DROPOUT: dict[str, Any] = {
    "context": parity.every_unit_kept,
    "dropout": 0.3,
    "attention_dropout": 0.2,
    "activation_dropout": 0.15,
    "activation_fn": "gelu",
    "layernorm_embedding": True,
}


def scale_of(a: Arguments) -> float:
    """1 / (1 - p) for the arguments of an op, whose p is set to 0."""
    scale: float = 1 / (1 - a["dropout"].p)
    a["dropout"] = a["dropout"]._replace(p=0.0)
    return scale


@mutation(**DROPOUT)
def dropout_before_layernorm_embedding(patch: Patch) -> None:
    def change(a: Arguments) -> Any:
        norm, a["norm"] = a["norm"], None
        return lambda x: layer_norm(x, norm, a["rng"])

    change_embed(patch, change)


@mutation(**DROPOUT)
def dropout_on_attention_scores(patch: Patch) -> None:
    def change(a: Arguments) -> None:
        a["scale"] *= scale_of(a)

    change_op(patch, "attention_fwd", change)
    change_op(patch, "attention_bwd", change)


@mutation(**DROPOUT)
def dropout_before_activation(patch: Patch) -> None:
    def change(a: Arguments) -> None:
        scale = scale_of(a)
        a["weight"], a["bias"] = a["weight"] * scale, a["bias"] * scale

    change_op(patch, "linear_activation_fwd", change)


@mutation(**DROPOUT)
def dropout_after_residual(patch: Patch) -> None:
    def change(a: Arguments) -> None:
        if a["residual"] is not None:
            a["x"], a["bias"], a["residual"] = a["x"] + a["bias"] + a["residual"], None, None

    change_op(patch, "dropout_residual_layer_norm_fwd", change)


@mutation(**DROPOUT)
def dropout_rate_for_the_activation(patch: Patch) -> None:
    def change(a: Arguments) -> None:
        p = DROPOUT["dropout"] if a["dropout"].p > 0 else 0.0
        a["dropout"] = a["dropout"]._replace(p=p)

    change_op(patch, "linear_activation_fwd", change)


# Activation and LayerNorm


def other_gelu(a: Arguments) -> None:
    a["activation"] = {"gelu": "gelu_accurate", "gelu_accurate": "gelu"}[a["activation"]]


@mutation(activation_fn="gelu")
def tanh_for_erf(patch: Patch) -> None:
    change_op(patch, "linear_activation_fwd", other_gelu)


@mutation(activation_fn="gelu_accurate")
def erf_for_tanh(patch: Patch) -> None:
    change_op(patch, "linear_activation_fwd", other_gelu)


@mutation()
def another_layer_norm_eps(patch: Patch) -> None:
    # PyTorch's and fairseq's default is 1e-5; T5, XLM and others use 1e-6 or 1e-12.
    change_op(patch, "dropout_residual_layer_norm_fwd", lambda a: a.update(eps=1e-6))


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_found(
    corpus: Path,
    native_runs: dict[str, list[parity.Update]],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = MUTATIONS[name]
    key = f"{case.flags} {case.updates} {case.context}"
    argv = command_line(corpus, LS, **case.flags)
    with case.context():
        if key not in native_runs:
            native = train(command_line(corpus, NATIVE, **case.flags), case.updates)
            train(argv, case.updates, like=native)
            native_runs[key] = native
        case.make(monkeypatch)
        with pytest.raises(ParityError):
            train(argv, case.updates, like=native_runs[key])
