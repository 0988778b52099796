"""fairseq's configurations, composed faster.

For each command fairseq lets hydra compose its configuration from hundreds of settings. That takes
most of the time of a small run. From the import of this module on, hydra composes the defaults of
the same components only once, and parses each setting only once.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

from lightseq_fairseq import plugins  # noqa: F401  (fairseq does not import without it)

# isort: split
from fairseq.dataclass import utils
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

hydras = utils.compose
_defaults: dict[tuple[str, ...], Any] = {}


@functools.cache
def _parsed(line: str) -> Any:
    (override,) = OverridesParser.create().parse_overrides([line])
    return override


def compose(name: str, overrides: Sequence[str], strict: bool) -> Any:
    """What ``hydra.compose`` returns and raises, for a configuration that is always the same."""
    settings = [_parsed(line) for line in overrides]
    # Others, such as task=translation, choose a component.
    values = [setting for setting in settings if "." in setting.key_or_group]
    choices = tuple(x.input_line for x in settings if "." not in x.key_or_group)
    if choices not in _defaults:
        _defaults[choices] = hydras(name, overrides=list(choices), strict=strict)
    found = copy.deepcopy(_defaults[choices])
    OmegaConf.set_struct(found, True)  # as in hydra, which refuses unknown names
    ConfigLoaderImpl._apply_overrides_to_config(values, found)
    OmegaConf.set_struct(found, strict)
    return found


utils.compose = compose
