"""A cache for fairseq's configuration, for loops that read it for each sentence."""

from __future__ import annotations

import copy
from argparse import Namespace
from typing import Any

# Sections that fairseq-generate reads in its loop, and only by attribute.
_READ_IN_LOOPS = ("common_eval", "dataset", "generation")


class CachedConfig:
    """A configuration, or a section of one, that looks up each setting only once.

    A look-up in omegaconf takes about 10 us. fairseq-generate does more than twenty for each
    sentence, which takes longer than its translation in a large batch. Assignments are passed on to
    the original.
    """

    def __init__(self, config: Any, parts: tuple[str, ...] = ()) -> None:
        self.__dict__["_config"] = config
        for part in parts:
            self.__dict__[part] = CachedConfig(getattr(config, part))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python looks up special methods
            raise AttributeError(name)
        value = self.__dict__[name] = getattr(self._config, name)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._config, name, value)
        self.__dict__.pop(name, None)

    def __copy__(self) -> CachedConfig:
        return CachedConfig(copy.copy(self._config))

    def __str__(self) -> str:
        return str(self._config)


def looked_up_once(cfg: Any) -> CachedConfig:
    """The configuration for ``main`` of ``fairseq_cli.generate``, with cached sections.

    cfg: the argument of ``main``, a Namespace or fairseq's configuration.
    """
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    config = convert_namespace_to_omegaconf(cfg) if isinstance(cfg, Namespace) else cfg
    return CachedConfig(config, _READ_IN_LOOPS)
