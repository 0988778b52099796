"""Runs lightseq-train and measures its steps from outside: the command is a user's command.

    python -m lightseq_fairseq.cli.profiling.measured_trainer --report FILE --updates N
        --heat N --marks N [--without-apex] [--record] [--trace FILE] -- WORD... (of lightseq-train)

The report is a JSON object: ``first_100_s``, the time from the start of the first epoch to the end
of update 100; ``peak_gib`` up to update N (see `MemoryMeter`); ``ms_per_step`` of up to `SPAN`
updates before update N; the `timeline` and `overlap` of a few steps after it; and
``profiled_tokens``, the real target tokens per step of these steps. With --record also ``calls``,
the ops of update N (see `work`), and ``recorded_tokens``. The speed is in the training log. Before
update N this code does nothing except two synchronisations. With several ranks, the report
and the trace are of rank 0; its tokens are those of rank 0 times the number of ranks.
"""

from __future__ import annotations

import argparse
import faulthandler
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
from lightseq_fairseq.cli.profiling import work
from lightseq_fairseq.cli.profiling.timeline import MARK, overlap, timeline
from lightseq_fairseq.fairseq_compat import patching

FIRST, SPAN = 100, 50


class StepMeter:
    """Receives the steps of a training run and writes the report.

    Args:
        report: the file to write.
        updates: the profiler starts after this many updates; ``heat + marks`` more must follow.
        heat: updates that the profiler does not record, at least 1, see ``cases.System``.
        marks: number of marks in the record, one before each step.
        records: whether the ops of a step are recorded.
        trace: the file for the profiler's trace; None: it is not kept.
    """

    def __init__(
        self, report: Path, updates: int, heat: int, marks: int, records: bool = False,
        trace: Path | None = None,
    ) -> None:  # fmt: skip
        self.report, self.updates, self.heat, self.marks = report, updates, heat, marks
        self.records, self.trace = records, trace
        self._recorded: dict[str, Any] = {}
        self._span = min(SPAN, updates // 2)
        self._span_began = 0.0
        self._ms_per_step: float | None = None
        self.gpu = torch.cuda.is_available()
        self._memory = MemoryMeter(self.gpu)
        self._began: float | None = None
        self._first: float | None = None
        self._peak = 0
        self._tokens: list[int] = []  # tokens of the step after each mark
        self._profile: Any = None

    def begin(self) -> None:
        """Call at the start of the first epoch; later calls have no effect."""
        if self._began is None:
            self._began = time.perf_counter()

    def before_step(self, num_updates: int, tokens: int) -> None:
        """Call before a step of ``tokens`` real target tokens, after ``num_updates`` updates."""
        if self._first is None and num_updates >= FIRST and self._began is not None:
            self._wait()
            self._first = time.perf_counter() - self._began
        if num_updates == self.updates - self._span and self._span and not self._span_began:
            self._wait()
            self._span_began = time.perf_counter()
        if num_updates < self.updates or len(self._tokens) == self.marks:
            return
        if self._span_began and self._ms_per_step is None:
            self._wait()
            self._ms_per_step = 1e3 * (time.perf_counter() - self._span_began) / self._span
        if self.records and not self._recorded:  # this update
            return
        if self._profile is None:
            self._peak = self._memory.peak()  # before the profiler allocates memory
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

    @contextmanager
    def step(self, num_updates: int, tokens: int, model: Any) -> Iterator[None]:
        """The block is a step, see `before_step`; model: fairseq's."""
        if not self.records or num_updates < self.updates or self._recorded:
            yield
            return
        with work.recorded(model.named_parameters(), self.gpu) as calls:
            yield
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        found = [call._asdict() for call in calls]
        self._recorded = {"calls": found, "recorded_tokens": tokens, "dtype": dtype}

    def _mark(self) -> None:
        """Records `MARK` in the profile, on the timeline of the device if there is one."""
        if self.gpu:
            torch.cuda._sleep(1)
        else:
            with torch.profiler.record_function(MARK):
                pass

    def _wait(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()

    def _write(self) -> None:
        trace = self.trace or self.report.with_suffix(".trace.json")
        self._profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
        if self.trace is None:
            trace.unlink()
        report = {
            **self._recorded,
            "first_100_s": self._first,
            "ms_per_step": self._ms_per_step,
            "peak_gib": self._peak / 2**30,
            "timeline": timeline(events)._asdict(),
            "overlap": overlap(events)._asdict(),
            # The step after the last mark has not begun.
            "profiled_tokens": statistics.mean(self._tokens[:-1]),
        }
        self.report.write_text(json.dumps(report) + "\n", encoding="utf-8")


@contextmanager
def attached(meter: StepMeter) -> Iterator[None]:
    """Within the block, Trainers that ``fairseq_cli.train`` creates report steps to ``meter``."""
    from lightseq_fairseq import fairseq_compat

    fairseq_compat.prepare()
    from fairseq_cli import train

    def main(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        # The launcher has already installed the Trainer that the command selects.
        class ProbedTrainer(train.Trainer):
            def begin_epoch(self, *args: Any, **kwargs: Any) -> Any:
                meter.begin()
                return super().begin_epoch(*args, **kwargs)

            def train_step(self, samples: Any, *args: Any, **kwargs: Any) -> Any:
                if self.get_num_updates() == meter.updates:
                    # Before the profiler starts, for seconds: the captured step logs later.
                    getattr(self, "settle", lambda: None)()
                tokens = sum(map(_tokens, samples)) * self.data_parallel_world_size
                updates = self.get_num_updates()
                meter.before_step(updates, tokens)
                with meter.step(updates, tokens, self.model):
                    return super().train_step(samples, *args, **kwargs)

        with patching.within("fairseq_cli.train:Trainer", ProbedTrainer):
            original(*args, **kwargs)

    with patching.within("fairseq_cli.train:main", main, by="cli.profiling"):
        yield


def _tokens(sample: Any) -> int:
    """Real target tokens of a batch: fairseq's is a dictionary, ours an object."""
    if not len(sample):  # an empty batch: this rank has none left
        return 0
    return int(sample["ntokens"] if isinstance(sample, dict) else sample.ntokens)


def meter_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the arguments of a `StepMeter`."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--report", type=Path, required=True)
    for flag in ("--updates", "--heat", "--marks"):
        parser.add_argument(flag, type=int, required=True)
    return parser


def main() -> None:
    parser = meter_parser(__doc__)
    parser.add_argument("--without-apex", action="store_true")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("words", nargs="+", help="arguments of lightseq-train, after --")
    arguments = parser.parse_args()
    faulthandler.enable()  # a crash outside Python leaves its stack in the log
    if arguments.without_apex:
        for name in ("apex", "fused_adam_cuda"):  # makes their import fail
            sys.modules[name] = None  # type: ignore[assignment]
    report, rank = arguments.report, os.environ.get("RANK", "0")
    if rank != "0":
        report, arguments.trace = report.with_suffix(f".rank{rank}.json"), None
    meter = StepMeter(
        report, arguments.updates, arguments.heat, arguments.marks, arguments.record,
        arguments.trace,
    )  # fmt: skip
    with attached(meter):
        from lightseq_fairseq.cli import train

        train.main(arguments.words)


if __name__ == "__main__":
    main()
