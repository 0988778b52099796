"""The tokenizer that a data folder contains: commands that read text use it without a flag."""

from __future__ import annotations

import os

from lightseq_fairseq.base import tokenizer
from lightseq_fairseq.cli.checks import Request


def known_tokenizer(request: Request) -> None:
    """Sets --bpe to the data folder's tokenizer, unless the command has --bpe or --tokenizer."""
    from fairseq import utils

    args = request.args
    folders = utils.split_paths(getattr(args, "data", None) or "")
    if args.bpe is not None or args.tokenizer is not None or not folders:
        return
    folder = os.path.join(folders[0], tokenizer.FOLDER)
    if os.path.isfile(os.path.join(folders[0], tokenizer.JSON)):  # the folder of an import
        folder = folders[0]
    if os.path.isdir(folder):
        args.bpe, args.tokenizer_folder = "tokenizer_folder", folder
