"""Commands accept the folder of a run where they read a checkpoint, and leave no empty folder."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from helpers.cli_runs import SMALL, run, succeed

from lightseq_fairseq import Translator

# isort: split
from fairseq import checkpoint_utils

MODEL = ["--arch", "ls_transformer_tiny", *SMALL]


@pytest.fixture(scope="module")
def trained(data: Path) -> Path:
    """A run with checkpoint_best.pt and checkpoint_last.pt, which differ."""
    folder = data.parent / "run"
    words = ["--max-update", "4", "--validate-interval-updates", "2"]
    succeed("train", data, *MODEL, *words, "--save-dir", folder)
    last = torch.load(folder / "checkpoint_last.pt", weights_only=False)
    last["model"] = {name: 2 * weights for name, weights in last["model"].items()}
    torch.save(last, folder / "checkpoint_last.pt")
    return folder


def sentences(output: str) -> list[str]:
    return re.findall("^[A-Z]-.*", output, re.M)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("generate", ["--beam", "2", "--max-len-b", "5"]),
        ("validate", ["--max-tokens", "200"]),
        ("generate", ["--beam", "2", "--max-len-b", "5", "--native"]),
    ],
)
def test_path_of_a_run_is_its_best_checkpoint(
    data: Path, trained: Path, command: str, words: list[str]
) -> None:
    load = checkpoint_utils.load_checkpoint_to_cpu
    with mock.patch.object(checkpoint_utils, "load_checkpoint_to_cpu", wraps=load) as loaded:
        out = succeed(command, data, "--path", trained, *words, "--cpu")
    assert {call.args[0] for call in loaded.mock_calls} == {str(trained / "checkpoint_best.pt")}
    if command == "generate":
        best, last = (
            succeed(command, data, "--path", trained / f"checkpoint_{which}.pt", *words, "--cpu")
            for which in ("best", "last")
        )
        assert sentences(out) == sentences(best) != sentences(last)


def test_a_checkpoint_names_the_languages_of_its_data(
    data: Path, trained: Path, tmp_path: Path
) -> None:
    """So it translates in a folder with nothing but dictionaries, and not the other way."""
    best = torch.load(trained / "checkpoint_best.pt", weights_only=False)
    task = best["cfg"]["task"]
    assert (task["source_lang"], task["target_lang"]) == ("de", "en")
    task["data"] = "/gone"
    alone = tmp_path / "alone"
    alone.mkdir()
    torch.save(best, alone / "checkpoint_best.pt")
    for name in ("dict.de.txt", "dict.en.txt"):
        shutil.copyfile(data / name, alone / name)
    words = ["--beam", "2", "--max-len-b", "5", "--cpu"]
    (tmp_path / "text").write_text("w1 w2\n")
    line = ["--input", tmp_path / "text"]
    (expected, found) = (
        re.findall("^D-.*", succeed("interactive", folder, "--path", place, *words, *line), re.M)[0]
        for folder, place in ((data, trained), (alone, alone))
    )
    assert found == expected
    translator = Translator.from_pretrained(alone, device="cpu", beam=2, max_len_b=5)
    assert translator.translate("w1 w2").text == expected.split("\t")[2]

    other = tmp_path / "other"
    other.mkdir()
    for path in data.iterdir():
        if path.is_file():
            shutil.copyfile(path, other / path.name.replace("de-en", "en-de"))
    refused = run("generate", other, "--path", trained, *words)
    assert "translates de to en, but" in refused.stderr and refused.exit_code == 2
    named = succeed("generate", other, "--path", trained, *words, "-s", "de", "-t", "en")
    assert sentences(named) == sentences(succeed("generate", data, "--path", trained, *words))
    before = (trained / "checkpoint_last.pt").read_bytes()
    refused = run("train", other, *MODEL, "--max-update", "5", "--save-dir", trained)
    assert "is of a run that translates de to en" in refused.stderr and refused.exit_code == 2
    assert (trained / "checkpoint_last.pt").read_bytes() == before


def test_an_ensemble_of_runs(data: Path, trained: Path) -> None:
    words = ["--beam", "2", "--max-len-b", "5", "--cpu"]
    best = trained / "checkpoint_best.pt"
    by_folders = succeed("generate", data, "--path", f"{trained}:{trained}", *words)
    by_files = succeed("generate", data, "--path", f"{best}:{best}", *words)
    assert sentences(by_folders) == sentences(by_files) != []


def test_export_of_a_run_and_over_an_old_export(trained: Path, tmp_path: Path) -> None:
    output = tmp_path / "exported"
    words = ["--to", "safetensors", "--output", output]
    succeed("export", trained / "checkpoint_last.pt", *words)
    (output / "old").touch()
    before = (output / "model.safetensors").read_bytes()
    refused = run("export", trained, *words)
    assert refused.exit_code == 2 and "or replace it with --force" in refused.stderr
    assert (output / "model.safetensors").read_bytes() == before
    succeed("export", trained, *words, "--force")
    assert (output / "model.safetensors").read_bytes() != before
    assert not (output / "old").exists() and [*tmp_path.iterdir()] == [output]


@pytest.mark.parametrize("words", [["--restore-file", "gone.pt"], ["--train-subset", "gone"]])
def test_a_failed_training_leaves_no_empty_folder(
    data: Path, tmp_path: Path, words: list[str]
) -> None:
    result = run("train", data, *MODEL, *words, "--save-dir", tmp_path / "a" / "b")
    assert result.exit_code != 0 and not (tmp_path / "a").exists()
    (tmp_path / "kept").mkdir()  # the user's
    run("train", data, *MODEL, *words, "--save-dir", tmp_path / "kept")
    assert (tmp_path / "kept").exists()


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ([], "add --source-lang and --target-lang, for the files {0}.<language>, or --only"),
        (["-s", "en", "-t", "de"], "check the path"),
        (["--only-source"], "check the path"),
    ],
)
def test_a_failed_preprocess_leaves_no_folder(
    tmp_path: Path, words: list[str], advice: str
) -> None:
    prefix = tmp_path / "train"
    result = run("preprocess", "--trainpref", prefix, "--destdir", tmp_path / "bin", *words)
    assert result.exit_code == 2 and not [*tmp_path.iterdir()]
    missing = f"{prefix}.en" if "-s" in words else prefix
    assert f"{missing} does not exist: {advice.format(prefix)}" in result.stderr
