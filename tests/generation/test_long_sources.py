"""Documents of up to 1024 tokens: our search finds the words that fairseq's finds, in float32."""

from __future__ import annotations

from typing import Any

import helpers.parity as parity
import numpy as np
import pytest
import torch
from fairseq.dataclass.configs import GenerationConfig
from helpers.parity import LS, NATIVE, PAD, command_line
from helpers.searches import assert_close, counted_searches, tokens_of  # noqa: F401

from lightseq_fairseq.cli.benchmark.train import corpus

DOCUMENTS, BATCH, WORDS = 200, 25, 300
# fairseq's examples/bart/README.summarization.md; summaries are shorter here.
SEARCH: dict[str, Any] = {
    "beam": 4, "lenpen": 2.0, "max_len_b": 24, "min_len": 10, "no_repeat_ngram_size": 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Any]:
    """The task, our BART and fairseq's, with the same random weights."""
    data = parity.write_corpus(tmp_path_factory.mktemp("corpus"))
    words = "".join(f"w{number} 1\n" for number in range(WORDS - corpus.SPECIALS))
    for path in data.glob("dict.*.txt"):
        path.write_text(words)
    flags = {"arch": "bart_base", "max_source_positions": 1024, "max_target_positions": 1024}
    (task, ours, _), (_, native, _) = (
        parity.build(parity.parse(command_line(data, systems, **flags))) for systems in (LS, NATIVE)
    )
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    native.load_state_dict(ours.state_dict())
    return task, ours.eval(), native.eval()


def documents() -> list[dict[str, Any]]:
    rng = np.random.default_rng(7)
    lengths, _ = corpus.lengths(DOCUMENTS, rng, corpus.SUMMARIES)
    lengths[0] = 1024
    order = np.argsort(lengths)
    batches = []
    for start in range(0, DOCUMENTS, BATCH):
        rows = lengths[order[start : start + BATCH]]
        tokens = torch.full((BATCH, int(rows.max())), PAD)
        for row, length in zip(tokens, rows, strict=True):
            row[-length:] = torch.from_numpy(rng.integers(4, WORDS, length))
            row[-1] = corpus.EOS
        inputs = {"src_tokens": tokens, "src_lengths": torch.from_numpy(rows).long()}
        batches.append({"net_input": inputs, "id": torch.from_numpy(order[start : start + BATCH])})
    return batches


def test_the_words_of_fairseq(models: tuple[Any, Any, Any], searches: list[Any]) -> None:
    task, *both = models
    found: list[list[Any]] = []
    for model in both:
        generator = task.build_generator([model], GenerationConfig(**SEARCH))
        found.append(
            [
                each
                for batch in documents()
                for each in task.inference_step(generator, [model], batch)
            ]
        )
    assert len(searches) == DOCUMENTS // BATCH and len(found[0]) == DOCUMENTS
    assert tokens_of(found[0]) == tokens_of(found[1])
    assert_close(*found)
    lengths = {len(each[0]["tokens"]) for each in found[0]}
    assert min(lengths) >= 11 and max(lengths) <= 25
    different = {tuple(each[0]["tokens"].tolist()) for each in found[0]}
    assert len(different) > DOCUMENTS // 2
