"""Average the weights of a run's last checkpoints into one checkpoint that can be generated from.

The checkpoints are those that fairseq writes every ``--save-interval-updates``
(``checkpoint_<epoch>_<updates>.pt``). Averaging them takes out the noise of the last updates, as in
Vaswani et al. 2017, section 6.1.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lightseq_fairseq import fairseq_compat

Checkpoint = dict[str, Any]


def last_checkpoints(folder: Path, count: int) -> list[Path]:
    """The ``count`` checkpoints of ``folder`` with the most updates, the oldest first."""
    by_updates = {}
    for path in folder.iterdir():
        match = re.fullmatch(r"checkpoint_\d+_(\d+)\.pt", path.name)
        if match is not None:
            by_updates[int(match.group(1))] = path
    if len(by_updates) < count:
        raise SystemExit(
            f"{folder} holds {len(by_updates)} checkpoints named checkpoint_<epoch>_<updates>.pt, "
            f"not {count}; train on with --save-interval-updates, or ask for fewer with --last"
        )
    return [by_updates[updates] for updates in sorted(by_updates)[-count:]]


def average(paths: Sequence[Path]) -> Checkpoint:
    """The last of the checkpoints with the mean of all their weights, optimizer state left out.

    Sums are taken in float32 (float64 for float64 weights) and rounded once to the dtype of the
    weights; tensors of integers are those of the last checkpoint.
    """
    fairseq_compat.prepare()
    from lightseq_fairseq.fairseq_compat.checkpoints import load_checkpoint

    sums: dict[str, torch.Tensor] = {}
    checkpoint: Checkpoint = {}
    for path in paths:
        with path.open("rb") as file:
            checkpoint = load_checkpoint(file, map_location="cpu")
        model = checkpoint["model"]
        weights = {name: value for name, value in model.items() if value.is_floating_point()}
        if sums and sums.keys() != weights.keys():
            raise SystemExit(f"{path} and {paths[0]} hold different models; average one run only")
        for name, value in weights.items():
            if name in sums:
                sums[name] += value
            else:
                sums[name] = value.to(torch.promote_types(value.dtype, torch.float32), copy=True)
    model = checkpoint["model"]
    model.update({name: (total / len(paths)).to(model[name]) for name, total in sums.items()})
    checkpoint["last_optimizer_state"] = None
    return checkpoint


def save(checkpoint: Checkpoint, path: Path) -> None:
    """Write ``path`` as a whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    torch.save(checkpoint, partial)
    os.replace(partial, path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Average a run's last checkpoints.")
    parser.add_argument("folder", type=Path, help="the run's --save-dir")
    parser.add_argument("output", type=Path, help="the checkpoint to write")
    parser.add_argument("--last", type=int, default=10, help="how many (default: 10)")
    args = parser.parse_args()
    paths = last_checkpoints(args.folder, args.last)
    save(average(paths), args.output)
    print(
        f"{args.output}: average of {len(paths)} checkpoints, {paths[0].name} to {paths[-1].name}"
    )


if __name__ == "__main__":
    main()
