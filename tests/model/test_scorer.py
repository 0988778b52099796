"""Scores of text by ``ls_transformer_lm`` equal those of fairseq's ``SequenceScorer``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helpers.parity as parity
import pytest
import torch
from fairseq.sequence_scorer import SequenceScorer
from helpers.parity import LS, NATIVE, PAD, TEXT, command_line

from lightseq_fairseq.plugins import scorer
from lightseq_fairseq.plugins.language_model import LSTransformerLanguageModel

SMALL = {**TEXT, "decoder_layers": 2, "decoder_attention_heads": 2, "dropout": 0.1}
BREAKS = ["none", "complete", "complete_doc", "eos"]


def models(text: Path, **flags: Any) -> tuple[Any, Any, Any]:
    """The task, and our model and fairseq's with the same weights in float64."""
    (task, ours, _), (_, native, _) = (
        parity.build(parity.parse(command_line(text, systems, **{**SMALL, **flags})))
        for systems in (LS, NATIVE)
    )
    return task, ours.double(), native.double()


def batches(task: Any, context: int) -> list[dict[str, Any]]:
    return list(
        task.eval_lm_dataloader(
            task.dataset("train"), max_tokens=64, context_window=context, num_workers=0
        )
    )


def both(task: Any, ours: Any, native: Any, context: int, most: int) -> Any:
    """Pairs of results for a block: the packed one, and fairseq's."""
    judge = SequenceScorer(task.target_dictionary, most)
    for mine, theirs in zip(batches(task, context), batches(task, context), strict=True):
        packed = scorer.generate(SequenceScorer.generate, judge, [ours], mine)
        with parity.native_in_float64():
            expected = judge.generate([native], theirs)
        for (a,), (b,) in zip(packed, expected, strict=True):
            yield a, b


def assert_same(a: Any, b: Any) -> None:
    assert a.keys() == b.keys()
    assert a["attention"] is b["attention"] is None
    assert torch.equal(a["tokens"], b["tokens"])
    assert a["positional_scores"].dtype == torch.float64
    torch.testing.assert_close(a["positional_scores"], b["positional_scores"], rtol=0, atol=1e-9)
    torch.testing.assert_close(a["score"], b["score"], rtol=0, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("context", [0, 5])
@pytest.mark.parametrize("bos", [None, True], ids=["eos-first", "bos-first"])
@pytest.mark.parametrize("mode", BREAKS)
def test_scores_are_fairseqs(text: Path, mode: str, bos: bool | None, context: int) -> None:
    flags = {"sample_break_mode": mode, "add_bos_token": bos, "max_target_positions": 64}
    count = 0
    for a, b in both(*models(text, **flags), context, 0):
        assert_same(a, b)
        count += len(a["tokens"])
    assert count > 200


@pytest.mark.parametrize("most", [1, 7, 1000])
def test_softmax_batch(text: Path, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits are computed for only so many rows at a time, and for no row of the context."""
    rows: list[int] = []
    task, ours, native = models(text, max_target_positions=64)
    output = ours.decoder.output_layer
    monkeypatch.setattr(ours.decoder, "output_layer", lambda x: (rows.append(len(x)), output(x))[1])
    tokens = 0
    for a, b in both(task, ours, native, 5, most):
        assert_same(a, b)
        tokens += len(a["tokens"])
    assert max(rows) <= most
    assert sum(rows) == tokens


def test_what_is_not_one_model_of_ours_is_fairseqs(text: Path) -> None:
    task, ours, native = models(text)
    judge = SequenceScorer(task.target_dictionary)

    class Heir(LSTransformerLanguageModel):
        pass

    heir = Heir(ours.decoder)
    for several in ([native], [ours, native], [heir]):
        (sample, *_) = batches(task, 0)
        with parity.native_in_float64():
            found = scorer.generate(SequenceScorer.generate, judge, several, sample)
            expected = judge.generate(several, sample)
        for (a,), (b,) in zip(found, expected, strict=True):
            assert torch.equal(a["positional_scores"], b["positional_scores"])


def test_pads_alone(text: Path) -> None:
    task, ours, _ = models(text)
    (sample, *_) = batches(task, 0)
    sample["target"] = torch.full_like(sample["target"], PAD)
    judge = SequenceScorer(task.target_dictionary)
    for (result,) in scorer.generate(SequenceScorer.generate, judge, [ours], sample):
        assert len(result["tokens"]) == len(result["positional_scores"]) == 0
