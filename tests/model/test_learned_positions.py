"""Sentences beyond a learned table of positions are refused before an op reads them.

On a GPU, the ops do not check positions. Here on a CPU they do, with a ValueError of their own,
which must not be reached.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import helpers.cli_runs as cli_runs
import helpers.parity as parity
import pytest
import torch
from fairseq import utils
from fairseq.sequence_generator import SequenceGenerator
from helpers.parity import LS, MASKED, PAD, TEXT, command_line

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.ops import embedding
from lightseq_fairseq.plugins.encoder_graphs import EncoderGraphs
from lightseq_fairseq.plugins.generator import LSSequenceGenerator

POSITIONS = 8
LEARNED = {"encoder_learned_pos": True, "decoder_learned_pos": True,
           "max_source_positions": POSITIONS, "max_target_positions": POSITIONS}  # fmt: skip
REFUSED = rf"A sentence has \d+ tokens, but the model has only {POSITIONS} learned positions"


@pytest.fixture(autouse=True)
def rows_read() -> Iterator[None]:
    """Fails if an op is called with a position beyond its table."""
    check = embedding.EmbeddingFwd.check

    def checked(self: Any, op: str) -> None:
        if self.positions is not None and self.positions.numel():
            assert int(self.positions.max()) < len(self.position_weight)
        check(self, op)

    with mock.patch.object(embedding.EmbeddingFwd, "check", checked):
        yield


@pytest.fixture(scope="module")
def translation(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    corpus = parity.write_corpus(tmp_path_factory.mktemp("corpus"))
    task, model, _ = parity.build(parity.parse(command_line(corpus, LS, **LEARNED)))
    return task, model.eval()


def tokens(length: int, pads: int = 0) -> torch.Tensor:
    """One sentence of words and its eos, with pads on the left."""
    return torch.tensor([[PAD] * pads + list(range(4, 3 + length)) + [2]])


def test_both_sides_of_translation(translation: tuple[Any, Any]) -> None:
    _, model = translation
    fits, long = tokens(POSITIONS), tokens(POSITIONS + 1)
    model(fits, None, fits)
    for source, target in ((long, fits), (fits, long)):
        with pytest.raises(UserError, match=REFUSED):
            model(source, None, target)
    padded = tokens(POSITIONS, pads=5)  # pads need no positions
    torch.testing.assert_close(model(padded, None, fits)[0], model(fits, None, fits)[0])


@pytest.mark.parametrize("cls", [LSSequenceGenerator, SequenceGenerator])
def test_searches(translation: tuple[Any, Any], cls: Any) -> None:
    """Our search, and fairseq's, which calls our decoder token by token."""
    task, model = translation
    words, sample = task.target_dictionary, {"net_input": {"src_tokens": tokens(POSITIONS, 3)}}
    sample["net_input"]["src_lengths"] = torch.tensor([POSITIONS])
    generator = cls([model], words, beam_size=2, max_len_b=200)
    (found,) = generator.generate([model], sample)  # stops at the last position
    assert all(len(hypothesis["tokens"]) <= POSITIONS for hypothesis in found)
    beyond = cls([model], words, beam_size=2, max_len_b=200, max_len=50, min_len=20)
    with pytest.raises(UserError, match=REFUSED.replace(str(POSITIONS), r"\d+")):
        beyond.generate([model], sample)
    sample["net_input"] = {"src_tokens": tokens(9), "src_lengths": torch.tensor([9])}
    with pytest.raises(UserError, match=REFUSED):
        generator.generate([model], sample)


def test_prompts_and_blocks_of_a_language_model(text: Path) -> None:
    flags = {**TEXT, "decoder_learned_pos": True, "max_target_positions": POSITIONS,
             "tokens_per_sample": POSITIONS}  # fmt: skip
    task, model, _ = parity.build(parity.parse(command_line(text, LS, **flags)))
    model.eval()
    with pytest.raises(UserError, match=REFUSED):
        model(tokens(POSITIONS + 1))
    prompts = tokens(30)[:, :-1]
    for cls in (LSSequenceGenerator, SequenceGenerator):
        generator = cls([model], task.target_dictionary, beam_size=2, max_len_b=200)
        sample = {"net_input": {"src_tokens": prompts, "src_lengths": torch.tensor([29])}}
        try:
            (found,) = generator.generate([model], sample, prefix_tokens=prompts)
        except UserError as error:
            assert re.match(REFUSED, str(error))
        else:
            assert len(found[0]["tokens"]) <= POSITIONS


def test_features_of_roberta(text: Path) -> None:
    flags = {**MASKED, "max_positions": POSITIONS, "tokens_per_sample": POSITIONS}
    _, model, _ = parity.build(parity.parse(command_line(text, LS, **flags)))
    model.eval()
    encoder = model.encoder.sentence_encoder
    model(tokens(POSITIONS))
    for features in (model, lambda x: EncoderGraphs().features(encoder, x)):
        with pytest.raises(UserError, match=REFUSED):
            features(tokens(POSITIONS + 1))


def test_the_captured_step(tmp_path: Path) -> None:
    """If a task does not leave long sentences out."""
    corpus = parity.write_corpus(tmp_path)
    unlimited = mock.patch.object(utils, "resolve_max_positions", lambda *limits: (100, 100))
    with unlimited, pytest.raises(UserError, match=REFUSED):
        parity.train(command_line(corpus, LS, **LEARNED), 4)


@pytest.mark.parametrize("native", [[], ["--native"]], ids=["ours", "native"])
def test_multilingual_translation_leaves_long_sentences_out(
    tmp_path: Path, native: list[str]
) -> None:
    """With data loading workers. fairseq loses the target's limit: see resolve_max_positions."""
    corpus = parity.write_corpus(tmp_path / "raw")
    words = [
        *(str(corpus), "--dataset-impl", "raw", "--task", "multilingual_translation"),
        *("--lang-pairs", "src-tgt,tgt-src", "--arch", "ls_multilingual_transformer"),
        *("--optimizer", "ls_adam", "--criterion", "ls_label_smoothed_cross_entropy"),
        *("--lr", "0.001", "--encoder-learned-pos", "--decoder-learned-pos", *cli_runs.SMALL),
        *("--decoder-embed-dim", "16", "--max-target-positions", str(POSITIONS)),
        *("--num-workers", "1", "--max-epoch", "1", "--max-update", "100", *native),
    ]
    skip = "--skip-invalid-size-inputs-valid-test"
    result = cli_runs.run("train", *words, "--save-dir", tmp_path / "run")
    assert result.exit_code == 2, (result.output, result.exception)
    assert re.search(rf"and {POSITIONS} in src-tgt.*{skip}", result.stderr.splitlines()[-1])
    cli_runs.succeed("train", *words, skip, "--save-dir", tmp_path / "run")
