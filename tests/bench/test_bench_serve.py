"""Servers under load: ours, and other engines behind the same front end."""

from __future__ import annotations

import json
import re
import socket
import sys
from pathlib import Path
from unittest import mock

import helpers.digits as digits
import helpers.forked_commands as forked_commands
import httpx
import pytest

from lightseq_fairseq import Translator
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.benchmark.generate import test_set
from scripts import bench_serve, soak_serve
from scripts.bench_serve import Case

EMBEDDINGS = "roberta_tiny/embeddings/fp32"
NEEDED = ["alone", "full", "clients256", "best_rate", "best", "tenth", "start_s"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a measurement of ours; its folder has the model."""
    place, patch = tmp_path_factory.mktemp("load"), pytest.MonkeyPatch()
    for name, value in (("STEPS", 1), ("CLIENTS", 2), ("SIZE", 3), ("SLOWEST", 1e3)):
        patch.setattr(bench_serve, name, value)
    words = ["--case", EMBEDDINGS, "--systems", "ours", "--vocabulary", 200, "--seconds", 1]
    words += ["--data", place, "--logs", place / "logs", "--output", place / "rows.json"]
    bench_serve.main([*map(str, words)])
    patch.undo()
    return place / "rows.json"


def test_a_row(rows: Path) -> None:
    (row,) = json.loads(rows.read_text())
    assert (row["case"], row["system"]) == (EMBEDDINGS, "ours") and row.keys() >= {*NEEDED}
    assert row["full"]["texts_per_second"] > row["alone"]["texts_per_second"] / 2 > 0
    for name in ("alone", "full", "best", "tenth"):
        assert row[name]["not_answered"] == 0
        assert 0 < row[name]["p50_ms"] <= row[name]["p99_ms"]


def asked(case: str, system: str, folder: Path, path: str, **body: object) -> httpx.Response:
    """The answer of a server of another engine."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with mock.patch.object(sys, "executable", str(forked_commands.python())):
        words = bench_serve.command(Case.parse(case), system, test_set.TestSet(folder), False, port)
    with bench_serve.served(words, {}, folder / "log"):
        return httpx.post(f"http://127.0.0.1:{port}{path}", json=body, timeout=60)


def test_ctranslate2(tmp_path: Path) -> None:
    folder = digits.trained_folder(tmp_path)
    lines = ["eins zwei drei", "vier fünf sechs sieben"]
    answer = asked("trained/beam2/fp32", "ctranslate2", folder, "/translate", q=lines)
    options = {"source_lang": "src", "target_lang": "tgt", "beam": 2, "device": "cpu"}
    model = Translator.from_pretrained(folder / "checkpoint.pt", folder, **options)
    assert answer.json() == {"translatedText": [each.text for each in model.translate(lines)]}


def test_transformers(rows: Path) -> None:
    folder = rows.parent / "roberta_tiny"
    text = (rows.parent / "logs" / "texts").read_text().splitlines()[0]
    body = {"model": "model", "input": [text, text]}
    found = asked(EMBEDDINGS, "transformers", folder, "/v1/embeddings", **body).json()
    assert [len(each["embedding"]) for each in found["data"]] == [64, 64]
    assert found["usage"]["prompt_tokens"] == 2 * (len(text.split()) + 2)


def test_cases_that_do_not_exist() -> None:
    for name in ("trained/embeddings/fp32", "roberta_tiny/beam2/fp32", "tiny/beam4/bf16", "x"):
        with pytest.raises(UserError, match=re.escape(f"There is no case {name}: write")):
            Case.parse(name)


def test_soak(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    toy = digits.toy()
    words = ["--minutes", "0.05", "--rate", "5", "--most", "5", "--log", tmp_path / "log"]
    words += ["--texts", toy.folder / "test.src-tgt.src", "--", toy.paths[-1], "--cpu"]
    flags = ["--data", toy.folder, "--source-lang", "src", "--target-lang", "tgt"]
    with pytest.raises(SystemExit) as ended:
        soak_serve.main([*map(str, [*words, *flags])])
    row = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert (ended.value.code, row["status"], row["first"]) == (0, 0, [])
    assert row["right"] > 0 and row["mib"][0][1] > 50
    assert "loads the models again" in (tmp_path / "log").read_text()
