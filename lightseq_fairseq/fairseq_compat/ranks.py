"""Repairs for several ranks: a rank without a batch; gathering and DDP on ranks without GPUs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from fairseq.distributed import utils
from fairseq.tasks import FairseqTask
from torch import nn

from lightseq_fairseq.fairseq_compat import patching


def valid_step(
    original: Callable[..., Any], self: Any, sample: Any, *arguments: Any, **options: Any
) -> Any:
    # All ranks get the same number of batches, and the last ones may be empty. The trainer handles
    # this, but fairseq-validate does not: "KeyError: 'net_input'".
    if isinstance(sample, dict) and not sample:
        return 0.0, 0, {}
    return original(self, sample, *arguments, **options)


def _with_valid_step(task: Any, **options: Any) -> None:
    """``FairseqTask.__init_subclass__``: repairs valid_step of tasks that --user-dir defines."""
    super(FairseqTask, task).__init_subclass__(**options)
    if "valid_step" in vars(task):
        task.valid_step = patching.around(task.valid_step, valid_step)


INIT_SUBCLASS = classmethod(_with_valid_step)


def all_gather_list(
    original: Callable[..., Any], data: Any, group: Any = None, max_size: int = 16384
) -> Any:
    # fairseq gathers through a GPU buffer. Without a GPU, as in fairseq-validate on several CPU
    # ranks: "type torch.cuda.ByteTensor not available".
    if torch.cuda.is_available():
        return original(data, group, max_size)
    group = group or utils.get_global_group()
    gathered = [None] * utils.get_world_size(group)
    torch.distributed.all_gather_object(gathered, data, group)
    return gathered


def wrap_model(
    original: Callable[..., Any],
    module: nn.Module, device_ids: Any = None, output_device: Any = None, **options: Any,
) -> Any:  # fmt: skip
    # With pytorch_ddp, the default, fairseq passes device ids even for a model on a CPU, which
    # torch refuses.
    if not any(parameter.is_cuda for parameter in module.parameters()):
        device_ids = output_device = None
    with warnings.catch_warnings():
        # "`broadcast_buffers` is deprecated": fairseq always passes this argument.
        warnings.simplefilter("ignore", FutureWarning)
        return original(module, device_ids=device_ids, output_device=output_device, **options)
