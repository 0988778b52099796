"""``lightseq-bench train`` for RoBERTa: lengths of samples, cases, baselines, a run of all."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.bench_runs import bench_once, fairseqs, layer_state
from torch import Tensor
from torch.nn import functional

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.benchmark.train import compiled, corpus, masked_batches, rows
from lightseq_fairseq.cli.benchmark.train.batches import Blocks
from lightseq_fairseq.cli.benchmark.train.cases import (
    SYSTEMS,
    Case,
    Data,
    warm_up,
    why_not,
)
from lightseq_fairseq.cli.benchmark.train.floor import BURST, floor, parameters
from lightseq_fairseq.cli.benchmark.train.packed_transformer import PAD, build
from lightseq_fairseq.cli.benchmark.train.shapes import MASKED, SHAPES

from fairseq import utils  # isort: skip
from fairseq.models.roberta import model as roberta_model  # isort: skip
from fairseq.data.indexed_dataset import MMapIndexedDataset  # isort: skip

TOKENS, WORDS = 1 << 15, 500
BLOCKS, MIX = "roberta_tiny/64x4/bf16", "roberta_tiny/bertmix512/bf16"
TUNED = "roberta_tiny/sentences8/bf16"


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all texts."""
    folder = tmp_path_factory.mktemp("bench") / "masked"
    corpus.ensure_text(folder / "text", TOKENS, WORDS)
    corpus.ensure_text(folder / "bertmix", TOKENS, WORDS, corpus.MIX)
    corpus.ensure_text(
        folder / "sentences", TOKENS, WORDS, corpus.SENTENCES, "masked", has_classes=True
    )
    return folder


def folder_of(case: Case, texts: Path) -> Path:
    names = {Data.MASKED: "text", Data.MIX: "bertmix", Data.CLASSES: "sentences"}
    return texts / names[case.data]


# --- text and cases


def test_mix_has_berts_lengths(texts: Path) -> None:
    sizes = 1 + corpus.line_lengths(1 << 22, np.random.default_rng(1), corpus.MIX)  # with <s>
    assert sizes[:-1].min() == 20 and sizes.max() == 512
    assert 247 < sizes.mean() < 253 and 0.15 < (sizes == 512).mean() < 0.17
    dataset = MMapIndexedDataset(str(texts / "bertmix" / "train"))
    assert sum(dataset.sizes) == TOKENS and max(dataset.sizes) == 511
    assert all(dataset[i][-1] == corpus.EOS for i in range(len(dataset)))


def test_sentences_have_classes(texts: Path) -> None:
    found = {
        part: MMapIndexedDataset(str(texts / "sentences" / part / "train"))
        for part in ("input0", "label")
    }
    sizes = 1 + found["input0"].sizes  # with <s>
    assert sizes[:-1].min() >= 10 and sizes.max() == 128 and 57 < sizes.mean() < 63
    assert sum(found["input0"].sizes) == TOKENS
    labels = torch.stack([found["label"][i] for i in range(len(found["label"]))])
    assert labels.shape == (len(sizes), 2) and set(labels[:, 1].tolist()) == {corpus.EOS}
    assert set(labels[:, 0].tolist()) == {4, 5, 6}


def test_cases() -> None:
    case = Case.parse("roberta_large/bertmix/bf16")
    assert case == ("roberta_large", 16384, "bf16", 1, 0, 0) and case.data is Data.MIX
    assert (case.blocks, case.longest) == (32, 512)
    tuned = Case.parse("roberta_base/sentences32/bf16")
    assert tuned == ("roberta_base", 4096, "bf16", 1, 0, 32) and tuned.data is Data.CLASSES
    names = ("roberta_base/sentences32/bf16/x2", "roberta_large/bertmix/bf16",
             "roberta_base/bertmix8192/bf16/x2",
             "roberta_base/512x64/bf16", "roberta_large/128x128/bf16")  # fmt: skip
    for name in names:
        assert str(Case.parse(name)) == name
    for system, before in (("ours", 1000), ("fairseq_no_cudnn", 150), ("torch_compile", 150)):
        assert warm_up(system, case) == before
        assert warm_up(system, Case.parse(BLOCKS)) == 150
    assert why_not("torch_compile_padded", case) is None
    for system, name, reason in (
        ("torch_compile_padded", BLOCKS, "only bertmix has samples to pad"),
        ("torch_compile", "roberta_tiny/64x4/fp16", "in bf16 only"),
        ("transformers", "lm_tiny/64x4/bf16", "transformers has no model of these sizes here"),
        ("torch_compile", TUNED, "only pre-train RoBERTa"),
        ("ours_packed", MIX, "counts the tokens of sentence pairs"),
        ("ours_packed", BLOCKS, "blocks of equal length have no pads"),
    ):
        assert reason in str(why_not(system, Case.parse(name)))


def test_a_folder_of_another_text_is_refused(texts: Path) -> None:
    with pytest.raises(UserError, match="choose another folder with --masked, or change --tokens"):
        corpus.ensure_text(texts / "bertmix", 7, WORDS, corpus.MIX, "masked")


# --- sizes


@pytest.mark.parametrize("model", MASKED)
def test_shapes_are_fairseqs(model: str, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # It copies from the device, which is impossible on "meta".
    monkeypatch.setattr(roberta_model, "init_bert_params", lambda module: None)
    shape, case = SHAPES[model], Case.parse(f"{model}/64x4/bf16")
    cfg, task = fairseqs(case, folder_of(case, texts))
    words = case.words(WORDS)
    assert len(task.source_dictionary) == words == WORDS + 1
    with torch.device("meta"):
        network = task.build_model(cfg.model)
        baseline = build(shape, words, case.block)
    for built in (network, baseline):
        assert sum(p.numel() for p in built.parameters()) == parameters(shape, words)
    encoder = network.encoder.sentence_encoder
    first = encoder.layers[0]
    assert shape == shape._replace(
        width=encoder.embed_tokens.embedding_dim, ffn=first.fc1.out_features,
        heads=first.self_attn.num_heads, encoder_layers=len(encoder.layers),
        normalize_before=first.normalize_before,
        attention_dropout=first.self_attn.dropout_module.p,
        activation_dropout=first.activation_dropout_module.p,
        tied=network.encoder.lm_head.weight is encoder.embed_tokens.weight,
        positions=encoder.embed_positions.num_embeddings - 2,
    )  # fmt: skip
    assert first.activation_fn is utils.get_activation_fn(shape.activation)
    assert encoder.layernorm_embedding is not None and encoder.embed_scale == 1


def test_known_sizes() -> None:
    """The models have the published numbers of parameters."""
    words = corpus.MASKED_VOCABULARY + 1
    numel = [
        round(parameters(SHAPES[f"roberta_{size}"], words) / 1e6) for size in ("base", "large")
    ]
    assert numel == [125, 355]


def test_floor_counts_operations() -> None:
    """A token takes 6 operations for each weight of a layer and 12 L C for attention; one of
    fifteen hundredths of them takes 6 for each weight of the head."""
    shape, block, words = SHAPES["roberta_large"], 512, 50_265
    least = floor(shape, words, 0, 1000, block)
    assert least.layer_gemm * BURST.gemm / 1000 == pytest.approx(6 * 24 * 12 * 1024**2)
    assert least.logits_gemm * BURST.gemm / 150 == pytest.approx(6 * 1024 * (words + 1024))
    assert least.attention * BURST.gemm / 1000 == pytest.approx(12 * 24 * block * 1024)
    tuned = floor(shape, words, 0, 1000, classifies=True)
    assert tuned.logits_gemm == tuned.cross_entropy == 0 and tuned.layer_gemm == least.layer_gemm


def test_sentences_per_second() -> None:
    case, data = Case.parse("roberta_base/sentences32/bf16"), corpus.Corpus(Path(), 0, 500, 0, 9)
    profile = {"ms_per_step": 50.0, "busy": 0.99, "class_ms": {"contraction": 49.5, "gaps": 0.5}}
    report = {"first_100_s": 8.0, "peak_gib": 20.0, "timeline": profile, "profiled_tokens": 1900}
    run = rows.Run(150, [rows.Interval(1900 / 0.050, 1900)], report)
    row = rows.row(case, "ours", data, [run], {})
    assert (row["ms_per_step"], row["sentences_per_s"]) == (50, 640)
    line = rows.table([row])[2].split()
    assert (line[1], line[-1]) == ("38000", "640")


# --- batches


def samples(lengths: list[int]) -> masked_batches.Samples:
    generator = torch.Generator().manual_seed(3)
    made = []
    for length in lengths:
        tokens = torch.randint(4, 50, (length,), generator=generator)
        is_masked = torch.rand(length, generator=generator) < 0.15
        made.append((tokens.where(~is_masked, torch.tensor(50)), tokens.where(is_masked, PAD)))
    return made


def test_packing_keeps_samples_and_fills_the_rest() -> None:
    lengths = [20, 100, 33]
    given = samples(lengths)
    batch = masked_batches.packed(given, rows=512, longest=200, most=26)
    used = sum(lengths)
    assert torch.equal(batch.tokens[:used], torch.cat([tokens for tokens, _ in given]))
    assert batch.tokens[used:].eq(PAD).all() and len(batch.tokens) == 512
    sizes = batch.cu.diff()
    assert sizes[:5].tolist() == [*lengths, 200, 512 - used - 200] and not sizes[5:].any()
    assert torch.equal(batch.positions, torch.cat([torch.arange(int(n)) for n in sizes]))
    full = torch.cat([target for _, target in given])
    is_label = batch.target.ne(PAD)
    assert torch.equal(batch.rows[is_label], full.ne(PAD).nonzero().flatten())
    assert torch.equal(batch.target[is_label], full[full.ne(PAD)])
    other = masked_batches.packed(samples([20] * 25), rows=512, longest=200, most=26)
    assert [x.shape for x in other] == [x.shape for x in batch]


@pytest.mark.parametrize("system", ["torch_compile", "torch_compile_padded", "transformers"])
@pytest.mark.parametrize("name", [BLOCKS, MIX])
def test_batches_are_of_one_size(name: str, system: str, texts: Path) -> None:
    case = Case.parse(name)
    found = masked_batches.drawn(folder_of(case, texts), case, system, 10_000, workers=0)
    assert len({tuple(x.shape for x in batch) for batch in found}) == 1
    real = [int(batch.tokens.ne(PAD).sum()) for batch in found]
    if case.block:
        assert set(real) == {case.max_tokens} and len(found) == TOKENS // 63 // 4
    elif system == "torch_compile":
        # Nearly all samples, and batches that the next sample would not fit into.
        assert TOKENS - 1024 < sum(real) < TOKENS + 200 and min(real) > 0
    else:
        assert all(20 <= tokens <= 512 for tokens in real)
    share = sum(int(batch.target.ne(PAD).sum()) for batch in found) / sum(real)
    assert share == pytest.approx(corpus.MASKED_SHARE, rel=0.01)
    assert len(masked_batches.drawn(folder_of(case, texts), case, system, 3, workers=0)) == 3


def test_a_text_without_a_batch_is_refused(texts: Path) -> None:
    case = Case("roberta_tiny", 1 << 20, "bf16")
    with pytest.raises(ValueError, match=f"no batch of {case} can be made of"):
        masked_batches.drawn(texts / "bertmix", case, "torch_compile", 5, workers=0)


# --- models


def state_of(native: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """The baseline's state dict with the weights of fairseq's model."""
    encoder, head = "encoder.sentence_encoder", "encoder.lm_head"
    names = {
        "embedding": f"{encoder}.embed_tokens", "output": f"{encoder}.embed_tokens",
        "learned": f"{encoder}.embed_positions", "embedding_norm": f"{encoder}.layernorm_embedding",
        "dense": f"{head}.dense", "head_norm": f"{head}.layer_norm",
    }  # fmt: skip
    state = {"bias": native[f"{head}.bias"]}
    for kind in ("weight", "bias"):
        for ours, theirs in names.items():
            if f"{theirs}.{kind}" in native:
                state[f"{ours}.{kind}"] = native[f"{theirs}.{kind}"]
    for number in range(layers):
        state |= layer_state(native, f"{encoder}.layers.{number}", f"encoder.{number}")
    return state


@pytest.mark.parametrize("name", [BLOCKS, MIX])
def test_baseline_computes_fairseqs_loss(name: str, texts: Path) -> None:
    """Packed, padded and equally long samples, in eval mode with the same weights."""
    case = Case.parse(name)
    cfg, task = fairseqs(case, folder_of(case, texts))
    torch.manual_seed(1)
    network, criterion = task.build_model(cfg.model).eval(), task.build_criterion(cfg.criterion)
    # fairseq's weights have a deviation of 0.02: the encoder hardly changes anything.
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    baseline = build(case.shape, WORDS + 1, case.block, has_pads=True).eval()
    baseline.load_state_dict(state_of(network.state_dict(), case.shape.encoder_layers))
    given = samples([64] * 4) if case.block else samples([20, 100, 33])
    tokens, target = masked_batches.padded(given, case.longest)
    sample = {"net_input": {"src_tokens": tokens}, "target": target, "ntokens": 1, "nsentences": 1}
    batches = [masked_batches.padded_rows(given, case.longest)]
    if not case.block:
        batches.append(masked_batches.packed(given, case.max_tokens, case.longest, 9))
    with torch.no_grad():
        expected = criterion(network, sample)[0].item()
        losses = [baseline(*batch).item() for batch in batches]
        assert losses == pytest.approx([expected] * len(batches), rel=1e-5)
        baseline.encoder[1].attention.out.weight[0] += 1
        assert baseline(*batches[0]).item() != pytest.approx(expected, rel=1e-4)


def test_gradients_are_of_the_mean_loss() -> None:
    torch.manual_seed(1)
    network = build(SHAPES["roberta_tiny"], 51, 0).eval()
    batch = masked_batches.packed(samples([20, 100, 33]), 512, 512, 9)
    loss, *found = compiled.Gradients(network)(batch)
    total = network(*batch)
    assert loss.item() == pytest.approx(total.item())
    labels = batch.target.ne(PAD).sum()
    expected = torch.autograd.grad(total / labels, list(network.parameters()))
    torch.testing.assert_close(found, list(expected))


def test_hugging_faces_model_does_the_same_work() -> None:
    pytest.importorskip("transformers")
    from lightseq_fairseq.cli.benchmark.train.hugging_face import Roberta

    case = Case.parse(MIX)
    network = Roberta(case, 51).eval()
    # Its table of token types has one row.
    expected = parameters(case.shape, 51) + case.shape.width
    assert sum(p.numel() for p in network.parameters()) == expected
    tokens, target = masked_batches.padded(samples([20, 100, 33]), 512)
    with torch.no_grad():
        logits = network.model(tokens, attention_mask=tokens.ne(PAD).long()).logits
        loss = network(*Blocks(tokens, target))
        expected = functional.cross_entropy(
            logits.flatten(0, 1), target.flatten(), ignore_index=PAD, reduction="sum"
        )
    torch.testing.assert_close(loss, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["roberta_tiny/128x4/bf16", MIX])
@pytest.mark.parametrize("system", ["torch_compile", "torch_compile_padded"])
def test_graph_computes_what_the_model_computes(name: str, system: str) -> None:
    from test_bench_compiled import compare
    from torch.nn.attention import sdpa_kernel

    torch.manual_seed(1)
    case = Case.parse(name)
    has_pads = not case.block
    network = build(case.shape, 51, case.block, has_pads).to("cuda", torch.bfloat16).eval()
    gradients, weights = compiled.Gradients(network), list(network.parameters())
    with sdpa_kernel(compiled.fastest_backend(case, compiled.mask_of(case, system))):
        for lengths in ([128] * 4, [128] * 4) if case.block else ([300], [211], [20]):
            given = samples(lengths)
            batch = masked_batches.padded_rows(given, case.longest)
            if system == "torch_compile" and has_pads:
                batch = masked_batches.packed(given, case.max_tokens, case.longest, 9)
            compare(gradients, network, weights, batch)
    assert len(gradients._graphs) == 1


# --- the command


def words_of(texts: Path) -> list[object]:
    return ["--masked", texts, "--tokens", TOKENS, "--vocabulary", WORDS]


def logs_of(folder: Path, name: str, systems: tuple[str, ...]) -> dict[str, str]:
    stem = name.replace("/", "-")
    return {x: (folder / "logs" / f"{stem}-{x}-1.log").read_text() for x in systems}


def test_blocks_once(texts: Path, tmp_path: Path) -> None:
    systems = ("ours", "fairseq_no_cudnn", "torch_compile")
    done, found = bench_once(tmp_path, BLOCKS, systems, *words_of(texts))
    for system in systems:
        row = found[system]
        assert f"\n{system} " in done.stdout
        assert (row["case"], row["source_tokens"]) == (BLOCKS, 0)
        assert 250 <= row["target_tokens"] <= 256  # two batches of an epoch may be short
        assert 0 < row["gpu_busy"] <= 1
    logs = logs_of(tmp_path, BLOCKS, systems)
    assert "step: without CUDA graphs, without padding" in logs["ours"]
    (count,) = re.findall(r"num. shared model params: ([\d,]+)", logs["fairseq_no_cudnn"])
    assert int(count.replace(",", "")) == parameters(SHAPES["roberta_tiny"], WORDS + 1)
    # The same loss: bits a masked token, in the first updates.
    first = [float(re.findall(r'"loss": "([\d.]+)"', log)[0]) for log in logs.values()]
    assert max(first) < min(first) + 0.5


def test_mix_once(texts: Path, tmp_path: Path) -> None:
    systems = ("ours", "torch_compile_padded")
    _, found = bench_once(tmp_path, MIX, systems, *words_of(texts))
    assert all(100 < found[system]["target_tokens"] <= 512 for system in systems)
    # Its batches are one padded sample each.
    padded = found["torch_compile_padded"]["target_tokens"]
    assert padded == pytest.approx(250, rel=0.3)
    log = logs_of(tmp_path, MIX, systems)["ours"]
    assert "--max-tokens 512" in log and "--sample-break-mode eos" in log


def test_sentences_once(texts: Path, tmp_path: Path) -> None:
    systems = ("ours", "fairseq_no_cudnn")
    _, found = bench_once(tmp_path, TUNED, systems, *words_of(texts))
    for row in found.values():
        assert 300 < row["target_tokens"] < 600  # of eight sentences
        assert row["sentences_per_s"] == pytest.approx(8e3 / row["ms_per_step"], abs=1)
    logs = logs_of(tmp_path, TUNED, systems)
    assert "step: without CUDA graphs, without padding" in logs["ours"]
    first = [float(re.findall(r'"loss": "([\d.]+)"', log)[0]) for log in logs.values()]
    assert first[0] == pytest.approx(first[1], abs=0.1)


def test_without_hugging_face(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert why_not("transformers", Case.parse(BLOCKS)) == "transformers is not installed."
    assert {name for name, how in SYSTEMS.items() if how.compiled} == {
        "torch_compile", "torch_compile_padded", "transformers", "transformers_graphs"
    }  # fmt: skip
