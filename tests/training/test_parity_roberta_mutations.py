"""The parity runs of RoBERTa find common mistakes: each mistake is made here on purpose."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import helpers.parity as parity
import pytest
from helpers.mutations import Arguments, Patch, change_op, change_sample_size
from helpers.parity import CLASSES, LS, MASKED, NATIVE, ParityError, command_line, train
from torch import Tensor

from lightseq_fairseq.memory.gradients import DirectGradients
from lightseq_fairseq.memory.packing import Packed
from lightseq_fairseq.plugins import roberta, transformer
from lightseq_fairseq.plugins.roberta import LSRobertaModel
from lightseq_fairseq.step.adam_state import AdamState
from lightseq_fairseq.step.objectives import SentenceNumbers
from lightseq_fairseq.step.training_step import Count

UPDATES = 4
SPARED = 104  # rows of the projection to 98 tokens, with the spare ones
TRAINING = {"dropout": 0.3, "attention_dropout": 0.2, "pooler_dropout": 0.25, "lr": 1e-2}
RUNS: dict[str, dict[str, Any]] = {
    "masked": {**MASKED, "sample_break_mode": "complete", "lr": 1e-2},
    "masked-dropout": {**MASKED, "sample_break_mode": "complete", **TRAINING},
    "classes": {**CLASSES, **TRAINING},
    "numbers": {**CLASSES, **TRAINING, "num_classes": 2, "regression_target": True},
    "bf16": {**CLASSES, "lr": 1e-2, "bf16": True},
}


class Mutation(NamedTuple):
    make: Callable[[Patch], None]
    run: str


MUTATIONS: dict[str, Mutation] = {}


def mutation(run: str) -> Callable[[Callable[[Patch], None]], None]:
    def enter(make: Callable[[Patch], None]) -> None:
        MUTATIONS[make.__name__] = Mutation(make, run)

    return enter


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("data")
    text = parity.write_text(folder / "text")
    classes = parity.write_classes(folder / "classes", 24)
    numbers = parity.write_classes(folder / "numbers", 24, numbers=2)
    found = {"classes": classes, "bf16": classes, "numbers": numbers}
    return {run: found.get(run, text) for run in RUNS}


@pytest.fixture(scope="module")
def native_runs() -> dict[str, list[parity.Update]]:
    return {}


# Pre-training


@mutation("masked")
def all_tokens_count(patch: Patch) -> None:
    change_sample_size(patch, lambda self, counts: counts[Count.TOKENS])


@mutation("masked")
def the_vocabulary_has_no_bias(patch: Patch) -> None:
    def change(a: Arguments) -> None:
        if len(a["weight"]) == SPARED:
            a["bias"] = None

    change_op(patch, "linear_fwd", change)


@mutation("masked")
def the_head_has_the_other_gelu(patch: Patch) -> None:
    def change(a: Arguments) -> None:
        if a["x"].shape[1] == parity.FLAGS["encoder-embed-dim"]:
            a["activation"] = "gelu_accurate"

    change_op(patch, "bias_activation_dropout_fwd", change)


@mutation("masked")
def the_head_has_bert_s_eps(patch: Patch) -> None:
    def change(a: Arguments) -> None:
        if a["residual"] is None and a["bias"] is None:
            a["eps"] = 1e-12

    change_op(patch, "dropout_residual_layer_norm_fwd", change)


@mutation("masked")
def look_ups_overwrite_the_gradient_of_the_projection(patch: Patch) -> None:
    patch.setattr(DirectGradients, "is_added", lambda self, parameter: False)


@mutation("masked")
def the_head_sees_the_next_row(patch: Patch) -> None:
    packed_logits = LSRobertaModel.packed_logits

    def changed(self: Any, batch: Packed, rng: Tensor) -> Tensor:
        columns = batch["masked"].columns
        columns["rows"] = (columns["rows"] + 1) % len(batch["source"]["tokens"])
        return packed_logits(self, batch, rng)

    patch.setattr(LSRobertaModel, "packed_logits", changed)


@mutation("masked")
def embeddings_are_scaled(patch: Patch) -> None:
    embed = transformer.embed_and_cast
    patch.setattr(transformer, "embed_and_cast", lambda *a, **k: embed(*a, **{**k, "scale": 4.0}))


@mutation("masked")
def the_norm_of_the_embedding_has_bert_s_eps(patch: Patch) -> None:
    change_op(patch, "embedding_layer_norm_fwd", lambda a: a.update(eps=1e-12))


@mutation("masked-dropout")
def the_dropout_of_the_embedding_has_no_gradient(patch: Patch) -> None:
    change_op(
        patch, "embedding_layer_norm_bwd", lambda a: a.update(dropout=a["dropout"]._replace(p=0.0))
    )


@mutation("masked-dropout")
def no_dropout_after_the_norm_of_the_embedding(patch: Patch) -> None:
    embed = transformer.embed_and_cast
    patch.setattr(transformer, "embed_and_cast", lambda *a, **k: embed(*a, **{**k, "p": 0.0}))


# Fine-tuning


@mutation("classes")
def what_has_no_gradient_decays(patch: Patch) -> None:
    patch.setattr(AdamState, "leave_out", lambda self, parameters: None)


@mutation("bf16")
def what_has_no_gradient_does_not_decay_in_16_bits(patch: Patch) -> None:
    step = AdamState.update

    def changed(self: AdamState, *arguments: Any) -> None:
        unused = [
            p for p, v in zip(self.buffer.parameters, self.buffer.views(arguments[0]), strict=True)
            if not v.any()
        ]  # fmt: skip
        self.leave_out(unused)
        step(self, *arguments)

    patch.setattr(AdamState, "update", changed)


@mutation("classes")
def tokens_for_sentences(patch: Patch) -> None:
    change_sample_size(patch, lambda self, counts: counts[Count.TOKENS])


@mutation("classes")
def the_pooler_has_no_activation(patch: Patch) -> None:
    classified = roberta.classified

    def changed(head: Any, x: Tensor, rng: Tensor) -> Tensor:
        patch.setattr(head, "activation_fn", lambda x: x)
        return classified(head, x, rng)

    patch.setattr(roberta, "classified", changed)


@mutation("classes")
def one_dropout_in_the_head(patch: Patch) -> None:
    dropout, last = roberta.dropout, roberta._HEAD_SITES[1]
    patch.setattr(
        roberta,
        "dropout",
        lambda x, p, rng, site: dropout(x, 0.0 if site == last else p, rng, site),
    )


@mutation("classes")
def the_head_sees_the_last_token(patch: Patch) -> None:
    def changed(self: Any, batch: Packed, rng: Tensor, head: str) -> Tensor:
        source = batch["source"]
        x = self.encoder.sentence_encoder.features(source["tokens"], source.segments, rng)
        last = source.segments.cu_seqlens[1:] - 1
        return roberta.classified(self.classification_heads[head], x.index_select(0, last), rng)

    patch.setattr(LSRobertaModel, "class_outputs", changed)


@mutation("numbers")
def half_of_the_square(patch: Patch) -> None:
    losses = SentenceNumbers.losses

    def changed(self: Any, *arguments: Any) -> Any:
        found, counted = losses(self, *arguments)
        return found / 2, counted

    patch.setattr(SentenceNumbers, "losses", changed)


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_found(
    folders: dict[str, Path], native_runs: dict[str, list[parity.Update]], name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    make, run = MUTATIONS[name]
    ours, native = (command_line(folders[run], s, **RUNS[run]) for s in (LS, NATIVE))
    with contextlib.ExitStack() as around:
        around.enter_context(parity.every_unit_kept())
        if run == "bf16":
            around.enter_context(parity.mixed_precision_in_float64())
        if run not in native_runs:
            native_runs[run] = train(native, UPDATES)
            train(ours, UPDATES, like=native_runs[run])
        make(monkeypatch)
        with pytest.raises(ParityError):
            train(ours, UPDATES, like=native_runs[run])
