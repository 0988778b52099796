"""A lightseq-serve process for tests."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from helpers.interpreters import ROOT


class Server:
    """A lightseq-serve process.

    Attributes:
        client: of its address.
    """

    def __init__(self, log: Path, *words: str, **environment: str) -> None:
        self.log = log
        command = [sys.executable, "-m", "lightseq_fairseq", "serve", *words, "--port", "0"]
        inherited = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command, stderr=file, env={**inherited, **environment}, start_new_session=True
            )
        address = self.wait_for(r"listens on (http://\S+)")
        self.client = httpx.Client(base_url=address, timeout=60)
        while self.client.get("/ready").status_code != 200:
            time.sleep(0.05)

    def wait_for(self, line: str) -> str:
        while (found := re.search(line, self.log.read_text())) is None:
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)
        return found[1]

    def processes(self) -> dict[str, list[int]]:
        """Those that the server has started: "models", and "texts" that serve them."""
        (loader,) = _children(_forkserver(self.process.pid))
        models, *texts = _children(loader)
        return {"models": [models], "texts": texts, "loader": [loader]}

    def post(self, path: str, **body: Any) -> Any:
        answer = self.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def sentences(self, name: str) -> float:
        """A number of /metrics: "waiting", "searched" or "slots" of the translation model."""
        text = self.client.get("/metrics").text
        found = re.search(rf'lightseq_sentences_{name}{{model="digits"}} (\S+)', text)
        assert found is not None
        return float(found[1])

    def until_searched(self, count: int) -> None:
        """Wait until so many sentences are searched; fails after some seconds."""
        limit = time.monotonic() + 20
        while self.sentences("searched") != count:
            assert time.monotonic() < limit
            time.sleep(0.02)

    def signal(self, number: int) -> None:
        """Send a signal to all of its processes, as a terminal and systemd do."""
        os.killpg(self.process.pid, number)

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def _children(process: int) -> list[int]:
    """In the order in which they were started."""
    found = Path(f"/proc/{process}/task/{process}/children").read_text()
    return [int(each) for each in found.split()]


def _forkserver(process: int) -> int:
    """The process from which Python forks others; the second one keeps track of files."""
    (found,) = (
        each
        for each in _children(process)
        if b"forkserver" in Path(f"/proc/{each}/cmdline").read_bytes()
    )
    return found
