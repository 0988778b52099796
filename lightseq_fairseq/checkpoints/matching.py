"""Which record of `counterparts` a model has, in both directions, and its settings in the other
world."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.base.families import Family
from lightseq_fairseq.checkpoints import counterparts
from lightseq_fairseq.checkpoints.correspondence import Counterpart


def of_config(config: dict[str, Any]) -> Counterpart:
    """The record of a model in `transformers`.

    Raises:
        UserError: there is none, or the model computes something else.
    """
    kind = str(config.get("model_type"))
    records = [each for each in counterparts.COUNTERPARTS if kind in each.types]
    if not records:
        kinds = [kind for each in counterparts.COUNTERPARTS for kind in each.types]
        known = ", ".join(dict.fromkeys(kinds))
        raise UserError(f"its model_type is {kind}, but only these can be converted: {known}.")
    record = min(records, key=lambda each: len(list(_other_fields(each, config))))
    for name in config.get("architectures") or ():
        if name not in (classes := [record.types[kind] + last for last in record.classes]):
            raise UserError(
                f"it contains a {name}, but only these classes can be converted: "
                f"{', '.join(classes)}."
            )
    if record.own_bias and config.get("decoder_start_token_id") != config.get("pad_token_id"):
        raise UserError(
            "its decoder_start_token_id is not its pad_token_id: our model of this kind begins "
            "with the pad. If you make the model yourself, set both to one number before you "
            "train it."
        )
    if others := list(_other_fields(record, config)):
        name, found, value = others[0]
        wanted = ", ".join(f"{name}={value!r}" for name, _, value in others)
        raise UserError(
            f"its {name} is {found}, but fairseq's model of this kind has {value}: it cannot "
            f"compute the same. If you make the model yourself, set {wanted} before you train it."
        )
    return record


def _other_fields(record: Counterpart, config: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """The fields that differ from those of all models of a kind: name, value, and theirs."""
    for name, value, default in record.fixed:
        if (found := config.get(name, default)) != value:
            yield name, found, value


def settings(record: Counterpart, config: dict[str, Any]) -> dict[str, Any]:
    """fairseq's settings of a model in `transformers`.

    Raises:
        UserError: fairseq does not have the activation.
    """
    found = dict(record.settings)
    for setting, name, default, read, _ in record.fields:
        value = config.get(name)
        if value is None:
            value = default(config) if callable(default) else default
        found[setting] = read(value)
        if found[setting] is None:
            raise UserError(f"its {name} is {value}, which fairseq's models do not have.")
    return found


def of_settings(family: Family, args: Any, preferred: str | None) -> tuple[Counterpart, str]:
    """The record of a model of fairseq, and its model_type.

    Args:
        preferred: the model_type to choose if several fit; None for the first one.

    Raises:
        UserError: no model of `transformers` computes the same.
    """
    known = [each for each in counterparts.COUNTERPARTS if family in each.families]
    known.sort(key=lambda record: preferred not in record.types)
    problems = []
    for record in known:
        problems.append(problem := list(_problems(record, args)))
        if not problem:
            return record, sorted(record.types, key=lambda kind: kind != preferred)[0]
    if not problems:
        raise UserError(f"Hugging Face has no counterpart of {family.name} that is known here.")
    nearest = min(problems, key=len)
    raise UserError(
        f"Hugging Face has no model that computes the same "
        f"({'; '.join(problem.reason for problem in nearest)}): export this one with --to "
        f"safetensors{_other_training(nearest)}."
    )


class _Problem(NamedTuple):
    """A setting that no model of a kind has, as a clause, and the value that all of them have.

    value: False or None: the setting is off; ``...``: there are several values.
    """

    reason: str
    setting: str
    value: Any


def _problems(record: Counterpart, args: Any) -> Iterator[_Problem]:
    kind = next(iter(record.types.values()))
    for name, value in record.settings.items():
        found = getattr(args, name, None)
        if (found or None) != (value or None):
            yield _Problem(f"{name} is {found}, but {value} in its {kind}", name, value)
    fields: dict[str, tuple[str, Any]] = {}
    for setting, name, _, _, write in record.fields:
        found = getattr(args, setting, None)
        value = write(found)
        first, expected = fields.setdefault(name, (setting, value))
        if value is None:
            yield _Problem(f"{setting} is {found}, which its {kind} cannot have", setting, ...)
        elif value != expected:
            other = getattr(args, first)
            yield _Problem(f"{setting} is {found}, but {first} is {other}", setting, other)


def _other_training(problems: Sequence[_Problem]) -> str:
    """The flags of lightseq-train for a model that has none of the problems, as a clause."""
    flags = {"with": "", "without": ""}
    for _, setting, value in problems:
        if value is ...:
            return ""
        flag = f" --{setting.replace('_', '-')}"
        if not value:
            flags["without"] += flag
        else:
            flags["with"] += flag if value is True else f"{flag} {value}"
    clauses = [f"{word}{found}" for word, found in flags.items() if found]
    return f", or train a model {' and '.join(clauses)}"


def config(record: Counterpart, args: Any) -> dict[str, Any]:
    """The fields of config.json for settings of fairseq."""
    found = {name: value for name, value, _ in record.fixed}
    for setting, name, _, _, write in record.fields:
        found[name] = write(getattr(args, setting))
    return found
