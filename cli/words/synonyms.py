"""The nearest name to one that does not exist: by the words of Hugging Face, or by its letters."""

from __future__ import annotations

import difflib
from collections.abc import Collection

# Hugging Face's name of a setting or a task -> fairseq's.
_HUGGING_FACE = {
    "max_new_tokens": "max_len_b", "max_length": "max_len_b", "min_length": "min_len",
    "min_new_tokens": "min_len", "num_beams": "beam", "num_return_sequences": "nbest",
    "do_sample": "sampling", "top_k": "sampling_topk", "top_p": "sampling_topp",
    "length_penalty": "lenpen", "torch_dtype": "bf16", "dtype": "bf16",
    "epochs": "max_epoch", "num_epochs": "max_epoch", "num_train_epochs": "max_epoch",
    "max_steps": "max_update", "learning_rate": "lr", "lr_scheduler_type": "lr_scheduler",
    "optim": "optimizer", "warmup_steps": "warmup_updates", "max_grad_norm": "clip_norm",
    "per_device_train_batch_size": "batch_size", "train_batch_size": "batch_size",
    "per_device_eval_batch_size": "batch_size_valid", "gradient_checkpointing":
    "checkpoint_activations", "gradient_accumulation_steps": "update_freq",
    "label_smoothing_factor": "label_smoothing", "output_dir": "save_dir",
    "resume_from_checkpoint": "restore_file", "logging_steps": "log_interval",
    "logdir": "tensorboard_logdir", "logging_dir": "tensorboard_logdir",
    "num_labels": "num_classes", "dataloader_num_workers": "num_workers",
    "save_steps": "save_interval_updates", "save_total_limit": "keep_last_epochs",
    "device_map": "device", "model_name_or_path": "finetune_from_model",
    "fill_mask": "masked_lm", "text_classification": "sentence_prediction",
    "sequence_classification": "sentence_prediction", "text_generation": "language_modeling",
    "causal_lm": "language_modeling",
}  # fmt: skip


def synonym(name: str, known: Collection[str]) -> str | None:
    """The name in ``known`` that means the same as Hugging Face's ``name``; both may be flags."""
    word = name.removeprefix("--").replace("-", "_")
    found = _HUGGING_FACE.get(word)
    if found is not None and name.startswith("--"):
        found = "--" + found.replace("_", "-")
    return found if found in known else None


def nearest(name: str, known: Collection[str], most: int = 1, cutoff: float = 0.7) -> list[str]:
    """At most ``most`` names of ``known``: the synonym, or else those with similar letters."""
    found = synonym(name, known)
    return [found] if found else difflib.get_close_matches(name, sorted(known), most, cutoff)
