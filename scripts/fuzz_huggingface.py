#!/usr/bin/env python3
"""Compare accelerated Hugging Face models with plain copies, for random configurations.

    python -m scripts.fuzz_huggingface --seed 1 --count 60
    python -m scripts.fuzz_huggingface --seed 1 --first 17 --count 1    # one of them again

For each configuration: outputs, loss and gradients of three batches, eager and as for graphs; saved
files; five updates of transformers' Trainer with a plain and with an accelerated model, and of our
Trainer; sequences and scores of generate. Without dropout; on a CPU in float64 or float32, with
--device cuda in float32.

Each line has the configuration, the first difference, and the reasons why Hugging Face's own code
ran in place of ours. The exit status is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

import lightseq_fairseq.huggingface as lightseq
from lightseq_fairseq.base.errors import UserError
from scripts import random_models as models

UPDATES = 5
MASKS = ("ragged", "left", "full", "none", "holes", "left holes", "one sentence", "one token")
# Beside those that our search covers.
MORE_OPTIONS: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.2}, {"bad_words_ids": [[5, 6]]}, {"no_repeat_ngram_size": 1},
    {"eos_token_id": [2, 8], "forced_eos_token_id": None}, {"use_cache": False},
)  # fmt: skip
SCHEDULES = ("linear", "cosine", "constant", "polynomial", "inverse_sqrt")


class Differs(Exception):
    """What differs, and by how much."""


@dataclass
class Case:
    """A configuration. source: draws all that follows. reasons: why Hugging Face's code ran."""

    source: random.Random
    name: str
    config: dict[str, Any]
    dtype: torch.dtype
    device: str
    masks: str
    reasons: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        config = " ".join(f"{name}={value}" for name, value in self.config.items())
        return f"{self.name} {config} in {str(self.dtype)[6:]}, {self.masks} masks"

    @classmethod
    def draw(cls, seed: int, index: int, families: tuple[str, ...], device: str) -> Case:
        source = random.Random(f"{seed}/{index}")
        torch.manual_seed(source.randrange(1 << 30))
        family = source.choice(families)
        name = family + source.choice(models.heads_of(family))
        if source.random() < 0.5:  # with words to generate
            name = {"GPT2": "GPT2LMHeadModel"}.get(family, name)
        exact = device == "cpu" and source.random() < 0.6
        config = models.random_config(source, name)
        dtype = torch.float64 if exact else torch.float32
        return cls(source, name, config, dtype, device, source.choice(MASKS))

    @property
    def tolerance(self) -> float:
        # transformers computes in float32 ViT's eager softmax and ModernBERT's rotations.
        rounded = self.name.startswith("ViT") and self.config["attn_implementation"] == "eager"
        rounded |= self.name.startswith("ModernBert")
        return 1e-9 if self.dtype == torch.float64 and not rounded else 2e-4

    def batch(self, model: Any) -> dict[str, Any]:
        batch = self.typed(models.random_batch(self.source, model, (self.masks,)))
        return {name: x.to(self.device) for name, x in batch.items()}

    def typed(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: x.to(self.dtype) if x.is_floating_point() else x for name, x in batch.items()}

    def note(self, model: Any) -> None:
        self.reasons |= {text for text in lightseq.report(model).fallbacks if "cache" not in text}


def same(what: str, found: Any, expected: Any, tolerance: float) -> None:
    """Raises `Differs`, unless the tensors or mappings of tensors are equal but for this error,
    relative to the largest number, or to 1."""
    if isinstance(expected, dict):
        if list(found) != list(expected):
            raise Differs(f"{what}: {sorted(set(found) ^ set(expected))} or their order")
        for name in expected:
            same(f"{what} {name}", found[name], expected[name], tolerance)
        return
    found, expected = (torch.as_tensor(x).detach().cpu() for x in (found, expected))
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        raise Differs(f"{what}: {found.shape} {found.dtype}, {expected.shape} {expected.dtype}")
    if expected.is_floating_point():
        scale = expected.nan_to_num().abs().amax().clamp_min(1.0) if expected.numel() else 1.0
        near = torch.isclose(found / scale, expected / scale, 0.0, tolerance, equal_nan=True)
    else:
        near = found == expected
    if not near.all():
        raise Differs(f"{what}: {found[~near][:3].tolist()}, not {expected[~near][:3].tolist()}")


def compare_passes(case: Case, plain: Any, folder: Path) -> None:
    ours = lightseq.accelerate(copy.deepcopy(plain))
    for number in range(3):
        batch = case.batch(plain)
        with models.by_graphs(number > 0 and case.device == "cpu"):
            for _ in range(1 + number):  # the second pass of a shape is captured
                found = models.computed(ours.train(), batch)
        expected = models.computed(plain.train(), batch)
        for what, mine, theirs in zip(expected._fields, found, expected):
            if what != "states":
                same(what, mine, theirs, case.tolerance)
        with torch.no_grad():
            # A cache is made only if it is asked for.
            mine, theirs = (
                {k: x for k, x in model.eval()(**batch).items() if isinstance(x, Tensor)}
                for model in (ours, plain)
            )
        if "loss" in theirs:
            same("evaluation", mine["loss"], theirs["loss"], case.tolerance)
        same("names in evaluation", *(dict.fromkeys(x, 0) for x in (mine, theirs)), 0.0)
    case.note(ours)


def compare_files(case: Case, plain: Any, folder: Path) -> None:
    ours = lightseq.accelerate(copy.deepcopy(plain))
    for name, model in (("plain", plain), ("ours", ours)):
        model.save_pretrained(folder / name)
    same("files", *(load_file(folder / n / "model.safetensors") for n in ("ours", "plain")), 0.0)
    same("state dict", ours.state_dict(), plain.state_dict(), 0.0)
    loaded = type(plain).from_pretrained(folder / "ours").to(case.dtype)
    same("loaded model", loaded.state_dict(), plain.state_dict(), 0.0)


def compare_training(case: Case, plain: Any, folder: Path) -> None:
    source, name = case.source, case.name
    items = []
    for _ in range(9):
        mask, _ = models.random_mask(source, name, (case.masks,))
        batch = case.typed(models.batch_of(plain, mask))
        items.append({key: x[0] for key, x in batch.items()})
    if items[0].keys().isdisjoint(("labels", "start_positions", "bool_masked_pos")):
        return
    pad = getattr(plain.config, "pad_token_id", 0)
    labels, shifted = items[0].get("labels"), None
    # transformers cannot smooth the labels of M2M-100, nor of several heads.
    is_smoothed = labels is not None and not labels.is_floating_point()
    is_smoothed &= not name.startswith("M2M100") and not name.endswith("ForPreTraining")
    smoothing = source.choice((0.0, 0.0, 0.1)) if is_smoothed else 0.0
    if smoothing:
        shifted = getattr(plain, "prepare_decoder_input_ids_from_labels", None)

    def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        batch = models.collated(rows, pad, left=case.masks.startswith("left"))
        if shifted is not None:  # as DataCollatorForSeq2Seq
            batch["decoder_input_ids"] = shifted(batch["labels"])
        return batch

    settings: dict[str, Any] = {
        "max_steps": UPDATES, "per_device_train_batch_size": source.randint(1, 4),
        "gradient_accumulation_steps": source.choice((1, 1, 2, 3)), "learning_rate": 3e-3,
        "weight_decay": source.choice((0.0, 0.1)), "max_grad_norm": source.choice((0.0, 0.1, 1.0)),
        "lr_scheduler_type": source.choice(SCHEDULES), "warmup_steps": source.choice((0, 2)),
        "label_smoothing_factor": smoothing, "dataloader_drop_last": source.random() < 0.5,
        # Gradients that are zero but for rounding do not become updates.
        "adam_epsilon": 1e-4, "logging_steps": 1, "save_strategy": "no", "report_to": [],
        "use_cpu": case.device == "cpu", "disable_tqdm": True, "remove_unused_columns": False,
    }  # fmt: skip
    runs = []
    for cls, accelerates in ((transformers.Trainer, False), (transformers.Trainer, True),
                             (lightseq.Trainer, False)):  # fmt: skip
        model = copy.deepcopy(plain).train()
        model = lightseq.accelerate(model) if accelerates else model
        args = transformers.TrainingArguments(str(folder), **settings)
        trainer = cls(model, args, train_dataset=items, data_collator=collate)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        log = {
            f"{line['step']} {key}": torch.tensor(float(line[key]), dtype=torch.float64)
            for line in trainer.state.log_history
            for key in ("loss", "grad_norm", "learning_rate")
            if "loss" in line
        }
        runs.append((log, model.state_dict()))
        if cls is lightseq.Trainer or accelerates:
            case.note(model)
    if not all(x.isfinite() for x in runs[0][0].values()):
        case.reasons.add("losses or gradients of transformers are not finite")
        return  # ours skips such updates, see docs/hugging-face.md
    for what, (log, weights) in zip(("accelerated", "our Trainer"), runs[1:]):
        same(what, log, runs[0][0], max(10 * case.tolerance, 1e-6))
        same(what, weights, runs[0][1], max(20 * case.tolerance, 1e-7))


def compare_words(case: Case, plain: Any, folder: Path) -> None:
    if not case.name.endswith(("Generation", "MTModel", "LMHeadModel")):
        return
    plain = models.with_ends(copy.deepcopy(plain).float(), case.source)
    ours = lightseq.accelerate(copy.deepcopy(plain))
    for _ in range(3):
        batch = case.batch(plain)
        batch = {key: batch[key] for key in ("input_ids", "attention_mask") if key in batch}
        if case.name.startswith("GPT2") and case.masks == "ragged":  # as users pad prompts
            batch = {key: x.flip(1) for key, x in batch.items()}
        options = models.random_options(case.source, plain.config)
        if case.source.random() < 0.3:
            options |= case.source.choice(MORE_OPTIONS)
        found, expected = (_generated(model, batch, options) for model in (ours, plain))
        if not _alike(found, expected):
            raise Differs(f"generate with {options}: {found}, not {expected}")
    case.note(ours)


def _generated(model: Any, batch: dict[str, Tensor], options: dict[str, Any]) -> Any:
    """Sequences and scores, or the error's sentence."""
    try:
        found = model.generate(**batch, **options)
    except (RuntimeError, ValueError, IndexError) as error:
        return f"{type(error).__name__}: {error}"
    if isinstance(found, Tensor):
        return found.tolist(), None
    scores = found.get("sequences_scores")
    return found.sequences.tolist(), None if scores is None else scores.tolist()


def _alike(found: Any, expected: Any) -> bool:
    if isinstance(expected, str) or None in (found[1], expected[1]):
        return bool(found == expected)
    near = torch.allclose(torch.tensor(found[1]), torch.tensor(expected[1]), 1e-4, 1e-4)
    return found[0] == expected[0] and near


PARTS = {
    "passes": compare_passes, "files": compare_files, "training": compare_training,
    "words": compare_words,
}  # fmt: skip


def outcome(case: Case) -> str:
    """Compare all parts: "same", "refused: ..." or what differs."""
    plain = models.build(case.name, case.dtype, **case.config).to(case.device)
    try:
        lightseq.accelerate(copy.deepcopy(plain))
    except UserError as error:
        return f"refused: {error}"
    for part, compare in PARTS.items():
        try:
            with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                compare(case, copy.deepcopy(plain), Path(folder))
        except Differs as error:
            return f"{part} differ: {error}"
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(frame.filename).name}:{frame.lineno}"
            return f"{part} fail: {type(error).__name__} in {where}: {error}"
    return "same"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60, help="number of configurations")
    parser.add_argument("--first", type=int, default=0, help="number of the first configuration")
    parser.add_argument("--family", choices=models.FAMILIES, help="only models of this family")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    given = parser.parse_args(words)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    families = models.FAMILIES if given.family is None else (given.family,)
    counts: Counter[str] = Counter()
    for index in range(given.first, given.first + given.count):
        case = Case.draw(given.seed, index, families, given.device)
        found = outcome(case)
        kind = found.partition(":")[0]
        counts[kind] += 1
        reasons = "".join(f"; theirs ran: {text}" for text in sorted(case.reasons))
        print(f"{index} {case}: {found}{reasons}", flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())))
    sys.exit(int(not counts.keys() <= {"same", "refused"}))


if __name__ == "__main__":
    main()
