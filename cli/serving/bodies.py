"""The JSON of requests. Each field says what it does on the server's page of its API, ``/docs``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from typing_extensions import Self

Texts = str | list[str]


class Body(BaseModel):
    """A field that is not listed is an error, so that no option is silently without effect."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Searched(Body):
    """Options of the search; without one, that of the server's command line holds."""

    model: str | None = Field(None, description="The model; by default the first that fits.")
    beam: int | None = Field(None, ge=1, le=64, description="Hypotheses of the beam search.")
    lenpen: float | None = Field(
        None,
        ge=-10,
        le=10,
        description="Exponent of the length in the score: above 1, longer texts.",
    )
    min_length: int | None = Field(
        None, ge=1, le=65536, description="The fewest tokens of a result."
    )
    max_length: int | None = Field(None, ge=1, le=65536, description="The most tokens of a result.")
    no_repeat_ngram_size: int | None = Field(
        None, ge=2, le=20, description="No result has an n-gram of this size twice."
    )

    @model_validator(mode="after")
    def lengths(self) -> Self:
        if self.min_length and self.max_length and self.min_length > self.max_length:
            raise ValueError("min_length is larger than max_length")
        return self

    def options(self) -> dict[str, Any]:
        """As fields of fairseq's ``GenerationConfig``."""
        found = {
            "beam": self.beam,
            "lenpen": self.lenpen,
            "min_len": self.min_length,
            "no_repeat_ngram_size": self.no_repeat_ngram_size,
        }
        if self.max_length is not None:
            found |= {"max_len_a": 0, "max_len_b": self.max_length}
        return {name: value for name, value in found.items() if value is not None}


class Translate(Searched):
    """LibreTranslate's request, and options of the search."""

    q: Texts = Field(description="A text, or several.")
    source: str | None = Field(None, description='The language of q; "auto" fits every model.')
    target: str | None = Field(None, description="The language of the translation.")
    format: Literal["text"] = "text"
    alternatives: int = Field(0, ge=0, le=63, description="Further translations of each text.")
    prefix: str | None = Field(None, description="With which each translation begins.")
    api_key: str | None = Field(None, description="The key; better send it as a header.")


class Summarize(Searched):
    """A text, or several, that a model shortens."""

    text: Texts


class DeepL(Body):
    """DeepL's request."""

    text: list[str] = Field(max_length=50)
    target_lang: str
    source_lang: str | None = None
    show_billed_characters: bool = Field(
        False, description="Has no effect: DeepL's client sends it."
    )


class Google(Body):
    """The request of Google's API, version 2."""

    q: Texts
    target: str
    source: str | None = None
    format: Literal["text", "html"] | None = None
    model: None = Field(None, description="Has no effect: clients send it.")
    cid: list[str] = Field([], max_length=0, description="Has no effect: clients send it.")
    key: str | None = Field(None, description="Is not read: send the key as a header.")


class Embed(Body):
    """OpenAI's request for embeddings."""

    model: str
    input: Texts
    encoding_format: Literal["float", "base64"] = "float"
    user: str | None = None


class Classify(Body):
    """Texts whose labels are wanted, or pairs of texts."""

    model: str | None = Field(None, description="The model; by default the first with labels.")
    text: Texts
    text_pair: Texts | None = Field(None, description="The second text of each pair.")


class Complete(Searched):
    """OpenAI's request for completions, and options of the search."""

    model: str
    prompt: Texts
    max_tokens: int = Field(16, ge=1, le=65536, description="The most tokens after the prompt.")
    temperature: float = Field(
        1.0, ge=0, le=100, description="0: the best hypotheses of the beam search; else samples."
    )
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int | None = Field(None, ge=1, le=1 << 20)
    n: int = Field(1, ge=1, le=64)
    stop: Texts | None = Field(None, description="Texts, at most 4, before which a result ends.")
    echo: bool = False
    stream: bool = False
    user: str | None = None

    @property
    def stops(self) -> list[str]:
        return [] if self.stop is None else [self.stop] if isinstance(self.stop, str) else self.stop

    @field_validator("stop")
    @classmethod
    def few(cls, stop: Texts | None) -> Texts | None:
        if stop is not None and (not all(stop) or not stop):
            raise ValueError("an empty text stops nothing")
        if isinstance(stop, list) and len(stop) > 4:
            raise ValueError("there are more than 4 texts")
        return stop

    def options(self) -> dict[str, Any]:
        # fairseq counts the prompt, with the token before it.
        found = super().options() | {"max_len_a": 1, "max_len_b": self.max_tokens - 1}
        found["nbest"] = self.n
        if self.temperature == 0:
            return {"beam": self.n} | found
        found |= {"sampling": True, "temperature": self.temperature, "beam": self.n}
        if self.top_p < 1:
            found["sampling_topp"] = self.top_p
        if self.top_k is not None:
            found["sampling_topk"] = self.top_k
        return found
