"""Tests marked `gpu` run where torch sees a GPU; asking for them elsewhere is an error.

Test processes share the GPU, except in tests marked `alone`, for which all others wait.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from typing import IO

import pytest
import torch

# The packages that `python -m scripts.tables` and its like find in the root, which is not on the
# path here: beside them lies the package that is tested, without the cli of an installation.
for _name in ("scripts", "examples"):
    _file = Path(__file__).resolve().parents[1] / _name / "__init__.py"
    _spec = importlib.util.spec_from_file_location(_name, _file)
    assert _spec is not None
    sys.modules[_name] = importlib.util.module_from_spec(_spec)

LOCK = Path(tempfile.gettempdir()) / f"lightseq-gpu-tests-{os.getuid()}"
LOCKED = pytest.StashKey[IO[str]]()


def _lock_gpu(alone: bool) -> IO[str]:
    """Who waits for the others to end keeps the door shut, or there would always be one."""
    with Path(f"{LOCK}.door").open("w") as door:
        fcntl.flock(door, fcntl.LOCK_EX)
        gpu = Path(f"{LOCK}.gpu").open("w")  # noqa: SIM115 (closed in teardown)
        fcntl.flock(gpu, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
    return gpu


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


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    torch.manual_seed(1)  # the same draws in each run, alone or among others
    if item.get_closest_marker("gpu"):
        item.stash[LOCKED] = _lock_gpu(alone=item.get_closest_marker("alone") is not None)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    # Other test processes share the GPU, and the sizes here are so many that few blocks of memory
    # would serve again.
    if item.get_closest_marker("gpu"):
        torch.cuda.empty_cache()
        with item.stash[LOCKED] as gpu:
            fcntl.flock(gpu, fcntl.LOCK_UN)  # forked children may still have the file open
