"""What fairseq's registries hold, once they are filled, and with what of --user-dir."""

from __future__ import annotations

from typing import Any


def function(cls: Any, name: str) -> Any:
    """A method as a function: the same for two classes where one has it from the other."""
    method = getattr(cls, name, None)
    return getattr(method, "__func__", method)
