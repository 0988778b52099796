"""A folder of an import translates at once, by the command and from Python, with the search of its
generation_config.json: the words are those of ``generate``."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import helpers.hugging_face as hugging_face
import pytest
import torch
from helpers.cli_runs import succeed
from helpers.hugging_face import KINDS, MBART50, WORDS
from torch import nn

from lightseq_fairseq import Translator
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.checkpoints import matching, vocabulary
from lightseq_fairseq.checkpoints.vocabulary import read_json

SEARCH = {
    "num_beams": 4, "length_penalty": 0.7, "no_repeat_ngram_size": 2, "min_length": 5,
    "max_length": 15, "early_stopping": False,
}  # fmt: skip
# Kind, source and target language, how the dictionary writes them, noise of the weights, and what
# makes </s> likely.
FOLDERS = {
    "bart": (KINDS["bart"], None, None, "", 0.15, 2.0),
    "marian": (KINDS["marian"], None, None, "", 0.15, 3.0),
    "nllb": (KINDS["nllb"], "eng_Latn", "zul_Latn", "__{}__", 0.3, 3.0),
    "m2m": (KINDS["m2m"], "en", "zu", "__{}__", 0.3, 3.0),
    "mbart50": (MBART50, "en_XX", "ro_RO", "[{}]", 0.15, 2.0),
}


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("name", FOLDERS)
def test_words_are_those_of_generate(name: str, greedy: bool, tmp_path: Path) -> None:
    kind, source, target, marks, noise, of_eos = FOLDERS[name]
    theirs = hugging_face.make(kind, tmp_path / "theirs")
    hugging_face.stir(theirs, noise, of_eos)
    eos = theirs.config.eos_token_id
    with torch.no_grad():
        for parameter_name, parameter in theirs.named_parameters():
            if "encoder_attn" in parameter_name:  # so that the source matters
                parameter *= 4
    config = read_json(tmp_path / "theirs/config.json")
    known = vocabulary.of_folder(
        tmp_path / "theirs", matching.of_config(config), "source", config["vocab_size"]
    )
    ids = {word: n for word, n in zip(known.words, known.ids, strict=True) if n is not None}
    # A pad is never a word of ours.
    of_beams = ("num_beams", "length_penalty", "early_stopping")
    search: dict[str, Any] = {k: v for k, v in SEARCH.items() if not greedy or k not in of_beams}
    search["bad_words_ids"] = [[theirs.config.pad_token_id]]
    if source is None:
        search["forced_eos_token_id"] = eos
    if name == "bart":
        search["forced_bos_token_id"] = ids["<s>"]
    if target is not None:
        search["forced_bos_token_id"] = ids[marks.format(target)]
    for key, value in search.items():
        setattr(theirs.generation_config, key, value)
    theirs.save_pretrained(tmp_path / "theirs")
    printed = succeed("import_", tmp_path / "theirs", tmp_path / "imported")
    assert ("--lang-tok-style mbart" in printed) == (name == "mbart50")

    draw = random.Random(3)
    lines = [draw.choices(WORDS, k=draw.randint(1, 10)) for _ in range(12)]
    first = ["<s>"] if name == "bart" else [marks.format(source)] if source else []
    rows = [torch.tensor([ids[word] for word in (*first, *line, "</s>")]) for line in lines]
    tokens = nn.utils.rnn.pad_sequence(rows, True, theirs.config.pad_token_id)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], True)
    found_there = theirs.generate(tokens, attention_mask=mask)[:, 1:].tolist()
    expected = [line[: line.index(eos)] if eos in line else line for line in found_there]
    assert min(map(len, expected)) >= 4 and len({*map(tuple, expected)}) > 3

    # -t of languages is in generation_config.json.
    options = {"source_lang": source, "tokenizer": "space", "device": "cpu"}
    model = Translator.from_pretrained(tmp_path / "imported", **options)
    texts = [" ".join([*(first if name == "bart" else []), *line]) for line in lines]
    found = model.translate(texts)
    mine = [[known.ids[row] for row in each.hypotheses[0].ids][:-1] for each in found]
    pairs = list(zip(mine, expected, strict=True))
    if source and not greedy:  # without a forced </s>, transformers ends the longest by any word
        pairs = [pair for pair in pairs if max(map(len, pair)) < SEARCH["max_length"] - 1]
    assert len(pairs) > 3 and all(one == other for one, other in pairs), pairs
    (tmp_path / "text").write_text("".join(f"{text}\n" for text in texts))
    flags = ["-s", source] if source else []
    output = succeed(
        "interactive", tmp_path / "imported", "--path", tmp_path / "imported", "--cpu",
        "--tokenizer", "space", "--input", tmp_path / "text", "--buffer-size", "12", *flags,
    )  # fmt: skip
    said = [line.split("\t")[2] for line in output.splitlines() if line.startswith("H-")]
    assert said == [each.text for each in found]


def test_a_user_may_choose_other_settings(tmp_path: Path) -> None:
    hugging_face.make(KINDS["bart"], tmp_path / "theirs")
    path = tmp_path / "theirs/generation_config.json"
    path.write_text(json.dumps({**SEARCH, "forced_bos_token_id": 0, "early_stopping": "never"}))
    succeed("import_", tmp_path / "theirs", tmp_path / "imported")
    saved = torch.load(tmp_path / "imported/model.pt", weights_only=False)["args"].generation
    assert saved == {
        "options": {
            "beam": 4, "lenpen": 0.7, "no_repeat_ngram_size": 2, "min_len": 4, "max_len_a": 0,
            "max_len_b": 14,
        },
        "early_stopping": "never", "target_first": 0,
    }  # fmt: skip
    model = Translator.from_pretrained(
        tmp_path / "imported", tokenizer="space", device="cpu", lenpen=2.0
    )
    assert (model.configuration.generation.beam, model.configuration.generation.lenpen) == (4, 2.0)
    model.translate("w1 w2", sampling=True, nbest=4)  # for which the rule is not defined
    with pytest.raises(UserError, match="has 17 tokens, but the model takes at most 16:"):
        model.translate(" ".join(["w1"] * 16))
