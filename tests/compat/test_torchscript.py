"""TorchScript compiles the same parts of fairseq with our repairs as without them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import helpers.digits as digits
import pytest
import torch

from lightseq_fairseq import fairseq_compat, startup
from lightseq_fairseq.base.errors import UserError

fairseq_compat.prepare()

from fairseq.ngram_repeat_block import NGramRepeatBlock  # noqa: E402
from fairseq.sequence_generator import SequenceGenerator  # noqa: E402

# Prints the names of the parts that TorchScript compiles; argv[1]: whether fairseq is repaired.
COMPILE = r"""
import contextlib, sys, warnings
from argparse import ArgumentParser, Namespace
from lightseq_fairseq import fairseq_compat
fairseq_compat.prepare() if sys.argv[1] == "repaired" else fairseq_compat.import_only()
warnings.simplefilter("ignore")
import torch
from fairseq import modules, search
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq.ngram_repeat_block import NGramRepeatBlock
from fairseq.sequence_generator import EnsembleModel, SequenceGenerator

words = Dictionary()
for number in range(20):
    words.add_symbol(str(number))
task = Namespace(source_dictionary=words, target_dictionary=words, dictionary=words)
SIZES = ("layers 1", "embed-dim 8", "ffn-embed-dim 16", "attention-heads 2")
SIZES = [f"--{side}-{size}" for side in ("encoder", "decoder") for size in SIZES]

def model(arch, *flags, sizes=SIZES):
    parser = ArgumentParser(allow_abbrev=False)
    ARCH_MODEL_REGISTRY[arch].add_args(parser)
    args, _ = parser.parse_known_args(" ".join([*sizes, *flags]).split())
    given = {name: value for name, value in vars(args).items() if value is not None}
    rest = dict.fromkeys(("max_source_positions", "max_target_positions", "max_positions"), 32)
    args = Namespace(**{**rest, "arch": arch, "criterion": "cross_entropy", **given})
    ARCH_CONFIG_REGISTRY[arch](args)
    return ARCH_MODEL_REGISTRY[arch].build_model(args, task).eval()

def transformers(count):
    return [model("transformer") for _ in range(count)]

def generator(models, **options):
    return SequenceGenerator(models, words, beam_size=2, max_len_b=10, **options)

PARTS = {
    "NGramRepeatBlock": lambda: NGramRepeatBlock(2),
    "SinusoidalPositionalEmbedding": lambda: modules.SinusoidalPositionalEmbedding(8, 1, 32),
    "LearnedPositionalEmbedding": lambda: modules.LearnedPositionalEmbedding(32, 8, 1),
    "LayerNorm": lambda: modules.LayerNorm(8),
    "LayerNorm export": lambda: modules.LayerNorm(8, export=True),
    "MultiheadAttention": lambda: modules.MultiheadAttention(8, 2, self_attention=True),
    "AdaptiveInput": lambda: modules.AdaptiveInput(24, 1, 8, 2, 8, [8]),
    "AdaptiveSoftmax": lambda: modules.AdaptiveSoftmax(24, 8, [8], 0.0),
    "BeamSearch": lambda: search.BeamSearch(words),
    "DiverseBeamSearch": lambda: search.DiverseBeamSearch(words, 2, 0.5),
    "Sampling": lambda: search.Sampling(words),
    "LengthConstrainedBeamSearch": lambda: search.LengthConstrainedBeamSearch(words, 1, 1, 1, 1),
    "transformer": lambda: model("transformer"),
    "transformer pre-norm": lambda: model(
        "transformer", "--encoder-normalize-before --decoder-normalize-before"
    ),
    "transformer learned": lambda: model(
        "transformer", "--encoder-learned-pos --decoder-learned-pos --layernorm-embedding"
    ),
    "transformer no positions": lambda: model("transformer", "--no-token-positional-embeddings"),
    "bart_base": lambda: model("bart_base"),
    "roberta": lambda: model("roberta"),
    "lstm": lambda: model("lstm", sizes=()),
    "EnsembleModel": lambda: EnsembleModel(transformers(2)),
    "SequenceGenerator": lambda: generator(transformers(1)),
    "SequenceGenerator of two": lambda: generator(transformers(2), no_repeat_ngram_size=2),
    "SequenceGenerator of lstm": lambda: generator([model("lstm", sizes=())]),
}
for name, build in PARTS.items():
    part = build()
    with contextlib.suppress(Exception):
        torch.jit.script(part)
        print(name)
"""
# What TorchScript compiles in fairseq 0.12.2; it does not know what else the command prints.
LEAST = {"NGramRepeatBlock", "transformer", "transformer pre-norm", "lstm", "EnsembleModel"}
LEAST |= {"MultiheadAttention", "SequenceGenerator", "SequenceGenerator of two"}


def compiled(fairseq: str) -> set[str]:
    environment = {**os.environ, startup.SWITCH: "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", COMPILE, fairseq]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment,
        cwd=tempfile.gettempdir(),
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return set(run.stdout.splitlines())


def test_the_repairs_leave_torchscript_all_that_it_compiles() -> None:
    repaired = compiled("repaired")
    assert repaired >= LEAST
    assert repaired == compiled("bare")


@pytest.fixture
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_compiled_blocking_of_repeats_is_repaired_too(no_warnings: None) -> None:
    tokens = torch.tensor([[5, 6, 5, 1, 1], [5, 6, 7, 1, 1]])
    results = []
    for blocker in (NGramRepeatBlock(2), torch.jit.script(NGramRepeatBlock(2))):
        results.append(blocker(tokens, torch.zeros(2, 8), 1, 2, 2))
    expected = torch.zeros(2, 8)
    expected[0, 6] = -torch.inf
    assert all(torch.equal(result, expected) for result in results)


@pytest.mark.parametrize("part", ["model", "encoder", "decoder", "SequenceGenerator"])
def test_our_model_says_that_it_cannot_be_compiled(part: str, no_warnings: None) -> None:
    toy = digits.toy()
    parts: dict[str, Any] = {
        "model": toy.ls,
        "encoder": toy.ls.encoder,
        "decoder": toy.ls.decoder,
        "SequenceGenerator": SequenceGenerator([toy.ls], toy.task.target_dictionary),
    }
    with pytest.raises(UserError, match=r"TorchScript cannot compile .*load_model_ensemble"):
        torch.jit.script(parts[part])
