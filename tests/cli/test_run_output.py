"""What a user sees while a command runs: first and last lines, progress, no warnings of other
packages."""

from __future__ import annotations

import fcntl
import itertools
import json
import logging
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fairseq_cli.train
import pytest
import torch
from fairseq.logging import metrics
from helpers import cli_runs, forked_commands
from helpers.training_runs import ON_GPU

from lightseq_fairseq.cli.start import logs
from lightseq_fairseq.training import report

LOGGER = "fairseq_cli.train.lightseq"
TINY = ["--arch", "ls_transformer_tiny", *cli_runs.SMALL]
TWO_EPOCHS = [*TINY, "--max-epoch", "2", "--max-update", "1000"]
SHOWN = {  # on the terminal: loggers, and the first words of their lines
    *("fairseq_cli.train | Stopping", "fairseq_cli.train | done"),
    "fairseq.checkpoint_utils | Saved",
    *(f"{LOGGER} | {name}" for name in ("model", "data", "precision", "optimizer", "log", "step")),
    *(f"{LOGGER} | {name}" for name in ("progress", "trained", "peak", "checkpoints")),
}
STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"

# Runs commands in a separate Python, so that no test code catches warnings.
SCRIPT = """
import gc, importlib, json, sys
gc.disable()  # for each worker that a command leaves it would wait 5 s
for command, words in json.loads(sys.argv[1]):
    main = importlib.import_module("lightseq_fairseq.cli." + command).main
    main(words, prog_name="lightseq-" + command, standalone_mode=False)
print("imported:", *sorted({"sympy", "torch._dynamo"} & {*sys.modules}))
"""


def target_tokens(data: Path) -> int:
    """Tokens of the training set, including the end-of-sentence symbol of each sentence."""
    lines = (data.parent / "text" / "train.en").read_text().splitlines()
    return sum(len(line.split()) + 1 for line in lines)


def told(caplog: pytest.LogCaptureFixture) -> dict[str, str]:
    """Name -> text of the report's lines; each line must occur exactly once."""
    told = [record.getMessage() for record in caplog.records if record.name == LOGGER]
    lines = [line.partition(": ") for line in told if not line.startswith("progress: ")]
    names = [name for name, _, _ in lines]
    assert len(set(names)) == len(names)
    return {name: text for name, _, text in lines}


# --- A pipe -------------------------------------------------------------------------------------


def test_a_forgotten_prefix_is_told(data: Path, tmp_path: Path) -> None:
    """At the beginning; not with --native, nor if fairseq's arch has no counterpart."""
    words = [data, *cli_runs.SMALL, "--optimizer", "adam", "--save-dir", tmp_path]

    def notes(arch: str, *more: str) -> list[str]:
        result = cli_runs.run("train", *words, "--arch", arch, *more)
        assert result.exit_code == 0, (result.output, result.exception)
        return [line for line in result.stderr.splitlines() if "ls_" in line]

    assert notes("transformer_tiny") == [
        "lightseq-train: note: this run is fairseq's own, because no name begins with ls_: for "
        "this package's layers, set --arch ls_transformer_tiny."
    ]
    assert not notes("transformer_tiny", "--native") and not notes("transformer_align")


@pytest.mark.parametrize("own", [[], ["--native"]], ids=["ls", "native"])
def test_standard_error_stays_empty(data: Path, tmp_path: Path, own: list[str]) -> None:
    """For every command, with data loading workers, with which torch warns about pinned memory."""
    checkpoint = str(tmp_path / "checkpoint_best.pt")
    workers = ["--num-workers", "1"]
    source = data.parent / "text" / "test.de"
    commands = [
        ("train", [data, *TINY, *workers, "--save-dir", tmp_path, "--log-format", "json", *own]),
        ("generate", [data, "--path", checkpoint, "--beam", "2", *workers, *own]),
        ("validate", [data, "--path", checkpoint, *workers, *own]),
        ("interactive", [data, "--path", checkpoint, "-sde", "-ten", "--input", source, *own]),
    ]
    words = json.dumps([(command, list(map(str, given))) for command, given in commands])
    environment = {**os.environ, "PYTHONWARNINGS": ""}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, words], capture_output=True, text=True, env=environment
    )
    assert (run.returncode, run.stderr) == (0, "")
    lines = run.stdout.splitlines()
    assert lines[0].startswith(f"lightseq-train {data} --arch")
    assert f" --optimizer {'' if own else 'ls_'}adam " in lines[0]
    assert lines[1] == "# filled in: the flags from --optimizer to the end"
    if not own:  # the import of torch.compile takes seconds
        assert lines[-1] == "imported:"
    train = run.stdout.partition("loading model(s)")[0]
    shown = set(re.findall(rf"^{STAMP} \| INFO \| (\S+ \| \w+)", train, re.MULTILINE))
    assert shown >= SHOWN and (shown == SHOWN) == (not own)
    # The lines of fairseq's progress bar can be parsed, as in fairseq.
    found = re.findall(rf"^{STAMP} \| INFO \| (?:train|valid) \| (.*)$", train, re.MULTILINE)
    assert [json.loads(line) for line in found][-1]["train_num_updates"] == "3"


@pytest.mark.parametrize("given", [[], ["--warmup-updates", "4000"]], ids=["filled in", "given"])
def test_the_learning_rate_arrives_in_a_short_run(
    data: Path, tmp_path: Path, given: list[str]
) -> None:
    """40 pairs, 4 in a batch: 30 updates."""
    words = [*TINY, "--batch-size", "4", "--max-epoch", "3", "--max-update", "0", *given]
    out = cli_runs.succeed("train", data, *words, "--save-dir", tmp_path)
    lines = [line for line in out.splitlines() if line.startswith("# warm-up")]
    said = "# warm-up: 3 updates, a tenth of the run (--max-epoch 3); the recipe has 4000"
    assert lines == ([] if given else [said])
    state = torch.load(tmp_path / "checkpoint_last.pt", weights_only=False)
    (group,) = state["last_optimizer_state"]["param_groups"]
    assert state["optimizer_history"][-1]["num_updates"] == 30
    assert group["lr"] == pytest.approx(5e-4 * (30 / 4000 if given else (3 / 30) ** 0.5))


# --- The first and the last lines ---------------------------------------------------------------


def test_the_report_of_a_run(data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    cli_runs.succeed("train", data, *TWO_EPOCHS, "--save-dir", tmp_path)
    state = torch.load(tmp_path / "checkpoint_last.pt", weights_only=False)
    size = sum({p.data_ptr(): p.numel() for p in state["model"].values()}.values())
    lines = told(caplog)
    assert list(lines) == [
        "command", "model", "data", "precision", "optimizer", "log", "step", "trained",
        "peak memory", "checkpoints",
    ]  # fmt: skip
    assert re.fullmatch(r"ls_transformer_tiny, [\d,]+ parameters", lines["model"])
    assert int(re.sub(r"\D", "", lines["model"])) <= size
    assert f"num. shared model params: {lines['model'].split()[1]} " in caplog.text
    (batches,) = re.findall(r"grouped total_num_itrs = (\d+)", caplog.text)[:1]
    assert lines["data"] == (
        f"de-en; 40 sentence pairs, {batches} batches an epoch; words in the dictionaries: "
        "source 24, target 24"
    )
    assert re.fullmatch(r"fp32 on \d+ CPU threads?", lines["precision"])
    assert lines["optimizer"] == (
        "ls_adam, criterion ls_label_smoothed_cross_entropy, schedule inverse_sqrt, "
        "learning rate 0.0005"
    )
    expected = "without CUDA graphs, without padding, PyTorch code on the CPU"
    assert lines["step"] == f"{expected} (CUDA graphs need a GPU)"
    updates, tokens, seconds, speed = map(
        float, re.findall(r"\d[\d.]*", lines["trained"].replace(",", ""))
    )
    assert (updates, tokens) == (2 * int(batches), 2 * target_tokens(data))
    # Seconds are rounded to a tenth.
    assert tokens / (seconds + 0.051) <= speed + 1 and speed * (seconds - 0.051) <= tokens + 1
    memory = re.fullmatch(r"(\d+\.\d\d) GiB of this process", lines["peak memory"])
    assert memory is not None and 0.05 < float(memory[1]) < 100
    best = f"{state['extra_state']['best']:g}"
    assert lines["checkpoints"] == (
        f"{tmp_path}: checkpoint_last.pt, checkpoint_best.pt (loss {best})"
    )
    messages = caplog.messages
    saved = [line for line in messages if line.startswith("Saved checkpoint")]
    assert len(saved) == 2 and all(
        line.startswith(f"Saved checkpoint {tmp_path}/checkpoint_best.pt (epoch ")
        and line.endswith(" seconds), also as checkpoint_last.pt")
        for line in saved
    )
    assert messages.index(f"step: {lines['step']}") < messages.index("Start iterating over samples")
    assert messages[-1].startswith("checkpoints: ")  # after the checkpoints are written
    (progress,) = (line for line in messages if line.startswith("progress: "))
    assert progress.startswith(
        f"progress: update {batches}, epoch 1, 50.0% of the run, about 0:00:"
    )
    file = (tmp_path / report.FILE).read_text()
    assert "(encoder)" in file and [line for line in messages if line not in file] == []


@pytest.mark.parametrize("system", [[], ["--native"]], ids=["ours", "native"])
def test_a_run_that_resumes_within_an_epoch_has_a_running_clock(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: list[str]
) -> None:
    """fairseq's wall would stay 0."""
    walls: list[float] = []
    stats = fairseq_cli.train.get_training_stats

    def read(found: dict[str, Any]) -> dict[str, Any]:
        walls.append(metrics.get_meter("default", "wall").elapsed_time)
        return stats(found)

    monkeypatch.setattr(fairseq_cli.train, "get_training_stats", read)
    for updates in (3, 5):
        walls.clear()
        cli_runs.succeed(
            "train", data, *TINY, *system, "--max-tokens", "100", "--max-update", str(updates),
            "--log-interval", "1", "--save-dir", tmp_path,
        )  # fmt: skip
        assert len(walls) >= 2 and 0 < walls[0] < walls[1]


def test_a_run_that_goes_on_counts_its_own_updates(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    words = [data, *TINY, "--max-tokens", "100", "--max-update"]

    def trained(folder: Path, updates: int) -> tuple[int, int]:
        caplog.clear()
        cli_runs.succeed("train", *words, str(updates), "--save-dir", folder)
        found = re.match(r"([\d,]+) updates?, ([\d,]+) target tokens", told(caplog)["trained"])
        assert found is not None
        return int(found[1]), int(found[2])

    # The second and the third run begin in the middle of an epoch of five updates.
    updates, tokens = zip(*(trained(tmp_path / "a", count) for count in (3, 4, 12)))
    assert updates == (3, 1, 8)
    assert (12, sum(tokens)) == trained(tmp_path / "b", 12)
    assert (tmp_path / "a" / report.FILE).read_text().count("command: lightseq-train") == 3


@pytest.mark.parametrize(
    ("extra", "name", "text"),
    [
        (["--bf16"], "precision", r"bf16 with fp32 master weights on .*"),
        (["--bf16", "--memory-efficient-bf16"], "precision", r"bf16 alone on .*"),
        (["--store-ema"], "step", r"fairseq's own \(--store-ema\)"),
        (["--native"], "step", r"fairseq's own \(a native run\)"),
        (["--native"], "model", r"transformer_tiny, [\d,]+ parameters"),
        (["--no-save"], "checkpoints", "none, because of --no-save"),
        (["--no-last-checkpoints"], "checkpoints", r".*/save: checkpoint_best.pt \(loss [\d.]+\)"),
    ],
)
def test_it_says_what_differs(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    extra: list[str], name: str, text: str,
) -> None:  # fmt: skip
    caplog.set_level(logging.INFO)
    cli_runs.succeed("train", data, *TINY, "--save-dir", tmp_path / "save", *extra)
    assert re.fullmatch(text, told(caplog)[name])


def test_data_of_other_tasks(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(sys, "argv", ["lightseq-train"])
    pairs = ["--task", "multilingual_translation", "--lang-pairs", "de-en,en-de", "--no-save"]
    words = [word.replace("tiny", "iwslt_de_en") for word in TINY]
    words[1] = "ls_multilingual_transformer"
    heads = ["--encoder-attention-heads", "2", "--decoder-attention-heads", "2"]
    cli_runs.succeed("train", data, *words, *heads, *pairs)
    assert re.fullmatch(
        r"de-en, en-de; 80 sentence pairs, \d+ batches an epoch; words in the dictionaries: de 24, "
        "en 24", told(caplog)["data"],
    )  # fmt: skip
    caplog.clear()
    text = data.parent / "text"
    cli_runs.succeed(
        "preprocess", "--only-source", "--trainpref", text / "train.de", "--validpref",
        text / "valid.de", "--destdir", tmp_path,
    )  # fmt: skip
    cli_runs.succeed(
        "train", tmp_path, "--task", "language_modeling", "--arch", "ls_transformer_lm",
        "--decoder-layers", "1", "--decoder-embed-dim", "16", "--decoder-attention-heads", "2",
        "--tokens-per-sample", "20", "--max-tokens", "100", "--max-update", "2", "--num-workers",
        "0", "--no-save", "--cpu",
    )  # fmt: skip
    blocks = -(-sum(len(line.split()) + 1 for line in (text / "train.de").open()) // 20)
    assert re.fullmatch(
        rf"{blocks} blocks of text, \d+ batches an epoch; one dictionary of 24 words",
        told(caplog)["data"],
    )
    shown = {record.name for record in caplog.records if logs.is_shown(record)}
    assert shown <= {LOGGER, "fairseq_cli.train", "fairseq_cli.preprocess", "train", "valid"}


def test_rank_0_alone_reports(data: Path, tmp_path: Path) -> None:
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
    del store  # its port is free again
    words = [data, *TINY, "--save-dir", tmp_path]
    command = [forked_commands.python(), "-m", "lightseq_fairseq.cli.train", *map(str, words)]
    ranks = [
        subprocess.Popen(
            command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={**os.environ, **meeting, "RANK": rank, "LOCAL_RANK": rank},
        )
        for rank in ("0", "1")
    ]  # fmt: skip
    first, second = (rank.communicate(timeout=200)[0] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [0, 0], first + second
    assert re.search(r" batch(es)? an epoch and rank \(2 ranks\); ", first)
    assert first.count("# filled in: ") == first.count("| trained: 3 updates, ") == 1
    assert not re.search(r"filled in|model: |trained: |peak memory", second)


def test_a_run_tells_how_much_time_is_left(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look at the clock takes 7 s: an update looks at it twice, an epoch twice more."""
    caplog.set_level(logging.INFO)
    clock = SimpleNamespace(perf_counter=itertools.count(0.0, 7.0).__next__)
    monkeypatch.setattr(report, "time", clock)
    words = ["--max-tokens", "50", "--max-update", "60", "--validate-interval", "100"]
    cli_runs.succeed("train", data, *TINY, *words, "--save-dir", tmp_path)
    assert re.findall(r"progress: (.*)", caplog.text) == [
        "update 4, epoch 1, 6.7% of the run, about 0:14:42 left",  # after a minute
        "update 8, epoch 2, 13.3% of the run, about 0:14:24 left",
        "update 17, epoch 3, 28.3% of the run, about 0:11:31 left",
        "update 35, epoch 5, 58.3% of the run, about 0:06:35 left",
    ]


# --- A terminal ---------------------------------------------------------------------------------


def on_a_terminal(*words: str | Path) -> str:
    """What a Python command writes to a terminal of 120 columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    command = [forked_commands.python(), *map(str, words)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs)
    os.close(theirs)
    received = b""
    while True:
        try:
            block = os.read(ours, 1 << 16)
        except OSError:  # the process has closed its end
            break
        received += block
    os.close(ours)
    assert process.wait() == 0, received.decode()
    return received.decode()


def test_a_terminal_gets_a_bar_and_whole_lines(data: Path, tmp_path: Path) -> None:
    words = [data, *TWO_EPOCHS, "--max-tokens", "12", "--log-interval", "1", "--save-dir", tmp_path]
    received = on_a_terminal("-m", "lightseq_fairseq.cli.train", *words)
    for bar in (r"epoch 001: +\d+%\|", r"epoch 002: +\d+%\|", r"\d/\d+ \[.*it/s, loss="):
        assert re.search(bar, received)
    # After the bar is erased, a log line begins in the first column.
    log = re.findall(rf"(.*?)({STAMP} \| .*)\r\n", received)
    assert len(log) > 15
    for before, _ in log:
        assert re.fullmatch(r"(.*\r)?", before), before
    assert "| train_inner | " not in received  # the bar shows this
    assert "lightseq | trained: " in received


@pytest.mark.parametrize(("own", "shown"), [((), 4), (("--log-format", "simple"), 30)], ids=str)
def test_a_terminal_gets_few_lines_of_short_epochs(
    data: Path, tmp_path: Path, own: tuple[str, ...], shown: int
) -> None:
    """Those with validation, and the first one; the file has all."""
    words = [data, *TINY, "--max-epoch", "30", "--max-update", "1000", "--save-dir", tmp_path]
    words += ["--validate-interval", "10", "--save-interval", "10", "--max-tokens", "999", *own]
    received = on_a_terminal("-m", "lightseq_fairseq.cli.train", *words)
    epochs = r"\| train \| epoch (\d+) \| "
    found = re.findall(epochs, received)
    assert {"001", "010", "020", "030"} <= {*found} and shown <= len(found) < shown + 9
    assert len(re.findall(epochs, (tmp_path / "lightseq-train.log").read_text())) == 30


def test_translations_on_a_terminal_are_whole_lines(data: Path, tmp_path: Path) -> None:
    cli_runs.succeed("train", data, *TINY, "--save-dir", tmp_path)
    words = [data, "--path", tmp_path / "checkpoint_best.pt", "--batch-size", "1", "--cpu"]
    received = on_a_terminal("-m", "lightseq_fairseq.cli.generate", *words)
    assert "0/6 [" in received
    lines = re.findall(r"(.*?)([STHDP]-\d\t.*)\r\n", received)
    assert len(lines) == 30
    assert all(re.fullmatch(r"(.*\r)?", before) for before, _ in lines)


# --- A GPU --------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_the_report_on_a_gpu(data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    wide = [f"--{k.replace('_', '-')}={v}" for k, v in ON_GPU.items() if k.startswith("encoder")]
    words = [word for word in TWO_EPOCHS if word != "--cpu"]
    wide += ["--decoder-attention-heads=2", "--distributed-world-size=1", "--no-save"]
    cli_runs.succeed("train", data, *words, *wide)
    lines = told(caplog)
    kind = "captured as CUDA graphs, without padding, CUDA kernels"
    assert lines["step"] == f"{kind} (all parts are ls_)"
    assert lines["precision"] == f"bf16 with fp32 master weights on {torch.cuda.get_device_name()}"
    memory = re.fullmatch(r"(\d+\.\d\d) GiB of the GPU", lines["peak memory"])
    assert memory is not None and 0 < float(memory[1]) <= torch.cuda.mem_get_info()[1] / 2**30
    assert f"{2 * target_tokens(data):,} target tokens" in lines["trained"]


def test_another_arch_is_not_blamed_for_flags_that_it_sets(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """fairseq's lstm has an --adaptive-softmax-cutoff that it uses only with adaptive_loss."""
    caplog.set_level(logging.INFO)
    sizes = "--encoder-embed-dim 8 --decoder-embed-dim 8 --decoder-out-embed-dim 8"
    command = f"--arch lstm --optimizer ls_adam {sizes} --max-tokens 200 --max-update 1 --cpu"
    cli_runs.succeed("train", data, *command.split(), "--no-save", "--num-workers", "0")
    assert told(caplog)["step"] == "fairseq's own (our step does not support the arch)"
