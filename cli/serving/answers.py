"""The JSON of answers, for the server's page of its API, ``/docs``, and for a fast serialiser."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from lightseq_fairseq.cli.serving.bodies import Texts


class Translated(BaseModel):
    """LibreTranslate's answer: a text for a text, a list for a list."""

    translatedText: Texts
    alternatives: list[str] | list[list[str]] | None = Field(
        None, description="Of each text, if the request asks for some."
    )


class Language(BaseModel):
    """A language, and those into which it is translated."""

    code: str
    name: str
    targets: list[str]


class OfDeepL(BaseModel):
    """DeepL's translation of a text."""

    detected_source_language: str = Field(description="The source of the model; it is not found.")
    text: str
    billed_characters: int = Field(description="Characters of the text.")


class FromDeepL(BaseModel):
    """DeepL's answer."""

    translations: list[OfDeepL]


class OfGoogle(BaseModel):
    """Google's translation of a text."""

    translatedText: str


class GoogleData(BaseModel):
    """Within Google's answer."""

    translations: list[OfGoogle]


class FromGoogle(BaseModel):
    """Google's answer."""

    data: GoogleData


class Summary(BaseModel):
    """A text for a text, a list for a list."""

    summary: Texts


class Listed(BaseModel):
    """A model, in OpenAI's form."""

    id: str = Field(description="The name by which requests ask for it.")
    object: Literal["model"] = "model"
    created: int = Field(0, description="Has no meaning.")
    owned_by: str = "lightseq"


class Models(BaseModel):
    """OpenAI's list of models."""

    object: Literal["list"] = "list"
    data: list[Listed]


class EmbeddingUsage(BaseModel):
    """Tokens, in OpenAI's form."""

    prompt_tokens: int
    total_tokens: int


class Usage(EmbeddingUsage):
    """Tokens, in OpenAI's form, of texts with results."""

    completion_tokens: int


Reason = Literal["stop", "length"]


class Choice(BaseModel):
    """A completion."""

    index: int
    text: str
    finish_reason: Reason | None
    logprobs: None = Field(None, description="Not computed.")


class Completion(BaseModel):
    """OpenAI's completions; a stream has one for each event."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int = Field(description="Seconds since 1970.")
    model: str
    choices: list[Choice]
    usage: Usage | None = Field(None, description="Not in a stream.")


class Embedding(BaseModel):
    """The embedding of a text."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str = Field(description="A string is float32 numbers in base64.")


class Embeddings(BaseModel):
    """OpenAI's answer with embeddings."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class Label(BaseModel):
    """The most probable class of a text."""

    label: str
    probability: float


Labelled = Label | float | list[float]


class Labels(BaseModel):
    """One for a text, a list for a list; of a regression numbers."""

    labels: Labelled | list[Labelled]


class Status(BaseModel):
    """That of the server."""

    status: Literal["ok", "ready"]


class Problem(BaseModel):
    """What is wrong, in one sentence; the API of the path gives it this form."""

    error: str | dict[str, Any] = Field(description="For OpenAI's API and Google's an object.")
    message: str = Field("", description="In place of error, for DeepL's API.")
