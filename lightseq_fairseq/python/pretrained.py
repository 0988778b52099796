"""Loading of checkpoints from Python: the common code of `Translator` and `LanguageModel`.

They run the code of ``lightseq-interactive``, with the same options, results and checks. fairseq
and torch are imported when a checkpoint is loaded.
"""

from __future__ import annotations

import copy
import os
import re
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.base.run_folder import checkpoint_in
from lightseq_fairseq.cli.checks import Request, messages, parsing, trained_task
from lightseq_fairseq.cli.start import launch
from lightseq_fairseq.cli.translate.sentences import Search, load, seed
from lightseq_fairseq.cli.translate.unknown_words import UnknownWords
from lightseq_fairseq.cli.words import command_lines
from lightseq_fairseq.cli.words.argv import flag_of
from lightseq_fairseq.generation.texts import Hypothesis

if TYPE_CHECKING:
    from torch import Tensor

    from lightseq_fairseq.generation.engine import Request

StrPath = str | os.PathLike[str]
Device = Any  # a text, a torch.device or None; torch is not imported here
Self = TypeVar("Self", bound="Pretrained")

_COMMAND = "interactive"
_SEARCHES = 64  # sets of options whose searches are kept
_BATCH = ("max_tokens", "batch_size", "max_sentences")
_IN_PYTHON = "early_stopping"  # an option that no command has
# Options of one call, besides those of fairseq's search.
_OF_A_CALL = {*_BATCH, "seed", "remove_bpe", "post_process", "skip_invalid_size_inputs_valid_test"}
_OF_THE_MODEL = {"retain_dropout", "retain_dropout_modules"}  # fairseq lists them with the search
# Names that are no options, and what to do instead; {call} is the method that generates.
_NO_OPTION = {
    "native": "pass it to from_pretrained()",
    "data": "pass it to from_pretrained()",
    "path": "pass the checkpoint as the first argument of from_pretrained()",
    "device": "pass it to from_pretrained()",
    "device_map": "pass device to from_pretrained()",
    "input": "pass the {inputs} to {call}()",
    "buffer_size": "pass many {inputs} to one call of {call}()",
}


class Kind(NamedTuple):
    """The differences between the subclasses of `Pretrained`: words for messages, and defaults.

    Attributes:
        tasks: fairseq's tasks of its checkpoints, the usual one first.
        call, inputs: for messages: the name of the method that generates, and of its input.
        advice: for messages: what to do with a checkpoint of another task.
        settings: settings of the task whose defaults are the values in the checkpoint.
        batch: the default limit of a batch.
    """

    tasks: tuple[str, ...]
    call: str
    inputs: str
    advice: str
    settings: tuple[str, ...]
    batch: dict[str, Any]


class Pretrained:
    """A trained model that generates text; `from_pretrained` of a subclass makes one.

    Attributes:
        configuration: fairseq's; lightseq-interactive has the same with the same options.
    """

    kind: ClassVar[Kind]

    def __init__(
        self, words: Sequence[str], options: dict[str, Any] | None = None, native: bool = False
    ) -> None:
        """Called by `from_pretrained`; ``words`` are a command line without ``options``."""
        name = type(self).__name__
        if options is None or isinstance(words, str):
            raise UserError(f"{name} is made from a checkpoint: call {name}.from_pretrained().")
        from lightseq_fairseq.checkpoints import models

        self._words, self._options, self._native = list(words), options, native
        self._request = Request(self._words)
        words, early_stopping = _words(options), options.get(_IN_PYTHON)
        self.configuration = self._parsed(words)
        with self._explained(), models.building(native):
            seed(self.configuration)
            self._loaded = load(self.configuration)
            search = Search(self._loaded, self.configuration, early_stopping)
        self._searches = OrderedDict({(words, repr(early_stopping)): (self.configuration, search)})

    def __repr__(self) -> str:
        parts = [repr(self.configuration.common_eval.path)]
        settings, common = self._loaded.task.cfg, self.configuration.common
        if source := getattr(settings, "source_lang", None):
            parts.append(f"{source}-{settings.target_lang}")
        parts.append("cuda" if self._loaded.on_gpu else "cpu")
        parts.append("fp16" if common.fp16 else "bf16" if common.bf16 else "fp32")
        return f"{type(self).__name__}({', '.join(parts)})"

    @classmethod
    def from_pretrained(
        cls: type[Self], checkpoint: StrPath | Sequence[StrPath], data: StrPath | None = None, *,
        native: bool = False, device: Device = None, **options: Any,
    ) -> Self:  # fmt: skip
        """Load a checkpoint of ``lightseq-train`` or ``fairseq-train``.

        Args:
            checkpoint: a file, or the folder of a run (its checkpoint_best.pt, or else its
                checkpoint_last.pt). A list loads an ensemble.
            data: the folder with the dictionaries, ``dict.<language>.txt`` of a translation model
                and ``dict.txt`` of a language model: the ``--destdir`` of ``lightseq-preprocess``.
                None: the folder that the model was trained on.
            native: build fairseq's own model instead of this package's.
            device: "cpu", or "cuda" for the current GPU, or a torch.device; None: this GPU if there
                is one.
            options: flags of ``lightseq-interactive``, with "_" for "-". True sets a flag that has
                no value; None and False do not set it. ``fp16=True`` and ``bf16=True`` compute in
                16 bits instead of float32.
                ``source_lang`` and ``target_lang`` of a translation model are by default the
                checkpoint's, or inferred from the files in ``data``. Options of `translate` or
                `generate` become the defaults of its calls.

        Returns:
            The model.

        Raises:
            UserError: the checkpoint, the data or an option cannot be used. The message is one
                sentence: what is wrong, and what to do. UserError is a ValueError.
        """
        # Its import prepares fairseq, and registers our models.
        from lightseq_fairseq.checkpoints import names  # noqa: F401
        from lightseq_fairseq.fairseq_compat import patching

        patching.apply("model")
        cls._check_names(options)
        if device_of(device) == "cpu":
            options["cpu"] = True
        paths = [checkpoint_in(path) for path in _listed(checkpoint)]
        trained = _trained(paths[0], cls.kind, options)
        options = {name: trained.get(name) for name in cls.kind.settings} | options
        known = trained_task.options_of(trained, options.get("task"))
        options = known | {name: each for name, each in options.items() if each is not None}
        if not any(options.get(name) for name in _BATCH):
            options |= cls.kind.batch
        folder = trained_on(trained, paths[0]) if data is None else os.fspath(data)
        # The fused layers apply dropout only in training mode.
        native = native or bool(options.get("retain_dropout"))
        if options.get("task") is None:
            options["task"] = task_of(trained)
        words = [folder, "--path", os.pathsep.join(paths), "--distributed-world-size", "1"]
        return cls(words, options, native)

    def _warn(self, unknown: UnknownWords) -> None:
        """Warn of words that are not in the dictionary, as the command does by a note."""
        if (sentence := unknown.sentence()) is not None:
            subwords = 'bpe="subword_nmt", bpe_codes=FILE, remove_bpe=True to from_pretrained()'
            advice = (
                "" if self.configuration.bpe else f" For subwords of subword-nmt, pass {subwords}."
            )
            warnings.warn(sentence + advice, stacklevel=3)

    def _search(self, options: Mapping[str, Any]) -> tuple[Any, Search]:
        """(configuration, search) for the options of a call; made once, then cached (LRU)."""
        self._check_names(options)
        merged = self._options | {**options}
        words, early_stopping = _words(merged), merged.get(_IN_PYTHON)
        if (key := (words, repr(early_stopping))) not in self._searches:
            configuration = self._parsed(words)
            self._check_call(options)
            with self._explained():
                search = Search(self._loaded, configuration, early_stopping)
            self._keep(key, configuration, search)
        self._searches.move_to_end(key)
        return self._searches[key]

    def request(self, text: str, options: Mapping[str, Any]) -> Request:
        """What an engine is to search for a text.

        options: fields of fairseq's ``GenerationConfig``, with values of their types.

        Raises:
            UserError: the text or an option cannot be used.
        """
        with self._explained():
            return self._searched(options).request(self._tokens(text))

    @property
    def pair(self) -> tuple[str, str]:
        """The source and the target language of a translation model."""
        task = self._loaded.task
        settings = getattr(task, "args", None) or task.cfg
        return str(settings.source_lang), str(settings.target_lang)

    @property
    def languages(self) -> list[str]:
        """Those of a multilingual model, see ``Loaded.languages``; else none."""
        return self._loaded.languages

    def between(self: Self, source: str, target: str) -> Self:
        """The same model, which shares the weights, for other ones of `languages`."""
        other = copy.copy(self)
        other._loaded, other._searches = self._loaded.between(source, target), OrderedDict()
        return other

    def open_tokenizer(self) -> None:
        """Read the files of the tokenizer, which is otherwise done for the first text."""
        for call in (self._loaded.encode, self._loaded.source, self._loaded.decode):
            call("1")

    def target_tokens(self, text: str) -> list[int]:
        """The numbers of the tokens with which a result begins, without eos."""
        found = self._loaded.task.target_dictionary.encode_line(
            self._loaded.encode(text), add_if_not_exist=False, append_eos=False
        )
        return [int(token) for token in found]

    def texts(self, found: Iterable[Any], options: Mapping[str, Any]) -> tuple[Hypothesis, ...]:
        """What an engine has found for a text, the best first.

        found: hypotheses as fairseq's generators give them. options: those of `request`.
        """
        return self._searched(options).texts([*found])

    def _searched(self, options: Mapping[str, Any]) -> Search:
        """The search for fields of ``GenerationConfig``; fairseq's parser would take longer than a
        search."""
        key = ((), repr(sorted(options.items())))
        if key not in self._searches:
            cfg = copy.copy(self.configuration)
            cfg.generation = copy.deepcopy(cfg.generation)
            for name, value in options.items():
                cfg.generation[name] = value
            self._keep(key, cfg, Search(self._loaded, cfg))
        self._searches.move_to_end(key)
        return self._searches[key][1]

    def _keep(self, key: tuple[tuple[str, ...], str], configuration: Any, search: Search) -> None:
        self._searches[key] = configuration, search
        if len(self._searches) > _SEARCHES:
            self._searches.popitem(last=False)

    @property
    def model(self) -> Any:
        """fairseq's model, the only one or the first of an ensemble."""
        return self._loaded.models[0]

    def _tokens(self, text: str) -> Tensor:
        """The numbers of a text's tokens, and eos: int64."""
        tokens, _ = self._loaded.task.get_interactive_tokens_and_lengths(
            [text], self._loaded.source
        )
        return tokens[0]

    def _parsed(self, words: Sequence[str]) -> Any:
        """fairseq's configuration for options, by the command's parser and checks."""
        from fairseq import options
        from fairseq.dataclass.utils import convert_namespace_to_omegaconf

        notes: list[str] = []
        self._request = Request([*self._words, *words], command=_COMMAND, note=notes.append)
        program = f"{'fairseq' if self._native else 'lightseq'}-{_COMMAND}"
        with (
            self._explained(),
            launch.typed(program, self._request.argv),
            command_lines.refused_in_a_sentence(_COMMAND),
            parsing.checked(self._request),
        ):
            args = options.parse_args_and_arch(options.get_interactive_generation_parser())
            configuration = convert_namespace_to_omegaconf(args)
        for note in notes:
            warnings.warn(in_python(note, type(self).__name__), stacklevel=4)
        return configuration

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns errors that the user can correct into a UserError, as the command does."""
        try:
            yield
        except Exception as error:
            is_ours = isinstance(error, UserError)
            sentence = str(error) if is_ours else messages.explain(error, self._request)
            if sentence is None:
                raise
            # Without the traceback of the cause: the sentence says all that the user needs.
            raise UserError(in_python(sentence, type(self).__name__)) from None

    @classmethod
    def _check_names(cls, options: Iterable[str]) -> None:
        for name in options:
            if name in _NO_OPTION:
                instead = _NO_OPTION[name].format(call=cls.kind.call, inputs=cls.kind.inputs)
                raise UserError(f"{name} is not an option of {cls.__name__}: {instead}.")

    @classmethod
    def _check_call(cls, options: Iterable[str]) -> None:
        """Raises UserError for an option that concerns the loaded model."""
        from fairseq.dataclass.configs import GenerationConfig

        of_a_call = {
            *GenerationConfig.__dataclass_fields__,
            *_OF_A_CALL,
            _IN_PYTHON,
        } - _OF_THE_MODEL
        for name in options:
            if name not in of_a_call:
                raise UserError(
                    f"{name} is an option of {cls.__name__}.from_pretrained(), not of "
                    f"{cls.kind.call}(): pass it there."
                )


def in_python(sentence: str, name: str) -> str:
    """A sentence of lightseq-interactive with the names of Python: no_repeat_ngram_size."""
    sentence = sentence.replace(f"lightseq-{_COMMAND} has no flag", f"{name} has no option")
    sentence = sentence.replace("--fairseq-help lists all flags", "docs/flags.md lists all options")
    return re.sub(r"--([a-z][a-z0-9-]*)", lambda flag: flag[1].replace("-", "_"), sentence)


def device_of(device: Device) -> str | None:
    """The kind of a device, "cpu" or "cuda"; None for None.

    Raises:
        UserError: torch has no such device, or it is not the current GPU.
    """
    import torch

    if device is None:
        return None
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise UserError(f'device is {device}: use "cpu" or "cuda".')
    if found.type == "cuda":
        if not torch.cuda.is_available():
            raise UserError(f'device is {device}, but torch finds no GPU: use device="cpu".')
        current = torch.cuda.current_device()
        if found.index not in (None, current):
            raise UserError(
                f"device is {device}, but models are loaded on the current GPU, cuda:{current}: "
                f"first call torch.cuda.set_device({found.index})."
            )
    return found.type


def _words(options: dict[str, Any]) -> tuple[str, ...]:
    """Options as words of a command line, without the one that commands do not have."""
    words: list[str] = []
    for name, value in options.items():
        if name == _IN_PYTHON:
            continue
        flag = flag_of(name)
        if value is True:
            words.append(flag)
        elif isinstance(value, (list, tuple)):
            words += [flag, *map(str, value)]
        elif value is not None and value is not False:
            words.append(f"{flag}={value}")  # "=": the value may begin with "-"
    return tuple(words)


def _listed(checkpoint: StrPath | Sequence[StrPath]) -> list[str]:
    several = [checkpoint] if isinstance(checkpoint, (str, os.PathLike)) else checkpoint
    paths = [os.fspath(path) for path in several]
    if not paths:
        raise UserError("There is no checkpoint to load: pass one, or several for an ensemble.")
    return paths


def settings_of(path: str, options: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """The task's settings in a checkpoint.

    Raises:
        UserError: the file cannot be read, or is no checkpoint.
    """
    from fairseq.checkpoint_utils import get_maybe_sharded_checkpoint_filename as first_shard

    from lightseq_fairseq.fairseq_compat import checkpoints

    suffix, shards = options.get("checkpoint_suffix"), options.get("checkpoint_shard_count")
    path = first_shard(path, suffix or "", 0, int(shards or 1))
    try:
        return checkpoints.settings_of(checkpoints.open_checkpoint(path), "task")
    except OSError as error:
        raise UserError(
            f"The checkpoint {path} cannot be read ({error.strerror}): use a file or a folder "
            "that lightseq-train wrote."
        ) from None


def _trained(path: str, kind: Kind, options: dict[str, Any]) -> dict[str, Any]:
    """The task's settings in a checkpoint.

    Raises:
        UserError: the file cannot be read or is no checkpoint; or its task is not that of ``kind``,
            and ``options`` name no task.
    """
    settings = settings_of(path, options)
    if (task := task_of(settings)) not in kind.tasks and options.get("task") is None:
        raise UserError(f"{path} contains a model of the task {task}: {kind.advice}.")
    return settings


def task_of(trained: dict[str, Any]) -> str:
    """The name of the task in a checkpoint's settings of it."""
    return str(trained.get("_name") or trained.get("task") or "translation")


def trained_on(trained: dict[str, Any], path: str) -> str:
    """The data folder that a checkpoint names; or its own folder, if that has the dictionaries."""
    from fairseq import utils

    data = trained.get("data") or ""
    folders = utils.split_paths(data) if isinstance(data, str) else list(data)
    if not folders or not os.path.isdir(folders[0]):
        own = Path(path).resolve().parent
        if any(own.glob("dict*.txt")):
            return str(own)
        named = f"the data folder {folders[0]}, which does not exist here"
        raise UserError(
            f"{path} names {named if folders and folders[0] else 'no data folder'}: pass data, the "
            "folder with the dictionaries."
        )
    return str(folders[0])
