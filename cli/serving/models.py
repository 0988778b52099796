"""A served model: texts become requests of an engine, and its results become texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from lightseq_fairseq.base import families
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.base.run_folder import checkpoint_in
from lightseq_fairseq.cli.serving.messages import Answer, Encoded, Found, Model
from lightseq_fairseq.generation.options import SearchOptions
from lightseq_fairseq.python.language_model import LanguageModel
from lightseq_fairseq.python.pretrained import Pretrained, task_of
from lightseq_fairseq.python.roberta import RobertaModel
from lightseq_fairseq.python.translator import Translator

if TYPE_CHECKING:
    from lightseq_fairseq.cli.translate.classes import Classifier
    from lightseq_fairseq.generation.texts import Predicted
    from lightseq_fairseq.python.roberta_interface import RobertaInterface

_KINDS: tuple[type[Pretrained], ...] = (Translator, LanguageModel)
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
        name: by which requests name it.
        does, languages, has_labels: see ``messages.Model``.
    """

    does: str
    languages: tuple[str, str] | None = None
    has_labels = False

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def described(self) -> Model:
        """What the server knows of it."""
        return Model(self.name, self.does, self.languages, self.has_labels, repr(self))

    @property
    def model(self) -> Any:
        """fairseq's model, on the CPU."""
        raise NotImplementedError

    def asked(self, text: Any, options: Mapping[str, Any]) -> Any:
        """What the device is to compute for a text.

        Raises:
            UserError: the text or an option cannot be used.
        """
        raise NotImplementedError

    def answer(self, asked: Any, found: Any, options: Mapping[str, Any]) -> Any:
        """What the device has found for ``asked``."""
        raise NotImplementedError


class Searched(Served):
    """A translation model or a language model; ``pretrained`` is on the CPU."""

    def __init__(self, name: str, pretrained: Pretrained) -> None:
        super().__init__(name)
        self.pretrained, self.does = pretrained, "continues"
        if isinstance(pretrained, Translator):
            task = pretrained.configuration.task
            self.does, self.languages = "translates", (str(task.source_lang), str(task.target_lang))

    def __repr__(self) -> str:
        return repr(self.pretrained)

    @property
    def model(self) -> Any:
        return self.pretrained.model

    def asked(self, text: str, options: Mapping[str, Any]) -> Asked:
        """options: fields of ``GenerationConfig``; "prefix", with which a translation begins."""
        try:
            request = self.pretrained.request(text, _of_search(options))
        except UserError as error:
            if "min_len" in str(error):  # in words of the commands
                raise UserError("min_length is larger than the longest result.") from None
            raise
        batch = request.batch
        forced = None if batch.forced is None else batch.forced[0].tolist()
        begun = request.begun
        if prefix := options.get("prefix"):
            tokens = self.pretrained.target_tokens(prefix)
            if request.options.unk in tokens:
                raise UserError("The prefix has a word, or a part of one, that the model lacks.")
            forced = [*(forced or ()), *tokens]
            begun = len(forced)
        return Asked(
            batch.tokens[0].tolist(), forced, batch.max_len, request.options, request.first, begun
        )

    def answer(self, asked: Asked, found: Sequence[Found], options: Mapping[str, Any]) -> Answer:
        hypotheses = self.pretrained.texts(map(_as_fairseqs, found), _of_search(options))
        start = 0
        if self.does == "continues":
            start = len(asked.tokens)
            prompt = _as_fairseqs(Found(asked.tokens, 0.0, [0.0] * start))
            said = self.pretrained.texts([prompt], _of_search(options))[0].text
            hypotheses = tuple(replace(x, text=x.text.removeprefix(said)) for x in hypotheses)
        written = sum(len(each.tokens) - start - 1 for each in found)  # without eos
        cut = tuple(len(each.tokens) > asked.max_len for each in found)
        return Answer(hypotheses, cut, (len(asked.tokens), written))


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

    def answer(self, asked: Tokens, found: list[float], options: Mapping[str, Any]) -> Encoded:
        import torch

        result: list[float] | Predicted = found
        if asked.classifies:
            assert self.classifier is not None
            (result,) = self.classifier.predictions(torch.tensor([found]))
        return Encoded(result, (len(asked.tokens), 0))


def _of_search(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "prefix"}


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


def load(name: str, path: str, options: Mapping[str, Any]) -> Served:
    """Load a model on the CPU.

    Raises:
        UserError: it cannot be used.
    """
    checkpoint = checkpoint_in(path)
    task = task_of(checkpoint)
    for kind in _KINDS:
        if task in kind.kind.tasks:
            return Searched(name, kind.from_pretrained(checkpoint, device="cpu", **options))
    if families.classifies(task) or task in _ENCODERS:
        own = {key: value for key, value in options.items() if key not in _of_texts()}
        return EncodedBy(name, RobertaModel.from_pretrained(checkpoint, **own))
    raise UserError(
        f"{path} contains a model of --task {task}: lightseq-serve has models that translate, "
        "continue prompts or encode texts."
    )
