"""The default flags that ``lightseq-train`` adds to a command to make it complete.

Pure functions on lists of command-line words; neither torch nor fairseq is imported.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lightseq_fairseq.base import families
from lightseq_fairseq.base.families import PREFIX, Recipe
from lightseq_fairseq.cli.words.argv import ARCH, PARTS, is_given, value, with_options


class Machine(NamedTuple):
    """Facts that defaults depend on: ranks of the run, usable GPUs of this host, bf16 support."""

    ranks: int = 1
    gpus: int = 0
    bf16: bool = False


class Epoch(NamedTuple):
    """The training data: sentences or pairs, and the tokens of each one's longer side.

    batches: of all ranks together; None if they have not been counted.
    """

    sentences: int
    tokens: int
    batches: int | None = None


class Choice(NamedTuple):
    """Default flags that belong together; none is added if the user sets one of ``unless``.

    required: fairseq has no default for them, so a converted command gets them too.
    """

    unless: tuple[str, ...]
    flags: tuple[tuple[str, str], ...]
    required: bool = False


_PARTS = tuple(flag for (flag,) in PARTS)
_SENTENCES = ("--batch-size", "--max-sentences")
_LAST_OF_DECAY = "--total-num-update"
_WARM_UP = "--warmup-updates"
_MANY_EPOCHS = 500
_FEWER_FILES = ("--no-save", "--no-epoch-checkpoints", "--keep-last-epochs", "--save-interval")
_LANGUAGES = ("--encoder-langtok", "--decoder-langtok", "--langtoks")
_RATE = ("--lr", "--lr-scheduler")
# Their filled-in values depend on the number of updates.
FITTED = (_WARM_UP, _LAST_OF_DECAY, "--lr-period-updates")


def _choices(recipe: Recipe) -> tuple[Choice, ...]:
    """The choices of a recipe."""
    total = ((_LAST_OF_DECAY, str(recipe.updates)),) if recipe.decays else ()
    size = () if recipe.sentences is None else (("--batch-size", str(recipe.sentences)),)
    return (
        Choice(("--optimizer",), _pairs(recipe.optimizer), required=True),
        Choice(("--criterion",), _pairs(recipe.criterion)),
        Choice(("--lr-scheduler",), _pairs(recipe.schedule)),
        Choice(("--lr-scheduler",), total),
        Choice((), _pairs(recipe.data)),
        Choice(_LANGUAGES, _pairs(recipe.languages)),
        # These set the tokens of an update; not added if the user sets the size of a batch.
        Choice((*_SENTENCES, "--max-tokens"), (("--update-freq", str(recipe.update_freq)),), True),
        Choice((*_SENTENCES, "--max-tokens"), size, True),
        Choice(_SENTENCES, (("--max-tokens", str(recipe.max_tokens)),), True),
        Choice(("--max-epoch", "--stop-time-hours"), (("--max-update", str(recipe.updates)),)),
        # fairseq's own defaults. They are added so that the printed command repeats the run.
        Choice((), (("--update-freq", "1"), ("--seed", "1")), True),
    )


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    """The flags of ``text``, each with its value; "" if it has none."""
    words = shlex.split(text)
    following = zip(words, [*words[1:], "--"])
    return tuple((a, "" if b.startswith("--") else b) for a, b in following if a.startswith("--"))


# A converted command without a criterion: fairseq's default, cross_entropy.
_FAIRSEQS_CRITERION = Choice(("--criterion",), (("--criterion", "ls_cross_entropy"),))

PRECISION = (
    "--fp16",
    "--bf16",
    "--amp",
    "--memory-efficient-fp16",
    "--memory-efficient-bf16",
    "--tpu",
)


def is_converted(argv: Sequence[str], recipe: Recipe) -> bool:
    """Whether the command is one of fairseq's with prefixes, and not one for the recipe.

    fairseq requires --optimizer. So a command that names neither the optimizer nor the criterion
    was written for the recipe. So was one that names the recipe's own, but no learning rate: with
    fairseq's rate, 0.25, Adam does not learn. A converted command must train as it did before: on
    the same data, with the same sizes, schedule and end.
    """
    own = dict(_pairs(f"{recipe.optimizer} {recipe.criterion}"))
    named = [flags for flags in PARTS if is_given(argv, flags)]
    others = [flags for flags in named if value(argv, flags) != own[flags[0]]]
    return bool(others or (named and is_given(argv, _RATE)))


def recipe_of(argv: Sequence[str], own: Mapping[str, Recipe] | None = None) -> Recipe:
    """The recipe of the command's task; ``own``: those of the arch's family, by task."""
    task = families.tasks().get(value(argv, ("--task",)) or "", families.FAMILIES[0].tasks[0])
    if task.tuning is not None and is_given(argv, ("--finetune-from-model",)):
        return task.tuning
    return (own or {}).get(task.name, task.recipe)


def missing(
    argv: Sequence[str],
    machine: Machine,
    fused: bool | None = None,
    recipe: Recipe | None = None,
    epoch: Epoch | None = None,
) -> list[str]:
    """The words that complete a command with an ls_ arch; [] for another arch.

    Nothing that the user sets is overridden. A converted command gets only what fairseq requires,
    and fairseq's defaults. The others get the recipe: the learning-rate schedule unless the user
    sets the scheduler, the batch size and --update-freq unless the user sets the size of a batch.

    Args:
        fused: whether the arch is ours; None: decided by its name.
        recipe: of the command; None: that of its task.
        epoch: the training data, if known.
    """
    if fused is None:
        fused = (value(argv, ARCH) or "").startswith(PREFIX)
    if not fused:
        return []
    added: list[str] = []
    recipe = recipe or recipe_of(argv)
    choices = _choices(recipe)
    converted = is_converted(argv, recipe)
    if converted:
        choices = (*(choice for choice in choices if choice.required), _FAIRSEQS_CRITERION)
    for choice in choices:
        is_own = not converted and choice.unless in PARTS  # named, but the recipe's own
        if is_own or not is_given(argv, choice.unless):
            for flag, text in choice.flags:
                if not is_given([*added, *argv], (flag,)):
                    added += [flag, text] if text else [flag]
    if not is_given(argv, ("--distributed-world-size",)):
        added += ["--distributed-world-size", str(machine.ranks)]
    if machine.gpus and not converted and not is_given(argv, ("--cpu", *PRECISION)):
        added.append("--bf16" if machine.bf16 else "--fp16")
    return added if converted else _fitted(added, argv, epoch)


def _fitted(added: list[str], argv: Sequence[str], epoch: Epoch | None) -> list[str]:
    """The added words with a schedule that ends with the run: a warm-up of at most a tenth of its
    updates, and a rate that falls until the last one.
    """
    updates = updates_of([*argv, *added], epoch)
    if updates is None:
        return added
    fitted = dict.fromkeys(FITTED[1:], updates)
    if warm_up := _number(value([*added, *argv], (_WARM_UP,))):
        if _WARM_UP in added:
            warm_up = min(warm_up, max(1, updates // 10))
        fitted |= {_WARM_UP: warm_up, "--lr-period-updates": max(1, updates - warm_up)}
    return [str(fitted.get(flag, word)) for flag, word in zip(["", *added], added)]


def updates_of(argv: Sequence[str], epoch: Epoch | None) -> int | None:
    """The updates of a run, by its complete command: --max-update, or those of --max-epoch, about
    if the batches of ``epoch`` have not been counted; None if they are not known.
    """
    last = _number(value(argv, ("--max-update",)))
    epochs = _number(value(argv, ("--max-epoch",)))
    if not epochs or epoch is None:
        return last or None
    each = updates_of_epochs(argv, epoch)
    updates = sum(each[:epochs]) + each[-1] * max(0, epochs - len(each))
    return min(updates, last) if last else updates or None


def updates_of_epochs(argv: Sequence[str], epoch: Epoch) -> list[int]:
    """The updates of the first epochs, by the complete command; later ones have those of the last.
    0 if they are not known.
    """
    ranks = _number(value(argv, ("--distributed-world-size",))) or 1
    batches = math.ceil(_batches(argv, epoch) / ranks)
    several = [_number(x) or 1 for x in (value(argv, ("--update-freq",)) or "").split(",")]
    if is_given(argv, ("--skip-remainder-batch",)):
        return [max(0, batches - 1) // micro for micro in several]
    return [math.ceil(batches / micro) for micro in several]


def _batches(argv: Sequence[str], epoch: Epoch) -> int:
    """The batches of an epoch; if they have not been counted, as if batches had no padding."""
    if epoch.batches is not None:
        return epoch.batches
    sentences, tokens = (_number(value(argv, flags)) for flags in (_SENTENCES, ("--max-tokens",)))
    return math.ceil(
        max(epoch.sentences / sentences if sentences else 0, epoch.tokens / tokens if tokens else 0)
    )


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def reason(argv: Sequence[str], added: Sequence[str], recipe: Recipe) -> str | None:
    """A sentence if the added warm-up is not the recipe's, else None; ``argv`` is complete."""
    warm_up = value(added, (_WARM_UP,))
    usual = dict(_pairs(recipe.schedule)).get(_WARM_UP)
    if warm_up is None or warm_up == usual:
        return None
    flag = "--max-epoch" if is_given(argv, ("--max-epoch",)) else "--max-update"
    given = f"{flag} {value(argv, (flag,))}"
    updates = "1 update" if warm_up == "1" else f"{warm_up} updates"
    return f"warm-up: {updates}, a tenth of the run ({given}); the recipe has {usual}"


def note_on_length(argv: Sequence[str], added: Sequence[str], epoch: Epoch | None) -> str | None:
    """A note if the recipe's number of updates is far too large for the data, else None."""
    last = _number(value(added, ("--max-update",)))
    each = updates_of_epochs(argv, epoch)[-1] if epoch is not None else 0
    if not last or not each or last < _MANY_EPOCHS * each:
        return None
    saves = (
        " Each epoch writes a checkpoint; with --no-epoch-checkpoints only the last and best stay."
    )
    saves *= not is_given(argv, _FEWER_FILES)
    return (
        f"An epoch of these data has about {each:,} updates, so the recipe's {last:,} are "
        f"{last // each:,} epochs: set --max-epoch or --max-update. docs/train.md (Amount of data) "
        f"says which model and flags fit small data.{saves}"
    )


def complete(argv: Sequence[str], machine: Machine) -> list[str]:
    """``argv`` with the `missing` words added."""
    return with_options(argv, missing(argv, machine))


def note(argv: Sequence[str]) -> str | None:
    """A note if the completed command is probably not what the user intends, else None."""
    if is_given(argv, ("--lr",)):
        return None
    return (
        "--lr is not set, so this run uses fairseq's default learning rate, 0.25: set --lr. The "
        "recipe sets it only if --lr-scheduler is not set, and --optimizer and --criterion are not "
        "set or the recipe's own."
    )


def command_line(argv: Sequence[str]) -> str:
    """The command line that repeats the run, quoted for a shell."""
    return shlex.join(["lightseq-train", *argv])
