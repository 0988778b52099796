"""Ask ``lightseq-serve`` for a long time, and check every answer.

    python -m scripts.soak_serve --minutes 60 --rate 20 --texts test.de -- MODEL [FLAGS]

FLAGS are --cpu, and those of lightseq-interactive. Requests arrive at random. Of ten, one is
cancelled by its client at a random time, and one is malformed; the others must get the words of
`lightseq_fairseq.Translator`, searched one by one. After half of the time the server loads its
models again (SIGHUP), and at the end it is asked to end (SIGTERM) while it answers. The result is
one JSON object: the numbers of requests by what became of them, and the memory of all processes of
the server each ten seconds, without pages that they share.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from lightseq_fairseq import Translator
from lightseq_fairseq.cli.serve import _parted

MALFORMED = (
    (b"{", 400), (b'{"q": 5}', 400), (b'{"q": "a\\u0000b"}', 400), (b'{"q": "a", "beam": 99}', 400),
    (b'{"q": []}', 400), (b'{"q": "a", "target": "xx-none"}', 400), (b'{"q": " "}', 400),
    (b'{"q": "' + b"a" * (1 << 20) + b'"}', 413), (b"\xff\xfe", 400), (b"", 400),
)  # fmt: skip
_LOOK = 10.0  # seconds between two looks at the memory


class Soak:
    """The clients.

    Args:
        address: of the server. expected: a text -> its translation.
    """

    def __init__(self, address: str, expected: dict[str, str], pid: int) -> None:
        self.expected, self.texts, self.pid = expected, [*expected], pid
        self.counts: Counter[str] = Counter()
        self.wrong: list[Any] = []
        self.memory: list[tuple[int, float]] = []  # seconds, MiB
        limits = httpx.Limits(max_connections=2000)
        self.client = httpx.AsyncClient(base_url=address, timeout=120, limits=limits)
        self.ends = False

    async def ask(self) -> None:
        """One request."""
        kind = random.choices(("right", "cancelled", "malformed"), (8, 1, 1))[0]
        try:
            if kind == "malformed":
                body, status = random.choice(MALFORMED)
                headers = {"Content-Type": "application/json"}
                answer = await self.client.post("/translate", content=body, headers=headers)
                self._check(answer.status_code == status, "refused", (body[:40], answer.text))
                return
            some = random.choices(self.texts, k=random.choice((1, 1, 1, 4)))
            work = self.client.post("/translate", json={"q": some})
            if kind == "cancelled":
                await asyncio.wait_for(work, random.random() * 0.3)
                self.counts["answered before it was cancelled"] += 1
                return
            answer = await work
            found = answer.json().get("translatedText")
            wanted = [self.expected[each] for each in some]
            self._check(found == wanted, "right", (some, answer.status_code, found))
        except asyncio.TimeoutError:
            self.counts["cancelled"] += 1
        except httpx.HTTPError as error:
            # Only a server that ends may refuse a connection.
            self._check(self.ends, "not accepted at the end", repr(error))

    def _check(self, is_right: bool, name: str, else_: Any) -> None:
        self.counts[name if is_right else "wrong"] += 1
        if not is_right:
            self.wrong.append(else_)

    async def run(self, seconds: float, rate: float) -> None:
        """Requests for so long, then SIGTERM; all that the server has accepted are answered."""
        began, tasks, has_reloaded = time.monotonic(), set[asyncio.Task[None]](), False
        looks = 0
        while (passed := time.monotonic() - began) < seconds:
            if passed > seconds / 2 and not has_reloaded:
                os.kill(self.pid, signal.SIGHUP)
                has_reloaded = True
            if passed >= looks * _LOOK:
                self.memory.append((round(passed), round(memory(self.pid), 1)))
                looks += 1
            task = asyncio.create_task(self.ask())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            await asyncio.sleep(random.expovariate(rate))
        self.ends = True
        os.kill(self.pid, signal.SIGTERM)
        await asyncio.gather(*tasks)


def memory(pid: int) -> float:
    """MiB of a process and its children; a page that several have counts in parts."""
    total, left = 0.0, [pid]
    while left:
        place = Path(f"/proc/{left.pop()}")
        try:
            found = re.search(r"Pss:\s+(\d+)", (place / "smaps_rollup").read_text())
            left += map(int, (place / "task" / place.name / "children").read_text().split())
        except OSError:  # it has ended
            continue
        total += int(found[1]) / 1024 if found else 0.0
    return total


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--rate", type=float, default=20)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--most", type=int, default=200, help="texts of the file that are used")
    parser.add_argument("--log", type=Path, default=Path("build/soak.log"))
    parser.add_argument("server", nargs="+")
    given = parser.parse_args(words)
    (model,), flags = _parted(given.server)
    device = "cpu" if flags.pop("cpu", False) else "cuda"
    lines = [line for line in given.texts.read_text("utf-8").splitlines() if line][: given.most]
    translator = Translator.from_pretrained(model, device=device, batch_size=1, **flags)
    expected = {line: translator.translate(line).text for line in lines}
    del translator
    given.log.parent.mkdir(parents=True, exist_ok=True)
    program = [sys.executable, "-m", "lightseq_fairseq", "serve", *given.server, "--port", "0"]
    with open(given.log, "w", encoding="utf-8") as log:
        process = subprocess.Popen(program, stderr=log)
    while not (found := re.search(r"listens on (\S+)", given.log.read_text("utf-8"))):
        time.sleep(0.1)
    while httpx.get(f"{found[1]}/ready").status_code != 200:
        time.sleep(0.1)
    soak = Soak(found[1], expected, process.pid)
    asyncio.run(soak.run(60 * given.minutes, given.rate))
    row = {"status": process.wait(), **soak.counts, "mib": soak.memory, "first": soak.wrong[:5]}
    print(json.dumps(row))
    sys.exit(bool(soak.wrong))


if __name__ == "__main__":
    main()
