"""Native fairseq names of our ``ls_`` names, and the reverse.

Checkpoints of lightseq-train never mention this package: ``ls_`` names are saved as native names.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from fairseq.criterions import CRITERION_REGISTRY
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY
from fairseq.optim import OPTIMIZER_REGISTRY

from lightseq_fairseq import plugins  # noqa: F401  (registers our names)
from lightseq_fairseq.base import families
from lightseq_fairseq.base.families import PREFIX
from lightseq_fairseq.plugins.unsupported import unsupported_option

# Settings of lightseq-train that fairseq does not know.
_LORA = ("lora_rank", "lora_alpha", "lora_dropout", "lora_on")
_OWN_SETTINGS = ("pack_tokens", "fp8", "freeze", *_LORA)
_REGISTRIES = {
    "arch": ARCH_MODEL_REGISTRY,
    "criterion": CRITERION_REGISTRY,
    "optimizer": OPTIMIZER_REGISTRY,
}


def native_name(kind: str, name: str) -> str:
    """The native fairseq name of an ``ls_`` component; other names are returned unchanged.

    Args:
        kind: "arch", "criterion" or "optimizer".
        name: as on the command line, for example ``ls_transformer_iwslt_de_en``.
    """
    registry = _REGISTRIES[kind]
    stripped = name[len(PREFIX) :]
    if name.startswith(PREFIX) and name in registry and stripped in registry:
        return stripped
    # An architecture that a user has registered for one of our models. The file holds all options
    # that this architecture has set, so fairseq's base architecture of the model can replace it: a
    # base architecture only fills in missing options.
    extended = registry.get(name, object) if kind == "arch" else object
    # A model that extends another is registered after it.
    models = reversed(MODEL_REGISTRY.items())
    known = (each for each, model in models if issubclass(extended, model))
    ours = next((each for each in known if each.startswith(PREFIX)), name)
    return ours.removeprefix(PREFIX) if ours.removeprefix(PREFIX) in MODEL_REGISTRY else name


def native_cfg(cfg: Any, kind: str = "") -> Any:
    """A copy of a configuration with native names for all ``ls_`` names, and without our settings.

    Args:
        cfg: fairseq's configuration, or a section of it, as nested dicts. A section may be a
            Namespace, as ``cfg["model"]`` of an architecture from the command line.
        kind: of the component that a section configures, see `native_name`.
    """
    if isinstance(cfg, Namespace):
        return Namespace(**native_cfg(vars(cfg), kind))
    if not isinstance(cfg, dict):
        return cfg
    renamed = {}
    for key, value in cfg.items():
        if key in _OWN_SETTINGS:
            continue
        if isinstance(value, str):
            of_kind = kind if key == "_name" else key
            renamed[key] = native_name(of_kind, value) if of_kind in _REGISTRIES else value
        else:
            renamed[key] = native_cfg(value, "arch" if key == "model" else str(key))
    return renamed


def uses_ls(cfg: Any) -> bool:
    """Whether architecture, criterion or optimizer of a fairseq configuration is one of ours."""
    for kind, section in zip(_REGISTRIES, ("model", "criterion", "optimizer"), strict=True):
        node = getattr(cfg, section, None)
        name = getattr(node, "_name", None) or getattr(node, kind, None)
        if name and (name.startswith(PREFIX) or native_name(kind, name) != name):
            return True
    return False


def ls_arch(args: Any) -> tuple[str | None, str | None]:
    """The ``ls_`` architecture for the options of a native model.

    Args:
        args: the model's options in a checkpoint, a Namespace or, if the model is configured by a
            dataclass, a DictConfig; ``_name`` or ``arch`` is its architecture.

    Returns:
        (name, None) if our model supports all options; (None, reason) if it does not, where the
        reason names the option; (None, None) if we have no counterpart of the model.
    """
    arch = getattr(args, "_name", None) or getattr(args, "arch", None) or ""
    name, model = PREFIX + arch, ARCH_MODEL_REGISTRY.get(arch)
    family = families.of_saved(model)
    if family is not None and not family.native:
        name = arch
    if family is None or name not in ARCH_MODEL_REGISTRY:
        return None, None
    unsupported = unsupported_option(args, family.supports)
    if unsupported is None:
        return name, None
    return None, f"{name} does not support {unsupported.flag} ({unsupported.reason})"
