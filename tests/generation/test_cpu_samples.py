"""On which device lightseq-generate, -interactive and the benchmark leave their samples.

There is no GPU here: instead of moving a tensor to it, the test records the call.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import helpers.digits as digits
import pytest
import torch
from helpers.cli_runs import run
from helpers.digits import Toy, held_out

# isort: split
from fairseq import utils
from fairseq.dataclass.configs import GenerationConfig
from fairseq.sequence_generator import SequenceGenerator
from fairseq.tasks import FairseqTask
from fairseq_cli import generate, interactive

from lightseq_fairseq.cli.translate import sentences
from lightseq_fairseq.cli.translate.cpu_samples import left_on_cpu

FLAGS = shlex.split("-s src -t tgt --dataset-impl raw --beam 2 --distributed-world-size 1")
HELD_OUT = shlex.split("--gen-subset valid --max-tokens 800 --num-workers 0")
OURS = ("", "--diverse-beam-groups 2 --diverse-beam-strength 0.5", "--no-repeat-ngram-size 2",
        "--prefix-size 1")  # fmt: skip
OTHERS = ("--native", "--print-alignment hard")


@pytest.fixture(name="moved")
def stand_in_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Records everything that fairseq's loops move to the GPU."""
    moved: list[Any] = []

    def move(sample: Any, *_: Any, **__: Any) -> Any:
        moved.append(sample)
        return sample

    has_gpu = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True))
    monkeypatch.setattr(generate, "torch", has_gpu)
    monkeypatch.setattr(interactive, "torch", has_gpu)
    monkeypatch.setattr(sentences, "uses_gpu", lambda cfg: not cfg.common.cpu)
    monkeypatch.setattr(torch.nn.Module, "cuda", lambda self: self)
    monkeypatch.setattr(torch.Tensor, "cuda", move)
    monkeypatch.setattr(utils, "move_to_cuda", move)
    return moved


def translate(toy: Toy, command: str, *words: str) -> list[str]:
    """The output lines of all sentences, without those that hold times."""
    result = run(command, toy.folder, "--path", toy.paths[-1], *FLAGS, *words)
    assert result.exit_code == 0, (result.output, result.exception)
    return [line for line in result.stdout.splitlines() if line[:2] in ("S-", "T-", "H-", "P-")]


@pytest.mark.parametrize("words", OURS + OTHERS)
def test_generate(toy: Toy, moved: list[Any], words: str) -> None:
    given = ("generate", *HELD_OUT, *shlex.split(words))
    lines = translate(toy, *given)
    assert bool(moved) == (words in OTHERS)
    assert len(lines) == 4 * digits.SENTENCES
    assert lines == translate(toy, *given, "--cpu")


@pytest.mark.parametrize(
    ("words", "moves"),
    # Each of the four lines is moved separately; fairseq's loop moves its tokens and its lengths.
    [*((words, 0) for words in OURS[:-1]), ("--native", 8), ("--print-alignment hard", 4)],
)
def test_interactive(toy: Toy, moved: list[Any], tmp_path: Path, words: str, moves: int) -> None:
    path = tmp_path / "lines"
    path.write_text("eins zwei drei\nvier fünf\n\nsechs\n")
    given = ("interactive", "--input", str(path), *shlex.split(words))
    lines = translate(toy, *given)
    assert len(moved) == moves
    assert len(lines) == 3 * 4
    assert lines == translate(toy, *given, "--cpu")


def test_the_newest_generator_decides(toy: Toy, moved: list[Any]) -> None:
    sample = next(iter(held_out(toy.task)))
    places = ((utils, "move_to_cuda"), (FairseqTask, "build_generator"))
    before = [getattr(owner, name) for owner, name in places]
    with left_on_cpu():
        for model, by, stays in (
            (toy.native, None, False),
            (toy.ls, None, True),
            (toy.ls, SequenceGenerator, False),
            (toy.ls, None, True),
        ):
            moved.clear()
            toy.task.build_generator([model], GenerationConfig(), seq_gen_cls=by)
            assert utils.move_to_cuda(sample) is sample and bool(moved) != stays
    assert [getattr(owner, name) for owner, name in places] == before
    with pytest.raises(ValueError), left_on_cpu():
        raise ValueError
    assert [getattr(owner, name) for owner, name in places] == before
