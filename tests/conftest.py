"""Tests marked `gpu` run only if torch finds a GPU; requesting them without a GPU is an error.

All tests of the files *_cuda.py are marked.

Test processes share the GPU. A test marked `alone` waits until no other process uses the GPU.
"""

from __future__ import annotations

import fcntl
import gc
import itertools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import pytest
import torch
from helpers import garbage, shared

# fairseq leaves data loaders to the garbage collector, which may free the queues of the worker
# processes before the loader. It then waits so long for each worker, instead of 5 s.
torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.2

# Files of tests need not survive a power cut. The product syncs each file that it writes, for which
# a small run would wait a tenth of its time.
os.fsync = lambda number: None

# torch describes the stack of each call that seeds a GPU, for an error that may come later: in the
# deep stacks of tests, for a millisecond of each update.
for device in (torch.cuda, torch.xpu, torch.mtia):
    device.traceback = SimpleNamespace(format_stack=list)

LOCK = Path(tempfile.gettempdir()) / f"lightseq-gpu-tests-{os.getuid()}"
LOCKED = pytest.StashKey[IO[str]]()


def _lock_gpu(alone: bool) -> IO[str]:
    """A process that waits for the GPU alone holds the door lock, so that no new process gets in
    before it."""
    with Path(f"{LOCK}.door").open("w") as door:
        fcntl.flock(door, fcntl.LOCK_EX)
        gpu = Path(f"{LOCK}.gpu").open("w")  # noqa: SIM115 (closed in teardown)
        fcntl.flock(gpu, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
    return gpu


def _asked_for(config: pytest.Config) -> bool:
    expression = config.getoption("markexpr")
    return "gpu" in expression.replace("not gpu", "")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shared.begin()  # pytest_unconfigure ends it, also after the error below

    if _asked_for(config) and not torch.cuda.is_available():
        raise pytest.UsageError(
            f'-m "{config.getoption("markexpr")}" asks for GPU tests, but torch sees no GPU here'
        )


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shared.end()


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.path.stem.endswith("_cuda"):
        item.add_marker("gpu")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    # opcheck simulates a GPU. Autograd counts devices at its first backward. If it counted the
    # simulated GPU, child processes in which some tests train would fail, so let it count now.
    torch.ones((), requires_grad=True).backward()
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=on_gpu)
    items[:] = [item for item in items if item.get_closest_marker("gpu") is None]
    # Two processes share the files in this order, and should end at the same time. So the files
    # that run no commands, which are the short ones, come last.
    items.sort(key=lambda item: item.path.parent.name in ("model", "ops"))
    # Training collects garbage before it starts workers, which takes half a second with all that
    # tests import. Exclude these objects. (On a GPU, objects that stay frozen could hold memory.)
    # Training freezes nothing more: the pipes of its workers would stay open after it.
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None


_files = itertools.count(1)


@pytest.fixture(scope="module", autouse=True)
def no_garbage_left() -> Iterator[None]:
    """What a file's tests leave, such as pipes of data loading workers, goes with the file.

    What was there before the file, which takes long to go through, is collected every tenth time.
    """
    yield
    if gc.get_freeze_count():
        if next(_files) % 10 == 0:
            garbage.unfreeze()
        gc.collect()
        garbage.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    torch.manual_seed(1)  # the same random numbers in each run, also if only some tests run
    if item.get_closest_marker("gpu"):
        item.stash[LOCKED] = _lock_gpu(alone=item.get_closest_marker("alone") is not None)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    # Other test processes share the GPU. The sizes in these tests vary so much that cached blocks
    # would rarely be used again.
    if item.get_closest_marker("gpu"):
        torch.cuda.empty_cache()
        with item.stash[LOCKED] as gpu:
            fcntl.flock(gpu, fcntl.LOCK_UN)  # a forked child may still have the file open
