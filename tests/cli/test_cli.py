"""Commands that run: what they add to fairseq's runs, what they run, and how they end."""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from helpers import forked_commands, interpreters
from helpers.cli_runs import SMALL, run, succeed

# isort: split
import fairseq_cli.train

from lightseq_fairseq.cli.benchmark.train.commands import FOR_TORCH
from lightseq_fairseq.cli.start import logs
from lightseq_fairseq.cli.start.old_lightseq import conflict
from lightseq_fairseq.cli.start.ranks import forked

QUICK = shlex.split("--cpu --beam 2 --max-len-b 5 --num-workers 0")
RANKS = shlex.split(
    "--distributed-world-size 2 --distributed-backend gloo --ddp-backend legacy_ddp"
)
COMMANDS = ["train", "generate", "validate", "interactive", "preprocess"]


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    succeed("train", data, "--arch", "ls_transformer_tiny", "--save-dir", folder, *SMALL)
    return folder / "checkpoint_last.pt"


# --- Real runs -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "policy", "memory"),
    [
        ({}, *FOR_TORCH.values()),  # so the benchmark measures what the launchers do
        (
            {"OMP_WAIT_POLICY": "active", "PYTORCH_ALLOC_CONF": "max_split_size_mb:512"},
            "active",
            "max_split_size_mb:512",
        ),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}, "passive", None),
    ],
)
def test_torch_gets_defaults_that_are_not_given(
    data: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], policy: str,
    memory: str | None,
) -> None:  # fmt: skip
    for name in ("OMP_WAIT_POLICY", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")  # so that what the command sets is removed again
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    seen: list[tuple[str | None, str | None]] = []

    def main(_: Any) -> None:
        seen.append((os.environ.get("OMP_WAIT_POLICY"), os.environ.get("PYTORCH_ALLOC_CONF")))

    monkeypatch.setattr(fairseq_cli.train, "main", main)
    succeed("train", data, "--arch", "ls_transformer_tiny", "--max-update", "1")
    assert seen == [(policy, memory)]


def test_no_worker_is_left(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workers: list[Any] = []
    step = fairseq_cli.train.validate_and_save

    def seen(*arguments: Any) -> Any:
        workers[:] = multiprocessing.active_children()
        return step(*arguments)

    monkeypatch.setattr(fairseq_cli.train, "validate_and_save", seen)
    flags = shlex.split("--num-workers 2 --data-buffer-size 1 --batch-size 1 --max-update 2")
    words = ["--arch", "ls_transformer_tiny", "--no-save", "--save-dir", tmp_path, *SMALL, *flags]
    succeed("train", data, *words)
    assert len(workers) == 2
    assert [worker.exitcode for worker in workers] == [0, 0]


def test_a_setting_that_is_missing_is_told_without_all_others(
    data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If fairseq cannot compose its configuration, it logs every setting."""
    words = ["--arch", "ls_transformer_tiny", *SMALL, "--lr-scheduler", "polynomial_decay"]
    result = run("train", data, *words)
    assert "--total-num-update is missing" in result.stderr
    (line,) = (record for record in caplog.records if "Overrides: " in record.getMessage())
    assert not logs.is_shown(line)


def test_the_terminal_lacks_the_configuration(
    data: Path, trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = data.parent / "text" / "test"
    words: dict[str, list[str | Path]] = {
        "train": [data, "--arch", "ls_transformer_tiny", *SMALL, "--no-save"],
        "generate": [data, "--path", trained, *QUICK],
        "validate": [data, "--path", trained, "--cpu"],
        "interactive": [data, "--path", trained, *QUICK, "--input", f"{text}.de"],
        "preprocess": ["-s", "de", "-t", "en", "--testpref", text, "--destdir", tmp_path / "data",
                       "--srcdict", data / "dict.de.txt", "--tgtdict", data / "dict.en.txt"],
    }  # fmt: skip
    caplog.set_level(logging.INFO)
    for command in COMMANDS:
        logger = logging.getLogger(f"fairseq_cli.{command}")
        logger.addHandler(caplog.handler)  # fairseq-validate removes the handlers of all loggers
        caplog.clear()
        succeed(command, *words[command])
        logger.removeHandler(caplog.handler)
        (line,) = {
            record
            for record in caplog.records
            if record.getMessage().startswith(("{'_name': None, 'common'", "Namespace("))
        }
        assert not logs.is_shown(line), command


def test_a_trained_checkpoint_goes_on(data: Path, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoint_last.pt").write_bytes(trained.read_bytes())
    words = [data, "--arch", "ls_transformer_tiny", "--save-dir", tmp_path, *SMALL]
    succeed("train", *words, "--max-update", "5")
    updates = torch.load(tmp_path / "checkpoint_last.pt", weights_only=False)["optimizer_history"]
    assert updates[-1]["num_updates"] == 5


@pytest.mark.parametrize("native", [[], ["--native"]], ids=["ours", "native"])
def test_what_was_trained_translates(data: Path, trained: Path, native: list[str]) -> None:
    words = [data, "--path", trained, *QUICK, *native]
    translated = succeed("generate", *words)
    assert len(re.findall(r"^H-\d+\t", translated, re.MULTILINE)) == 6
    assert "BLEU" in translated

    source = data.parent / "text" / "test.de"
    typed = succeed("interactive", *words, "--input", source)
    hypotheses = [sorted(re.findall(r"^H-\d+\t.*", text, re.M)) for text in (translated, typed)]
    tokens = [[line.split("\t")[2] for line in lines] for lines in hypotheses]
    assert tokens[0] == tokens[1]


def test_what_was_trained_is_validated(data: Path, trained: Path) -> None:
    result = run("validate", data, "--path", trained, "--max-tokens", "200", "--cpu")
    assert result.exit_code == 0, result.exception


def test_our_model_is_built_for_a_checkpoint_unless_native(
    data: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fairseq.tasks.translation import TranslationTask

    built: list[str] = []
    build_generator = TranslationTask.build_generator

    def spy(task: Any, models: Any, *args: Any, **kwargs: Any) -> Any:
        built.append(type(models[0]).__name__)
        return build_generator(task, models, *args, **kwargs)

    monkeypatch.setattr(TranslationTask, "build_generator", spy)
    for native in ([], ["--native"]):
        succeed("generate", data, "--path", trained, *QUICK, *native)
    assert built == ["LSTransformerModel", "TransformerModel"]


# What fairseq-train's launchers run: the console script, and python -m lightseq_fairseq train. Both
# see two GPUs: fairseq starts as many ranks.
SPAWNING = {
    "script": """
from lightseq_fairseq.cli.train import main
if __name__ == "__main__":
    import torch
    torch.cuda.device_count = lambda: 2
    main()
""",
    "module": """
if __name__ == "__main__":
    import runpy, sys, torch
    torch.cuda.device_count = lambda: 2
    sys.argv.insert(1, "train")
    runpy.run_module("lightseq_fairseq", run_name="__main__", alter_sys=True)
""",
}


@pytest.mark.parametrize("how", SPAWNING)
def test_spawned_ranks_know_our_parts_and_their_failures_are_sentences(
    data: Path, tmp_path: Path, how: str
) -> None:
    done = subprocess.run(
        [
            forked_commands.python(), "-c", SPAWNING[how], data, "--arch", "ls_transformer_tiny",
            *SMALL, *RANKS, "--max-tokens", "9", "--max-tokens-valid", "5", "--save-dir", tmp_path,
            "--log-level", "debug",
        ],
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert "model: LSTransformerModel" in done.stdout
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert re.search(r"lightseq-train: error: .* 10 tokens, but --max-tokens .* is 5", done.stderr)


def test_neither_ranks_nor_their_workers_import_anything_again(data: Path, tmp_path: Path) -> None:
    """Each import of torch and fairseq would delay the first update by seconds."""
    script, imports = tmp_path / "script.py", tmp_path / "imports"
    record = f"with open({str(imports)!r}, 'a') as file: print(__name__, file=file)\n"
    script.write_text(record + SPAWNING["script"])
    done = interpreters.run(
        str(script), str(data), "--arch", "ls_transformer_tiny", *SMALL, *RANKS, "--num-workers",
        "2", "--save-dir", str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "(2 ranks)" in done.stdout
    assert imports.read_text().split() == ["__main__"]


def test_spawned_ranks_fork_their_workers(data: Path, tmp_path: Path) -> None:
    script, imports = tmp_path / "script.py", tmp_path / "imports"
    record = f"with open({str(imports)!r}, 'a') as file: print(__name__, file=file)\n"
    main = "import contextlib\n    from lightseq_fairseq.cli.start import launch\n"
    main += "    launch.forked = contextlib.nullcontext\n    main()"
    script.write_text(record + SPAWNING["script"].replace("main()", main))
    done = interpreters.run(
        str(script), str(data), "--arch", "ls_transformer_tiny", *SMALL, *RANKS, "--num-workers",
        "2", "--save-dir", str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert imports.read_text().split() == ["__main__", "__mp_main__", "__mp_main__"]


@pytest.mark.parametrize("has_used_gpu", [False, True])
def test_a_process_that_has_used_a_gpu_is_not_forked(has_used_gpu: bool) -> None:
    with (
        mock.patch.object(torch.cuda, "is_initialized", return_value=has_used_gpu),
        mock.patch.object(torch.multiprocessing, "spawn") as spawn,
        mock.patch.object(torch.multiprocessing, "start_processes") as start,
        forked(),
    ):
        torch.multiprocessing.spawn(fn=print, args=(), nprocs=2, join=True)
    given = {"fn": print, "args": (), "nprocs": 2, "join": True}
    assert spawn.call_args_list == [mock.call(**given)] * has_used_gpu
    forks = [] if has_used_gpu else [mock.call(**given, start_method="fork")]
    assert start.call_args_list == forks


# --- Ends ------------------------------------------------------------------------------------


def test_the_end_does_not_search_imports_for_garbage(data: Path, tmp_path: Path) -> None:
    """Python's last collection takes a second with all that torch and fairseq import."""
    (tmp_path / "script.py").write_text(
        "import atexit, gc\n"
        "atexit.register(lambda: print('frozen:', gc.get_freeze_count() > 100_000))\n"
        "from lightseq_fairseq.cli.preprocess import main\n"
        "main()\n"
    )
    text = tmp_path / "text.de"
    text.write_text("a b\n")
    done = interpreters.run(
        str(tmp_path / "script.py"), "--source-lang", "de", "--only-source", "--trainpref",
        str(text.with_suffix("")), "--destdir", str(tmp_path / "bin"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "frozen: True"


def test_ctrl_c_leaves_with_130_and_one_sentence(data: Path, tmp_path: Path) -> None:
    words = [str(data), "--arch", "ls_transformer_tiny", "--save-dir", str(tmp_path), *SMALL]
    process = subprocess.Popen(
        [sys.executable, "-m", "lightseq_fairseq.cli.train", *words, "--max-update", "1000000"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # If a shell runs the tests in the background, they ignore Ctrl-C, and so do their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "Saved checkpoint" in line:
                break
        process.send_signal(signal.SIGINT)
        _, complaint = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in complaint
    last = tmp_path / "checkpoint_last.pt"
    assert complaint.splitlines()[-1] == (
        f"lightseq-train: interrupted; the same command resumes from {last}."
    )
    torch.load(tmp_path / "checkpoint_last.pt", weights_only=False)


def test_retained_dropout_runs_fairseqs_layers(data: Path, trained: Path) -> None:
    words = [data, "--path", trained, *QUICK, "--retain-dropout"]
    first, second = (run("generate", *words, "--seed", seed) for seed in (1, 2))
    assert first.exit_code == second.exit_code == 0, (first.output, first.exception)
    assert "this run uses fairseq's own layers, because --retain-dropout" in first.stderr
    scores = [
        re.findall(r"^H-\S+\t(\S+)", result.stdout, re.MULTILINE) for result in (first, second)
    ]
    assert scores[0] and scores[0] != scores[1]


def test_a_bug_keeps_its_traceback(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def main(cfg: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(fairseq_cli.train, "main", main)
    result = run("train", data, "--arch", "ls_transformer_tiny")
    assert isinstance(result.exception, RuntimeError)
    assert str(result.exception) == "a bug"


def test_an_end_of_file_is_no_silent_abort(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def main(cfg: Any) -> None:
        raise EOFError("a bug")

    monkeypatch.setattr(fairseq_cli.train, "main", main)
    result = run("train", data, "--arch", "ls_transformer_tiny")
    assert result.exit_code == 1
    assert "EOFError: a bug" in result.stderr


def test_the_old_package_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert conflict() is None
    info = tmp_path / "lightseq-3.0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lightseq\nVersion: 3.0.1\n")
    assert conflict() is None
    monkeypatch.syspath_prepend(tmp_path)
    assert conflict() is None  # a distribution of that name, but without the scripts
    (info / "entry_points.txt").write_text(
        "[console_scripts]\nlightseq-train = lightseq.cli:main\n"
    )
    assert "lightseq-train" in (conflict() or "")
    result = run("train", "--fairseq-help")
    assert "pip uninstall lightseq" in result.stderr
