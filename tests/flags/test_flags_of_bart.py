"""Each row of docs/flags.md's table of BART agrees with a run of the command.

The other settings of BART are in the first table and in that of RoBERTa.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helpers.cli_runs as cli_runs
import helpers.flag_families as flag_families
import helpers.parity as parity
import helpers.training_runs as runs
import pytest
from helpers.flag_runs import pieces, prove, table

from lightseq_fairseq.base.families import BART

SETTINGS = table.family_settings(table.OF_BART)
LANGUAGES, CLASSES = "translation_from_pretrained_bart", "sentence_prediction"
NOISE, NOISES = "denoising", "multilingual_denoising"
NOISED = (NOISE, NOISES)
TASKS = ("translation", LANGUAGES, CLASSES, *NOISED)
# A wide model, because in a narrow one the source hardly changes the loss.
_NOISED = {**runs.NOISED, "encoder_embed_dim": 64, "mask_random": 0}
PLAIN: dict[str, dict[str, Any]] = {
    task: {
        **base, "task": task, "dropout": 0, "attention_dropout": 0, "activation_dropout": 0,
        "add_prev_output_tokens": None, "pooler_dropout": None, "max_update": 3,
        "disable_validation": None, "no_save": True, "dataset_impl": None,
    }
    for task, base in zip(
        TASKS, (runs.BART, runs.BART, runs.BART_CLASSES, _NOISED, _NOISED), strict=True
    )
}  # fmt: skip
SUBWORDS = "--bpe gpt2 --gpt2-encoder-json {encoder} --gpt2-vocab-bpe {merges}"
OF_NOISE = [
    "--mask 0.6", "--mask-random 0.9", "--insert 0.3", "--mask-length word", "--replace-length 0",
    "--poisson-lambda 1", "--rotate 1",
    "--gpt2-encoder-json {encoder} --gpt2-vocab-bpe {merges} | --bpe gpt2",
]  # fmt: skip
WORKS = {
    NOISE: [*OF_NOISE, f"{SUBWORDS} | --permute-sentences 1"],
    NOISES: [
        *OF_NOISE,
        "--permute-sentences 1",
        "--langs bb,aa",
        "--add-lang-token",
        "--multilang-sampling-alpha 0.2",
        f"{SUBWORDS} | --no-whole-word-mask-langs aa",
    ],
    "translation": [],
    LANGUAGES: ["--langs src,tgt,xx", "--langs src,tgt | --prepend-bos"],
    CLASSES: [
        "--add-prev-output-tokens",
        "--add-prev-output-tokens | --pooler-activation-fn relu",
        "--add-prev-output-tokens | --pooler-dropout 0.9999999",
    ],
}
REFUSED = "--spectral-norm-classification-head"
HEADS = "--pooler-activation-fn relu --pooler-dropout 0.5"
UNREAD = {
    "translation": HEADS,
    LANGUAGES: "--langs src,tgt | --truncate-source --num-batch-buckets 2 "
    f"--required-seq-len-multiple 8 {HEADS}",
    CLASSES: "",
    NOISE: f"--permute 0.5 {HEADS}",
    NOISES: f"--permute 0.5 {HEADS} --shorten-method truncate --shorten-data-split-list train",
}


@pytest.mark.parametrize("task", TASKS)
def test_every_row_has_a_proof(task: str) -> None:
    lines = {table.WORKS: WORKS[task], table.REFUSED: [REFUSED], table.FALLBACK: [],
             table.UNREAD: [UNREAD[task]] if UNREAD[task] else []}  # fmt: skip
    column = f"train {task}"
    for kind, claimed in lines.items():
        rows = {
            name
            for name, row in SETTINGS.items()
            if column in row.commands and table.answer(column, name, row, BART)[0] == kind
        }
        assert flag_families.named(SETTINGS, *claimed) == rows, kind


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Binarised data of each task."""
    folder = tmp_path_factory.mktemp("data")
    raw = folder / "raw"
    parity.write_corpus(raw / "pairs")
    parity.write_classes(raw / "classes")
    words = [
        "-s",
        "src",
        "-t",
        "tgt",
        "--joined-dictionary",
        "--srcdict",
        raw / "pairs/dict.src.txt",
    ]
    for split in ("train", "valid"):
        words += [f"--{split}pref", raw / "pairs" / f"{split}.src-tgt"]
    cli_runs.succeed("preprocess", *words, "--destdir", folder / "pairs")
    for part in ("input0", "input1", "label"):
        texts = raw / "classes" / part
        words = ["--only-source", "--srcdict", texts / "dict.txt", "--trainpref", texts / "train"]
        words += ["--validpref", texts / "valid"]
        cli_runs.succeed("preprocess", *words, "--destdir", folder / "classes" / part)
    for seed, part in enumerate(("text", "text/aa", "text/bb")):
        texts = parity.write_text(raw / part, lines=60 - 20 * seed, seed=seed)
        for file in texts.iterdir():  # tokens of GPT-2's encoding are numbers
            if file.is_file():
                file.write_text(re.sub(r"\bw(\d)", r"\1", file.read_text()))
        words = ["--only-source", "--srcdict", texts / "dict.txt", "--trainpref", texts / "train"]
        words += ["--validpref", texts / "valid", "--destdir", folder / part]
        cli_runs.succeed("preprocess", *words)
    # Every third word of GPT-2's encoding continues the word before it.
    coded = {("x" if i % 3 == 0 else "Ġ") + "a" * i: i for i in range(parity.VOCABULARY)}
    (folder / "encoder").write_text(json.dumps(coded))
    (folder / "merges").write_text("#version\n")
    names = {CLASSES: "classes", NOISE: "text", NOISES: "text"}
    found = {task: folder / names.get(task, "pairs") for task in TASKS}
    return {**found, "encoder": folder / "encoder", "merges": folder / "merges"}


Run = Callable[[str, str, bool], Any]


@pytest.fixture(scope="module")
def trained(data: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a training of a task; returns what `flag_families.train` returns."""

    @functools.cache
    def run(task: str, line: str, native: bool) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("run")
        paths = {**data, "data": data[task]}
        return flag_families.train(line, native, paths, folder, PLAIN[task])

    return run


@pytest.mark.parametrize(("task", "line"), [(task, x) for task in TASKS for x in WORKS[task]])
def test_training_does_what_fairseq_does(trained: Run, task: str, line: str) -> None:
    ours, _ = prove(line, functools.partial(trained, task), flag_families.alike)
    assert ours["losses"] and ours["validated"] and ours["reasons"] == [] and not ours["error"]


def command(data: dict[str, Path], task: str, line: str, folder: Path) -> Any:
    sizes = "--encoder-embed-dim 8 --encoder-ffn-embed-dim 8 --encoder-layers 1 --decoder-layers 1"
    heads = "--encoder-attention-heads 1 --decoder-attention-heads 1 --max-update 1 --cpu"
    words = f"--arch ls_bart_base --task {task} {sizes} {heads} {line}".split()
    own = {LANGUAGES: ["--langs", "src,tgt"], CLASSES: ["--num-classes", "3"]}.get(task, [])
    return cli_runs.run("train", data[task], *words, *own, "--save-dir", folder)


@pytest.mark.parametrize("task", [task for task in TASKS if UNREAD[task]])
def test_what_has_no_effect_is_noted_and_has_none(
    data: dict[str, Path], trained: Run, tmp_path: Path, task: str
) -> None:
    needed, _, given = UNREAD[task].rpartition("| ")
    for native in (True, False):
        plain, found = (trained(task, x, native) for x in (needed, f"{needed}{given}"))
        assert plain["validated"] and flag_families.alike(found, plain) and not found["error"]
        assert native or not found["reasons"]
    result = command(data, task, given, tmp_path)
    assert result.exit_code == 0, (result.output, result.exception)
    noted = set(re.findall(r"note: (\S+) has no effect", result.stderr))
    assert noted == {piece.split()[0] for piece in pieces(given)}


@pytest.mark.parametrize("task", TASKS)
def test_a_refusal_names_the_setting_the_reason_and_the_way_out(
    data: dict[str, Path], tmp_path: Path, task: str
) -> None:
    result = command(data, task, REFUSED, tmp_path / "x")
    assert result.exit_code == 2, (result.output, result.exception)
    assert re.search(rf"error: .*{REFUSED}\b.* \(.+\): remove it", result.output)
    assert not (tmp_path / "x").exists()


def test_the_other_settings_are_in_other_tables() -> None:
    of_all = table.family_settings(table.OF_BART._replace(above=False))
    others = {*table.translation_settings(), *table.family_settings(table.OF_ROBERTA)}
    assert of_all.keys() <= SETTINGS.keys() | others
