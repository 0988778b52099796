"""With ``early_stopping`` our search has the hypotheses and scores of ``generate`` of transformers:
all of them, also at the longest length and with a forced language."""

from __future__ import annotations

import itertools
import random
import re
from argparse import Namespace
from pathlib import Path
from typing import Any, NamedTuple

import helpers.cli_runs as cli_runs
import helpers.hugging_face as hugging_face
import pytest
import torch
from fairseq.data.data_utils import collate_tokens
from helpers.hugging_face import KINDS, WORDS
from helpers.parity import PAD
from helpers.searches import counted_searches, tokens_of  # noqa: F401  (a fixture)
from torch import Tensor

from lightseq_fairseq import Translator
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.plugins.generator import LSSequenceGenerator

SENTENCES, MOST, EOS, BEAM = 24, 13, 2, 4
VALUES = (True, False, "never")


class Both(NamedTuple):
    """A model of `transformers`, its import, and their rows of words.

    number_of: row of ours -> theirs. language: the row of ours of a forced language.
    """

    theirs: Any
    ours: Any
    task: Any
    number_of: dict[int, int]
    language: int | None
    folder: Path
    data: Path


@pytest.fixture(
    scope="module",
    params=[("bart", 0.15, 2.0), ("marian", 0.15, 3.0), ("nllb", 0.3, 3.0)],
    ids=lambda param: param[0],
)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    name, noise, of_eos = request.param  # so that hypotheses end at many lengths
    kind, folder = KINDS[name], tmp_path_factory.mktemp(name)
    theirs = hugging_face.make(kind, folder / "theirs")
    hugging_face.stir(theirs, noise, of_eos)
    theirs.save_pretrained(folder / "theirs")
    cli_runs.succeed("import_", folder / "theirs", folder / "imported")
    data = hugging_face.data(kind, folder / "imported", folder / "text")
    ours, task = hugging_face.ours(folder / "imported/model.pt", data)
    ours.generation = {}  # the tests choose the rule
    number_of = {hugging_face.row(kind, task, word): n for n, word in enumerate(kind.words)}
    language = task.source_dictionary.indices.get("__zul_Latn__")
    return Both(theirs, ours, task, number_of, language, folder / "imported", data)


def sources(both: Both) -> Tensor:
    draw = random.Random(7)
    rows = [
        [*(both.task.source_dictionary.index(word) for word in draw.choices(WORDS, k=length)), EOS]
        for length in (draw.randint(1, 14) for _ in range(SENTENCES))
    ]
    found: Tensor = collate_tokens([torch.tensor(row) for row in rows], PAD)
    return found


def found_by(both: Both, early_stopping: Any, **options: Any) -> list[list[Any]]:
    args = Namespace(beam=BEAM, max_len_a=0, max_len_b=MOST, no_repeat_ngram_size=2, **options)
    generator = both.task.build_generator([both.ours], args)
    assert isinstance(generator, LSSequenceGenerator)
    if early_stopping is not None:
        generator.stop_early(early_stopping)
    tokens = sources(both)
    forced = None if both.language is None else torch.full((SENTENCES, 1), both.language)
    sample = {"net_input": {"src_tokens": tokens, "src_lengths": tokens.ne(PAD).sum(1)}}
    found: list[list[Any]] = generator.generate([both.ours], sample, prefix_tokens=forced)
    return found


@pytest.mark.parametrize("lenpen, min_len", [(-0.5, 0), (0.0, 6), (0.5, 0), (1.0, 0), (2.0, 6)])
@pytest.mark.parametrize("early_stopping", VALUES)
def test_hypotheses_are_those_of_transformers(
    both: Both, early_stopping: Any, lenpen: float, min_len: int, searches: list[Any]
) -> None:
    found = found_by(both, early_stopping, lenpen=lenpen, min_len=min_len)
    tokens, config = sources(both), both.theirs.config
    # Row by row: the default is theirs, and pads are not words.
    theirs = tokens.clone().apply_(lambda row: both.number_of[row])
    expected = both.theirs.generate(
        theirs, attention_mask=tokens.ne(PAD).long(), num_beams=BEAM, num_return_sequences=BEAM,
        max_new_tokens=MOST + 1, min_new_tokens=min_len, length_penalty=lenpen,
        no_repeat_ngram_size=2,
        early_stopping=early_stopping, bad_words_ids=[[config.pad_token_id]],
        forced_eos_token_id=config.eos_token_id, do_sample=False,
        forced_bos_token_id=None if both.language is None else both.number_of[both.language],
        output_scores=True, return_dict_in_generate=True,
    )  # fmt: skip
    assert len(searches) == 1
    lines = [_until(config.eos_token_id, line) for line in expected.sequences[:, 1:].tolist()]
    mine = [h for each in found for h in each]
    assert [[both.number_of[row] for row in h["tokens"].tolist()] for h in mine] == lines
    scores = torch.stack([h["score"] for h in mine])
    torch.testing.assert_close(scores, expected.sequences_scores, rtol=1e-4, atol=1e-5)
    lengths = {len(line) for line in lines}
    assert len(lengths) > 3 or (lenpen >= 1 and early_stopping is not True)
    assert min(lengths) > min_len


def test_values_differ(both: Both) -> None:
    """Each rule finds other hypotheses, and None is fairseq's search."""
    found = {}
    for early_stopping in (None, *VALUES):
        hypotheses = [found_by(both, early_stopping, lenpen=lenpen) for lenpen in (0.5, 1.0)]
        found[str(early_stopping)] = [tokens_of(each) for each in hypotheses]
    assert all(one != other for one, other in itertools.combinations(found.values(), 2))
    args = Namespace(beam=BEAM, max_len_a=0, max_len_b=MOST, lenpen=1.0)
    assert both.task.build_generator([both.ours], args).early_stopping is None


def _until(eos: int, line: list[int]) -> list[int]:
    return line[: line.index(eos) + 1]


def test_translator(both: Both, searches: list[Any]) -> None:
    """An option of one call and of all."""
    words = [" ".join(WORDS[:5]), " ".join(WORDS[7:9])]
    options = {"source_lang": "a", "target_lang": "b", "task": "translation", "max_len_b": MOST}
    options |= {"max_len_a": 0, "tokenizer": "space", "device": "cpu", "data": both.data, "beam": 5}
    model = Translator.from_pretrained(both.folder / "model.pt", early_stopping="never", **options)
    model.translate(words)
    model.translate(words, early_stopping=False)
    model.translate(words, early_stopping=None)
    Translator.from_pretrained(both.folder / "model.pt", **options).translate(words)
    # Without the option, the import's: transformers' default.
    assert [each.early_stopping for each in searches] == ["never", False, False, False]
    few = "early_stopping needs the fast beam search of one translation model"
    for sentence, refused in {
        'early_stopping is soon: use True, False or "never"': {"early_stopping": "soon"},
        few: {"sampling": True, "nbest": 5},
        f"{few}:": {"diverse_beam_groups": 5, "diverse_beam_strength": 0.5},
        f"{few}: ": {"match_source_len": True},
        f"{few}: remove": {"replace_unk": True},
    }.items():
        with pytest.raises(UserError, match=re.escape(sentence)):
            model.translate(words, **refused)
