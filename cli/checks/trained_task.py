"""The task of a checkpoint: commands that translate or classify with the checkpoint have it without
flags. Of an import they also have the settings of the search."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from lightseq_fairseq.base import families
from lightseq_fairseq.base.run_folder import checkpoint_in
from lightseq_fairseq.cli.checks.checkpoints import saved
from lightseq_fairseq.cli.words.argv import flag_of, is_given, value, with_options

_SHORT = {"source_lang": "-s", "target_lang": "-t"}


def options_of(settings: dict[str, Any], given: str | None) -> dict[str, Any]:
    """The options with which a command has the task of a checkpoint.

    Args:
        settings: the task's in the checkpoint.
        given: the task that the command names, or None.

    Returns:
        Setting -> value; {} if the task needs no options, or is not known here. The model of an
        import has those of its folder, which are also of the search.
    """
    if imported := settings.get("generation"):
        return {name: each for name, each in imported["options"].items() if each is not None}
    task = families.tasks().get(str(settings.get("_name") or settings.get("task")))
    if task is None or not (task.of_checkpoint or task.prompts) or given not in (None, task.name):
        return {}
    found = {name: settings.get(name) for name in task.of_checkpoint}
    if "--criterion" in task.read:
        found["criterion"] = task.name
    pairs = found.get("lang_pairs") or []
    pairs = pairs.split(",") if isinstance(pairs, str) else list(pairs)
    if len(pairs) == 1:
        found["source_lang"], _, found["target_lang"] = pairs[0].partition("-")
    texts = {
        name: ",".join(each) if isinstance(each, (list, tuple)) else each
        for name, each in found.items()
        if each or type(each) is int
    }
    return {"task": task.name, **texts}


def with_task(argv: Sequence[str]) -> list[str]:
    """``argv`` with the task of the checkpoint of --path, unless the command has another --task.

    With an import, it has the settings of its search, too.
    """
    path = value(argv, ("--path",))
    if path is None:
        return list(argv)
    from lightseq_fairseq.fairseq_compat.checkpoints import settings_of

    first = checkpoint_in(path.partition(os.pathsep)[0])
    words: list[str] = []
    settings, given = settings_of(saved(first), "task"), value(argv, ("--task",))
    for name, each in options_of(settings, given).items():
        flags = (flag_of(name), *filter(None, [_SHORT.get(name)]))
        if value(argv, flags) is None and not is_given(argv, flags):
            words += [flag_of(name)] if each is True else [flag_of(name), str(each)]
    return with_options(argv, words)
