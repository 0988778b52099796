"""On a GPU, with the CUDA kernels: the same training as fairseq, as far as rounding allows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helpers.parity as parity
import pytest
import torch
from helpers.parity import LS, NATIVE, NORMS, Systems, command_line, permuted, train

from lightseq_fairseq import library

pytestmark = pytest.mark.gpu

# Head width 32 and V = 97: sizes that the kernels take, and one that suits none of them.
FLAGS = {
    "cpu": None,
    "encoder_embed_dim": 64,
    "encoder_ffn_embed_dim": 128,
    "share_all_embeddings": True,
    "max_tokens": 128,
}
UPDATES = 50


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return parity.write_corpus(tmp_path_factory.mktemp("corpus"), pairs=96, longest=24)


def test_every_op_has_a_kernel() -> None:
    assert library.load().references == ()


@NORMS
def test_float32(corpus: Path, norm: dict[str, Any]) -> None:
    """Loss, norm and parameters: as close to native as native to itself with rows permuted.

    But for the keys' biases, which in float32 are nothing but rounding: float64's test holds them.
    """

    def run(systems: Systems, change_batch: Any = None) -> list[parity.Update]:
        flags = {**FLAGS, **norm}
        return train(command_line(corpus, systems, **flags), UPDATES, torch.float32, change_batch)

    native = run(NATIVE)
    others = [parity.largest_deviation(run(NATIVE, permuted(seed)), native) for seed in range(3)]
    found = parity.largest_deviation(run(LS), native)
    for name in ("loss", "norm", "parameters"):
        value, limit = getattr(found, name), max(getattr(other, name) for other in others)
        assert value <= 4 * limit, f"{name} {value:.1e}, native {limit:.1e}"
    assert native[-1].logged["loss"] < 0.9 * native[0].logged["loss"]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_16_bit_loss_curve(corpus: Path, precision: str) -> None:
    """No further from native's curve than native's own runs are from each other."""

    def curve(systems: Systems, change_batch: Any = None) -> torch.Tensor:
        flags = {**FLAGS, precision: True, "fp16_init_scale": 128}
        argv = command_line(corpus, systems, **flags)
        history = train(argv, UPDATES, torch.float32, change_batch)
        return torch.tensor([update.loss / update.sample_size for update in history])

    native = curve(NATIVE)
    noise = torch.stack([curve(NATIVE, permuted(seed)) - native for seed in range(4)]).abs()
    ours = (curve(LS) - native).abs()
    assert ours.max() <= 2 * noise.max(), f"{ours.max():.1e}, native {noise.max():.1e}"
    assert ours.mean() <= 2 * noise.mean(dim=1).max(), (
        f"{ours.mean():.1e}, native {noise.mean():.1e}"
    )
    assert native[-1] < 0.9 * native[0]
