"""Truncated data, mixed-up files and data of another dictionary end in one sentence before training
begins."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers.cli_runs import SMALL, SPLITS, binarise, digests, run, succeed

# isort: split
from fairseq.data import indexed_dataset
from fairseq.data.indexed_dataset import MMapIndexedDataset

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.checks import binarised

Break = Callable[[Path], object]
LS = ("--arch", "ls_transformer_tiny", *SMALL)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same text in the formats mmap, cached (the older one) and raw, with a checkpoint beside
    them."""
    folder = tmp_path_factory.mktemp("whole")
    binarise(folder).rename(folder / "mmap")
    texts = [word for split in SPLITS for word in (f"--{split}pref", folder / "text" / split)]
    for form in ("cached", "raw"):
        succeed(
            "preprocess", "-s", "de", "-t", "en", "--destdir", folder / form, *texts,
            "--dataset-impl", form,
        )  # fmt: skip
    succeed("train", folder / "mmap", *LS, "--save-dir", folder / "checkpoints")
    return folder


def keep(count: int) -> Break:
    """Truncate a file: keep its first ``count`` bytes, or drop its last ``-count`` bytes."""
    return lambda path: path.write_bytes(path.read_bytes()[:count])


def write(content: bytes) -> Break:
    return lambda path: path.write_bytes(content)


def zeros(first: int, count: int) -> Break:
    """Overwrite with zeros, as a file system may leave a file after a crash."""

    def overwrite(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[first : first + count] = bytes(count)
        path.write_bytes(content)

    return overwrite


def without_last_line(path: Path) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def of_another_split(path: Path) -> None:
    shutil.copy(path.with_name(path.name.replace("train", "test").replace("valid", "test")), path)


def of_a_larger_dictionary(path: Path) -> None:
    """Replace the first word of the last sentence by an id that is in no dictionary here."""
    tokens = np.fromfile(path, dtype=np.uint16)
    tokens[-3] = 5000
    tokens.tofile(path)


BROKEN: list[tuple[str, str, Break, list[str]]] = [
    ("mmap", "train.de-en.de.bin", write(b""), ["train.de-en.de.bin has 0 bytes"]),
    ("mmap", "train.de-en.en.bin", keep(-1), ["train.de-en.en.bin has", "truncated"]),
    ("mmap", "train.de-en.en.bin", keep(100), ["train.de-en.en.bin has 100 bytes"]),
    ("mmap", "train.de-en.en.bin", Path.unlink, ["train.de-en.en.idx has no .bin"]),
    ("mmap", "train.de-en.en.idx", Path.unlink, ["train.de-en.en.bin has no .idx"]),
    ("mmap", "train.de-en.en.bin", of_another_split, ["train.de-en.en.bin has", "different texts"]),
    ("mmap", "train.de-en.de.idx", write(b""), ["train.de-en.de.idx is damaged"]),
    ("mmap", "train.de-en.de.idx", keep(20), ["train.de-en.de.idx is damaged"]),
    ("mmap", "train.de-en.de.idx", keep(-8), ["train.de-en.de.idx is damaged"]),
    ("mmap", "train.de-en.de.idx", write(b"garbage" * 99), ["train.de-en.de.idx is damaged"]),
    ("mmap", "train.de-en.de.idx", zeros(17, 1), ["train.de-en.de.idx is damaged"]),
    ("mmap", "train.de-en.de.idx", zeros(9, 1), ["train.de-en.de.idx is damaged"]),
    ("mmap", "train.de-en.de.idx", zeros(60, 16), ["train.de-en.de.idx is damaged"]),
    ("mmap", "train.de-en.de.idx", zeros(-40, 16), ["train.de-en.de.idx is damaged"]),
    ("mmap", "valid.de-en.en.bin", keep(-1), ["valid.de-en.en.bin has"]),
    ("mmap", "valid.de-en.en.bin", of_a_larger_dictionary, ["Sentence 5", "token id 5000", "24"]),
    ("mmap", "train.de-en.de.bin", of_a_larger_dictionary, ["Sentence 39", "--srcdict"]),
    ("cached", "train.de-en.de.bin", keep(-1), ["train.de-en.de.bin has", "truncated"]),
    ("cached", "train.de-en.de.bin", zeros(8, 4), ["Sentence 0", "token id -1"]),
    ("cached", "train.de-en.de.idx", keep(50), ["train.de-en.de.idx is damaged"]),
    ("cached", "train.de-en.de.idx", zeros(8, 1), ["train.de-en.de.idx is damaged"]),
    ("cached", "valid.de-en.de.idx", keep(-8), ["valid.de-en.de.idx is damaged"]),
    ("cached", "valid.de-en.de.idx", zeros(64, 200), ["valid.de-en.de.idx is damaged"]),
    ("raw", "train.de-en.de", without_last_line, ["train.de-en.de has 39 sentences", "40"]),
    ("raw", "valid.de-en.en", write(b""), ["valid.de-en.en is empty"]),
]  # fmt: skip


def damaged(whole: Path, folder: Path, form: str, name: str, damage: Break) -> Path:
    data = shutil.copytree(whole / form, folder / "data")
    damage(data / name)
    return data


def refusal(command: str, *words: str | Path) -> str:
    """The sentence with which the command ends."""
    result = run(command, *words)
    assert result.exit_code == 2, (result.output, result.exception)
    assert "Traceback" not in result.output
    return result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("form", "name", "damage", "parts"),
    BROKEN,
    ids=[f"{form}-{name}-{index}" for index, (form, name, *_) in enumerate(BROKEN)],
)
def test_training_does_not_begin(
    whole: Path, tmp_path: Path, form: str, name: str, damage: Break, parts: list[str]
) -> None:
    data = damaged(whole, tmp_path, form, name, damage)
    before = digests(tmp_path)
    words = [data, *LS, "--save-dir", tmp_path / "none", "--dataset-impl", form]
    complaint = refusal("train", *words)
    assert [part for part in parts if part not in complaint] == [], complaint
    assert refusal("train", *words, "--native") == complaint
    assert digests(tmp_path) == before and not (tmp_path / "none").exists()


@pytest.mark.parametrize("system", [[], ["--native"]], ids=["ours", "native"])
@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ("--max-source-positions 12 --max-target-positions 12", "the model takes at most (12, 12)"),
        ("--max-tokens-valid 12", "--max-tokens-valid) is 12: raise it to 21 or more"),
    ],
)
def test_a_long_validation_sentence_is_found_before_the_first_update(
    whole: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    flags: str,
    part: str,
    system: list[str],
) -> None:
    (tmp_path / "valid.de").write_text("w1 " * 20 + "\n")
    (tmp_path / "valid.en").write_text("v1 " * 20 + "\n")
    succeed(
        "preprocess", "-s", "de", "-t", "en", "--destdir", tmp_path / "data",
        "--srcdict", whole / "mmap" / "dict.de.txt", "--tgtdict", whole / "mmap" / "dict.en.txt",
        "--trainpref", whole / "text" / "train", "--validpref", tmp_path / "valid",
    )  # fmt: skip
    words = [tmp_path / "data", *LS, *flags.split(), *system, "--save-dir", tmp_path / "out"]
    with caplog.at_level("INFO"):
        assert part in refusal("train", *words)
        assert "begin training epoch" not in caplog.text
        succeed("train", *words, "--disable-validation")
        assert "begin training epoch" in caplog.text


@pytest.mark.parametrize("command", ["generate", "validate"])
@pytest.mark.parametrize(
    ("damage", "name", "part"),
    [
        (keep(-1), "test.de-en.en.bin", "test.de-en.en.bin has"),
        (keep(30), "test.de-en.de.idx", "test.de-en.de.idx is damaged"),
        (of_a_larger_dictionary, "test.de-en.de.bin", "Sentence 5"),
    ],
)
def test_a_checkpoint_reads_none(
    whole: Path, tmp_path: Path, command: str, damage: Break, name: str, part: str
) -> None:
    data = damaged(whole, tmp_path, "mmap", name, damage)
    subset = "--valid-subset" if command == "validate" else "--gen-subset"
    words = [data, "--path", whole / "checkpoints" / "checkpoint_last.pt", subset, "test", "--cpu"]
    complaint = refusal(command, *words)
    assert part in complaint
    assert refusal(command, *words, "--native") == complaint


@pytest.mark.parametrize(
    "name", ["data2/train.de-en.de.bin", "data/train1.de-en.de.bin", "data/extra.de-en.de.bin"]
)
def test_every_file_of_the_run_is_looked_at(whole: Path, tmp_path: Path, name: str) -> None:
    for folder in ("data", "data2"):
        shutil.copytree(whole / "mmap", tmp_path / folder)
    for split in ("train1", "extra"):
        for file in (tmp_path / "data").glob("valid.*"):
            shutil.copy(file, file.with_name(file.name.replace("valid", split)))
    path = tmp_path / name
    words = [f"{tmp_path}/data:{tmp_path}/data2", *LS, "--save-dir", tmp_path / "out"]
    words += ["--valid-subset", "valid,extra"]
    intact = path.read_bytes()
    for damage, part in ((keep(-2), f"{name} has"), (of_a_larger_dictionary, "token id 5000")):
        path.write_bytes(intact)
        damage(path)
        assert part in refusal("train", *words)
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["mmap", "cached"])
def test_a_task_of_several_pairs(whole: Path, tmp_path: Path, form: str) -> None:
    words = [*LS, "--save-dir", tmp_path / "none", "--lang-pairs", "de-en"]
    words += ["--task", "translation_multi_simple_epoch", "--langs", "de,en"]
    words += ["--source-dict", whole / form / "dict.de.txt"]
    words += ["--target-dict", whole / form / "dict.en.txt", "--dataset-impl", form]
    data = damaged(whole, tmp_path, form, "valid.de-en.en.bin", keep(-1))
    assert "valid.de-en.en.bin has" in refusal("train", data, *words)
    assert not (tmp_path / "none").exists()


def test_the_wrong_format_is_named(whole: Path, tmp_path: Path) -> None:
    words = [*LS, "--save-dir", tmp_path / "none", "--dataset-impl"]
    for form, asked in (("mmap", "lazy"), ("cached", "mmap")):
        complaint = refusal("train", whole / form, *words, asked)
        assert f"was not written for --dataset-impl {asked}: remove that flag" in complaint


BINARISED = "in binarised form, but --dataset-impl raw reads plain text: remove that flag"
TEXT = "as plain text, which only --dataset-impl raw reads: set that flag, or binarise the text"


def commands(data: Path, model: Path, save_dir: Path) -> dict[str, list[str | Path]]:
    """Commands that read the data folder, without --dataset-impl."""
    read = ["--path", model, "--cpu", "--num-workers", "0"]
    return {
        "train": [data, *LS, "--save-dir", save_dir],
        "generate": [data, *read],
        "validate": [data, *read, "--valid-subset", "test"],
    }


@pytest.mark.parametrize(
    ("form", "flag", "part"), [("mmap", "raw", BINARISED), ("raw", "mmap", TEXT)]
)
def test_the_flag_of_text_is_refused_for_binarised_data_and_the_reverse(
    whole: Path, tmp_path: Path, form: str, flag: str, part: str
) -> None:
    model = whole / "checkpoints" / "checkpoint_last.pt"
    for command, words in commands(whole / form, model, tmp_path / "none").items():
        complaint = refusal(command, *words, "--dataset-impl", flag)
        split = "train" if command == "train" else "test"
        assert f"{whole / form} contains the split {split} {part}" in complaint
        if form == "raw" and command != "validate":  # without the flag, fairseq reads no text
            assert refusal(command, *words) == complaint
    assert not (tmp_path / "none").exists()


def test_text_is_read(whole: Path, tmp_path: Path) -> None:
    saved = tmp_path / "checkpoint_last.pt"
    for command, words in commands(whole / "raw", saved, tmp_path).items():
        succeed(command, *words, "--dataset-impl", "raw")
    # lightseq-validate reads data in the form of the training, unless the flag names another.
    succeed("validate", *commands(whole / "raw", saved, tmp_path)["validate"])
    words = commands(whole / "mmap", saved, tmp_path)["validate"]
    assert "raw if the split is plain text, mmap if it is" in refusal("validate", *words)
    succeed("validate", *words, "--dataset-impl", "mmap")


class Words:
    """The part of a dictionary that a dataset uses."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """150,000 sentences of 40 tokens: more than a sample checks, with lengths in several blocks."""
    path = tmp_path_factory.mktemp("large") / "train.de-en.de"
    tokens = np.arange(6_000_000, dtype=np.int64) % 1000
    tokens.astype(np.uint16).tofile(f"{path}.bin")
    with MMapIndexedDataset.Index.writer(f"{path}.idx", np.uint16) as index:
        index.write([40] * 150_000)
    return path


def test_every_token_is_looked_at_when_a_file_is_read(large: Path, whole: Path) -> None:
    assert whole.exists()  # after a launcher has run, fairseq's functions have our checks
    for everywhere in (True, False):
        binarised.check_words(binarised.find(str(large), None), 1000, everywhere)
        with pytest.raises(UserError, match=r"Sentence 24 .* token id 999, .* has 999 words:"):
            binarised.check_words(binarised.find(str(large), None), 999, everywhere)
    tokens = np.memmap(f"{large}.bin", np.uint16, "r+")
    last = len(tokens) - 1
    tokens[last] = 1000
    tokens.flush()
    binarised.check_words(binarised.find(str(large), None), 1000, everywhere=False)
    with pytest.raises(UserError, match="Sentence 149999 "):
        indexed_dataset.make_dataset(str(large), "mmap", dictionary=Words(1000))
    assert len(indexed_dataset.make_dataset(str(large), "mmap", dictionary=Words(1001))) == 150_000


def test_addresses_that_an_older_fairseq_has_summed_in_32_bits(tmp_path: Path) -> None:
    count = 3
    sizes = np.full(count, 1 << 29, np.int32)
    addresses = (np.arange(count, dtype=np.int64) << 30).astype(np.int32).astype(np.int64)
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQ", 1, 8, count)
    (tmp_path / "all.idx").write_bytes(head + sizes.tobytes() + addresses.tobytes())
    (tmp_path / "all.bin").touch()
    with pytest.raises(UserError, match=r"all\.idx is damaged"):
        binarised.find(str(tmp_path / "all"), "mmap")
