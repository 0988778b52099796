"""BART's way through the commands: training by its recipe, search, validation, export."""

from __future__ import annotations

import logging
import re
import shlex
import shutil
from pathlib import Path
from unittest import mock

import pytest
from helpers import cli_runs, parity

from lightseq_fairseq.base import families
from lightseq_fairseq.base.families import BART
from lightseq_fairseq.plugins import generator

SMALL = shlex.split(
    "--arch ls_bart_base --encoder-layers 1 --decoder-layers 1 --encoder-embed-dim 16 "
    "--encoder-ffn-embed-dim 16 --encoder-attention-heads 2 --decoder-attention-heads 2 "
    "--max-update 6 --cpu"
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    raw = parity.write_corpus(folder / "raw")
    splits = [
        word
        for split in ("train", "valid", "test")
        for word in (f"--{split}pref", raw / f"{split.replace('test', 'valid')}.src-tgt")
    ]
    languages = ["--source-lang", "src", "--target-lang", "tgt"]
    words = [*languages, "--joined-dictionary", "--srcdict", raw / "dict.src.txt"]
    cli_runs.succeed("preprocess", *words, *splits, "--destdir", folder / "pairs")
    return folder / "pairs"


# Task -> its flags
TASKS = {
    "translation": [],
    "translation_from_pretrained_bart": ["--langs", "xx,src,tgt"],
}


def flags_of(task: str) -> list[str]:
    return ["--task", task, *TASKS[task]]


@pytest.fixture(scope="module", params=TASKS)
def run(
    request: pytest.FixtureRequest, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, str]:
    """A task, a checkpoint that its recipe has trained, and the printed command."""
    folder = tmp_path_factory.mktemp("run")
    words = [data, *SMALL, *flags_of(request.param), "--save-dir", folder]
    words += ["--max-update", "60", "--lr", "0.02", "--update-freq", "1"]
    words += ["--validate-interval", "60", "--save-interval", "60"]  # an epoch has one update
    log = cli_runs.succeed("train", *words)
    return request.param, folder / "checkpoint_last.pt", log.splitlines()[0]


def test_it_trains_by_the_recipe(run: tuple[str, Path, str]) -> None:
    task, _, command = run
    recipe = BART.recipes.get(task) or families.tasks()[task].recipe
    for flags in (recipe.optimizer, recipe.criterion, recipe.data, "--total-num-update 60"):
        assert flags in command


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("task", TASKS)
def test_it_trains_packed(
    data: Path, tmp_path: Path, task: str, native: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    words = [data, *SMALL, *flags_of(task), "--save-dir", tmp_path, *["--native"] * native]
    cli_runs.succeed("train", *words)
    assert ("step: without CUDA graphs, without padding" in caplog.text) != native


def hypotheses(log: str) -> list[tuple[str, float]]:
    found = re.findall(r"^H-(\d+\t)(\S+)(\t.*)$", log, re.MULTILINE)
    return [
        (number + words, pytest.approx(float(score), abs=2e-4)) for number, score, words in found
    ]


def test_our_search_finds_what_fairseqs_finds(data: Path, run: tuple[str, Path, str]) -> None:
    words = [data, *flags_of(run[0]), "--path", run[1], "--beam", "4", "--lenpen", "2",
             "--max-len-b", "9", "--min-len", "3", "--no-repeat-ngram-size", "3",
             "--cpu"]  # fmt: skip
    with mock.patch.object(generator, "search", side_effect=generator.search) as ours:
        found = hypotheses(cli_runs.succeed("generate", *words))
    assert ours.called
    expected = hypotheses(cli_runs.succeed("generate", *words, "--native"))
    assert found == expected and len(found) == 48
    assert "[tgt]" not in str(found) and "BLEU" not in str(found)


def test_lines_get_the_tokens_of_binarised_sentences(
    data: Path, tmp_path: Path, run: tuple[str, Path, str]
) -> None:
    text = tmp_path / "text"
    shutil.copy(data.parent / "raw" / "valid.src-tgt.src", text)
    words = [data, *flags_of(run[0]), "-s", "src", "-t", "tgt", "--path", run[1], "--cpu"]
    words += ["--max-len-b", "20"]
    together = ["--buffer-size", "48", "--batch-size", "48"]  # else each line is a search
    binarised, typed = (
        sorted(line for line, _ in hypotheses(cli_runs.succeed(command, *words, *more)))
        for command, more in (("generate", []), ("interactive", ["--input", text, *together]))
    )
    assert binarised == typed and len(typed) == 48


def test_validation(data: Path, run: tuple[str, Path, str]) -> None:
    words = [data, *flags_of(run[0]), "--path", run[1], "--cpu"]
    assert " | valid | " in cli_runs.succeed("validate", *words)


def test_validation_has_the_bleu_of_generate(
    data: Path, tmp_path: Path, run: tuple[str, Path, str], caplog: pytest.LogCaptureFixture
) -> None:
    """The language's token, which ends a sentence, counts in neither."""
    caplog.set_level(logging.INFO)
    words = [data, *flags_of(run[0]), "--path", run[1], "--gen-subset", "valid", "--cpu"]
    log = cli_runs.succeed("generate", *words, "--beam", "2", "--max-len-b", "9")
    (generated,) = re.findall(r"\|version:\S+ = (\S+) ", log)
    start = ["--restore-file", run[1], "--reset-optimizer", "--reset-dataloader", "--lr", "0"]
    search = ["--eval-bleu", "--eval-bleu-args", '{"beam": 2, "max_len_b": 9}']
    words = [data, *SMALL, *flags_of(run[0]), *start, *search, "--save-dir", tmp_path]
    cli_runs.succeed("train", *words, "--max-update", "1")
    (validated,) = set(re.findall(r"\| bleu (\S+)", caplog.text))
    assert float(validated) == float(generated) > 0


@pytest.mark.parametrize("kind", ["fairseq", "safetensors"])
def test_export(data: Path, tmp_path: Path, run: tuple[str, Path, str], kind: str) -> None:
    words = ["--to", kind, "--output", tmp_path / "out", "--data", data]
    cli_runs.succeed("export", run[1], *words[: 4 if kind == "fairseq" else None])
    assert (tmp_path / "out").exists()


def test_ctranslate2_writes_the_same_words(
    data: Path, tmp_path: Path, run: tuple[str, Path, str]
) -> None:
    ctranslate2 = pytest.importorskip("ctranslate2")
    folder = tmp_path / "out"
    cli_runs.succeed("export", run[1], "--to", "ctranslate2", "--output", folder, "--data", data)
    lines = (data.parent / "raw" / "valid.src-tgt.src").read_text().splitlines()
    sentences = [line.split() for line in lines]
    options = {}
    if run[0] != "translation":  # the tokens that end, begin and end
        sentences = [[*sentence, "</s>", "[src]"] for sentence in sentences]
        options = {"target_prefix": [["[tgt]"]] * len(lines), "end_token": "[tgt]"}
    results = ctranslate2.Translator(str(folder)).translate_batch(
        sentences, beam_size=1, max_decoding_length=10, **options
    )
    words = [data, *flags_of(run[0]), "--path", run[1], "--beam", "1", "--max-len-b", "10", "--cpu"]
    found = dict(re.findall(r"^H-(\d+)\t\S+\t(.*)$", cli_runs.succeed("generate", *words), re.M))
    assert len(set(found.values())) > 1
    for number, result in enumerate(results):
        theirs = [word for word in result.hypotheses[0] if word not in ("</s>", "[tgt]")]
        ours = found[str(number)].split()
        assert theirs[:9] == ours[:9]


@pytest.mark.parametrize("langs", ["", "--langs src", "--langs en,de"])
def test_a_language_without_a_token_is_refused(data: Path, tmp_path: Path, langs: str) -> None:
    words = [data, *SMALL, "--task", "translation_from_pretrained_bart", *langs.split()]
    done = cli_runs.run("train", *words, "--save-dir", tmp_path)
    assert done.exit_code and "--langs must list all languages" in done.output


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classes")
    raw = parity.write_classes(folder / "raw")
    for part in ("input0", "input1", "label"):
        words = ["--only-source", "--srcdict", raw / part / "dict.txt"]
        words += ["--trainpref", raw / part / "train", "--validpref", raw / part / "valid"]
        cli_runs.succeed("preprocess", *words, "--destdir", folder / "bin" / part)
    return folder / "bin"


CLASSES = [*SMALL, "--task", "sentence_prediction", "--num-classes", "3", "--max-positions", "32"]


@pytest.mark.parametrize("native", [False, True])
def test_sentences_with_labels(
    classes: Path, tmp_path: Path, native: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    more = ["--native"] * native
    log = cli_runs.succeed("train", classes, *CLASSES, "--save-dir", tmp_path, *more)
    recipe = BART.recipes["sentence_prediction"]
    assert recipe.data in log.splitlines()[0] and "note:" not in log
    assert ("step: without CUDA graphs, without padding" in caplog.text) != native
    words = ["--task", "sentence_prediction", "--num-classes", "3", "--cpu", *more]
    last = tmp_path / "checkpoint_last.pt"
    assert " | accuracy " in cli_runs.succeed("validate", classes, *words, "--path", last)
    words = ["--to", "safetensors", "--output", tmp_path / "out", "--data", classes]
    cli_runs.succeed("export", last, *words)
    done = cli_runs.run("export", last, "--to", "ctranslate2", "--data", classes)
    assert done.exit_code and "CTranslate2 has no classification heads" in done.output


def test_what_a_head_reads_must_be_there(classes: Path, tmp_path: Path) -> None:
    """A command that names its parts is fairseq's, and gets no flag of the recipe."""
    parts = ["--optimizer", "adam", "--criterion", "sentence_prediction", "--lr", "0.1"]
    done = cli_runs.run("train", classes, *CLASSES, *parts, "--save-dir", tmp_path)
    assert done.exit_code and "needs --add-prev-output-tokens with --task" in done.output
