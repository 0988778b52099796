"""BART's pre-training by the commands, with the settings that they fill in: train, validate,
fine-tune, export."""

from __future__ import annotations

import logging
import re
import shlex
import shutil
from pathlib import Path

import helpers.cli_runs as cli_runs
import helpers.parity as parity
import pytest
import torch

from lightseq_fairseq.base import families

SIZE = shlex.split(
    "--encoder-layers 1 --decoder-layers 1 --encoder-embed-dim 16 --encoder-ffn-embed-dim 16 "
    "--encoder-attention-heads 2 --decoder-attention-heads 2 --cpu"
)
TASKS = {"denoising": "bart_base", "multilingual_denoising": "mbart_base"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Text of each task, and sentence pairs with the same dictionary."""
    folder = tmp_path_factory.mktemp("data")
    raw = folder / "raw"
    parity.write_corpus(raw / "pairs")
    dictionary = ["--srcdict", raw / "pairs" / "dict.src.txt"]
    words = ["-s", "src", "-t", "tgt", "--joined-dictionary", *dictionary]
    for split in ("train", "valid"):
        words += [f"--{split}pref", raw / "pairs" / f"{split}.src-tgt"]
    cli_runs.succeed("preprocess", *words, "--destdir", folder / "pairs")
    for part in ("one", "several/src", "several/tgt"):
        text = parity.write_text(raw / part, longest=14)
        words = ["--only-source", *dictionary, "--trainpref", text / "train"]
        words += ["--validpref", text / "valid", "--destdir", folder / part]
        cli_runs.succeed("preprocess", *words)
    shutil.copy(folder / "one" / "dict.txt", folder / "several")
    return {
        "denoising": folder / "one",
        "multilingual_denoising": folder / "several",
        "translation": folder / "pairs",
    }


@pytest.fixture(scope="module", params=TASKS)
def run(
    request: pytest.FixtureRequest, data: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, str]:
    """A task, a checkpoint that its recipe has trained, and what the command has printed."""
    task, folder = request.param, tmp_path_factory.mktemp("run")
    words = [data[task], "--task", task, "--arch", f"ls_{TASKS[task]}", *SIZE]
    words += ["--max-epoch", "15", "--lr", "0.02", "--tokens-per-sample", "24"]
    words += ["--max-tokens", "192", "--save-dir", folder, "--no-epoch-checkpoints"]
    level = logging.root.level
    logging.root.setLevel(logging.INFO)  # as fairseq does, but not under pytest
    result = cli_runs.run("train", *words)
    logging.root.setLevel(level)
    assert result.exit_code == 0, result.output
    log = (folder / "lightseq-train.log").read_text()
    return task, folder / "checkpoint_last.pt", result.output + log


def test_it_trains_by_the_recipe(run: tuple[str, Path, str]) -> None:
    task, _, log = run
    recipe = families.tasks()[task].recipe
    for flags in (recipe.optimizer, recipe.criterion, recipe.data):
        assert flags in log
    added = {"denoising": "<mask>", "multilingual_denoising": "[src] [tgt] <mask>"}[task]
    assert f"note: dict.txt lacks {added}, so --task {task} adds" in log
    assert " blocks of text, " in log
    assert "# warm-up: " in log and "a tenth of the run (--max-epoch 15)" in log
    assert "Traceback" not in log and "note: --" not in log
    losses = [float(x) for x in re.findall(r"valid on 'valid' subset \| loss (\S+)", log)]
    assert len(losses) == 15 and losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("task", TASKS)
def test_a_native_run_reads_the_same_noise(
    data: dict[str, Path], tmp_path: Path, task: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Without dropout, it has the same losses; fairseq 0.12.2 cannot run the command."""
    caplog.set_level(logging.INFO)
    found = []
    for words in ([], ["--native"]):
        caplog.clear()
        command = [data[task], "--task", task, "--arch", f"ls_{TASKS[task]}", *SIZE, *words]
        command += ["--max-epoch", "2", "--lr", "1e-3", "--dropout", "0", "--tokens-per-sample"]
        cli_runs.succeed("train", *command, "24", "--max-tokens", "192", "--save-dir", tmp_path)
        shutil.rmtree(tmp_path)
        found.append(re.findall(r"subset \| loss (\S+)", caplog.text))
        assert ("step: without CUDA graphs, without padding" in caplog.text) != bool(words)
    assert found[0] == found[1] and len(found[0]) == 2


def test_a_checkpoint_is_validated_with_the_noise_of_training(
    data: dict[str, Path], run: tuple[str, Path, str]
) -> None:
    task, checkpoint, log = run
    losses = re.findall(r"subset \| loss (\S+)", log)
    words = ["--task", task, "--path", checkpoint, "--max-tokens", "192", "--cpu"]
    for more in ([], ["--native"]):
        assert f"| loss {losses[-1]} " in cli_runs.validated(data[task], *words, *more)


def test_a_checkpoint_begins_translation(
    data: dict[str, Path], run: tuple[str, Path, str], tmp_path: Path
) -> None:
    """The dictionary of translation lacks <mask>, or the task adds it at the same place."""
    task, checkpoint, _ = run
    languages = task == "multilingual_denoising"
    tuned = "translation_from_pretrained_bart --langs src,tgt" if languages else "translation"
    words = ["--task", *tuned.split(), "--arch", f"ls_{TASKS[task]}", "--cpu", "--max-update", "1"]
    words += ["--finetune-from-model", checkpoint, "--save-dir", tmp_path, "--lr", "1e-9"]
    log = cli_runs.succeed("train", data["translation"], *words)
    assert "Traceback" not in log
    before, after = (
        torch.load(path, weights_only=False)["model"]
        for path in (checkpoint, tmp_path / "checkpoint_last.pt")
    )
    rows = {name: len(before[name]) - len(after[name]) for name in before}
    gone = {name for name, count in rows.items() if count}
    tables = {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight",
              "decoder.output_projection.weight"}  # fmt: skip
    assert gone == (set() if languages else tables)
    for name, weight in after.items():
        assert torch.allclose(weight, before[name][: len(weight)], atol=1e-5), name


def test_a_checkpoint_without_mask_gets_a_row(data: dict[str, Path], tmp_path: Path) -> None:
    """It has one row less than the dictionary of the task. A file with other words is refused."""
    first, second = tmp_path / "first", tmp_path / "second"
    words = ["--arch", "ls_bart_base", *SIZE, "--max-update", "1", "--save-dir"]
    cli_runs.succeed("train", data["translation"], *words, first)
    path = first / "checkpoint_last.pt"
    words[2:2] = ["--task", "denoising", "--finetune-from-model", path]
    cli_runs.succeed("train", data["denoising"], *words, second)
    state = torch.load(second / "checkpoint_last.pt", weights_only=False)
    assert len(state["model"]["encoder.embed_tokens.weight"]) == 98
    state = torch.load(path, weights_only=False)
    state["extra_state"]["dictionaries"] = dict.fromkeys(("source", "target"), "97:other words")
    torch.save(state, path)
    done = cli_runs.run("train", data["denoising"], *words, tmp_path / "third")
    assert done.exit_code == 2, done.output
    (sentence,) = (line for line in done.output.splitlines() if "error:" in line)
    assert "has 98 words with those that --task denoising adds, such as <mask>, but" in sentence
    assert "was trained with 97" in sentence


@pytest.mark.parametrize("run", ["multilingual_denoising"], indirect=True)
def test_pre_training_goes_on_with_new_languages(
    data: dict[str, Path], run: tuple[str, Path, str], tmp_path: Path
) -> None:
    """Each word keeps its row; fairseq 0.12.2 does not load the output layer then."""
    task, checkpoint, _ = run
    shutil.copytree(data[task], tmp_path / "data")
    shutil.copytree(data[task] / "src", tmp_path / "data" / "new")
    words = [tmp_path / "data", "--task", task, "--arch", "ls_mbart_base", *SIZE, "--lr", "1e-9"]
    words += ["--max-update", "1", "--tokens-per-sample", "24", "--max-tokens", "192"]
    words += ["--langs", "tgt,new,src", "--add-lang-token", "--save-dir", tmp_path / "run"]
    cli_runs.succeed("train", *words, "--finetune-from-model", checkpoint)
    after = torch.load(tmp_path / "run" / "checkpoint_last.pt", weights_only=False)["model"]
    before = torch.load(checkpoint, weights_only=False)["model"]
    count = len(before["encoder.embed_tokens.weight"])  # ..., [src], [tgt], <mask>
    rows = [*range(count - 3), count - 2, None, count - 3, count - 1]
    for name in ("encoder.embed_tokens.weight", "decoder.output_projection.weight"):
        assert len(after[name]) == count + 1
        for row, old in enumerate(rows):
            same = [torch.allclose(after[name][row], x, atol=1e-6) for x in before[name]]
            assert same.index(True) == old if old is not None else not any(same)


def test_it_is_exported(data: dict[str, Path], run: tuple[str, Path, str], tmp_path: Path) -> None:
    task, checkpoint, _ = run
    for kind in ("safetensors", "fairseq", "huggingface"):
        words = ["--to", kind, "--output", tmp_path / kind, "--data", data[task]]
        cli_runs.succeed("export", checkpoint, *words)
        assert (tmp_path / kind).exists()
