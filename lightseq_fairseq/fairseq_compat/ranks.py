"""Several ranks: one without a batch; without GPUs, what they gather and what wraps the model."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from fairseq.distributed import utils
from fairseq.models import distributed_fairseq_model as wrappers
from fairseq.tasks import FairseqTask
from torch import nn


def repair() -> None:
    """Lets ranks validate without a batch and, without GPUs, gather and train by pytorch_ddp."""
    _repair_empty_batches()
    _repair_all_gather_list()
    _repair_pytorch_ddp()


def _repair_empty_batches() -> None:
    # Ranks get equally many batches, the last ones of which may be empty. The trainer knows, but
    # fairseq-validate does not: "KeyError: 'net_input'".
    tasks = [FairseqTask]
    for task in tasks:  # and whatever extends one
        tasks += task.__subclasses__()
        if "valid_step" in vars(task):
            _repair_valid_step(task)
    FairseqTask.__init_subclass__ = classmethod(_with_valid_step)


def _with_valid_step(task: Any, **options: Any) -> None:
    """What is done to a task that --user-dir brings."""
    super(FairseqTask, task).__init_subclass__(**options)
    if "valid_step" in vars(task):
        _repair_valid_step(task)


def _repair_valid_step(task: Any) -> None:
    original = task.valid_step

    @functools.wraps(original)
    def valid_step(self: Any, sample: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(sample, dict) and not sample:
            return 0.0, 0, {}
        return original(self, sample, *arguments, **options)

    task.valid_step = valid_step


def _repair_all_gather_list() -> None:
    # It goes by way of a GPU. Without one, as in fairseq-validate on several ranks of a CPU: "type
    # torch.cuda.ByteTensor not available".
    original = utils.all_gather_list

    @functools.wraps(original)
    def all_gather_list(data: Any, group: Any = None, max_size: int = 16384) -> Any:
        if torch.cuda.is_available():
            return original(data, group, max_size)
        group = group or utils.get_global_group()
        gathered = [None] * utils.get_world_size(group)
        torch.distributed.all_gather_object(gathered, data, group)
        return gathered

    utils.all_gather_list = all_gather_list


def _repair_pytorch_ddp() -> None:
    # The default. fairseq names a device for a model on a CPU as well, which torch refuses.
    original = wrappers.DistributedDataParallel

    @functools.wraps(original)
    def wrap(
        module: nn.Module, device_ids: Any = None, output_device: Any = None, **options: Any
    ) -> Any:
        if not any(parameter.is_cuda for parameter in module.parameters()):
            device_ids = output_device = None
        with warnings.catch_warnings():
            # "`broadcast_buffers` is deprecated", which fairseq always gives.
            warnings.simplefilter("ignore", FutureWarning)
            return original(module, device_ids=device_ids, output_device=output_device, **options)

    wrappers.DistributedDataParallel = wrap
