"""Checks before training: the initial checkpoint, and the metric that compares checkpoints."""

from __future__ import annotations

import argparse
import os

from lightseq_fairseq.cli.start.registries import function
from lightseq_fairseq.errors import UserError


def first(args: argparse.Namespace) -> None:
    """Raises UserError if the initial checkpoint is missing: fairseq would train from scratch."""
    from fairseq.file_io import PathManager

    suffix = args.checkpoint_suffix
    if args.use_sharded_state and args.ddp_backend == "fully_sharded":  # one file per rank
        suffix += "-shard0"
    if args.restore_file != "checkpoint_last.pt":
        if args.finetune_from_model is not None:
            raise UserError(
                "--restore-file and --finetune-from-model cannot be used together: remove one."
            )
        flag, path = "--restore-file", args.restore_file.replace(".pt", suffix + ".pt")
    # The default is a file in --save-dir. A new run has no such file; then the other flags apply.
    elif PathManager.exists(os.path.join(args.save_dir, f"checkpoint_last{suffix}.pt")):
        return
    elif args.continue_once is not None:
        flag, path = "--continue-once", args.continue_once
    else:
        flag, path = "--finetune-from-model", args.finetune_from_model
    if path is not None and not PathManager.isfile(path):
        there = os.path.join(args.save_dir, path)
        hint = (
            f"did you mean {there}?"
            if os.path.isfile(there)
            else f"check the path, or remove {flag}."
        )
        wrong = "is a folder" if os.path.isdir(path) else "does not exist"
        raise UserError(f"{flag} {path or repr(path)} {wrong}: {hint}")


def best_metric(args: argparse.Namespace) -> None:
    """Raises UserError if validation does not measure --best-checkpoint-metric.

    fairseq would fail after the first validation, without a checkpoint.
    """
    measured = _measured(args)
    metric = args.best_checkpoint_metric
    if args.disable_validation or measured is None or metric in (*measured, *_ALWAYS_MEASURED):
        return
    raise UserError(
        f"--best-checkpoint-metric {metric} is not measured in validation: use "
        f"{' or '.join(measured)}; bleu needs --eval-bleu, and accuracy needs --report-accuracy."
    )


_ALWAYS_MEASURED = ("wps", "wpb", "bsz", "num_updates")


def _measured(args: argparse.Namespace) -> tuple[str, ...] | None:
    """The metrics of validation; None if the task or the criterion is not known here."""
    from fairseq.criterions import CRITERION_REGISTRY
    from fairseq.criterions.cross_entropy import CrossEntropyCriterion
    from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
    from fairseq.criterions.label_smoothed_cross_entropy_with_alignment import (
        LabelSmoothedCrossEntropyCriterionWithAlignment as Aligned,
    )
    from fairseq.tasks import TASK_REGISTRY, FairseqTask
    from fairseq.tasks.translation import TranslationTask
    from fairseq.tasks.translation_multi_simple_epoch import TranslationMultiSimpleEpochTask

    task = TASK_REGISTRY[args.task]
    tasks = (FairseqTask, TranslationTask, TranslationMultiSimpleEpochTask)
    if function(task, "reduce_metrics") not in [function(t, "reduce_metrics") for t in tasks]:
        return None
    if hasattr(task, "post_validate"):
        return None
    bleu = ["bleu"] if getattr(args, "eval_bleu", False) else []
    accuracy = ["accuracy", "n_correct", "total"] if getattr(args, "report_accuracy", False) else []
    nll_loss = ["nll_loss"] if args.sentence_avg else []
    by_criterion = {
        LabelSmoothedCrossEntropyCriterion: ["loss", "nll_loss", "ppl", *accuracy],
        Aligned: ["loss", "nll_loss", "ppl", "alignment_loss"],
        CrossEntropyCriterion: ["loss", "ppl", *nll_loss],
    }
    criterion = CRITERION_REGISTRY.get(args.criterion)
    for known, measured in by_criterion.items():
        if function(criterion, "reduce_metrics") is function(known, "reduce_metrics"):
            return (*measured, *bleu)
    return None
