"""A trained RoBERTa from Python, by fairseq's interface and with our layers.

fairseq and torch are imported when a checkpoint is loaded.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightseq_fairseq.base import tokenizer
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.base.run_folder import checkpoint_in
from lightseq_fairseq.cli.checks import Request, messages
from lightseq_fairseq.cli.words import synonyms
from lightseq_fairseq.python.pretrained import Device, StrPath, device_of, in_python, trained_on

if TYPE_CHECKING:
    from lightseq_fairseq.python.roberta_interface import RobertaInterface

_WHOLE_WORDS = ("subword_nmt", "fastbpe")  # bpe: tokens that begin a word have no mark
_BY_DATA = "by the data"
# Options of `Translator` that a RoBERTa does not have, and what to do instead.
_NO_OPTION = {
    "fp16": "call half() of the model",
    "bf16": "call bfloat16() of the model",
    "torch_dtype": "call half() or bfloat16() of the model",
    "data": "pass data_name_or_path",
    "native": "use fairseq.models.roberta.RobertaModel",
}
_FILES = ("bpe_codes", "sentencepiece_model", "gpt2_encoder_json", "gpt2_vocab_bpe", "bpe_merges",
          "bpe_vocab")  # fmt: skip
_DICTIONARIES = ("dict.txt", os.path.join("input0", "dict.txt"))


class RobertaModel:
    """Loads RoBERTa, CamemBERT and XLM-R as fairseq's ``RobertaModel`` does."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """Raises UserError: `from_pretrained` makes a model."""
        raise UserError(
            "RobertaModel is made from a checkpoint: call RobertaModel.from_pretrained()."
        )

    @staticmethod
    def from_pretrained(
        model_name_or_path: StrPath,
        checkpoint_file: StrPath | None = None,
        data_name_or_path: StrPath | None = None,
        bpe: str | None = _BY_DATA,
        *,
        device: Device = None,
        **options: Any,
    ) -> RobertaInterface:
        """fairseq's ``RobertaHubInterface`` of a checkpoint, with our layers.

        The arguments are those of fairseq's ``RobertaModel.from_pretrained``, and the result has
        ``fill_mask``, ``predict``, ``extract_features`` and so on. The first two arguments may also
        be those of `Translator`: a checkpoint or the folder of a run, and the data. As in fairseq,
        call ``eval()`` to turn dropout off. Loading changes nothing for the rest of the program.

        Args:
            model_name_or_path: the folder with the checkpoint, or the checkpoint.
            checkpoint_file: the name of the checkpoint, which lightseq-train or fairseq wrote.
                None: model.pt, or else checkpoint_best.pt or checkpoint_last.pt.
            data_name_or_path: the folder with the dictionaries; if it begins with a dot, it may be
                relative to the first folder. None: the first folder if it has them, or else the
                folder that the model was trained on.
            bpe: fairseq's name of the subwords; with None, methods take numbers of tokens only. By
                default the tokenizer that the data have, as in `Translator`; if there is none, gpt2
                if the dictionary has the numbers of GPT-2, else None.
            device: as in `Translator.from_pretrained`; None: the CPU, as in fairseq.
            options: settings of the model, the task and the subwords to override, as in fairseq.
                Also ``tokenizer`` and its settings, such as "moses" with ``source_lang``: it splits
                texts before their subwords.

        Raises:
            UserError: the folder does not exist, the checkpoint contains another model or does not
                fit the dictionary, an option is unknown, or a file or package is missing.
        """
        from lightseq_fairseq.checkpoints import models  # prepares fairseq

        # isort: split
        from fairseq import hub_utils
        from fairseq.data.encoders import BPE_REGISTRY
        from fairseq.models.roberta import RobertaModel as Native

        from lightseq_fairseq.python.roberta_interface import RobertaInterface

        place = device_of(device)
        folder, file, data = map(
            _text, (model_name_or_path, checkpoint_file, data_name_or_path)
        )  # fmt: skip
        assert folder is not None
        if bpe not in (None, _BY_DATA, *BPE_REGISTRY):
            names = ", ".join(sorted(BPE_REGISTRY))
            raise UserError(
                f"There are no subwords named {bpe}: set bpe to None or to one of {names}."
            )
        # fairseq also takes the names of its own models, and URLs.
        if "://" in folder or folder in Native.hub_models():
            file, data = file or "model.pt", data or "."
            bpe = "gpt2" if bpe == _BY_DATA else bpe
        else:
            folder, file, data = _places(folder, file, data, options)
            bpe = _subwords(bpe, data, options)
        _check_files(options)
        if bpe == "gpt2":
            _require("requests", "regex")
        try:
            with models.building(native=False):
                found = hub_utils.from_pretrained(
                    folder, file, data,
                    archive_map=Native.hub_models(), bpe=bpe, load_checkpoint_heads=True, **options,
                )  # fmt: skip
            model = found["models"][0]
            interface = RobertaInterface(found["args"], found["task"], model)
        except Exception as error:
            sentence = _sentence(error, bpe, Request([data], command="interactive"))
            if sentence is None:
                raise
            raise UserError(in_python(sentence, "RobertaModel")) from None
        interface.has_marks = bpe not in _WHOLE_WORDS
        return interface if place is None else interface.to(place)


def _text(place: StrPath | None) -> str | None:
    return None if place is None else os.fspath(place)


def _places(
    folder: str, file: str | None, data: str | None, options: Iterable[str]
) -> tuple[str, str, str]:
    """The folder, the name of the checkpoint and the folder of the data.

    Raises:
        UserError: one does not exist, or there is an option that the checkpoint does not have.
    """
    from fairseq.models import ARCH_MODEL_REGISTRY
    from fairseq.models.roberta import RobertaModel as Native

    from lightseq_fairseq.fairseq_compat.checkpoints import open_checkpoint, settings_of

    # As for Translator, the second argument may be the data.
    if file is not None and data is None and (os.path.isdir(file) or not file.endswith(".pt")):
        file, data = None, file
    if not os.path.exists(folder):
        raise UserError(
            f"The folder {folder} does not exist: pass the folder with {file or 'the checkpoint'}."
        )
    if os.path.isfile(folder):
        folder, file = os.path.split(os.path.abspath(folder))
    if file is None:
        is_there = os.path.exists(os.path.join(folder, "model.pt"))
        file = "model.pt" if is_there else os.path.basename(checkpoint_in(folder))
    path = os.path.join(folder, file)
    if not os.path.isfile(path):
        raise UserError(f"{path} cannot be read: pass the folder with {file}.")
    checkpoint = open_checkpoint(path)
    trained, sizes = settings_of(checkpoint, "task"), settings_of(checkpoint, "model")
    arch = sizes.get("arch") or sizes.get("_name")
    if not issubclass(ARCH_MODEL_REGISTRY.get(arch, Native), Native):
        raise UserError(
            f"{path} contains no RoBERTa but the arch {arch}: choose another checkpoint."
        )
    _check_options(options, {*trained, *sizes})
    if data is None:
        has_them = any(os.path.exists(os.path.join(folder, name)) for name in _DICTIONARIES)
        data = folder if has_them else trained_on(trained, path)
    elif data.startswith("."):
        inside = os.path.join(folder, data)
        data = inside if os.path.isdir(inside) else data
    if not os.path.isdir(data):
        raise UserError(f"The folder {data} does not exist: pass the folder with the dictionaries.")
    if not any(os.path.exists(os.path.join(data, name)) for name in _DICTIONARIES):
        raise UserError(
            f"{os.path.join(data, 'dict.txt')} cannot be read: pass the folder with the "
            "dictionaries that lightseq-preprocess wrote."
        )
    return folder, file, os.path.abspath(data)


def _check_files(options: dict[str, Any]) -> None:
    """Raises UserError for a file of the subwords that does not exist."""
    for name in _FILES:
        path = options.get(name)
        if isinstance(path, str) and "://" not in path and not os.path.exists(path):
            raise UserError(f"{path} does not exist: check {name}.")


def _check_options(options: Iterable[str], trained: set[str]) -> None:
    """Raises UserError for an option that neither the checkpoint nor the subwords have."""
    from fairseq.registry import REGISTRIES

    parts = [*REGISTRIES["bpe"]["dataclass_registry"].values()]
    parts += REGISTRIES["tokenizer"]["dataclass_registry"].values()
    fields = {name for part in parts for name in getattr(part, "__dataclass_fields__", ())}
    known = trained | fields | {"tokenizer", "task", "arch", "user_dir", "device"}
    for name in options:
        if name in _NO_OPTION:
            raise UserError(f"{name} is not an option of RobertaModel: {_NO_OPTION[name]}.")
        if name not in known:
            close = synonyms.nearest(name, known)
            hint = f"did you mean {close[0]}?" if close else "docs/python.md lists the arguments."
            raise UserError(f"RobertaModel has no option {name}: {hint}")


def _subwords(bpe: str | None, data: str, options: dict[str, Any]) -> str | None:
    """The subwords of a model whose dictionaries are in the folder ``data``.

    If they are those of the tokenizer in this folder, it becomes one of the ``options``.

    Raises:
        UserError: they are GPT-2's, but the dictionary is not.
    """
    paths = [os.path.join(data, name) for name in _DICTIONARIES]
    with open(next(filter(os.path.exists, paths)), encoding="utf-8", errors="replace") as file:
        words = [line.rsplit(" ", 1)[0] for line, _ in zip(file, range(100))]
    is_gpt2 = bool(words) and all(word.isdecimal() or "madeup" in word for word in words)
    if bpe == "gpt2" and not is_gpt2:
        raise UserError(
            f'The dictionary in {data} has no numbers of GPT-2\'s subwords: instead of bpe="gpt2", '
            'pass bpe="subword_nmt" with bpe_codes, bpe="sentencepiece" with sentencepiece_model, '
            'bpe="tokenizer_folder" with tokenizer_folder, or bpe=None.'
        )
    if bpe != _BY_DATA:
        return bpe
    folder = options.get("tokenizer_folder") or tokenizer.in_data(Path(data))
    if folder is not None and options.get("tokenizer") is None:
        options["tokenizer_folder"] = str(folder)
        return "tokenizer_folder"
    return "gpt2" if is_gpt2 else None


def _require(*packages: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f'bpe="gpt2" needs packages that are not installed: run pip install '
            f"{' '.join(missing)}."
        )


def _sentence(error: Exception, bpe: str | None, request: Request) -> str | None:
    """What the user can correct, or None."""
    known = messages.explain(error, request)
    if known is None and bpe == "gpt2" and isinstance(error, OSError) and not error.filename:
        return (
            f'The files of bpe="gpt2" cannot be downloaded ({type(error).__name__}): pass '
            "gpt2_encoder_json and gpt2_vocab_bpe, or bpe=None."
        )
    return known
