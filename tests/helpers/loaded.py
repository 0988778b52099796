"""The logits of a model in a checkpoint, built as fairseq does or as our launchers do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from lightseq_fairseq import checkpoints  # noqa: F401  isort: skip  (prepares fairseq)

from fairseq import checkpoint_utils

from lightseq_fairseq.fairseq_compat import patching
from lightseq_fairseq.plugins.transformer import LSTransformerModel


def logits(path: Path, ls: bool, change: Callable[[Any], None] = lambda model: None) -> Tensor:
    """Logits [2, 4, V] of two sentences, by our layers or by fairseq's; ``change`` may modify the
    model first."""
    tokens = torch.tensor([[5, 9, 17, 2], [8, 4, 11, 2]])
    load = checkpoint_utils.load_checkpoint_to_cpu
    with mock.patch.object(checkpoint_utils, "load_checkpoint_to_cpu", load), torch.no_grad():
        if ls:
            patching.apply("our models")
        (model,), _ = checkpoint_utils.load_model_ensemble([str(path)])
        assert isinstance(model, LSTransformerModel) == ls
        change(model)
        result: Tensor = model.eval()(tokens, torch.tensor([4, 4]), tokens)[0]
    return result
