"""The torch.compile baseline of ``lightseq-bench train``: its batches, its model, its update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from lightseq_fairseq import fairseq_compat
from lightseq_fairseq.cli.benchmark.train import compiled, corpus
from lightseq_fairseq.cli.benchmark.train.batches import Batch, Blocks
from lightseq_fairseq.cli.benchmark.train.cases import Case
from lightseq_fairseq.cli.benchmark.train.packed_transformer import (
    PAD,
    Model,
    Transformer,
    build,
    fastest_backend,
)
from lightseq_fairseq.cli.benchmark.train.shapes import SHAPES

fairseq_compat.prepare()


def padded(lengths: list[tuple[int, int]]) -> dict[str, Any]:
    """A batch as fairseq's collater makes it: sources padded on the left, targets on the right."""
    generator = torch.Generator().manual_seed(3)

    def side(sizes: list[int], left: bool) -> Tensor:
        tokens = torch.full((len(sizes), max(sizes)), PAD)
        for sentence, size in zip(tokens, sizes):
            place = slice(len(sentence) - size, None) if left else slice(size)
            sentence[place] = torch.randint(4, 50, (size,), generator=generator)
        return tokens

    source, target = ([pair[i] for pair in lengths] for i in (0, 1))
    inputs = {"src_tokens": side(source, True), "prev_output_tokens": side(target, False)}
    return {"net_input": inputs, "target": side(target, False)}


LENGTHS = [(5, 7), (12, 3), (1, 1), (300 - 44, 250)]


def test_packing_keeps_sentences_and_fills_the_rest() -> None:
    batch = compiled.pack(padded(LENGTHS), max_tokens=512)
    size = len(batch.source)
    assert size % 64 == 0 and {len(x) for x in (batch.previous, batch.target)} == {size}
    for cu, positions, side in (
        (batch.cu_source, batch.source_positions, 0),
        (batch.cu_target, batch.target_positions, 1),
    ):
        sizes = cu.diff()
        assert sizes[: len(LENGTHS)].tolist() == [pair[side] for pair in LENGTHS]
        assert cu[0] == 0 and cu[-1] == size and sizes.max() <= 256
        assert torch.equal(positions, torch.cat([torch.arange(int(n)) for n in sizes]))
    # Attention needs a row on both sides: no sentence is empty on one side only.
    assert torch.equal(batch.cu_source.diff() > 0, batch.cu_target.diff() > 0)
    assert int(batch.target.ne(PAD).sum()) == sum(target for _, target in LENGTHS)


@pytest.mark.parametrize("model", ["tiny", "t2t_big"])
def test_sentences_do_not_see_each_other(model: str) -> None:
    """The loss of a batch is the sum of its sentences' losses, each computed alone."""
    torch.manual_seed(1)
    shape = SHAPES[model]._replace(width=16, ffn=32, heads=2, encoder_layers=2, decoder_layers=2)
    network = Transformer(shape, 50).double().eval()
    together = padded(LENGTHS)
    alone = []
    for number in range(len(LENGTHS)):
        inputs = {name: side[number, None] for name, side in together["net_input"].items()}
        alone.append({"net_input": inputs, "target": together["target"][number, None]})
    with torch.no_grad():
        losses = [network(*compiled.pack(one, 512)).item() for one in (together, *alone)]
    assert losses[0] == pytest.approx(sum(losses[1:]), rel=1e-6)  # the loss is computed in float32


def test_an_epoch_without_batches_is_refused(tmp_path: Path) -> None:
    small = corpus.ensure(tmp_path / "corpus", pairs=100, vocabulary=500)
    with pytest.raises(ValueError, match="no batch of tiny/1/bf16 can be made of"):
        next(compiled.batches(small.folder, Case("tiny", 1, "bf16"), workers=0))


def test_update_is_adam_on_masters() -> None:
    torch.manual_seed(1)
    start, gradients = torch.randn(6), [torch.randn(6).bfloat16() for _ in range(3)]
    weight, expected = start.bfloat16(), start.bfloat16().float().requires_grad_()
    update = compiled.Update([weight])
    adam = torch.optim.AdamW([expected], betas=(0.9, 0.98), weight_decay=1e-4)
    for number, gradient in enumerate(gradients, start=1):
        update(number, [gradient])
        adam.param_groups[0]["lr"] = 5e-4 * number / 4000
        expected.grad = gradient.float()
        adam.step()
    torch.testing.assert_close(update.masters[0], expected.detach())
    assert torch.equal(weight, update.masters[0].bfloat16())


def compare(
    gradients: compiled.Gradients, network: Model, weights: list[Tensor], batch: Batch
) -> None:
    loss, *found = (x.float() for x in gradients(batch))
    expected, reference = gradients_of(network, weights, batch)
    assert loss.item() == pytest.approx(expected, rel=1e-2)
    mine, other = (torch.cat([x.float().flatten() for x in g]) for g in (found, reference))
    assert (mine - other).norm() < 0.05 * other.norm()


def gradients_of(
    network: Model, weights: list[Tensor], batch: Batch
) -> tuple[float, tuple[Tensor, ...]]:
    # In a separate function, because a live autograd graph of one stream would prevent a capture on
    # another stream.
    loss = network(*(x.cuda() for x in batch))
    return loss.item(), torch.autograd.grad(loss / batch.target.ne(PAD).sum(), weights)


@pytest.mark.gpu
def test_graphs_compute_what_the_model_computes() -> None:
    """Replaying a graph on new batches of a known size gives the model's results, also between
    captures of other sizes."""
    torch.manual_seed(1)
    shape = SHAPES["tiny"]._replace(normalize_before=True)
    network = Transformer(shape, 50).to("cuda", torch.bfloat16).eval()
    gradients = compiled.Gradients(network)
    weights = list(network.parameters())
    for lengths in (LENGTHS, LENGTHS[:2], [(7, 5), (2, 9), (9, 9), (250, 256)], LENGTHS[:2]):
        compare(gradients, network, weights, compiled.pack(padded(lengths), 512))
    assert len(gradients._graphs) == 2


@pytest.mark.gpu
def test_graph_of_blocks_computes_what_the_model_computes() -> None:
    """A language model with the fastest attention, and replays for other blocks."""
    torch.manual_seed(1)
    case = Case.parse("lm_tiny/128x4/bf16")
    network = build(case.shape, 50, case.block).to("cuda", torch.bfloat16).eval()
    gradients = compiled.Gradients(network)
    weights = list(network.parameters())
    with sdpa_kernel(fastest_backend(case)):
        for _ in range(3):
            batch = Blocks(*(torch.randint(4, 50, (4, 128)) for _ in range(2)))
            compare(gradients, network, weights, batch)
    assert len(gradients._graphs) == 1
