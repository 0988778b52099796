"""lightseq-eval-lm prints what fairseq-eval-lm prints, for checkpoints of both programs."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from pathlib import Path

import helpers.cli_runs as cli_runs
import pytest
import torch
from fairseq.models.transformer_lm import TransformerLanguageModel
from helpers.golden import matches, refusals

from lightseq_fairseq.plugins import scorer
from lightseq_fairseq.plugins.language_model import LSTransformerLanguageModel


def train(text: Path, folder: Path, ours: bool) -> Path:
    prefix = "ls_" if ours else ""
    cli_runs.succeed(
        "train", text, *cli_runs.SMALL_TEXT, "--save-dir", folder, "--max-update", "12",
        "--arch", f"{prefix}transformer_lm", "--optimizer", f"{prefix}adam",
        "--criterion", f"{prefix}cross_entropy", "--lr", "1e-2",
    )  # fmt: skip
    return folder / "checkpoint_last.pt"


@pytest.fixture(scope="module")
def checkpoints(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each program, by its name."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return {
        name: train(text, folder / name, ours=name == "ours") for name in ("ours", "fairseq")
    }  # fmt: skip


Evaluate = Callable[..., list[str]]


@pytest.fixture
def evaluate(
    text: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Evaluate:
    """Runs the command, and returns what fairseq's ``eval_lm`` logs, without times."""

    def run(checkpoint: Path, *words: str) -> list[str]:
        packed, scores = [], scorer._scores
        monkeypatch.setattr(scorer, "_scores", lambda *a: packed.append(a[0]) or scores(*a))
        caplog.clear()
        caplog.set_level(logging.INFO)
        cli_runs.succeed(
            "eval-lm", text, "--path", checkpoint, "--gen-subset", "test", "--cpu",
            "--tokens-per-sample", "16", "--num-workers", "0", *words,
        )  # fmt: skip
        monkeypatch.undo()
        assert {type(model) for model in packed} == (
            set() if "--native" in words else {LSTransformerLanguageModel}
        )
        records = [r for r in caplog.records if r.name == "fairseq_cli.eval_lm"]
        return [re.sub(r" in .*tokens/s\)", "", record.getMessage()) for record in records]

    return run


NUMBER = re.compile(r"(?<![\w.])-?\d+\.\d+")


def assert_same(found: list[str], expected: list[str]) -> None:
    assert [NUMBER.sub("#", line) for line in found] == [NUMBER.sub("#", x) for x in expected]
    for a, b in zip(found, expected):
        numbers = [[float(x) for x in NUMBER.findall(line)] for line in (a, b)]
        assert numbers[0] == pytest.approx(numbers[1], rel=1e-5, abs=1e-5), (a, b)


LINES = [
    "",
    "--sample-break-mode complete --add-bos-token",
    "--sample-break-mode complete_doc --batch-size 3",
    "--sample-break-mode eos --output-word-probs",
    "--context-window 8 --output-word-stats",
    "--output-word-probs --output-word-stats --softmax-batch 5",
    "--max-tokens 40 --num-shards 3 --shard-id 1 --output-word-probs",
]


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("writer", ["ours", "fairseq"])
def test_the_log_is_fairseqs(
    checkpoints: dict[str, Path], evaluate: Evaluate, writer: str, line: str
) -> None:
    found, expected = (
        evaluate(checkpoints[writer], *line.split(), *more) for more in ([], ["--native"])
    )
    assert_same(found, expected)
    loss, perplexity = map(float, NUMBER.findall(found[-1]))
    assert found[-1].startswith("Loss (base 2): ")
    assert perplexity == pytest.approx(2**loss, rel=1e-3) and loss < math.log2(24)


def test_whole_words(checkpoints: dict[str, Path], evaluate: Evaluate) -> None:
    line = ["--output-word-probs", "--output-word-stats", "--remove-bpe", "@@ "]
    found, expected = (evaluate(checkpoints["ours"], *line, *x) for x in ([], ["--native"]))
    assert_same(found, expected)
    assert any(re.search(r"\bw4w\d", text) for text in found)


def test_shards_are_parts_of_the_text(checkpoints: dict[str, Path], evaluate: Evaluate) -> None:
    def blocks(*words: str) -> list[str]:
        lines = evaluate(checkpoints["ours"], "--output-word-probs", "--max-tokens", "40", *words)
        return sorted(line for line in lines if re.match(r"\d+ ", line))

    shards = [blocks("--num-shards", "2", "--shard-id", str(shard)) for shard in range(2)]
    assert all(shards)
    found, whole = (
        sorted(int(line.split()[0]) for line in lines)
        for lines in ([*shards[0], *shards[1]], blocks())
    )
    assert found == whole


def test_an_average_is_evaluated(
    checkpoints: dict[str, Path], evaluate: Evaluate, tmp_path: Path
) -> None:
    """The average of our checkpoint and fairseq's, which have the same names and shapes."""
    both, averaged = list(checkpoints.values()), tmp_path / "averaged.pt"
    cli_runs.succeed("average", "--inputs", *both, "--output", averaged)
    logs = [evaluate(averaged, *more) for more in ([], ["--native"])]
    assert_same(*logs)
    weights = [torch.load(p, weights_only=False)["model"] for p in (*both, averaged)]
    for name, value in weights[2].items():
        torch.testing.assert_close(value, (weights[0][name] + weights[1][name]) / 2)
    assert logs[0][-1] not in [evaluate(path)[-1] for path in both]


@pytest.mark.parametrize("writer", ["ours", "fairseq"])
def test_validate_builds_it_too(
    text: Path, checkpoints: dict[str, Path], writer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, built = [], []
    forward = TransformerLanguageModel.build_model.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(
        TransformerLanguageModel,
        "build_model",
        classmethod(lambda cls, *args: built.append(cls) or forward(cls, *args)),
    )
    for more in ([], ["--native"]):
        log = cli_runs.succeed(
            "validate", text, "--path", checkpoints[writer],
            "--valid-subset", "test", "--num-workers", "0", "--cpu", *more,
        )  # fmt: skip
        losses.append(re.findall(r" loss ([\d.]+) \| ppl ([\d.]+)", log))
    assert built == [LSTransformerLanguageModel, TransformerLanguageModel]
    assert losses[0] == losses[1] != []


@pytest.mark.parametrize(("words", "sentence"), refusals(__file__, "test_eval_lm"))
def test_bad_input(text: Path, checkpoints: dict[str, Path], words: str, sentence: str) -> None:
    path = ["--path", checkpoints["ours"], "--cpu", "--gen-subset", "test"]
    result = cli_runs.run("eval-lm", text, *path, *words.split())
    assert result.exit_code == 2, (result.output, result.exception)
    (error,) = (x for x in result.output.splitlines() if "error:" in x)
    assert matches(error, f"lightseq-eval-lm: error: {sentence}")


def test_no_checkpoint(text: Path) -> None:
    result = cli_runs.run("eval-lm", text, "--gen-subset", "test", "--cpu")
    assert result.exit_code == 2 and "--path is missing" in result.output
