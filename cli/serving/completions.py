"""Completions in the form of OpenAI's API, at once or as they grow."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.serving.answers import Choice, Completion, Reason, Usage
from lightseq_fairseq.cli.serving.bodies import Complete
from lightseq_fairseq.cli.serving.messages import Answer
from lightseq_fairseq.cli.serving.metrics import Metrics
from lightseq_fairseq.cli.serving.processes import Gone


def whole(body: Complete, prompts: Sequence[str], found: Sequence[Answer]) -> Completion:
    """The answer to a request that is not streamed."""
    choices = []
    for number, (prompt, each) in enumerate(zip(prompts, found, strict=True)):
        for place, (result, is_cut) in enumerate(zip(each.hypotheses, each.is_cut, strict=True)):
            text, is_stopped = _until(result.text, body.stops)
            shown = (prompt if body.echo else "") + text
            reason: Reason = "length" if is_cut and not is_stopped else "stop"
            place += number * body.n
            choices.append(Choice(index=place, text=shown, finish_reason=reason))
    read, written = (sum(each.tokens[i] for each in found) for i in range(2))
    usage = Usage(prompt_tokens=read, completion_tokens=written, total_tokens=read + written)
    return Completion(**_head(body), choices=choices, usage=usage)


async def events(
    body: Complete, first: Answer, grown: AsyncGenerator[Answer, None], metrics: Metrics
) -> AsyncIterator[str]:
    """Server-sent events: what each answer adds to the text.

    first: the first one, which has been read. grown: the others.
    """
    head, sent = _head(body), ""

    def event(text: str, reason: Reason | None) -> str:
        choice = Choice(index=0, text=text, finish_reason=reason)
        return (
            f"data: {Completion(**head, choices=[choice]).model_dump_json(exclude={'usage'})}\n\n"
        )

    if body.echo:
        yield event(body.prompt if isinstance(body.prompt, str) else body.prompt[0], None)
    answer, is_stopped = first, False
    try:
        while True:
            text, is_stopped = _until(answer.hypotheses[0].text, body.stops)
            is_last = answer.is_last or is_stopped
            if not is_last:  # a subword may change the last word, or complete what stops
                held = max((len(each) for each in body.stops), default=1) - 1
                text = text[: max(text.rfind(" "), 0)][: max(len(text) - held, 0)]
            if text.startswith(sent) and len(text) > len(sent):
                yield event(text[len(sent) :], None)
                sent = text
            if is_last:
                break
            answer = await anext(grown)
    except (UserError, Gone, RuntimeError) as error:
        sentence = str(error) or "The server is ending."
        yield f"data: {json.dumps({'error': {'message': sentence, 'type': 'server_error'}})}\n\n"
        return
    finally:
        await grown.aclose()
    metrics.tokens.labels("read").inc(answer.tokens[0])
    metrics.tokens.labels("written").inc(answer.tokens[1])
    yield event("", "length" if answer.is_cut[0] and not is_stopped else "stop")
    yield "data: [DONE]\n\n"


def _until(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The text before the first of ``stops`` in it, and whether there is one."""
    ends = [place for each in stops if (place := text.find(each)) >= 0]
    return (text[: min(ends)], True) if ends else (text, False)


def _head(body: Complete) -> dict[str, Any]:
    return {
        "id": f"cmpl-{secrets.token_hex(12)}",
        "created": int(time.time()),
        "model": body.model,
    }
