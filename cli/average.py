"""``lightseq-average``: averages the weights of several checkpoints into one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.start.commands import own
from lightseq_fairseq.cli.words.argv import flag_of

Checkpoint = dict[str, Any]

EPOCHS = re.compile(r"checkpoint(\d+)\.pt")
UPDATES = re.compile(r"checkpoint_\d+_(\d+)\.pt")
OF_A_RUN = re.compile(r"checkpoint(\d+|_\d+_\d+|_last|_best)\.pt")
_NAMES = {EPOCHS: "checkpoint<epoch>.pt", UPDATES: "checkpoint_<epoch>_<updates>.pt"}


@own("lightseq-average")
@click.option(
    "--inputs", "first", multiple=True, required=True, metavar="PATH ...",
    type=click.Path(path_type=Path),
    help="The checkpoints, or the folder of a run: all its checkpoints of epochs, or else of "
    "updates, unless one of the next options selects some.",
)  # fmt: skip
@click.argument("more", nargs=-1, metavar="", type=click.Path(path_type=Path))
@click.option(
    "--output", required=True, metavar="FILE", type=click.Path(path_type=Path),
    help="The checkpoint to write.",
)  # fmt: skip
@click.option(
    "--num-epoch-checkpoints", "epochs", type=click.IntRange(1), metavar="N",
    help="Average the last N files checkpoint<epoch>.pt of the folder.",
)  # fmt: skip
@click.option(
    "--num-update-checkpoints", "updates", type=click.IntRange(1), metavar="N",
    help="Average the last N files checkpoint_<epoch>_<updates>.pt of the folder.",
)  # fmt: skip
@click.option(
    "--checkpoint-upper-bound", "bound", type=int, metavar="N",
    help="Ignore checkpoints of the folder after this epoch or update.",
)  # fmt: skip
def main(
    first: Sequence[Path], more: Sequence[Path], output: Path, epochs: int | None,
    updates: int | None, bound: int | None,
) -> None:  # fmt: skip
    """Average the weights of a run's checkpoints into one checkpoint for translation.

    Takes the options of fairseq's scripts/average_checkpoints.py:

    \b
        lightseq-average --inputs checkpoints --num-epoch-checkpoints 10 --output averaged.pt
        lightseq-average --inputs checkpoint98.pt checkpoint99.pt --output averaged.pt
    """
    paths = _chosen([*first, *more], epochs, updates, bound)
    if output.resolve() in [path.resolve() for path in paths]:
        raise UserError(f"{output} is one of the checkpoints to average: choose another --output.")
    if output.exists() and OF_A_RUN.fullmatch(output.name):
        raise UserError(f"{output} is a checkpoint of a run: choose another --output.")
    averaged = average(paths)
    from lightseq_fairseq.checkpoints import saving

    saving.save(averaged, str(output))
    names = paths[0].name if len(paths) == 1 else f"{paths[-1].name} to {paths[0].name}"
    click.echo(f"{output}: average of {len(paths)} checkpoints, {names}")


def average(paths: Sequence[Path]) -> Checkpoint:
    """The first checkpoint with the mean of all weights, without optimizer state.

    Checkpoint averaging as in Vaswani et al. 2017, section 6.1, and in fairseq's
    scripts/average_checkpoints.py. Weights are summed in float64 and rounded once, to float32 (the
    dtype of our checkpoints in every precision) or, for float64 weights, to float64. Tied weights
    stay tied. Integer tensors are copied from the first checkpoint.

    Args:
        paths: checkpoints of one run, of this package or of fairseq.

    Raises:
        UserError: a file cannot be read, is no checkpoint, or holds another model.
    """
    import torch

    checkpoint = _load(paths[0])
    checkpoint["last_optimizer_state"] = None  # it does not fit averaged weights
    model = checkpoint["model"]
    sums = {
        name: value.to(torch.float64, copy=True)
        for name, value in model.items()
        if value.is_floating_point()
    }
    for path in paths[1:]:
        other = _load(path)["model"]
        if {name: value.shape for name, value in other.items()} != {
            name: value.shape for name, value in model.items()
        }:
            raise UserError(
                f"{path} and {paths[0]} contain different models: average checkpoints of one run."
            )
        for name in sums:
            sums[name] += other[name]
    means: dict[Any, Any] = {}  # one per tensor of the model; tied tensors have several names
    for name, total in sums.items():
        value = model[name]
        dtype = torch.promote_types(value.dtype, torch.float32)
        tensor = (value.data_ptr(), value.shape)
        means.setdefault(tensor, (total / len(paths)).to(dtype))
        sums[name] = means[tensor]
    checkpoint["model"] = {**model, **sums}
    return checkpoint


def _load(path: Path) -> Checkpoint:
    from lightseq_fairseq import fairseq_compat

    fairseq_compat.prepare()
    from lightseq_fairseq.fairseq_compat.checkpoints import load_checkpoint
    from lightseq_fairseq.layers.adapter import merged

    try:
        with path.open("rb") as file:
            checkpoint: Checkpoint = load_checkpoint(file, map_location="cpu")
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror or error}): check --inputs."
        ) from error
    # The mean of products of adapters is not the product of their means.
    checkpoint["model"] = merged(checkpoint["model"])
    return checkpoint


def _chosen(
    inputs: Sequence[Path], epochs: int | None, updates: int | None, bound: int | None
) -> list[Path]:
    """The checkpoints that the options select; from a folder the newest first, as in fairseq."""
    if epochs is not None and updates is not None:
        raise UserError(
            "--num-epoch-checkpoints and --num-update-checkpoints cannot be used together: remove "
            "one."
        )
    count = epochs if updates is None else updates
    if count is None:
        if bound is not None:
            raise UserError(
                "--checkpoint-upper-bound needs --num-epoch-checkpoints or "
                "--num-update-checkpoints: add one."
            )
        return [path for given in inputs for path in _all_of(given)]
    if len(inputs) == 1 and not inputs[0].exists():
        raise UserError(f"{inputs[0]} does not exist: set --inputs to the --save-dir of a run.")
    if len(inputs) > 1 or not inputs[0].is_dir():
        raise UserError(
            "--num-epoch-checkpoints and --num-update-checkpoints choose checkpoints in a folder: "
            "set --inputs to one folder."
        )
    kind = EPOCHS if updates is None else UPDATES
    kept = _numbered(inputs[0], kind, None)
    if not kept:
        raise _none_kept(inputs[0], kind)
    found = _numbered(inputs[0], kind, bound)
    if len(found) < count:
        up_to = "" if bound is None else f" up to {bound}"
        because, remedy = "", "raise --checkpoint-upper-bound"
        if found and len(kept) < count:
            because, remedy = _cause(inputs[0], kind, len(kept))
        raise UserError(
            f"{inputs[0]} contains only {len(found)} of {count} checkpoints named {_NAMES[kind]}"
            f"{up_to}{because}: {'ask for fewer, or ' * bool(found)}{remedy}."
        )
    return found[:count]


def _all_of(path: Path) -> list[Path]:
    """The checkpoint itself; of a folder, those of all epochs, or else of all updates."""
    if not path.is_dir():
        return [path]
    found = _numbered(path, EPOCHS, None) or _numbered(path, UPDATES, None)
    if not found:
        raise _none_kept(path, EPOCHS, UPDATES)
    return found


def _none_kept(folder: Path, *kinds: re.Pattern[str]) -> UserError:
    because, remedy = _cause(folder, kinds[0], 0)
    instead = [f"use {path.name} itself, or " for path in _unnumbered(folder)][:1]
    return UserError(
        f"{folder} contains no checkpoints named {' or '.join(_NAMES[kind] for kind in kinds)}"
        f"{because}: {''.join(instead)}{remedy}."
    )


def _cause(folder: Path, kind: re.Pattern[str], kept: int) -> tuple[str, str]:
    """Why a run has only ``kept`` checkpoints of a kind, by its settings, and how to get more."""
    settings = _settings(folder)
    if kind is EPOCHS:
        unit, interval, keep = "epochs", "save_interval", "keep_last_epochs"
    else:
        unit, interval, keep = "updates", "save_interval_updates", "keep_interval_updates"
    lower, larger = f"with a lower {flag_of(interval)}", f"a larger {flag_of(keep)}"
    if not settings:
        without = ", or without --no-epoch-checkpoints" * (kind is EPOCHS)
        return "", f"train longer, {lower} or {larger}{without}"
    if kind is EPOCHS and settings["no_epoch_checkpoints"]:
        return ", because the run has --no-epoch-checkpoints", "train without this flag"
    if kind is UPDATES and settings[interval] <= 0:
        return ", because the run has no --save-interval-updates", "train with this flag"
    if 0 < settings[keep] <= kept:
        because = f"the run keeps only the last {settings[keep]} ({flag_of(keep)})"
        return f", because {because}", f"train with {larger}"
    if (every := settings[interval]) > 1:
        because = f"the run writes one every {every} {unit} ({flag_of(interval)})"
        return f", because {because}", f"train longer or {lower}"
    return "", "train longer"


def _settings(folder: Path) -> dict[str, Any]:
    """The settings of a run about its checkpoints, from one of them; {} without such a file."""
    from lightseq_fairseq import fairseq_compat

    fairseq_compat.prepare()
    from lightseq_fairseq.cli.checks.checkpoints import saved
    from lightseq_fairseq.fairseq_compat.checkpoints import settings_of

    files = [*_unnumbered(folder), *_numbered(folder, EPOCHS, None)]
    files += _numbered(folder, UPDATES, None)
    return settings_of(saved(str(files[0])), "checkpoint") if files else {}


def _unnumbered(folder: Path) -> list[Path]:
    """The best and the last checkpoint of a run, if they exist."""
    paths = (folder / f"checkpoint_{name}.pt" for name in ("best", "last"))
    return [path for path in paths if path.exists()]


def _numbered(folder: Path, pattern: re.Pattern[str], bound: int | None) -> list[Path]:
    """The files with such a name and a number up to ``bound``, the highest number first."""
    matches = ((pattern.fullmatch(path.name), path) for path in folder.iterdir())
    found = {int(match[1]): path for match, path in matches if match is not None}
    return [found[n] for n in sorted(found, reverse=True) if bound is None or n <= bound]


if __name__ == "__main__":
    main()
