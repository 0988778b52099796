"""lightseq-average: which checkpoints it chooses, the average it writes, and which commands load
it."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cli_runs import SMALL, run, succeed
from helpers.golden import matches, refusals

# isort: split
from fairseq import checkpoint_utils

Model = dict[str, torch.Tensor]


def write(path: Path, **model: torch.Tensor) -> Path:
    torch.save(
        {
            "args": None,
            "cfg": {"model": argparse.Namespace(arch="transformer")},
            "model": model,
            "optimizer_history": [{"num_updates": 8000}],
            "extra_state": {"file": path.name},
            "last_optimizer_state": {"state": {0: torch.zeros(3)}},
        },
        path,
    )
    return path


def read(path: Path) -> dict[str, Any]:
    with torch.serialization.safe_globals([argparse.Namespace]):
        return torch.load(path)


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of epochs and of updates; their only weight is their epoch or update number."""
    folder = tmp_path_factory.mktemp("numbered")
    for epoch in (8, 9, 10, 11):
        write(folder / f"checkpoint{epoch}.pt", one=torch.tensor([float(epoch)]))
        updates = 100 * epoch
        write(folder / f"checkpoint_{epoch}_{updates}.pt", one=torch.tensor([float(updates)]))
    for other in ("last", "best"):
        write(folder / f"checkpoint_{other}.pt", one=torch.tensor([-1e9]))
    return folder


@pytest.mark.parametrize(
    ("words", "mean", "newest"),
    [
        ("", 9.5, "checkpoint11.pt"),
        ("--num-epoch-checkpoints 2", 10.5, "checkpoint11.pt"),
        ("--num-epoch-checkpoints 2 --checkpoint-upper-bound 10", 9.5, "checkpoint10.pt"),
        ("--num-update-checkpoints 3", 1000.0, "checkpoint_11_1100.pt"),
        ("--num-update-checkpoints 1 --checkpoint-upper-bound 999", 900.0, "checkpoint_9_900.pt"),
    ],
)
def test_the_last_checkpoints_of_a_folder(
    numbered: Path, tmp_path: Path, words: str, mean: float, newest: str
) -> None:
    output = tmp_path / "averaged.pt"
    printed = succeed("average", "--inputs", numbered, *shlex.split(words), "--output", output)
    assert newest in printed
    averaged = read(output)
    assert averaged["model"]["one"].item() == mean
    assert averaged["extra_state"] == {"file": newest}
    assert averaged["cfg"]["model"].arch == "transformer"
    assert averaged["last_optimizer_state"] is None
    assert [path.name for path in tmp_path.iterdir()] == ["averaged.pt"]


def test_named_checkpoints_are_summed_in_float64_and_rounded_once(tmp_path: Path) -> None:
    # 2048 + 1 is 2048 in float16, and 2**24 + 1 is 2**24 in float32.
    paths = []
    for number, (half, single) in enumerate(((2048.0, 2.0**24), (1.0, 1.0), (1.0, 1.0))):
        tied = torch.tensor([1.0, 4.0 * number])
        weights = {
            "half": torch.tensor([half], dtype=torch.float16),
            "single": torch.tensor([single]),
            "double": torch.tensor([1e-9 * number], dtype=torch.float64),
            "counter": torch.tensor([number]),
            "embedding": tied,
            "projection": tied,
        }
        paths.append(write(tmp_path / f"{number}.pt", **weights))
    before = paths[0].read_bytes()
    succeed("average", "--inputs", *paths, "--output", tmp_path / "averaged.pt")
    model: Model = read(tmp_path / "averaged.pt")["model"]
    # fp32: the value does not fit into 16 bits
    assert torch.equal(model["half"], torch.tensor([2050 / 3]))
    assert torch.equal(model["single"], torch.tensor([(2**24 + 2) / 3]))
    assert torch.equal(model["double"], torch.tensor([1e-9], dtype=torch.float64))
    assert torch.equal(model["counter"], torch.tensor([0]))
    assert torch.equal(model["embedding"], torch.tensor([1.0, 4.0]))
    assert model["embedding"].data_ptr() == model["projection"].data_ptr()
    assert paths[0].read_bytes() == before


@pytest.mark.parametrize(("words", "sentence"), refusals(__file__, "test_average"))
def test_what_cannot_be_averaged_is_refused_and_nothing_written(
    numbered: Path, tmp_path: Path, words: str, sentence: str
) -> None:
    write(tmp_path / "wide.pt", one=torch.ones(2))
    write(tmp_path / "other.pt", two=torch.ones(1))
    write(tmp_path / "averaged.pt", one=torch.ones(2))
    (tmp_path / "text.pt").write_text("no checkpoint")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    output = [] if "--output" in words else ["--output", tmp_path / "averaged.pt"]
    result = run("average", *shlex.split(words.format(numbered, tmp_path)), *output)
    assert result.exit_code == 2, result.exception
    assert matches(result.stderr, f"lightseq-average: error: {sentence}\n")
    assert result.stderr.startswith("lightseq-average: error: ")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


EPOCH, UPDATE = "checkpoint<epoch>.pt", "checkpoint_<epoch>_<updates>.pt"
BEST = "use checkpoint_best.pt itself, or"


@pytest.mark.parametrize(
    ("flags", "asked", "said"),
    [
        (
            "--save-interval 2", "epoch",
            f"only 1 of 9 checkpoints named {EPOCH}, because the run writes one every 2 epochs "
            "(--save-interval): ask for fewer, or train longer or with a lower --save-interval.",
        ),
        (
            "--save-interval 2 --keep-last-epochs 1", "epoch",
            f"only 1 of 9 checkpoints named {EPOCH}, because the run keeps only the last 1 "
            "(--keep-last-epochs): ask for fewer, or train with a larger --keep-last-epochs.",
        ),
        ("", "epoch", f"only 2 of 9 checkpoints named {EPOCH}: ask for fewer, or train longer."),
        (
            "--no-epoch-checkpoints", "epoch",
            f"no checkpoints named {EPOCH}, because the run has --no-epoch-checkpoints: {BEST} "
            "train without this flag.",
        ),
        (
            "", "update",
            f"no checkpoints named {UPDATE}, because the run has no --save-interval-updates: "
            f"{BEST} train with this flag.",
        ),
        (
            "--save-interval-updates 9 --max-tokens 40", "update",
            f"only 1 of 9 checkpoints named {UPDATE}, because the run writes one every 9 updates "
            "(--save-interval-updates): ask for fewer, or train longer or with a lower "
            "--save-interval-updates.",
        ),
    ],
)  # fmt: skip
def test_too_few_checkpoints_name_the_flag_of_the_run(
    data: Path, tmp_path: Path, flags: str, asked: str, said: str
) -> None:
    small = [word for word in SMALL if word != "--no-epoch-checkpoints"]
    words = "--arch ls_transformer_tiny --max-epoch 2 --max-update 99"
    succeed("train", data, *small, *words.split(), *flags.split(), "--save-dir", tmp_path)
    result = run(
        "average", "--inputs", tmp_path, f"--num-{asked}-checkpoints", "9", "--output", "x.pt"
    )
    assert result.stderr == f"lightseq-average: error: {tmp_path} contains {said}\n"


@pytest.mark.parametrize("precision", [(), ("--bf16",)])
def test_the_average_of_a_run_translates_here_and_in_fairseq(
    data: Path, tmp_path: Path, precision: tuple[str, ...]
) -> None:
    arch = ("--arch", "ls_transformer_tiny", "--optimizer", "ls_adam", "--lr", "0.01")
    each = ("--save-interval-updates", "1", "--max-tokens", "40", *precision)
    succeed("train", data, *arch, *SMALL, *each, "--save-dir", tmp_path)
    output = tmp_path / "averaged.pt"
    succeed("average", "--inputs", tmp_path, "--num-update-checkpoints", "2", "--output", output)

    parts = [
        checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / f"checkpoint_1_{updates}.pt"))
        for updates in (2, 3)
    ]
    averaged = checkpoint_utils.load_checkpoint_to_cpu(str(output))
    for name, mean in averaged["model"].items():
        two = torch.stack([part["model"][name] for part in parts])
        assert two.dtype == mean.dtype == torch.float32
        # fairseq's `_float_tensor` is uninitialised memory, which may be NaN.
        expected = two.double().mean(0).float()
        torch.testing.assert_close(mean, expected, rtol=0, atol=0, equal_nan=True)
    weight = parts[0]["model"]["encoder.layers.0.fc1.weight"]
    # an fp32 master weight, also in bf16 training
    assert not torch.equal(weight, weight.bfloat16().float())
    quick = shlex.split("--cpu --beam 2 --max-len-b 5 --num-workers 0")
    ours, native = (
        re.findall(r"(?m)^(D-\d+)\t\S+\t(.*)$", succeed("generate", data, "--path", output, *words))
        for words in (quick, [*quick, "--native"])
    )
    assert len(ours) == 6 and ours == native
