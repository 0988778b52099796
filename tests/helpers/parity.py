"""Trains fairseq's Transformer and ours side by side and compares every update.

Real text, fairseq's own parser, task, iterators and Trainer; only the architecture, the optimizer
and the criterion are exchanged. In float64 two correct programs differ by rounding (1e-13 or so)
and two different ones by far more, so a run compares functions, not noise.

Shapes: V = vocabulary, B = sentences of a batch, L = longest sentence.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightseq_fairseq import fairseq_compat

fairseq_compat.prepare()

import helpers.compositions  # noqa: E402, F401  (makes `parse` faster)
from fairseq import options, tasks, utils  # noqa: E402
from fairseq.criterions import sentence_prediction  # noqa: E402
from fairseq.data import iterators  # noqa: E402
from fairseq.dataclass.utils import convert_namespace_to_omegaconf  # noqa: E402
from fairseq.logging import metrics  # noqa: E402
from fairseq.modules import transformer_layer  # noqa: E402
from fairseq.optim import fp16_optimizer  # noqa: E402
from fairseq.trainer import Trainer as NativeTrainer  # noqa: E402

import lightseq_fairseq.plugins  # noqa: E402, F401
from lightseq_fairseq import ops  # noqa: E402
from lightseq_fairseq.fairseq_compat.batches import end_workers  # noqa: E402
from lightseq_fairseq.fairseq_compat.overlay import Overlay  # noqa: E402
from lightseq_fairseq.layers.stack import Stack  # noqa: E402
from lightseq_fairseq.ops import philox  # noqa: E402
from lightseq_fairseq.training.trainer import Trainer  # noqa: E402

VOCABULARY = 97
PAD = 1

# On tensors this small several threads mostly wait for each other, which takes minutes on a busy
# machine. One thread also sums in the same order on every machine, so all numbers here are the
# same.
torch.set_num_threads(1)


class Systems(NamedTuple):
    """Which architecture, optimizer and criterion a run uses: "ls" or "native"."""

    arch: str
    optimizer: str
    criterion: str


NATIVE = Systems("native", "native", "native")
LS = Systems("ls", "ls", "ls")

# Flags of the four models of the parity runs.
PRE_NORM = {"encoder_normalize_before": True, "decoder_normalize_before": True}
SHARED = {"share_all_embeddings": True}
NORMS = pytest.mark.parametrize("norm", [{}, PRE_NORM], ids=["post-norm", "pre-norm"])

# The schedule of the parity runs; a test's own flags override these.
FLAGS: dict[str, Any] = {
    "task": "translation",
    "dataset-impl": "raw",
    "source-lang": "src",
    "target-lang": "tgt",
    "arch": "transformer",
    "optimizer": "adam",
    "criterion": "label_smoothed_cross_entropy",
    "encoder-embed-dim": 16,
    "encoder-ffn-embed-dim": 24,
    "encoder-attention-heads": 2,
    "encoder-layers": 2,
    "decoder-layers": 2,
    "decoder-attention-heads": 2,
    "dropout": 0.0,
    "label-smoothing": 0.1,
    "adam-betas": "(0.9, 0.98)",
    "adam-eps": 1e-8,
    "lr": 1e-3,
    "lr-scheduler": "inverse_sqrt",
    "warmup-updates": 10,
    "weight-decay": 0.1,
    "clip-norm": 0.7,
    "update-freq": 2,
    "max-tokens": 64,
    "seed": 7,
    "num-workers": 0,
    "log-format": "none",
    "no-save": True,
    "cpu": True,
}

# For language models, instead of sentence pairs and an encoder.
TEXT: dict[str, Any] = {
    "task": "language_modeling",
    "arch": "transformer_lm",
    "criterion": "cross_entropy",
    "label_smoothing": None,
    "source_lang": None,
    "target_lang": None,
    "encoder_embed_dim": None,
    "encoder_ffn_embed_dim": None,
    "encoder_attention_heads": None,
    "encoder_layers": None,
    "tokens_per_sample": 12,
    "decoder_embed_dim": 16,
    "decoder_input_dim": 16,
    "decoder_output_dim": 16,
    "decoder_ffn_embed_dim": 24,
}


# For masked language models, on the text of language models.
MASKED: dict[str, Any] = {
    "task": "masked_lm",
    "arch": "roberta",
    "criterion": "masked_lm",
    "label_smoothing": None,
    "source_lang": None,
    "target_lang": None,
    "dataset_impl": None,
    "decoder_layers": None,
    "decoder_attention_heads": None,
    "attention_dropout": 0.0,
    "tokens_per_sample": 12,
    "mask_prob": 0.3,
    "num_workers": 1,  # which must learn of each epoch
}

# For sentences with labels.
CLASSES: dict[str, Any] = {
    **MASKED,
    "task": "sentence_prediction",
    "criterion": "sentence_prediction",
    "tokens_per_sample": None,
    "mask_prob": None,
    "num_classes": 3,
    "init_token": 0,
    "separator_token": 2,
    "max_positions": 32,
}


def write_corpus(folder: Path, pairs: int = 48, longest: int = 9, seed: int = 1) -> Path:
    """Writes raw text of ``pairs`` sentence pairs and two dictionaries of V = 97 entries."""
    rng = random.Random(seed)
    words = [f"w{i}" for i in range(VOCABULARY - 4)]
    lines = "".join(f"{word} {1000 - i}\n" for i, word in enumerate(words))
    sides: dict[str, list[str]] = {"src": [], "tgt": []}
    for _ in range(pairs):
        ids = [
            min(int(rng.expovariate(0.05)), len(words) - 1) for _ in range(rng.randint(1, longest))
        ]
        translated = [(7 * i + 3) % len(words) for i in reversed(ids)]
        extra = [rng.randrange(len(words)) for _ in range(rng.randint(0, 2))]
        sides["src"].append(" ".join(words[i] for i in ids))
        sides["tgt"].append(" ".join(words[i] for i in translated + extra))
    folder.mkdir(parents=True, exist_ok=True)
    for side, text in sides.items():
        (folder / f"dict.{side}.txt").write_text(lines)
        for split in ("train", "valid"):
            (folder / f"{split}.src-tgt.{side}").write_text("\n".join(text) + "\n")
    return folder


def write_text(folder: Path, lines: int = 60, longest: int = 9, seed: int = 1) -> Path:
    """Writes raw running text: documents of sentences, separated by empty lines; V = 97."""
    rng = random.Random(seed)
    words = [f"w{i}" for i in range(VOCABULARY - 4)]
    text = [
        " ".join(
            words[min(int(rng.expovariate(0.05)), len(words) - 1)]
            for _ in range(rng.randint(1, longest) if i % 7 != 6 else 0)
        )
        for i in range(lines)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "dict.txt").write_text("".join(f"{w} {1000 - i}\n" for i, w in enumerate(words)))
    for split in ("train", "valid"):
        (folder / split).write_text("\n".join(text) + "\n")
    return folder


def write_classes(folder: Path, sentences: int = 40, numbers: int = 0, seed: int = 1) -> Path:
    """Writes raw pairs of sentences with one of three labels, or ``numbers`` numbers, each."""
    rng = random.Random(seed)
    words = [f"w{i}" for i in range(VOCABULARY - 4)]
    for side in ("input0", "input1", "label"):
        (folder / side).mkdir(parents=True, exist_ok=True)
        names = [f"class{i}" for i in range(3)] if side == "label" else words
        (folder / side / "dict.txt").write_text(
            "".join(f"{w} {1000 - i}\n" for i, w in enumerate(names))
        )
        for split in ("train", "valid"):
            lines = []
            for _ in range(sentences):
                if side != "label":
                    lines.append(" ".join(rng.choices(words, k=rng.randint(1, 7))))
                elif numbers:
                    lines.append(" ".join(str(rng.uniform(-2, 2)) for _ in range(numbers)))
                else:
                    lines.append(rng.choice(names))
            name = f"{split}.label" if side == "label" and numbers else split
            (folder / side / name).write_text("\n".join(lines) + "\n")
    return folder


def command_line(data: Path, systems: Systems = LS, **flags: Any) -> list[str]:
    """fairseq's command line. A flag with value True has no argument; a flag with value None is
    omitted."""
    merged = {**FLAGS, **{name.replace("_", "-"): value for name, value in flags.items()}}
    for place, system in zip(("arch", "optimizer", "criterion"), systems, strict=True):
        if system == "ls":
            merged[place] = "ls_" + merged[place]
    argv = [str(data)]
    for name, value in merged.items():
        if value is not None:
            argv += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return argv


def parse(argv: Sequence[str]) -> Any:
    """fairseq's configuration of a command line."""
    # A copy for each caller: builders modify it, and omegaconf's deepcopy shares the model's
    # section.
    return pickle.loads(_parsed(tuple(argv)))


@functools.cache
def _parsed(argv: tuple[str, ...]) -> bytes:
    # Cached, because hydra takes most of the time of a short run.
    parser = options.get_training_parser()
    args = options.parse_args_and_arch(parser, list(argv))
    return pickle.dumps(convert_namespace_to_omegaconf(args))


def build(cfg: Any) -> tuple[Any, Any, Any]:
    """The task with its training set, the model and the criterion, seeded as in
    ``fairseq_cli.train``."""
    utils.set_torch_seed(cfg.common.seed)
    task = tasks.setup_task(cfg.task)
    model, criterion = task.build_model(cfg.model), task.build_criterion(cfg.criterion)
    task.load_dataset("train")
    return task, model, criterion


@dataclass
class Update:
    """What one update did.

    Attributes:
        loss: summed over the tokens of all micro-batches.
        norm: gradient norm, as logged by the trainer.
        sample_size: sum over all micro-batches.
        sample_sizes: of each logging output; in fairseq's own step, of each micro-batch.
        output: everything that the criterion logs, summed over the micro-batches.
        logged: what the trainer logs for the update: loss, nll_loss, accuracy, rounded.
        parameters: by name, after the update.
    """

    loss: float
    norm: float
    sample_size: float
    sample_sizes: list[float]
    output: dict[str, float]
    logged: dict[str, float]
    parameters: dict[str, Tensor]


Change = Callable[[dict[str, Any]], dict[str, Any]]


def train(
    argv: Sequence[str], updates: int, dtype: torch.dtype = torch.float64,
    change_batch: Change | None = None, like: Sequence[Update] = (),
) -> list[Update]:  # fmt: skip
    """Runs ``updates`` updates and records each; ``change_batch`` may modify every batch first.

    Each update is compared with that of ``like``, so that the first difference ends the run.
    """
    with native_in_float64() if dtype == torch.float64 else contextlib.nullcontext():
        cfg = parse(argv)
        task, model, criterion = build(cfg)
        model.to(dtype)
        metrics.reset()
        ls = any("ls_" in name for name in argv)
        trainer = (Trainer if ls else NativeTrainer)(cfg, task, model, criterion)
        history: list[Update] = []
        reduce_and_log = trainer._reduce_and_log_stats

        def recorded(outputs: list[dict[str, Any]], sample_size: float, norm: Tensor) -> Any:
            output = {name: float(sum(o[name] for o in outputs)) for name in outputs[0]}
            sizes = [float(o["sample_size"]) for o in outputs]
            logged = reduce_and_log(outputs, sample_size, norm)
            history.append(
                Update(
                    output["loss"],
                    float(norm),
                    float(sample_size),
                    sizes,
                    output,
                    logged={k: float(v) for k, v in logged.items() if k in _LOGGED},
                    parameters={n: p.detach().clone() for n, p in model.named_parameters()},
                )
            )
            return logged

        trainer._reduce_and_log_stats = recorded
        groups = batches(trainer, cfg)
        while len(history) < updates:
            samples = next(groups)
            if change_batch is not None:
                samples = [change_batch(sample) for sample in samples]
            trainer.train_step(samples)
            if ls:
                trainer.settle()
            if like:
                compare(history[-1:], like[len(history) - 1 : len(history)])
    return history


_LOGGED = ("loss", "nll_loss", "accuracy", "n_correct", "total")


def batches(trainer: Any, cfg: Any) -> Iterator[list[dict[str, Any]]]:
    """Groups of ``--update-freq`` batches, epoch after epoch."""
    epoch_itr = trainer.get_train_iterator(epoch=1, load_dataset=False)  # `build` has loaded it
    try:
        while True:
            itr = epoch_itr.next_epoch_itr(shuffle=True)
            trainer.begin_epoch(epoch_itr.epoch)
            for group in iterators.GroupedIterator(itr, cfg.optimization.update_freq[0]):
                if len(group) == cfg.optimization.update_freq[0]:
                    yield group
            epoch_itr = trainer.get_train_iterator(epoch_itr.next_epoch_idx, load_dataset=False)
    finally:
        end_workers(epoch_itr)


@contextlib.contextmanager
def native_in_float64() -> Iterator[None]:
    """fairseq without its casts to float32, so that a float64 model stays in float64.

    log_softmax, softmax and the gradient norm use ``torch.float32``, which is float64 here. gelu
    and the loss of numbers call ``.float()``, which leaves float64 as it is here.
    """
    wide = Overlay(torch, float32=torch.float64)
    with (
        mock.patch.object(utils, "torch", wide),
        mock.patch.object(import_module("fairseq.modules.cross_entropy"), "torch", wide),
        mock.patch.object(sentence_prediction, "torch", wide),
        mock.patch.object(torch.Tensor, "float", float_in_float64()),
    ):
        yield


def float_in_float64() -> Callable[..., Tensor]:
    """``Tensor.float`` that leaves float64 as it is, and makes float64 of whole numbers.

    fairseq's masked_lm has its sample size on the device, and divides the gradient by its float.
    """
    to_float = torch.Tensor.float

    def float_(x: Tensor, *args: Any, **options: Any) -> Tensor:
        is_narrow = x.is_floating_point() and x.dtype != torch.float64
        return to_float(x, *args, **options) if is_narrow else x.double()

    return float_


@contextlib.contextmanager
def mixed_precision_in_float64() -> Iterator[None]:
    """Everything that --fp16 and --bf16 change except the precision of the numbers.

    All of fairseq's code for mixed precision runs: loss scale, clipping rule, copies of the
    parameters. But requests for 16-bit or 32-bit numbers return the float64 numbers.
    """
    to = torch.nn.Module.to

    def to_(module: torch.nn.Module, *args: Any, **options: Any) -> torch.nn.Module:
        bf16 = options.get("dtype") == torch.bfloat16
        return module if bf16 else to(module, *args, **options)

    with (
        mock.patch.object(torch.Tensor, "float", float_in_float64()),
        mock.patch.object(fp16_optimizer, "torch", Overlay(torch, float=torch.float64)),
        mock.patch.object(torch.nn.Module, "half", lambda module: module),
        mock.patch.object(torch.nn.Module, "to", to_),
    ):
        yield


@contextlib.contextmanager
def every_unit_kept() -> Iterator[None]:
    """Dropout that drops nothing but still scales by 1 / (1 - p), in fairseq and in ours.

    Two models then agree only if they have dropout at the same places with the same rates.
    """
    functional = torch.nn.functional
    attention = functional.scaled_dot_product_attention

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return x * (1 / (1 - p)) if training else x

    def scaled_dot_product_attention(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, **options: Any,
    ) -> Tensor:  # fmt: skip
        return attention(q, k, v, attn_mask, 0.0, is_causal, **options) * (1 / (1 - dropout_p))

    with (
        mock.patch.object(functional, "dropout", dropout),
        mock.patch.object(functional, "scaled_dot_product_attention", scaled_dot_product_attention),
        mock.patch.object(philox, "_least_kept", lambda p: -(1 << 15)),
        mock.patch.object(
            philox, "_attention_threshold", lambda rng, site, p: rng.new_zeros(1, dtype=torch.int32)
        ),
    ):
        rng = torch.zeros(2, dtype=torch.int64)
        assert ops.dropout_mask(rng, 0, 64, 64, 0.9).all()
        assert ops.attention_keep_mask(rng, 0, torch.arange(64), 64, 0.9).all()
        yield


def permuted(seed: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)

    def change(sample: dict[str, Any]) -> dict[str, Any]:
        order = torch.randperm(len(sample["target"]), generator=generator)
        inputs = {name: value[order] for name, value in sample["net_input"].items()}
        return {**sample, "net_input": inputs, "target": sample["target"][order]}

    return change


@contextlib.contextmanager
def layers_in_backward() -> Iterator[list[str]]:
    """Collects the class names of the layers, ours and fairseq's, that backward runs again."""
    found: list[str] = []

    def noting(forward: Callable[..., Any], name: Callable[..., str]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def noted(*arguments: Any, **keywords: Any) -> Any:
            if torch._C._current_graph_task_id() != -1:
                found.append(name(*arguments))
            return forward(*arguments, **keywords)

        return noted

    def ours(stack: Stack, layer: Any, *_: Any) -> str:
        return "EncoderLayer" if len(layer) == 2 else "DecoderLayer"  # sublayers

    def native(layer: Any, *_: Any) -> str:
        return type(layer).__name__

    with contextlib.ExitStack() as stack:
        for cls, method, name in (
            (Stack, "_run", ours),
            (transformer_layer.TransformerEncoderLayerBase, "forward", native),
            (transformer_layer.TransformerDecoderLayerBase, "forward", native),
        ):
            noting_one = noting(getattr(cls, method), name)
            stack.enter_context(mock.patch.object(cls, method, noting_one))
        yield found


class Deviation(NamedTuple):
    """The largest differences between two updates.

    loss and norm are relative, parameters absolute. The biases of the keys are separate: softmax
    does
    not depend on them, so their true gradient is zero, and Adam scales up the rounding errors in
    it.
    """

    loss: float
    norm: float
    parameters: float
    key_bias: float


TOLERANCE = Deviation(loss=1e-9, norm=1e-9, parameters=1e-9, key_bias=1e-6)


def deviation(ours: Update, native: Update) -> Deviation:
    assert ours.parameters.keys() == native.parameters.keys()
    worst = {True: 0.0, False: 0.0}
    for name, value in native.parameters.items():
        difference = (ours.parameters[name].double() - value.double()).abs().max().item()
        key = name.endswith("k_proj.bias")
        worst[key] = max(worst[key], difference)
    return Deviation(
        _relative(ours.loss, native.loss),
        _relative(ours.norm, native.norm),
        worst[False],
        worst[True],
    )


def largest_deviation(ours: Sequence[Update], native: Sequence[Update]) -> Deviation:
    """The largest difference of each kind over all updates."""
    found = [deviation(a, b) for a, b in zip(ours, native, strict=True)]
    return Deviation(*map(max, zip(*found, strict=True)))


def _relative(a: float, b: float) -> float:
    return abs(a - b) / abs(b) if b else abs(a)


class ParityError(AssertionError):
    """Two runs differ; the message says in what, in which update and by how much."""


def compare(
    ours: Sequence[Update], native: Sequence[Update], tolerance: Deviation = TOLERANCE
) -> None:
    """Raise ParityError unless all updates agree."""
    assert len(ours) == len(native) > 0
    for number, (a, b) in enumerate(zip(ours, native, strict=True), 1):
        if a.sample_size != b.sample_size:
            raise ParityError(f"update {number}: sample size {a.sample_size}, {b.sample_size}")
        for x, y in ((a.logged, b.logged), (a.output, b.output)):
            same_names = x.keys() == y.keys()
            if not same_names or any(_relative(x[k], y[k]) > tolerance.loss for k in y):
                raise ParityError(f"update {number}: logged {x}, native {y}")
        found = deviation(a, b)
        for name, value, limit in zip(Deviation._fields, found, tolerance, strict=True):
            if not value <= limit:
                raise ParityError(f"update {number}: {name} differs by {value:.2e} > {limit:.0e}")
