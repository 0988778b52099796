"""Repairs of ``--task translation_from_pretrained_bart`` in 0.12.2, which could not run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from fairseq.tasks import FairseqTask
from fairseq.tasks.translation_from_pretrained_bart import TranslationFromPretrainedBARTTask
from torch import Tensor


def task_lacks_args() -> bool:
    source = inspect.getsource(TranslationFromPretrainedBARTTask)
    return "self.args." in source and "self.args =" not in source


def __init__(original: Callable[..., None], self: Any, args: Any, *dictionaries: Any) -> None:
    # Without this repair: AttributeError: ... object has no attribute 'args'.
    self.args = args
    original(self, args, *dictionaries)


def build_generator(
    original: Callable[..., Any], self: Any, models: Any, args: Any, seq_gen_cls: Any = None,
    extra_gen_cls_kwargs: dict[str, Any] | None = None, **options: Any,
) -> Any:  # fmt: skip
    # fairseq's own has beam search alone: it ignores --sampling, --lm-path, --print-alignment ...
    if getattr(args, "score_reference", False):
        return original(self, models, args)
    eos = self.tgt_dict.index(f"[{self.args.target_lang}]")
    extra = {**(extra_gen_cls_kwargs or {}), "eos": eos}
    return FairseqTask.build_generator(
        self, models, args, seq_gen_cls, extra_gen_cls_kwargs=extra, **options
    )


def build_dataset_for_inference(
    original: Callable[..., Any], self: Any, src_tokens: Sequence[Tensor], src_lengths: Any,
    constraints: Any = None,
) -> Any:  # fmt: skip
    # A line that is typed gets the tokens and the length of a line that is binarised.
    if self.args.prepend_bos:
        bos = torch.tensor([self.source_dictionary.bos()])
        src_tokens = [torch.cat([bos.to(tokens), tokens]) for tokens in src_tokens]
    lengths = [len(tokens) + 1 for tokens in src_tokens]
    return original(self, src_tokens, lengths, constraints)
