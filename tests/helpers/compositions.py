"""fairseq's configurations, composed faster.

For each command fairseq lets hydra compose its configuration from hundreds of settings. That takes
much of the time of a small run. From the import of this module on, hydra composes the defaults of
the same components only once, and only settings that are not as in the command before are parsed
and set.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from lightseq_fairseq import plugins  # noqa: F401  (fairseq does not import without it)

# isort: split
from fairseq.dataclass import utils
from hydra import initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

HYDRAS = {"compose": utils.compose, "initialize": utils.initialize}
_composed: dict[tuple[str, ...], tuple[Any, dict[str, Any]]] = {}


@functools.cache
def _parsed(line: str) -> Any:
    (override,) = OverridesParser.create().parse_overrides([line])
    return override


def compose(name: str, overrides: Sequence[str], strict: bool) -> Any:
    """What ``hydra.compose`` returns and raises, for a configuration that is always the same.

    The next call changes the result, which fairseq copies.
    """
    settings = [_parsed(line) for line in overrides]
    # Others, such as task=translation, choose a component.
    values = {x.key_or_group: x for x in settings if "." in x.key_or_group}
    choices = [x.input_line for x in settings if "." not in x.key_or_group]
    kind = (*choices, *values)
    # Popped, so that what an error leaves is not used again.
    found, before = _composed.pop(kind, None) or (_defaults(name, choices, strict), {})
    changed = [x for key, x in values.items() if before.get(key) is not x]
    OmegaConf.set_struct(found, True)  # as in hydra, which refuses unknown names
    ConfigLoaderImpl._apply_overrides_to_config(changed, found)
    OmegaConf.set_struct(found, strict)
    if not any(isinstance(x.value(), dict) for x in changed):  # the next would be merged into it
        _composed[kind] = found, values
    return found


def _defaults(name: str, choices: list[str], strict: bool) -> Any:
    folder = Path(utils.__file__).parents[1] / "config"
    with initialize_config_dir(str(folder)):
        return HYDRAS["compose"](name, overrides=choices, strict=strict)


utils.compose = compose
utils.initialize = lambda config_path: nullcontext()  # slow, since it reads the stack
