"""A copy of a module with some names replaced, for use by one other module."""

from __future__ import annotations

import types
from typing import Any


class Overlay(types.ModuleType):
    """A module with some names replaced; all other names are those of the original.

    Assign it to a name in one module, as in ``checkpoint_utils.torch = Overlay(torch, load=...)``.
    It changes what that module calls, and nothing for other modules.
    """

    def __init__(self, module: types.ModuleType, **replacements: Any) -> None:
        super().__init__(module.__name__, module.__doc__)
        self.__dict__.update(replacements)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
