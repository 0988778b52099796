"""The default flags that ``lightseq-train`` adds to a command to make it complete.

Pure functions on lists of command-line words; neither torch nor fairseq is imported. fairseq's
parser accepts no abbreviations (``allow_abbrev=False``). So a flag is set if its name or an alias
is on the command line, with or without ``=value``.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import NamedTuple

PREFIX = "ls_"
ARCH = ("--arch", "-a")
PARTS = (("--optimizer",), ("--criterion",))
REGISTERED = (ARCH, *PARTS)


class Machine(NamedTuple):
    """Facts that defaults depend on: ranks of the run, usable GPUs of this host, bf16 support."""

    ranks: int = 1
    gpus: int = 0
    bf16: bool = False


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


def _recipe(
    optimizer: str, criterion: str, schedule: str, max_tokens: int, update_freq: int, updates: int,
    sentences: int | None = None, decays: bool = False, data: str = "",
) -> tuple[Choice, ...]:  # fmt: skip
    """The choices of a recipe; texts are flags with their values, such as "--lr 1.0".

    sentences: sentences of a batch; max_tokens limits the batch as well.
    decays: whether the learning rate falls to zero at the last update (--max-update).
    data: flags that say how the task makes its samples.
    """
    total = ((_LAST_OF_DECAY, str(updates)),) if decays else ()
    size = () if sentences is None else (("--batch-size", str(sentences)),)
    return (
        Choice(("--optimizer",), _pairs(optimizer), required=True),
        Choice(("--criterion",), _pairs(criterion)),
        Choice(("--lr-scheduler",), _pairs(schedule)),
        Choice(("--lr-scheduler",), total),
        Choice((), _pairs(data)),
        # These set the tokens of an update; not added if the user sets the size of a batch.
        Choice((*_SENTENCES, "--max-tokens"), (("--update-freq", str(update_freq)),), True),
        Choice((*_SENTENCES, "--max-tokens"), size, True),
        Choice(_SENTENCES, (("--max-tokens", str(max_tokens)),), True),
        Choice(("--max-epoch", "--stop-time-hours"), (("--max-update", str(updates)),)),
        # fairseq's own defaults. They are added so that the printed command repeats the run.
        Choice((), (("--update-freq", "1"), ("--seed", "1")), True),
    )


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    words = shlex.split(text)
    return tuple(zip(words[::2], words[1::2]))


# Task, or models with adaptive softmax -> choices of the recipe. Other tasks use the first recipe.
# Sizes and dropout come from the arch; the length of a block from the task, except for masked_lm.
ADAPTIVE = "adaptive softmax"
RECIPES = {
    # Vaswani et al. (2017), section 5, with the learning rate, weight decay and warm-up of
    # fairseq's examples/scaling_nmt for big Transformers.
    "translation": _recipe(
        "--optimizer ls_adam --adam-betas '(0.9, 0.98)' --clip-norm 0 --weight-decay 1e-4",
        "--criterion ls_label_smoothed_cross_entropy --label-smoothing 0.1",
        "--lr 5e-4 --lr-scheduler inverse_sqrt --warmup-updates 4000",
        max_tokens=4096,
        update_freq=1,
        updates=300_000,
    ),
    # fairseq's examples/language_model/README.md, of transformer_lm on WikiText-103.
    "language_modeling": _recipe(
        "--optimizer ls_adam --adam-betas '(0.9, 0.98)' --clip-norm 0 --weight-decay 0.01",
        "--criterion ls_cross_entropy",
        "--lr 5e-4 --lr-scheduler inverse_sqrt --warmup-updates 4000 --warmup-init-lr 1e-7",
        max_tokens=2048,
        update_freq=16,
        updates=50_000,
    ),
    # fairseq's examples/roberta/README.pretraining.md, of roberta_base.
    "masked_lm": _recipe(
        "--optimizer ls_adam --adam-betas '(0.9, 0.98)' --adam-eps 1e-6 --clip-norm 0 "
        "--weight-decay 0.01",
        "--criterion ls_masked_lm",
        "--lr 5e-4 --lr-scheduler polynomial_decay --warmup-updates 10000",
        max_tokens=8192,
        update_freq=16,
        updates=125_000,
        decays=True,
        data="--sample-break-mode complete --tokens-per-sample 512",
    ),
    # fairseq's examples/roberta/README.glue.md, of RTE, which has 2,490 sentence pairs: set
    # --max-update for other data. The tokens are RoBERTa's: <s> before a sample, </s> between its
    # two sentences.
    "sentence_prediction": _recipe(
        "--optimizer ls_adam --adam-betas '(0.9, 0.98)' --adam-eps 1e-6 --clip-norm 0 "
        "--weight-decay 0.1",
        "--criterion ls_sentence_prediction",
        "--lr 2e-5 --lr-scheduler polynomial_decay --warmup-updates 122",
        max_tokens=4400,
        update_freq=1,
        updates=2036,
        sentences=16,
        decays=True,
        data="--init-token 0 --separator-token 2",
    ),
    # fairseq's examples/language_model/README.adaptive_inputs.md, of transformer_lm_wiki103.
    ADAPTIVE: _recipe(
        "--optimizer nag --clip-norm 0.1",
        "--criterion adaptive_loss --ddp-backend legacy_ddp",
        "--lr 1.0 --lr-scheduler cosine --min-lr 1e-4 --stop-min-lr 1e-9 --t-mult 2 "
        "--lr-period-updates 270000 --lr-shrink 0.75 --warmup-updates 16000 --warmup-init-lr 1e-7",
        max_tokens=3072,
        update_freq=3,
        updates=286_000,
    ),
}
# The other tasks of RoBERTa.
RECIPES["multilingual_masked_lm"] = RECIPES["masked_lm"]
RECIPES["sentence_ranking"] = tuple(
    choice._replace(flags=_pairs("--criterion sentence_ranking"))
    if choice.unless == ("--criterion",)
    else choice
    for choice in RECIPES["sentence_prediction"]
)

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


def values(argv: Sequence[str], flags: Sequence[str]) -> Iterator[tuple[int, int, str]]:
    """Yields (word index, first character, text) of each value that ``argv`` gives to a flag.

    ``flags`` are the names of the flag. Without a value nothing is yielded. Words after ``--`` are
    operands.
    """
    for index, word in enumerate(argv):
        if word == "--":
            return
        for flag in flags:
            if word == flag:
                if index + 1 < len(argv):
                    yield index + 1, 0, argv[index + 1]
            elif word.startswith(flag + "="):
                yield index, len(flag) + 1, word[len(flag) + 1 :]
            elif len(flag) == 2 and word.startswith(flag):  # argparse takes -aARCH too
                yield index, 2, word[2:]


def value(argv: Sequence[str], flags: Sequence[str]) -> str | None:
    """The effective (last) value of a flag that has the names ``flags``, or None."""
    found = [text for _, _, text in values(argv, flags)]
    return found[-1] if found else None


def is_given(argv: Sequence[str], flags: Sequence[str]) -> bool:
    """Whether one of the long ``flags`` is on the command line, with or without a value."""
    words = list(argv)
    if "--" in words:
        words = words[: words.index("--")]
    return any(word.partition("=")[0] in flags for word in words)


def uses_lightseq(argv: Sequence[str]) -> bool:
    """Whether the arch, the optimizer or the criterion of the command is one of ours, by name."""
    return any((value(argv, flags) or "").startswith(PREFIX) for flags in REGISTERED)


def is_converted(argv: Sequence[str]) -> bool:
    """Whether the command is one of fairseq's with prefixes, and not one for the recipe.

    fairseq requires --optimizer. So a command that names neither the optimizer nor the criterion
    was written for the recipe. A converted command must train as it did before: on the same data,
    with the same sizes, schedule and end.
    """
    return is_given(argv, _PARTS)


def missing(
    argv: Sequence[str], machine: Machine, fused: bool | None = None, adaptive: bool = False
) -> list[str]:
    """The words that complete a command with an ls_ arch; [] for another arch.

    Nothing that the user sets is overridden. A converted command gets only what fairseq requires,
    and fairseq's defaults. The others get the recipe: the learning-rate schedule unless the user
    sets the scheduler, the batch size and --update-freq unless the user sets the size of a batch.

    Args:
        fused: whether the arch is ours; None: decided by its name.
        adaptive: whether its model has adaptive softmax.
    """
    if fused is None:
        fused = (value(argv, ARCH) or "").startswith(PREFIX)
    if not fused:
        return []
    task = value(argv, ("--task",)) or "translation"
    added: list[str] = []
    last = value(argv, ("--max-update",))
    choices = RECIPES.get(ADAPTIVE if adaptive else task, RECIPES["translation"])
    converted = is_converted(argv)
    if converted:
        choices = (*(choice for choice in choices if choice.required), _FAIRSEQS_CRITERION)
    for choice in choices:
        if not is_given(argv, choice.unless):
            for flag, text in choice.flags:
                if flag == _LAST_OF_DECAY and last not in (None, "0"):
                    text = last
                if not is_given([*added, *argv], (flag,)):
                    added += [flag, text]
    if not is_given(argv, ("--distributed-world-size",)):
        added += ["--distributed-world-size", str(machine.ranks)]
    if machine.gpus and not converted and not is_given(argv, ("--cpu", *PRECISION)):
        added.append("--bf16" if machine.bf16 else "--fp16")
    return added


def with_options(argv: Sequence[str], options: Sequence[str]) -> list[str]:
    """``argv`` with further options, before a ``--`` if there is one."""
    words = list(argv)
    end = words.index("--") if "--" in words else len(words)
    return [*words[:end], *options, *words[end:]]


def complete(
    argv: Sequence[str], machine: Machine, fused: bool | None = None, adaptive: bool = False
) -> list[str]:
    """``argv`` with the `missing` words added."""
    return with_options(argv, missing(argv, machine, fused, adaptive))


def note(argv: Sequence[str]) -> str | None:
    """A note if the completed command is probably not what the user intends, else None."""
    if is_given(argv, ("--lr",)):
        return None
    return (
        "--lr is not set, so this run uses fairseq's default learning rate, 0.25: set --lr. The "
        "recipe sets it only if --optimizer, --criterion and --lr-scheduler are not set."
    )


def native_twin(argv: Sequence[str]) -> list[str]:
    """The same command with fairseq's own arch, optimizer and criterion in place of ours."""
    words = list(argv)
    for flags in REGISTERED:
        for index, start, text in values(argv, flags):
            words[index] = words[index][:start] + text.removeprefix(PREFIX)
    return words


def command_line(argv: Sequence[str]) -> str:
    """The command line that repeats the run, quoted for a shell."""
    return shlex.join(["lightseq-train", *argv])
