"""lightseq-preprocess removes its files if it is interrupted or fails, so that it can run again."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from fairseq.binarizer import FileBinarizer
from helpers.cli_runs import run, succeed, write_text


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("flags", ["-s de -t en", "--only-source", "--only-source -s de"])
def test_the_same_command_runs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, error: type[BaseException]
) -> None:
    write_text(tmp_path)
    texts = tmp_path / ("train.de" if flags == "--only-source" else "train")
    words = [*flags.split(), "--trainpref", texts, "--validpref", texts]
    succeed("preprocess", *words, "--destdir", tmp_path / "whole")
    binarise, count = FileBinarizer.multiprocess_dataset, 0

    def stopped(*arguments: Any, **keywords: Any) -> Any:
        nonlocal count
        binarise(*arguments, **keywords)
        count += 1
        if count == 2:
            raise error

    other = tmp_path / "other"
    other.mkdir()
    (other / "dict.fr.txt").touch()  # of another pair, which has the folder, too
    for folder, left in ((tmp_path / "new", None), (other, ["dict.fr.txt", "preprocess.log"])):
        count = 0
        with monkeypatch.context() as patched:
            patched.setattr(FileBinarizer, "multiprocess_dataset", stopped)
            result = run("preprocess", *words, "--destdir", folder)
        assert result.exit_code == (130 if error is KeyboardInterrupt else 1), result.output
        assert (sorted(os.listdir(folder)) if folder.exists() else None) == left
        succeed("preprocess", *words, "--destdir", folder)
        assert {*os.listdir(folder)} == {*os.listdir(tmp_path / "whole"), *(left or [])}


def test_its_processes_end_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C reaches them, too."""
    write_text(tmp_path)
    seen = []

    def interrupted(*arguments: Any, **keywords: Any) -> None:
        with multiprocessing.get_context("fork").Pool(1) as pool:
            seen.append(pool.apply(signal.getsignal, (signal.SIGINT,)))
        raise KeyboardInterrupt

    monkeypatch.setattr(FileBinarizer, "multiprocess_dataset", interrupted)
    words = "-s", "de", "-t", "en", "--trainpref", tmp_path / "train"
    result = run("preprocess", *words, "--destdir", tmp_path / "data", "--workers", "2")
    assert result.exit_code == 130 and seen == [signal.SIG_DFL]
    assert not (tmp_path / "data").exists()


def test_files_that_were_there_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path)
    words = "-s", "de", "-t", "en", "--destdir", tmp_path / "data"
    succeed("preprocess", *words, "--trainpref", tmp_path / "train")
    before = sorted(os.listdir(tmp_path / "data"))
    given = [word for x in ("src", "tgt") for word in (f"--{x}dict", tmp_path / "twice")]
    (tmp_path / "twice").write_text("w1 1\nw1 1\n")
    result = run("preprocess", *words, *given, "--validpref", tmp_path / "valid")
    assert result.exit_code == 2 and sorted(os.listdir(tmp_path / "data")) == before
