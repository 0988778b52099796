"""Commands with models of several languages: complete commands, and wrong input."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import helpers.languages as languages
import pytest
import torch
from helpers.cli_runs import most_workers, run, succeed, validated
from helpers.golden import matches, refusals

from lightseq_fairseq import Translator
from lightseq_fairseq.base.errors import UserError

TASK = ["--task", "translation_multi_simple_epoch"]
TRAIN = shlex.split(
    "--arch ls_transformer --lang-pairs aa-bb,bb-aa,aa-cc --encoder-layers 1 --decoder-layers 1 "
    "--encoder-embed-dim 16 --encoder-ffn-embed-dim 16 --max-epoch 2 --no-epoch-checkpoints --cpu"
)
SEARCH = ["--cpu", "--beam", "2", "--max-len-b", "9", "--num-workers", "0"]


class Trained(NamedTuple):
    data: Path
    run: Path  # with the languages of --lang-dict: cc, bb, aa


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A complete command's model, with users' defaults."""
    folder = tmp_path_factory.mktemp("languages")
    data = languages.write(folder / "data")
    names = folder / "names"
    names.write_text("cc\nbb\naa\n\n")
    words = [*TASK, *TRAIN, "--share-all-embeddings", "--lang-dict", names]
    succeed("train", data, *words, "--save-dir", folder / "run")
    names.unlink()  # the checkpoint has its content
    return Trained(data, folder / "run")


def hypotheses(output: str) -> list[str]:
    lines = [line.split("\t") for line in output.splitlines() if line.startswith("H-")]
    return [words for _, _, words in sorted(lines, key=lambda line: int(line[0][2:]))]


def test_the_recipe_samples_and_marks_languages(trained: Trained) -> None:
    settings = torch.load(trained.run / "checkpoint_last.pt", weights_only=False)["cfg"]["task"]
    assert (settings.sampling_method, settings.sampling_temperature) == ("temperature", 1.5)
    assert (settings.encoder_langtok, settings.decoder_langtok) == ("src", True)
    assert (settings.langs, settings.lang_dict) == (["cc", "bb", "aa"], None)


@pytest.mark.parametrize("system", [[], ["--native"]], ids=["ours", "native"])
def test_searches_take_the_languages_from_the_model(trained: Trained, system: list[str]) -> None:
    """The words are those of a command that has all flags."""
    short = ["-s", "aa", "-t", "cc", "--path", trained.run / "checkpoint_best.pt", *SEARCH]
    flags = shlex.split(
        "--lang-pairs aa-cc --langs cc,bb,aa --encoder-langtok src --decoder-langtok"
    )
    found = hypotheses(succeed("generate", trained.data, *TASK, *short, *system))
    assert found == hypotheses(succeed("generate", trained.data, *TASK, *short, *flags, "--native"))
    assert len(found) == languages.SIZES["aa-cc"] and "__cc__" not in "".join(found)
    marked = succeed("generate", trained.data, *TASK, *short, *system, "--encoder-langtok", "tgt")
    assert "\t__cc__ " in marked and "\t__aa__ " not in marked
    scored = succeed("generate", trained.data, *TASK, *short, *system, "--score-reference")
    wanted = (trained.data / "raw/aa-cc/valid.cc").read_text().splitlines()
    assert hypotheses(scored) == [f"__cc__ {line}" for line in wanted]
    other = ["-s", "aa", "-t", "bb", *short[4:]]
    text = trained.data / "raw" / "aa-cc" / "valid.aa"
    into = [
        hypotheses(succeed("interactive", trained.data, *TASK, *words, "--input", text, *system))
        for words in (short[:-2], other[:-2])
    ]
    assert into[0] == found != into[1]


def test_translator_knows_the_task(trained: Trained) -> None:
    options: dict[str, Any] = {"source_lang": "aa", "device": "cpu", "beam": 2, "max_len_b": 9}
    model = Translator.from_pretrained(trained.run, target_lang="cc", **options)
    lines = (trained.data / "raw/aa-cc/valid.aa").read_text().splitlines()
    words = ["-s", "aa", "-t", "cc", "--path", trained.run, *SEARCH]
    found = hypotheses(succeed("generate", trained.data, *TASK, *words))
    assert [x.text for x in model.translate(lines)] == found
    with pytest.raises(UserError, match=r"^target_lang is missing, and the model knows several"):
        Translator.from_pretrained(trained.run, **options)
    with pytest.raises(UserError, match=r"no language zz among those of the model \(cc,bb,aa\)"):
        Translator.from_pretrained(trained.run, target_lang="zz", **options)


def test_validation_is_that_of_training(trained: Trained) -> None:
    path = trained.run / "checkpoint_best.pt"
    best = torch.load(path, weights_only=False)["extra_state"]["best"]
    line = validated(trained.data, *TASK, "--path", path, "--cpu", "--log-format", "simple")
    assert f"| loss {best:g} |" in line
    assert "wps" not in line  # fairseq-validate does not measure it, and logs 0


@pytest.mark.parametrize("system", [[], ["--native"]], ids=["ours", "native"])
def test_workers_of_an_epoch_and_of_a_validation_end(
    trained: Trained, tmp_path: Path, system: list[str]
) -> None:
    """fairseq has a new iterator for each."""
    words = [*TASK, *TRAIN, *system, "--num-workers", "1", "--no-save", "--max-epoch", "3"]
    words += ["--validate-interval-updates", "1"]
    assert most_workers(trained.data, *words, "--save-dir", tmp_path) <= 2


def test_language_ids_are_left_out(trained: Trained, tmp_path: Path) -> None:
    result = run("train", trained.data, *TASK, *TRAIN, "--enable-lang-ids", "--save-dir", tmp_path)
    assert result.exit_code == 0, (result.output, result.exception)
    assert "note: --enable-lang-ids has no effect" in result.stderr


@pytest.mark.parametrize("method", ["concat", "RoundRobin"])
def test_settings_that_sampled_batches_do_not_use_are_named(
    trained: Trained, tmp_path: Path, method: str
) -> None:
    flags = ["--data-buffer-size", "3", "--skip-remainder-batch", "--sampling-temperature", "2"]
    words = [*TASK, *TRAIN, *flags, "--sampling-method", method, "--save-dir", tmp_path]
    result = run("train", trained.data, *words)
    assert result.exit_code == 0, (result.output, result.exception)
    notes = [line for line in result.stderr.splitlines() if "has no effect" in line]
    assert notes == [
        f"lightseq-train: note: {flag} has no effect with{more}"
        for flag, more in (
            ("--data-buffer-size", " --sampling-method concat."),
            ("--sampling-temperature", "out --sampling-method temperature."),
            ("--skip-remainder-batch", " --sampling-method concat."),
        )
        if method == "concat" or flag == "--sampling-temperature"
    ]


@pytest.mark.parametrize(
    "words", ["--restore-file $", "--finetune-from-model $ --native"], ids=["resumed", "native"]
)
def test_another_order_of_languages_is_refused(
    trained: Trained, tmp_path: Path, words: str
) -> None:
    start = words.replace("$", str(trained.run / "checkpoint_best.pt")).split()
    words_of_run = [*TASK, *TRAIN, "--share-all-embeddings", "--langs", "aa,bb,cc", *start]
    result = run("train", trained.data, *words_of_run, "--save-dir", tmp_path / "x")
    assert result.exit_code == 2 and not (tmp_path / "x").exists()
    assert "The language aa has another row than in" in result.stderr
    assert "languages are cc,bb,aa: set --langs to these" in result.stderr


def test_fine_tuning_with_another_order_keeps_the_row_of_each_language(
    trained: Trained, tmp_path: Path
) -> None:
    first = trained.run / "checkpoint_best.pt"
    words = [*TASK, *TRAIN, "--share-all-embeddings", "--langs", "dd,aa,bb,cc", "--lr", "0"]
    words += ["--weight-decay", "0", "--finetune-from-model", first, "--save-dir", tmp_path]
    succeed("train", trained.data, *words)
    before, after = (
        torch.load(path, weights_only=False)["model"]["encoder.embed_tokens.weight"]
        for path in (first, tmp_path / "checkpoint_last.pt")
    )
    cc, bb, aa = before[-3:]
    assert torch.equal(after[-3:], torch.stack([aa, bb, cc])) and len(after) == len(before) + 1


@pytest.fixture(scope="module")
def folders(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The names that stand for folders and files in the lines of refusals.txt."""
    folder = tmp_path_factory.mktemp("wrong")
    found = {"DATA": trained.data, "MODEL": trained.run / "checkpoint_best.pt", "OUT": folder / "x"}
    for name in ("other", "short"):
        found[name.upper()] = shutil.copytree(trained.data, folder / name)
    with open(found["OTHER"] / "dict.cc.txt", "a") as file:
        file.write("more 1\n")
    for path in found["SHORT"].glob("valid.aa-cc.*"):
        path.unlink()
    (folder / "weights").write_text('{"main:aa-bb": 1}')
    return {**found, "WEIGHTS": folder / "weights"}


@pytest.mark.parametrize(("line", "sentence"), refusals(__file__, "test_cli_languages"))
def test_wrong_input_is_answered_with_one_sentence(
    folders: dict[str, Path], line: str, sentence: str
) -> None:
    command, *words = line.split()
    if command == "train":
        words += [*(x for x in TRAIN if x not in TRAIN[2:4] or "--lang-pairs" not in words)]
        words += ["--save-dir", "$OUT"]
    elif command in ("generate", "interactive"):
        words += SEARCH if command == "generate" else SEARCH[:-2]
    words = [str(folders[x[1:]]) if x.startswith("$") else x for x in words]
    result = run(command, *words[:1], *TASK, *words[1:])
    assert result.exit_code == 2, (result.output, result.exception)
    said = result.stderr.splitlines()[-1].partition("error: ")[2]
    assert matches(said, sentence), said
    assert not folders["OUT"].exists()


@pytest.mark.parametrize("flag", ["--srcdict", "--tgtdict"])
def test_pairs_of_one_folder_have_one_dictionary(tmp_path: Path, flag: str) -> None:
    text = {"en": "a dog", "de": "ein Hund", "fr": "un chien"}
    for language, line in text.items():
        (tmp_path / f"train.{language}").write_text(f"{line}\n")
    (tmp_path / "both").write_text(
        "\n".join(f"{word} 1" for word in " ".join(text.values()).split())
    )

    def preprocess(source: str, target: str, dictionary: Path) -> Any:
        return run(
            "preprocess", "-s", source, "-t", target, "--joined-dictionary", flag, dictionary,
            "--trainpref", tmp_path / "train", "--destdir", tmp_path / "bin",
        )  # fmt: skip

    for source, target in (("en", "de"), ("fr", "de"), ("fr", "en"), ("en", "fr")):
        result = preprocess(source, target, tmp_path / "both")
        assert result.exit_code == 0, (result.stderr, result.exception)
    words = [(tmp_path / "bin" / f"dict.{language}.txt").read_text() for language in text]
    assert len(set(words)) == 1
    assert len({*(tmp_path / "bin").glob("train.*.idx")}) == 8
    (tmp_path / "other").write_text("a 1\n")
    result = preprocess("en", "de", tmp_path / "other")
    assert result.exit_code == 2 and "exists already: choose another --destdir" in result.stderr
