"""What is whose, by fairseq's registries: by class, as --user-dir may extend what is ours.

What is asked before fairseq is imported goes by names (`defaults`).
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from lightseq_fairseq.cli.start import defaults
from lightseq_fairseq.cli.start.defaults import value
from lightseq_fairseq.errors import UserError


def function(cls: Any, name: str) -> Any:
    """A method as a function: the same for two classes where one has it from the other."""
    method = getattr(cls, name, None)
    return getattr(method, "__func__", method)


def is_fused(arch: str | None) -> bool:
    """Whether the architecture's model is one of ours, or extends one."""
    from lightseq_fairseq.plugins.flat_model import FlatModel

    # isort: split
    from fairseq.models import ARCH_MODEL_REGISTRY

    return issubclass(ARCH_MODEL_REGISTRY.get(arch, object), FlatModel)


def uses_lightseq(argv: Sequence[str]) -> bool:
    """Whether the arch, the optimizer or the criterion of the command is one of ours.

    fairseq is imported only for a --user-dir, which may bring archs of any name.
    """
    folder = value(argv, ("--user-dir",))
    if folder is None:
        return defaults.uses_lightseq(argv)
    from lightseq_fairseq import fairseq_compat

    fairseq_compat.prepare()
    from fairseq import utils

    from lightseq_fairseq import plugins  # noqa: F401  (its import registers)

    utils.import_user_module(Namespace(user_dir=folder))
    return is_fused(value(argv, defaults.ARCH)) or any(
        (value(argv, flags) or "").startswith(defaults.PREFIX) for flags in defaults.PARTS
    )


def native_twin(argv: Sequence[str]) -> list[str]:
    """The same command with fairseq's own parts in place of ours.

    Raises:
        UserError: its arch extends ours, and none of fairseq's is called like it.
    """
    arch, twin = value(argv, defaults.ARCH), defaults.native_twin(argv)
    if is_fused(arch) and is_fused(value(twin, defaults.ARCH)):
        raise UserError(
            f"--native knows no arch of fairseq's own for {arch}: name one, such as transformer."
        )
    return twin


def check_task(argv: Sequence[str]) -> None:
    """Refuses to train our model on a task of fairseq's that has other data.

    To be called before the command line is parsed, in which some of these tasks fail.
    """
    from fairseq.models import ARCH_MODEL_REGISTRY
    from fairseq.tasks import TASK_REGISTRY

    arch, name = value(argv, defaults.ARCH), value(argv, ("--task",)) or "translation"
    task = TASK_REGISTRY.get(name, object)  # fairseq refuses what is not registered
    if not task.__module__.startswith("fairseq.tasks.") or not is_fused(arch):
        return
    data = ARCH_MODEL_REGISTRY[arch].data
    if not issubclass(task, data.tasks):
        words, instead = data.words
        raise UserError(
            f"{arch} trains on {words}, and --task {name} gives it none: take {instead}, or an "
            "arch of fairseq's own."
        )
