"""A run whose gradients are not finite says once, in its last line, what to do."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import helpers.cli_runs as cli_runs
import pytest

LS = "ls_transformer_tiny --optimizer ls_adam --criterion ls_label_smoothed_cross_entropy"
EAGER = LS.replace("ls_adam", "adam")  # fairseq's step, with our model
NATIVE = LS.replace("ls_", "")
FIXED = "--lr-scheduler fixed --max-update 9 --disable-validation"
VALIDATED = "--lr-scheduler fixed --max-update 9 --validate-interval-updates 1"
CLIP, WARM = "add --clip-norm 1", "add --warmup-updates"
AGAIN = (
    "run the command again. With --restore-file {0} --reset-dataloader it continues from the state "
    "before this update, at the start of the first epoch."
)
NOTE = "note: the validation loss is NaN"
LOST = "begin with an earlier checkpoint, or again in another --save-dir. {0} and the last "
LOST += "checkpoints have diverged, too."


@pytest.mark.parametrize(
    ("arch", "flags", "said"),
    [
        (LS, FIXED, f"Lower --lr, {CLIP} or {WARM}, and {AGAIN}"),
        (EAGER, FIXED, f"Lower --lr, {CLIP} or {WARM}, and {AGAIN}"),
        (NATIVE, FIXED, f"Lower --lr, {CLIP} or {WARM}, and {AGAIN}"),
        (LS, f"{FIXED} --clip-norm 1", f"Lower --lr or {WARM}, and {AGAIN}"),
        (
            LS, f"{FIXED} --warmup-updates 1 --clip-norm 9",
            f"Lower --lr or raise --warmup-updates, and {AGAIN}",
        ),
        (
            LS, "--lr-scheduler tri_stage --warmup-steps 1 --hold-steps 9 --decay-steps 9 "
            "--disable-validation --max-update 9",
            f"Lower --lr or {CLIP}, and {AGAIN}",
        ),
        (LS, VALIDATED, f"Lower --lr, {CLIP} or {WARM}, and {LOST}"),
    ],
)  # fmt: skip
def test_the_last_line_says_what_to_do(
    binarised: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, arch: str, flags: str,
    said: str,
) -> None:  # fmt: skip
    caplog.set_level(logging.INFO)
    words = f"--arch {arch} --lr 1e38 {flags}".split()
    result = cli_runs.run("train", binarised, *cli_runs.SMALL, *words, "--save-dir", tmp_path)
    assert result.exit_code != 0
    crash = tmp_path / "crash.pt"
    assert crash.exists()
    (line,) = (x for x in result.stderr.splitlines() if x.startswith("lightseq-train: error: "))
    reason = r"lightseq-train: error: gradients are Nan/Inf in update \d: training has diverged\. "
    assert re.sub(reason, "", line) == said.format(crash)
    assert (NOTE in caplog.text) == (LOST in said)
    assert not re.search("(?i)lower --lr", caplog.text)


def test_a_checkpoint_that_has_diverged_is_not_named_again(binarised: Path, tmp_path: Path) -> None:
    """The first update after it fails, too, with any learning rate."""
    words = f"--arch {LS} {FIXED} --save-dir {tmp_path} --lr".split()
    first = cli_runs.run("train", binarised, *cli_runs.SMALL, *words, "1e38").stderr
    crash = tmp_path / "crash.pt"
    again = ["1e-3", "--restore-file", crash, "--reset-dataloader"]
    then = cli_runs.run("train", binarised, *cli_runs.SMALL, *words, *again).stderr
    assert AGAIN.format(crash) in first
    assert LOST.format(crash) in then and "--restore-file" not in then


def test_fp16_names_the_loss_scale(binarised: Path, tmp_path: Path) -> None:
    words = f"--arch {LS} --lr 1e38 {FIXED} --fp16 --fp16-no-flatten-grads --min-loss-scale 9"
    result = cli_runs.run(
        "train", binarised, *cli_runs.SMALL, *words.split(), "--save-dir", tmp_path
    )
    (line,) = (x for x in result.stderr.splitlines() if x.startswith("lightseq-train: error: "))
    reason = r"Minimum loss scale reached \(9\.0\) in update \d: training has diverged, or its "
    reason += r"gradients do not fit into fp16\. "
    said = re.sub(f"lightseq-train: error: {reason}", "", line)
    again = AGAIN.format(tmp_path / "crash.pt")
    assert said == f"Lower --lr, {CLIP}, {WARM} or train with --bf16, and {again}"
