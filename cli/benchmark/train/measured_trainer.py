"""Runs lightseq-train and measures its steps from outside: the command is a user's command.

    python -m lightseq_fairseq.cli.benchmark.train.measured_trainer --report FILE --updates N
        --heat N --marks N [--without-apex] -- WORD... (of lightseq-train)

The report is a JSON object: ``first_100_s`` from the start of the first epoch to the end of update
100, ``peak_gib`` up to update N (see `Memory`), the `timeline` of a few steps after it, and real
target tokens a step of those, ``profiled_tokens``. Speed is in the training log; before update N
nothing happens here but one synchronisation after update 100. Of several ranks the first one's
report is FILE, and its tokens count for all.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lightseq_fairseq.cli.benchmark.memory import MemoryMeter
from lightseq_fairseq.cli.benchmark.train.timeline import MARK, timeline
from lightseq_fairseq.fairseq_compat import patching

FIRST = 100


class StepMeter:
    """Is told about the steps of a training and writes the report.

    Args:
        report: the file to write.
        updates: after so many the profiler starts; ``heat + marks`` more have to follow.
        heat: so many it does not record, 1 at least, see ``cases.System``.
        marks: so many stand in the record, one before each step.
    """

    def __init__(self, report: Path, updates: int, heat: int, marks: int) -> None:
        self.report, self.updates, self.heat, self.marks = report, updates, heat, marks
        self.gpu = torch.cuda.is_available()
        self._memory = MemoryMeter(self.gpu)
        self._began: float | None = None
        self._first: float | None = None
        self._peak = 0
        self._tokens: list[int] = []  # of the step behind each mark
        self._profile: Any = None

    def begin(self) -> None:
        """The first epoch starts; later calls change nothing."""
        if self._began is None:
            self._began = time.perf_counter()

    def before_step(self, num_updates: int, tokens: int) -> None:
        """A step of so many real target tokens starts, after so many updates."""
        if self._first is None and num_updates >= FIRST and self._began is not None:
            self._wait()
            self._first = time.perf_counter() - self._began
        if num_updates < self.updates or len(self._tokens) == self.marks:
            return
        if self._profile is None:
            self._peak = self._memory.peak()  # without the profiler's
            device = "CUDA" if self.gpu else "CPU"
            activity = getattr(torch.profiler.ProfilerActivity, device)
            self._profile = torch.profiler.profile(
                activities=[activity],
                schedule=torch.profiler.schedule(wait=0, warmup=self.heat, active=self.marks),
            )
            self._profile.start()
        elif self._profile.step_num < self.heat:
            self._profile.step()
        if self._profile.step_num < self.heat:
            return
        self._mark()
        self._tokens.append(tokens)
        if len(self._tokens) == self.marks:
            self._wait()
            self._profile.stop()
            self._write()

    def _mark(self) -> None:
        """Leaves `MARK` in the profile: on the device's own timeline, where there is one."""
        if self.gpu:
            torch.cuda._sleep(1)
        else:
            with torch.profiler.record_function(MARK):
                pass

    def _wait(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()

    def _write(self) -> None:
        trace = self.report.with_suffix(".trace.json")
        self._profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
        trace.unlink()
        report = {
            "first_100_s": self._first,
            "peak_gib": self._peak / 2**30,
            "timeline": timeline(events)._asdict(),
            # The step behind the last mark has not begun.
            "profiled_tokens": statistics.mean(self._tokens[:-1]),
        }
        self.report.write_text(json.dumps(report) + "\n", encoding="utf-8")


@contextmanager
def attached(meter: StepMeter) -> Iterator[None]:
    """Within it every Trainer that ``fairseq_cli.train`` makes tells ``meter`` its steps."""
    from lightseq_fairseq import fairseq_compat

    fairseq_compat.prepare()
    from fairseq_cli import train

    def main(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        # By now the launcher has put in place the Trainer that the command asks for.
        class ProbedTrainer(train.Trainer):
            def begin_epoch(self, *args: Any, **kwargs: Any) -> Any:
                meter.begin()
                return super().begin_epoch(*args, **kwargs)

            def train_step(self, samples: Any, *args: Any, **kwargs: Any) -> Any:
                tokens = sum(map(_tokens, samples)) * self.data_parallel_world_size
                meter.before_step(self.get_num_updates(), tokens)
                return super().train_step(samples, *args, **kwargs)

        with patching.within("fairseq_cli.train:Trainer", ProbedTrainer):
            original(*args, **kwargs)

    with patching.within("fairseq_cli.train:main", main):
        yield


def _tokens(sample: Any) -> int:
    """Real target tokens of a batch: fairseq's is a dictionary, ours an object."""
    if not len(sample):  # what a rank has where batches do not suffice for all
        return 0
    return int(sample["ntokens"] if isinstance(sample, dict) else sample.ntokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--updates", type=int, required=True)
    parser.add_argument("--heat", type=int, required=True)
    parser.add_argument("--marks", type=int, required=True)
    parser.add_argument("--without-apex", action="store_true")
    parser.add_argument("words", nargs="+", help="of lightseq-train, after --")
    arguments = parser.parse_args()
    if arguments.without_apex:
        for name in ("apex", "fused_adam_cuda"):  # their import fails from now on
            sys.modules[name] = None  # type: ignore[assignment]
    report, rank = arguments.report, os.environ.get("RANK", "0")
    if rank != "0":
        report = report.with_suffix(f".rank{rank}.json")
    with attached(StepMeter(report, arguments.updates, arguments.heat, arguments.marks)):
        from lightseq_fairseq.cli import train

        train.main(arguments.words)


if __name__ == "__main__":
    main()
