"""Standard output on a full disk: one sentence and status 2, without a traceback."""

from __future__ import annotations

import contextlib
import importlib
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.cli_runs import SMALL, succeed, unchanged

from lightseq_fairseq.base import output

FULL = Path("/dev/full")
SAYS = "error: Standard output cannot be written (No space left on device): write it elsewhere.\n"

pytestmark = pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    succeed("train", data, "--arch", "ls_transformer_tiny", *SMALL, "--save-dir", folder)
    return folder / "checkpoint_last.pt"


@pytest.mark.parametrize(
    "line",
    [
        "generate DATA --path MODEL --cpu --beam 2",
        "interactive DATA --path MODEL --cpu --beam 2 --input TEXT",
        "score --sys TEXT --reference TEXT",
        "doctor --json",
        "bench --help",
        "generate --version",
        "generate --fairseq-help",
        "lightseq completion bash",
    ],
)
def test_a_command_says_it(
    data: Path, trained: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    names = {"DATA": data, "MODEL": trained, "TEXT": data.parent / "text/test.de"}
    command, *words = [str(names.get(word, word)) for word in shlex.split(line)]
    main = importlib.import_module(f"lightseq_fairseq.cli.{command}").main
    with (
        unchanged(), FULL.open("w") as full, contextlib.redirect_stdout(full),
        pytest.raises(SystemExit) as end,
    ):  # fmt: skip
        main.main(words)
    assert end.value.code == 2
    assert capsys.readouterr().err.endswith(f"{main.name}: {SAYS}")


def test_what_the_log_says_is_written_too(data: Path, trained: Path) -> None:
    """logging would print a traceback for each line, and the command would succeed."""
    words = data, "--path", trained, "--cpu"
    with FULL.open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "lightseq_fairseq.cli.validate", *words],
            stdout=full, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    assert done.returncode == 2 and done.stderr.splitlines()[-1:] == [
        f"lightseq-validate: {SAYS}"[:-1]
    ]
    assert "Traceback" not in done.stderr


def test_training_continues_without_its_log(capsys: pytest.CaptureFixture[str]) -> None:
    done = []
    with (
        FULL.open("w") as full, contextlib.redirect_stdout(full),
        pytest.raises(output.Unwritable), output.must_be_written(),
    ):  # fmt: skip
        with output.may_be_unread():
            print("a line", flush=True)
        done.append("a checkpoint")
    assert done and capsys.readouterr() == ("", "")


def test_without_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with output.must_be_written():
        print("a line")
        sys.stdout.isatty()
    assert sys.stdout is None
