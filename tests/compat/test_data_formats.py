"""For every form of data that fairseq reads, the losses of an ls_ run equal those of fairseq's
own."""

from __future__ import annotations

import logging
import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.cli_runs import SMALL, most_workers, succeed
from helpers.parity import write_corpus
from helpers.training_runs import LS, NATIVE, in_a_fork, run

# isort: split
from fairseq.data import indexed_dataset
from fairseq.data.indexed_dataset import MMapIndexedDataset

PAIRS = 40
EXACT: dict[str, Any] = {
    "dropout": 0,
    "attention_dropout": 0,
    "activation_dropout": 0,
    "max_update": None,
    "max_epoch": 2,
    "no_save": True,
}
POSITIONS: dict[str, Any] = {
    "max_source_positions": 2048,
    "max_target_positions": 2048,
    "max_tokens": 2000,
}


def binarise(text: Path, folder: Path, *flags: str) -> Path:
    """A data folder made from the corpus in ``text``, with its dictionaries."""
    dictionaries: list[str | Path] = [
        "--srcdict",
        text / "dict.src.txt",
        "--tgtdict",
        text / "dict.tgt.txt",
    ]
    prefixes: list[str | Path] = [
        "--trainpref",
        text / "train.src-tgt",
        "--validpref",
        text / "valid.src-tgt",
    ]
    succeed(
        "preprocess", "-s", "src", "-t", "tgt", "--destdir", folder, *dictionaries, *prefixes,
        *flags,
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus with alignments; word i is aligned to word i."""
    folder = write_corpus(tmp_path_factory.mktemp("text"), PAIRS)
    for split in ("train", "valid"):
        lengths = [
            [len(line.split()) for line in (folder / f"{split}.src-tgt.{side}").open()]
            for side in ("src", "tgt")
        ]
        pairs = (" ".join(f"{i}-{i}" for i in range(min(both))) for both in zip(*lengths))
        (folder / f"{split}.src-tgt.align").write_text("".join(f"{line}\n" for line in pairs))
    return folder


@pytest.fixture(scope="module")
def data(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return binarise(text, tmp_path_factory.mktemp("data"), "--align-suffix", "align")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second corpus with the same dictionaries."""
    text = write_corpus(tmp_path_factory.mktemp("other-text"), PAIRS // 2, seed=2)
    return binarise(text, tmp_path_factory.mktemp("other"))


def assert_trains_as_native(
    data: Path, folder: Path, caplog: pytest.LogCaptureFixture, reason: str | None = None,
    **flags: Any,
) -> list[float]:  # fmt: skip
    """Compares the losses of ours and of fairseq one by one, and returns them.

    ``data`` is one folder or several. ``reason`` is the reason in the log if the run uses fairseq's
    own step.
    """
    flags = {"dataset_impl": "mmap", **EXACT, **flags}
    caplog.set_level(logging.INFO)
    caplog.clear()
    ours = run(data, folder / "ours", **{**LS, **flags})
    steps = (re.fullmatch(r"step: fairseq's own \((.*)\)", line) for line in caplog.messages)
    assert [step[1] for step in steps if step is not None] == ([reason] if reason else [])
    native = run(data, folder / "native", native=True, **{**NATIVE, **flags})
    assert len(native) >= flags["max_epoch"]
    assert ours == pytest.approx(native, rel=1e-4)
    return ours


@pytest.mark.parametrize("form", ["mmap", "raw", "lazy", "cached"])
def test_formats(text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, form: str) -> None:
    data = binarise(text, tmp_path / "data", "--dataset-impl", form)
    assert_trains_as_native(data, tmp_path, caplog, dataset_impl=form)


def test_formats_hold_the_same_data(text: Path, tmp_path: Path) -> None:
    losses = []
    for form in ("mmap", "raw", "lazy", "cached"):
        data = binarise(text, tmp_path / form, "--dataset-impl", form)
        losses.append(run(data, tmp_path, **{**LS, **EXACT, "dataset_impl": form}))
    assert losses.count(losses[0]) == 4


def test_workers_do_not_share_a_files_position(text: Path, tmp_path: Path) -> None:
    data = binarise(text, tmp_path, "--dataset-impl", "lazy")
    dataset = indexed_dataset.make_dataset(str(data / "train.src-tgt.src"), "lazy")
    first = dataset[0]
    position = dataset.data_file.tell()

    def work() -> None:
        assert dataset[PAIRS - 1].tolist() != first.tolist()

    assert in_a_fork(work) == 0
    assert dataset.data_file.tell() == position


def test_directories_take_turns(
    data: Path, other: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    both = assert_trains_as_native(Path(f"{data}:{other}"), tmp_path / "both", caplog, max_epoch=3)
    alone = run(data, tmp_path / "alone", **{**LS, **EXACT, "dataset_impl": "mmap"})
    # Two epochs on one folder, compared with three on both: first folder, second folder, first
    # folder.
    epoch = len(alone) // 2
    assert both[:epoch] == alone[:epoch] and both[epoch:][:epoch] != alone[epoch:]
    assert epoch < len(both) - epoch < len(alone)


@pytest.mark.parametrize("system", [[], ["--native"]], ids=["ours", "native"])
def test_workers_of_a_directory_end_with_its_epoch(
    data: Path, other: Path, tmp_path: Path, system: list[str]
) -> None:
    words = [f"{data}:{other}", "--arch", "ls_transformer_tiny", *SMALL, *system, "--no-save"]
    words += ["--max-update", "0", "--max-epoch", "5", "--num-workers", "1"]
    # One of the epoch, and one of validation, whose data are the same in each epoch.
    assert most_workers(*words, "--save-dir", tmp_path) == 2


def test_parts_of_a_directory_are_joined(
    data: Path, other: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    joined = shutil.copytree(data, tmp_path / "joined")
    for name in ("src.bin", "src.idx", "tgt.bin", "tgt.idx"):
        shutil.copy(other / f"train.src-tgt.{name}", joined / f"train1.src-tgt.{name}")
    as_they_are, once, thrice = (
        assert_trains_as_native(joined, tmp_path / str(times), caplog, upsample_primary=times)
        for times in (None, 1, 3)
    )
    alone = run(data, tmp_path / "alone", **{**LS, **EXACT, "dataset_impl": "mmap"})
    assert as_they_are == once
    assert len(alone) < len(once) < len(thrice)


def test_truncated_sources(data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert_trains_as_native(data, tmp_path, caplog, truncate_source=True, max_source_positions=4)
    assert not any("have invalid sizes" in message for message in caplog.messages)


def test_alignments(data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert_trains_as_native(
        data, tmp_path, caplog, "the data have alignments", load_alignments=True
    )


def test_alignments_are_learned(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    supervised: dict[str, Any] = {
        "criterion": "label_smoothed_cross_entropy_with_alignment",
        "load_alignments": True,
        "alignment_lambda": 1.0,
    }
    reason = "our step does not support the criterion"
    with_them = assert_trains_as_native(data, tmp_path, caplog, reason, **supervised)
    without = run(data, tmp_path / "without", **{**LS, **EXACT, "dataset_impl": "mmap"})
    assert with_them[0] == pytest.approx(without[0], rel=1e-4)
    assert with_them[-1] != pytest.approx(without[-1], rel=1e-4)


@pytest.mark.parametrize("learned", [None, True], ids=["sinusoidal", "learned"])
def test_more_positions_than_the_default(
    text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, learned: bool | None
) -> None:
    long = shutil.copytree(text, tmp_path / "text")
    rng = random.Random(1)
    for side in ("src", "tgt"):
        with (long / f"train.src-tgt.{side}").open("a") as file:
            file.write(" ".join(f"w{rng.randrange(90)}" for _ in range(1500)) + "\n")
    data = binarise(long, tmp_path / "data")
    flags: dict[str, Any] = {
        "encoder_learned_pos": learned,
        "decoder_learned_pos": learned,
        "max_epoch": 1,
    }
    long_too = assert_trains_as_native(data, tmp_path / "long", caplog, **POSITIONS, **flags)
    flags |= {"max_tokens": POSITIONS["max_tokens"]}
    default = assert_trains_as_native(data, tmp_path / "default", caplog, **flags)
    assert sum(long_too) > 3 * sum(default)
    assert any("1 samples have invalid sizes" in message for message in caplog.messages)


def test_addresses_of_joined_files_pass_two_gibibytes(tmp_path: Path) -> None:
    # The steps of `lightseq-preprocess --workers 2`, with an index that describes more data than
    # exist.
    part = str(tmp_path / "part")
    with MMapIndexedDataset.Index.writer(indexed_dataset.index_file_path(part), np.uint16) as index:
        index.write([1 << 30] * 4)
    Path(indexed_dataset.data_file_path(part)).touch()
    builder = indexed_dataset.MMapIndexedDatasetBuilder(tmp_path / "all.bin", dtype=np.uint16)
    builder.merge_file_(part)
    builder.finalize(str(tmp_path / "all.idx"))
    index = MMapIndexedDataset.Index(str(tmp_path / "all.idx"))
    assert index._pointers.tolist() == [i << 31 for i in range(4)]


def test_workers_binarise_what_one_process_does(text: Path, tmp_path: Path) -> None:
    alone, together = (
        binarise(text, tmp_path / workers, "--workers", workers) for workers in ("1", "3")
    )
    for split in ("train", "valid"):
        for name in ("src.bin", "src.idx", "tgt.bin", "tgt.idx"):
            file = f"{split}.src-tgt.{name}"
            assert (alone / file).read_bytes() == (together / file).read_bytes()
