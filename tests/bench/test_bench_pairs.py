"""``lightseq-bench train`` for BART and NLLB: lengths, cases, batches, Hugging Face's models."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.bench_runs import bench_once, fairseqs
from torch.nn import functional

from lightseq_fairseq.cli.benchmark.train import compiled, corpus, padded_pairs, rows
from lightseq_fairseq.cli.benchmark.train.batches import PaddedPairs
from lightseq_fairseq.cli.benchmark.train.cases import Case, Data, warm_up, why_not
from lightseq_fairseq.cli.benchmark.train.commands import command
from lightseq_fairseq.cli.benchmark.train.floor import BURST, floor, parameters
from lightseq_fairseq.cli.benchmark.train.packed_transformer import PAD, SMOOTHING
from lightseq_fairseq.cli.benchmark.train.shapes import BART, NLLB, SHAPES

PAIRS, WORDS = 400, 500
SUMMARIES, NOISED = "bart_tiny/summaries1024/bf16", "bart_tiny/denoising64x4/bf16"
VERSES, PAIRED = "nllb_tiny/verses4/bf16", "marian_tiny/512/bf16"


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all corpora."""
    folder = tmp_path_factory.mktemp("bench") / "seq2seq"
    corpus.ensure(folder / "summaries", PAIRS // 8, WORDS, corpus.SUMMARIES, "seq2seq")
    corpus.ensure(folder / "verses", PAIRS, WORDS, corpus.VERSES, "seq2seq")
    corpus.ensure(folder / "pairs", PAIRS, WORDS, option="seq2seq")
    corpus.ensure_text(folder / "text", 1 << 14, WORDS, option="seq2seq")
    return folder


def folder_of(case: Case, corpora: Path) -> Path:
    names = {Data.SUMMARIES: "summaries", Data.VERSES: "verses", Data.NOISED: "text"}
    names[Data.PAIRS] = "pairs"
    return corpora / names[case.data]


# --- corpora and cases


def test_lengths_of_texts_summaries_and_verses() -> None:
    rng = np.random.default_rng(1)
    source, target = corpus.lengths(100_000, rng, corpus.SUMMARIES)
    assert source.min() >= 100 and source.max() == 1024 and 697 < source.mean() < 703
    assert target.min() >= 20 and target.max() <= 140 and 61 < target.mean() < 63
    assert abs(np.corrcoef(source, target)[0, 1]) < 0.02
    source, target = corpus.lengths(100_000, rng, corpus.VERSES)
    assert 44.5 < source.mean() < 45.5 and source.max() <= 200
    assert 1.01 < target.mean() / source.mean() < 1.05


def test_the_words_of_nllb_need_more_than_16_bits(tmp_path: Path) -> None:
    from fairseq.data.indexed_dataset import MMapIndexedDataset

    words = SHAPES["nllb_600m"].vocabulary
    corpus.ensure(tmp_path / "verses", 50, words, corpus.VERSES)
    found = MMapIndexedDataset(str(tmp_path / "verses" / "train.en-de.de"))
    tokens = torch.cat([found[i] for i in range(len(found))])
    assert len(found) == 50 and 65_536 < tokens.max() < words
    assert all(found[i][-1] == corpus.EOS for i in range(len(found)))


def test_cases() -> None:
    for name, data, longest, blocks in (
        ("bart_large/summaries/bf16", Data.SUMMARIES, 1024, 16),
        ("bart_large/denoising512/fp8", Data.NOISED, 512, 32),
        ("bart_large/denoising256x8/bf16/x2", Data.NOISED, 256, 8),
        ("nllb_1.3b/verses/bf16", Data.VERSES, 200, 64),
        ("nllb_3.3b/8192/bf16", Data.VERSES, 200, 40),
        ("marian_big/4096/bf16", Data.PAIRS, 200, 20),
    ):
        case = Case.parse(name)
        assert (str(case), case.data, case.longest, case.blocks) == (name, data, longest, blocks)
        assert case.has_pairs and warm_up("ours", case) == 1000
    assert Case.parse("nllb_600m/verses64/bf16") == Case.parse("nllb_600m/verses/bf16")
    assert Case.parse(NOISED).words(WORDS) == WORDS + 1 == Case.parse(SUMMARIES).words(WORDS) + 1
    assert why_not("ours_packed", Case.parse("bart_large/summaries/bf16")) is None
    assert why_not("ours", Case.parse("nllb_3.3b/8192/fp8")) is None
    for system, name, reason in (
        ("ours_packed", VERSES, "counts the tokens of sentence pairs"),
        ("transformers", "bart_tiny/summaries1024/fp8", "only lightseq-train has --fp8"),
    ):
        assert reason in str(why_not(system, Case.parse(name)))


# --- sizes


@pytest.mark.parametrize("model", [*BART, *NLLB])
def test_shapes_are_fairseqs(model: str, corpora: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fairseq.models.bart import model as bart_model

    # It copies from the device, which is impossible on "meta".
    monkeypatch.setattr(bart_model, "init_bert_params", lambda module: None)
    case = Case.parse(f"{model}/{'summaries' if model in BART else 'verses'}/bf16")
    cfg, task = fairseqs(case, folder_of(case, corpora))
    with torch.device("meta"):
        network = task.build_model(cfg.model)
    shape = SHAPES[model]
    learned = [p for p in network.parameters() if p.requires_grad]
    assert sum(p.numel() for p in learned) == parameters(shape, WORDS)
    first = network.encoder.layers[0]
    assert shape == shape._replace(
        width=network.encoder.embed_tokens.embedding_dim, ffn=first.fc1.out_features,
        heads=first.self_attn.num_heads, encoder_layers=len(network.encoder.layers),
        decoder_layers=len(network.decoder.layers), normalize_before=first.normalize_before,
        attention_dropout=first.self_attn.dropout_module.p,
        activation_dropout=first.activation_dropout_module.p,
    )  # fmt: skip


def test_known_sizes() -> None:
    """The models have the published numbers of parameters, in millions."""
    found = {
        model: round(parameters(SHAPES[model], SHAPES[model].vocabulary) / 1e6)
        for model in (*BART, *NLLB) if not model.endswith("tiny")
    }  # fmt: skip
    assert found == {"bart_large": 406, "nllb_600m": 615, "nllb_1.3b": 1371, "nllb_3.3b": 3345}


def test_floor_counts_attention_to_long_sources() -> None:
    """12 L C operations for each source token and layer, and for each target token and layer."""
    shape = SHAPES["bart_large"]
    source = floor(shape, WORDS, 1000, 0, text=700).attention * BURST.gemm
    assert source == pytest.approx(12 * 12 * 700 * 1024 * 1000)
    both = floor(shape, WORDS, 1000, 800, text=700).attention * BURST.gemm
    assert both - source == pytest.approx(12 * 12 * 700 * 1024 * 800)


def test_rows_count_both_sides() -> None:
    case = Case.parse("bart_large/summaries/bf16")
    data = corpus.Corpus(Path(), 10, 500, 7000, 620)
    profile = {"ms_per_step": 50.0, "busy": 0.99, "class_ms": {"contraction": 49.5, "gaps": 0.5}}
    report = {"first_100_s": 8.0, "peak_gib": 20.0, "timeline": profile, "profiled_tokens": 1240}
    run = rows.Run(150, [rows.Interval(1240 / 0.050, 1240)], report)
    row = rows.row(case, "ours", data, [run], {})
    assert (row["tokens_per_s"], row["source_tokens"]) == (24_800, 14_000)
    assert (row["real_tokens_per_s"], row["sentences_per_s"]) == (304_800, 400)
    assert rows.table([row])[2].split()[-2:] == ["304800", "400"]
    noised = rows.row(Case.parse("bart_large/denoising512/bf16"), "ours", data, [run], {})
    assert noised["source_tokens"] == round(1240 * 412 / 512)
    assert noised["sentences_per_s"] == round(24_800 / 512)


def test_commands(tmp_path: Path) -> None:
    def words(name: str, system: str) -> list[str]:
        return command(Case.parse(name), system, tmp_path, tmp_path / "r.json", 200, True, 4)

    ours, native = (words("nllb_1.3b/verses/bf16", x) for x in ("ours", "fairseq_no_cudnn"))
    places = [native.index(flag) for flag in ("--heat", "--marks", "--max-update")]
    changed = {place + 1 for place in places}
    assert [w for i, w in enumerate(native) if i not in changed and w != "--native"] == [
        w for i, w in enumerate(ours) if i not in changed
    ]
    text = " ".join(ours)
    assert "--batch-size 64" in text and "--encoder-ffn-embed-dim 8192" in text
    marian, stand_in = (words("marian_base/4096/bf16", x) for x in ("ours", "fairseq_no_cudnn"))
    assert "ls_marian_base" in marian and "ls_transformer" in stand_in
    assert [w for w in marian if "embed-dim" in w] == [w for w in stand_in if "embed-dim" in w]
    assert "--batch-size" not in words("nllb_3.3b/8192/bf16", "ours")
    noised = " ".join(words("bart_large/denoising512/fp8", "ours"))
    assert "--task denoising" in noised and "--bf16 --fp8" in noised
    assert "--batch-size 32" in noised and "--poisson-lambda 3.5" in noised


# --- Hugging Face's batches and models


@pytest.mark.parametrize("name", [SUMMARIES, VERSES, "nllb_tiny/512/bf16", PAIRED, NOISED])
def test_batches_have_few_sizes(name: str, corpora: Path) -> None:
    case = Case.parse(name)
    found = padded_pairs.drawn(folder_of(case, corpora), case, 40, workers=0)
    step = padded_pairs.step(case.longest)
    for batch in found:
        assert batch.source.shape[1] % step == batch.target.shape[1] % 16 == 0
        assert batch.previous.shape == batch.target.shape
        assert torch.equal(batch.previous.ne(PAD), batch.target.ne(PAD))
        if case.sentences or case.block:
            assert len(batch.source) == case.blocks
        else:
            assert 0 < batch.source.numel() <= case.max_tokens
    sides = [
        torch.cat([getattr(batch, side).flatten() for batch in found]).ne(PAD).double().mean()
        for side in ("source", "target")
    ]
    assert sides[0] > 0.75 and sides[1] > 0.5  # real tokens


def test_noise_shortens_blocks_as_the_floor_assumes(corpora: Path) -> None:
    case = Case.parse("bart_tiny/denoising512x4/bf16")
    found = padded_pairs.drawn(folder_of(case, corpora), case, 8, workers=0)
    real = sum(int(batch.source.ne(PAD).sum()) for batch in found)
    assert real / (len(found) * case.max_tokens) == pytest.approx(corpus.NOISED_SHARE, rel=0.03)


def pair_batch() -> PaddedPairs:
    torch.manual_seed(2)
    sizes = ((3, 32), (3, 16))
    source, target = (torch.randint(4, WORDS, size) for size in sizes)
    previous = torch.cat([torch.full((3, 1), corpus.EOS), target[:, :-1]], 1)
    source[1, 20:] = source[2, 9:] = previous[1, 12:] = target[1, 12:] = PAD
    return PaddedPairs(source, previous, target)


@pytest.mark.parametrize("name", [SUMMARIES, VERSES, PAIRED])
def test_hugging_faces_model_does_the_same_work(name: str) -> None:
    pytest.importorskip("transformers")
    from lightseq_fairseq.cli.benchmark.train.hugging_face import SequenceToSequence

    case = Case.parse(name)
    network = SequenceToSequence(case, WORDS).eval()
    learned = sum(p.numel() for p in network.parameters() if p.requires_grad)
    assert learned == parameters(case.shape, WORDS)
    source, previous, target = batch = pair_batch()
    eager = type(network.model)(network.model.config)
    eager.set_attn_implementation("eager")
    eager.load_state_dict(network.model.state_dict())
    with torch.no_grad():
        logits = eager.eval()(
            source, attention_mask=source.ne(PAD).long(), decoder_input_ids=previous
        ).logits
        expected = functional.cross_entropy(
            logits.flatten(0, 1), target.flatten(), ignore_index=PAD, reduction="sum",
            label_smoothing=SMOOTHING,
        )  # fmt: skip
        torch.testing.assert_close(network(*batch), expected)


def compare(name: str, device: str, dtype: torch.dtype, replays: bool) -> None:
    from lightseq_fairseq.cli.benchmark.train.hugging_face import SequenceToSequence

    torch.manual_seed(1)
    network = SequenceToSequence(Case.parse(name), WORDS).to(device, dtype).eval()
    gradients = compiled.Gradients(network, sizes_are_symbols=True, replays=replays)
    batch = pair_batch()
    for given in (batch, PaddedPairs(*(side[:2] for side in batch)), batch):
        loss, *found = (x.clone() for x in gradients(given))
        total = network(*(side.to(device) for side in given))
        mean = total / given.target.ne(PAD).sum()
        tolerances: dict[str, Any] = {"rtol": 0.05, "atol": 2e-3} if device == "cuda" else {}
        torch.testing.assert_close(loss, total, **tolerances)
        expected = torch.autograd.grad(mean, gradients.parameters)
        torch.testing.assert_close(found, list(expected), **tolerances)
        del total, mean  # the next capture would meet autograd's nodes of these parameters


def test_gradients_are_of_the_mean_loss() -> None:
    pytest.importorskip("transformers")
    compare(VERSES, "cpu", torch.float32, replays=True)


@pytest.mark.gpu
@pytest.mark.parametrize("replays", [False, True])
@pytest.mark.parametrize("name", [SUMMARIES, VERSES, PAIRED])
def test_graph_computes_what_the_model_computes(name: str, replays: bool) -> None:
    pytest.importorskip("transformers")
    compare(name, "cuda", torch.bfloat16, replays)


# --- the command


def test_verses_once(corpora: Path, tmp_path: Path) -> None:
    systems = ("ours", "fairseq_no_cudnn")
    _, found = bench_once(
        tmp_path, VERSES, systems, "--seq2seq", corpora, "--pairs", PAIRS, "--vocabulary", WORDS,
    )  # fmt: skip
    assert set(found) == set(systems)
    for row in found.values():
        assert 100 < row["target_tokens"] < 300 and row["sentences_per_s"] > 0  # of four pairs
        assert row["real_tokens_per_s"] > row["tokens_per_s"]
    assert found["ours"]["target_tokens"] == found["fairseq_no_cudnn"]["target_tokens"]
    logs = {
        x: (tmp_path / "logs" / f"{VERSES.replace('/', '-')}-{x}-1.log").read_text()
        for x in systems
    }
    assert "step: without CUDA graphs, without padding" in logs["ours"]
    (count,) = re.findall(r"num. shared model params: ([\d,]+)", logs["fairseq_no_cudnn"])
    assert int(count.replace(",", "")) == parameters(SHAPES["nllb_tiny"], WORDS)
    # The same loss, in bits a token.
    first = [float(re.findall(r'"loss": "([\d.]+)"', log)[0]) for log in logs.values()]
    assert first[0] == pytest.approx(first[1], abs=0.1)
