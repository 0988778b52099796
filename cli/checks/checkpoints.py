"""Checks of checkpoints: the one that a run begins with, and the metric that compares them."""

from __future__ import annotations

import argparse
import os
from typing import Any

import click

from lightseq_fairseq.base import families
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.base.run_folder import checkpoint_in
from lightseq_fairseq.cli.checks import Request
from lightseq_fairseq.cli.words.argv import is_given, value
from lightseq_fairseq.cli.words.registries import function


def initial(args: argparse.Namespace) -> tuple[str, str | None]:
    """The flag that names the checkpoint that a run begins with, and the path; None: no checkpoint.

    --save-dir contains the checkpoint of a run that resumes.
    """
    from fairseq.file_io import PathManager

    suffix = args.checkpoint_suffix
    if args.use_sharded_state and args.ddp_backend == "fully_sharded":  # one file per rank
        suffix += "-shard0"
    if args.restore_file != "checkpoint_last.pt":
        return "--restore-file", args.restore_file.replace(".pt", suffix + ".pt")
    # The default is a file in --save-dir. A new run has no such file; then the other flags apply.
    if PathManager.exists(last := os.path.join(args.save_dir, f"checkpoint_last{suffix}.pt")):
        return "--save-dir", last
    if args.continue_once is not None:
        return "--continue-once", args.continue_once
    return "--finetune-from-model", args.finetune_from_model


def folder(request: Request) -> None:
    """Replaces the folder of a run in --finetune-from-model by its best checkpoint.

    Raises:
        UserError: the folder has none.
    """
    if request.args.finetune_from_model is not None:
        request.args.finetune_from_model = checkpoint_in(request.args.finetune_from_model)


def first(request: Request) -> None:
    """Raises UserError if the initial checkpoint is missing: fairseq would train from scratch.

    A checkpoint to resume from must also have the head of this run. With --reset-optimizer or
    --finetune-from-model the run may train a new head.
    """
    from fairseq.file_io import PathManager

    args = request.args
    flag, path = initial(args)
    if flag == "--restore-file" and args.finetune_from_model is not None:
        raise UserError(
            "--restore-file and --finetune-from-model cannot be used together: remove one."
        )
    if (
        flag == "--save-dir"
        and args.finetune_from_model is not None
        and os.environ.get("RANK", "0") == "0"
    ):
        click.echo(
            f"lightseq-train: note: the run resumes from {path}, so --finetune-from-model is not "
            "read. To begin a new run, choose another --save-dir.", err=True,
        )  # fmt: skip
    if path is not None and not PathManager.isfile(path):
        there = os.path.join(args.save_dir, path)
        if os.path.isdir(path):
            wrong, hint = "is a folder", "use a file in it, such as checkpoint_best.pt."
        else:
            wrong, hint = "does not exist", f"check the path, or remove {flag}."
        if os.path.isfile(there):
            hint = f"did you mean {there}?"
        raise UserError(f"{flag} {path or repr(path)} {wrong}: {hint}")
    if path is not None and flag in ("--restore-file", "--save-dir") and not args.reset_optimizer:
        _head(args, path, "train a new head with --reset-optimizer")


def of_path(request: Request) -> None:
    """Raises UserError if a checkpoint of --path does not exist.

    Without it, the task is not known, and other checks would name mistakes that are none.
    """
    from fairseq import utils
    from fairseq.file_io import PathManager

    argv = request.argv
    is_loaded = request.note is not None  # in Python, where the file may be gone by now
    if is_loaded or is_given(argv, ("--checkpoint-suffix", "--checkpoint-shard-count")):
        return
    for path in utils.split_paths(value(argv, ("--path",)) or ""):
        if path and not PathManager.exists(path):
            raise UserError(f"The checkpoint {path} does not exist: check --path.")


def answers(request: Request) -> None:
    """Raises UserError if the command cannot use a model of the checkpoint's task.

    fairseq would look for sentence pairs, or classify by a new head, with random weights.
    """
    from lightseq_fairseq.fairseq_compat.checkpoints import settings_of

    args, first = request.args, request.args.path.partition(os.pathsep)[0]
    found = saved(first)
    settings = settings_of(found, "task")
    name = str(settings.get("_name") or settings.get("task"))
    task = families.tasks().get(name)
    if families.classifies(name) and request.command == "generate":
        raise UserError(
            f"{first} is a classifier, which lightseq-generate cannot use: classify lines of text "
            "with lightseq-interactive, and measure the accuracy with lightseq-validate."
        )
    is_encoder = task is not None and task.data in ("text to mask", "sentences with labels")
    if is_encoder and not families.classifies(name):
        raise UserError(
            f"{first} was trained by --task {name}, so it does not answer lines of text: fine-tune "
            "it by --task sentence_prediction to classify them. RobertaModel of Python fills in "
            "masked words."
        )
    if families.classifies(args.task) and found:
        head, prefix = args.classification_head_name, "classification_heads."
        heads = {word.split(".")[1] for word in found["model"] if word.startswith(prefix)}
        if head not in heads:
            have = f"only {', '.join(sorted(heads))}" if heads else "none"
            raise UserError(
                f"{first} contains no classification head named {head}, {have}: remove "
                "--classification-head-name, or choose another checkpoint."
            )


def same_data(request: Request) -> None:
    """Raises UserError if the data are not of the kind with which the checkpoint was trained."""
    from fairseq import utils

    from lightseq_fairseq.fairseq_compat.checkpoints import settings_of

    first = request.args.path.partition(os.pathsep)[0]
    settings = settings_of(saved(first), "task")
    name = str(settings.get("_name") or settings.get("task"))
    tasks = families.tasks()
    read, trained = tasks.get(request.args.task), tasks.get(name)
    if read is None or trained is None or read.data == trained.data:
        return
    if "sentence pairs" in read.data and "sentence pairs" in trained.data:
        return  # of one pair of languages, or of several
    raise UserError(
        f"{utils.split_paths(request.args.data)[0]} contains {read.data} (--task {read.name}), but "
        f"{first} is a model of --task {name}, which reads {trained.data}: choose other data, or "
        "another checkpoint."
    )


def direction(request: Request) -> None:
    """Raises UserError if the command swaps the languages of the model."""
    from fairseq.data import data_utils

    from lightseq_fairseq.fairseq_compat.checkpoints import settings_of

    args = request.args
    trained = settings_of(saved(args.path.partition(os.pathsep)[0]), "task")
    source, target = trained.get("source_lang"), trained.get("target_lang")
    folder = str(trained.get("data")).partition(os.pathsep)[0]
    if not source and os.path.isdir(folder):  # training took them from the names of its files
        source, target = data_utils.infer_language_pair(folder)
    if source != target and (args.source_lang, args.target_lang) == (target, source):
        raise UserError(
            f"The model was trained to translate from {source} to {target}, but --source-lang is "
            f"{target} and --target-lang {source}: remove them, or use another model."
        )


def trained_head(request: Request) -> None:
    """Raises UserError if the checkpoint has another number of classes than the command."""
    _head(request.args, request.args.path, "train another head")


def _head(args: argparse.Namespace, path: str, otherwise: str) -> None:
    """Raises UserError if the checkpoint's head has another number of classes than the run.

    fairseq would use a new head instead, with random weights.

    otherwise: what to do instead of changing --num-classes.
    """
    name = getattr(args, "classification_head_name", None)
    if name is None or not os.path.isfile(path):
        return
    weight = saved(path).get("model", {}).get(f"classification_heads.{name}.out_proj.weight")
    if weight is not None and len(weight) != args.num_classes:
        raise UserError(
            f"--num-classes is {args.num_classes}, but the classification head of {path} has "
            f"{len(weight)} classes: set --num-classes {len(weight)}, or {otherwise}."
        )


def saved(path: str | None) -> dict[str, Any]:
    """The checkpoint; {} if it cannot be read, which fairseq or the launcher will report."""
    from lightseq_fairseq.fairseq_compat.checkpoints import open_checkpoint

    try:
        found: dict[str, Any] = open_checkpoint(path) if path else {}
    except (OSError, UserError):
        return {}
    return found


def best_metric(request: Request) -> None:
    """Raises UserError if validation does not measure --best-checkpoint-metric.

    fairseq would fail after the first validation, without a checkpoint.
    """
    args = request.args
    measured, others = _measured(args)
    metric = args.best_checkpoint_metric
    if args.disable_validation or not measured or metric in (*measured, *_ALWAYS_MEASURED):
        return
    raise UserError(
        f"--best-checkpoint-metric {metric} is not measured in validation: use "
        f"{' or '.join(measured)}{others}."
    )


def same_best_metric(request: Request) -> None:
    """Raises UserError if a run that resumes has the best score of another metric.

    fairseq would compare both, so that perhaps no later checkpoint is the best one.
    """
    from fairseq.file_io import PathManager

    from lightseq_fairseq.fairseq_compat.checkpoints import settings_of

    args = request.args
    flag, path = initial(args)
    if flag not in ("--restore-file", "--save-dir") or args.reset_optimizer or args.reset_meters:
        return
    found = saved(path) if path is not None and PathManager.isfile(path) else {}
    before = settings_of(found, "checkpoint")
    if "best" not in found.get("extra_state", {}) or "best_checkpoint_metric" not in before:
        return
    old, new = (
        ("highest " if each["maximize_best_checkpoint_metric"] else "lowest ")
        + str(each["best_checkpoint_metric"])
        for each in (before, vars(args))
    )
    if old != new:
        raise UserError(
            f"{path} has the {old} of the run, but this command asks for the {new}: set "
            "--best-checkpoint-metric and --maximize-best-checkpoint-metric as before, or begin "
            "anew with --reset-meters."
        )


_ALWAYS_MEASURED = ("wps", "wpb", "bsz", "num_updates")


def _measured(args: argparse.Namespace) -> tuple[tuple[str, ...], str]:
    """The metrics of validation, none if the task or the criterion is not known here; and what
    further metrics need, for the message."""
    from fairseq.criterions import CRITERION_REGISTRY
    from fairseq.criterions.cross_entropy import CrossEntropyCriterion
    from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
    from fairseq.criterions.label_smoothed_cross_entropy_with_alignment import (
        LabelSmoothedCrossEntropyCriterionWithAlignment as Aligned,
    )
    from fairseq.criterions.masked_lm import MaskedLmLoss
    from fairseq.criterions.sentence_prediction import SentencePredictionCriterion
    from fairseq.tasks import TASK_REGISTRY, FairseqTask
    from fairseq.tasks.translation import TranslationTask
    from fairseq.tasks.translation_multi_simple_epoch import TranslationMultiSimpleEpochTask

    task = TASK_REGISTRY[args.task]
    tasks = (FairseqTask, TranslationTask, TranslationMultiSimpleEpochTask)
    if function(task, "reduce_metrics") not in [function(t, "reduce_metrics") for t in tasks]:
        return (), ""
    if hasattr(task, "post_validate"):
        return (), ""
    bleu = ["bleu"] if getattr(args, "eval_bleu", False) else []
    accuracy = ["accuracy", "n_correct", "total"] if getattr(args, "report_accuracy", False) else []
    right = [] if getattr(args, "regression_target", False) else ["accuracy"]
    nll_loss = ["nll_loss"] if args.sentence_avg else []
    of_pairs = "; bleu needs --eval-bleu, and accuracy needs --report-accuracy"
    by_criterion = {
        LabelSmoothedCrossEntropyCriterion: (["loss", "nll_loss", "ppl", *accuracy], of_pairs),
        Aligned: (["loss", "nll_loss", "ppl", "alignment_loss"], of_pairs),
        CrossEntropyCriterion: (["loss", "ppl", *nll_loss], of_pairs),
        MaskedLmLoss: (["loss", "ppl"], ""),
        SentencePredictionCriterion: (
            ["loss", "nll_loss", *right],
            "; accuracy needs classes, but --regression-target is set" if not right else "",
        ),
    }
    if any(name.startswith("report_") and value for name, value in vars(args).items()):
        by_criterion.pop(SentencePredictionCriterion)  # newer versions measure more
    criterion = CRITERION_REGISTRY.get(args.criterion)
    for known, (measured, others) in by_criterion.items():
        if function(criterion, "reduce_metrics") is function(known, "reduce_metrics"):
            return (*measured, *bleu), others
    return (), ""
