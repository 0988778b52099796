"""A served model: texts become requests of an engine, and its results become texts."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lightseq_fairseq.base import families, tokenizer
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.base.run_folder import checkpoint_in
from lightseq_fairseq.checkpoints import from_huggingface
from lightseq_fairseq.checkpoints.languages import languages_of
from lightseq_fairseq.cli.serving.messages import Answer, Found, Languages, Model
from lightseq_fairseq.cli.words.argv import flag_of
from lightseq_fairseq.generation.options import SearchOptions
from lightseq_fairseq.python.language_model import LanguageModel
from lightseq_fairseq.python.pretrained import Pretrained, settings_of, task_of, trained_on
from lightseq_fairseq.python.roberta import RobertaModel
from lightseq_fairseq.python.translator import Translator

if TYPE_CHECKING:
    from lightseq_fairseq.cli.translate.classes import Classifier
    from lightseq_fairseq.python.roberta_interface import RobertaInterface

_ENCODERS = ("masked_lm", "multilingual_masked_lm")  # tasks


class Asked(NamedTuple):
    """A ``generation.engine.Request`` of one sentence, as processes send it.

    Tensors would be sent through shared memory, which costs more than these few numbers.
    """

    tokens: list[int]
    forced: list[int] | None
    max_len: int
    options: SearchOptions
    first: int
    begun: int


class Tokens(NamedTuple):
    """What an encoder is to read: the tokens of a text or a pair.

    classifies: whether its head is wanted, else the mean of the features.
    """

    tokens: list[int]
    classifies: bool


class Served:
    """A model that texts can be sent to.

    Attributes:
        name: by which requests name it. shown: for the log.
        does, languages, has_labels: see ``messages.Model``.
    """

    does: str
    languages: Languages | None = None
    has_labels = False

    def __init__(self, name: str) -> None:
        self.name, self.shown = name, ""

    @property
    def described(self) -> Model:
        """What the server knows of it."""
        return Model(self.name, self.does, self.languages, self.has_labels, self.shown)

    @property
    def model(self) -> Any:
        """fairseq's model, on the CPU."""
        raise NotImplementedError

    def open_tokenizer(self) -> None:
        """Read its files, which is otherwise done for the first text."""
        raise NotImplementedError

    def asked(self, text: Any, options: Mapping[str, Any]) -> Any:
        """What the device is to compute for a text.

        Raises:
            UserError: the text or an option cannot be used.
        """
        raise NotImplementedError


class Searched(Served):
    """A translation model or a language model; ``pretrained`` is on the CPU.

    has_pair: whether the languages of ``pretrained`` are those of requests that name none.
    """

    def __init__(self, name: str, pretrained: Pretrained, has_pair: bool) -> None:
        super().__init__(name)
        self.pretrained, self.does = pretrained, "continues"
        self._between: dict[tuple[str, str], Pretrained] = {}
        if isinstance(pretrained, Translator):
            pair, languages = pretrained.pair, (*pretrained.languages,)
            sources, targets = (languages, languages) if languages else ((pair[0],), (pair[1],))
            if {*pair} <= {*tokenizer.SIDES}:  # an import whose folder names no languages
                sources = targets = ()
            self.does = "translates"
            self.languages = Languages(sources, targets, pair if has_pair else None)
            self._between[pair] = pretrained

    def __repr__(self) -> str:
        return repr(self.pretrained)

    @property
    def model(self) -> Any:
        return self.pretrained.model

    def open_tokenizer(self) -> None:
        self.pretrained.open_tokenizer()

    def asked(self, text: str, options: Mapping[str, Any]) -> Asked:
        """options: fields of ``GenerationConfig``, see `_of_search`; "prefix", with which a
        translation begins; "languages", source and target, which a translation needs."""
        pretrained = self._chosen(options)
        try:
            request = pretrained.request(text, self._of_search(options))
        except UserError as error:
            if "min_len" in str(error):  # in words of the commands
                raise UserError("min_length is larger than the longest result.") from None
            raise
        batch = request.batch
        forced = None if batch.forced is None else batch.forced[0].tolist()
        begun = request.begun
        if prefix := options.get("prefix"):
            tokens = pretrained.target_tokens(prefix)
            if request.options.unk in tokens:
                raise UserError("The prefix has a word, or a part of one, that the model lacks.")
            forced = [*(forced or ()), *tokens]
            begun = len(forced)
        return Asked(
            batch.tokens[0].tolist(), forced, batch.max_len, request.options, request.first, begun
        )

    def answer(self, asked: Asked, found: Sequence[Found], options: Mapping[str, Any]) -> Answer:
        pretrained = self._chosen(options)
        hypotheses = pretrained.texts(map(_as_fairseqs, found), self._of_search(options))
        start = 0
        if self.does == "continues":
            start = len(asked.tokens)
            prompt = _as_fairseqs(Found(asked.tokens, 0.0, [0.0] * start))
            said = pretrained.texts([prompt], self._of_search(options))[0].text
            hypotheses = tuple(replace(x, text=x.text.removeprefix(said)) for x in hypotheses)
        written = sum(len(each.tokens) - start - 1 for each in found)  # without eos
        cut = tuple(len(each.tokens) > asked.max_len for each in found)
        return Answer(hypotheses, cut, (len(asked.tokens), written))

    def _of_search(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of ``GenerationConfig``; the beam has at least as many hypotheses as results."""
        found = {key: value for key, value in options.items() if key not in ("prefix", "languages")}
        if "nbest" in found:
            beam = found.get("beam", self.pretrained.configuration.generation.beam)
            found["beam"] = max(beam, found["nbest"])
        return found

    def _chosen(self, options: Mapping[str, Any]) -> Pretrained:
        """The model for the languages of a request."""
        pair = options.get("languages")
        if pair is None:
            return self.pretrained
        if pair not in self._between:
            self._between[pair] = self.pretrained.between(*pair)
        return self._between[pair]


class EncodedBy(Served):
    """A RoBERTa; ``interface`` is on the CPU.

    Attributes:
        classifier: None if it has no labels.
    """

    does = "encodes"

    def __init__(self, name: str, interface: RobertaInterface) -> None:
        super().__init__(name)
        self.interface = interface.eval()
        self.classifier: Classifier | None = None
        if families.classifies(interface.task.cfg._name):
            self.classifier, self.has_labels = interface.classifier(), True

    def __repr__(self) -> str:
        return repr(self.interface)

    @property
    def model(self) -> Any:
        return self.interface.model

    def open_tokenizer(self) -> None:
        if self.interface.bpe is not None:
            self.interface.bpe.decode(self.interface.bpe.encode("1"))

    def asked(self, text: str | Sequence[str], options: Mapping[str, Any]) -> Tokens:
        """options: "classifies", see `Tokens`."""
        texts = (text,) if isinstance(text, str) else (*text,)
        if not options["classifies"]:
            bpe, dictionary = self.interface.bpe, self.interface.task.source_dictionary
            words = text if bpe is None else bpe.encode(text)
            tokens = dictionary.encode_line(f"<s> {words}", add_if_not_exist=False)
            most = self.model.max_positions()
            if len(tokens) > most:
                raise UserError(
                    f"The text has {len(tokens)} tokens, the model reads at most {most}: shorten "
                    "it."
                )
            return Tokens(tokens.tolist(), False)
        if self.classifier is None:
            raise UserError(f"{self.name} has no labels: /v1/embeddings gives its features.")
        if len(texts) != (self.classifier.inputs or len(texts)):
            wanted = "two texts: send text_pair, too" if len(texts) == 1 else "one text"
            raise UserError(f"{self.name} reads {wanted}.")
        return Tokens(self.classifier.tokens(0, texts).tolist(), True)


def in_flags(sentence: str) -> str:
    """An error of Python in words of the command: --bpe-codes for bpe_codes."""
    sentence = sentence.replace("pass data, the folder", "add --data FOLDER, the folder")
    name = r"(?<![\w/.'\"-])[a-z]+(?:_[a-z]+)+(?!\w|/|\.\w)"
    return re.sub(name, lambda found: flag_of(found[0]), sentence)


def _as_fairseqs(found: Found) -> dict[str, Any]:
    import torch

    return {
        "tokens": torch.tensor(found.tokens),
        "score": torch.tensor(found.score),
        "positional_scores": torch.tensor(found.token_scores),
        "alignment": torch.empty(0),
    }


def _of_texts() -> set[str]:
    """Options that matter only to models that write texts."""
    from fairseq.dataclass.configs import GenerationConfig

    return {*GenerationConfig.__dataclass_fields__, "remove_bpe", "post_process"}


def _of_subwords() -> set[str]:
    """Options that only matter to a model whose data have no tokenizer."""
    from fairseq.registry import REGISTRIES

    parts = [
        part
        for kind in ("bpe", "tokenizer")
        for part in REGISTRIES[kind]["dataclass_registry"].values()
    ]
    fields = {name for part in parts for name in getattr(part, "__dataclass_fields__", ())}
    return {*fields, "bpe", "tokenizer", "remove_bpe", "post_process"} - {
        "_name", "source_lang", "target_lang", "data",
    }  # fmt: skip


def load(name: str, path: str, options: Mapping[str, Any], is_alone: bool) -> Served:
    """Load a model on the CPU, from a checkpoint, or a folder of a run or of `transformers`.

    is_alone: the options are for it. Of several models, those whose data have a tokenizer use that.

    Raises:
        UserError: it cannot be used.
    """
    # Those of lightseq-import have a config.json, too.
    if not (Path(path) / "config.json").is_file() or (Path(path) / "model.pt").is_file():
        return _load(name, checkpoint_in(path), options, is_alone)
    with tempfile.TemporaryDirectory() as place:
        from_huggingface.write(Path(path), Path(place), Path(place), {}, ())
        served = _load(name, checkpoint_in(place), options, is_alone)
        served.shown = served.shown.replace(checkpoint_in(place), path)
        served.open_tokenizer()  # while its files exist
        return served


def _load(name: str, checkpoint: str, options: Mapping[str, Any], is_alone: bool) -> Served:
    settings, unused = settings_of(checkpoint), set[str]()
    with contextlib.suppress(UserError):  # no data: loading says so
        data = options.get("data") or trained_on(settings, checkpoint)
        if not is_alone and tokenizer.in_data(Path(data)) is not None:
            unused = _of_subwords() & options.keys()
    used = {key: value for key, value in options.items() if key not in unused}
    served = _loaded(name, checkpoint, settings, used)
    served.shown = repr(served)
    if unused:
        flags = " and ".join(map(flag_of, sorted(unused)))
        verb = "is" if len(unused) == 1 else "are"
        served.shown += f"; its data have a tokenizer, so {flags} {verb} not used"
    return served


def _loaded(
    name: str, checkpoint: str, settings: dict[str, Any], options: Mapping[str, Any]
) -> Served:
    task = task_of(settings)
    if task in Translator.kind.tasks:
        imported = settings.get("generation", {}).get("options", {})
        given = {**settings, **imported, **options}
        file = Path(given.get("data") or "") / "languages.txt"  # of an import
        known = languages_of({"lang_dict": file} if imported and file.is_file() else settings)
        missing = [each for each in Translator.kind.settings if not given.get(each)]
        has_pair = not known or not missing
        if known:  # requests name the others
            options = {**dict(zip(missing, known, strict=False)), **options}
        translator = Translator.from_pretrained(checkpoint, device="cpu", **options)
        return Searched(name, translator, has_pair)
    if task in LanguageModel.kind.tasks:
        model = LanguageModel.from_pretrained(checkpoint, device="cpu", **options)
        return Searched(name, model, has_pair=False)
    if families.classifies(task) or task in _ENCODERS:
        own = {key: value for key, value in options.items() if key not in _of_texts()}
        data = own.pop("data", None)
        return EncodedBy(name, RobertaModel.from_pretrained(checkpoint, None, data, **own))
    raise UserError(
        f"{checkpoint} contains a model of --task {task}: lightseq-serve has models that "
        "translate, continue prompts or encode texts."
    )
