"""The launchers: what they pass on to fairseq, what they add, and what they run."""

from __future__ import annotations

import io
import logging
import multiprocessing
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.shell_completion import BashComplete
from click.testing import CliRunner
from helpers.cli_runs import SMALL, binarise, run, succeed, unchanged

# isort: split
import fairseq_cli.train
from fairseq import options

import lightseq_fairseq
from lightseq_fairseq.__main__ import COMMANDS as SUBCOMMANDS
from lightseq_fairseq.cli import train
from lightseq_fairseq.cli.start.launch import launcher
from lightseq_fairseq.cli.start.old_lightseq import conflict

QUICK = shlex.split("--cpu --beam 2 --max-len-b 5 --num-workers 0")
RANKS = shlex.split(
    "--distributed-world-size 2 --distributed-backend gloo --ddp-backend legacy_ddp"
)
COMMANDS = ["train", "generate", "validate", "interactive", "preprocess"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return binarise(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    succeed("train", data, "--arch", "ls_transformer_tiny", "--save-dir", folder, *SMALL)
    return folder / "checkpoint_last.pt"


@pytest.fixture
def configurations(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The configurations that fairseq-train's main() receives; nothing is trained."""
    received: list[Any] = []
    monkeypatch.setattr(fairseq_cli.train, "main", received.append)
    yield received


def python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=200)


# --- Help and the words that reach fairseq ---------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_help_answers_within_a_second(command: str) -> None:
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        done = python("-m", f"lightseq_fairseq.cli.{command}", "-h")
        seconds.append(time.perf_counter() - start)
        assert done.returncode == 0, done.stderr
        assert "--fairseq-help" in done.stdout
        if seconds[-1] < 1:
            break
    assert min(seconds) < 1


@pytest.mark.parametrize(("given", "policy"), [(None, "passive"), ("active", "active")])
def test_waiting_threads_sleep_unless_told_otherwise(
    data: Path, monkeypatch: pytest.MonkeyPatch, given: str | None, policy: str
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", given or "")
    if given is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    seen: list[str | None] = []
    monkeypatch.setattr(fairseq_cli.train, "main", lambda _: seen.append(_wait_policy()))
    succeed("train", data, "--arch", "ls_transformer_tiny", "--max-update", "1")
    assert seen == [policy]


def _wait_policy() -> str | None:
    return os.environ.get("OMP_WAIT_POLICY")


def test_no_worker_is_left(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataloader = "torch.utils.data.dataloader._MultiProcessingDataLoaderIter"
    # torch before 2.13 does not have it
    ending = f"{dataloader}._clean_up_persistent_workers_atexit"
    monkeypatch.delattr(ending, raising=False)
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
    for worker in workers:
        worker.join(timeout=2)
        assert worker.exitcode == 0


def test_help_imports_neither_torch_nor_fairseq() -> None:
    modules = ", ".join(COMMANDS)
    done = python(
        "-c",
        f"import sys; from lightseq_fairseq.cli import {modules}\n"
        "print([name for name in ('torch', 'fairseq', 'numpy') if name in sys.modules])",
    )
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(
    "command", [*COMMANDS, "average", "score", "export", "import_", "doctor", "bench"]
)
def test_version(command: str) -> None:
    said = succeed(command, "--version")
    assert said == f"lightseq-{command.removesuffix('_')} {lightseq_fairseq.__version__}\n"


def test_every_command_is_a_subcommand_of_the_package() -> None:
    done = python("-m", "lightseq_fairseq")
    assert done.returncode == 0, done.stderr
    listed = done.stdout.partition("\nCommands:\n")[2]
    assert re.findall(r"^  ([\w-]+)  ", listed, re.M) == list(SUBCOMMANDS)
    for command in ("import", "train"):
        said = python("-m", "lightseq_fairseq", command, "--help").stdout
        assert said.startswith(f"Usage: python -m lightseq_fairseq {command} ")
    said = python("-m", "lightseq_fairseq", "train", "--version").stdout
    assert said == f"python -m lightseq_fairseq train {lightseq_fairseq.__version__}\n"
    done = python("-m", "lightseq_fairseq", "generate", "data", "--native", "--beam", "x")
    assert done.returncode == 2
    assert done.stderr.startswith("lightseq-generate: error: ")
    assert python("-m", "lightseq_fairseq", "translate").returncode == 2


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("--na", [("plain", "--native")]),
        ("--arch ls_transformer --save-dir run", [("file", "run")]),
        ("da", [("file", "da")]),
        ("--beam", []),  # of fairseq
    ],
)
def test_the_shell_completes_our_own_flags_and_files(
    line: str, found: list[tuple[str, str]]
) -> None:
    complete = BashComplete(train.main, {}, "lightseq-train", "_LIGHTSEQ_TRAIN_COMPLETE")
    *words, last = line.split()
    items = complete.get_completions(words, last)
    assert [(item.type, item.value) for item in items] == found


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("score --beam 1", "lightseq-score has no flag --beam: it is a flag of lightseq-generate "
         "and lightseq-interactive."),
        ("average --output x --input y", "lightseq-average has no flag --input: it is a flag "
         "of lightseq-interactive."),
        ("export --quantisation int8", "lightseq-export has no flag --quantisation: did "
         "you mean --quantization?"),
        ("doctor --x", "lightseq-doctor has no flag --x: lightseq-doctor --help lists all flags."),
        ("average --num-epoch-checkpoints x", "Invalid value for '--num-epoch-checkpoints': 'x' is "
         "not a valid integer range. See lightseq-average --help."),
        ("score", "Missing option '--sys'. See lightseq-score --help."),
        ("generate --output", "Option '--output' requires an argument. See lightseq-generate "
         "--help."),
        ("bench train --caes x", "lightseq-bench train has no flag --caes: did you mean --case?"),
        ("bench train --max-tokens 9", "lightseq-bench train has no flag --max-tokens: it is a "
         "flag of lightseq-train, lightseq-generate, lightseq-interactive, lightseq-validate "
         "and lightseq-eval-lm."),
        ("bench train --rounds 0", "Invalid value for '--rounds': 0 is not in the range x>=1. See "
         "lightseq-bench train --help."),
        ("bench trian", "No such command 'trian'. Did you mean 'train'? See lightseq-bench "
         "--help."),
        ("bench --x", "lightseq-bench has no flag --x: lightseq-bench --help lists all flags."),
    ],
)  # fmt: skip
def test_wrong_words_of_our_own_commands_end_in_a_sentence(line: str, sentence: str) -> None:
    command, *words = line.split()
    result = run(command, *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"lightseq-{command}: error: {sentence}\n"


def test_fairseq_help_lists_the_flags_of_what_the_command_names() -> None:
    said = succeed("train", "--fairseq-help")
    assert said.startswith("usage: lightseq-train [flags]\n")
    ours = (
        "distributed-world-size",
        "encoder-layers",
        "adam-betas",
        "label-smoothing",
        "left-pad-source",
    )
    assert [flag for flag in ours if f" --{flag} " not in said] == []
    said = succeed("train", "--fairseq-help", "--arch", "lstm", "--optimizer", "nag")
    assert "--encoder-bidirectional" in said and "--momentum" in said
    assert "--share-all-embeddings  " not in said and "--adam-betas" not in said
    for command, flag in (("generate", "--beam"), ("validate", "--valid-subset")):
        assert flag in succeed(command, "--fairseq-help")


def test_a_setting_that_is_missing_is_told_without_all_others(
    data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If fairseq cannot compose its configuration, it logs every setting."""
    words = ["--arch", "ls_transformer_tiny", *SMALL, "--lr-scheduler", "polynomial_decay"]
    caplog.set_level(logging.INFO)
    for asked in ((), ("--log-config",)):
        caplog.clear()
        result = run("train", data, *words, *asked)
        assert "--total-num-update is missing" in result.stderr
        assert ("Overrides: " in caplog.text) == bool(asked)


def test_the_configuration_is_logged_where_it_is_asked_for(
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
        for asked in ((), ("--log-config",)):
            caplog.clear()
            succeed(command, *words[command], *asked)
            found = [
                m.startswith(("{'_name': None, 'common'", "Namespace(")) for m in caplog.messages
            ]
            assert found != [] and any(found) == bool(asked), command
        logger.removeHandler(caplog.handler)


@pytest.mark.parametrize(
    ("words", "passed_on"),
    [
        ("data --lr 5e-4 -s de --fp16", "data --lr 5e-4 -s de --fp16"),
        ("--lr=5e-4 data -als_x -sch", "--lr=5e-4 data -als_x -sch"),
        ("data --adam-betas '(0.9, 0.98)' --own --x -1", "data --adam-betas '(0.9, 0.98)' --x -1"),
        ("--own data -- --own -h", "data -- --own -h"),
        ("data --fairseq-help", "data --help"),
    ],
)
def test_every_other_word_goes_to_fairseq_as_it_was_typed(words: str, passed_on: str) -> None:
    received: list[str] = []

    @launcher("train")
    @click.option("--own", is_flag=True)
    def main(words: list[str], own: bool) -> None:
        received.extend(words)

    result = CliRunner().invoke(main, shlex.split(words))
    assert result.exit_code == 0, result.output
    assert received == shlex.split(passed_on)


# --- What lightseq-train makes of a command --------------------------------------------------


def test_the_arch_alone_is_a_complete_command(data: Path, configurations: list[Any]) -> None:
    line = succeed("train", data, "--arch", "ls_transformer_wmt_en_de_big_t2t").splitlines()[0]
    (cfg,) = configurations
    assert cfg.model.arch == "ls_transformer_wmt_en_de_big_t2t"
    assert cfg.optimizer._name == "ls_adam"
    assert cfg.optimizer.adam_betas == "(0.9, 0.98)"
    assert cfg.criterion._name == "ls_label_smoothed_cross_entropy"
    assert cfg.criterion.label_smoothing == 0.1
    assert cfg.lr_scheduler._name == "inverse_sqrt"
    assert cfg.lr_scheduler.warmup_updates == 4000
    assert cfg.optimization.lr == [5e-4]
    assert cfg.optimization.max_update == 300000
    assert cfg.dataset.max_tokens == 4096
    assert cfg.common.log_format == "simple"  # the output is not a terminal here

    program, *words = shlex.split(line)
    assert program == "lightseq-train"
    assert succeed("train", *words).splitlines()[0] == line
    assert configurations[1] == cfg


def test_operands_behind_two_dashes(data: Path, configurations: list[Any]) -> None:
    succeed("train", "--arch", "ls_transformer_tiny", "--", data)
    (cfg,) = configurations
    assert cfg.task.data == str(data) and cfg.common.log_format == "simple"


def test_native_runs_the_twin(data: Path, configurations: list[Any]) -> None:
    command = [str(data), "--arch", "ls_transformer_iwslt_de_en", "--dropout", "0.2"]
    succeed("train", *command)
    line = succeed("train", *command, "--native").splitlines()[0]
    ours, native = configurations
    assert "ls_" not in line and "--native" not in line
    assert native.model.arch == native.model._name == "transformer_iwslt_de_en"
    assert native.optimizer._name == "adam"
    assert native.criterion._name == "label_smoothed_cross_entropy"
    assert str(ours).replace("ls_", "") == str(native).replace("ls_", "")


@pytest.mark.parametrize("extra", [[], ["--lr", "1e-3", "--log-interval", "7"]])
def test_a_command_without_ls_is_fairseq_train(
    data: Path, configurations: list[Any], extra: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [str(data), "--arch", "transformer_tiny", "--optimizer", "adam", "--batch-size", "4"]
    assert succeed("train", *words, *extra) == ""
    monkeypatch.setattr(sys, "argv", ["fairseq-train", *words, *extra])
    fairseq_cli.train.cli_main()
    assert configurations[0] == configurations[1]


OF_MINE = """
from fairseq.models import ARCH_MODEL_REGISTRY, register_model, register_model_architecture
from lightseq_fairseq.plugins.transformer import LSTransformerModel


def small(args):
    args.encoder_layers = getattr(args, "encoder_layers", 3)


if "arch_of_mine" not in ARCH_MODEL_REGISTRY:
    register_model("model_of_mine")(type("OfMine", (LSTransformerModel,), {}))
    register_model_architecture("model_of_mine", "arch_of_mine")(small)
    register_model_architecture("ls_transformer", "ls_transformer_of_mine")(small)
    register_model_architecture("transformer", "ls_of_fairseq")(small)
"""


@pytest.fixture(scope="module")
def user_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("user") / "own_architectures"
    folder.mkdir()
    (folder / "__init__.py").write_text(OF_MINE)
    return str(folder)


@pytest.mark.parametrize("arch", ["ls_transformer_of_mine", "arch_of_mine"])
def test_a_user_s_own_arch_is_completed_by_its_class(
    data: Path, configurations: list[Any], user_dir: str, arch: str
) -> None:
    line = succeed("train", data, "--user-dir", user_dir, "--arch", arch)
    assert configurations[0].common.user_dir == user_dir
    assert configurations[0].model.encoder_layers == 3
    assert configurations[0].optimizer._name == "ls_adam"
    assert f"--user-dir {user_dir}" in line and "--max-tokens 4096" in line


def test_a_user_s_arch_on_fairseq_s_model_is_not_ours(
    data: Path, configurations: list[Any], user_dir: str
) -> None:
    words = ["--user-dir", user_dir, "--arch", "ls_of_fairseq", "--optimizer", "adam"]
    succeed("train", data, *words, "--batch-size", "4")
    assert configurations[0].criterion._name == "cross_entropy"


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("--dropout 2", "--dropout is 2"),
        ("--adaptive-input", "--adaptive-input"),
        ("--native", "no arch of fairseq that corresponds to --arch arch_of_mine"),
        ("--task denoising", "arch_of_mine trains on sentence pairs, but --task denoising"),
    ],
)
def test_a_user_s_own_arch_is_checked_as_ours(
    data: Path, configurations: list[Any], user_dir: str, words: str, part: str
) -> None:
    result = run("train", data, "--user-dir", user_dir, "--arch", "arch_of_mine", *words.split())
    assert result.exit_code == 2 and part in result.stderr.splitlines()[-1], result.output


@pytest.mark.parametrize("terminals", [{"stdout", "stderr"}, {"stdout"}, {"stderr"}, set()])
def test_a_bar_on_a_terminal_and_lines_in_a_pipe(
    data: Path,
    configurations: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    terminals: set[str],
) -> None:
    for name in ("stdout", "stderr"):
        stream = io.StringIO()
        monkeypatch.setattr(stream, "isatty", lambda name=name: name in terminals)
        monkeypatch.setattr(sys, name, stream)
    command = [str(data), "--arch", "ls_transformer_tiny"]
    for words in ([], ["--log-format", "json"], ["--no-progress-bar"]):
        with unchanged():
            train.main([*command, *words], standalone_mode=False)
    formats = [cfg.common.log_format for cfg in configurations]
    assert formats == [None if len(terminals) == 2 else "simple", "json", None]


# --- Real runs -------------------------------------------------------------------------------


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
# see two GPUs: fairseq spawns as many ranks.
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
    (tmp_path / "script.py").write_text(SPAWNING[how])
    done = python(
        str(tmp_path / "script.py"), str(data), "--arch", "ls_transformer_tiny", *SMALL,
        *RANKS, "--max-tokens", "9", "--max-tokens-valid", "5", "--save-dir", str(tmp_path),
    )  # fmt: skip
    assert "model: LSTransformerModel" in done.stdout
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert re.search(r"lightseq-train: error: .* 10 tokens, but --max-tokens .* is 5", done.stderr)


# --- Ends ------------------------------------------------------------------------------------


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
        f"lightseq-train: interrupted; the same command goes on from {last}."
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


def test_a_command_line_parses_as_fairseq_parses_it(data: Path) -> None:
    """Our scan of the command line and argparse agree on which spellings set a flag."""
    with unchanged():
        for words in (["-atransformer"], ["-a=transformer"], ["--arch=transformer"]):
            parser = options.get_training_parser()
            args = options.parse_args_and_arch(parser, [str(data), *words])
            assert args.arch == "transformer"
            assert train.defaults.value(words, train.defaults.ARCH) == "transformer"
