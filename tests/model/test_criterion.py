"""Our criteria compute what fairseq's compute, with our models and with fairseq's."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import helpers.parity as parity
import pytest
import torch
from fairseq.logging import metrics
from helpers.parity import LS, NATIVE, PAD, Systems, command_line

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.plugins.criterion import MaskedLmLoss

MODELS = pytest.mark.parametrize("arch", ["ls", "native"])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return parity.write_corpus(tmp_path_factory.mktemp("corpus"), pairs=16)


def build(corpus: Path, arch: str, criterion: str, /, **flags: Any) -> tuple[Any, Any, Any]:
    """The model and the criterion in float64, and a batch; the same seed gives the same model."""
    systems = Systems(arch, "native", criterion)
    task, model, loss = parity.build(parity.parse(command_line(corpus, systems, **flags)))
    dataset = task.dataset("train")
    return model.double(), loss, dataset.collater([dataset[i] for i in range(12)])


UNSMOOTHED = {"criterion": "cross_entropy", "label_smoothing": None}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no-smoothing": {"label_smoothing": 0.0},
    "accuracy": {"report_accuracy": True},
    "ignore-prefix": {"ignore_prefix_size": 2, "report_accuracy": True},
    "ignore-everything": {"ignore_prefix_size": 50, "report_accuracy": True},
    "sentence-avg": {"sentence_avg": True},
    "cross-entropy": UNSMOOTHED,
    "cross-entropy-sentence-avg": {**UNSMOOTHED, "sentence_avg": True},
}


@MODELS
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("flags", SETTINGS.values(), ids=SETTINGS)
def test_values(corpus: Path, arch: str, flags: dict[str, Any], training: bool) -> None:
    model, ours, sample = build(corpus, arch, "ls", **flags)
    native = build(corpus, "native", "native", **flags)[1]
    reference = build(corpus, "native", "native", **flags)[0]
    with parity.native_in_float64():
        loss, size, output = ours(model.train(training), sample)
        expected_loss, expected_size, expected = native(reference.train(training), sample)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=1e-12)
    assert size == expected_size
    assert output.keys() == expected.keys()
    for name, value in expected.items():
        assert float(output[name]) == pytest.approx(float(value), rel=1e-12), name
    if "ignore_prefix_size" not in flags:
        assert float(loss) > 0
    elif flags["ignore_prefix_size"] == 50:
        assert float(loss) == 0 and float(output["total"]) == 0


@MODELS
def test_sample_sizes(corpus: Path, arch: str) -> None:
    def size(**flags: Any) -> Any:
        model, criterion, sample = build(corpus, arch, "ls", **flags)
        tokens, sentences = int(sample["target"].ne(PAD).sum()), len(sample["target"])
        return criterion(model, sample)[1], tokens, sentences

    found, tokens, sentences = size()
    assert found == tokens
    assert size(ignore_prefix_size=2)[0] == tokens
    assert size(sentence_avg=True)[0] == sentences


@MODELS
@pytest.mark.parametrize("prefix", [0, 2])
def test_every_targets_loss(corpus: Path, arch: str, prefix: int) -> None:
    model, ours, sample = build(corpus, arch, "ls", ignore_prefix_size=prefix)
    reference, native, _ = build(corpus, "native", "native", ignore_prefix_size=prefix)
    assert sample["target"].eq(PAD).any()
    with parity.native_in_float64():
        loss, _, output = ours(model, sample, reduce=False)
        expected_loss, _, expected = native(reference, sample, reduce=False)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=1e-12)
    for name in ("loss", "nll_loss"):
        torch.testing.assert_close(output[name], expected[name], rtol=1e-12, atol=1e-12)


@MODELS
def test_every_targets_cross_entropy(corpus: Path, arch: str) -> None:
    model, ours, sample = build(corpus, arch, "ls", **UNSMOOTHED)
    reference, native, _ = build(corpus, "native", "native", **UNSMOOTHED)
    with parity.native_in_float64():
        found, expected = (
            c(m, sample, reduce=False)[0] for c, m in ((ours, model), (native, reference))
        )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@MODELS
@pytest.mark.parametrize("kind", [{"ignore_prefix_size": 1}, UNSMOOTHED])
def test_gradients(corpus: Path, arch: str, kind: dict[str, Any]) -> None:
    flags = {**kind, "share_all_embeddings": True}
    model, ours, sample = build(corpus, arch, "ls", **flags)
    reference, native, _ = build(corpus, "native", "native", **flags)
    with parity.native_in_float64():
        (3 * ours(model, sample)[0]).backward()
        (3 * native(reference, sample)[0]).backward()
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-9, atol=1e-11)


def test_one_token(corpus: Path) -> None:
    # Source and target consist only of the end of the sentence.
    results = []
    for systems in (LS, NATIVE):
        model, criterion, sample = build(corpus, systems.arch, systems.criterion)
        end = torch.tensor([[2]])
        inputs = {"src_tokens": end, "src_lengths": torch.tensor([1]), "prev_output_tokens": end}
        sample = {**sample, "net_input": inputs, "target": end, "ntokens": 1}
        with parity.native_in_float64():
            results.append(criterion(model, sample)[0])
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"sentence_avg": True},
        {"report_accuracy": True},
        UNSMOOTHED,
        {**UNSMOOTHED, "sentence_avg": True},
    ],
)
def test_what_is_logged(corpus: Path, flags: dict[str, Any]) -> None:
    # The outputs of two ranks, reduced as the trainer does.
    logged = []
    for systems in (LS, NATIVE):
        model, criterion, sample = build(corpus, systems.arch, systems.criterion, **flags)
        with parity.native_in_float64():
            outputs = [criterion(model, sample)[2] for _ in range(2)]
        with metrics.aggregate(new_root=True) as found:
            criterion.reduce_metrics(outputs)
        logged.append(dict(found.get_smoothed_values()))
        assert criterion.logging_outputs_can_be_summed()
    assert logged[0] == logged[1]
    assert ("accuracy" in logged[0]) == ("report_accuracy" in flags)


def test_an_update_without_masked_tokens_leaves_the_average_alone() -> None:
    # fairseq divides by zero, so the loss of the whole epoch is nan.
    counts = {"ntokens": 3, "nsentences": 1}
    nothing = {"loss": torch.tensor(0.0), "sample_size": torch.tensor(0), **counts}
    masked = {"loss": torch.tensor(4.0), "sample_size": torch.tensor(2), **counts}
    with metrics.aggregate(new_root=True) as epoch:
        for outputs in ([nothing], [masked, nothing], [nothing, nothing]):
            with metrics.aggregate() as update:
                MaskedLmLoss.reduce_metrics(outputs)
            assert update.get_smoothed_values()["loss"] >= 0
    assert epoch.get_smoothed_values()["loss"] == round(4 / 2 / math.log(2), 3)


@pytest.mark.parametrize("kind", [{}, UNSMOOTHED])
def test_adaptive_softmax_is_refused(corpus: Path, kind: dict[str, Any]) -> None:
    flags = {"adaptive_softmax_cutoff": "20,40", **kind}
    model, criterion, sample = build(corpus, "native", "ls", **flags)
    with pytest.raises(UserError, match="not compute all: use --criterion adaptive_loss"):
        criterion(model, sample)


@pytest.mark.parametrize("kind", [{}, UNSMOOTHED])
def test_resumed_runs_take_it_for_fairseqs(corpus: Path, kind: dict[str, Any]) -> None:
    # Checkpoints hold the name of the class, and resuming compares it.
    criteria = [type(build(corpus, "ls", whose, **kind)[1]) for whose in ("ls", "native")]
    assert criteria[0] is not criteria[1]
    assert criteria[0].__name__ == criteria[1].__name__
