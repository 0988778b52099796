"""SIGTERM and SIGUSR1 end training with a checkpoint after the update; the same command resumes."""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import helpers.cli_runs as cli_runs
import helpers.training_runs as runs
import pytest
import torch
from fairseq.data.iterators import BackgroundConsumer
from helpers import garbage
from torch.utils.data import DataLoader, _utils
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from lightseq_fairseq.base.errors import StoppedBySignal
from lightseq_fairseq.cli.start.ranks import Ranks
from lightseq_fairseq.training import stopping
from lightseq_fairseq.training.report import FILE, Report
from lightseq_fairseq.training.stopping import ReceivedSignals

SETS = {"ours": runs.LS, "fairseq's steps": {**runs.LS, "optimizer": "adam"}}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
@pytest.mark.parametrize("steps", SETS)
def test_a_run_goes_on_bit_by_bit(
    data: Path, tmp_path: Path, steps: str, number: signal.Signals
) -> None:
    flags = {**SETS[steps], "bf16": True, "max_update": 10}
    whole = runs.run(data, tmp_path / "whole", **flags)
    before = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    for update in (3, 7):  # in the middle of the first epoch, and at its end
        with runs.signalled(number, update), pytest.raises(StoppedBySignal, match=number.name):
            runs.run(data, tmp_path / "run", **flags)
        last = torch.load(tmp_path / "run/checkpoint_last.pt", weights_only=False)
        assert last["optimizer_history"][-1]["num_updates"] == update
    losses = runs.run(data, tmp_path / "run", **flags)
    assert losses == whole[7:]
    assert runs.differing(runs.trained(tmp_path / "run"), runs.trained(tmp_path / "whole")) == []
    assert [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)] == before


@pytest.mark.parametrize("steps", SETS)
def test_ranks_stop_after_the_same_update(data: Path, tmp_path: Path, steps: str) -> None:
    """Only one rank gets the signal, not the first one."""
    flags = {**SETS[steps], "max_update": 9}
    whole = runs.run_ranks(data, tmp_path / "whole", 2, **flags)
    with runs.signalled(signal.SIGUSR1, 3, rank=1), pytest.raises(AssertionError):
        runs.run_ranks(data, tmp_path / "run", 2, **flags)
    state = torch.load(tmp_path / "run/checkpoint_last.pt", weights_only=False)
    updates = state["optimizer_history"][-1]["num_updates"]
    assert 3 <= updates <= 5
    (tmp_path / "run/rendezvous").unlink(missing_ok=True)
    (tmp_path / "run").rename(tmp_path / "stopped")
    rest = runs.run_ranks(
        data, tmp_path / "run", 2, **flags, restore_file=tmp_path / "stopped/checkpoint_last.pt"
    )
    assert rest == [losses[updates:] for losses in whole]


def test_two_kinds_of_signals_are_told_apart_in_a_sum() -> None:
    for numbers, reason in (
        ([signal.SIGTERM] * 3, signal.SIGTERM),
        ([signal.SIGUSR1] * 3, signal.SIGUSR1),
        ([signal.SIGINT] * 1000, signal.SIGINT),
        ([signal.SIGUSR1, signal.SIGTERM], signal.SIGTERM),
        ([signal.SIGUSR1, signal.SIGINT], signal.SIGINT),
        ([], None),
    ):
        ranks = [ReceivedSignals() for _ in numbers]
        for rank, number in zip(ranks, numbers, strict=True):
            rank._process = os.getpid()
            rank._receive(number, None)
        stopping = ReceivedSignals()
        stopping.agree(sum(rank.signal_code() for rank in ranks))
        assert stopping.reason == reason


def test_a_signal_may_arrive_while_the_codes_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = ReceivedSignals()
    rank._process = os.getpid()

    class Codes(dict[int, float]):
        def __getitem__(self, number: int) -> float:
            rank._receive(signal.SIGUSR1, None)  # as the signal handler does
            return super().__getitem__(number)

    codes = Codes(stopping._CODES)
    monkeypatch.setattr(stopping, "_CODES", codes)
    rank._receive(signal.SIGTERM, None)
    assert rank.signal_code() == dict.__getitem__(codes, signal.SIGTERM)  # not yet SIGUSR1
    assert rank.signal_code() == sum(dict.__getitem__(codes, n) for n in rank._received) > 1


@pytest.mark.parametrize("flag", ["no_save", "no_last_checkpoints"])
def test_a_run_that_saves_nothing_ends_at_once(data: Path, tmp_path: Path, flag: str) -> None:
    def work() -> None:
        with runs.signalled(signal.SIGTERM, 2):
            runs.run(data, tmp_path, **runs.LS, **{flag: True})

    assert runs.in_a_fork(work) == -signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_one_ends_at_once(data: Path, tmp_path: Path, number: signal.Signals) -> None:
    """It comes later than the repetition that senders make to a process and to its process
    group."""
    clock, ticks = time.monotonic, functools.partial(next, iter(range(0, 9000, 3)))

    def work() -> None:
        with mock.patch.object(time, "monotonic", lambda: clock() + ticks()):
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)

    step = runs.Trainer.train_step

    def signalled_twice(self: runs.Trainer, *arguments: Any) -> Any:
        if self.get_num_updates() == 2:
            work()
        return step(self, *arguments)

    def run() -> None:
        with (
            mock.patch.object(runs.Trainer, "train_step", signalled_twice),
            mock.patch.object(multiprocessing, "parent_process", lambda: None),
            mock.patch.object(Report, "_log", lambda self, *lines: said.extend(lines)),
        ):
            runs.run(data, tmp_path, **runs.LS)

    def interrupted() -> None:
        with pytest.raises(KeyboardInterrupt):
            run()
        assert (
            said[-1] == "interrupted at update 2: all are lost, because there is no checkpoint yet"
        )

    said: list[str] = []
    if number == signal.SIGINT:
        assert runs.in_a_fork(interrupted) == 0
    else:
        assert runs.in_a_fork(run) == -number
    assert not (tmp_path / "checkpoint_last.pt").exists()


def _ignore_sigterm(ready: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready.set()
    time.sleep(60)


def test_the_launcher_ends_ranks_by_a_second_one() -> None:
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    rank = context.Process(target=_ignore_sigterm, args=(ready,))
    rank.start()
    ready.wait(30)
    ranks, start = Ranks(), time.monotonic()
    for after in (0, 0.5):  # to the launcher, then to its process group
        with mock.patch.object(time, "monotonic", lambda after=after: start + after):
            ranks.tell(signal.SIGTERM, None)
        rank.join(0.2)
        assert rank.is_alive() and ranks.told == "SIGTERM"
    with mock.patch.object(time, "monotonic", lambda: start + 1.5):
        ranks.tell(signal.SIGTERM, None)
    rank.join(30)
    assert rank.exitcode == -signal.SIGKILL


def test_a_worker_that_hangs_does_not_delay_the_end(data: Path, tmp_path: Path) -> None:
    """It cannot react to SIGTERM, and Python's exit would wait for it without a limit."""
    step, others, workers = runs.Trainer.train_step, set(multiprocessing.active_children()), []

    def stops_it(self: runs.Trainer, *arguments: Any) -> Any:
        if self.get_num_updates() == 2:
            workers[:] = set(multiprocessing.active_children()) - others
            for worker in workers:
                os.kill(worker.pid, signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, *arguments)

    try:
        with (
            mock.patch.object(runs.Trainer, "train_step", stops_it),
            mock.patch.object(_utils, "MP_STATUS_CHECK_INTERVAL", 0.2),  # torch waits this long
            pytest.raises(StoppedBySignal),
        ):
            runs.run(data, tmp_path, **runs.LS, num_workers=2)
        assert [worker.exitcode for worker in workers] == [-signal.SIGKILL] * 2
    finally:
        for worker in workers:
            worker.kill()


class Unused:
    """An object of a reference cycle; freed by another process, it ends that process."""

    def __init__(self) -> None:
        self.itself, self.owner = self, os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.owner:
            os._exit(17)  # torch calls CUDA to free a tensor in pinned memory, and aborts


@pytest.mark.parametrize("native", [False, True])
def test_workers_free_nothing_that_they_inherit(data: Path, tmp_path: Path, native: bool) -> None:
    start, fetch = DataLoader.__iter__, _MapDatasetFetcher.fetch
    started = []

    def starts(self: DataLoader) -> Any:
        gc.collect()
        Unused()
        started.append(self)
        return start(self)

    def fetches(self: _MapDatasetFetcher, indices: Any) -> Any:
        gc.collect()
        return fetch(self, indices)

    calls = mock.Mock()
    calls.freeze.side_effect = garbage.freeze
    with (
        mock.patch.object(DataLoader, "__iter__", starts),
        mock.patch.object(_MapDatasetFetcher, "fetch", fetches),
        mock.patch.multiple(gc, freeze=calls.freeze, unfreeze=calls.unfreeze),
    ):
        flags = runs.NATIVE if native else runs.LS
        runs.run(data, tmp_path, native, **flags, num_workers=1, max_update=5)
    assert started
    assert mock.call.freeze() in calls.mock_calls
    assert calls.mock_calls[-1] == mock.call.unfreeze()


@pytest.mark.parametrize("workers", [0, 1])
def test_no_thread_loads_batches_after_the_end(data: Path, tmp_path: Path, workers: int) -> None:
    """Python would abort if it exited while the thread runs torch code."""
    step, seen = runs.Trainer.train_step, set()

    def loading() -> set[threading.Thread]:
        return {t for t in threading.enumerate() if isinstance(t, BackgroundConsumer)}

    others = loading()

    def look(self: runs.Trainer, *arguments: Any) -> Any:
        seen.update(loading() - others)
        return step(self, *arguments)

    with mock.patch.object(runs.Trainer, "train_step", look):
        # an epoch has more batches than the updates and the buffer take: the thread waits for room
        runs.run(data, tmp_path, **runs.LS, num_workers=workers, data_buffer_size=1, max_update=1)
    assert seen
    assert not seen & loading()


def test_a_worker_ends_with_a_process_that_was_killed(data: Path, tmp_path: Path) -> None:
    """Also if the process ends before torch's loop reads the id of its parent process."""
    reading, writing = os.pipe()

    watchdog: Any = _utils.worker.ManagerWatchdog

    class Late(watchdog):
        def __init__(self) -> None:
            os.write(writing, str(os.getpid()).encode())
            parent = os.getppid()
            os.kill(parent, signal.SIGKILL)
            while os.getppid() == parent:
                time.sleep(0.01)
            super().__init__()

    with mock.patch.object(_utils.worker, "ManagerWatchdog", Late):
        status = runs.in_a_fork(lambda: runs.run(data, tmp_path, **runs.LS, num_workers=1))
    os.close(writing)
    assert status == -signal.SIGKILL
    worker = int(os.read(reading, 20))
    try:
        waiting = select.poll()  # unlike select(), for any number of open files
        waiting.register(reading)
        assert waiting.poll(10_000), "the worker still runs"
        assert os.read(reading, 20) == b""
    finally:
        os.close(reading)
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)


RANKS = "--distributed-world-size 2 --distributed-backend gloo --ddp-backend legacy_ddp"
SPAWNING = """
from lightseq_fairseq.cli.train import main
if __name__ == "__main__":
    import torch
    torch.cuda.device_count = lambda: 2  # fairseq spawns as many ranks as there are GPUs
    main()
"""


def started(binarised: Path, tmp_path: Path, how: str, stderr: int) -> subprocess.Popen[str]:
    """A training of 1000000 updates; how: alone, native, or with two spawned ranks."""
    (tmp_path / "script.py").write_text(SPAWNING)
    words = {"alone": [], "native": ["--native"], "spawned": [*shlex.split(RANKS)]}[how]
    program = (
        [str(tmp_path / "script.py")] if how == "spawned" else ["-m", "lightseq_fairseq.cli.train"]
    )
    return subprocess.Popen(
        [sys.executable, *program, str(binarised), "--arch", "ls_transformer_tiny",
         "--save-dir", str(tmp_path / "save"), *cli_runs.SMALL, *words, "--max-update", "1000000",
         "--disable-validation", "--log-interval", "1", "--save-interval", "1000000",
         "--num-workers", "1"],
        stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True,
        # Two threads of OpenMP, so that each process has several threads.
        env={**os.environ, "OMP_NUM_THREADS": "2", "PYTHONFAULTHANDLER": "1"},
    )  # fmt: skip


def wait_for_updates(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if re.search("num_updates[ =]+[3-9]", line):
            return


@pytest.mark.parametrize(
    ("how", "number", "to_all"),
    [
        ("alone", signal.SIGTERM, True),
        ("native", signal.SIGUSR1, True),
        ("spawned", signal.SIGTERM, False),
        ("spawned", signal.SIGTERM, True),
        ("alone", signal.SIGINT, True),
        ("native", signal.SIGINT, True),
        ("spawned", signal.SIGINT, True),
    ],
)
def test_the_launcher_says_so(
    binarised: Path, tmp_path: Path, how: str, number: signal.Signals, to_all: bool
) -> None:
    process = started(binarised, tmp_path, how, subprocess.PIPE)
    try:
        wait_for_updates(process)
        second = cli_runs.run("train", binarised, "--arch", "ls_transformer_tiny",
                              "--save-dir", tmp_path / "save", *cli_runs.SMALL)  # fmt: skip
        # To all processes, as batch systems do, or only to the first one.
        os.killpg(process.pid, number) if to_all else process.send_signal(number)
        try:
            _, complaint = process.communicate(timeout=100)
        except subprocess.TimeoutExpired:  # seen once in thousands of runs: show who hangs, where
            tree = subprocess.run(["ps", "-ef", "--forest"], capture_output=True, text=True).stdout
            os.killpg(process.pid, signal.SIGABRT)  # faulthandler writes the stacks of all threads
            pytest.fail(f"hangs: {process.communicate(timeout=20)[1]}\n{tree}")
    finally:
        process.kill()
    assert process.returncode == 128 + number, complaint
    assert "Traceback" not in complaint
    last = tmp_path / "save/checkpoint_last.pt"
    how = "interrupted" if number == signal.SIGINT else f"stopped by {number.name}"
    sentence = f"lightseq-train: {how}; the same command resumes from {last}."
    assert complaint.splitlines().count(sentence) == 1, complaint
    assert complaint.count("Ctrl-C again ends at once") == (number == signal.SIGINT), complaint
    torch.load(last, weights_only=False)
    assert sorted(os.listdir(tmp_path / "save")) == ["checkpoint_last.pt", FILE]
    assert second.exit_code == 2
    assert f"Another training run writes to {tmp_path / 'save'} (process " in second.stderr


@pytest.mark.parametrize("how", ["alone", "spawned"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_reader_of_the_output_has_ended(
    binarised: Path, tmp_path: Path, how: str, number: signal.Signals
) -> None:
    """As after Ctrl-C in ``lightseq-train ... 2>&1 | tee log``, which ends tee, too."""
    process = started(binarised, tmp_path, how, subprocess.STDOUT)
    try:
        wait_for_updates(process)
        assert process.stdout is not None
        process.stdout.close()
        os.killpg(process.pid, number)
        assert process.wait(timeout=100) == 128 + number
    finally:
        process.kill()
    torch.load(tmp_path / "save/checkpoint_last.pt", weights_only=False)
    assert sorted(os.listdir(tmp_path / "save")) == ["checkpoint_last.pt", FILE]
