"""Run commands in parallel, and end them when this process ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

Name = TypeVar("Name")


class Command(NamedTuple):
    """A command: its words, the file for its output, and additional environment variables."""

    words: list[str | Path]
    output: Path
    environment: dict[str, str]


def start(command: Command) -> subprocess.Popen[bytes]:
    """Start the command in its own session, so that it can be ended with all its children."""
    with open(command.output, "wb") as output:
        return subprocess.Popen(
            command.words, env={**os.environ, **command.environment}, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip


def run_all(
    commands: Mapping[Name, Command], jobs: int, done: Callable[[Name], None]
) -> list[Name]:
    """Run ``commands`` in order, ``jobs`` in parallel; call ``done`` after each that succeeds.

    Returns the names of the failed ones, and prints the last lines of their output.
    """
    waiting, failed = list(commands), list[Name]()
    running: dict[Name, subprocess.Popen[bytes]] = {}
    program = Path(sys.argv[0]).name
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(f"{program}: stopped by a signal"))
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                name = waiting.pop(0)
                running[name] = start(commands[name])
                print(f"{name}: started", flush=True)
            time.sleep(0.2)
            for name, process in list(running.items()):
                if process.poll() is None:
                    continue
                del running[name]
                if process.returncode == 0:
                    done(name)
                    continue
                failed.append(name)
                output = commands[name].output.read_text(encoding="utf-8", errors="replace")
                last = output.splitlines()[-5:]
                print(f"{name}: exit status {process.returncode}", *last, sep="\n    ", flush=True)
    finally:
        for process in running.values():
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
    return failed
