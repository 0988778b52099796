"""The sizes of a model: a run that begins with a checkpoint takes them from the checkpoint."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from typing import Any

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.base.families import PREFIX
from lightseq_fairseq.cli.checks import Request
from lightseq_fairseq.cli.checks.checkpoints import initial, saved
from lightseq_fairseq.cli.words import registries
from lightseq_fairseq.cli.words.argv import flag_of, is_given

# They decide which parameters a model has and what it computes with them. Those of a classification
# head are not among them: fine-tuning may train a new head.
_SIZES = """
encoder_embed_dim encoder_ffn_embed_dim encoder_layers encoder_attention_heads
encoder_normalize_before encoder_learned_pos
decoder_embed_dim decoder_ffn_embed_dim decoder_layers decoder_attention_heads
decoder_normalize_before decoder_learned_pos decoder_input_dim decoder_output_dim
no_decoder_final_norm activation_fn layernorm_embedding no_scale_embedding
no_token_positional_embeddings share_all_embeddings share_decoder_input_output_embed
share_encoders share_encoder_embeddings share_decoders share_decoder_embeddings
untie_weights_roberta adaptive_input adaptive_input_cutoff adaptive_input_factor
adaptive_softmax_cutoff adaptive_softmax_factor tie_adaptive_weights tie_adaptive_proj
"""
# Setting -> the one with which fairseq sets it, too.
_IMPLIED = {
    "share_decoder_input_output_embed": "share_all_embeddings",
    "share_encoder_embeddings": "share_encoders",
    "share_decoder_embeddings": "share_decoders",
}
# A stack -> the setting of the number of its positions.
_POSITIONS = {
    "encoder": "max_source_positions",
    "decoder": "max_target_positions",
    "sentence_encoder": "max_positions",
}
_SIDES = ("max_source_positions", "max_target_positions")
# fairseq's, of settings that neither a flag nor an arch may set.
_DEFAULTS = {
    "max_source_positions": 1024, "max_target_positions": 1024, "max_positions": 512,
    "adaptive_input_factor": 4, "adaptive_softmax_factor": 4,
}  # fmt: skip


def from_checkpoint(request: Request) -> None:
    """Sets the sizes of a model of ours to those of the checkpoint that the run begins with.

    If a run resumes from its --save-dir with another arch, it keeps the sizes of the arch: the
    folder may contain another run. Loading the checkpoint then fails, if the sizes differ.

    Raises:
        UserError: a flag of the command sets another size.
    """
    from lightseq_fairseq.fairseq_compat.checkpoints import is_original_lightseq, settings_of

    args = request.args
    start, path = initial(args)
    if path is None or not registries.is_fused(args.arch):
        return
    checkpoint = saved(path)
    model = checkpoint.get("model", {})
    if is_original_lightseq(model):  # which is refused when it is loaded
        return
    trained = settings_of(checkpoint, "model")
    arch = str(trained.get("arch") or trained.get("_name"))
    takes = start != "--save-dir" or args.arch.removeprefix(PREFIX) == arch.removeprefix(PREFIX)
    flags = {action.dest: action.option_strings for action in request.parser._actions}
    taken: dict[str, Any] = {}
    for name, now, size in _differences(args, trained, model):
        flag = flag_of(name)
        if is_given(request.argv, flags.get(name, ())):
            otherwise = "start a new run in another --save-dir" if start == "--save-dir" else start
            raise UserError(
                f"{flag} is {now}, but {size} in {path}, with which this run begins: remove "
                f"{flag}, or {otherwise}."
            )
        if takes:
            setattr(args, name, size)
            taken[flag] = size
    for name in _SIDES if takes and hasattr(args, _SIDES[0]) else ():
        # Positions that are computed, and not learned: a command may set any number.
        is_free = not any(of_positions(parameter) == name for parameter in model)
        size, now = trained.get(name), getattr(args, name, None) or _DEFAULTS[name]
        if is_free and size not in (None, now) and not is_given(request.argv, flags.get(name, ())):
            setattr(args, name, size)
            taken[flag_of(name)] = size
    sizes = [flag if size is True else f"{flag} {size}" for flag, size in taken.items() if size]
    if sizes:
        request.say(f"taken from {path}: {', '.join(sizes)}")


def _differences(
    args: argparse.Namespace, trained: dict[str, Any], model: dict[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """Yields (setting, its value in the run, its value in the checkpoint) where they differ.

    trained: the checkpoint's settings of the model; old versions lack some.
    """
    from fairseq.models import ARCH_MODEL_NAME_REGISTRY, MODEL_DATACLASS_REGISTRY

    of_class = MODEL_DATACLASS_REGISTRY.get(ARCH_MODEL_NAME_REGISTRY.get(args.arch, args.arch))
    sizes = {name: trained[name] for name in _SIZES.split() if name in trained}
    for parameter, weight in model.items():
        if (name := of_positions(parameter)) is not None:
            sizes[name] = number_of_positions(len(weight))
    for name, size in sizes.items():
        now = getattr(args, name, None) or getattr(args, _IMPLIED.get(name, ""), None)
        if now is None:
            block = getattr(args, "tokens_per_sample", None)
            default = _DEFAULTS.get(name, getattr(of_class, name, None))
            now = (name in _POSITIONS.values() and block) or default
        # fairseq writes the number of the layers that --decoder-layers-to-keep keeps.
        kept = getattr(args, f"{name}_to_keep", None) or []
        count = len(kept.split(",") if isinstance(kept, str) else kept)
        if _plain(size) not in (_plain(now), count and _plain(count)):
            yield name, now, size


def _plain(value: Any) -> str:
    """A text for comparisons: fairseq writes 4 as 4.0, and False as None if a version lacks it."""
    return str(value or None).removesuffix(".0")


def of_positions(parameter: str) -> str | None:
    """The setting of the number of positions in a table of learned positions; None for another
    parameter."""
    found = re.search(r"(\w+)\.embed_positions\.weight$", parameter)
    return None if found is None else _POSITIONS.get(found[1])


def number_of_positions(rows: int) -> int:
    return rows - 2  # the table has two more rows: for numbers up to the pad's, 1
