"""The words of commands: help, flags of our own, and the command lines that fairseq gets."""

from __future__ import annotations

import argparse
import io
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.shell_completion import BashComplete
from click.testing import CliRunner
from helpers import compositions, forked_commands, interpreters
from helpers.cli_runs import run, succeed, unchanged
from helpers.golden import refusals

# isort: split
import fairseq_cli.train
from fairseq import options
from fairseq.dataclass import utils

import lightseq_fairseq
from lightseq_fairseq.cli import train
from lightseq_fairseq.cli.lightseq import COMMANDS as SUBCOMMANDS
from lightseq_fairseq.cli.lightseq import main as overview
from lightseq_fairseq.cli.start.launch import launcher
from lightseq_fairseq.cli.words.argv import ARCH, value

COMMANDS = ["train", "generate", "validate", "interactive", "preprocess"]


@pytest.fixture
def configurations(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The configurations that fairseq-train's main() receives; nothing is trained."""
    received: list[Any] = []
    monkeypatch.setattr(fairseq_cli.train, "main", received.append)
    yield received


# --- Help and the words that reach fairseq ---------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_help_answers_within_a_second(command: str) -> None:
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        done = interpreters.run("-m", f"lightseq_fairseq.cli.{command}", "-h")
        seconds.append(time.perf_counter() - start)
        assert done.returncode == 0, done.stderr
        assert "--fairseq-help" in done.stdout
        if seconds[-1] < 1:
            break
    assert min(seconds) < 1


def test_help_imports_neither_torch_nor_fairseq() -> None:
    modules = ", ".join(COMMANDS)
    done = interpreters.run(
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


@pytest.mark.parametrize(
    ("word", "answer"),
    [("train", "did you mean lightseq-train?"), ("trian", "did you mean lightseq-train?"),
     ("xyz", "lightseq --help lists the commands.")],
)  # fmt: skip
def test_lightseq_names_the_command(word: str, answer: str) -> None:
    done = CliRunner().invoke(overview, [word])
    assert (done.exit_code, done.output) == (
        2,
        f"lightseq: error: There is no command {word}: {answer}\n",
    )
    assert "..." not in CliRunner().invoke(overview, []).output.partition("Prepare data")[2]


def test_every_command_is_a_subcommand_of_the_package() -> None:
    def python(*words: str) -> subprocess.CompletedProcess[str]:
        command = [forked_commands.python(), *words]
        return subprocess.run(command, capture_output=True, text=True)

    done = python("-m", "lightseq_fairseq")
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^  (\w[\w-]*)  ", done.stdout, re.M) == list(SUBCOMMANDS)
    listed = succeed("lightseq")
    assert re.findall(r"^  lightseq-(\S+)  ", listed, re.M) == list(SUBCOMMANDS)
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
        ("--beam", []),  # of lightseq-generate
        ("--max-u", [("plain", "--max-update")]),
        ("--task masked_lm --arch ls_roberta --unti", [("plain", "--untie-weights-roberta")]),
        ("--unti", []),
        ("--arch ls_transformer --label-s", [("plain", "--label-smoothing")]),  # the recipe's
        (
            "--criterion label_smoothed_cross_entropy_with_a",
            [("plain", "label_smoothed_cross_entropy_with_alignment")],
        ),
        ("--arch = ls_x", [("plain", "ls_xlm")]),
        ("--log-format s", [("plain", "simple")]),
    ],
)
def test_the_shell_completes_flags_names_and_files(line: str, found: list[tuple[str, str]]) -> None:
    complete = BashComplete(train.main, {}, "lightseq-train", "_LIGHTSEQ_TRAIN_COMPLETE")
    *words, last = line.split()
    items = complete.get_completions(words, last)
    assert [(item.type, item.value) for item in items] == found


@pytest.mark.parametrize(("line", "sentence"), refusals(__file__, "test_cli_words"))
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


def test_a_command_line_parses_as_fairseq_parses_it(data: Path) -> None:
    """Our scan of the command line and argparse agree on which spellings set a flag."""
    with unchanged():
        for words in (["-atransformer"], ["-a=transformer"], ["--arch=transformer"]):
            parser = options.get_training_parser()
            args = options.parse_args_and_arch(parser, [str(data), *words])
            assert args.arch == "transformer"
            assert value(words, ARCH) == "transformer"


@pytest.mark.parametrize(
    "words",
    [
        "--arch transformer_tiny",
        "--arch ls_transformer_tiny --optimizer ls_adam --update-freq 2 "
        "--criterion ls_label_smoothed_cross_entropy --eval-bleu-args '{\"beam\": 4}'",
        "--arch ls_transformer_lm --task language_modeling --sample-break-mode eos --fp16",
    ],
)
def test_configurations_in_tests_are_those_of_hydra(
    data: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    """helpers.compositions returns and raises what hydra does, also a second time."""
    with unchanged():
        args = options.parse_args_and_arch(
            options.get_training_parser(), [str(data), *shlex.split(words)]
        )
        wrong = argparse.Namespace(**{**vars(args), "ddp_backend": "none"})
        found = [str(utils.convert_namespace_to_omegaconf(args)) for _ in range(2)]
        with pytest.raises(Exception, match="override distributed_training") as error:
            utils.convert_namespace_to_omegaconf(wrong)
        for name, hydras in compositions.HYDRAS.items():
            monkeypatch.setattr(utils, name, hydras)
        assert found == [str(utils.convert_namespace_to_omegaconf(args))] * 2
        with pytest.raises(type(error.value), match=f"^{re.escape(str(error.value))}$"):
            utils.convert_namespace_to_omegaconf(wrong)


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
    data: Path, configurations: list[Any], monkeypatch: pytest.MonkeyPatch, terminals: set[str]
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
