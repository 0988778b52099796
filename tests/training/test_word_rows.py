"""A run that begins with a checkpoint keeps the row of each word, whatever the task adds to the
words of the file, and in whatever order."""

from __future__ import annotations

import logging
import shlex
import shutil
from pathlib import Path
from typing import Any

import helpers.cli_runs as cli_runs
import helpers.parity as parity
import pytest
import torch
from torch import Tensor

ARCH = shlex.split(
    "--encoder-layers 1 --decoder-layers 1 --encoder-embed-dim 16 --encoder-ffn-embed-dim 16 "
    "--encoder-attention-heads 2 --decoder-attention-heads 2 --cpu --max-tokens 200 "
    "--no-epoch-checkpoints --update-freq 1 --dropout 0 --max-update"
)
BART = "--task translation_from_pretrained_bart --langs"
PAIRS = "--arch ls_transformer --share-all-embeddings --task translation"
TABLES = ("encoder.embed_tokens", "decoder.embed_tokens", "decoder.output_projection")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return parity.write_corpus(tmp_path_factory.mktemp("corpus"))


def words_of(data: Path, flags: str) -> list[str]:
    lines = (data / "dict.src.txt").read_text().splitlines()
    words = ["<s>", "<pad>", "</s>", "<unk>", *(line.split()[0] for line in lines)]
    if BART in flags:
        langs = flags.split("--langs ")[1].split()[0].split(",")
        words += [*(f"[{lang}]" for lang in langs), "<mask>"]
    return words


def train(data: Path, folder: Path, flags: str, *more: object) -> dict[str, Any]:
    words = ["--source-lang", "src", "--target-lang", "tgt", "--dataset-impl", "raw"]
    rate = ["2", "--lr", "1e-9", "--weight-decay", "0"] if more else ["2", "--lr", "1e-2"]
    cli_runs.succeed(
        "train", data, *words, *flags.split(), *ARCH, *rate, "--save-dir", folder, *more
    )
    state: dict[str, Any] = torch.load(folder / "checkpoint_last.pt", weights_only=False)
    return state


@pytest.fixture(scope="module")
def first(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of runs with these flags."""
    found = {}
    for name, flags in (
        ("mbart", f"--arch ls_mbart_base {BART} xx,src,tgt"),
        ("transformer", f"--arch ls_transformer --share-all-embeddings {BART} xx,src,tgt"),
        ("plain", "--arch ls_bart_base --task translation"),
    ):
        found[name] = tmp_path_factory.mktemp(name)
        train(data, found[name], flags)
    return found


SECOND = {
    "another order": ("mbart", f"--arch ls_mbart_base {BART} tgt,src,xx"),
    "new languages": ("mbart", f"--arch ls_mbart_base {BART} new,xx,src,tgt,newer"),
    "without mask": ("mbart", "--arch ls_mbart_base --task translation"),
    "of a transformer": ("transformer", PAIRS),
    "with mask": ("plain", f"--arch ls_bart_base {BART} src,tgt"),
}
FIRST = {"mbart": f"{BART} xx,src,tgt", "transformer": f"{BART} xx,src,tgt", "plain": ""}


@pytest.mark.parametrize("of_fairseq", [False, True], ids=["ours", "fairseqs"])
@pytest.mark.parametrize("case", SECOND)
def test_each_word_keeps_its_row(
    case: str, of_fairseq: bool, data: Path, first: dict[str, Path], tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Also if fairseq wrote the file, which then has no digest of the words."""
    name, flags = SECOND[case]
    path = first[name] / "checkpoint_last.pt"
    state = torch.load(path, weights_only=False)
    if of_fairseq:
        state["extra_state"].pop("dictionaries")
        path = tmp_path / "fairseqs.pt"
        torch.save(state, path)
    caplog.set_level(logging.INFO)
    tuned = train(data, tmp_path / "run", flags, "--finetune-from-model", path)
    assert "rows follow the words of the checkpoint" in caplog.text
    old, new = words_of(data, FIRST[name]), words_of(data, flags)
    for table in TABLES:
        before, after = (each["model"][f"{table}.weight"] for each in (state, tuned))
        assert len(before) == len(old) and len(after) == len(new)
        for row, word in enumerate(new):
            if word in old:
                assert close(after[row], before[old.index(word)]), word
            else:
                assert after[row].any() and not any(close(after[row], x) for x in before), word


def close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=0, atol=1e-6)


def test_other_words_are_not_guessed(data: Path, first: dict[str, Path], tmp_path: Path) -> None:
    """A dictionary that no task has made of this one's words: its sizes are reported."""
    other = tmp_path / "other"
    parity.write_corpus(other)
    for side in ("src", "tgt"):
        lines = (other / f"dict.{side}.txt").read_text().splitlines()
        (other / f"dict.{side}.txt").write_text("\n".join([*lines, "more 1", "words 1", ""]))
    result = cli_runs.run(
        "train", other, "--source-lang", "src", "--target-lang", "tgt", "--dataset-impl", "raw",
        "--arch", "ls_bart_base", *ARCH, "1", "--lr", "1e-2", "--save-dir", tmp_path / "run",
        "--finetune-from-model", first["plain"] / "checkpoint_last.pt",
    )  # fmt: skip
    assert result.exit_code == 2
    assert "words, but the checkpoint was trained with" in result.output


@pytest.mark.parametrize("flags", ["--adaptive-input --adaptive-input-cutoff 10,20", ""])
def test_adaptive_tables_do_not_follow_words(tmp_path: Path, flags: str) -> None:
    """A dictionary in another order is refused, as without adaptive tables, or warned of."""
    data, other = tmp_path / "data", tmp_path / "other"
    parity.write_text(data)
    shutil.copytree(data, other)
    lines = (data / "dict.txt").read_text().splitlines()
    (other / "dict.txt").write_text("\n".join(reversed(lines)) + "\n")
    words = "--task language_modeling --dataset-impl raw --tokens-per-sample 16 "
    words += "--arch ls_transformer_lm --decoder-layers 1 --decoder-embed-dim 16 --max-tokens 48 "
    words += "--decoder-ffn-embed-dim 16 --decoder-attention-heads 2 --criterion adaptive_loss "
    words += "--adaptive-softmax-cutoff 10,20 --ddp-backend legacy_ddp --optimizer ls_adam --cpu "
    words += f"--lr 1e-9 --num-workers 0 --max-update 1 {flags}"
    first = tmp_path / "first"
    cli_runs.succeed("train", data, *words.split(), "--save-dir", first)
    file = first / "checkpoint_last.pt"
    again = ("train", other, *words.split(), "--save-dir", tmp_path / "again")
    result = cli_runs.run(*again, "--restore-file", file, "--reset-optimizer")
    assert result.exit_code == 2, result.output
    assert "The source dictionary is not the one that the checkpoint was" in result.stderr
    cli_runs.succeed(*again, "--finetune-from-model", file)
    before, after = (
        torch.load(path, weights_only=False)["model"]
        for path in (file, tmp_path / "again/checkpoint_last.pt")
    )
    for name, value in before.items():
        assert close(value, after[name]), name
