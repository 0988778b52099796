"""One module as another module sees it."""

from __future__ import annotations

import types
from typing import Any


class Overlay(types.ModuleType):
    """A module with some names replaced, everything else being the original's.

    Bound to a name inside one module (``checkpoint_utils.torch = Overlay(torch, load=...)``) it
    changes what that module calls and nothing for anybody else.
    """

    def __init__(self, module: types.ModuleType, **replacements: Any) -> None:
        super().__init__(module.__name__, module.__doc__)
        self.__dict__.update(replacements)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
