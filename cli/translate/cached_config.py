"""fairseq's configuration, for loops that read it again for every sentence."""

from __future__ import annotations

import copy
from argparse import Namespace
from typing import Any

# The parts that fairseq-generate and -interactive read in their loops, and hand to nobody who
# asks for more than attributes.
_READ_IN_LOOPS = ("common_eval", "dataset", "generation")


class CachedConfig:
    """A configuration, or a part of one, whose settings are looked up once.

    omegaconf takes some 10 us for a look. fairseq-generate looks more than twenty times at a
    sentence, which is longer than the sentence takes to be translated in a large batch. What is set
    here is set there.
    """

    def __init__(self, config: Any, parts: tuple[str, ...] = ()) -> None:
        self.__dict__["_config"] = config
        for part in parts:
            self.__dict__[part] = CachedConfig(getattr(config, part))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python asks for its protocols
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
    """For ``main`` of fairseq_cli's generate and interactive.

    cfg: what they take, a Namespace or fairseq's configuration.
    """
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    config = convert_namespace_to_omegaconf(cfg) if isinstance(cfg, Namespace) else cfg
    return CachedConfig(config, _READ_IN_LOOPS)
