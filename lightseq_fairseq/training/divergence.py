"""The message of a run that ends because its gradients are not finite: why, and what to do."""

from __future__ import annotations

import os
import re
from typing import Any

# As fairseq's step and the captured one raise them; fairseq's have more words behind.
_NOT_FINITE = re.compile(r"gradients are Nan/Inf")
_LEAST_SCALE = re.compile(r"Minimum loss scale reached \([^)]*\)")


def explained(error: FloatingPointError, trainer: Any, has_diverged: bool) -> FloatingPointError:
    """The error with what to do, or the same error if its reason is another one.

    error: its cause, if there is one, says why the state before the update could not be saved.
    has_diverged: whether that state is known to be of no use.
    """
    found = _NOT_FINITE.match(str(error)) or _LEAST_SCALE.match(str(error))
    if found is None:
        return error
    is_finite = found.re is _LEAST_SCALE
    reason = f"{found[0]} in update {trainer.get_num_updates() + 1}: training has diverged"
    reason += ", or its gradients do not fit into fp16" * is_finite
    checkpoint = trainer.cfg.checkpoint
    path, again = os.path.join(checkpoint.save_dir, "crash.pt"), "run the command again"
    if error.__cause__ is not None:
        state = f"The state before this update could not be saved: {error.__cause__}"
    elif has_diverged:
        again = "begin with an earlier checkpoint, or again in another --save-dir"
        state = f"{path} and the last checkpoints have diverged, too."
    else:
        instead = ", without --finetune-from-model," * bool(checkpoint.finetune_from_model)
        state = (
            f"With --restore-file {path} --reset-dataloader{instead} it continues from the state "
            "before this update, at the start of the first epoch."
        )
    return FloatingPointError(
        f"{reason}. {_remedies(trainer.cfg, is_finite)}, and {again}. {state}"
    )


def _remedies(cfg: Any, fp16: bool) -> str:
    """What makes training stable, by the settings of the run."""
    found = ["Lower --lr"]
    if not cfg.optimization.clip_norm:
        found.append("add --clip-norm 1")
    warmup = getattr(cfg.lr_scheduler, "warmup_updates", None)
    if warmup is not None:
        found.append(f"{'raise' if warmup else 'add'} --warmup-updates")
    if fp16:
        found.append("train with --bf16")
    *first, last = found
    return f"{', '.join(first)} or {last}" if first else last
