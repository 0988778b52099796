"""Log lines that a person reads show no speed before it has been measured."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any


def format_stats(
    original: Callable[[Any, Any], OrderedDict[str, str]], self: Any, stats: Any
) -> OrderedDict[str, str]:
    """fairseq's words of a line, without a wps of 0 and its ups.

    The first batch only starts the clock. fairseq logs 0 until the second one, and fairseq-validate
    always, because it sums up once.
    """
    words = original(self, stats)
    return OrderedDict(
        (key, text)
        for key, text in words.items()
        if key not in ("wps", "ups") or words.get("wps") != "0"
    )
