"""Settings that do not fit together, or that fairseq cannot use."""

from __future__ import annotations

import os
import re

from lightseq_fairseq.cli.checks import Request
from lightseq_fairseq.cli.checks.failures.cause import Cause
from lightseq_fairseq.cli.checks.failures.known import Known, Rule, checkpoint
from lightseq_fairseq.cli.words.argv import flag_of, value
from lightseq_fairseq.cli.words.command_lines import ended

# fairseq's own checks of flags whose message already says what is wrong.
_PLAIN = (
    r"--[a-z]|Must specify|Please specify|Cannot combine|cannot use both --|"
    r"preprocessing\.py doesn't support|Minimum loss scale reached|"
    r"gradients are Nan/Inf in update|DiverseBeamSearch requires"
)
_CHECKS = "AssertionError ValueError FloatingPointError"


def _devices(found: re.Match[str], request: Request) -> str:
    visible = "1 GPU is" if found[2] == "1" else f"{found[2]} GPUs are"
    return (
        f"--distributed-world-size is {found[1]}, but {visible} visible: lower it, or start one "
        "process per rank with torchrun."
    )


def _conflict(found: re.Match[str], request: Request) -> str:
    """An arch and a task define the same flag."""
    arch = getattr(request.args, "arch", None) or value(request.argv, ("--arch", "-a"))
    task = getattr(request.args, "task", None) or value(request.argv, ("--task",))
    return (
        f"--arch {arch} and --task {task} cannot be used together, because both define {found[1]} "
        "in this version of fairseq: change one of them."
    )


def _schedule(failure: Cause, request: Request) -> str | None:
    """fairseq's lr schedulers check their settings with assertions, often without a message."""
    inside = os.path.join("fairseq", "optim", "lr_scheduler") in failure.source
    if not inside or failure.kind not in ("AssertionError", "ValueError", "ZeroDivisionError"):
        return None
    says = failure.kind != "ZeroDivisionError" and " ".join(failure.text.split()).rstrip(".")
    reason = f" ({says})" if says else ""
    rates = getattr(request.args, "lr", None)
    if isinstance(rates, list) and len(rates) > 1 and "Cannot use a fixed" in reason:
        return (
            f"--lr has {len(rates)} rates ({', '.join(f'{rate:g}' for rate in rates)}), but "
            f"--lr-scheduler {request.args.lr_scheduler} takes one: write one number, with a "
            "decimal point."
        )
    return (
        f"The settings of --lr-scheduler {getattr(request.args, 'lr_scheduler', '')} do not fit "
        f"together{reason}: change one of them (--fairseq-help explains each)."
    )


def _metric(failure: Cause, request: Request) -> str | None:
    metric = getattr(request.args, "best_checkpoint_metric", None)
    if failure.kind == "KeyError" and failure.text == repr(metric) and "train.py" in failure.source:
        return (
            f"--best-checkpoint-metric {metric} is not measured in validation: use loss, nll_loss "
            f"or ppl, or bleu with --eval-bleu."
        )
    return None


def _user_dir(failure: Cause, request: Request) -> str | None:
    path = getattr(request.args, "user_dir", None) or value(request.argv, ("--user-dir",))
    if path is None or failure.kind != "ModuleNotFoundError":
        return None
    package = os.path.basename(os.path.abspath(path)).partition(".")[0]
    if failure.text != f"No module named '{package}'":
        return None
    return (
        f"--user-dir {path} is not a Python package: use a folder that Python can import, without "
        f"a dot in its name."
    )


def _override(found: re.Match[str], request: Request) -> str:
    """A value that a component's configuration rejects."""
    if (given := found[3].strip("'")) == "null":
        return f"{flag_of(found[2])} is missing, but this {flag_of(found[1])} needs it: add it."
    return f"{flag_of(found[2])} cannot be {given}: use a value that --fairseq-help allows."


def _unconfigured(found: re.Match[str], request: Request) -> str:
    """fairseq registers the component without a configuration."""
    flag = flag_of(found[1])
    return (
        f"{flag} {found[2]} cannot be used, because this version of fairseq has no configuration "
        f"for it: choose another {flag}."
    )


def _no_language_model(found: re.Match[str], request: Request) -> str:
    if request.command == "train":
        arch, task = request.args.arch, request.args.task
        return (
            f"--arch {arch} is no language model, as --task {task} needs: use an arch such as "
            "ls_transformer_lm, or another task."
        )
    return (
        f"--task language_modeling cannot use {checkpoint(request)}, which contains no language "
        "model: choose another checkpoint, or use lightseq-generate with the --task of its "
        "training."
    )


RULES: tuple[Rule, ...] = (
    # An error of our search and of fairseq's.
    Known(
        "min_len cannot be larger than max_len",
        "The shortest result (--min-len, by default 1, or min_len in --eval-bleu-args) is longer "
        "than the longest: lower it, or raise --max-len-a or --max-len-b, at most to the model's "
        "number of positions.",
    ),
    # --task language_modeling with a model that is no language model.
    Known(r"'\w+' object has no attribute 'supported_targets'", _no_language_model),
    # fairseq's search has reached the maximum length, and no hypothesis has ended.
    Known(
        r"(\d+) < \1$",
        "A sentence has no translation with a finite score: either training has diverged (use an "
        "earlier checkpoint), or --prefix-size meets an empty target sentence (remove that "
        "sentence).",
        source="sequence_generator.py",
    ),
    Known(
        "Provided Search parameters are mutually exclusive|Target-side constraints were",
        "--sampling, --diverse-beam-groups, --diversity-rate, --match-source-len and --constraints "
        "each select another search: use only one of them.",
    ),
    Known(
        "invalid multinomial distribution",
        "--sampling finds no token to draw: raise --temperature, --sampling-topk or "
        "--sampling-topp, or lower --min-len.",
    ),
    Known(
        "selected index k out of range",
        "--sampling-topk is larger than the target dictionary: lower it.",
        source="search.py",
    ),
    Known(_PLAIN, lambda found, request: ended(found.string), kind=_CHECKS),
    Known(
        r"(\w+) is required!$",
        lambda found, request: (
            f"{flag_of(found[1])} is missing: add it (lightseq-train "
            "--fairseq-help lists its choices)."
        ),
        kind=_CHECKS,
    ),
    Known(r"world size is (\d+) but have (\d+) available devices$", _devices, kind=_CHECKS),
    Known("(?s:.*?)conflicting option strings?: (.*)", _conflict, kind="ArgumentError"),
    Known(
        "Cannot use fp16 and AMP together",
        "--amp and --fp16 (or --memory-efficient-fp16) cannot be used together: remove one.",
        source="trainer.py",
    ),
    _schedule,
    _metric,
    # The model width is not a multiple of the heads: an error of our layers and of fairseq's.
    Known(
        r"embed_dim (\d+ is not a multiple of|must be divisible by) num_heads",
        "The width of a layer is not a multiple of its number of attention heads: change "
        "--encoder-attention-heads or --encoder-embed-dim, or --decoder-attention-heads or "
        "--decoder-embed-dim.",
    ),
    _user_dir,
    Known(r"In 'config': Could not find '(\w+)/(\w+)'", _unconfigured),
    Known(  # of a tokenizer or a BPE that the command builds
        r"Missing mandatory value: (?:\w+\.)*(\w+)\n",
        lambda found, request: f"{flag_of(found[1])} is missing: set it.",
    ),
    Known(r"Error merging override (\w+)\.(\w+)=(.*)", _override),
)
