"""The files of ``--bpe``: a wrong one is a `UserError`.

Otherwise each library has its own error. subword-nmt prints a line and ends Python.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from typing import Any

from lightseq_fairseq.base.errors import UserError

_FILES = {  # value of --bpe -> the settings that name its files
    "subword_nmt": ("bpe_codes",),
    "fastbpe": ("bpe_codes",),
    "sentencepiece": ("sentencepiece_model",),
    "byte_bpe": ("sentencepiece_model_path",),
    "gpt2": ("gpt2_encoder_json", "gpt2_vocab_bpe"),
    "hf_byte_bpe": ("bpe_vocab", "bpe_merges"),
}


def build_bpe(original: Callable[..., Any], cfg: Any, *more: Any, **keywords: Any) -> Any:
    """fairseq's; raises UserError if a file is not of the kind that --bpe reads."""
    name = getattr(cfg, "_name", None) or getattr(cfg, "bpe", cfg)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            return original(cfg, *more, **keywords)
    except (Exception, SystemExit) as error:
        if name not in _FILES or isinstance(error, (ImportError, OSError)):
            raise
        files = [f"--{each.replace('_', '-')} {getattr(cfg, each)}" for each in _FILES[name]]
        said = re.search("[Ee]rror: (.*)", printed.getvalue())
        reason = said[1] if said else str(error)
        raise UserError(
            f"--bpe {name} cannot read {' and '.join(files)} ({reason.strip().rstrip('.')}): "
            "use the files with which the data were split."
        ) from error
