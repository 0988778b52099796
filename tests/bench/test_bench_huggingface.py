"""``lightseq-bench huggingface``: cases, sentences, rows, and runs of all kinds on a CPU."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from helpers.bench_runs import bench_forked
from helpers.golden import matches, refusals

from lightseq_fairseq.cli import bench
from lightseq_fairseq.cli.benchmark.huggingface import rows
from lightseq_fairseq.cli.benchmark.huggingface.cases import (
    BLOCK,
    SYSTEMS,
    Case,
    in_blocks,
    why_not,
)
from lightseq_fairseq.cli.benchmark.huggingface.models import built, configuration
from lightseq_fairseq.cli.benchmark.huggingface.samples import (
    IGNORED,
    Sentences,
    collator,
    count_of,
    dataset,
    resized,
    shapes,
)

pytest.importorskip("transformers")


def bench_huggingface(*words: object) -> Result:
    return CliRunner().invoke(bench.main, ["huggingface", *map(str, words)])


# --- cases


def test_cases() -> None:
    for name, case in (
        ("roberta_base/sentences32", ("roberta_base", "sentences", 32, 0, True)),
        ("bert_large/sentences32/p0", ("bert_large", "sentences", 32, 0, False)),
        ("xlmr_base/tokens32", ("xlmr_base", "tokens", 32, 0, True)),
        ("roberta_base/pairs32", ("roberta_base", "pairs", 32, 0, True)),
        ("bert_base/mlm512x64", ("bert_base", "mlm", 64, 512, True)),
        ("roberta_base/b256", ("roberta_base", "b", 256, 0, True)),
        ("modernbert_base/mlm1024x32", ("modernbert_base", "mlm", 32, 1024, True)),
        ("gpt2/1024x32/p0", ("gpt2", "text", 32, 1024, False)),
        ("bart_large/summaries16", ("bart_large", "summaries", 16, 0, True)),
        ("marian_big/128/p0", ("marian_big", "translation", 128, 0, False)),
        ("nllb_600m/64", ("nllb_600m", "verses", 64, 0, True)),
        ("vit_b/256", ("vit_b", "images", 256, 0, True)),
    ):
        assert Case.parse(name) == case and str(Case.parse(name)) == name
    assert [in_blocks(updates) for updates in (1, BLOCK, BLOCK + 1)] == [BLOCK, BLOCK, 2 * BLOCK]


def test_shapes() -> None:
    """Longest first: torch compiles only the first one for its length alone."""
    for system, case, found in (
        ("transformers", "roberta_base/sentences32", []),
        ("transformers_graphs", "roberta_base/sentences32", [(128,)]),
        ("transformers_graphs", "roberta_tiny/sentences4", [(128,), (64,)]),
        ("transformers_compiled", "roberta_base/pairs32", [(128,), (64,)]),
        ("transformers_graphs_grouped", "roberta_base/sentences32", [(128,), (96,), (64,), (32,)]),
        ("transformers_graphs", "bert_base/mlm512x64", [(512,)]),
    ):
        assert shapes(Case.parse(case), system) == found
    for case, longest, count in (
        ("bart_large/summaries16", (1024, 192), 10), ("marian_big/128", (256, 256), 10)
    ):  # fmt: skip
        found = shapes(Case.parse(case), "transformers_graphs")
        assert found[0] == longest and len(found) <= count


def test_compiled_systems_need_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpu in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda found=gpu: found)
        able = [name for name in SYSTEMS if not why_not(name, Case.parse("roberta_tiny/pairs4"))]
        compiled = [name for name, how in SYSTEMS.items() if how.mode is not None]
        assert len(compiled) == 4
        assert able == [name for name in SYSTEMS if gpu or name not in compiled]


@pytest.mark.parametrize(("words", "sentence"), refusals(__file__, "test_bench_huggingface"))
def test_refusals(words: str, sentence: str) -> None:
    done = bench_huggingface(*words.split())
    assert done.exit_code == 2
    assert matches(done.stderr.splitlines()[-1], f"lightseq-bench: error: {sentence}")


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = bench_huggingface()
    assert done.exit_code == 2 and "roberta_base/sentences32 needs a GPU" in done.stderr


@pytest.mark.parametrize(
    ("case", "millions"),
    [
        ("bert_base/mlm512x1", 110), ("bert_large/sentences1", 335),
        ("roberta_base/sentences1", 125), ("roberta_large/b1", 354), ("xlmr_base/tokens1", 277),
        ("modernbert_base/mlm1024x1", 150), ("gpt2/1024x1", 124),
        ("bart_large/summaries1", 406), ("marian_big/1", 238), ("nllb_600m/1", 615),
        ("vit_b/1", 87), ("vit_l/1", 304),
    ],
)  # fmt: skip
def test_known_sizes(case: str, millions: int) -> None:
    """The models have the published numbers of parameters."""
    with torch.device("meta"):
        made = built(Case.parse(case))
    assert round(sum(p.numel() for p in made.parameters()) / 1e6) == millions


def test_dropout() -> None:
    """The rates are the published ones, which differ, and 0 with /p0."""

    def rates(case: str) -> list[float]:
        config = configuration(Case.parse(case))
        names = "dropout", "attention_dropout", "activation_dropout"
        return [getattr(config, name) for name in names]

    assert rates("bart_large/summaries1") == [0.1, 0.1, 0.1]
    assert rates("marian_big/1") == [0.1, 0.0, 0.0] and rates("nllb_600m/1") == [0.1, 0.1, 0.0]
    assert rates("bart_large/summaries1/p0") == [0.0, 0.0, 0.0]
    config = configuration(Case.parse("gpt2/1024x1"))
    assert config.attn_pdrop == config.resid_pdrop == config.embd_pdrop == 0.1


# --- samples


def test_sentences() -> None:
    for name, shortest, longest, mean in (
        ("roberta_base/sentences32", 10, 128, 69), ("roberta_base/pairs32", 10, 70, 40)
    ):  # fmt: skip
        case = Case.parse(name)
        data, again = Sentences(case, 5000), Sentences(case, 5000)
        lengths = np.diff(data.starts)
        assert (lengths.min(), lengths.max()) == (shortest, longest)
        assert abs(lengths.mean() - mean) < 1.5 and len(data) == 5000
        assert (data.tokens == again.tokens).all() and (data.classes == again.classes).all()
        config = configuration(case)
        assert config.pad_token_id < data.tokens.min()
        assert data.tokens.max() < config.vocab_size


def test_pairs() -> None:
    for name, longest, means in (
        ("bart_tiny/summaries4", (1024, 140), (700, 62)), ("marian_tiny/4", (200, 200), (28, 29)),
        ("nllb_tiny/4", (200, 200), (45, 46)),
    ):  # fmt: skip
        case = Case.parse(name)
        lengths = np.diff(Sentences(case, 5000).starts).reshape(-1, 2)
        assert (lengths.max(0) <= longest).all() and np.allclose(lengths.mean(0), means, rtol=0.05)
        data, pad = Sentences(case, 4), configuration(case).pad_token_id
        batch = collator(case, 32)([data[i] for i in range(4)])
        ids, labels, mask = (batch[n] for n in ("input_ids", "labels", "attention_mask"))
        sides = np.diff(data.starts).reshape(-1, 2)
        for side, of_side in zip((ids, labels), sides.T):
            assert side.shape[1] == -(-of_side.max() // 32) * 32
        assert mask.sum(1).tolist() == sides[:, 0].tolist()
        assert int(count_of(batch, case)) == sides.sum()
        assert ids[mask == 0].eq(pad).all() and ids[mask == 1].ne(pad).all()
        assert labels.ne(IGNORED).sum(1).tolist() == sides[:, 1].tolist()
        assert labels[labels.ne(IGNORED)].ne(pad).all()
        other = resized(batch, (48, 8), pad)
        assert other["input_ids"].shape == other["attention_mask"].shape == (4, 48)
        assert other["labels"].shape == (4, 8)


def test_images() -> None:
    case = Case.parse("vit_tiny/4")
    data = dataset(case, 300)
    batch = collator(case, 1)([data[i] for i in (0, 1, 256, 299)])
    assert batch["pixel_values"].shape == (4, 3, 32, 32) and count_of(batch, case) == 4
    assert torch.equal(batch["pixel_values"][0], batch["pixel_values"][2])
    assert batch["labels"].dtype == torch.int64 and len(data) == 300
    assert len({data[i]["labels"] for i in range(300)}) > 200
    assert resized(batch, (0,), 0).keys() == batch.keys()


def test_batches() -> None:
    case = Case.parse("roberta_tiny/tokens4")
    data = Sentences(case, 4)
    lengths = np.diff(data.starts)
    for multiple in (1, 64):
        batch = collator(case, multiple)([data[i] for i in range(4)])
        ids, labels, mask = (batch[n] for n in ("input_ids", "labels", "attention_mask"))
        assert ids.shape[1] == -(-lengths.max() // multiple) * multiple
        assert (
            mask.sum(1).tolist() == lengths.tolist() and int(count_of(batch, case)) == lengths.sum()
        )
        assert ids[mask == 0].eq(1).all() and labels[mask == 0].eq(IGNORED).all()
        assert labels[mask == 1].ge(0).all()
        for length in (32, 128):
            other = resized(batch, (length,), 1)
            both = min(length, ids.shape[1])
            for key, filling in (("input_ids", 1), ("labels", IGNORED), ("attention_mask", 0)):
                assert other[key].shape == (4, length)
                assert torch.equal(other[key][:, :both], batch[key][:, :both])
                assert other[key][:, both:].eq(filling).all()


def test_masked_blocks() -> None:
    case = Case.parse("roberta_tiny/mlm512x8")
    data = Sentences(case, 8)
    batch = collator(case, 64)([data[i] for i in range(8)])
    assert set(batch) == {"input_ids", "labels"} and count_of(batch, case) == 8 * 512
    is_masked = batch["labels"] != IGNORED
    assert 0.13 < is_masked.float().mean() < 0.17
    assert batch["input_ids"][is_masked].eq(data.mask).all()
    whole = torch.where(is_masked, batch["labels"], batch["input_ids"])
    assert whole.flatten().tolist() == data.tokens.tolist()


# --- rows


def test_row() -> None:
    case = Case.parse("roberta_base/sentences32")
    run = {
        "block_batches": 20, "block_s": [0.2, 0.1], "block_tokens": [400, 300], "peak_gib": 3.456,
        "allocated_gib": 2.0, "train_to_first_s": 3.0, "start_to_first_s": 5.0, "job_s": 9.0,
        "losses": [0.71234, 0.7], "fallbacks": 0,
    }  # fmt: skip
    slow = {**run, "block_s": [0.4, 0.3], "peak_gib": 3.0, "train_to_first_s": 4.0}
    row = rows.row(case, "ours", [run, slow], {"commit": "abc"})
    assert row == {
        "commit": "abc", "case": "roberta_base/sentences32", "system": "ours",
        "real_tokens_per_s": 1500, "sentences_per_s": 2560.0, "ms_per_step": 12.5, "ms_p20": 10.0,
        "ms_p80": 15.0, "train_to_first_s": 3.5, "start_to_first_s": 5.0, "job_s": 9.0,
        "peak_gib": 3.46, "allocated_gib": 2.0, "fallbacks": 0, "losses": [0.7123, 0.7],
        "blocks": 4, "rounds": 2,
    }  # fmt: skip
    theirs = {**row, "system": "transformers_graphs", "real_tokens_per_s": 500}
    lines = [line.split() for line in rows.table([theirs, row])]
    assert lines[2][:3] == ["ours", "1500", "3.00"]
    assert lines[3][:3] == ["transformers_graphs", "500", "1.00"]
    assert lines[-2] == ["ours", "0.7123", "0.7000"]
    assert rows.table([row])[2].split()[:3] == ["ours", "1500", "2560.0"]
    images = rows.row(Case.parse("vit_b/256"), "ours", [run], {})
    assert images["images_per_s"] == 2500.0 and "sentences_per_s" not in images
    assert rows.table([images])[0].split()[:4] == ["vit_b/256", "images/s", "ratio", "ms"]


# --- runs


@pytest.mark.parametrize(
    "case",
    [
        "roberta_tiny/sentences2/p0", "roberta_tiny/tokens2/p0", "roberta_tiny/mlm32x2/p0",
        "gpt2_tiny/32x2/p0", "bart_tiny/summaries2/p0", "marian_tiny/2/p0", "nllb_tiny/2/p0",
        "vit_tiny/2", "modernbert_tiny/mlm32x2",
    ],
)  # fmt: skip
def test_prepared_shapes_change_no_loss(case: str, tmp_path: Path) -> None:
    """Also: all heads train, and our Trainer's captured step is used."""
    from lightseq_fairseq.cli.benchmark.huggingface import training

    def losses(system: str, *prepared: tuple[int, int]) -> list[float]:
        parsed = Case.parse(case)
        given = argparse.Namespace(
            case=parsed, system=system, warm_up=1, updates=2, workers=0, cpu=True
        )
        trainer, clock = training.trainer_of(given, tmp_path)
        trainer.to_prepare = [shape[: 1 + parsed.work.has_target] for shape in prepared]
        trainer.train()
        assert clock.first > 0 and len(trainer.counts) == 3
        return [float(loss) for loss in trainer.losses]

    theirs = losses("transformers")
    assert len(set(theirs)) == 3 and losses("transformers", (128, 64), (64, 8)) == theirs
    assert losses("ours_trainer") == pytest.approx(theirs, abs=1e-2)


def test_everything_once(tmp_path: Path) -> None:
    trained, encoded = "roberta_tiny/sentences4", "roberta_tiny/b4"
    done = bench_forked(
        "huggingface", "--case", f"{trained},{encoded}", "--systems", "ours_trainer,ours",
        "--updates", 2, "--warm-up", 3, "--rounds", 1, "--workers", 0,
        "--output", tmp_path / "rows.json", "--logs", tmp_path / "logs",
    )  # fmt: skip
    assert "roberta_tiny/b4 without ours_trainer: features need no Trainer." in done.stderr
    found = json.loads((tmp_path / "rows.json").read_text())
    names = [(row["case"], row["system"]) for row in found]
    assert names == [(trained, "ours_trainer"), (trained, "ours"), (encoded, "ours")]
    for row in found:
        assert f"\n{row['system']} " in done.stdout and row["fallbacks"] == 0
        assert row["gpu"] == "none" and len(row["commit"]) == 40 and row["peak_gib"] > 0.1
        assert row["ms_p20"] <= row["ms_per_step"] <= row["ms_p80"]
        assert row["sentences_per_s"] > 0 and row["real_tokens_per_s"] > 10
    for row in found[:2]:
        assert (row["blocks"], row["warm_up"], len(row["losses"])) == (1, 3, 10)
        assert 0 < row["train_to_first_s"] < row["start_to_first_s"] < row["job_s"]


def test_pairs_and_images_once(tmp_path: Path) -> None:
    done = bench_forked(
        "huggingface", "--case", "marian_tiny/4,vit_tiny/4", "--systems", "ours_trainer",
        "--updates", 2, "--warm-up", 0, "--rounds", 1, "--workers", 0,
        "--output", tmp_path / "rows.json", "--logs", tmp_path / "logs",
    )  # fmt: skip
    pairs, images = json.loads((tmp_path / "rows.json").read_text())
    assert pairs["fallbacks"] == images["fallbacks"] == 0
    assert pairs["real_tokens_per_s"] > 20 * pairs["sentences_per_s"] > 0
    assert images["images_per_s"] > 0 and f" {images['images_per_s']} " in done.stdout
    assert max(pairs["losses"]) < 7 and max(images["losses"]) < 8
