"""``--fp8``: training with products in fp8, on a CPU by the references.

With the same data, bf16 and fp8 compute the same gradients but for rounding. Mistakes that are made
here on purpose show what the comparison finds.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import helpers.training_runs as runs
import pytest
import torch
from helpers.mutations import Arguments, change_op
from helpers.parity import write_classes, write_corpus, write_text

from lightseq_fairseq import ops
from lightseq_fairseq.memory import fp8
from lightseq_fairseq.memory.fp8 import Fp8State
from lightseq_fairseq.plugins.transformer import LSTransformerModel
from lightseq_fairseq.step.adam_state import AdamState
from lightseq_fairseq.step.training_step import TrainingStep
from lightseq_fairseq.training import captured

WIDE = {"encoder_embed_dim": 32, "encoder_ffn_embed_dim": 64, "encoder_attention_heads": 2}
PAIRS: dict[str, Any] = {**runs.LS, **WIDE, "bf16": True}
PLAIN = {"dropout": 0, "attention_dropout": 0, "activation_dropout": 0}
PRE_NORM = {"encoder_normalize_before": True, "decoder_normalize_before": True}
FP8: dict[str, Any] = {**PAIRS, "fp8": True}


def scales_in(folder: Path, name: str = "checkpoint_last.pt") -> dict[str, torch.Tensor]:
    """The scales of fp8 in a checkpoint: of each product float32 [3, 17]."""
    state = torch.load(folder / name, weights_only=False)["extra_state"]
    return dict(state.get("lightseq_fp8", {}))


def assert_same_scales(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys() != set()
    assert [name for name, x in ours.items() if not torch.equal(x, theirs[name])] == []


# --- Results


VARIANTS: dict[str, dict[str, Any]] = {
    "pre-norm-gelu": {"activation_fn": "gelu", **PRE_NORM},
    "silu": {"activation_fn": "silu"},
    "several-layers": {"encoder_layers": 2, "decoder_layers": 3},
}


@pytest.mark.parametrize("flags", VARIANTS.values(), ids=VARIANTS)
def test_losses_are_near_those_of_bf16(data: Path, tmp_path: Path, flags: dict[str, Any]) -> None:
    """Over six epochs, with dropout; every operand of every product is cast."""
    flags = {**PAIRS, **flags, "max_update": 42, "no_epoch_checkpoints": True}
    near = runs.run(data, tmp_path / "bf16", **flags)
    losses = runs.run(data, tmp_path / "fp8", **flags, fp8=True)
    assert len(losses) == 42 and losses != near
    torch.testing.assert_close(losses, near, rtol=0.03, atol=0)
    assert sum(losses[-7:]) < 0.85 * sum(losses[:7])
    scales = scales_in(tmp_path / "fp8")
    layers = flags.get("encoder_layers", 1), flags.get("decoder_layers", 1)
    assert len(scales) == 4 * layers[0] + 6 * layers[1] + 1
    assert all((table[:, 1:] > 0).all() for table in scales.values())


def test_recomputed_activations_change_no_bit(data: Path, tmp_path: Path) -> None:
    flags = {**FP8, "no_save": True}
    expected = runs.run(data, tmp_path / "a", **flags)
    assert runs.run(data, tmp_path / "b", **flags, checkpoint_activations=True) == expected


@pytest.mark.parametrize("is_pre_norm", [False, True])
def test_ops_cast_the_operands_that_they_produce(
    data: Path, tmp_path: Path, is_pre_norm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is cast alone. In pre-norm stacks, LayerNorm reads the embeddings."""
    calls: Counter[str] = Counter()
    flags = {**FP8, **(PRE_NORM if is_pre_norm else {}), "no_save": True}

    def count(name: str) -> None:
        op = getattr(ops, name)

        def counted(*arguments: Any, **named: Any) -> Any:
            groups = ops.Cast, ops.Quantised, ops.WeightCast
            in_fp8 = any(isinstance(x, groups) for x in (*arguments, *named.values()))
            calls[name] += name.startswith("fp8_") or in_fp8
            return op(*arguments, **named)

        monkeypatch.setattr(ops, name, counted)

    for name in ops.REFERENCES:
        count(name)
    runs.run(data, tmp_path, **flags, max_update=1)
    first = calls.copy()
    runs.run(data, tmp_path, **flags, max_update=2)
    assert calls - first - first == {
        # Of attention's results (three) and gradients (four), and where an embedding casts.
        "fp8_transpose": 7 if is_pre_norm else 9,
        **({} if is_pre_norm else {"embedding_fwd": 2}),
        "attention_fwd": 3,
        "attention_bwd": 3,
        "dropout_residual_layer_norm_fwd": 6 if is_pre_norm else 4,
        "dropout_residual_layer_norm_bwd": 5,
        "linear_activation_fwd": 2,
        "activation_linear_bwd": 2,
        "linear_fwd": 9,
        "linear_bwd": 9,
        "adam_step": 1,
        "fp8_scales": 1,
    }


# fairseq configures language models by a dataclass, which has no place for settings of others.
TEXT = {**runs.TEXT, **{f"decoder_{x}_dim": 32 for x in ("embed", "input", "output", "ffn_embed")}}


@pytest.mark.parametrize(
    ("write", "flags"),
    [
        (write_text, TEXT),
        (write_text, runs.MASKED),
        (write_classes, runs.CLASSES),
        (write_corpus, runs.BART),
    ],
    ids=["text", "masked", "classes", "bart"],
)
def test_other_families(tmp_path: Path, write: Any, flags: dict[str, Any]) -> None:
    data, flags = write(tmp_path / "data"), {**flags, "bf16": True, "max_update": 12}
    near = runs.run(data, tmp_path / "bf16", **flags)
    losses = runs.run(data, tmp_path / "fp8", **flags, fp8=True)
    assert losses != near
    torch.testing.assert_close(losses, near, rtol=0.03, atol=0)


def test_validation_is_not_in_fp8(data: Path, tmp_path: Path) -> None:
    """The model's parameters give the same validation loss with and without the flag."""
    runs.run(data, tmp_path / "a", **FP8, max_update=3)
    losses = []
    evaluate = LSTransformerModel.forward

    def recorded(self: LSTransformerModel, *arguments: Any, **named: Any) -> Any:
        result = evaluate(self, *arguments, **named)
        losses.append(float(result[0].double().sum()))
        return result

    flags = {**PAIRS, "disable_validation": None, "no_save": True, "max_update": 4, "lr": 1e-9}
    flags |= {"restore_file": str(tmp_path / "a/checkpoint_last.pt"), "reset_optimizer": True}
    flags |= {"reset_lr_scheduler": True, "validate_interval_updates": 1}
    with mock.patch.object(LSTransformerModel, "forward", recorded):
        for in_fp8 in (True, None):
            runs.run(data, tmp_path / f"{in_fp8}", **flags, fp8=in_fp8)
    assert losses and losses[: len(losses) // 2] == losses[len(losses) // 2 :]


# --- Gradients


def gradients(data: Path, folder: Path, **flags: Any) -> dict[str, torch.Tensor]:
    """The first moments after one update with six micro-batches: the error of fewer ones depends
    on the batches (0.11 to 0.13)."""
    flags = {**PAIRS, **PLAIN, "clip_norm": 0, "update_freq": 6, "max_update": 1, **flags}
    with mock.patch.object(fp8, "_FIRST_PASSES", 2):  # enough for gradients of this size
        runs.run(data, folder, **flags)
    moments = runs.trained(folder).items()
    return {path: x for path, x in moments if path.endswith("/exp_avg")}


def error(ours: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """The largest relative error of a parameter's gradient, by L2 norms.

    Without key biases, whose gradients are zero but for rounding.
    """
    norms = {name: float(x.norm()) for name, x in exact.items() if x.norm() > 1e-6}
    assert len(norms) == len(exact) - 3
    return max(float((ours[name] - exact[name]).norm()) / norms[name] for name in norms)


MOST_ERROR = 0.12  # E4M3 has three bits after the point: a rounding is at most 1/16


def scaled(name: str) -> Callable[[Arguments], None]:
    """With twice the scale of this cast or operand."""

    def change(a: Arguments) -> None:
        if isinstance(a.get(name), (ops.Cast, ops.Quantised)):
            a[name] = a[name]._replace(scale=a[name].scale * 2)

    return change


def saved_values_of_another_layer(a: Arguments) -> None:
    if isinstance(a["x"], ops.Quantised):
        a["x"] = a["x"]._replace(transpose=a["x"].transpose.flip(0))


def overwritten(a: Arguments) -> None:
    a["accumulate"] &= not isinstance(a["x"], ops.Quantised)


MUTATIONS: dict[str, tuple[str, Callable[[Arguments], Any]]] = {
    "scale of dy in backward": ("linear_bwd", scaled("dy")),
    "scale of x in backward": ("linear_bwd", scaled("x")),
    "scale of the weight in backward": ("linear_bwd", scaled("weight")),
    "scale of x in forward": ("linear_fwd", scaled("x")),
    "scale of the weight in forward": ("linear_fwd", scaled("weight")),
    "other rows of x in backward": ("linear_bwd", saved_values_of_another_layer),
    "scale of the transpose in backward": (
        "fp8_transpose", lambda a: a.update(scale=a["scale"] * 2)
    ),
    "no bias": ("linear_fwd", lambda a: a.update(bias=None)),
    "the residual's gradient is lost": (
        "linear_bwd", lambda a: a.get("onto") is not None and a["onto"].zero_()
    ),
    "gradients of weights are overwritten": ("linear_bwd", overwritten),
    "no gradient of biases": (
        "fp8_transpose", lambda a: a.get("sums") is None or a.update(sums=a["sums"].clone())
    ),
    "no gradient of the activation's bias": (
        "activation_linear_bwd", lambda a: a.update(dbias=a["dbias"].clone())
    ),
    "activation without its bias": (
        "linear_activation_fwd", lambda a: a.update(bias=a["bias"] + 0.1)
    ),
    "scale of x before the activation": ("linear_activation_fwd", scaled("x")),
    "scale of dy behind the activation": ("activation_linear_bwd", scaled("dy")),
    "scale of the weight behind the activation": ("activation_linear_bwd", scaled("weight")),
    "dropout's factor in backward": ("activation_linear_bwd", lambda a: a.update(p=0.5)),
    "scale of the embedding": ("embedding_fwd", scaled("cast")),
    "scale of attention's result": ("attention_fwd", scaled("cast")),
    "scale of the gradient of queries": ("attention_bwd", scaled("q_cast")),
    "scale of the gradients of keys and values": ("attention_bwd", scaled("k_cast")),
    "scale of LayerNorm's result": ("dropout_residual_layer_norm_fwd", scaled("cast")),
    "scale of the gradient from LayerNorm": ("dropout_residual_layer_norm_bwd", scaled("cast")),
    "no gradient of a sublayer's last bias": (
        "dropout_residual_layer_norm_bwd",
        lambda a: a["dbias"] is None or a.update(dbias=a["dbias"].clone()),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def exact(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return gradients(data, tmp_path_factory.mktemp("exact") / "run", bf16=None)


def test_gradients_are_near_those_of_float32(
    data: Path, tmp_path: Path, exact: dict[str, torch.Tensor]
) -> None:
    found = error(gradients(data, tmp_path / "fp8", fp8=True), exact)
    assert error(gradients(data, tmp_path / "bf16"), exact) < 0.5 * found
    assert found < MOST_ERROR


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_found(
    data: Path, tmp_path: Path, exact: dict[str, torch.Tensor], name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    change_op(monkeypatch, *MUTATIONS[name])
    assert error(gradients(data, tmp_path / "fp8", fp8=True), exact) > MOST_ERROR


# --- Scales: first steps, resuming, overflow


@pytest.mark.parametrize("flags", [{}, PRE_NORM], ids=["post-norm", "pre-norm"])
def test_four_passes_suffice(
    data: Path, tmp_path: Path, flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if gradients are 2^12 times too large for the first scale. One pass does not suffice."""
    monkeypatch.setattr(fp8, "_FIRST_SCALE", 2.0**-20)
    flags = {**FP8, **flags, "encoder_layers": 6, "decoder_layers": 6, "max_update": 3}
    losses, scales = {}, {}
    for passes in (1, 4, 7):
        monkeypatch.setattr(fp8, "_FIRST_PASSES", passes)
        losses[passes] = runs.run(data, tmp_path / str(passes), **flags)
        tables = scales_in(tmp_path / str(passes)).items()
        scales[passes] = {name: table[:, 0] for name, table in tables}
    assert losses[1] != losses[4] == losses[7]
    assert_same_scales(scales[4], scales[7])


def test_first_passes_draw_the_masks_of_the_first_update(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[bool, list[int]]] = []
    losses = TrainingStep._forward_backward

    def recorded(self: TrainingStep, *arguments: Any) -> None:
        seen.append((self.fp8.passes_due > 0, self.rng.tolist()))
        losses(self, *arguments)

    monkeypatch.setattr(TrainingStep, "_forward_backward", recorded)
    runs.run(data, tmp_path, **FP8, no_save=True, update_freq=2, max_update=2)
    seeds = [[place, micro] for place in (3, 3, 3, 3, 3, 4) for micro in (0, 1)]
    assert [rng for _, rng in seen] == seeds
    assert [first for first, _ in seen] == [True] * 8 + [False] * 4


def test_saturated_numbers_are_logged(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a share of the numbers that were cast, weighted by them."""
    logged: list[tuple[float, float]] = []
    log = captured.metrics.log_scalar

    def recorded(key: str, value: float, weight: float = 1, **named: Any) -> None:
        if key == "fp8_sat":
            logged.append((value, weight))
        log(key, value, weight, **named)

    monkeypatch.setattr(captured.metrics, "log_scalar", recorded)
    runs.run(data, tmp_path / "a", **FP8, no_save=True, max_update=3)
    assert len(logged) == 3 and max(share for share, _ in logged) < 1e-4
    sizes = [count for _, count in logged]
    runs.run(data, tmp_path / "b", **FP8, max_update=3)
    file = tmp_path / "b/checkpoint_last.pt"
    state = torch.load(file, weights_only=False)
    state["extra_state"]["lightseq_fp8"] = {
        name: table * torch.tensor([[2.0**-10], [1.0], [1.0]])
        for name, table in scales_in(file.parent).items()
    }
    torch.save(state, file)
    logged.clear()
    runs.run(data, tmp_path / "b", **FP8, no_save=True, max_update=4)
    ((share, count),) = logged
    assert 0.05 < share < 0.5 and min(sizes) / 2 < count < 2 * max(sizes)


@pytest.mark.parametrize("flags", [{}, {"update_freq": 2}, PRE_NORM], ids=" ".join)
def test_a_resumed_run_is_the_whole_one(data: Path, tmp_path: Path, flags: dict[str, Any]) -> None:
    """Bit for bit, with the scales."""
    flags = {**FP8, **flags, "max_update": 20}
    whole = runs.run(data, tmp_path / "whole", **flags, save_interval_updates=9)
    restore = {"restore_file": str(next((tmp_path / "whole").glob("checkpoint_*_9.pt")))}
    assert runs.run(data, tmp_path / "rest", **flags, **restore) == whole[9:]
    ours, theirs = (runs.trained(tmp_path / name) for name in ("rest", "whole"))
    assert runs.differing(ours, theirs) == []
    assert_same_scales(scales_in(tmp_path / "rest"), scales_in(tmp_path / "whole"))


@pytest.mark.parametrize("other", ["fp32", "bf16", "native"])
def test_any_precision_goes_on_from_fp8_and_fp8_from_any(
    data: Path, tmp_path: Path, other: str
) -> None:
    second: dict[str, Any] = {**PAIRS, "bf16": None if other == "fp32" else True}
    if other == "native":
        second |= {**runs.NATIVE, "native": True}
    alone = runs.run(data, tmp_path / "alone", **PAIRS, max_update=24)
    for name, kinds in (("from", (FP8, second)), ("to", (second, FP8))):
        runs.run(data, tmp_path / name, **kinds[0], max_update=12)
        assert bool(scales_in(tmp_path / name)) == (name == "from")
        rest = runs.run(data, tmp_path / name, **kinds[1], max_update=24)
        assert rest == pytest.approx(alone[12:], rel=0.06)
        assert bool(scales_in(tmp_path / name)) == (name == "to")


def test_scales_of_another_model_are_not_used(data: Path, tmp_path: Path) -> None:
    """A run from a file without scales of these products begins as a new one."""
    runs.run(data, tmp_path / "a", **FP8, max_update=3)
    file = tmp_path / "a/checkpoint_last.pt"
    found = []
    for name in ("fewer", "none"):
        state = torch.load(file, weights_only=False)
        if name == "fewer":
            state["extra_state"]["lightseq_fp8"].popitem()
        else:
            del state["extra_state"]["lightseq_fp8"]
        torch.save(state, tmp_path / f"{name}.pt")
        restore = {"restore_file": str(tmp_path / f"{name}.pt")}
        found.append(runs.run(data, tmp_path / name, **FP8, **restore, max_update=6))
        assert len(scales_in(tmp_path / name)) == 11
    assert found[0] == found[1]


def test_a_new_optimizer_begins_with_new_scales(data: Path, tmp_path: Path) -> None:
    runs.run(data, tmp_path / "a", **FP8, max_update=3)
    new = {"restore_file": str(tmp_path / "a/checkpoint_last.pt"), "reset_optimizer": True}
    new |= {"reset_lr_scheduler": True, "reset_dataloader": True}
    with mock.patch.object(Fp8State, "after_pass", autospec=True, side_effect=AssertionError):
        with pytest.raises(AssertionError):
            runs.run(data, tmp_path / "b", **FP8, **new, max_update=4)
        runs.run(data, tmp_path / "a", **FP8, max_update=4)


def test_files_are_fairseqs(data: Path, tmp_path: Path) -> None:
    runs.run(data, tmp_path, **FP8, max_update=2)
    state = torch.load(tmp_path / "checkpoint_last.pt", weights_only=False)
    assert "fp8" not in state["cfg"]["common"] and not hasattr(state["cfg"]["model"], "fp8")
    assert all(x.dtype == torch.float32 for x in state["model"].values() if x.dim() == 2)


def test_a_gradient_that_is_not_finite_stops_the_run(data: Path, tmp_path: Path) -> None:
    runs.assert_stops_and_goes_on(data, tmp_path, **FP8)
    before = scales_in(tmp_path / "before")
    assert_same_scales(scales_in(tmp_path / "run", "crash.pt"), before)


@pytest.mark.parametrize("call", [1, 3, 6])
def test_out_of_memory_starts_the_update_again(data: Path, tmp_path: Path, call: int) -> None:
    """Also in a pass of the first steps."""
    flags = {**FP8, "max_update": 4}
    expected = runs.run(data, tmp_path / "a", **flags)
    with out_of_memory(call):
        assert runs.run(data, tmp_path / "b", **flags) == expected
    assert_same_scales(scales_in(tmp_path / "b"), scales_in(tmp_path / "a"))


@contextmanager
def out_of_memory(*calls: int, rank: int | None = None) -> Iterator[None]:
    """These forward passes of a process (counted from 1) fail."""
    packed_logits, count = LSTransformerModel.packed_logits, 0

    def fails(self: LSTransformerModel, *arguments: Any) -> Any:
        nonlocal count
        if rank is None or torch.distributed.get_rank() == rank:
            count += 1
            if count in calls:
                raise RuntimeError("CUDA out of memory: a test wanted all of it")
        return packed_logits(self, *arguments)

    with mock.patch.object(LSTransformerModel, "packed_logits", fails):
        yield


def test_weights_lie_in_memory_that_the_optimizer_leaves_free(data: Path, tmp_path: Path) -> None:
    """It is written when a checkpoint is saved; `test_a_resumed_run_is_the_whole_one` has one."""
    update, split, storages = TrainingStep.update, AdamState.split, set()

    def storage(x: torch.Tensor) -> int:
        return x.untyped_storage().data_ptr()

    def splits(self: AdamState, low: torch.Tensor) -> torch.Tensor | None:
        memory = split(self, low)
        storages.update(storage(x) for x in [memory] if x is not None)
        return memory

    def updates(self: TrainingStep, *arguments: Any) -> Any:
        report = update(self, *arguments)
        for weight in fp8.products(self.model).values():
            of = self.fp8.operands([weight])
            assert of is not None
            assert {storage(x) for x in of.matrix[:2] if x is not None} == storages
        return report

    with (
        mock.patch.object(TrainingStep, "update", updates),
        mock.patch.object(AdamState, "split", splits),
    ):
        runs.run(data, tmp_path, **FP8, no_save=True, max_update=2)
    assert len(storages) == 1


def test_weights_are_cast_again_although_it_failed_once(data: Path, tmp_path: Path) -> None:
    """Out of memory after a checkpoint: the batch is dropped, and the next update casts them."""
    restore, calls = Fp8State.restore_weights, 0

    def fails_once(self: Fp8State) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("CUDA out of memory: a test wanted all of it")
        restore(self)

    with mock.patch.object(Fp8State, "restore_weights", fails_once):
        runs.run(data, tmp_path, **FP8, save_interval_updates=2, max_update=3)
    assert calls == 2


# --- Several ranks


@contextmanager
def recorded_scales(folder: Path) -> Iterator[None]:
    """Each process appends its scales after each update to a file, a line of JSON for each.

    Before each update the fp8 weights must be the parameters, cast with the current scales.
    """
    update = TrainingStep.update

    def recorded(self: TrainingStep, *arguments: Any) -> Any:
        state = self.fp8
        for weight in fp8.products(self.model).values():
            of = state.operands([weight])
            assert of is not None
            cast = ops.Cast(of.weight.scale, torch.tensor(0.0), torch.tensor(0))
            for ours, exact in zip(of.matrix[:2], ops.fp8_quantise(weight, cast), strict=True):
                assert ours is not None
                assert torch.equal(ours.view(torch.uint8), exact.view(torch.uint8))
            assert of.weight.amax == cast.amax
        report = update(self, *arguments)
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        with (folder / f"scales{rank}").open("a") as file:
            tables = {name: table.tolist() for name, table in state.state().items()}
            print(json.dumps(tables), file=file)
        return report

    with mock.patch.object(TrainingStep, "update", recorded):
        yield


def recorded(folder: Path, rank: int = 0) -> list[dict[str, torch.Tensor]]:
    """The scales after each update, see `recorded_scales`."""
    lines = (folder / f"scales{rank}").read_text().splitlines()
    return [{k: torch.tensor(v) for k, v in json.loads(line).items()} for line in lines]


@pytest.mark.parametrize("sharded", [{}, {"zero_sharding": "os"}], ids=["whole", "sharded"])
def test_two_ranks_are_one_with_twice_the_batches(
    data: Path, tmp_path: Path, sharded: dict[str, Any]
) -> None:
    """They have the same scales. In the first update, before rounding differs, these are those of
    one rank, except that gradients are half as large. In the last update of an epoch, one rank has
    no batch."""
    flags = {**FP8, **PLAIN, "no_save": True, "max_update": 12}
    for name in ("ranks", "one"):
        (tmp_path / f"{name}.scales").mkdir()
    with recorded_scales(tmp_path / "ranks.scales"):
        both = runs.run_ranks(data, tmp_path / "ranks", 2, **flags, **sharded)
    with recorded_scales(tmp_path / "one.scales"):
        expected = runs.run(data, tmp_path / "one", **flags, update_freq=2)
    assert both[0] == both[1]
    torch.testing.assert_close(both[0], expected, rtol=2e-2, atol=0)
    ours, others = (recorded(tmp_path / "ranks.scales", rank) for rank in range(2))
    alone = recorded(tmp_path / "one.scales")
    assert len(ours) == len(others) == len(alone) == 12
    for mine, other in zip(ours, others, strict=True):
        assert_same_scales(mine, other)
    for table in ours[0].values():
        table[2] *= 2
    assert_same_scales(ours[0], alone[0])
    for mine, other in zip(ours[-1].values(), alone[-1].values(), strict=True):
        factor = torch.tensor([1.0, 1.0, 2.0])
        assert (torch.log2(mine[:, 0] * factor / other[:, 0]).abs() <= 1).all()


def test_two_ranks_go_on_from_the_scales(data: Path, tmp_path: Path) -> None:
    flags = {**FP8, "max_update": 8, "save_interval_updates": 3}
    whole = runs.run_ranks(data, tmp_path / "whole", 2, **flags)
    flags["restore_file"] = str(next((tmp_path / "whole").glob("checkpoint_*_3.pt")))
    rest = runs.run_ranks(data, tmp_path / "rest", 2, **flags)
    assert rest == [losses[3:] for losses in whole]
    assert_same_scales(scales_in(tmp_path / "rest"), scales_in(tmp_path / "whole"))


def test_a_rank_without_memory_keeps_the_others_company(data: Path, tmp_path: Path) -> None:
    """In the second pass of the first steps; its batch does not count."""
    flags = {**FP8, "no_save": True, "max_update": 5}
    with out_of_memory(2, 3, rank=1):
        losses = runs.run_ranks(data, tmp_path / "ranks", 2, **flags)
    assert losses[0] == losses[1] and len(losses[0]) == 5
