"""A classifier of new texts: lightseq-interactive and RobertaModel.classify, by one mechanism."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import helpers.roberta_runs as roberta
import pytest
import torch
from helpers.cli_runs import run, succeed
from helpers.golden import matches, refusals

from lightseq_fairseq import RobertaModel
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.generation.texts import Prediction

BART = (
    "--arch ls_bart_base --encoder-layers 1 --decoder-layers 1 --encoder-embed-dim 16 "
    "--encoder-ffn-embed-dim 16 --encoder-attention-heads 2 --decoder-attention-heads 2 "
    "--task sentence_prediction --max-positions 32 --lr 1e-2 --warmup-updates 1 --max-epoch 2 "
    "--no-epoch-checkpoints --cpu"
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> roberta.Data:
    return roberta.binarise(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def runs(data: roberta.Data, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders "pretrained", "classes", "numbers" and "bart" of runs."""
    place = tmp_path_factory.mktemp("runs")
    first = roberta.pretrain(data, place / "pretrained")
    roberta.tune(data.classes, first, place / "classes", *roberta.BY_ACCURACY)
    roberta.tune(data.numbers, first, place / "numbers", *roberta.BY_NUMBERS)
    words = [*BART.split(), *roberta.BY_ACCURACY, "--save-dir", place / "bart"]
    succeed("train", data.classes, *words)
    return place


@pytest.fixture
def pairs(data: roberta.Data, tmp_path: Path) -> Path:
    """The pairs of the split valid as a text file."""
    texts = [
        (data.text.parent / f"{x}.valid").read_text().splitlines() for x in ("first", "second")
    ]
    path = tmp_path / "pairs"
    path.write_text("".join(f"{one}\t{other}\n" for one, other in zip(*texts, strict=True)))
    return path


def answered(*words: Any) -> list[list[str]]:
    """The columns of the D- lines."""
    said = succeed("interactive", *words, "--cpu")
    found = [line.split("\t") for line in said.splitlines() if line.startswith("D-")]
    assert [each[0] for each in found] == [f"D-{number}" for number in range(len(found))]
    return [each[1:] for each in found]


def validated(data: Path, path: Path) -> dict[str, float]:
    """The sums of what lightseq-validate measures."""
    with roberta.logged() as found:
        succeed("validate", data, "--path", path / "checkpoint_best.pt", "--cpu")
    return {name: sum(each[name] for each in found) for name in found[0]}


@pytest.mark.parametrize("kind", ["classes", "bart"])
def test_the_command_predicts_what_validation_measures(
    data: roberta.Data, runs: Path, pairs: Path, kind: str
) -> None:
    expected = validated(data.classes, runs / kind)
    labels = (data.text.parent / "label.valid").read_text().split()
    words = [data.classes, "--path", runs / kind, "--input", pairs]
    found = [(float(probability), label) for probability, label in answered(*words)]
    assert (
        sum(label == right for (_, label), right in zip(found, labels, strict=True))
        == (expected["ncorrect"])
    )
    of_right = [p if label == right else 1 - p for (p, label), right in zip(found, labels)]
    loss = -torch.tensor(of_right).log().sum().item()
    assert loss == pytest.approx(expected["loss"], rel=1e-4)
    assert answered(*words, "--native") == answered(*words, "--buffer-size", "5")


def test_numbers(data: roberta.Data, runs: Path, pairs: Path, tmp_path: Path) -> None:
    lines = (data.numbers / "label" / "valid.label").read_text().split()
    words = [data.numbers, "--path", runs / "numbers", "--input", pairs, "--buffer-size", "4"]
    found = answered(*words, "--output-text", tmp_path / "texts")
    loss = sum((float(one) - float(right)) ** 2 for (one,), right in zip(found, lines, strict=True))
    expected = validated(data.numbers, runs / "numbers")["loss"]
    assert loss == pytest.approx(expected, rel=1e-4)
    assert [*zip((tmp_path / "texts").read_text().split())] == [*map(tuple, found)]
    model = RobertaModel.from_pretrained(runs / "numbers")
    number = model.classify(("a b", "c"))
    assert isinstance(number, float) and model.training
    model.task.cfg.num_classes = 2
    model.register_classification_head(roberta.HEAD, num_classes=2)
    assert list(map(type, model.classify(("a b", "c")))) == [float, float]


def test_lines_of_the_output(data: roberta.Data, runs: Path, pairs: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    words = [data.classes, "--path", runs / "classes", "--input", pairs, "--output-text", texts]
    own = "--cpu --nbest 9 --remove-bpe --max-tokens 30 --task sentence_prediction"
    result = run("interactive", *words, *own.split())
    lines = [line for line in result.output.splitlines() if re.match("[A-Z]-", line)]
    assert lines[::2] == [f"S-{n}\t{x}" for n, x in enumerate(pairs.read_text().splitlines())]
    assert texts.read_text().split() == [line.split("\t")[2] for line in lines[1::2]]
    notes = re.findall("note: (.*)", result.stderr)
    unread = [
        f"--{x} has no effect: a classifier does not use it." for x in ("nbest", "remove-bpe")
    ]
    assert notes == unread
    pairs.write_text("? ?\ta\n")
    told = run("interactive", *words, "--cpu").stderr
    assert told.endswith("add --bpe subword_nmt --bpe-codes FILE.\n")


def test_python_answers_as_the_command(data: roberta.Data, runs: Path, pairs: Path) -> None:
    model = RobertaModel.from_pretrained(runs / "classes")
    texts = [tuple(line.split("\t")) for line in pairs.read_text().splitlines()]
    found = model.classify(texts, batch_size=5)
    words = [data.classes, "--path", runs / "classes", "--input", pairs]
    assert [[f"{x.probability:.6g}", x.label] for x in found] == answered(*words)
    one = model.classify(texts[3])
    assert isinstance(one, Prediction) and one.label in ("yes", "no") and model.training
    assert one.probability == pytest.approx(found[3].probability, abs=1e-6)
    letters = RobertaModel.from_pretrained(runs / "classes", bpe="characters").eval()
    assert letters.classify(("ab", "c")) == pytest.approx(model.classify(("a b", "c")))
    tokens = letters.encode("ab", "c")
    expected = letters.predict(roberta.HEAD, tokens).exp().max().item()
    assert letters.classify(("ab", "c")).probability == pytest.approx(expected, abs=1e-6)
    with pytest.warns(UserWarning, match="1 of the 3 source tokens is not in the dictionary"):
        model.classify(("a ?", "b"))


def test_a_tokenizer_splits_texts_before_their_subwords(runs: Path) -> None:
    """fairseq's interface ignores it."""
    plain = RobertaModel.from_pretrained(runs / "classes", bpe="characters")
    both = RobertaModel.from_pretrained(runs / "classes", bpe="characters", tokenizer="space")
    expected = plain.encode("a b").tolist()
    assert both.encode("a   b").tolist() == expected != plain.encode("a   b").tolist()


@pytest.mark.parametrize("size", ["1", "9"])
def test_an_empty_line_has_an_empty_answer(
    data: roberta.Data, runs: Path, tmp_path: Path, size: str
) -> None:
    """The answers stay in the order of the lines."""
    text, answers = tmp_path / "text", tmp_path / "answers"
    text.write_text("\na\tb\n \nc\td\n\n")
    words = [data.classes, "--path", runs / "classes", "--input", text, "--cpu"]
    result = run("interactive", *words, "--buffer-size", size, "--output-text", answers)
    assert result.exit_code == 0, (result.output, result.exception)
    model = RobertaModel.from_pretrained(runs / "classes")
    first, second = (x.label for x in model.classify([("\ta", "b\xa0"), ("c", "d")]))
    assert answers.read_text().split("\n") == ["", first, "", second, "", ""]
    assert [line for line in result.stdout.splitlines() if "-2" in line] == ["S-2\t", "D-2\t"]


def test_single_texts(data: roberta.Data, runs: Path, tmp_path: Path) -> None:
    single = shutil.copytree(data.classes, tmp_path / "single")
    shutil.rmtree(single / "input1")
    model = RobertaModel.from_pretrained(runs / "classes", single).eval()
    text = tmp_path / "text"
    text.write_text("a b c\nd\n")
    found = answered(single, "--path", runs / "classes", "--input", text)
    assert found == [[f"{x.probability:.6g}", x.label] for x in model.classify(["a b c", "d"])]
    expected = model.predict(roberta.HEAD, [0, *model.task.dictionary.encode_line("d"), 2][:3])
    assert model.classify("d").probability == pytest.approx(expected.exp().max().item(), abs=1e-6)
    with pytest.raises(UserError, match=r"0 .* has 2 texts, but .* reads one: pass texts, not tup"):
        model.classify(("a", "b"))
    # Dictionaries alone do not tell.
    for file in [*(single / "input0").glob("*.idx")]:
        file.unlink()
    both = RobertaModel.from_pretrained(runs / "classes", single)
    assert both.classify("d") == pytest.approx(model.classify("d"))
    text.write_text("d\na\tb\n")
    found = answered(single, "--path", runs / "classes", "--input", text)
    assert found == [[f"{x.probability:.6g}", x.label] for x in both.classify(["d", ("a", "b")])]


def test_several_models_answer_with_the_mean(data: roberta.Data, runs: Path, pairs: Path) -> None:
    paths = [runs / "numbers" / f"checkpoint_{x}.pt" for x in ("best", "last")]
    state = torch.load(paths[1], weights_only=False)
    state["model"][f"classification_heads.{roberta.HEAD}.out_proj.bias"] += 1
    torch.save(state, paths[1])
    one, other, mean = (
        [float(number) for (number,) in answered(data.numbers, "--path", path, "--input", pairs)]
        for path in (*paths, f"{paths[0]}:{paths[1]}")
    )
    assert [(x + y) / 2 for x, y in zip(one, other)] == pytest.approx(mean, abs=1e-5)
    assert one != pytest.approx(other, abs=0.1)


def test_long_texts_are_cut_as_in_training(data: roberta.Data, runs: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text(" ".join("ab" * 20) + "\tc\n")
    words = [data.classes, "--path", runs / "classes", "--input", text, "--cpu"]
    (found,) = answered(*words, "--shorten-method", "truncate")
    model = RobertaModel.from_pretrained(runs / "classes", shorten_method="truncate")
    tokens = [0, *model.task.dictionary.encode_line(" ".join("ab" * 20)).tolist()][:32]
    expected = model.eval().predict(roberta.HEAD, tokens).exp().max().item()
    assert float(found[0]) == pytest.approx(expected, abs=1e-5)
    assert model.classify((" ".join("ab" * 20), "c")).probability == pytest.approx(expected)


@pytest.mark.parametrize(("line", "sentence"), refusals(__file__, "test_classify"))
def test_wrong_input_of_the_command(
    data: roberta.Data, runs: Path, tmp_path: Path, line: str, sentence: str
) -> None:
    words, _, text = line.partition(" < ")
    (tmp_path / "text").write_text(text.replace("TAB", "\t").replace(r"\n", "\n") + "\n")
    for name in ("no_label", "single"):
        shutil.copytree(data.classes, tmp_path / name)
    shutil.rmtree(tmp_path / "no_label" / "label")
    shutil.rmtree(tmp_path / "single" / "input1")
    words = words.format(data=data.text.parent, runs=runs, here=tmp_path)
    command, *others = words.split()
    given = ("--input", tmp_path / "text") if command == "interactive" else ()
    result = run(command, *others, "--cpu", *given)
    assert result.exit_code == 2, (result.output, result.exception)
    assert matches(result.stderr.splitlines()[-1], f"lightseq-{command}: error: {sentence}")


def test_wrong_input_of_python(runs: Path) -> None:
    model = RobertaModel.from_pretrained(runs / "classes")
    assert model.classify([]) == []
    for sentences, sentence in (
        (
            "a b",
            r"Sentence 0 \(counted from 0\) has 1 text, but the model reads pairs: pass tuples",
        ),
        ([("a", "b"), ("a", "b", "c")], r"Sentence 1 .* has 3 texts, but the model reads pairs"),
        ([("a", "b"), ("a", " ")], r"Sentence 1 .* is empty: remove it"),
        ([("a", 5)], r"Sentence 0 .* is of type int: pass text"),
        (None, r"Sentence 0 .* is of type NoneType: pass text"),
        (("a " * 40, "b"), r"has 45 tokens, .* at most 32: .* or set shorten_method to truncate"),
    ):
        with pytest.raises(UserError, match=sentence):
            model.classify(sentences)
    with pytest.raises(UserError, match=r"This model has no labels: .* task sentence_prediction"):
        RobertaModel.from_pretrained(runs / "pretrained").classify("a")
