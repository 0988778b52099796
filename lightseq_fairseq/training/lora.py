"""``--lora-rank``: train low-rank adapters of linear layers instead of the model's parameters.

A checkpoint has the adapters beside the model's parameters. A run with the flag resumes from them;
every other reader adds them to the weights when it loads the file.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.layers.adapter import FIRST_SITE, Adapter, adapters_of, merged
from lightseq_fairseq.training.freezing import matches

_LAYERS = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")
_SHORT = {name.removesuffix("_proj"): name for name in _LAYERS}
DEFAULT = "q,v"


def add(model: Any, common: Any) -> None:
    """Add the adapters of a run's flags to its model, and freeze all parameters but these and
    classification heads.

    common: fairseq's section, with ``lora_rank`` and so on if the flags are set.

    Raises:
        UserError: a name matches no linear layer.
    """
    if (rank := getattr(common, "lora_rank", None)) is None:
        return
    alpha, names = getattr(common, "lora_alpha", None), getattr(common, "lora_on", None) or DEFAULT
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and ".layers." in name and name.split(".")[-1] in _LAYERS
    }
    chosen: dict[str, nn.Linear] = {}
    for pattern in names.split(","):
        words = [_SHORT.get(word, word) for word in pattern.strip().split(".")]
        found = {n: layer for n, layer in layers.items() if matches(n, ".".join(words))}
        if not found:
            raise UserError(
                f"--lora-on {pattern} matches no linear layer of the model: name some of "
                f"{', '.join(_SHORT)}, or parts of names such as decoder.layers.*.self_attn.q."
            )
        chosen.update(found)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("classification_heads." in name)
    dropout = getattr(common, "lora_dropout", None) or 0.0
    for place, layer in enumerate(layer for name, layer in layers.items() if name in chosen):
        layer.lora = Adapter(layer, rank, alpha or 2.0 * rank, dropout, FIRST_SITE + place)
    model.flatten()


def fit(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """A loaded state dict as the model needs it.

    If the model has no adapters, those of the file are added to its weights. If the file has none,
    the model's own begin.
    """
    mine = adapters_of(model)
    if not mine:
        return merged(state)
    if any(".lora." in name for name in state):
        return state
    own = {
        f"{name}.{key}": value
        for name, adapter in mine.items()
        for key, value in adapter.state_dict().items()
    }
    return {**state, **own}
