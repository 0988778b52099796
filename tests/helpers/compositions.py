"""fairseq's configurations, composed faster.

For each command fairseq lets hydra compose its configuration from hundreds of settings. That takes
much of the time of a small run. From the import of this module on, hydra composes the defaults only
once, without components; those of a component are taken from hydra's store. Only settings that are
not as in the command before are parsed and set. OmegaConf copies the configuration of a dataclass,
and of nested settings of the same names: a copy takes a quarter of the time. And it copies nodes
without a general `copy.deepcopy` of what they know about themselves.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from lightseq_fairseq import plugins  # noqa: F401  (fairseq does not import without it)

# isort: split
from fairseq import checkpoint_utils
from fairseq.dataclass import utils
from hydra import initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf, base, nodes

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
    choices = tuple(x.input_line for x in settings if "." not in x.key_or_group)
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


def _defaults(name: str, choices: tuple[str, ...], strict: bool) -> Any:
    """The composition of several components: each determines the settings of its own group."""
    found = copy.deepcopy(_composition(name, (), strict))
    for choice in choices:
        group, _, component = choice.partition("=")
        part = copy.deepcopy(_stored(group, component))
        if part is None:  # as hydra does, which may raise an error
            part = copy.deepcopy(_composition(name, (choice,), strict)[group])
        vars(found)["_content"][group] = part
        part._set_key(group)
        part._set_parent(found)
    return found


def _stored(group: str, component: str) -> Any:
    """The settings of a component, which hydra would compose with all others; None if unknown."""
    components = ConfigStore.instance().repo.get(group, {})
    found = components.get(f"{component}.yaml") if isinstance(components, dict) else None
    return found and found.node


@functools.cache
def _composition(name: str, choices: tuple[str, ...], strict: bool) -> Any:
    folder = Path(utils.__file__).parents[1] / "config"
    with initialize_config_dir(str(folder)):
        return HYDRAS["compose"](name, overrides=list(choices), strict=strict)


_create, _structured = OmegaConf.create, OmegaConf.structured
_created: dict[tuple[str, ...], tuple[dict[str, Any], Any]] = {}
_defaults_of: dict[type, Any] = {}
_COPIED = type(None), bool, int, float, str, list


def create(settings: Any, flags: dict[str, bool] | None = None) -> Any:
    """``OmegaConf.create`` of fairseq's settings, which are in groups."""
    if type(settings) is not dict:
        return _create(settings, flags=flags)
    groups = {group: values for group, values in settings.items() if type(values) is dict}
    names = (f"{group}.{name}" for group, values in groups.items() for name in values)
    kind = (*(flags or ()), *settings, *names)
    before, made = _created.get(kind) or (settings, _create(settings, flags=flags))
    found = copy.deepcopy(made)
    for group, values in settings.items():
        if not values or group not in groups:
            found[group] = values
            continue
        for name, value in values.items():
            old = before[group][name]
            if type(value) is not type(old) or value != old or not isinstance(value, _COPIED):
                found[group][name] = value
    _created.setdefault(kind, (settings, made))
    return found


def structured(settings: Any, parent: Any = None, flags: Any = None) -> Any:
    """``OmegaConf.structured``; a dataclass with its default values is read only once."""
    kind = type(settings)
    if parent is None and not flags and is_dataclass(kind) and settings == kind():
        if kind not in _defaults_of:
            _defaults_of[kind] = _structured(settings)
        return copy.deepcopy(_defaults_of[kind])
    return _structured(settings, parent, flags)


def _copied_metadata(metadata: base.Metadata, memo: dict[int, Any]) -> base.Metadata:
    """``copy.deepcopy`` of a node's types, name and flags."""
    copied = object.__new__(type(metadata))
    vars(copied).update(vars(metadata))
    copied.flags = copy.copy(metadata.flags)
    copied.resolver_cache = copy.deepcopy(metadata.resolver_cache, memo)
    return copied


def _copied_node(node: nodes.ValueNode, memo: dict[int, Any]) -> nodes.ValueNode:
    """``copy.deepcopy`` of a value, which it shares, as OmegaConf does."""
    copied = object.__new__(type(node))
    metadata = _copied_metadata(node._metadata, memo)
    vars(copied).update(vars(node), _metadata=metadata, _flags_cache=None)
    return copied


base.Metadata.__deepcopy__ = _copied_metadata
for _kind in nodes.ValueNode.__subclasses__():
    _kind.__deepcopy__ = _copied_node
OmegaConf.structured = structured
utils.OmegaConf = type("OmegaConf", (OmegaConf,), {"create": staticmethod(create)})
checkpoint_utils.OmegaConf = utils.OmegaConf
utils.compose = compose
utils.initialize = lambda config_path: nullcontext()  # slow, since it reads the stack
