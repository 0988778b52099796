"""Checks of the names of components: each is registered, an arch is named, and the task has its
data."""

from __future__ import annotations

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.checks import Request
from lightseq_fairseq.cli.words import command_lines, synonyms
from lightseq_fairseq.cli.words.argv import ARCH, is_given, value


def registered(request: Request) -> None:
    """Raises UserError if a task, optimizer, ... is not registered, and names the closest ones.

    `fairseq_compat` checks the arch, which may also come from a checkpoint.
    """
    from fairseq.registry import REGISTRIES

    for action in request.parser._actions:
        if action.dest in ("task", *REGISTRIES) and action.choices is not None:
            name = value(request.argv, action.option_strings)
            if name is not None and name not in action.choices:
                what = action.dest.replace("_", " ")
                longer = [choice for choice in action.choices if choice.startswith(name)][:3]
                close = longer or synonyms.nearest(name, action.choices, most=3, cutoff=0.5)
                hint = f"did you mean {' or '.join(close)}?" if close else ""
                raise UserError(
                    f"There is no {what} named {name}: "
                    f"{hint or f'--fairseq-help lists the choices of {action.option_strings[0]}.'}"
                )


def arch(request: Request) -> None:
    """Raises UserError if no architecture is named; the message names a wrong flag as well.

    fairseq parses the flags of models only when it knows the architecture.
    """
    argv = request.argv
    if value(argv, ARCH) is not None or is_given(argv, (*ARCH, "--help")):
        return
    missing = "--arch is missing: add it, for example --arch ls_transformer_wmt_en_de."
    wrong = command_lines.wrong_flag(request.command, request.parser, argv)
    raise UserError(missing if wrong is None else f"{wrong} Besides, {missing}")


def task_fits_arch(request: Request) -> None:
    """Raises UserError if a task of fairseq does not provide the data that our model trains on.

    It runs before the command line is parsed: some of these tasks already fail in parsing.
    """
    from fairseq.tasks import TASK_REGISTRY

    from lightseq_fairseq.plugins.conditions import family_of

    if "--help" in request.argv:  # help is also for those who look for a right task
        return
    arch = value(request.argv, ARCH)
    name = value(request.argv, ("--task",)) or "translation"
    task = TASK_REGISTRY.get(name, object)  # fairseq reports a name that is not registered
    family = family_of(arch)
    if not task.__module__.startswith("fairseq.tasks.") or family is None:
        return
    if not family.has_task(task):
        raise UserError(
            f"--arch {arch} trains on {family.data}, but --task {name} provides other data: use "
            f"{family.instead}."
        )
