"""Tells our components from fairseq's, and the data of tasks, by classes in fairseq's registries.

A class test also covers user classes (--user-dir) that extend ours. Before fairseq is imported,
only names can be tested, see `argv`.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from lightseq_fairseq.base import families
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.base.families import PREFIX, Recipe
from lightseq_fairseq.cli.words import defaults
from lightseq_fairseq.cli.words.argv import ARCH, REGISTERED, value, without_prefixes


def function(cls: Any, name: str) -> Any:
    """A method as a plain function; it is the same object in a class and a subclass that inherits
    it."""
    method = getattr(cls, name, None)
    return getattr(method, "__func__", method)


def components() -> dict[str, Mapping[str, Any]]:
    """fairseq's registries, name -> class: of "arch", "task", "optimizer", "criterion", ..."""
    from fairseq.models import ARCH_MODEL_REGISTRY
    from fairseq.registry import REGISTRIES
    from fairseq.tasks import TASK_REGISTRY

    others = {name: entry["registry"] for name, entry in REGISTRIES.items()}
    return {"arch": ARCH_MODEL_REGISTRY, "task": TASK_REGISTRY, **others}


def data_of(task: str) -> str | None:
    """The kind of data of a task: a name in ``checks.CHECKS``; None for one that is not fairseq's.

    A task that has the methods of one in `families` reads the same data; a subclass may override
    them.
    """
    from fairseq.tasks import TASK_REGISTRY

    cls = TASK_REGISTRY[task]
    for known in families.tasks().values():
        theirs = families.named(known.place)
        methods = [(function(cls, name), function(theirs, name)) for name in known.loaders]
        if methods and all(one is other for one, other in methods):
            return known.data
    return "other data of fairseq" if cls.__module__.startswith("fairseq.tasks.") else None


def is_fused(arch: str | None) -> bool:
    """Whether the architecture's model is one of ours or a subclass of one."""
    from lightseq_fairseq.plugins.conditions import family_of

    return family_of(arch) is not None


def trains(arch: str, task: str) -> bool:
    """Whether the architecture is one of ours, for the data of the task."""
    from fairseq.tasks import TASK_REGISTRY

    from lightseq_fairseq.plugins.conditions import family_of

    family = family_of(arch)
    return family is not None and family.has_task(TASK_REGISTRY[task])


def asks_for_adaptive_softmax(argv: Sequence[str]) -> bool:
    """Whether the flags or the arch of the command give the model adaptive softmax."""
    from lightseq_fairseq.plugins.unsupported import settings_of

    options = settings_of(value(argv, ARCH))
    given = value(argv, ("--adaptive-softmax-cutoff",))
    return bool(getattr(options, "adaptive_softmax_cutoff", None) if given is None else given)


def recipe_of(argv: Sequence[str]) -> Recipe:
    """The recipe of the command's model and task."""
    from lightseq_fairseq.plugins.conditions import family_of

    family = family_of(value(argv, ARCH))
    if asks_for_adaptive_softmax(argv):
        return next(x.adaptive for x in families.FAMILIES if x.adaptive)
    return defaults.recipe_of(argv, family and family.recipes)


def uses_lightseq(argv: Sequence[str]) -> bool:
    """Whether the arch, the optimizer or the criterion of the command is one of ours.

    fairseq is imported only for a --user-dir, which may register archs with any name.
    """
    arch, *others = (value(argv, flags) or "" for flags in REGISTERED)
    is_ours = any(name.startswith(PREFIX) for name in others)
    folder = value(argv, ("--user-dir",))
    if folder is None:
        return is_ours or arch.startswith(PREFIX)
    from lightseq_fairseq import fairseq_compat

    fairseq_compat.prepare()
    from fairseq import utils

    from lightseq_fairseq import plugins  # noqa: F401  (its import registers)

    utils.import_user_module(Namespace(user_dir=folder))
    return is_ours or is_fused(arch)


def native_twin(argv: Sequence[str]) -> list[str]:
    """The same command with fairseq's own arch, optimizer and criterion in place of ours.

    Raises:
        UserError: the arch extends ours, or is only ours, and fairseq has no arch of the
            corresponding name.
    """
    from fairseq.models import ARCH_MODEL_REGISTRY

    arch, twin = value(argv, ARCH), without_prefixes(argv)
    other = value(twin, ARCH)
    if is_fused(arch) and (is_fused(other) or other not in ARCH_MODEL_REGISTRY):
        raise UserError(
            f"--native finds no arch of fairseq that corresponds to --arch {arch}: use one of "
            "fairseq's, such as transformer."
        )
    return twin
