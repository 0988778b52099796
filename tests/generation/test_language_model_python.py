"""LanguageModel continues prompts as lightseq-interactive does; bad input ends in one sentence."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import helpers.counting as counting
import helpers.digits as digits
import helpers.searches as searches
import numpy as np
import pytest
import torch
from helpers.cli_runs import succeed
from helpers.counting import Toy

# isort: split
from fairseq.models.transformer_lm import TransformerLanguageModel

import lightseq_fairseq
from lightseq_fairseq import LanguageModel, Translator
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.plugins.language_model import LSTransformerLanguageModel
from lightseq_fairseq.python.language_model import Hypothesis

LINES = ["three four five", "one", "", "eleven six eight", "zero two four six"]


@pytest.fixture(scope="module", name="toy")
def trained_toy() -> Toy:
    return counting.toy()


@pytest.fixture(scope="module", name="model")
def loaded(toy: Toy) -> LanguageModel:
    return LanguageModel.from_pretrained(toy.path, toy.folder, cpu=True, max_len_b=20)


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("--beam 1", {"beam": 1}),
        ("--nbest 3 --lenpen 0.6", {"nbest": 3, "lenpen": 0.6}),
        ("--buffer-size 9 --batch-size 9 --no-repeat-ngram-size 2",
         {"batch_size": 9, "no_repeat_ngram_size": 2}),
        ("--buffer-size 9 --max-tokens 20 --max-len-a 1 --max-len-b 4",
         {"max_tokens": 20, "batch_size": None, "max_len_a": 1, "max_len_b": 4}),
    ],
)  # fmt: skip
def test_the_same_as_the_command(
    toy: Toy, model: LanguageModel, tmp_path: Path, words: str, options: dict[str, Any]
) -> None:
    printed = command(toy, tmp_path, words)
    assert printed == lines(model.generate(LINES, **{"batch_size": 1, **options}))


def test_samples_of_a_seed(toy: Toy, tmp_path: Path) -> None:
    words = "--buffer-size 9 --batch-size 9 --sampling --sampling-topk 3 --beam 2 --nbest 2"
    options = {"sampling": True, "sampling_topk": 3, "beam": 2, "nbest": 2, "max_len_b": 20}
    model = LanguageModel.from_pretrained(toy.path, toy.folder, cpu=True, seed=3, **options)
    assert model.generate([]) == []
    first = model.generate(LINES)
    assert lines(first) == command(toy, tmp_path, f"{words} --seed 3")
    assert model.generate(LINES) != first
    assert model.generate(LINES, seed=5) == model.generate(LINES, seed=5) != first


def command(toy: Toy, place: Path, words: str) -> list[list[str]]:
    """The fields of the H- and P- lines that lightseq-interactive prints."""
    (place / "lines").write_text("".join(f"{line}\n" for line in LINES))
    text = succeed(
        "interactive", toy.folder, "--path", toy.path, "--cpu",
        "--input", place / "lines", *f"--max-len-b 20 {words}".split(),
    )  # fmt: skip
    return [line.split("\t") for line in text.splitlines() if line[:2] in ("H-", "P-")]


def lines(found: list[list[Hypothesis]]) -> list[list[str]]:
    """The same fields from the results of LanguageModel."""
    assert len(found) == len(LINES)
    return [
        line
        for number, hypotheses in enumerate(found)
        for each in hypotheses
        for line in (
            [f"H-{number}", str(each.score), each.words],
            [f"P-{number}", " ".join(f"{score:.4f}" for score in each.token_scores)],
        )
    ]


def test_numbers_and_texts(toy: Toy, model: LanguageModel) -> None:
    texts = model.generate(LINES, nbest=2)
    numbers = [model.encode(line) for line in LINES]
    known = [line.replace("eleven", "<unk>") for line in LINES]
    assert [model.decode(ids) for ids in numbers] == [" ".join(line.split()) for line in known]
    assert numbers[0] == [7, 8, 9] and numbers[2] == [] and numbers[3][0] == 3
    assert model.generate(numbers, nbest=2) == texts
    assert model.generate((np.array(each) for each in numbers), nbest=2) == texts
    tensors = [torch.tensor(each, dtype=torch.int64) for each in numbers]
    assert model.generate(tensors, nbest=2) == texts
    alone = model.generate(numbers[0], nbest=2)
    assert model.generate(LINES[0], nbest=2) == alone
    assert [each.ids for each in alone] == [each.ids for each in texts[0]]
    dictionary = toy.task.source_dictionary
    for each in alone:
        assert each.ids[:3] == (7, 8, 9) and each.ids[-1] == dictionary.eos()
        assert each.tokens == tuple(dictionary[number] for number in each.ids)
        assert len(each.token_scores) == len(each.ids)
        assert each.score == pytest.approx(sum(each.token_scores) / len(each.ids), abs=1e-5)
        assert each.text == " ".join(each.tokens[:-1])


def test_models_of_fairseq_and_ours(toy: Toy, model: LanguageModel) -> None:
    native = LanguageModel.from_pretrained(
        toy.path, toy.folder, native=True, cpu=True, max_len_b=20
    )
    kinds = [type(each._loaded.models[0]) for each in (model, native)]
    assert kinds == [LSTransformerLanguageModel, TransformerLanguageModel]
    for lists in zip(model.generate(LINES), native.generate(LINES), strict=True):
        ours, theirs = (
            [searches.Hypothesis(h.score, [*h.ids], [*h.token_scores]) for h in found]
            for found in lists
        )
        assert not searches.difference(ours, theirs, 1e-4)


def test_settings_of_the_checkpoint(toy: Toy, tmp_path: Path) -> None:
    """The data folder and --add-bos-token are taken from the checkpoint."""
    shutil.copytree(toy.folder, tmp_path / "data")
    flags = {**counting.FLAGS, "add_bos_token": True, "max_update": 1, "no_save": None}
    words = counting.command_line(tmp_path / "data", counting.LS, **flags)
    succeed("train", *words, "--save-dir", tmp_path / "run", "--no-epoch-checkpoints")
    model = LanguageModel.from_pretrained(tmp_path / "run", cpu=True)
    assert model.configuration.task.add_bos_token
    assert model.generate("one", beam=1)[0].tokens[0] == "one"


def test_it_is_at_the_door() -> None:
    assert lightseq_fairseq.LanguageModel is LanguageModel
    assert "LanguageModel" in dir(lightseq_fairseq)


@pytest.mark.parametrize(
    ("prompts", "options", "said"),
    [
        ([[7, 99]], {}, r"Prompt 0 .* the number 99, which is not a word .* 0 to 14, without 1"),
        ([[7], [-1]], {}, "Prompt 1 .* the number -1"),
        ([1], {}, "the number 1, which"),
        (5, {}, "Prompt 0 .* is not a text, and contains other"),
        (["one", 5], {}, "Prompt 1 .* is not a text, and contains other"),
        (["one", [1.5]], {}, "Prompt 1 .* is not a text, and contains other"),
        (["one", ["two"]], {}, "Prompt 1 .* is not a text, and contains other"),
        ("one " * 50, {}, "Sentence 0 .* has 51 tokens, but the model takes at most 40"),
        ("one", {"path": "x"}, "path is not an option of LanguageModel"),
        ("one", {"input": "x"}, r"pass the prompts to generate\(\)"),
        (
            "one",
            {"cpu": False},
            r"cpu is an option of LanguageModel.from_pretrained\(\), not of gen",
        ),
        ("one", {"print_alignment": True}, "because it has no source to align with: remove it."),
        ("one", {"replace_unk": True}, "because it has no source to copy words from: remove"),
        ("one", {"early_stopping": True}, "early_stopping needs .* of one translation model"),
        ("one", {"min_len": 300}, r"^The shortest result \(min_len, by default 1"),
    ],
)
def test_bad_input(model: LanguageModel, prompts: Any, options: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        model.generate(prompts, **options)


def test_checkpoints_of_other_tasks(toy: Toy) -> None:
    translation = digits.toy()
    with pytest.raises(UserError, match="contains a model of the task translation: use the check"):
        LanguageModel.from_pretrained(translation.paths[-1], translation.folder)
    with pytest.raises(UserError, match="contains a model of the task language_modeling: use the"):
        Translator.from_pretrained(toy.path, toy.folder)


def test_long_prompts_are_left_out(model: LanguageModel) -> None:
    found = model.generate(["one " * 50, "one"], skip_invalid_size_inputs_valid_test=True)
    assert found[0] == [] and found[1] == [model.generate("one")[0]]
