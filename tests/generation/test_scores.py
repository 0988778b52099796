"""All scores of a translation agree: lightseq-generate's last line, fairseq's line above it,
lightseq-score of the output and --eval-bleu; with unknown words, and for languages without
spaces."""

from __future__ import annotations

import random
import re
import shlex
from pathlib import Path

import pytest
import sacrebleu
from helpers.cli_runs import SMALL, run, succeed

from lightseq_fairseq.fairseq_compat import scoring

CHARACTERS = "今天气很好我们去公园他在学校里习中文这本书非常有意思吗"
SEARCH = shlex.split("--cpu --beam 5 --num-workers 0 --max-tokens 400")
LIMITS = shlex.split("--max-source-positions 40 --max-target-positions 40")


def trained(folder: Path, target: str, space: str) -> Path:
    """A folder with data from English to ``target``, and a checkpoint of three updates.

    space: joins the characters of a target sentence. Every fourth character is not in the
    dictionary.
    """
    source = random.Random(1)
    prefixes: list[str | Path] = []
    for split, count in (("train", 60), ("valid", 10), ("test", 10)):
        lines = [source.choices(CHARACTERS, k=source.randint(6, 12)) for _ in range(count)]
        if split != "train":
            lines = [[c if i % 4 else "龘" for i, c in enumerate(line)] for line in lines]
        for language, side in (("en", " "), (target, space)):
            text = "".join(side.join(line) + "\n" for line in lines)
            (folder / f"{split}.{language}").write_text(text, encoding="utf-8")
        prefixes += [f"--{split}pref", folder / split]
    data = folder / "data"
    succeed("preprocess", "-s", "en", "-t", target, "--destdir", data, *prefixes)
    succeed("train", data, "--arch", "ls_transformer_tiny", *SMALL, *LIMITS, "--save-dir", folder)
    return folder


def generated(place: Path, *words: str | Path) -> str:
    out = succeed("generate", place / "data", "--path", place / "checkpoint_last.pt", *SEARCH,
                  *words)  # fmt: skip
    (place / "out").write_text(out, encoding="utf-8")
    return out


def of_kind(text: str, kind: str) -> list[str]:
    found = re.findall(rf"^{kind}-(\d+)\t(?:.*\t)?(.*)$", text, re.MULTILINE)
    return [line for _, line in sorted(found, key=lambda item: int(item[0]))]


def scores(text: str) -> list[str]:
    """The scores of the lines "Generate ...", without names and signatures."""
    lines = re.findall(r"^Generate .*?(?:BLEU|chrF2)\S* = (.*)$", text, re.MULTILINE)
    return [re.sub(r" \(references.*", "", line) for line in lines]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("words"), "de", " ")


@pytest.fixture(scope="module")
def chinese(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("zh"), "zh_CN", "@@ ")


@pytest.mark.parametrize("tokenizer", [None, "char", "intl"])
def test_unknown_words_are_never_right_and_count_one_word(
    words: Path, tokenizer: str | None
) -> None:
    """All translations consist of <unk>, and a quarter of the references' words are <<unk>>."""
    chosen = [] if tokenizer is None else ["--sacrebleu-tokenizer", tokenizer]
    text = generated(words, "--unkpen", "-99", "--scoring", "sacrebleu", *chosen)
    hypotheses, targets = of_kind(text, "D"), of_kind(text, "T")
    assert {w for line in hypotheses for w in line.split()} == {"<unk>"}
    assert "<<unk>>" in targets[0]
    fairseqs, ours = scores(text)
    assert fairseqs.startswith("0.00 0.0/0.0/0.0/0.0 ") and fairseqs == ours
    count = [sum(len(line.split()) for line in side) for side in (hypotheses, targets)]
    assert f"hyp_len = {count[0]} ref_len = {count[1]})" in ours
    (words / "targets").write_text("".join(f"{line}\n" for line in targets), encoding="utf-8")
    chosen = [] if tokenizer is None else ["--tokenize", tokenizer]
    again = succeed("score", "--sys", words / "out", "-r", words / "targets", *chosen)
    assert again.endswith(f" = {ours}\n")


@pytest.mark.parametrize("flag", ["--compound-split", "--tokenize=13a", "--tokenize=char"])
def test_unknown_words_of_a_reference_file(tmp_path: Path, flag: str) -> None:
    """<unk> is an unknown word on both sides, as fairseq-score reads it."""
    for name, text in (("sys", "a b c d\n<unk> e f\n"), ("ref", "a b c d\n<unk> e f\n")):
        (tmp_path / name).write_text(text)
    printed = succeed("score", "--sys", tmp_path / "sys", "-r", tmp_path / "ref", flag)
    assert " 85.7/80.0/66.7/100.0 " in printed and "hyp_len = 7 ref_len = 7)" in printed


def test_unknown_words_in_chrf(words: Path) -> None:
    text = generated(words, "--unkpen", "-99", "--scoring", "chrf")
    assert scores(text)[0] == "0.00"


def test_words_that_are_right_still_count(words: Path) -> None:
    text = generated(words, "--scoring", "sacrebleu")
    fairseqs, ours = scores(text)
    assert fairseqs == ours and not ours.startswith("0.00 0.0/")


def expected(text: str, **options: bool | str) -> str:
    """sacrebleu's score of the D- lines against the T- lines."""
    sides = [
        [scoring.marked(line, mark) for line in of_kind(text, kind)]
        for kind, mark in (("D", "Ω"), ("T", "Ψ"))
    ]
    metric = sacrebleu.BLEU(**options)  # type: ignore[arg-type]
    result = metric.corpus_score(sides[0], [sides[1]])
    return str(result.format(width=2, signature=str(metric.get_signature()))).split(" = ", 1)[1]


def test_chinese_is_scored_as_chinese_by_all(chinese: Path) -> None:
    text = generated(chinese, "--remove-bpe", "--scoring", "sacrebleu")
    fairseqs, ours = scores(text)
    assert fairseqs == ours == expected(text, tokenize="zh")
    assert float(ours.split()[0]) > 0 and "|tok:zh|" in text
    (chinese / "targets").write_text("".join(f"{line}\n" for line in of_kind(text, "T")))
    score = ["score", "--sys", str(chinese / "out"), "-r", str(chinese / "targets")]
    for chosen in ("-l en-zh_CN", "-l en-zh", "--tokenize zh"):
        assert succeed(*score, *chosen.split()).endswith(f" = {ours}\n")
    result = run(*score)
    assert "|tok:13a|" in result.stdout
    assert "note: The references are written without spaces" in result.stderr


@pytest.mark.parametrize("flags", ["", "--sacrebleu-lowercase", "--sacrebleu-char-level"])
@pytest.mark.parametrize("tokenizer", ["13a", "char"])
def test_flags_of_the_score_apply_to_the_last_line(
    chinese: Path, tokenizer: str, flags: str
) -> None:
    text = generated(chinese, "--scoring", "sacrebleu", "--sacrebleu-tokenizer", tokenizer,
                     *flags.split())  # fmt: skip
    fairseqs, ours = scores(text)
    level = "-char" if "char" in flags else ""
    case = "lc" if "lower" in flags else "mixed"
    assert fairseqs == ours and f"|case:{case}|eff:no|tok:{tokenizer}{level}|" in text


def test_validation_counts_chinese_words(chinese: Path) -> None:
    text = generated(chinese, "--remove-bpe", "--gen-subset", "valid", "--max-len-b", "20")
    out = succeed(
        "validate", chinese / "data", "--path", chinese / "checkpoint_last.pt", "--cpu",
        "--task", "translation", "--max-tokens", "400", "--num-workers", "0", "--eval-bleu",
        "--eval-bleu-remove-bpe", "--eval-bleu-args", '{"beam": 5, "max_len_b": 20}',
    )  # fmt: skip
    (ours,) = scores(text)
    assert re.search(r"\bbleu ([\d.]+)", out)[1] == f"{float(ours.split()[0]):g}"  # type: ignore[index]


def test_without_a_tokenizer_for_the_language(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Translations are scored by characters, and the log says so; lightseq-score refuses."""
    from sacrebleu.tokenizers import tokenizer_ja_mecab

    monkeypatch.setattr(tokenizer_ja_mecab, "MeCab", None)
    scoring.usable_tokenizer.cache_clear()
    place = trained(tmp_path, "ja", "@@ ")
    text = generated(place, "--remove-bpe", "--scoring", "sacrebleu")
    fairseqs, ours = scores(text)
    assert fairseqs == ours == expected(text, tokenize="char")
    assert 'has no tokenizer for "ja": for words, run pip install "sacrebleu[ja]"' in caplog.text
    result = run("score", "--sys", place / "out", "-r", place / "test.ja", "-l", "en-ja")
    assert result.exit_code == 2
    assert 'ja-mecab is not installed (pip install "sacrebleu[ja]"): install it' in result.stderr
