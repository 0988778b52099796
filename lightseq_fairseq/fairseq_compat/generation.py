"""Repairs of ``--replace-unk`` and ``--no-repeat-ngram-size`` in 0.12.2."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from fairseq import utils
from fairseq.data import data_utils
from fairseq.ngram_repeat_block import NGramRepeatBlock
from torch import Tensor

from lightseq_fairseq.base.errors import UserError

# The value that 0.12.2 gives to "--replace-unk" without a file: the separator of subword-nmt.
NO_FILE = "@@ "


def cannot_read_alignments() -> bool:
    try:
        utils.replace_unk("<unk>", "word", [(0, 0)], {}, "<unk>")
    except TypeError:
        return True
    return False


def load_align_dict(original: Callable[[Any], Any], replace_unk: Any) -> Any:
    # Without this repair: FileNotFoundError: '@@ '.
    return original("" if replace_unk == NO_FILE else replace_unk)


def build_generator(
    original: Callable[..., Any], self: Any, models: Any, args: Any, *others: Any, **options: Any
) -> Any:
    # 0.12.2 computes alignments only for --print-alignment. Without them the first <unk> in a
    # translation raises "IndexError: index 0 is out of bounds for dimension 0 with size 0".
    wanted = getattr(args, "replace_unk", None) is not None
    if wanted and not getattr(args, "print_alignment", None):
        args = copy.copy(args)
        args.print_alignment = "hard"
    return original(self, models, args, *others, **options)


def replace_unk(
    original: Callable[..., Any], hypo_str: str, src_str: str, alignment: Any, *rest: Any
) -> str:
    # With alignments, 0.12.2 raises "TypeError: list indices must be integers or slices, not
    # tuple". Hard alignments are pairs (source, target), soft ones are rows of weights. replace_unk
    # needs the source word of each target word.
    if not alignment:  # an empty source, or no attention: there is no word to copy
        return hypo_str
    if isinstance(alignment[0], tuple):
        source_of = {target: source for source, target in alignment}
    else:
        weights = [[float(weight) for weight in row] for row in alignment]
        source_of = {target: row.index(max(row)) for target, row in enumerate(weights)}
    if max(source_of.values()) > len(src_str.split()):  # index len(...) is </s>
        raise UserError(
            "--replace-unk found fewer source words than the model has read, because subwords were "
            "joined: remove --bpe and --tokenizer (with --native also --remove-bpe), and "
            "apply them to the translations."
        )
    return str(original(hypo_str, src_str, source_of, *rest))


def post_process_prediction(
    original: Callable[..., Any], hypo_tokens: Any, src_str: str, alignment: Any, align_dict: Any,
    tgt_dict: Any, remove_bpe: str | None = None, *rest: Any, **options: Any,
) -> Any:  # fmt: skip
    # fairseq joins subwords (--remove-bpe) before --replace-unk counts the words, but the alignment
    # refers to subwords. Wrong source words are copied, and an <unk> joined to its neighbour stays.
    # So replace first, then join.
    replaces = align_dict is not None and remove_bpe is not None
    subwords = None if replaces else remove_bpe
    found = original(
        hypo_tokens, src_str, alignment, align_dict, tgt_dict, subwords, *rest, **options
    )
    if not replaces:
        return found
    text = data_utils.post_process(found[1], remove_bpe)
    return tgt_dict.encode_line(text, add_if_not_exist=True), text, alignment


def repeats_ngrams() -> bool:
    # Three tokens, 5 6 5, in a longer buffer: 6 must be blocked as the next token.
    tokens, scores = torch.tensor([[5, 6, 5, 1, 1]]), torch.zeros(1, 8)
    blocked = NGramRepeatBlock(2, use_extension=False)(tokens, scores, 1, 1, 2)
    return bool(blocked[0, 6].isfinite())


def block_repeats(
    self: Any, tokens: Tensor, lprobs: Tensor, bsz: int, beam_size: int, step: int
) -> Tensor:
    # Without its CUDA extension, which pip does not build, 0.12.2 takes the last n-gram from the
    # end of the buffer, where there are only pads: "--no-repeat-ngram-size" blocks nothing. Pass
    # only the tokens so far. TorchScript compiles this function, too.
    if self.use_extension:
        return self.call_cuda_extension(tokens, lprobs, bsz, beam_size, step)
    return self._no_repeat_ngram(tokens[:, : step + 1], lprobs, bsz, beam_size, step)
