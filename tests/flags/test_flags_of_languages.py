"""Each row of docs/flags.md's table of several languages agrees with a run of the command."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helpers.cli_runs as cli_runs
import helpers.flag_families as flag_families
import helpers.languages as languages
import helpers.training_runs as runs
import pytest
from helpers.flag_runs import pieces, prove, table

from lightseq_fairseq.base.families import TRANSLATION

SETTINGS = table.family_settings(table.OF_LANGUAGES)
COLUMN = "train translation_multi_simple_epoch"
PLAIN: dict[str, Any] = {
    **runs.LS, "task": languages.TASK["task"], "lang_pairs": languages.TASK["lang_pairs"],
    "source_lang": None, "target_lang": None, "dataset_impl": None, "dropout": 0,
    "attention_dropout": 0, "activation_dropout": 0, "max_update": 3, "disable_validation": None,
    "no_save": True, "share_decoder_input_output_embed": None,
}  # fmt: skip
WORKS = [
    "--lang-pairs aa-bb",
    "--encoder-langtok src",
    "--decoder-langtok",
    "--encoder-langtok src | --langs cc,bb,aa",
    "--encoder-langtok src | --lang-dict {list}",
    "--encoder-langtok src | --lang-tok-style mbart",
    "--encoder-langtok src | --lang-tok-replacing-bos-eos",
    "--encoder-langtok tgt | --enable-reservsed-directions-shared-datasets",
    "--langtoks {tokens}",
    "--langtoks-specs main,dae",
    "--source-dict {longer}",
    "--target-dict {longer}",
    "--fixed-dictionary {longer}",
    "--extra-data {extra} --extra-lang-pairs {pairs}",
    "--sampling-method uniform",
    "--sampling-method temperature | --sampling-temperature 5",
    "--sampling-weights {weights}",
    "--sampling-weights-from-file {file}",
    "--sampling-method uniform | --virtual-epoch-size 30",
    "--sampling-method uniform | --virtual-data-size 50",
]
UNREAD = "--enable-lang-ids --keep-inference-langtok"


def test_every_row_has_a_proof() -> None:
    lines = {table.WORKS: WORKS, table.REFUSED: [], table.FALLBACK: [], table.UNREAD: [UNREAD]}
    for kind, claimed in lines.items():
        rows = {
            name
            for name, row in SETTINGS.items()
            if table.answer(COLUMN, name, row, TRANSLATION)[0] == kind
        }
        assert flag_families.named(SETTINGS, *claimed) == rows, kind


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What names in braces stand for."""
    folder = tmp_path_factory.mktemp("data")
    data = languages.write(folder / "data")
    longer = folder / "longer"
    longer.write_text((data / "dict.aa.txt").read_text() + "one 1\ntwo 1\n")
    (folder / "list").write_text("bb\ncc\naa\n")
    weights = {f"main:{pair}": n for n, pair in enumerate(PLAIN["lang_pairs"].split(","), 1)}
    (folder / "weights").write_text(json.dumps(weights))
    extra = languages.write(folder / "extra", seed=5)
    return {
        "data": data, "longer": longer, "list": folder / "list", "file": folder / "weights",
        "weights": str(weights), "tokens": "{'main':('tgt','tgt')}",
        "extra": str({"mined": str(extra)}), "pairs": "{'mined':'aa-cc'}",
    }  # fmt: skip


Run = Callable[[str, bool], Any]


@pytest.fixture(scope="module")
def trained(paths: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a training; returns what `flag_families.train` returns."""

    @functools.cache
    def run(line: str, native: bool) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("run")
        return flag_families.train(line, native, paths, folder, PLAIN)

    return run


@pytest.mark.parametrize("line", WORKS)
def test_training_does_what_fairseq_does(trained: Run, line: str) -> None:
    ours, _ = prove(line, trained, flag_families.alike)
    assert ours["losses"] and ours["validated"] and ours["reasons"] == [] and not ours["error"]


def test_what_has_no_effect_is_noted_and_has_none(paths: dict[str, Any], tmp_path: Path) -> None:
    words = f"--task {PLAIN['task']} --lang-pairs aa-bb --arch ls_transformer --max-update 1 --cpu"
    words += " --encoder-layers 1 --decoder-layers 1 --encoder-embed-dim 8 --log-format json"
    losses = []
    for number, given in enumerate(("", UNREAD)):
        folder = tmp_path / str(number)
        result = cli_runs.run(
            "train", paths["data"], *words.split(), *given.split(), "--save-dir", folder
        )
        assert result.exit_code == 0, (result.output, result.exception)
        noted = set(re.findall(r"note: (\S+) has no effect", result.stderr))
        assert noted == {piece.split()[0] for piece in pieces(given)}
        losses.append(runs.trained(folder))
    assert runs.differing(*losses) == []
