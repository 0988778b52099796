"""The example of a training loop: its loss falls as with torch's own modules."""

from __future__ import annotations

import math
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.forked_commands import python
from torch import Tensor, nn
from torch.nn import functional

from examples.layers import train as example
from examples.layers.train import EOS, PAD, VOCABULARY, ZERO, Transformer, pairs
from lightseq_fairseq import layers
from lightseq_fairseq.layers import DecoderLayer, EncoderLayer, MultiheadAttention
from lightseq_fairseq.memory.packing import Segments
from lightseq_fairseq.memory.parameters import as_one

ROOT = Path(__file__).resolve().parents[2]
UPDATES, SENTENCES = 90, 32


class Plain(nn.Module):
    """The same model made of torch.nn's modules, on padded batches, with the same weights."""

    def __init__(self, ours: Transformer) -> None:
        super().__init__()
        width = ours.embedding.weight.shape[1]
        settings = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        sizes = (width, ours.encoder[0].self_attn.num_heads, ours.encoder[0].fc1.out_features)
        self.weight = nn.Parameter(ours.embedding.weight.detach().clone())
        self.register_buffer("positions", ours.embedding.position_weight[PAD + 1 :].detach())
        self.encoder, self.decoder = (
            nn.ModuleList(layer(*sizes, **settings) for _ in stack)
            for layer, stack in (
                (nn.TransformerEncoderLayer, ours.encoder),
                (nn.TransformerDecoderLayer, ours.decoder),
            )
        )
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        for stack, theirs in ((self.encoder, ours.encoder), (self.decoder, ours.decoder)):
            for layer, source in zip(stack, theirs, strict=True):
                layer.load_state_dict(dict(renamed(source)))

    def embed(self, tokens: Tensor) -> Tensor:
        weight = math.sqrt(self.weight.shape[1]) * self.weight
        return functional.embedding(tokens, weight, PAD) + self.positions[: tokens.shape[1]]

    def forward(self, source: Tensor, previous: Tensor) -> Tensor:
        pads = source == PAD
        memory = self.embed(source)
        for layer in self.encoder:
            memory = layer(memory, src_key_padding_mask=pads)
        memory, x = self.encoder_norm(memory), self.embed(previous)
        causal = torch.ones(previous.shape[1], previous.shape[1], dtype=torch.bool).triu(1)
        for layer in self.decoder:
            x = layer(x, memory, tgt_mask=causal, memory_key_padding_mask=pads)
        return functional.linear(self.decoder_norm(x), self.weight)


def renamed(layer: EncoderLayer | DecoderLayer) -> Iterator[tuple[str, Tensor]]:
    """The parameters of a layer under torch.nn's names."""
    blocks: dict[str, tuple[MultiheadAttention, nn.LayerNorm]] = {
        "self_attn": (layer.self_attn, layer.self_attn_layer_norm)
    }
    if isinstance(layer, DecoderLayer):
        blocks["multihead_attn"] = (layer.encoder_attn, layer.encoder_attn_layer_norm)
    norms = []
    for name, (block, norm) in blocks.items():
        norms.append(norm)
        for kind in ("weight", "bias"):
            parts = (block.q_proj, block.k_proj, block.v_proj)
            yield f"{name}.in_proj_{kind}", torch.cat([getattr(part, kind) for part in parts])
            yield f"{name}.out_proj.{kind}", getattr(block.out_proj, kind)
    modules = {"linear1": layer.fc1, "linear2": layer.fc2}
    modules |= {f"norm{i}": norm for i, norm in enumerate((*norms, layer.final_layer_norm), 1)}
    for name, module in modules.items():
        yield f"{name}.weight", module.weight
        yield f"{name}.bias", module.bias


def train_plainly(model: Plain, updates: int) -> list[float]:
    """The example's loop with torch's loss and optimizer; returns the losses without smoothing."""
    adam = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=1e-4)
    # fairseq distributes the smoothing over the other classes, torch over all classes.
    smoothing = 0.1 * VOCABULARY / (VOCABULARY - 1)
    course = []
    for update in range(updates):
        # fairseq adds epsilon to the uncorrected second moment, torch to the corrected one.
        adam.param_groups[0]["eps"] = 1e-8 / math.sqrt(1 - 0.98 ** (update + 1))
        adam.param_groups[0]["lr"] = 5e-3 * min(1.0, (update + 1) / 50)
        source, previous, labels = pairs(update, SENTENCES)
        logits, labels = model(source, previous).flatten(0, 1), labels.flatten()
        loss = functional.cross_entropy(logits, labels, ignore_index=PAD, label_smoothing=smoothing)
        adam.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        course.append(functional.cross_entropy(logits, labels, ignore_index=PAD).item())
    return course


def test_the_loss_falls_as_with_torchs_modules() -> None:
    torch.manual_seed(1)
    ours = Transformer(dropout=0.0).double()
    plain = Plain(ours).double()
    expected = train_plainly(plain, UPDATES)
    found = [loss for loss, _ in example.train(ours, UPDATES, sentences=SENTENCES)]
    assert found == pytest.approx(expected, abs=1e-9)
    assert found[0] > 2.7 and found[-1] < 1.5  # guessing costs log(16) = 2.77 nats


def test_the_script_with_dropout() -> None:
    lines = run("--updates", "300", "--sentences", "48")
    losses, accuracies = zip(*map(numbers, lines[:6]), strict=True)
    assert sorted(losses, reverse=True) == list(losses)
    assert losses[-1] < 0.75 and accuracies[-1] > 0.78  # 0.59 and 0.84; guessing: 2.77 nats
    assert len(lines) == 10
    right = 0
    for line in lines[6:]:
        given, _, found = line.partition(" -> ")
        right += given.split()[::-1] == found.split()
    assert right >= 1


def run(*words: str, ranks: int = 1) -> list[str]:
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [python(), *(start if ranks > 1 else []), "-m", "examples.layers.train", "--cpu"]
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [*command, *words], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    first, *lines = [line for line in done.stdout.splitlines() if line]
    assert re.fullmatch(r"300 updates take .* on one core of an AMD EPYC", first)
    return lines


def numbers(line: str) -> tuple[float, float]:
    found = re.fullmatch(r"update \d+  loss ([\d.]+)  accuracy ([\d.]+)", line)
    assert found is not None, line
    return float(found[1]), float(found[2])


def test_two_ranks_train_as_one_does() -> None:
    """DistributedDataParallel on two processes, each with half of each batch, makes the same
    updates."""
    words = ("--updates", "60", "--dropout", "0", "--sentences", "32")
    one, two = run(*words), run(*words, ranks=2)
    assert len(one) == len(two) == 2 + 4
    for a, b in zip(one[:2], two[:2], strict=True):
        assert numbers(a) == pytest.approx(numbers(b), abs=2e-3)


def test_bf16_keeps_what_it_learns() -> None:
    """The fp32 master weights accumulate updates that a 16-bit parameter would lose."""
    found = {}
    for bf16 in (False, True):
        torch.manual_seed(1)
        model = Transformer(dropout=0.0)
        found[bf16] = [loss for loss, _ in example.train(model, 80, sentences=64, bf16=bf16)]
    assert next(model.parameters()).dtype == torch.bfloat16
    assert found[True] != found[False]
    assert found[True][-1] == pytest.approx(found[False][-1], abs=0.15)
    assert found[False][-1] < 2.2


def batch() -> tuple[Transformer, tuple[Tensor, Segments, Tensor, Segments, Tensor], Tensor]:
    torch.manual_seed(1)
    model = Transformer(dropout=0.3)
    source, previous, labels = pairs(0, 6)
    source_of, target_of = Segments.from_mask(source != PAD), Segments.from_mask(labels != PAD)
    inputs = (source_of.pack(source), source_of, target_of.pack(previous), target_of)
    return model, (*inputs, layers.draw_rng()), target_of.pack(labels)


def test_autocast_changes_nothing() -> None:
    model, inputs, _ = batch()
    expected = model(*inputs)
    with torch.autocast("cpu", torch.bfloat16):
        found = model(*inputs)
    assert found.dtype == torch.float32 and torch.equal(found, expected)


def test_flattening_changes_no_result_and_saves_copies() -> None:
    model, inputs, _ = batch()
    expected = model(*inputs)
    model.flatten()
    assert torch.equal(model(*inputs), expected)
    groups = layers.fused_groups([*model.encoder, *model.decoder])
    assert len(groups) == 4 * 2 + 2
    for group in groups:
        assert as_one(group).data_ptr() == group[0].data_ptr()


def test_the_loss_overwrites_the_logits() -> None:
    model, inputs, labels = batch()
    logits = model(*inputs)
    before = logits.detach().clone()
    losses, _, _ = layers.label_smoothed_cross_entropy(logits, labels, 0.0, PAD)
    assert torch.equal(logits, before)
    losses.sum().backward()
    gradient = before.softmax(-1) - functional.one_hot(labels, VOCABULARY)
    torch.testing.assert_close(logits.detach(), gradient, rtol=0, atol=1e-6)


def test_pairs_are_numbers_and_the_same_backwards() -> None:
    source, previous, labels = (x.tolist() for x in pairs(7, 20))
    for read, shown, wanted in zip(source, previous, labels, strict=True):
        number = read[: read.index(EOS)]
        assert wanted[: len(number) + 1] == [*number[::-1], EOS]
        assert shown[: len(number) + 1] == [EOS, *number[::-1]]
        assert all(token >= ZERO for token in number) and 3 <= len(number) <= 12
        assert {*read[len(number) + 1 :], *shown[len(number) + 1 :]} <= {PAD}
    assert pairs(7, 20)[0].tolist() == source != pairs(8, 20)[0].tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("bf16", [False, True])
def test_on_a_gpu(bf16: bool) -> None:
    torch.manual_seed(1)
    model = Transformer().cuda()
    course = example.train(model, 300, bf16=bf16)
    assert course[-1][0] < 0.5
    source, _, _ = pairs(-1, 50)
    found = example.translate(model, source.cuda())
    wanted = [example.digits(row)[::-1] for row in source.tolist()]
    assert sum(a == b for a, b in zip(found, wanted, strict=True)) > 10
