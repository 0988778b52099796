"""``lightseq-bench train`` for language models: running text, sizes, the baseline, a run of all."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.bench_runs import bench_once, fairseqs, layer_state
from torch import Tensor

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.benchmark.generate import cases as generation
from lightseq_fairseq.cli.benchmark.train import compiled, corpus, rows
from lightseq_fairseq.cli.benchmark.train.batches import Blocks
from lightseq_fairseq.cli.benchmark.train.cases import (
    LOG_INTERVAL,
    Case,
    warm_up,
    why_not,
)
from lightseq_fairseq.cli.benchmark.train.floor import BURST, BYTES, floor, parameters
from lightseq_fairseq.cli.benchmark.train.packed_transformer import build
from lightseq_fairseq.cli.benchmark.train.shapes import DROPOUT, LANGUAGE, SHAPES, TRANSLATION

from fairseq import utils  # isort: skip
from fairseq.data import Dictionary  # isort: skip
from fairseq.data.indexed_dataset import MMapIndexedDataset  # isort: skip

SMALL = {"tokens": 1 << 15, "vocabulary": 500}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> corpus.Corpus:
    return corpus.ensure_text(tmp_path_factory.mktemp("bench") / "text", **SMALL)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> corpus.Corpus:
    return corpus.ensure(tmp_path_factory.mktemp("bench") / "pairs", pairs=10, vocabulary=500)


# --- corpus


def test_fairseq_reads_the_text(text: corpus.Corpus) -> None:
    assert len(Dictionary.load(str(text.folder / "dict.txt"))) == text.vocabulary
    tokens = []
    for split, size in (("train", text.target_tokens), ("valid", corpus.VALID_TOKENS)):
        dataset = MMapIndexedDataset(str(text.folder / split))
        lines = [dataset[i] for i in range(len(dataset))]
        assert sum(map(len, lines)) == size
        assert all(x[-1] == corpus.EOS and (x[:-1] >= corpus.SPECIALS).all() for x in lines)
        tokens += lines
    lengths = np.array([len(line) for line in tokens])
    assert 50 < lengths.mean() < 64 and lengths.max() > 300
    words = torch.cat(tokens)
    words = words[words != corpus.EOS]
    assert words.max() < text.vocabulary
    harmonic = sum(1 / rank for rank in range(1, text.vocabulary - 3))
    for rank in (1, 2, 10):
        share = (words == rank + 3).double().mean().item()
        assert share == pytest.approx(1 / rank / harmonic, rel=0.1)


def test_text_is_pinned_and_kept(text: corpus.Corpus, pairs: corpus.Corpus, tmp_path: Path) -> None:
    again = corpus.ensure_text(tmp_path / "again", **SMALL)
    names = sorted(os.listdir(text.folder))
    assert names == sorted(os.listdir(again.folder)) and os.listdir(tmp_path) == ["again"]
    assert all((text.folder / n).read_bytes() == (again.folder / n).read_bytes() for n in names)
    before = (again.folder / "train.bin").stat().st_mtime_ns
    assert corpus.ensure_text(again.folder, **SMALL) == again
    assert (again.folder / "train.bin").stat().st_mtime_ns == before
    for folder, found in ((text.folder, "32768 tokens of text"), (pairs.folder, "10 pairs")):
        with pytest.raises(UserError, match=f"{found} and 500 words, but this run needs 7 tokens"):
            corpus.ensure_text(folder, 7, 500)


# --- cases


def test_cases() -> None:
    case = Case.parse("gpt2_124m/1024x32/bf16/x2")
    assert case == ("gpt2_124m", 32768, "bf16", 2, 1024, 0)
    assert (str(case), case.blocks) == ("gpt2_124m/1024x32/bf16/x2", 32)
    assert "blocks of equal length have no pads" in str(why_not("ours_packed", case))
    pairs = Case.parse("t2t_big/4096/bf16")
    for system, updates in (("ours", 4000), ("fairseq_no_cudnn", 150), ("torch_compile", 500)):
        assert (warm_up(system, pairs), warm_up(system, case)) == (updates, 150)


def test_language_models_do_not_translate() -> None:
    for model in LANGUAGE:
        with pytest.raises(UserError, match=f"There is no case {model}/b1/beam4/bf16"):
            generation.Case.parse(f"{model}/b1/beam4/bf16")


# --- sizes


@pytest.mark.parametrize("model", TRANSLATION + LANGUAGE)
def test_shapes_are_fairseqs(model: str, text: corpus.Corpus, pairs: corpus.Corpus) -> None:
    shape = SHAPES[model]
    case = Case.parse(f"{model}/64x4/bf16" if shape.is_language_model else f"{model}/256/bf16")
    cfg, task = fairseqs(case, (text if case.block else pairs).folder)
    with torch.device("meta"):
        network = task.build_model(cfg.model)
        baseline = build(shape, text.vocabulary, case.block)
    for built in (network, baseline):
        assert sum(p.numel() for p in built.parameters()) == parameters(shape, text.vocabulary)
    decoder, first = network.decoder, network.decoder.layers[0]
    assert shape == shape._replace(
        width=decoder.embed_dim, ffn=first.fc1.out_features, heads=first.self_attn.num_heads,
        encoder_layers=0 if case.block else len(network.encoder.layers),
        decoder_layers=len(decoder.layers), normalize_before=first.normalize_before,
        attention_dropout=first.self_attn.dropout_module.p,
        activation_dropout=first.activation_dropout_module.p,
        tied=decoder.output_projection.weight is decoder.embed_tokens.weight,
    )  # fmt: skip
    assert first.activation_fn is utils.get_activation_fn(shape.activation)
    assert first.dropout_module.p == DROPOUT
    assert isinstance(decoder.embed_positions, torch.nn.Embedding) == bool(shape.positions)


def test_known_sizes() -> None:
    """The models have the published numbers of parameters."""
    numel = {model: parameters(SHAPES[model], corpus.TEXT_VOCABULARY) for model in LANGUAGE}
    assert round(numel["gpt2_124m"] / 1e6) == 124
    assert round((numel["gpt2_small"] - 2 * 1024 * 50_257) / 1e6) == 302  # without the embeddings


def test_floor_counts_operations() -> None:
    """A token takes 6 operations for each weight of a product, and 6 L C for attention in each
    layer: L is the length of a block, C the width."""
    shape, block = SHAPES["gpt2_124m"], 1024
    least = floor(shape, corpus.TEXT_VOCABULARY, 0, block, block)
    operations = (least.layer_gemm + least.logits_gemm + least.attention) * BURST.gemm / block
    weights = 12 * shape.width**2 * shape.decoder_layers + 50_257 * shape.width
    expected = 6 * weights + 6 * block * shape.width * shape.decoder_layers
    assert operations == pytest.approx(expected) and round(expected / 1e6) == 798
    # In short blocks, attention is limited by memory bandwidth.
    short = floor(shape, corpus.TEXT_VOCABULARY, 0, block, block // 2).attention
    assert short == pytest.approx(12 * 12 * 2 * shape.width * block / BYTES) != least.attention


def test_row() -> None:
    case = Case.parse("gpt2_124m/1024x32/bf16")
    data = corpus.Corpus(Path(), 0, 50_257, 0, 1 << 25)
    profile = {"ms_per_step": 50.0, "busy": 0.99, "class_ms": {"contraction": 49.5, "gaps": 0.5}}
    report = {"first_100_s": 8.0, "peak_gib": 20.0, "timeline": profile, "profiled_tokens": 32768}
    run = rows.Run(150, [rows.Interval(32768 / 0.050, 32768)], report)
    row = rows.row(case, "ours", data, [run], {})
    assert row["case"] == "gpt2_124m/1024x32/bf16" and row["ms_per_step"] == 50
    assert (row["source_tokens"], row["target_tokens"]) == (0, 32768)
    assert row["floor_share"] == round(sum(floor(case.shape, 50_257, 0, 32768, 1024)) / 50, 4)


# --- the baseline


def state_of(native: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """The baseline's state dict with the weights of fairseq's model."""
    names = {
        "embedding": "embed_tokens", "output": "output_projection", "learned": "embed_positions",
        "decoder_norm": "layer_norm",
    }  # fmt: skip
    state = {}
    for kind in ("weight", "bias"):
        for ours, theirs in names.items():
            if f"decoder.{theirs}.{kind}" in native:
                state[f"{ours}.{kind}"] = native[f"decoder.{theirs}.{kind}"]
    for number in range(layers):
        state |= layer_state(native, f"decoder.layers.{number}", f"decoder.{number}")
    return state


@pytest.mark.parametrize("model", LANGUAGE)
def test_baseline_computes_fairseqs_loss(model: str, text: corpus.Corpus) -> None:
    """Compares models with two layers and the same weights, in eval mode."""
    case = Case.parse(f"{model}/16x3/bf16")
    cfg, task = fairseqs(case, text.folder, "--decoder-layers", 2)
    torch.manual_seed(1)
    network, criterion = task.build_model(cfg.model).eval(), task.build_criterion(cfg.criterion)
    shape = case.shape._replace(decoder_layers=2)
    baseline = build(shape, text.vocabulary, case.block).eval()
    missing, unexpected = baseline.load_state_dict(state_of(network.state_dict(), 2), strict=False)
    assert unexpected == [] and missing == ["positions"] * (not shape.positions)
    batch = next(compiled.batches(text.folder, case, workers=0))
    inputs = {"src_tokens": batch.tokens}
    sample = {"net_input": inputs, "target": batch.target, "ntokens": 48}
    with torch.no_grad():
        expected = criterion(network, sample)[0].item()
        assert baseline(*batch).item() == pytest.approx(expected, rel=1e-5)
        baseline.decoder[1].attention.out.weight[0, 0] += 1
        assert baseline(*batch).item() != pytest.approx(expected, rel=1e-5)


def test_baseline_reads_whole_batches(text: corpus.Corpus) -> None:
    """An epoch contains every token once, in batches of one size."""
    case = Case.parse("lm_tiny/64x8/bf16")
    feed = compiled.batches(text.folder, case, workers=0)
    epoch = [next(feed) for _ in range(text.target_tokens // case.max_tokens)]
    assert {x.shape for batch in epoch for x in batch} == {(8, 64)}
    lines = MMapIndexedDataset(str(text.folder / "train"))
    stream = torch.cat([lines[i] for i in range(len(lines))]).reshape(-1, 64)
    blocks = torch.cat([batch.target for batch in epoch])
    assert sorted(blocks.tolist()) == sorted(stream.tolist())
    assert blocks.tolist() != stream.tolist()  # shuffled
    for batch in epoch:  # the input is the text, one token later
        assert torch.equal(batch.tokens[:, 1:], batch.target[:, :-1])
    dozen = next(compiled.batches(text.folder, Case.parse("lm_tiny/64x12/bf16"), workers=0))
    assert dozen.target.shape == (12, 64)  # also where fairseq would prefer a multiple of 8


def test_gradients_are_of_the_mean_loss() -> None:
    torch.manual_seed(1)
    network = build(SHAPES["lm_tiny"], 50, 8).eval()
    target = torch.randint(4, 50, (2, 8))
    target[1, 5:] = 1  # pads
    batch = Blocks(torch.randint(4, 50, (2, 8)), target)
    loss, *found = compiled.Gradients(network)(batch)
    total = network(*batch)
    assert loss.item() == pytest.approx(total.item())
    expected = torch.autograd.grad(total / 13, list(network.parameters()))
    torch.testing.assert_close(found, list(expected))


# --- the command


def test_everything_once(text: corpus.Corpus, tmp_path: Path) -> None:
    systems = ("ours", "fairseq_no_cudnn", "torch_compile")
    done, found = bench_once(
        tmp_path, "lm_tiny/64x4/bf16", systems,
        "--text", text.folder, "--tokens", text.target_tokens, "--vocabulary", text.vocabulary,
        interval=LOG_INTERVAL, warm_up=LOG_INTERVAL,
    )  # fmt: skip
    assert set(found) == set(systems)
    for system, row in found.items():
        assert f"\n{system} " in done.stdout
        assert row["case"] == "lm_tiny/64x4/bf16" and row["source_tokens"] == 0
        assert row["target_tokens"] == row["profiled_tokens"] == 256
        assert 0 < row["gpu_busy"] <= 1 and row["first_100_s"] > 0
    logs = {
        system: (tmp_path / "logs" / f"lm_tiny-64x4-bf16-{system}-1.log").read_text()
        for system in systems
    }
    assert "step: without CUDA graphs, without padding" in logs["ours"]
    (count,) = re.findall(r"num. shared model params: ([\d,]+)", logs["fairseq_no_cudnn"])
    assert int(count.replace(",", "")) == parameters(SHAPES["lm_tiny"], text.vocabulary)
    # The same text and the same loss: bits a token, in the first 50 updates.
    first = [float(re.findall(r'"loss": "([\d.]+)"', log)[0]) for log in logs.values()]
    assert max(first) < min(first) + 0.5
