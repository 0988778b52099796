"""Writes the adapters of a checkpoint as `peft` stores them for models of Hugging Face."""

from __future__ import annotations

import copy
import json
import re
import shutil
from pathlib import Path
from typing import Any

from torch import Tensor

from lightseq_fairseq.base import files
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.checkpoints import matching, to_huggingface
from lightseq_fairseq.checkpoints.trained import Trained

_PREFIX = "base_model.model."
_SEQUENCES = ("ForConditionalGeneration", "MTModel")  # ends of names of classes


def write(trained: Trained, output: Path) -> None:
    """Write the folder ``output``, which ``peft.PeftModel.from_pretrained`` adds to the model that
    the run began from, as --to huggingface or its author has written it.

    Raises:
        UserError: the checkpoint has no adapters, no model of `transformers` computes the same or
            has layers of its own for them, or ``output`` cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    if not trained.adapters:
        raise UserError(
            "The checkpoint has no adapters, which --lora-rank trains: export it with --to "
            "huggingface."
        )
    args = copy.copy(trained.args)
    to_huggingface.with_positions(args, trained.model)
    record, _ = matching.of_settings(trained.family, args, None)
    if record.fused:
        raise UserError(
            "Hugging Face's class has one layer for q, k and v, so adapters of each do not fit: "
            "export the merged model with --to huggingface."
        )
    layers = [n.removesuffix(".lora.A") for n in trained.adapters if n.endswith(".lora.A")]
    theirs = {
        layer: str(record.theirs(f"{layer}.weight")).removesuffix(".weight") for layer in layers
    }
    tensors: dict[str, Tensor] = {
        f"{_PREFIX}{theirs[layer]}.lora_{part}.weight": trained.adapters[f"{layer}.lora.{part}"]
        for layer in layers
        for part in "AB"
    }
    heads = {
        str(record.theirs(re.sub(r"^classification_heads\.\w+", to_huggingface.HEAD, name))): value
        for name, value in trained.model.state_dict().items()
        if name.startswith("classification_heads.")
    }
    tensors |= {f"{_PREFIX}{name}": value for name, value in heads.items()}
    rank = len(trained.adapters[f"{layers[0]}.lora.A"])
    is_pair = not heads and record.classes[0].endswith(_SEQUENCES)
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if heads else "SEQ_2_SEQ_LM" if is_pair else None,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": float(trained.adapters[f"{layers[0]}.lora.scale"]) * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": sorted(theirs.values()),
        "modules_to_save": sorted({name.split(".")[0] for name in heads}) or None,
    }
    with files.placed(output) as place:
        place.mkdir()
        text = json.dumps(config, indent=2, sort_keys=True)
        (place / "adapter_config.json").write_text(f"{text}\n")
        weights = place / "adapter_model.safetensors"
        try:
            save_file(
                {k: v.float().contiguous() for k, v in tensors.items()}, weights, {"format": "pt"}
            )
        except SafetensorError as error:
            raise OSError(str(error)) from error
        shutil.copymode(place / "adapter_config.json", weights)
