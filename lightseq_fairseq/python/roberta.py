"""A trained RoBERTa from Python, by fairseq's interface and with our layers.

fairseq and torch are imported when a checkpoint is loaded.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from collections.abc import Callable
from typing import Any

from lightseq_fairseq.base.errors import UserError

_WHOLE_WORDS = ("subword_nmt", "fastbpe")  # bpe: tokens that begin a word have no mark


def _require(*packages: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f'bpe="gpt2" needs packages that are not installed: run pip install '
            f"{' '.join(missing)}."
        )


class RobertaModel:
    """Loads RoBERTa, CamemBERT and XLM-R as fairseq's ``RobertaModel`` does."""

    @staticmethod
    def from_pretrained(
        model_name_or_path: str | os.PathLike[str],
        checkpoint_file: str = "model.pt",
        data_name_or_path: str | os.PathLike[str] = ".",
        bpe: str | None = "gpt2",
        **options: Any,
    ) -> Any:
        """fairseq's ``RobertaHubInterface`` of a checkpoint, with our layers.

        The arguments are those of fairseq's ``RobertaModel.from_pretrained``, and the result has
        ``fill_mask``, ``predict``, ``extract_features`` and so on. As in fairseq, call its
        ``eval()`` to turn dropout off. Loading changes nothing for the rest of the program.

        Args:
            model_name_or_path: the folder with the checkpoint.
            checkpoint_file: the name of the checkpoint, which lightseq-train or fairseq wrote.
            data_name_or_path: the folder with the dictionaries; if it begins with a dot, it is
                relative to the first folder.
            bpe: fairseq's name of the subwords; with None, methods take numbers of tokens only.
            options: settings to override, as in fairseq.

        Raises:
            UserError: the folder does not exist, the checkpoint contains another model or does not
                fit the dictionary, ``bpe`` is unknown, or a file or package is missing.
        """
        from lightseq_fairseq.checkpoints import models  # prepares fairseq

        # isort: split
        from fairseq.data.encoders import BPE_REGISTRY
        from fairseq.models.roberta import RobertaModel as Native

        if bpe == "gpt2":
            _require("requests", "regex")
        places = (os.fspath(model_name_or_path), checkpoint_file, os.fspath(data_name_or_path))
        folder, _, data = places
        data = os.path.join(folder, data) if data.startswith(".") else data
        for place, content in ((folder, checkpoint_file), (data, "the dictionaries")):
            # fairseq also takes the names of its own models, and URLs.
            if not (os.path.exists(place) or "://" in place or folder in Native.hub_models()):
                raise UserError(
                    f"The folder {place} does not exist: pass the folder with {content}."
                )
        if bpe is not None and bpe not in BPE_REGISTRY:
            names = ", ".join(sorted(BPE_REGISTRY))
            raise UserError(
                f"There are no subwords named {bpe}: set bpe to None or to one of {names}."
            )
        try:
            with models.building(native=False):
                found = Native.from_pretrained(*places, bpe, **options)
        except UserError as error:
            raise UserError(str(error)) from None  # without the lines of fairseq's code
        except OSError as error:
            not_found = re.match("Model file not found: (.*)", str(error))
            missing = error.filename or (not_found and not_found[1])
            if missing is None:  # the network, for example
                raise
            raise UserError(
                f"{missing} cannot be read: pass the folder with {checkpoint_file}, and the folder "
                "with the dictionaries that lightseq-preprocess wrote."
            ) from None
        if not isinstance(found.model, Native):
            raise UserError(
                f"{checkpoint_file} of {places[0]} contains no RoBERTa but "
                f"{type(found.model).__name__}: choose another checkpoint."
            )
        if found.bpe is None:
            found.bpe = _NoSubwords()
        if bpe in _WHOLE_WORDS:
            found.fill_mask = functools.partial(_fill_mask, found.fill_mask)
        return found


class _NoSubwords:
    """In place of the subwords that ``bpe=None`` does not load."""

    def encode(self, text: str) -> str:
        raise UserError(
            "This model was loaded without subwords, so it takes only numbers of tokens: pass bpe, "
            'for example bpe="subword_nmt" with bpe_codes, to from_pretrained().'
        )

    decode = encode


def _fill_mask(
    fill_mask: Callable[..., list[tuple[str, float, str]]], masked_input: str, topk: int = 5
) -> list[tuple[str, float, str]]:
    """fairseq's ``fill_mask``, which removes the space before ``<mask>``: it expects that a token
    that begins a word contains this space."""
    found = fill_mask(masked_input, topk)
    return [(masked_input.replace("<mask>", token), score, token) for _, score, token in found]
