"""RoBERTa from pre-training by fairseq to a classifier: train, validate, average and export."""

from __future__ import annotations

import json
import re
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import helpers.roberta_runs as roberta
import pytest
import torch
from helpers.cli_runs import most_workers, run, succeed, validated
from helpers.golden import matches, refusals

# isort: split
from fairseq import checkpoint_utils
from fairseq.data import Dictionary
from fairseq.models.roberta import RobertaModel

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.python.roberta import RobertaModel as Ours

KINDS = {"classes": roberta.BY_ACCURACY, "numbers": roberta.BY_NUMBERS}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> roberta.Data:
    return roberta.binarise(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def pretrained(data: roberta.Data, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of fairseq."""
    return roberta.pretrain(data, tmp_path_factory.mktemp("pretrained"), "--native")


class Tuned:
    """Our run of fine-tuning, the same command with --native, and what both logged."""

    def __init__(self, data: Path, pretrained: Path, folder: Path, words: list[str]) -> None:
        self.data, self.words = data, words
        self.best, self.native = (folder / name / "checkpoint_best.pt" for name in ("ours", "its"))
        self.logged = roberta.tune(data, pretrained, self.best.parent, *words)
        self.its = roberta.tune(data, pretrained, self.native.parent, *words, "--native")


@pytest.fixture(scope="module")
def tuned(
    data: roberta.Data, pretrained: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Tuned]:
    return {
        kind: Tuned(getattr(data, kind), pretrained, tmp_path_factory.mktemp(kind), words)
        for kind, words in KINDS.items()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_fine_tuning_equals_fairseqs(tuned: dict[str, Tuned], kind: str) -> None:
    ours, its = tuned[kind].logged, tuned[kind].its
    assert len(ours) == len(its) == 2 * (5 + 2)  # two epochs of 5 updates; 2 batches are validated
    for one, other in zip(ours, its, strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    assert ("ncorrect" in ours[0]) == (kind == "classes")
    losses = [x["loss"] for x in ours]
    assert losses[0] != pytest.approx(losses[-3], rel=1e-2)


@pytest.mark.parametrize("system", [[], ["--native"]], ids=["ours", "native"])
def test_workers_of_a_validation_end_before_the_next(
    data: roberta.Data, tmp_path: Path, system: list[str]
) -> None:
    words = [*roberta.TUNED, *roberta.SIZE, *roberta.BY_ACCURACY, "--no-save"]
    words += ["--max-epoch", "3", "--validate-interval-updates", "2", *system]
    assert most_workers(data.classes, *words, "--save-dir", tmp_path) == 2  # one is training's


def test_the_best_checkpoint_is_the_most_accurate(tuned: dict[str, Tuned]) -> None:
    run = tuned["classes"]
    accuracies = [
        100 * sum(x["ncorrect"] for x in batches) / sum(x["nsentences"] for x in batches)
        for batches in (run.logged[5:7], run.logged[12:14])
    ]
    for path in (run.best, run.native):
        state = torch.load(path, weights_only=False)
        assert state["extra_state"]["best"] == round(max(accuracies), 1)
        assert b"ls_" not in path.read_bytes()


def measured(*words: Any) -> str:
    """What lightseq-validate prints of a checkpoint, without speed and size of a batch."""
    line = validated(*words, "--cpu", "--num-workers", "0", "--log-format", "simple")
    return re.split(r" \| wp[sb] ", line)[0].partition(" subset | ")[2]


@pytest.fixture(scope="module")
def other_labels(data: roberta.Data, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The data with labels in another order, and with a label that is not in the dictionary."""
    places = {}
    for name, words in (("moved", ("yes", "no")), ("unseen", ("no", "yes"))):
        place = tmp_path_factory.mktemp(name) / "data"
        shutil.copytree(data.classes, place, ignore=shutil.ignore_patterns("label"))
        lines = Dictionary.load(str(data.classes / "label" / "dict.txt")).symbols[4:6]
        assert {*lines} == {*words}
        order = lines[::-1] if name == "moved" else lines[:1]
        (place.parent / "labels").write_text("".join(f"{word} 1\n" for word in order))
        prefixes = [
            word
            for split in ("train", "valid")
            for word in (f"--{split}pref", data.classes.parent / f"label.{split}")
        ]
        dictionary = ("--srcdict", place.parent / "labels")
        succeed("preprocess", "--only-source", "--destdir", place / "label", *prefixes, *dictionary)
        places[name] = place
    return places


@pytest.mark.parametrize("system", [[], ["--native"]], ids=["ours", "native"])
def test_labels_that_training_did_not_have(
    tuned: dict[str, Tuned], other_labels: dict[str, Path], system: list[str]
) -> None:
    run_, told = tuned["classes"], []
    for place in other_labels.values():
        result = run("validate", place, "--path", run_.best, "--cpu", *system)
        assert result.exit_code == 2, (result.output, result.exception)
        told.append(result.stderr.splitlines()[-1])
    assert "Class 0 is the label" in told[0] and "lightseq-preprocess --srcdict" in told[0]
    assert "is not in label/dict.txt" in told[1]
    # fairseq's checkpoints name only the folder of training.
    words = ["--path", run_.native, "--cpu", "--num-workers", "0", *system]
    result = run("validate", other_labels["moved"], *words)
    assert result.exit_code == 0 and "note: Class 0 is the label" in result.stderr
    result = run("validate", run_.data, *words)
    assert result.exit_code == 0 and "note:" not in result.stderr


def test_python_and_resumed_training_refuse_moved_labels(
    tuned: dict[str, Tuned],
    other_labels: dict[str, Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    best, moved = tuned["classes"].best, other_labels["moved"]
    with pytest.raises(UserError, match="Class 0 is the label"):
        Ours.from_pretrained(str(best.parent), best.name, str(moved), bpe=None)
    words = [*roberta.TUNED, *roberta.SIZE, *roberta.BY_ACCURACY, "--save-dir", tmp_path]
    begin = [word for word in words if not str(word).startswith("--reset")]
    result = run("train", moved, *begin, "--restore-file", best)
    assert result.exit_code == 2 and "Class 0 is the label" in result.stderr.splitlines()[-1]
    succeed("train", moved, *begin, "--restore-file", best, "--reset-optimizer",
            "--reset-dataloader", "--reset-meters", "--max-update", "1")  # fmt: skip
    assert "Class 0 is the label" in caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_validate(tuned: dict[str, Tuned], kind: str) -> None:
    run = tuned[kind]
    line, *others = (
        measured(run.data, "--path", path, *words)
        for path in (run.best, run.native)
        for words in ([], ["--native"], ["--batch-size", "3"])
    )
    assert set(others) == {line}
    if kind == "classes":
        best = torch.load(run.best, weights_only=False)["extra_state"]["best"]
        assert line.endswith(f"accuracy {best:g}")
    else:
        assert re.fullmatch(r"loss \d+\.\d+ \| nll_loss \d+\.\d+", line)


@pytest.mark.parametrize("words", [[], ["--task", "masked_lm"]], ids=["found", "given"])
def test_validate_masked_text(data: roberta.Data, pretrained: Path, words: list[str]) -> None:
    line = measured(data.text, "--path", pretrained, *words)
    assert re.fullmatch(r"loss \d+\.\d+ \| ppl \d+\.\d+", line)
    assert measured(data.text, "--path", pretrained, *words, "--native") == line


def test_validate_ranking(data: roberta.Data, pretrained: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(data.classes, tmp_path / "data")
    shutil.copytree(folder / "input0", folder / "input2")
    for split, count in (("train", 40), ("valid", 12)):
        labels = "".join(f"{line % 2}\n" for line in range(count))
        (folder / "label" / f"{split}.label").write_text(labels)
    ranking = ["--task", "sentence_ranking", "--num-classes", "2", "--max-option-length", "12"]
    roberta.tune(folder, pretrained, tmp_path / "run", *ranking)
    path = tmp_path / "run" / "checkpoint_best.pt"
    line = measured(folder, "--path", path)
    assert re.fullmatch(r"loss \d+\.\d+ \| nll_loss \d+\.\d+ \| accuracy \d+\.?\d*", line)
    assert measured(folder, "--path", path, "--native") == line


def test_average(tuned: dict[str, Tuned], tmp_path: Path) -> None:
    run = tuned["classes"]
    paths = run.best, run.native
    succeed("average", "--inputs", *paths, "--output", tmp_path / "mean.pt")
    models = [torch.load(p, weights_only=False)["model"] for p in (tmp_path / "mean.pt", *paths)]
    for name, mean in models[0].items():
        torch.testing.assert_close(mean, (models[1][name] + models[2][name]) / 2)
    line = measured(run.data, "--path", tmp_path / "mean.pt")
    assert "accuracy" in line
    assert measured(run.data, "--path", tmp_path / "mean.pt", "--native") == line


TOKENS = torch.tensor([[0, 5, 9, 12, 2, 2, 7, 2], [0, 4, 11, 2, 2, 6, 2, 1]])


def outputs(model: Any) -> list[Any]:
    with torch.no_grad():
        found = [model.eval()(TOKENS)[0][TOKENS != 1]]
        if roberta.HEAD in model.classification_heads:
            found.append(model(TOKENS, classification_head_name=roberta.HEAD)[0])
    return found


@pytest.mark.parametrize("kind", ["text", *KINDS])
def test_export(
    data: roberta.Data, pretrained: Path, tuned: dict[str, Tuned], tmp_path: Path, kind: str
) -> None:
    pytest.importorskip("safetensors")
    from safetensors.torch import load_model

    path = pretrained if kind == "text" else tuned[kind].best
    (expected,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(path)])
    assert type(expected) is RobertaModel and len(outputs(expected)) == 1 + (kind != "text")
    for to, name in (("fairseq", "model.pt"), ("safetensors", "folder")):
        succeed("export", path, "--to", to, "--output", tmp_path / name)
    exported = tmp_path / "model.pt"
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(exported)])
    state = torch.load(exported, weights_only=False)
    assert state["last_optimizer_state"] is None
    for one, other in zip(outputs(model), outputs(expected), strict=True):
        assert torch.equal(one, other)
    config = json.loads((tmp_path / "folder" / "config.json").read_text())
    sides = {"text": ["source"], "classes": ["label", "source"], "numbers": ["source"]}[kind]
    assert sorted(config["dictionaries"]) == sides and config["arch"] == "roberta_base"
    for file in config["dictionaries"].values():
        assert (tmp_path / "folder" / file).read_bytes() == (
            Path(task.cfg.data) / file
        ).read_bytes()
    rebuilt = task.build_model(Namespace(**config["options"]))
    load_model(rebuilt, str(tmp_path / "folder" / "model.safetensors"))
    for one, other in zip(outputs(rebuilt), outputs(expected), strict=True):
        assert torch.equal(one, other)


CT2 = "CTranslate2 reads RoBERTa in the format of Hugging Face transformers alone"


def test_export_refuses(data: roberta.Data, pretrained: Path, tmp_path: Path) -> None:
    for to, words, sentence in (
        ("ctranslate2", [], CT2),
        ("safetensors", ["--data", data.classes], f"{data.classes / 'dict.txt'} cannot be read"),
        ("safetensors", ["--data", data.classes / "label"], "has 9 words, but the model has 25"),
    ):
        if to == "ctranslate2":
            pytest.importorskip("ctranslate2")
        result = run("export", pretrained, "--to", to, "--output", tmp_path / "x", *words)
        assert result.exit_code == 2 and sentence in result.stderr, result.output
        assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(("words", "sentence"), refusals(__file__, "test_roberta_tuning"))
def test_wrong_flags_of_classes(
    tuned: dict[str, Tuned], tmp_path: Path, words: str, sentence: str
) -> None:
    begun = [word for word in roberta.TUNED if not word.startswith("--reset")]
    path = tuned["classes"].best
    refused(
        sentence, tuned["classes"].data, *begun, *roberta.SIZE, "--restore-file", path,
        "--save-dir", tmp_path / "run", *words.split(),
    )  # fmt: skip


@pytest.mark.parametrize("criterion", ["sentence_prediction", "ls_sentence_prediction"])
def test_wrong_criterion_of_masked_text(data: roberta.Data, tmp_path: Path, criterion: str) -> None:
    words = [*roberta.MASKED, *roberta.SIZE, "--save-dir", tmp_path, "--criterion", criterion]
    refused("than those of --task masked_lm): use --criterion ls_masked_lm.", data.text, *words)


def refused(sentence: str, *words: Any) -> None:
    result = run("train", *words)
    assert result.exit_code == 2, (result.output, result.exception)
    (error,) = (line for line in result.stderr.splitlines() if ": error:" in line)
    assert matches(error, f"...{sentence}...")


def test_another_head_is_not_validated(tuned: dict[str, Tuned]) -> None:
    data, path = tuned["classes"].data, tuned["classes"].best
    result = run("validate", data, "--path", path, "--cpu", "--num-classes", "3")
    assert result.exit_code == 2
    assert "has 2 classes: set --num-classes 2, or train another head." in result.stderr


def test_another_head_is_trained_with_a_new_optimizer(
    tuned: dict[str, Tuned], tmp_path: Path
) -> None:
    run = tuned["classes"]
    roberta.tune(run.data, run.best, tmp_path, "--num-classes", "4", "--reset-lr-scheduler")
    model = torch.load(tmp_path / "checkpoint_last.pt", weights_only=False)["model"]
    assert len(model[f"classification_heads.{roberta.HEAD}.out_proj.weight"]) == 4
