"""fairseq's own layers: what 0.12.2 adds to the encoder layer, where a number stops being one, and
cuDNN attention."""

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

# Copies of the real parameters that 0.12.2 keeps for its fast path, in the order of registration.
DEAD_PARAMETERS = (
    "in_proj_weight",
    "in_proj_bias",
    "out_proj_weight",
    "out_proj_bias",
    "fc1_weight",
    "fc1_bias",
    "fc2_weight",
    "fc2_bias",
)


# 0.12.2 gives each encoder layer a second, untrained copy of its parameters for a fused inference
# path. The copies take memory and optimizer state (transformer_wmt_en_de_big_t2t: 285 instead of
# 210 million), DistributedDataParallel stops at them because they get no gradient, and the path
# itself fails on post-norm encoders: "Mask Type should be defined".


def has_dead_parameters() -> bool:
    return set(DEAD_PARAMETERS).issubset(_Layer.__init__.__code__.co_names)


def without_dead_parameters(
    original: Callable[..., None], self: Any, *args: Any, **kwargs: Any
) -> None:
    original(self, *args, **kwargs)
    for name in DEAD_PARAMETERS:
        delattr(self, name)
    self.can_use_fastpath = False
    # TorchScript compiles no branch behind a constant that is False; this one names the parameters.
    self.__constants__ = [*getattr(self, "__constants__", ()), "can_use_fastpath"]


def _load_from_state_dict(
    original: Callable[..., None], self: Any, state_dict: dict[str, Any], prefix: str, *args: Any
) -> None:
    # 0.12.2's own puts the copies there; state dicts that it has written hold them.
    for name in DEAD_PARAMETERS:
        state_dict.pop(prefix + name, None)
    torch.nn.Module._load_from_state_dict(self, state_dict, prefix, *args)


class _DictOfLists(torch.nn.Module):
    """What an encoder of fairseq's returns."""

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


# fairseq names the module in which a number stops being one before it ends such a run. Its backward
# hooks look for a tensor among the values of the encoder's output, which are lists:
# "StopIteration", in place of "Minimum loss scale reached". These hooks wait at each tensor.


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
    """Unless LIGHTSEQ_CUDNN_ATTENTION is 1."""
    # torch 2.11 prefers cuDNN attention on recent GPUs and builds a plan for every new shape, and
    # nearly every batch of a translation run is one: 24k instead of 95k tokens/s on an H200.
    if os.environ.get("LIGHTSEQ_CUDNN_ATTENTION") == "1":
        return
    torch.backends.cuda.enable_cudnn_sdp(False)
    if torch.cuda.is_available():
        logger.info(
            "cuDNN attention is off: it builds a plan for every new batch shape "
            "(LIGHTSEQ_CUDNN_ATTENTION=1 keeps it)"
        )
