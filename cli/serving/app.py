"""The endpoints of ``lightseq-serve``."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import prometheus_client as prometheus
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from lightseq_fairseq import __version__
from lightseq_fairseq.base.errors import Expired, Full, UserError
from lightseq_fairseq.cli.serving import answers as of
from lightseq_fairseq.cli.serving import completions
from lightseq_fairseq.cli.serving.bodies import (
    Classify,
    Complete,
    DeepL,
    Embed,
    Google,
    Summarize,
    Translate,
)
from lightseq_fairseq.cli.serving.engines import Engines
from lightseq_fairseq.cli.serving.guard import Guard, Refused, refusal
from lightseq_fairseq.cli.serving.messages import Bounds, Model
from lightseq_fairseq.cli.serving.metrics import Metrics
from lightseq_fairseq.cli.serving.processes import Gone
from lightseq_fairseq.generation.texts import Predicted, Prediction

Result = TypeVar("Result")


def application(engines: Engines, bounds: Bounds) -> FastAPI:
    """The server.

    Each endpoint answers errors in one sentence.
    """
    metrics, paths = Metrics(engines), set[str]()

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await engines.connect()
        warming = asyncio.create_task(engines.warm_up())
        yield
        warming.cancel()
        engines.kill()

    app = FastAPI(
        title="LightSeq", version=__version__, lifespan=lifespan, redirect_slashes=False,
        description="Translations, completions, embeddings and labels by accelerated Transformers.",
        responses={"4XX": {"model": of.Problem}},
    )  # fmt: skip
    app.add_middleware(Guard, bounds=bounds, metrics=metrics, paths=paths)

    # --- Errors ----------------------------------------------------------------------------------

    @app.exception_handler(UserError)
    async def unusable(request: Request, error: UserError) -> Response:
        status = 429 if isinstance(error, Full) else 504 if isinstance(error, Expired) else 400
        return refusal(request.url.path, Refused(status, str(error)))

    @app.exception_handler(Gone)
    async def gone(request: Request, error: Gone) -> Response:
        return refusal(request.url.path, Refused(503, "The server is ending."))

    @app.exception_handler(RuntimeError)
    async def failed(request: Request, error: RuntimeError) -> Response:
        return refusal(request.url.path, Refused(500, str(error)))

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> Response:
        sentence = error.detail if isinstance(error, Refused) else f"{error.detail}."
        if error.status_code == 400 and not isinstance(error, Refused):  # FastAPI's only one
            sentence = "The body of the request is no JSON in UTF-8."
        return refusal(request.url.path, Refused(error.status_code, sentence))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return refusal(request.url.path, Refused(400, _first(error)))

    # --- Translation -----------------------------------------------------------------------------

    async def answers(
        request: Request, model: Model, texts: Sequence[Any], options: Mapping[str, Any]
    ) -> list[Any]:
        _check(texts, options, bounds)
        found = await _unless_gone(
            request, engines.answers(model.name, texts, options, bounds.seconds)
        )
        read, written = (sum(each.tokens[i] for each in found) for i in range(2))
        metrics.tokens.labels("read").inc(read)
        metrics.tokens.labels("written").inc(written)
        fields = {"model": model.name, "texts": len(texts), "read": read, "written": written}
        request.scope["logged"].update(fields)
        return found

    async def translations(
        request: Request, texts: Sequence[str], source: str | None, target: str | None,
        model: str | None = None, options: Mapping[str, Any] | None = None,
    ) -> list[Any]:  # fmt: skip
        chosen, pair = _translator(engines.models, model, source, target)
        return await answers(request, chosen, texts, {**(options or {}), "languages": pair})

    @app.post(
        "/translate", summary="Translate (LibreTranslate's API)", response_model_exclude_none=True
    )
    async def translate(body: Translate, request: Request) -> of.Translated:
        options, number = body.options(), body.alternatives + 1
        if number > 1:
            options["nbest"] = number
        if body.prefix:
            options["prefix"] = body.prefix
        texts = [body.q] if isinstance(body.q, str) else body.q
        found = await translations(request, texts, body.source, body.target, body.model, options)
        best = [each.hypotheses[0].text for each in found]
        answer = of.Translated(translatedText=_as_asked(body.q, best))
        if body.alternatives:
            others = [[one.text for one in each.hypotheses[1:]] for each in found]
            answer.alternatives = _as_asked(body.q, others)
        return answer

    @app.get("/languages", summary="Languages (LibreTranslate's API)")
    async def languages() -> list[of.Language]:
        targets: dict[str, set[str]] = {}
        for each in engines.models.values():
            if each.languages is not None:
                for code in each.languages.sources:
                    targets.setdefault(code, set()).update(each.languages.targets)
        return [
            of.Language(code=code, name=code, targets=sorted(targets[code]))
            for code in sorted(targets)
        ]

    @app.post("/v2/translate", summary="Translate (DeepL's API)")
    async def deepl(body: DeepL, request: Request) -> of.FromDeepL:
        chosen, pair = _translator(engines.models, None, body.source_lang, body.target_lang)
        found = await answers(request, chosen, body.text, {"languages": pair})
        assert chosen.languages is not None
        source = pair[0].upper() if chosen.languages.sources else ""
        texts = [
            of.OfDeepL(
                detected_source_language=source,
                text=each.hypotheses[0].text,
                billed_characters=len(text),
            )
            for each, text in zip(found, body.text, strict=True)
        ]
        return of.FromDeepL(translations=texts)

    @app.post("/language/translate/v2", summary="Translate (Google's API, version 2)")
    async def google(body: Google, request: Request) -> of.FromGoogle:
        if body.format == "html" and re.search("[<&]", "".join(_listed(body.q))):
            raise Refused(400, 'This server translates plain text: send "format": "text".')
        found = await translations(request, _listed(body.q), body.source, body.target)
        texts = [of.OfGoogle(translatedText=each.hypotheses[0].text) for each in found]
        return of.FromGoogle(data=of.GoogleData(translations=texts))

    @app.post("/summarize", summary="Summarize")
    async def summarize(body: Summarize, request: Request) -> of.Summary:
        name = body.model or _summarizer(engines.models)
        found = await translations(request, _listed(body.text), None, None, name, body.options())
        return of.Summary(summary=_as_asked(body.text, [each.hypotheses[0].text for each in found]))

    # --- OpenAI's API ----------------------------------------------------------------------------

    @app.get("/v1/models", summary="Models (OpenAI's API)")
    async def models() -> of.Models:
        return of.Models(data=[of.Listed(id=name) for name in engines.models])

    @app.post("/v1/completions", summary="Completions (OpenAI's API)", response_model=of.Completion)
    async def complete(body: Complete, request: Request) -> Any:
        chosen = _named(engines.models, body.model)
        if chosen.does != "continues":
            raise Refused(400, f"{chosen.name} is no language model: it {chosen.does} texts.")
        prompts, options = _listed(body.prompt), body.options()
        if not body.stream:
            found = await answers(request, chosen, prompts, options)
            return completions.whole(body, prompts, found)
        if len(prompts) > 1 or options["beam"] > 1:
            raise Refused(400, 'Only one completion of one prompt can be streamed: use "n": 1.')
        _check(prompts, options, bounds)
        grown = engines.stream(chosen.name, prompts[0], options, bounds.seconds)
        first = await _unless_gone(request, anext(grown))  # its errors have a status
        events = completions.events(body, first, grown, metrics)
        return StreamingResponse(events, media_type="text/event-stream")

    @app.post("/v1/embeddings", summary="Embeddings (OpenAI's API)")
    async def embed(body: Embed, request: Request) -> of.Embeddings:
        chosen = _named(engines.models, body.model)
        if chosen.does != "encodes":
            raise Refused(400, f"{chosen.name} is no encoder: it {chosen.does} texts.")
        found = await answers(request, chosen, _listed(body.input), {"classifies": False})
        data = [
            of.Embedding(index=number, embedding=_embedding(body, each.found))
            for number, each in enumerate(found)
        ]
        read = sum(each.tokens[0] for each in found)
        usage = of.EmbeddingUsage(prompt_tokens=read, total_tokens=read)
        return of.Embeddings(data=data, model=body.model, usage=usage)

    # --- Labels ----------------------------------------------------------------------------------

    @app.post("/classify", summary="Label texts, or pairs of texts")
    async def classify(body: Classify, request: Request) -> of.Labels:
        names = [body.model] if body.model is not None else [*engines.models]
        models = [_named(engines.models, name) for name in names]
        chosen = next((each for each in models if each.has_labels), None)
        if chosen is None:
            raise Refused(400, f"There are no labels: {', '.join(names)} has none.")
        texts: list[Any] = _listed(body.text)
        if body.text_pair is not None:
            others = _listed(body.text_pair)
            if len(others) != len(texts):
                says = f"There are {len(texts)} texts in text, and {len(others)} in text_pair."
                raise Refused(400, says)
            texts = [*zip(texts, others, strict=True)]
        found = await answers(request, chosen, texts, {"classifies": True})
        return of.Labels(labels=_as_asked(body.text, [_label(each.found) for each in found]))

    # --- For those who run the server ------------------------------------------------------------

    @app.head("/health", include_in_schema=False)
    @app.get("/health", summary="Whether the server runs")
    async def health() -> of.Status:
        if engines.is_gone:
            raise Gone
        return of.Status(status="ok")

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready", summary="Whether each model has answered a text")
    async def ready() -> of.Status:
        if not engines.is_ready:
            raise Refused(503, "The models are not ready yet.")
        return of.Status(status="ready")

    @app.get(
        "/metrics", summary="Numbers for Prometheus", response_class=PlainTextResponse, responses={}
    )
    async def numbers() -> Response:
        text = prometheus.generate_latest(metrics.registry)
        return Response(text, media_type=prometheus.CONTENT_TYPE_LATEST)

    paths.update(route.path for route in app.routes if hasattr(route, "path"))
    return app


def _first(error: RequestValidationError) -> str:
    """The first mistake of a body, as a sentence."""
    mistake = error.errors()[0]
    if mistake["type"] == "json_invalid":
        return "The body of the request is no JSON."
    if mistake["type"] == "model_attributes_type":
        header = "Content-Type: application/json"
        return f"The body of the request is no JSON object, or the header {header} is missing."
    parts = [str(part) for part in mistake["loc"][1:]]
    if not parts and mistake["type"] == "missing":
        return "The request has no body."
    place = ".".join(part for part in parts if part != "str" and not part.startswith("list["))
    says = mistake["msg"].removeprefix("Value error, ")
    if parts[1:2] == ["str"]:  # a list would be right, too
        says = "send a text, or a list of texts"
    if mistake["type"] == "extra_forbidden":
        return f"There is no option {place or repr(parts[-1])}."
    return f"{place}: {says[0].lower()}{says[1:]}." if place else f"{says}."


def _listed(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def _as_asked(texts: str | list[str], found: list[Any]) -> Any:
    """For a text what was found for it, for a list the list."""
    return found[0] if isinstance(texts, str) else found


def _embedding(body: Embed, found: bytes) -> list[float] | str:
    if body.encoding_format == "base64":
        return base64.b64encode(found).decode()
    numbers: list[float] = np.frombuffer(found, np.float32).tolist()
    return numbers


def _label(found: Predicted) -> of.Labelled:
    """What a head predicts; of a regression numbers."""
    if isinstance(found, Prediction):
        return of.Label(label=found.label, probability=found.probability)
    return [*found] if isinstance(found, tuple) else found


def _check(texts: Sequence[Any], options: Mapping[str, Any], bounds: Bounds) -> None:
    """Refuse what exceeds the bounds, and texts that are none; a text may be a pair."""
    if not 1 <= len(texts) <= bounds.texts:
        raise Refused(400, f"There are {len(texts)} texts: send 1 to {bounds.texts}.")
    beam = max(options.get("beam", 1), options.get("nbest", 1))
    if beam > bounds.beam:
        raise Refused(400, f"The beam is {beam}: this server has at most {bounds.beam}.")
    each = [
        (number, part)
        for number, text in enumerate(texts)
        for part in (text if isinstance(text, tuple) else (text,))
    ]
    if sum(len(text) for _, text in each) > bounds.characters:
        raise Refused(413, f"The texts have more than {bounds.characters} characters: send fewer.")
    for number, text in each:
        if not text.strip():
            raise Refused(400, f"Text {number} (counted from 0) is empty.")
        if re.search("[\0\ud800-\udfff]", text):
            raise Refused(400, f"Text {number} (counted from 0) is no valid Unicode text.")


def _named(served: Mapping[str, Model], name: str) -> Model:
    if name not in served:
        raise Refused(404, f"There is no model {name}: this server has {', '.join(served)}.")
    return served[name]


def _summarizer(models: Mapping[str, Model]) -> str | None:
    """The model for summaries, if the request names none: the only one without languages.

    None: there is one model that writes texts.
    """
    writers = [each for each in models.values() if each.languages is not None]
    found = [each for each in writers if each.languages and not each.languages.sources]
    if len(writers) > 1 and len(found) != 1:
        names = ", ".join(each.name for each in writers)
        raise Refused(400, f"The server has several models: send model, one of {names}.")
    return found[0].name if len(writers) > 1 else None


def _translator(
    models: Mapping[str, Model], name: str | None, source: str | None, target: str | None
) -> tuple[Model, tuple[str, str]]:
    """The model for two languages, and its codes of them; None or "auto" is the usual one."""
    found = [_named(models, name)] if name is not None else [*models.values()]
    translate = [(each, each.languages) for each in found if each.languages is not None]
    if not translate:
        raise Refused(400, "This server has no translation model for this request.")
    for each, languages in translate:
        usual = languages.usual or (None, None)
        if not languages.sources:  # nobody knows its languages
            if len(translate) == 1 and languages.usual is not None:
                return each, languages.usual
            continue
        ours = _code(source, languages.sources, usual[0])
        other = _code(target, languages.targets, usual[1])
        if ours is not None and other is not None:
            return each, (ours, other)
    if not all(languages.usual for _, languages in translate) and None in (source, target):
        raise Refused(400, "The model has several languages: send source and target.")
    asked = f"{source or 'auto'} to {target or 'any language'}"
    pairs = ", ".join(
        f"{a[0]} to {b[0]}" if len(a) == len(b) == 1 else "languages of GET /languages"
        for _, (a, b, _) in translate
    )
    raise Refused(400, f"There is no model for {asked}: this server translates {pairs}.")


def _code(asked: str | None, codes: Sequence[str], usual: str | None) -> str | None:
    """The model's code of a language; a region, as in EN-US, matters only if both have one."""
    if asked is None or asked.lower() == "auto":
        return usual
    wanted = asked.lower().replace("-", "_")
    known = {code.lower(): code for code in reversed(codes)}
    if wanted in known:
        return known[wanted]
    base, _, region = wanted.partition("_")
    if region:
        return known.get(base)
    return next((code for code in codes if code.lower().partition("_")[0] == base), None)


async def _unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """The result of ``work``, which is cancelled when the client closes the connection."""
    task = asyncio.ensure_future(work)
    closed = asyncio.ensure_future(_closed(request))
    try:
        await asyncio.wait((task, closed), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Refused(499, "The client has closed the connection.")
    finally:
        for each in (task, closed):
            each.cancel()
        with contextlib.suppress(BaseException):
            await asyncio.gather(task, closed, return_exceptions=True)


async def _closed(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
