"""Conditions of the rows in `settings`: functions of fairseq's namespace or configuration."""

from __future__ import annotations

import argparse
from typing import Any

from lightseq_fairseq.base import families
from lightseq_fairseq.base.families import Family, Task, named

# Criteria that need another kind of model or data than those of the families.
_OF_OTHERS = """
ctc fastspeech2 hubert label_smoothed_cross_entropy_with_ctc
latency_augmented_label_smoothed_cross_entropy legacy_masked_lm_loss model nat_loss
sentence_prediction_adapters speech_to_spectrogram
speech_to_unit speech_unit_lm_criterion tacotron2 vocab_parallel_cross_entropy wav2vec
"""
# Criteria of tokens. A family that names them does not keep them from others.
_OF_TOKENS = """
ls_label_smoothed_cross_entropy label_smoothed_cross_entropy ls_cross_entropy cross_entropy
"""


def family_of(arch: str | None) -> Family | None:
    """The family of an architecture; None if its model is not one of ours or extends one."""
    from fairseq.models import ARCH_MODEL_REGISTRY

    found = getattr(ARCH_MODEL_REGISTRY.get(arch), "family", None)
    return found if isinstance(found, Family) else None


def has_adaptive_softmax(args: argparse.Namespace) -> bool:
    """Whether the model is one of ours that supports adaptive softmax, and uses it."""
    is_set = bool(getattr(args, "adaptive_softmax_cutoff", None))
    return is_set and supports("--adaptive-softmax-cutoff", args)


def pads_targets_left(args: Any) -> bool:
    """Whether the pads of a target come first; tasks of several languages have the words "True"
    and "False"."""
    from fairseq.utils import eval_bool

    return bool(eval_bool(str(getattr(args, "left_pad_target", False))))


def of_ranks(cfg: Any, name: str) -> Any:
    """A setting of distributed training, or None with a single rank."""
    ranks = cfg.distributed_training
    return getattr(ranks, name) if ranks.distributed_world_size > 1 else None


def supports(flag: str, args: argparse.Namespace) -> bool:
    """Whether the model is one of ours that supports a flag, unlike other families."""
    family = family_of(args.arch)
    return family is not None and flag in family.supports


def is_criterion_of_others(args: argparse.Namespace, task: Task) -> bool:
    """Whether our model trains on the data of ``task``, with a criterion of fairseq's or ours that
    needs other data."""
    from fairseq.criterions import CRITERION_REGISTRY
    from fairseq.tasks import TASK_REGISTRY

    module = getattr(CRITERION_REGISTRY.get(args.criterion), "__module__", "")
    family = family_of(args.arch)
    return (
        family is not None
        and task in family.tasks
        and issubclass(TASK_REGISTRY[args.task], named(task.place))
        and module.startswith(("fairseq.", "lightseq_fairseq."))
        and args.criterion not in task.criteria
    )


def is_criterion_of_other_families(args: argparse.Namespace) -> bool:
    """Whether the model is one of ours, its task names no criteria, and the criterion is for other
    models or data."""
    family = family_of(args.arch)
    if family is None:
        return False
    mine = [task for task in family.tasks if task.name == getattr(args, "task", None)]
    if any(task.criteria for task in mine or family.tasks):
        return False
    theirs = {name for task in families.tasks().values() for name in task.criteria}
    return args.criterion in (theirs | {*_OF_OTHERS.split()}) - {*_OF_TOKENS.split()}


# Setting -> the package that writes its curves, and the package's name in fairseq's progress_bar.
WRITERS = {
    "tensorboard_logdir": ("tensorboard", "SummaryWriter"),
    "wandb_project": ("wandb", "wandb"),
    "aim_repo": ("aim", "get_aim_run"),
    "azureml_logging": ("azureml-core", "Run"),
}


def lacks_writer(setting: str, args: argparse.Namespace) -> bool:
    """Whether the run writes curves with a package that is not installed."""
    from fairseq.logging import progress_bar

    return bool(getattr(args, setting)) and getattr(progress_bar, WRITERS[setting][1]) is None


def lacks_gpu(args: argparse.Namespace) -> bool:
    import torch

    return args.cpu or not torch.cuda.is_available()
