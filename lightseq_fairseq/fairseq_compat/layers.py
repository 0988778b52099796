"""Repairs of fairseq's layers: 0.12.2's dead parameters, the NaN detector, cuDNN attention."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from fairseq.modules.transformer_layer import TransformerEncoderLayerBase as _Layer
from fairseq.nan_detector import NanDetector

logger = logging.getLogger(__name__)

# Copies of parameters that 0.12.2 keeps for its fast path, in the order of registration.
DEAD_PARAMETERS = tuple(
    f"{layer}_{kind}"
    for layer in ("in_proj", "out_proj", "fc1", "fc2")
    for kind in ("weight", "bias")
)

# 0.12.2 gives each encoder layer a second, untrained copy of its parameters for a fused inference
# path. The copies take memory and optimizer state (transformer_wmt_en_de_big_t2t: 285 instead of
# 210 million parameters). They get no gradient, which DistributedDataParallel reports as an error.
# The path itself fails on post-norm encoders: "Mask Type should be defined".


def has_dead_parameters() -> bool:
    return set(DEAD_PARAMETERS).issubset(_Layer.__init__.__code__.co_names)


def without_dead_parameters(
    original: Callable[..., None], self: Any, *args: Any, **kwargs: Any
) -> None:
    original(self, *args, **kwargs)
    for name in DEAD_PARAMETERS:
        delattr(self, name)
    self.can_use_fastpath = False
    # TorchScript does not compile a branch whose condition is a constant False. This branch uses
    # the deleted parameters, so make its condition a constant.
    self.__constants__ = [*getattr(self, "__constants__", ()), "can_use_fastpath"]


def _load_from_state_dict(
    original: Callable[..., None], self: Any, state_dict: dict[str, Any], prefix: str, *args: Any
) -> None:
    # 0.12.2's version adds the copies to the state dict, and its checkpoints contain them.
    # Remove them.
    for name in DEAD_PARAMETERS:
        state_dict.pop(prefix + name, None)
    torch.nn.Module._load_from_state_dict(self, state_dict, prefix, *args)


class _DictOfLists(torch.nn.Module):
    """Returns the same kind of output as fairseq's encoders."""

    def forward(self, x: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        return {"encoder_out": [x]}


def fails_on_dicts() -> bool:
    model = _DictOfLists()
    with NanDetector(model):
        try:
            model(torch.zeros(2))
        except StopIteration:
            return True
    return False


# Before fairseq stops a run on NaN or infinity, NanDetector names the module where it first occurs.
# Its backward hooks expect a tensor among the values of the encoder's output, but these are lists:
# "StopIteration" hides the real error, "Minimum loss scale reached". The hooks below are registered
# on each tensor of an output, at any depth.


def add_hooks(original: Callable[..., None], self: Any, module: torch.nn.Module) -> None:
    if self.forward:
        self.fhooks.append(module.register_forward_hook(self.fhook_fn))
    if self.backward:
        self.fhooks.append(module.register_forward_hook(functools.partial(_watch, self)))


def _watch(detector: Any, module: torch.nn.Module, inputs: Any, output: Any) -> None:
    if torch.is_tensor(output):
        if output.requires_grad:
            hook = functools.partial(detector.bhook_fn, module, inputs)
            detector.bhooks.append(output.register_hook(hook))
    elif isinstance(output, (dict, list, tuple)):
        for part in output.values() if isinstance(output, dict) else output:
            _watch(detector, module, inputs, part)


def disable_cudnn_attention() -> None:
    """Disables torch's cuDNN attention, unless LIGHTSEQ_CUDNN_ATTENTION is 1."""
    # torch 2.11 prefers cuDNN attention on recent GPUs. It builds a plan for each new shape, and in
    # translation nearly every batch has a new shape: 24k instead of 95k tokens/s on an H200.
    if os.environ.get("LIGHTSEQ_CUDNN_ATTENTION") == "1":
        return
    torch.backends.cuda.enable_cudnn_sdp(False)
    if torch.cuda.is_available():
        logger.info(
            "cuDNN attention is off: it builds a plan for every new batch shape "
            "(LIGHTSEQ_CUDNN_ATTENTION=1 keeps it)"
        )
