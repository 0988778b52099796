"""Tests marked `gpu` run where torch sees a GPU; asking for them elsewhere is an error."""

from __future__ import annotations

import pytest
import torch


def _asked_for(config: pytest.Config) -> bool:
    expression = config.getoption("markexpr")
    return "gpu" in expression.replace("not gpu", "")


def pytest_configure(config: pytest.Config) -> None:
    if _asked_for(config) and not torch.cuda.is_available():
        raise pytest.UsageError(
            f'-m "{config.getoption("markexpr")}" asks for GPU tests, but torch sees no GPU here'
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    # opcheck feigns a GPU. Autograd counts devices at its first backward, and where it finds one,
    # children of this process, in which some tests train, cannot use it: so it counts them now.
    torch.ones((), requires_grad=True).backward()
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=on_gpu)
    items[:] = [item for item in items if item not in on_gpu]


def pytest_runtest_setup(item: pytest.Item) -> None:
    torch.manual_seed(1)  # the same draws in each run, alone or among others


def pytest_runtest_teardown(item: pytest.Item) -> None:
    # Other test processes share the GPU, and the sizes here are so many that few blocks of memory
    # would serve again.
    if item.get_closest_marker("gpu"):
        torch.cuda.empty_cache()
