"""``--lora-rank``: train low-rank adapters of linear layers instead of the model's parameters.

A checkpoint has the adapters beside the model's parameters. A run with the flag resumes from them;
every other reader adds them to the weights when it loads the file.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor, nn

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.layers.adapter import FIRST_SITE, Adapter, merged
from lightseq_fairseq.training.freezing import matches

logger = logging.getLogger(__name__)

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


def fit(state: dict[str, Tensor], model: nn.Module, begins: bool) -> dict[str, Tensor]:
    """A loaded state dict as the model needs it.

    The file's adapters train further if the model has the same. Otherwise a run that begins with
    the file adds them to the weights, and the model's own begin.

    begins: the run does not resume that of the file.

    Raises:
        UserError: the run resumes, but its adapters are others.
    """
    theirs, mine = (
        {name: value for name, value in each.items() if ".lora." in name}
        for each in (state, model.state_dict())
    )
    if _kinds(theirs) == _kinds(mine):
        return state
    if not begins:
        raise UserError(
            f"The adapters of the checkpoint ({_told(theirs)}) are not those of this run "
            f"({_told(mine)}): to resume, set --lora-rank, --lora-alpha and --lora-on as before. "
            "Or begin a run in another --save-dir with --finetune-from-model, which adds the "
            "checkpoint's adapters to the weights."
        )
    if theirs:
        logger.info("adapters of the checkpoint are added to its weights (%s)", _told(theirs))
    return {**merged(state), **mine}


def _kinds(adapters: dict[str, Tensor]) -> dict[str, Any]:
    """Name of a tensor -> its shape, or the scale itself."""
    return {n: x.shape if x.dim() else float(x) for n, x in adapters.items()}


def _told(adapters: dict[str, Tensor]) -> str:
    """Rank, alpha and kinds of layers of the adapters in a state dict, in words."""
    layers = [name.removesuffix(".lora.A") for name in adapters if name.endswith(".lora.A")]
    if not layers:
        return "none"
    rank = len(adapters[f"{layers[0]}.lora.A"])
    alpha = float(adapters[f"{layers[0]}.lora.scale"]) * rank
    kinds = ", ".join(dict.fromkeys(layer.split(".")[-1] for layer in layers))
    return f"rank {rank}, alpha {alpha:g}, {len(layers)} layers: {kinds}"
