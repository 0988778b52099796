"""``lightseq-serve``: models behind HTTP."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.start.commands import CommandError, version
from lightseq_fairseq.cli.start.launch import Abandoned, PassThrough

if TYPE_CHECKING:
    from uvicorn import Server

    from lightseq_fairseq.cli.serving.engines import Engines
    from lightseq_fairseq.cli.serving.messages import Bounds, Plan

_PROGRAM = "lightseq-serve"
_SETTINGS = {"ignore_unknown_options": True, "max_content_width": 100}
_PACKAGES = ("fastapi", "uvicorn", "httptools", "uvloop", "prometheus-client")
_DRAIN = 60  # seconds in which requests may end after SIGTERM


@click.command(_PROGRAM, PassThrough, context_settings=_SETTINGS)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="MODEL ... [FLAGS]")
@version
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    default=8000,
    show_default=True,
    type=click.IntRange(0, 65535),
    help="0 is any free one.",
)
@click.option(
    "--api-key", envvar="LIGHTSEQ_API_KEY", metavar="KEY",
    help="Requests must have it; better set the variable LIGHTSEQ_API_KEY, which no list of "
    "processes shows.",
)  # fmt: skip
@click.option("--fp16", is_flag=True, help="Compute in float16.")
@click.option("--bf16", is_flag=True, help="Compute in bfloat16.")
@click.option("--cpu", is_flag=True, help="Use no GPU.")
@click.option(
    "--slots", type=click.IntRange(1, 8192),
    help="Sentences that are searched at a time.  [default: 256, on a CPU 16]",
)  # fmt: skip
@click.option(
    "--max-length", type=click.IntRange(1, 65536), metavar="TOKENS",
    help="The most of a text, and of a result.  [default: what the model has]",
)  # fmt: skip
@click.option(
    "--max-beam", default=16, show_default=True, type=click.IntRange(1, 64),
    help="The largest beam, and number of results, that a request may ask for.",
)  # fmt: skip
@click.option(
    "--max-texts",
    default=128,
    show_default=True,
    type=click.IntRange(1),
    help="The most texts of a request.",
)
@click.option(
    "--max-characters", default=100_000, show_default=True, type=click.IntRange(1),
    help="The most of all texts of a request.",
)  # fmt: skip
@click.option(
    "--max-body", default=1 << 20, show_default=True, type=click.IntRange(1), metavar="BYTES",
    help="The largest body of a request.",
)  # fmt: skip
@click.option(
    "--max-requests", default=1024, show_default=True, type=click.IntRange(1),
    help="The most at a time; more are answered by status 503.",
)  # fmt: skip
@click.option(
    "--timeout", default=60.0, show_default=True, type=click.FloatRange(0, min_open=True),
    metavar="SECONDS", help="A request that has not ended by then is answered by status 504.",
)  # fmt: skip
@click.option(
    "--gpu-memory", type=click.FloatRange(0, min_open=True), metavar="GIB",
    help="The most that the models may use.  [default: all of the GPU]",
)  # fmt: skip
@click.option(
    "--workers", default=2, show_default=True, type=click.IntRange(1, 256),
    help="Processes that make tokens of texts, and texts of tokens.",
)  # fmt: skip
@click.option(
    "--log-json", is_flag=True,
    help="Write the log as JSON, an object for each line, and a line for each request.",
)  # fmt: skip
def main(words: list[str], **options: Any) -> None:
    """Answer requests over HTTP: translations, summaries, completions, embeddings, labels.

    \b
        lightseq-serve checkpoints --bpe subword_nmt --bpe-codes codes --remove-bpe
        curl localhost:8000/translate -H 'Content-Type: application/json' -d '{"q": "Guten Tag."}'

    MODEL is a checkpoint, or the folder of a run, of lightseq-import or of transformers; NAME=MODEL
    gives it a name.
    Flags of lightseq-interactive follow the models, and hold for all of them: they are the defaults
    of requests.

    localhost:8000/docs lists the endpoints. docs/serve.md explains them.
    """
    host, port = options.pop("host"), options.pop("port")
    try:
        _serve(host, port, words, options)
    except UserError as error:
        raise CommandError(_PROGRAM, str(error)) from error


def engines_of(words: Sequence[str]) -> tuple[Engines, Bounds]:
    """The models of a command line of ``lightseq-serve``, for servers of others.

    words: the models and the flags; those of an address have no effect.

    Returns:
        When the models are loaded: the models, and what a request may ask for.

    Raises:
        click.ClickException: words cannot be used.
        UserError: a model cannot be served.
    """
    options = main.make_context(_PROGRAM, [*words]).params
    _prepare(options["log_json"])
    plan, bounds = _planned(**options)
    return _loaded(plan), bounds


def _prepare(log_json: bool) -> None:
    from lightseq_fairseq.cli.serving import log, processes

    processes.prepare()
    log.set_up(log_json)


def _planned(
    words: Sequence[str], *, api_key: str | None, fp16: bool, bf16: bool, cpu: bool,
    slots: int | None, max_length: int | None, max_beam: int, max_texts: int, max_characters: int,
    max_body: int, max_requests: int, timeout: float, gpu_memory: float | None, workers: int,
    log_json: bool, **_: Any,
) -> tuple[Plan, Bounds]:  # fmt: skip
    """What the flags ask for, see `main`."""
    from lightseq_fairseq.cli.serving.messages import Bounds, Plan

    models, flags = _parted(words)
    if fp16 and bf16:
        raise UserError("--fp16 and --bf16 cannot be used together: remove one.")
    named = tuple(_named(word) for word in models)
    names = [name for name, _ in named]
    for name in names:
        if not name:
            raise UserError("A model has no name before its =: use NAME=MODEL.")
        if names.count(name) > 1:
            raise UserError(f"Two models have the name {name}: use NAME=MODEL, with other names.")
    for path in dict(named).values():
        if not os.path.exists(path):
            raise UserError(
                f"{path} does not exist: use a checkpoint, or the folder of a run, of "
                "lightseq-import or of transformers."
            )
    beam = str(flags.get("beam", ""))
    if beam.isdigit() and int(beam) > max_beam:
        raise UserError(f"--beam {beam} is larger than --max-beam {max_beam}: raise that, too.")
    dtype = "float16" if fp16 else "bfloat16" if bf16 else "float32"
    return (
        Plan(named, flags, dtype, cpu, slots, max_length, gpu_memory, workers, log_json),
        Bounds(max_texts, max_characters, max_body, max_beam, timeout, max_requests, api_key),
    )


def _parted(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """The models, and the flags behind them as options of Python."""
    if not words:
        raise UserError("There is no model: give a checkpoint or the folder of a run.")
    first = next((n for n, word in enumerate(words) if word.startswith("--")), len(words))
    models, rest = [*words[:first]], [*words[first:]]
    flags: dict[str, Any] = {}
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise UserError(f"{word} belongs to no flag: models come before flags.")
        name, has_value, value = word[2:].partition("=")
        if not has_value and rest and not rest[0].startswith("--"):
            value, has_value = rest.pop(0), "="
        flags[name.replace("-", "_")] = value if has_value else True
    if not models:
        raise UserError("There is no model: name it before the flags.")
    return models, flags


def _loaded(plan: Plan) -> Engines:
    from lightseq_fairseq.cli.serving import log
    from lightseq_fairseq.cli.serving.engines import Engines

    engines = Engines(plan)
    for each in engines.models.values():
        log.LOGGER.info("%s: %s", each.name, each.shown)
    return engines


def _serve(host: str, port: int, words: Sequence[str], options: dict[str, Any]) -> None:
    """See `main`."""
    _prepare(options["log_json"])
    try:
        import uvicorn
        import uvloop

        from lightseq_fairseq.cli.serving.app import application
        from lightseq_fairseq.cli.serving.connections import Connection
    except ImportError as error:
        raise UserError(
            f"{error.name} is not installed: pip install {' '.join(_PACKAGES)}."
        ) from None
    from lightseq_fairseq.cli.serving import log

    plan, bounds = _planned(words, **options)
    listening = _listening(host, port)
    engines = _loaded(plan)
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # one for each connection
    config = uvicorn.Config(
        application(engines, bounds), http=Connection, log_config=None, access_log=False,
        timeout_graceful_shutdown=_DRAIN,
    )  # fmt: skip
    address = listening.getsockname()
    shown = f"[{address[0]}]" if ":" in address[0] else address[0]
    log.LOGGER.info("listens on http://%s:%d (Ctrl-C ends it)", shown, address[1])
    # uvicorn raises the signal that has ended it again: without these, the status would be its own.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    logging.getLogger("uvicorn.error").addFilter(_is_news)
    server = uvicorn.Server(config)
    try:
        uvloop.run(_run(server, engines, listening))
    finally:
        engines.kill()
    if engines.is_gone:
        raise Abandoned(_PROGRAM, "A process of the server has ended: see the log.", 1)
    if server.force_exit:
        raise Abandoned(_PROGRAM, "interrupted.", 128 + signal.SIGINT)
    sys.stdout.flush()
    os._exit(0)  # a normal exit would wait for threads that wait for the processes


async def _run(server: Server, engines: Engines, listening: socket.socket) -> None:
    """Until the server ends; SIGHUP loads the models again."""
    has_terminal, tasks = sys.stderr.isatty(), set()

    def hang_up() -> None:
        if has_terminal and not sys.stderr.isatty():
            signal.raise_signal(signal.SIGTERM)  # as other programs end when it has gone
            return
        task = asyncio.create_task(_reload(engines))
        tasks.add(task)
        task.add_done_callback(tasks.remove)

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hang_up)
    await server.serve([listening])


async def _reload(engines: Engines) -> None:
    from lightseq_fairseq.cli.serving import log

    log.LOGGER.info("loads the models again")
    try:
        await engines.reload()
    except UserError as error:
        log.LOGGER.error("error: %s The models of before stay.", error)
    else:
        log.LOGGER.info("serves the models that it has loaded again")


def _is_news(record: logging.LogRecord) -> bool:
    """False for the tracebacks of what a second Ctrl-C cancels."""
    kind = record.exc_info[0] if record.exc_info else None
    return kind is not asyncio.CancelledError and "CancelledError" not in record.getMessage()


def _listening(host: str, port: int) -> socket.socket:
    """A socket that listens there; before the models are loaded, which takes a while."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        says = (
            error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        )
        raise UserError(
            f"{_PROGRAM} cannot listen on {host}:{port} ({says}): use other values of "
            "--host and --port."
        ) from None
    listening.set_inheritable(False)
    return listening


def _named(word: str) -> tuple[str, str]:
    """The name and the path of MODEL or NAME=MODEL."""
    name, has_name, path = word.partition("=")
    if has_name and not os.path.exists(word):
        return name, path
    at = Path(word).resolve()
    return (at.parent.name if at.suffix == ".pt" else at.name), word


if __name__ == "__main__":
    main()
