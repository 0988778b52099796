"""Write the row of a finished run to a file of results, and replace its earlier row.

The file has one row per case, system and, if rows have seeds, seed. So it always shows the latest
result of each.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from lightseq_fairseq import fairseq_compat
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.base.result_rows import current_commit, write

from .curves import read_curves

Row = dict[str, Any]


def circumstances() -> Row:
    """Return the part of a row that describes the code and the machine."""
    try:
        commit = current_commit()
    except UserError as error:
        sys.exit(str(error))
    return {
        "commit": commit,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
    }


def training_figures(checkpoint: Path) -> Row:
    """Return the number of updates, and the wall time of training, validation and saving.

    The time is in seconds, summed over restarts of the run.
    """
    fairseq_compat.prepare()
    from lightseq_fairseq.fairseq_compat.checkpoints import load_checkpoint

    with checkpoint.open("rb") as file:
        state = load_checkpoint(file, map_location="cpu")
    return {
        "updates": state["optimizer_history"][-1]["num_updates"],
        "train_seconds": round(state["extra_state"]["previous_training_time"], 1),
    }


def _key(row: Row) -> tuple[str, str, int]:
    return row["case"], row["system"], row.get("seed", 0)


def write_row(row: Row, results: Path) -> None:
    """Add ``row``, or replace the row with the same case, system and seed (0 if it has none).

    The file is locked, so two runs that finish at the same time both write their rows.
    """
    results.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{results}.lock"):
        rows = json.loads(results.read_text(encoding="utf-8")) if results.exists() else []
        rows = [other for other in rows if _key(other) != _key(row)]
        rows = sorted([*rows, row], key=_key)
        write(rows, results)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a finished run's row.")
    parser.add_argument("checkpoint", type=Path, help="the run's checkpoint_last.pt")
    parser.add_argument("scores", type=Path, nargs="+", help="JSON files with the run's scores")
    parser.add_argument("--results", type=Path, required=True, help="the file of results")
    parser.add_argument("--case", required=True, help="name of the model and the test set")
    parser.add_argument("--system", choices=["lightseq", "fairseq"], required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--log", type=Path, help="the log of training, for the curves of the row")
    args = parser.parse_args()
    row = {
        **circumstances(),
        "case": args.case,
        "system": args.system,
        "seed": args.seed,
    }
    for score in args.scores:
        row.update(json.loads(score.read_text(encoding="utf-8")))
    row.update(training_figures(args.checkpoint))
    if args.log is not None:
        row["curves"] = {name: [*curve.items()] for name, curve in read_curves(args.log).items()}
    write_row(row, args.results)


if __name__ == "__main__":
    main()
