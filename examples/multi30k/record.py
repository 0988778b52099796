"""Write a finished run's row into ``results/bleu.json``, in place of its earlier row.

One row a system and seed, so the file shows what a rerun of every row would have to reproduce.
"""

from __future__ import annotations

import argparse
import datetime
import fcntl
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from lightseq_fairseq import fairseq_compat

Row = dict[str, Any]

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "scripts"))

from result_rows import current_commit  # noqa: E402


def training_figures(checkpoint: Path) -> Row:
    """Updates and wall seconds of training, validation and saving, summed over restarts."""
    fairseq_compat.prepare()
    from lightseq_fairseq.fairseq_compat.checkpoints import load_checkpoint

    with checkpoint.open("rb") as file:
        state = load_checkpoint(file, map_location="cpu")
    return {
        "updates": state["optimizer_history"][-1]["num_updates"],
        "train_seconds": round(state["extra_state"]["previous_training_time"], 1),
    }


def write_row(row: Row, results: Path) -> None:
    """Add ``row``, or replace the one of the same system and seed.

    Two runs that finish at the same moment both get their row in.
    """
    results.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(results.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        rows = json.loads(results.read_text(encoding="utf-8")) if results.exists() else []
        key = (row["system"], row["seed"])
        rows = [other for other in rows if (other["system"], other["seed"]) != key]
        rows = sorted([*rows, row], key=lambda each: (each["system"], each["seed"]))
        partial = results.with_name(results.name + ".partial")
        partial.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
        os.replace(partial, results)
    finally:
        os.close(folder)  # releases the lock


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a finished run's row.")
    parser.add_argument("checkpoint", type=Path, help="the run's checkpoint_last.pt")
    parser.add_argument("bleu", type=Path, help="what sacrebleu printed, as JSON")
    parser.add_argument("results", type=Path, help="the file of rows")
    parser.add_argument("--system", choices=["lightseq", "fairseq"], required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--precision", choices=["fp32", "fp16", "bf16"], required=True)
    args = parser.parse_args()
    bleu = json.loads(args.bleu.read_text(encoding="utf-8"))
    row = {
        "commit": current_commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "case": f"multi30k en-de test_2016_flickr {args.precision}",
        "system": args.system,
        "seed": args.seed,
        "bleu": bleu["score"],
        "signature": bleu["signature"],
        **training_figures(args.checkpoint),
    }
    write_row(row, args.results)
    print(f"BLEU|{bleu['signature']} = {bleu['score']} {bleu['verbose_score']}")


if __name__ == "__main__":
    main()
