"""The tokenizer that a data folder contains: commands that read text use it without a flag."""

from __future__ import annotations

from pathlib import Path

from lightseq_fairseq.base import tokenizer
from lightseq_fairseq.cli.checks import Request


def known_tokenizer(request: Request) -> None:
    """Sets --bpe to the data folder's tokenizer, unless the command has --bpe or --tokenizer."""
    from fairseq import utils

    args = request.args
    folders = utils.split_paths(getattr(args, "data", None) or "")
    if args.bpe is not None or args.tokenizer is not None or not folders:
        return
    if (folder := tokenizer.in_data(Path(folders[0]))) is not None:
        args.bpe, args.tokenizer_folder = "tokenizer_folder", str(folder)
