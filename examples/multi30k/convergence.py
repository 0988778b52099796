"""Train with both systems and several seeds, many runs in parallel, and record their curves.

    python -m examples.multi30k.convergence [--jobs N] [--data DIR] [--out DIR]
        [--model small|t2t_big] [--seeds N|FIRST-LAST] [--updates N] [--precisions P,P] [-- WORD...]

The models are those of run.sh: ``small``, trained and scored with BLEU, 13 seeds per system; and
``t2t_big``, the layers of a Transformer big in bf16, only for loss curves, four seeds per system.
With ``--precisions``, lightseq-train is compared with itself: each seed trains in each precision.
Each run has a folder with its logs in ``--out``. When a run has ended, its row is written to
``convergence.json`` there, and its checkpoints are deleted. The same command, given again, trains
all runs that have no row yet, from their start. WORDs are passed to every lightseq-train.

A row: ``case`` (model and precision), ``system``, ``seed``, ``bleu`` (null for ``t2t_big``),
``updates``, ``seconds`` (wall time of training with its validations), ``runs_at_once``, ``mps``
(whether runs shared the GPU by CUDA's Multi-Process Service, so that their kernels overlap instead
of taking turns), ``train_curve`` and ``valid_curve`` (lists of [update, seconds, loss]; losses in
bits per target token, with label smoothing), and ``valid_loss``, the last validation loss.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from ..curves import read_records
from ..record import Row, circumstances, write_row
from ..side_by_side import Command, run_all

HERE = Path(__file__).resolve().parent
SEEDS = {"small": 13, "t2t_big": 4}


class Run(NamedTuple):
    """One training, named by arguments of run.sh."""

    model: str
    system: str
    seed: int
    precision: str

    @property
    def case(self) -> str:
        return f"{self.model}/{self.precision}"

    def __str__(self) -> str:
        """Return the name of the run's folder, as in run.sh."""
        return f"{self.model}-{self.system}-seed{self.seed}-{self.precision}"


def seeds(words: str) -> range:
    """Return the seeds that ``--seeds`` names: "13" is 1 to 13, "301-340" is 301 to 340."""
    first, dash, last = words.partition("-")
    found = range(int(first), int(last) + 1) if dash else range(1, int(first) + 1)
    if not found:
        raise ValueError(words)
    return found


def command(run: Run, args: argparse.Namespace) -> Command:
    """Return the command that trains a run from its start; delete its earlier files."""
    folder = args.out / str(run)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    words: list[str | Path] = ["bash", HERE / "run.sh", "--model", run.model]
    words += ["--seed", str(run.seed)]
    words += ["--native"] * (run.system == "fairseq")
    words += ["--updates", str(args.updates)] * (args.updates is not None)
    words += ["--data", args.data, "--out", args.out]
    environment = {
        "PRECISION": run.precision,
        # fairseq is fastest without cuDNN attention. This overrides the caller's environment.
        "LIGHTSEQ_CUDNN_ATTENTION": "0",
        # Parallel runs disturb the timing of GEMM algorithms; a wrong choice would stay on disk.
        "LIGHTSEQ_LINEAR_SEARCH": "0",
        "OMP_NUM_THREADS": "1",
    }
    return Command([*words, "--", *args.words], folder / "output.txt", environment)


def curves_of(log: Path) -> tuple[list[list[float]], list[list[float]]]:
    """Return the training and the validation curve: [update, seconds, loss] of each record.

    fairseq does not log the time of a validation, so the time of the last training record is used.
    """
    train: list[list[float]] = []
    valid: list[list[float]] = []
    for kind, record in read_records(log):
        if kind == "train_inner":
            seconds = float(record["wall"])
            train.append([int(record["num_updates"]), seconds, float(record["loss"])])
        elif train:
            update, loss = record["valid_num_updates"], record["valid_loss"]
            valid.append([int(update), train[-1][1], float(loss)])
    return train, valid


def finish(run: Run, folder: Path, about: Row) -> Row:
    """Return the row of a successful run, and delete its checkpoints."""
    train, valid = curves_of(folder / "train.log")
    if not valid:
        sys.exit(f"convergence.py: {folder / 'train.log'} has no validation records")
    score: dict[str, Any] = {"bleu": None}
    if run.model == "small":
        score = json.loads((folder / "bleu.json").read_text(encoding="utf-8"))
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    (folder / "averaged.pt").unlink(missing_ok=True)
    return {
        **about,
        "case": run.case,
        "system": run.system,
        "seed": run.seed,
        **score,
        "updates": valid[-1][0],
        "valid_loss": valid[-1][2],
        "seconds": train[-1][1],
        "train_curve": train,
        "valid_curve": valid,
    }


def train_all(runs: list[Run], args: argparse.Namespace, results: Path) -> list[Run]:
    """Train ``runs``, ``--jobs`` in parallel, and write their rows. Returns the failed runs."""
    about = {
        **circumstances(),
        "runs_at_once": min(args.jobs, len(runs)),
        "mps": "CUDA_MPS_PIPE_DIRECTORY" in os.environ,
    }

    def done(run: Run) -> None:
        row = finish(run, args.out / str(run), about)
        write_row(row, results)
        figures = {key: row[key] for key in ("bleu", "valid_loss", "seconds")}
        print(f"{run}: {json.dumps(figures)}", flush=True)

    return run_all({run: command(run, args) for run in runs}, args.jobs, done)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2),
                        help="parallel runs, on one GPU  [half the CPU cores]")  # fmt: skip
    parser.add_argument(
        "--data", type=Path, default=HERE / "data", help="folder that prepare.sh wrote"
    )
    parser.add_argument("--out", type=Path, default=HERE / "out" / "convergence",
                        help="folder for the rows and the runs' logs")  # fmt: skip
    parser.add_argument("--model", choices=SEEDS, help="train only this model")
    parser.add_argument(
        "--seeds",
        type=seeds,
        metavar="N|FIRST-LAST",
        help="seeds of each system: 1 to N, or FIRST to LAST  [13 for small, 4 for t2t_big]",
    )
    parser.add_argument("--updates", type=int, help="updates per run, instead of the recipe's")
    parser.add_argument(
        "--precisions", help="compare these precisions of lightseq-train, such as bf16,fp8"
    )
    parser.add_argument("words", nargs="*", metavar="-- WORD", help="arguments of lightseq-train")
    args = parser.parse_args()
    if args.jobs < 1:
        parser.error("--jobs must be at least 1")
    if shutil.which("lightseq-train") is None:
        sys.exit("convergence.py: lightseq-train is not on the PATH; activate its environment")
    args.out = args.out.resolve()
    if not (args.data / "bin").exists():
        subprocess.run(["bash", HERE / "prepare.sh", args.data], check=True)

    default = {"small": os.environ.get("PRECISION", "fp32"), "t2t_big": "bf16"}
    precisions = args.precisions.split(",") if args.precisions else [None]
    # fairseq's runs take the longest, so start them first.
    runs = [
        Run(model, system, seed, precision or default[model])
        for system in (("lightseq",) if args.precisions else ("fairseq", "lightseq"))
        for model in ([args.model] if args.model else SEEDS)
        for seed in args.seeds or seeds(str(SEEDS[model]))
        for precision in precisions
    ]
    results = args.out / "convergence.json"
    rows = json.loads(results.read_text(encoding="utf-8")) if results.exists() else []
    done = {(row["case"], row["system"], row["seed"]) for row in rows}
    runs = [run for run in runs if (run.case, run.system, run.seed) not in done]
    if failed := train_all(runs, args, results):
        sys.exit(f"convergence.py: {', '.join(sorted(map(str, failed)))} failed")


if __name__ == "__main__":
    main()
