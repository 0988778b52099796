"""The flag ``--fp8``: what it needs, and how it reaches a run from the command line."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any
from unittest import mock

import helpers.cli_runs as cli_runs
import helpers.interpreters as interpreters
import helpers.training_runs as runs
import pytest
import torch
from helpers.golden import matches, refusals

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.training import captured

WIDE = {"encoder_embed_dim": 32, "encoder_ffn_embed_dim": 64, "encoder_attention_heads": 2}
FP8: dict[str, Any] = {**runs.LS, **WIDE, "bf16": True, "fp8": True}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.corpus(tmp_path_factory.mktemp("corpus"))


def products_in(folder: Path) -> int:
    """How many products have scales in a run's last checkpoint."""
    state = torch.load(folder / "checkpoint_last.pt", weights_only=False)["extra_state"]
    return len(state["lightseq_fp8"])


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            {"encoder_ffn_embed_dim": 40},
            r"multiples of 16, but encoder.layers.0.fc1.weight has the shape \[40, 32\]: change",
        ),
        (
            {"optimizer": "adam"},
            r"fairseq's own step \(the optimizer is not ls_adam or adafactor\): r",
        ),
        ({"store_ema": True}, r"uses fairseq's own step \(--store-ema\): remove --fp8"),
        ({"num_batch_buckets": 2}, r"uses fairseq's own step \(sentences are padded to length buc"),
    ],
)
def test_refusals(corpus: Path, tmp_path: Path, flags: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=f"^--fp8 needs .*{sentence}"):
        runs.run(corpus, tmp_path, **{**FP8, **flags})


def test_gpus_without_fp8_are_refused(corpus: Path, tmp_path: Path) -> None:
    """Before anything is trained. The GPU is not there, so only the question is asked."""
    trainer = mock.Mock(cuda=True, device=torch.device("cuda"))
    trainer.cfg = runs.configure(corpus, tmp_path, FP8)
    with (
        mock.patch.object(torch.cuda, "get_device_capability", lambda device: (8, 6)),
        pytest.raises(UserError, match=r"compute capability 8.9 or later, but this one has 8.6"),
    ):
        captured.refuse_fp8(trainer)


def test_the_launcher_takes_the_flag(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    words = ("--arch", "ls_transformer_tiny", *cli_runs.SMALL, "--save-dir", tmp_path)
    output = cli_runs.succeed("train", data, *words, "--bf16", "--fp8", "--log-interval", "1")
    assert "--fp8" in output.splitlines()[0].split()
    assert "precision: bf16 with fp32 master weights, products in fp8 on " in caplog.text
    assert re.search(r"\bfp8_sat[ =]0", caplog.text)
    assert products_in(tmp_path) == 11
    saved = tmp_path / "checkpoint_last.pt"
    translating = ("generate", data, "--path", saved, "--cpu", "--num-workers", 0)
    assert "H-0" in cli_runs.succeed(*translating, "--native")


def test_spawned_ranks_know_the_flag(data: Path, tmp_path: Path) -> None:
    """fairseq starts a process for each GPU, and passes the configuration."""
    (tmp_path / "script.py").write_text(
        """
from lightseq_fairseq.cli.train import main
if __name__ == "__main__":
    import torch
    torch.cuda.device_count = lambda: 2
    main()
"""
    )
    ranks = "--distributed-world-size 2 --distributed-backend gloo --ddp-backend legacy_ddp"
    done = interpreters.run(
        str(tmp_path / "script.py"), str(data), "--arch", "ls_transformer_tiny",
        *cli_runs.SMALL, *ranks.split(), "--bf16", "--fp8", "--save-dir", str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "(2 ranks)" in done.stdout and "products in fp8 on " in done.stdout
    assert products_in(tmp_path) == 11


@pytest.mark.parametrize(("words", "sentence"), refusals(__file__, "test_fp8_flag"))
def test_the_launcher_refuses_in_a_sentence(
    data: Path, tmp_path: Path, words: str, sentence: str
) -> None:
    result = cli_runs.run(
        "train", data, *words.split(), "--fp8", *cli_runs.SMALL, "--save-dir", tmp_path
    )
    assert result.exit_code == 2, (result.output, result.exception)
    assert matches(result.stderr.splitlines()[-1], f"lightseq-train: error: {sentence}")
    assert "Traceback" not in result.output
