"""Reorders Adam's state from a file whose parameters differ from the model's in name or order.

The state holds no names: entry i, or part i of a flat vector, belongs to parameter i. Files from
before fairseq 0.10 can have other parameters; before 0.9 query, key and value were stacked in one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightseq_fairseq.base.errors import UserError

_BUFFERS = ("version", "_float_tensor", "embed_positions.weights")
_MOMENTS = ("exp_avg", "exp_avg_sq")


def follow_model(state: dict[str, Any], model: Any) -> None:
    """Put the optimizer state of a loaded file in the order of ``model``'s parameters.

    The model's ``upgrade_state_dict`` converts the moments as it converts the parameters.

    Args:
        state: the result of fairseq's ``load_checkpoint_to_cpu``, before the model is loaded;
            "last_optimizer_state" is replaced if the orders differ.
        model: a fairseq model. As in loading, its ``upgrade_state_dict`` may remove layers from the
            model that an old file does not have.

    Raises:
        UserError: the optimizer state does not belong to the file's parameters.
    """
    optimizer, values = state.get("last_optimizer_state"), state["model"]
    if not isinstance(optimizer, dict) or len(optimizer.get("param_groups", ())) != 1:
        return
    # A state dict lists names in the order of parameters(), but it lists tied parameters twice.
    names = [name for name in values if not name.endswith(_BUFFERS)]
    versions = {name: value for name, value in values.items() if name.endswith("version")}

    def upgraded(tensors: dict[str, Tensor]) -> list[Tensor] | None:
        """Upgrade ``tensors`` (by old name); return them in the order of the model's parameters.

        None if a parameter of the model is missing.
        """
        tensors = {**versions, **tensors}
        model.upgrade_state_dict(tensors)
        wanted = [name for name, _ in model.named_parameters()]
        return [tensors[name] for name in wanted] if set(wanted) <= tensors.keys() else None

    marks = {n: torch.tensor(i).expand(values[n].shape) for i, n in enumerate(names)}
    places = upgraded(marks)
    if places is None:
        return  # the file is of another model: loading it will raise an error
    origins = [int(place.view(-1)[0]) for place in places]
    counted = sorted(set(origins))
    if origins == counted:
        return  # the order is the model's already
    entries = dict(
        zip(counted, _entries(optimizer, [values[names[i]] for i in counted]), strict=True)
    )
    moments = [upgraded({names[i]: entries[i][kind] for i in counted}) or [] for kind in _MOMENTS]
    new = [
        {**entries[origin], **dict(zip(_MOMENTS, found, strict=True))}
        for origin, *found in zip(origins, *moments, strict=True)
    ]
    if len(optimizer["state"]) == 1:
        vectors = {kind: torch.cat([entry[kind].flatten() for entry in new]) for kind in _MOMENTS}
        new = [{**new[0], **vectors}]
    group = {**optimizer["param_groups"][0], "params": list(range(len(new)))}
    state["last_optimizer_state"] = {
        **optimizer, "state": dict(enumerate(new)), "param_groups": [group]
    }  # fmt: skip


def _entries(optimizer: dict[str, Any], parameters: list[Tensor]) -> list[dict[str, Any]]:
    """Adam's state as one entry per parameter, with the moments in the parameter's shape."""
    found = [optimizer["state"].get(i, {}) for i in optimizer["param_groups"][0]["params"]]
    sizes = [parameter.numel() for parameter in parameters]
    if len(found) == 1:
        whole = [found[0].get(kind, torch.empty(0)) for kind in _MOMENTS]
        if all(vector.numel() == sum(sizes) for vector in whole):
            cuts = zip(*(vector.split(sizes) for vector in whole), strict=True)
            found = [{**found[0], **dict(zip(_MOMENTS, cut, strict=True))} for cut in cuts]
    if [tuple(e[kind].numel() for kind in _MOMENTS if kind in e) for e in found] != [
        (size,) * len(_MOMENTS) for size in sizes
    ]:
        raise UserError(
            "The optimizer state in the checkpoint does not match its parameters, which have the "
            "names of an older fairseq: reset the optimizer with --reset-optimizer."
        )
    return [
        {**entry, **{kind: entry[kind].view(like.shape) for kind in _MOMENTS}}
        for entry, like in zip(found, parameters, strict=True)
    ]
