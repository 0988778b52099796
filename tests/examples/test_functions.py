"""examples/functions.sh: the flags of a script are those that the comment at its top names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.multi30k_runs import EXAMPLES

SCRIPT = f"""#!/usr/bin/env bash
# Trains.
#
#   bash script.sh [--native] [--size cpu|gpu] [--few-updates N] [--pairs "N N ..."] [--fast]
#                  [--data DIR] [-- WORD...]
#
# --fast is fast.
set -euo pipefail

. "{EXAMPLES}/functions.sh"
read_flags "$@"
for name in size few_updates pairs fast data seed out system; do echo "$name=${{!name:-}}"; done
for word in "${{native[@]}}" "${{words[@]}}"; do echo "word $word"; done
echo "$here $root"
"""
DEFAULTS = {"seed": "1", "system": "lightseq"}


def run(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs SCRIPT in ``folder``."""
    (folder / "script.sh").write_text(SCRIPT)
    return subprocess.run(
        ["bash", "script.sh", *words], cwd=folder, env={**os.environ, **variables},
        capture_output=True, text=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "values", "more"),
    [
        ([], {}, []),
        (["--fast", "--size", "gpu", "--few-updates", "12"],
         {"fast": "yes", "size": "gpu", "few_updates": "12"}, []),
        (["--pairs", "1 20", "--data", "a folder", "--native", "--", "--seed", "a b"],
         {"pairs": "1 20", "data": "a folder", "system": "fairseq"},
         ["--native", "--seed", "a b"]),
    ],
)  # fmt: skip
def test_flags_set_variables(
    tmp_path: Path, words: list[str], values: dict[str, str], more: list[str]
) -> None:
    # A variable of the environment is no flag.
    *lines, last = run(tmp_path, *words, size="huge", data="x", native="y").stdout.splitlines()
    names = ["size", "few_updates", "pairs", "fast", "data", "seed", "out", "system"]
    expected = dict.fromkeys(names, "") | DEFAULTS | {"out": f"{tmp_path}/out"} | values
    assert lines == [f"{k}={v}" for k, v in expected.items()] + [f"word {word}" for word in more]
    assert last == f"{tmp_path} {EXAMPLES.parent}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--size", "tpu"], "--size must be cpu or gpu, not tpu"),
        (["--size", "cpu|gpu"], "--size must be cpu or gpu, not cpu|gpu"),
        (["--few-updates"], "--few-updates must be a number"),
        (["--few-updates", "a[$(touch hacked)]"],
         "--few-updates must be a number, not a[$(touch hacked)]"),
        (["--pairs", "1 x"], "--pairs must be numbers, not 1 x"),
        (["--data"], "--data must be a folder"),
        (["--few"], "unknown argument --few (see bash script.sh --help)"),
        (["--few-updates N"], "unknown argument --few-updates N (see bash script.sh --help)"),
        (["size"], "unknown argument size (see bash script.sh --help)"),
        ([""], "unknown argument  (see bash script.sh --help)"),
    ],
)  # fmt: skip
def test_wrong_words_are_refused(tmp_path: Path, words: list[str], message: str) -> None:
    done = run(tmp_path, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"script.sh: {message}\n"
    assert not (tmp_path / "hacked").exists()


def test_help_is_the_comment_at_the_top(tmp_path: Path) -> None:
    done = run(tmp_path, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("Trains.\n\n  bash script.sh [--native]")
    assert done.stdout.endswith("\n--fast is fast.\n")


def test_shellcheck_finds_nothing() -> None:
    scripts = sorted(EXAMPLES.rglob("*.sh"))
    words = [Path(sys.executable).parent / "shellcheck", "-x", *scripts]
    done = subprocess.run(words, cwd=EXAMPLES.parent, capture_output=True)
    assert done.returncode == 0, done.stdout.decode()


@pytest.mark.parametrize(("status", "says"), [(130, True), (1, False), (0, False)])
def test_how_to_resume_after_ctrl_c(tmp_path: Path, status: int, says: bool) -> None:
    (tmp_path / "run.sh").write_text(
        f'set -euo pipefail\n. "{EXAMPLES}/functions.sh"\nbegin_again {tmp_path}/out text\n'
        f"(exit {status}) | tee -i log\n"
    )
    found = subprocess.run(["bash", "run.sh"], cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode == status
    assert ("run.sh: to resume, type the lightseq-train command" in found.stderr) == says
