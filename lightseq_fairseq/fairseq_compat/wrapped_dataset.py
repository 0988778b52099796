"""Base of datasets that wrap another one."""

from __future__ import annotations

from typing import Any

import torch


class WrappedDataset(torch.utils.data.Dataset[Any]):
    """Base of datasets that wrap another one, ``dataset``, and forward to it what they lack."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getattr__(self, name: str) -> Any:
        # Unpickling looks up attributes before ``dataset`` is set.
        if name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __len__(self) -> int:
        return len(self.dataset)
