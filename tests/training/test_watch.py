"""Messages of a rank about other ranks that do not respond, have ended or have not started."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import helpers.cli_runs as cli_runs
import helpers.forked_commands as forked_commands
import helpers.training_runs as runs
import pytest
import torch
from fairseq import trainer

from lightseq_fairseq.training import ranks
from lightseq_fairseq.training.ranks import SILENCE, Watch


class Store(dict[str, int]):
    """The heartbeat counters of all ranks."""

    def add(self, key: str, amount: int) -> int:
        self[key] = self.get(key, 0) + amount
        return self[key]


class Scene:
    """Rank 0 of three, with a clock that the test advances."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.WARNING)
        self.now, self.store, self.log = 0.0, Store(), caplog
        self.watch = Watch(self.store, 0, 3, clock=lambda: self.now)

    def pass_time(self, seconds: float, alive: tuple[int, ...], beats: bool = True) -> str:
        """What is logged during so many seconds, in which the counters of these ranks increase."""
        self.log.clear()
        for _ in range(int(seconds)):
            self.now += 1
            for rank in alive:
                self.store.add(str(rank), 1)
            if beats:
                self.watch.beat()
            self.watch.look()
        return self.log.text


@pytest.fixture
def scene(caplog: pytest.LogCaptureFixture) -> Scene:
    return Scene(caplog)


def test_a_silent_rank_is_reported_once_and_when_it_is_back(scene: Scene) -> None:
    assert scene.pass_time(100, alive=(1, 2)) == ""
    assert scene.pass_time(SILENCE - 1, alive=(1,)) == ""
    said = scene.pass_time(SILENCE, alive=(1,))
    assert said.count("rank 2 has not responded for 31 seconds") == 1 and "rank 1" not in said
    assert scene.pass_time(100, alive=(1,)) == ""
    assert scene.pass_time(2, alive=(1, 2)).count("rank 2 responds again") == 1
    assert "rank 2 has not responded" in scene.pass_time(40, alive=(1,))


def test_a_store_that_does_not_answer_is_reported(scene: Scene) -> None:
    scene.pass_time(10, alive=(1, 2))
    scene.watch._asked = scene.now  # as during `beat`
    said = scene.pass_time(SILENCE + 5, alive=(1, 2), beats=False)
    name = "rank 0, or the process that started the ranks,"
    assert said.count("has not responded") == said.count(name) == 1
    scene.watch._asked = None
    assert "responds again" in scene.pass_time(5, alive=(1, 2))


def test_time_in_which_this_rank_is_stopped_is_no_silence_of_others(scene: Scene) -> None:
    scene.pass_time(10, alive=(1, 2))
    scene.now += 1000
    scene.watch.look()
    assert scene.pass_time(SILENCE - 5, alive=(1, 2)) == ""


def test_a_rank_that_has_come_to_its_end_is_not_missed(scene: Scene) -> None:
    """Rank 0 may still be writing a checkpoint when the other ranks have ended."""
    scene.pass_time(10, alive=(1, 2))
    Watch(scene.store, 2, 3).leave()
    assert scene.pass_time(100, alive=(1,)) == ""
    assert "rank 1 has not responded" in scene.pass_time(40, alive=())


def test_who_keeps_the_store_may_end(scene: Scene) -> None:
    """The next all-reduce of gradients will report it."""
    with mock.patch.object(
        scene.store, "add", side_effect=RuntimeError("Broken pipe"), create=True
    ):
        assert scene.pass_time(100, alive=()) == ""


def test_each_rank_is_watched_by_others() -> None:
    watching = [set(Watch(Store(), rank, 100)._heard) for rank in range(100)]
    assert all(rank not in others and len(others) == 8 for rank, others in enumerate(watching))
    assert set().union(*watching) == set(range(100))


def test_a_stopped_rank_is_reported_while_the_others_wait(data: Path, tmp_path: Path) -> None:
    step, calls = trainer.Trainer.begin_epoch, 0

    def begin_epoch(self: Any, epoch: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 2 and torch.distributed.get_rank() == 1:
            (tmp_path / "stopped").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        step(self, epoch)

    said: list[str] = []

    def keep(text: str, *values: Any) -> None:
        if "has waited" in text:  # at the start, on a busy machine
            return
        said.append(text % values)
        (tmp_path / f"said{torch.distributed.get_rank()}").write_text(json.dumps(said))

    def resume() -> None:
        deadline = time.monotonic() + 60
        while not (tmp_path / "said0").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        os.kill(int((tmp_path / "stopped").read_text()), signal.SIGCONT)

    helper = runs.fork(resume)
    with (
        mock.patch.object(trainer.Trainer, "begin_epoch", begin_epoch),
        mock.patch.object(ranks, "SILENCE", 1.0),
        mock.patch.object(ranks, "_BEAT", 0.1),
        mock.patch.object(ranks.logger, "warning", keep),
    ):
        both = runs.run_ranks(data, tmp_path / "run", 2, **runs.LS, no_save=True, max_update=20)
    assert runs.exit_status(helper) == 0
    assert both[0] == both[1] and len(both[0]) == 20
    told = json.loads((tmp_path / "said0").read_text())
    assert re.match("rank 1 has not responded for 1 seconds: its process is suspended", told[0])
    assert told[1:] == ["rank 1 responds again"]
    assert not (tmp_path / "said1").exists()


# --- By the launchers, on a CPU, without flags about how ranks communicate -----------------------


@contextmanager
def rank_starter(*words: str | Path) -> Iterator[Callable[[int], subprocess.Popen[str]]]:
    """Starts ranks of a Python command line, two in all, as torchrun does; modules are forked."""
    started: list[subprocess.Popen[str]] = []
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}

    def start(rank: int) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [str(forked_commands.python()), *map(str, words)], text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={**os.environ, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )  # fmt: skip
        started.append(process)
        return process

    try:
        yield start
    finally:
        for process in started:
            process.kill()


def free_port() -> int:
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return int(store.port)


def test_a_rank_that_is_killed_is_told_of_in_a_sentence(binarised: Path, tmp_path: Path) -> None:
    words = [binarised, "--arch", "ls_transformer_tiny", *cli_runs.SMALL, "--log-interval", "1"]
    words += ["--max-update", "1000000", "--save-dir", tmp_path, "--disable-validation"]
    words += ["--save-interval", "1000000"]
    with rank_starter("-m", "lightseq_fairseq.cli.train", *words) as start:
        first, second = start(0), start(1)
        assert first.stdout is not None
        for line in first.stdout:
            if re.search("num_updates[ =]+[3-9]", line):
                break
        second.kill()
        rest, _ = first.communicate(timeout=60)
    assert first.returncode == 2
    assert "Traceback" not in rest and "frame #" not in rest
    assert rest.splitlines()[-1] == (
        "lightseq-train: error: Another rank has ended: its own log says why; run the same command "
        "again to resume from the last checkpoint."
    )


def test_ranks_validate_on_a_cpu_where_one_has_fewer_batches(
    binarised: Path, tmp_path: Path
) -> None:
    words = [binarised, "--arch", "ls_transformer_tiny", *cli_runs.SMALL, "--save-dir", tmp_path]
    cli_runs.succeed("train", *words)
    words = [binarised, "--path", tmp_path / "checkpoint_last.pt", "--cpu", "--num-workers", "0"]
    losses = [re.findall(r" loss ([\d.]+)", cli_runs.succeed("validate", *words))[-1]]
    for own in ([], ["--native"]):
        program = ("-m", "lightseq_fairseq.cli.validate")
        with rank_starter(*program, *words, "--batch-size", "2", *own) as start:
            for process in (start(0), start(1)):
                said, _ = process.communicate(timeout=100)
                assert process.returncode == 0, said
                losses.append(re.findall(r" loss ([\d.]+)", said)[-1])
    assert len(losses) == 5 and len(set(losses)) == 1


def test_a_rank_that_waits_for_others_says_so_and_ends_by_a_signal(
    binarised: Path, tmp_path: Path
) -> None:
    script = (
        "from lightseq_fairseq.training import ranks\n"
        "ranks.SILENCE = 0.5\n"
        "from lightseq_fairseq.cli.train import main\n"
        "if __name__ == '__main__':\n"
        "    main()\n"
    )
    (tmp_path / "script.py").write_text(script)
    words = [binarised, "--arch", "ls_transformer_tiny", *cli_runs.SMALL, "--save-dir", tmp_path]
    with rank_starter(tmp_path / "script.py", *words) as start:
        process = start(0)
        assert process.stdout is not None
        said = next(line for line in process.stdout if "has waited" in line)
        process.terminate()
        assert process.wait(timeout=20) == -signal.SIGTERM
    assert "rank 0 has waited" in said and "MASTER_PORT" in said
