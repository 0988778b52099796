"""Failures that are recognised by their message alone, and what sentences about them say."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import NamedTuple

from lightseq_fairseq.cli.checks import Request
from lightseq_fairseq.cli.checks.failures.cause import Cause

# The sentence for a failure, or None if the rule does not know it.
Rule = Callable[[Cause, Request], str | None]


class Known(NamedTuple):
    """A rule for one failure.

    Attributes:
        pattern: of the beginning of the message.
        sentence: {1} is the first group of the pattern, and {checkpoint} the checkpoint that the
            command reads; or a function that makes the sentence.
        kind: the name of the exception's type, or several names; empty: any.
        source: a part of the path of the file that raised it.
    """

    pattern: str
    sentence: str | Callable[[re.Match[str], Request], str]
    kind: str = ""
    source: str = ""

    def __call__(self, failure: Cause, request: Request) -> str | None:
        """See `Rule`."""
        found = re.match(self.pattern, failure.text)
        is_kind = not self.kind or failure.kind in self.kind.split()
        if not found or not is_kind or self.source not in failure.source:
            return None
        if callable(self.sentence):
            return self.sentence(found, request)
        return self.sentence.format(found[0], *found.groups(), checkpoint=checkpoint(request))


def checkpoint(request: Request) -> str:
    """The name for messages of the checkpoint that the command reads."""
    path = getattr(request.args, "path", None)
    if path is None:
        path = getattr(request.args, "restore_file", None)
        if path == "checkpoint_last.pt":
            path = os.path.join(getattr(request.args, "save_dir", ""), path)
            if not os.path.exists(path):  # a new run
                path = getattr(request.args, "finetune_from_model", None) or path
    return f"checkpoint {path}" if path else "the checkpoint"


def data_folder(request: Request) -> str:
    return getattr(request.args, "data", None) or "the data folder"
