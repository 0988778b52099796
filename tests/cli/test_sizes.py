"""A run that begins with a checkpoint has the sizes of the checkpoint's model, without flags."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Any

import helpers.roberta_runs as roberta
import pytest
import torch
from helpers.cli_runs import run, succeed
from helpers.golden import matches, refusals

RUN = shlex.split(
    "--max-update 2 --max-tokens 200 --num-workers 0 --no-epoch-checkpoints --lr 1e-3 --cpu"
)
# Data -> the sizes, and words of the first training and of the second one.
PAIRS = "--arch ls_transformer"
TEXT = "--task language_modeling --arch ls_transformer_lm --tokens-per-sample 16"
MODELS = {
    "pairs": (
        "--encoder-layers 1 --decoder-layers 2 --encoder-embed-dim 16 --encoder-ffn-embed-dim 24 "
        "--decoder-embed-dim 24 --decoder-ffn-embed-dim 32 --encoder-attention-heads 2 "
        "--decoder-attention-heads 4 --activation-fn gelu --encoder-normalize-before "
        "--encoder-learned-pos --max-source-positions 40 --max-target-positions 50 "
        "--share-decoder-input-output-embed",
        PAIRS, PAIRS,
    ),
    "text": (
        "--decoder-layers 1 --decoder-embed-dim 16 --decoder-input-dim 16 --decoder-output-dim 16 "
        "--decoder-ffn-embed-dim 24 --decoder-attention-heads 2 --decoder-learned-pos "
        "--max-target-positions 20 --activation-fn gelu --share-decoder-input-output-embed",
        TEXT, TEXT,
    ),
    "letters": (
        "--encoder-layers 2 --encoder-embed-dim 16 --encoder-ffn-embed-dim 24 "
        "--encoder-attention-heads 2 --activation-fn relu --max-positions 32",
        "--task masked_lm --arch ls_roberta --tokens-per-sample 24",
        "--task sentence_prediction --arch ls_roberta --num-classes 2",
    ),
}  # fmt: skip
TUNE = "--finetune-from-model"
RESTORE = "--reset-optimizer --reset-dataloader --reset-meters --reset-lr-scheduler --restore-file"


class Trained:
    """A model of each kind, by fairseq's own code or ours, and data for a second training."""

    def __init__(self, folder: Path, data: Path, text: Path) -> None:
        letters, classes, _ = roberta.binarise(folder / "roberta")
        self.data = {"pairs": data, "text": text, "letters": classes}
        self.paths = {name: folder / name / "checkpoint_last.pt" for name in MODELS}
        self.first: dict[str, list[Any]] = {}
        for (name, (sizes, words, _)), first in zip(MODELS.items(), (data, text, letters)):
            native = ["--native"] * (name == "pairs")
            self.first[name] = [first, *shlex.split(words)]
            succeed("train", *self.first[name], *shlex.split(sizes), *RUN, "--dropout", "0.3",
                    "--save-dir", folder / name, *native)  # fmt: skip
        old = roberta.in_old_form(torch.load(self.paths["letters"], weights_only=False))
        self.paths["old_letters"] = folder / "old.pt"
        torch.save(old, self.paths["old_letters"])

    def again(self, name: str, start: str, *words: Any) -> list[Any]:
        """The words of a second training, which begins with the model."""
        kind = name.removeprefix("old_")
        start = f"{MODELS[kind][2]} {start} {self.paths[name]}"
        return [self.data[kind], *shlex.split(start), *RUN, *words]


@pytest.fixture(scope="module")
def trained(data: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("trained"), data, text)


@pytest.mark.parametrize(
    ("name", "start"),
    [("pairs", TUNE), ("pairs", RESTORE), ("text", TUNE), ("letters", TUNE),
     ("old_letters", RESTORE)],
)  # fmt: skip
def test_sizes_come_from_the_checkpoint(
    trained: Trained, tmp_path: Path, name: str, start: str
) -> None:
    sizes = shlex.split(MODELS[name.removeprefix("old_")][0])
    states = []
    for given in (sizes, []):
        words = trained.again(name, start, *given, "--save-dir", tmp_path / str(len(given)))
        result = run("train", *words)
        assert result.exit_code == 0, (result.output, result.exception)
        taken = f"note: taken from {trained.paths[name]}: "
        assert (taken in result.stderr) == (not given), result.stderr
        # Flags as one types them.
        note = result.stderr.partition(taken)[2].partition("\n")[0]
        assert "True" not in note and "False" not in note
        if note and name == "pairs":
            assert ", --encoder-normalize-before, " in note
            assert note.endswith(", --max-target-positions 50")  # no table is learned of these
        states.append(torch.load(words[-1] / "checkpoint_last.pt", weights_only=False))
    assert states[0]["model"].keys() == states[1]["model"].keys()
    for parameter, value in states[0]["model"].items():
        assert torch.equal(value, states[1]["model"][parameter]), parameter
    settings = states[1]["cfg"]["model"]
    settings = settings if isinstance(settings, dict) else vars(settings)
    assert settings["dropout"] == 0.1  # the arch's
    assert name != "pairs" or settings["max_target_positions"] == 50
    # The run that resumes takes them from its own checkpoint.
    words[words.index("--max-update") + 1] = "3"
    assert run("train", *words).exit_code == 0


@pytest.mark.parametrize(("line", "sentence"), refusals(__file__, "test_sizes"))
def test_a_flag_that_contradicts_is_named(trained: Trained, line: str, sentence: str) -> None:
    name, start, *flag = line.split()
    result = run("train", "no data", *trained.again(name, start, *flag)[1:])
    assert result.exit_code == 2 and result.stdout == "", (result.output, result.exception)
    assert matches(result.stderr, f"lightseq-train: error: {sentence}\n")


@pytest.mark.parametrize("name", MODELS)
def test_a_run_resumes_with_its_sizes(trained: Trained, tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(trained.paths[name].parent, tmp_path / "run")
    words = [*trained.first[name], *RUN, "--save-dir", folder, "--max-update", "3"]
    result = run("train", *words)
    assert result.exit_code == 0, (result.output, result.exception)
    assert f"taken from {folder}/checkpoint_last.pt: " in result.stderr
    assert "taken from" not in run("train", *words, *shlex.split(MODELS[name][0])).stderr


def test_a_default_of_fairseqs_is_not_taken_from_the_checkpoint(text: Path, tmp_path: Path) -> None:
    words = [text, *shlex.split(TEXT), *RUN, "--save-dir", tmp_path, "--decoder-layers", "1",
             "--decoder-attention-heads", "2"]  # fmt: skip
    succeed("train", *words)
    result = run("train", *words, "--max-update", "3")
    assert result.exit_code == 0 and "taken from" not in result.stderr, result.stderr


def test_a_run_that_keeps_some_layers_resumes(trained: Trained, tmp_path: Path) -> None:
    """fairseq's file has the number of those."""
    sizes = MODELS["text"][0].replace("--decoder-layers 1", "--decoder-layers 2")
    words = [*trained.first["text"], *shlex.split(sizes), *RUN, "--decoder-layers-to-keep", "0",
             "--save-dir", tmp_path, "--arch", "ls_transformer_lm_gpt2_small"]  # fmt: skip
    succeed("train", *words, "--native")
    result = run("train", *words, "--max-update", "3")
    assert result.exit_code == 0, (result.output, result.exception)


@pytest.mark.parametrize("tunes", [False, True])
def test_a_run_does_not_resume_with_another_arch(trained: Trained, tunes: bool) -> None:
    """With --finetune-from-model, too, which is not read if the folder has a run, even if it is
    missing: a note says so."""
    folder = trained.paths["pairs"].parent
    words = [trained.data["pairs"], "--arch", "ls_transformer_tiny", *RUN, "--save-dir", folder]
    result = run("train", *words, *(["--finetune-from-model", "missing.pt"] if tunes else []))
    assert result.exit_code == 2 and "does not match checkpoint" in result.stderr
    assert "this folder has a run of --arch ls_transformer: use its --arch" in result.stderr
    assert "taken from" not in result.stderr
    note = "checkpoint_last.pt, so --finetune-from-model is not read. To begin a new run, choose"
    assert (note in result.stderr) == tunes


def test_native_takes_no_sizes(trained: Trained, tmp_path: Path) -> None:
    words = trained.again("pairs", TUNE, "--native", "--save-dir", tmp_path)
    result = run("train", *words)
    assert result.exit_code == 2
    assert f"does not match checkpoint {trained.paths['pairs']} (" in result.stderr
