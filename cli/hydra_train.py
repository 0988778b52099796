"""``lightseq-hydra-train``: YAML configurations of fairseq-hydra-train, run by lightseq-train.

Hydra composes the configuration, as for fairseq. Then the settings become flags of lightseq-train.
So these runs have the same defaults, checks and first output line as runs of lightseq-train.
"""

from __future__ import annotations

import json
import os
from argparse import Action, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import click

from lightseq_fairseq import cli
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.base.families import PREFIX
from lightseq_fairseq.cli import train
from lightseq_fairseq.cli.checks import Request
from lightseq_fairseq.cli.start.commands import CommandError
from lightseq_fairseq.cli.start.launch import environment, launcher, sentences, typed
from lightseq_fairseq.cli.start.ranks import Ranks
from lightseq_fairseq.cli.words import command_lines, registries
from lightseq_fairseq.fairseq_compat import deprecations, patching

_NOT_SET = "???"  # Hydra's mark of a setting without a value
_NAME = "_name"  # the setting that chooses the component of a group, such as the arch


class Setting(NamedTuple):
    """A setting of a configuration, such as (optimization, max_update, 1000)."""

    group: str
    key: str
    value: Any

    def __str__(self) -> str:
        return f"{self.group}.{self.key}"


@launcher("hydra-train")
@click.option(
    "--native",
    is_flag=True,
    help="Run the same configuration with fairseq's own arch, optimizer and criterion.",
)
def main(words: list[str], native: bool) -> None:
    """Train from a YAML configuration of fairseq-hydra-train, accelerated.

    Takes the options and overrides of fairseq-hydra-train. To use this package, add the prefix ls_
    to the name of the model:

    \b
        lightseq-hydra-train --config-dir examples/roberta/config/pretraining --config-name base \\
            model._name=ls_roberta task.data=/data/wikitext-103

    The optimizer and the criterion of the file are then replaced by this package's, if it has them
    (adam by ls_adam); an override like optimizer._name=adam chooses fairseq's. The settings become
    flags of lightseq-train, which adds defaults for the others. The first line printed is the
    complete command. Like fairseq-hydra-train, it runs in a new folder below outputs/: write paths,
    such as that of the data, as absolute paths. Here the name of an arch, such as
    transformer_lm_gpt2_small, sets the sizes of the model; fairseq-hydra-train does not use the
    sizes of an arch.
    """

    program, request = "lightseq-hydra-train", Request(words)

    def train_by(_: Any, configuration: Any) -> float:
        from fairseq.dataclass.initialize import hydra_init
        from hydra.core.hydra_config import HydraConfig

        hydra_init()  # lightseq-train composes a configuration, too: with fairseq's defaults
        try:
            with sentences(program, request, Ranks()):
                return _train(configuration, native, request)
        except Exception as error:
            if isinstance(error, CommandError):
                error.message += _relative(configuration, error.message)
            raise _Raised(error) from error
        finally:  # in a sweep (--multirun), Hydra composes the next configuration
            _without_defaults(hydra_init, HydraConfig.get().job.config_name or "config")

    with sentences(program, request, Ranks()), typed(program, words):
        cli.register()
        from fairseq.dataclass import initialize
        from fairseq_cli import hydra_train
        from hydra.errors import HydraException
        from omegaconf.errors import OmegaConfBaseException

        within = patching.within
        with (
            deprecations.silenced(),
            command_lines.refused_in_a_sentence("hydra-train"),
            environment("HYDRA_FULL_ERROR", "1"),  # else Hydra prints errors itself, and exits
            within("fairseq_cli.hydra_train:hydra_init", _without_defaults),
            within("fairseq_cli.hydra_train:_hydra_main", train_by),
        ):
            try:
                hydra_train.cli_main()
            except _Raised as raised:
                raise raised.error from raised.error.__cause__
            except (HydraException, OmegaConfBaseException) as error:
                told = " ".join(str(error).splitlines()[:2])
                raise UserError(command_lines.ended(told)) from error
            finally:
                initialize.hydra_init()


class _Raised(BaseException):
    """Carries an error of a run past Hydra, which would print it with lines of its own."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


def _relative(configuration: Any, refusal: str) -> str:
    """The advice for a refused path that exists in the folder of the command, not in the run's."""
    from hydra.utils import get_original_cwd
    from omegaconf import OmegaConf

    words = {*refusal.split()}
    for path in _paths(OmegaConf.to_container(configuration)):
        there, names = os.path.join(get_original_cwd(), path), {path, os.path.abspath(path)}
        if names & words and os.path.exists(there) and not os.path.exists(path):
            return f" The run is in {os.getcwd()}, a folder of Hydra: write {there}."
    return ""


def _paths(value: Any) -> Iterator[str]:
    """The texts in a configuration that may be paths."""
    if isinstance(value, dict):
        for each in value.values():
            yield from _paths(each)
    elif isinstance(value, str):
        yield from filter(None, value.split(os.pathsep))


def _without_defaults(original: Callable[[str], None], name: str) -> None:
    """hydra_init, but settings that a configuration lacks stay without a value."""
    from hydra.core.config_store import ConfigStore

    original(name)
    ConfigStore.instance().store(name=name, node=_emptied(_fairseqs_defaults()))


def _emptied(settings: Any) -> Any:
    if isinstance(settings, Mapping):
        return {key: _emptied(value) for key, value in settings.items()}
    return _NOT_SET


def _fairseqs_defaults() -> Any:
    """fairseq's configuration; the groups of components, such as model, have no values."""
    from fairseq.dataclass.configs import FairseqConfig
    from omegaconf import OmegaConf

    return OmegaConf.to_container(OmegaConf.structured(FairseqConfig), enum_to_str=True)


def _train(configuration: Any, native: bool, request: Request) -> float:
    """Trains from a composed configuration; returns the best metric, for Hydra's sweepers."""
    from fairseq import metrics, utils
    from omegaconf import OmegaConf

    # fairseq imports this folder only when training begins, but its components have settings.
    folder = OmegaConf.select(configuration, "common.user_dir", throw_on_missing=False)
    request.args = Namespace(user_dir=None if folder is None else str(folder))
    request.argv = [*request.argv, str(folder or "")]  # the user named it, maybe in the file
    utils.import_user_module(request.args)
    settings = list(_settings(configuration))
    metric = ""

    def convert(original: Callable[[Namespace], Any], args: Namespace) -> Any:
        nonlocal metric
        cfg = original(args)
        _check(cfg, settings)
        metric = cfg.checkpoint.best_checkpoint_metric
        return cfg

    target = "fairseq_cli.train:convert_namespace_to_omegaconf"
    with patching.within(target, convert, by="cli.hydra_train"):
        lightseq_train: Any = train.main.callback
        off = dict.fromkeys(("fairseq_help", "pack_tokens", "fp8"), False)
        lightseq_train(_words(settings), native=native, log_level=None, **off)
    try:
        return float(metrics.get_smoothed_value("valid", metric))
    except KeyError:  # no validation, or without this metric
        return float("inf")


def _settings(configuration: Any) -> Iterator[Setting]:
    """The settings of the configuration, but not those equal to the default of their component."""
    from omegaconf import OmegaConf

    raw: Any = OmegaConf.to_container(configuration, enum_to_str=True)
    given = {
        group: {key: value for key, value in found.items() if value != _NOT_SET}
        if isinstance(found, dict)
        else {_NAME: found}
        for group, found in raw.items()
        if found not in (None, _NOT_SET)
    }
    defaults = {group: value for group, value in _fairseqs_defaults().items() if value != _NOT_SET}
    whole = OmegaConf.merge(defaults, given)
    for group, found in given.items():
        name = found.pop(_NAME, None)
        if name is not None:
            yield Setting(group, _NAME, name)
        component = _component(group, name)
        its_defaults, its_flags = _defaults_of(component), _flags_of(component)
        for key, value in found.items():
            if key in its_defaults and value == its_defaults[key]:
                refers = "${" in str(value)  # to another setting; a flag cannot do this
                if (refers and key not in its_flags) or (not refers and group != "model"):
                    continue  # settings of a model stay, because its defaults depend on the arch
            yield Setting(group, key, _plain(OmegaConf.select(whole, f"{group}.{key}")))


def _plain(value: Any) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _registry(group: str) -> Mapping[str, Any]:
    """Name -> class of the components that a group chooses from; empty for other groups."""
    return registries.components().get("arch" if group == "model" else group, {})


def _component(group: str, name: str | None) -> Any:
    return None if name is None else _registry(group).get(name)


def _defaults_of(component: Any) -> dict[str, Any]:
    from omegaconf import OmegaConf

    settings = getattr(component, "__dataclass", None)
    if settings is None:
        return {}
    found: Any = OmegaConf.to_container(OmegaConf.structured(settings), enum_to_str=True)
    return found


def _words(settings: Sequence[Setting]) -> list[str]:
    """The words of lightseq-train that set these settings."""
    from fairseq import options

    names = {s.group: s.value for s in settings if s.key == _NAME}
    if "model" not in names:
        raise UserError(
            "The configuration sets no model._name: set it, or check --config-dir and "
            "--config-name."
        )
    of_all = {action.dest: action for action in options.get_training_parser()._actions}
    words: list[str] = []
    for setting in settings:
        group, key, value = setting
        if key == _NAME:
            flag = "arch" if group == "model" else group.replace("_", "-")
            words.append(f"--{flag}={_with_prefix(group, value, names['model'])}")
            continue
        component = _component(group, names.get(group))
        if group in names and component is None:
            continue  # lightseq-train says that there is no such component
        action = _flags_of(component).get(key, of_all.get(key))
        if action is None:
            of = f" with {group} {names[group]}" if group in names else ""
            raise UserError(f"{setting} is no setting of training{of}: remove it.")
        words += _spelled(action, value)
    return words


def _flags_of(component: Any) -> dict[str, Action]:
    """Setting -> its flag."""
    actions = [] if component is None else command_lines.actions_of(component)
    return {action.dest: action for action in actions}


def _with_prefix(group: str, name: str, arch: str | None) -> str:
    """The name of a component. With one of our models, an optimizer or a criterion gets the prefix
    if we have one of this name, unless an override on the command line chose the component."""
    from hydra.core.hydra_config import HydraConfig

    ours = f"{PREFIX}{name}"
    is_ours = registries.is_fused(arch) and group in ("optimizer", "criterion")
    if not is_ours or ours not in _registry(group):
        return name
    overridden = (text.lstrip("+").partition("=")[0] for text in HydraConfig.get().overrides.task)
    return name if {group, f"{group}.{_NAME}"} & {*overridden} else ours


def _spelled(action: Action, value: Any) -> list[str]:
    """The words that set a flag to a value; [] if no words can, which `_check` detects later."""
    flag = next((text for text in action.option_strings if text.startswith("--")), None)
    if flag is not None and action.nargs == 0:
        return [flag] if value == action.const else []
    if value is None:
        return []
    return [_text(value) if flag is None else f"{flag}={_text(value)}"]


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return json.dumps(value)
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _check(cfg: Any, settings: Sequence[Setting]) -> None:
    """Raises UserError if a setting has another value in the run: then no flag can set it."""
    for setting in settings:
        if setting.key == _NAME:
            continue
        group = cfg[setting.group]
        values = vars(group) if isinstance(group, Namespace) else group
        found = _plain(values.get(setting.key))
        if found != setting.value and _text(found) != _text(setting.value):
            raise UserError(
                f"{setting} cannot be {_yaml(setting.value)}, because lightseq-train has no flag "
                f"that sets this: in its run it is {_yaml(found)}."
            )


def _yaml(value: Any) -> str:
    return json.dumps(value) if value is None or isinstance(value, bool) else _text(value)


if __name__ == "__main__":
    main()
