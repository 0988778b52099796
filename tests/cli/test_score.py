"""lightseq-score computes the same figures as sacrebleu's own command and as fairseq-score."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.cli_runs import run, succeed
from helpers.golden import matches, refusals

# isort: split
from fairseq.data import Dictionary
from fairseq.scoring import bleu

REFERENCES = [
    "Der Hund läuft über die Straße, sagte sie.",
    "Café-Liebhaber trinken am Main-Ufer keinen Tee.",
    "Das kostet 3,50 Euro - nicht mehr.",
]
TRANSLATIONS = [
    "Der Hund lief über die Straße, sagte er.",
    "Café-Liebhaber trinken am Fluss-Ufer keinen Tee\u2028.",
    "Es kostet 3,50 Euro - nicht mehr.",
]
TOKENS = [  # the H- lines of the translations above
    "Der Hund lief über die Straße , sagte er .",
    "Café @-@ Liebhaber trinken am Fluss @-@ Ufer keinen Tee\u2028 .",
    "Es kostet 3,50 Euro - nicht mehr .",
]


def lines(path: Path, text: list[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in text), encoding="utf-8")
    return path


def python(*words: str | Path, **variables: str) -> str:
    command = [sys.executable, *map(str, words)]
    environment = {**os.environ, **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def generation(tmp_path: Path) -> Path:
    """The output of fairseq-generate for the three sentences: in another order, two hypotheses
    each."""
    out = ["2026-01-01 10:00:00 | INFO | fairseq_cli.generate | loading model(s)"]
    for n in (2, 0, 1):
        out += [f"S-{n}\tsource", f"T-{n}\t{REFERENCES[n]}"]
        for rank, tokens, text in ((1, TOKENS[n], TRANSLATIONS[n]), (2, "no", "no")):
            out += [f"H-{n}\t-0.{rank}\t{tokens}", f"D-{n}\t-0.{rank}\t{text}", f"P-{n}\t-0.1 -0.2"]
    return lines(tmp_path / "out", [*out, "Generate test with beam=5: BLEU4 = 1.00"])


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    return lines(tmp_path / "reference", REFERENCES)


@pytest.fixture
def expected(tmp_path: Path, reference: Path) -> str:
    """The line that sacrebleu's own command prints."""
    hypotheses = lines(tmp_path / "hypotheses", TRANSLATIONS)
    words = ("--input", hypotheses, "--format", "text", "--width", "2")
    return python("-m", "sacrebleu", reference, *words)


def test_plain_translations(tmp_path: Path, reference: Path, expected: str) -> None:
    row = tmp_path / "row.json"
    printed = succeed(
        "score", "--sys", tmp_path / "hypotheses", "--reference", reference, "--json", row
    )
    assert printed == expected
    score = json.loads(row.read_text())
    assert score.keys() == {"bleu", "signature"}
    assert printed.startswith(f"BLEU|{score['signature']} = {score['bleu']:.2f} ")


@pytest.mark.parametrize("words", [(), ("--detokenize", "de")])
def test_output_of_a_generation_is_put_in_order(
    generation: Path, reference: Path, expected: str, words: tuple[str, ...]
) -> None:
    assert succeed("score", "--sys", generation, "-r", reference, *words) == expected


def test_lines_end_as_for_sacrebleu(tmp_path: Path, reference: Path, expected: str) -> None:
    """Lines end at LF and CRLF, but not at a CR alone."""
    system = tmp_path / "system"
    texts = [f"{text}\r\n".replace(" ", "\r", 1) for text in TRANSLATIONS]
    system.write_bytes("".join(texts).encode())
    assert succeed("score", "--sys", system, "-r", reference) == expected


def test_its_detokenised_lines_will_do(generation: Path, reference: Path, expected: str) -> None:
    kept = [line for line in generation.read_text().split("\n") if line.startswith("D-")]
    generation.write_text("".join(f"{line}\n" for line in kept))
    assert succeed("score", "--sys", generation, "-r", reference) == expected


def test_a_test_set_of_sacrebleu_s(tmp_path: Path, generation: Path) -> None:
    folder = tmp_path / "wmt14" / "full"
    folder.mkdir(parents=True)
    for field in ("src", "ref", "docid", "genre", "origlang"):  # as if it had been downloaded
        lines(folder / f"wmt14_full.en-de.{field}", REFERENCES)
    hypotheses = lines(tmp_path / "hypotheses", TRANSLATIONS)
    words = ("--input", hypotheses, "--format", "text", "--width", "2")
    test_set = ("-t", "wmt14/full", "-l", "en-de")
    expected = python("-m", "sacrebleu", *test_set, *words, SACREBLEU=str(tmp_path))
    command = ("-m", "lightseq_fairseq.cli.score", "--sys", generation, *test_set)
    assert python(*command, "--detokenize", "de", SACREBLEU=str(tmp_path)) == expected


def fairseq_score(translations: list[str], references: list[str]) -> float:
    """fairseq-score of tokenised lines."""
    words = Dictionary()
    scorer = bleu.Scorer(bleu.BleuConfig(pad=words.pad(), eos=words.eos(), unk=words.unk()))
    for translation, reference in zip(translations, references):
        scorer.add(words.encode_line(reference), words.encode_line(translation))
    return float(scorer.score())


# 0 because no 4-gram matches and there is no smoothing
@pytest.mark.parametrize("kept", [0.8, 0.0])
def test_compound_split_is_fairseq_s(tmp_path: Path, kept: float) -> None:
    source = random.Random(1)
    words = ["Haus", "Main-Ufer", "a-b-c", "-", "--", "Rhein-", "3-4", "Öl-Ärger", "und"]
    references = [" ".join(source.choices(words, k=12)) for _ in range(40)]
    translations = [
        " ".join(word if source.random() < kept else "und" for word in line.split())
        for line in references
    ]
    out = [f"T-{n}\t{line}" for n, line in enumerate(references)]
    out += [f"H-{n}\t-1.0\t{line}" for n, line in enumerate(translations)]
    row = tmp_path / "row.json"
    printed = succeed("score", "--sys", lines(tmp_path / "out", out), "--compound-split",
                      "--json", row)  # fmt: skip
    score = json.loads(row.read_text())
    split = [
        [re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", line) for line in side]
        for side in (translations, references)
    ]
    assert score["compound_split_bleu"] == round(fairseq_score(*split), 2)
    whole = round(fairseq_score(translations, references), 2)
    assert (score["compound_split_bleu"] == whole) == (kept == 0)
    assert "|tok:none|" in score["compound_split_signature"]
    assert printed.startswith(f"compound-split-BLEU|{score['compound_split_signature']} = ")


def test_what_moses_has_split_counts_as_split(tmp_path: Path) -> None:
    unsplit = [line.replace(" @-@ ", "-") for line in TOKENS]
    scores = [
        succeed(
            *("score", "--compound-split", "--sys", lines(tmp_path / "h", side)),
            *(
                "--reference",
                lines(tmp_path / "r", [line.replace("Fluss", "Main") for line in side]),
            ),
        )
        for side in (TOKENS, unsplit)
    ]
    assert scores[0] == scores[1] and " = 100.00 " not in scores[0]


@pytest.mark.parametrize(
    ("translation", "reference", "flags", "score", "noted"),
    [
        ("one", "one", "", "0.00", True),
        ("one two three", "one two three", "", "0.00", True),
        ("one two three", "one two three", "--tokenize char", "100.00", False),
        ("one two three four", "one two three four", "", "100.00", False),
        ("one", "one two three four", "", "0.00", False),
    ],
)
def test_references_without_four_words_are_noted(
    tmp_path: Path, translation: str, reference: str, flags: str, score: str, noted: bool
) -> None:
    texts = {"--sys": translation, "--reference": reference}
    words = [x for flag, text in texts.items() for x in (flag, lines(tmp_path / flag, [text] * 9))]
    result = run("score", *words, *flags.split())
    assert result.exit_code == 0 and f" = {score} " in result.stdout
    assert ("note: No reference has four words." in result.stderr) == noted


def test_standard_input(reference: Path) -> None:
    command = [sys.executable, "-m", "lightseq_fairseq.cli.score", "--sys", "-", "-r", reference]
    text = "\n".join(REFERENCES)
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)
    assert " = 100.00 " in done.stdout, done.stderr


@pytest.mark.parametrize(("words", "sentence"), refusals(__file__, "test_score"))
def test_what_cannot_be_scored_is_refused(
    reference: Path, tmp_path: Path, words: str, sentence: str
) -> None:
    lines(tmp_path / "short", REFERENCES[:2])
    lines(tmp_path / "cut", ["H-2\t-1.0\tx", "D-2\t-1.0\tx", "T-2\tx"])
    (tmp_path / "empty").touch()
    latin = "Haus\nStraße".encode("latin-1")
    (tmp_path / "latin").write_bytes(latin)
    result = run("score", *words.format(tmp_path).split(), input=latin)
    assert result.exit_code == 2, (result.output, result.exception)
    assert matches(result.stderr, f"lightseq-score: error: {sentence}\n")
    assert result.stdout == ""


CHINESE = (
    ["今天天气很好我们去公园", "他在学校里学习中文", "这本书非常有意思吗"],
    ["今天天气很好我们去公园玩", "他在学校学习中文", "这本书非常有意思"],
)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("-l en-zh", "-l en-zh"), ("-l eng-zho_Hans", "-l en-zh"), ("--detokenize zh", "-l en-zh"),
        ("--tokenize char", "-tok char"), ("--tokenize intl -l en-zh", "-tok intl -l en-zh"),
        ("--lowercase", "-lc"),
    ],
)  # fmt: skip
def test_the_language_chooses_the_tokenizer_as_in_sacrebleu(
    tmp_path: Path, ours: str, theirs: str
) -> None:
    system, reference = (
        lines(tmp_path / name, [f"{text} Ab" if name == "ref" else f"{text} aB" for text in side])
        for name, side in zip(("sys", "ref"), CHINESE, strict=True)
    )
    words = ("--input", system, "--format", "text", "--width", "2")
    expected = python("-m", "sacrebleu", reference, *words, *theirs.split())
    assert succeed("score", "--sys", system, "-r", reference, *ours.split()) == expected


def test_pieces_of_sentencepiece(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown word is one token also where the beginning of a word is one."""
    from sacrebleu.metrics import bleu as sacrebleus

    from lightseq_fairseq.cli.score import bleu
    from lightseq_fairseq.fairseq_compat import scoring

    class Pieces:
        sp = None

        def __call__(self, text: str) -> str:
            return " ".join(f"\u2581 {word}" if word > "\u2fd0" else word for word in text.split())

        def signature(self) -> str:
            return "spm"

    monkeypatch.setattr(sacrebleus, "_get_tokenizer", lambda name: Pieces)
    result, _ = bleu("", ["a <unk> b <unk>"], [["a <unk> b <<unk>> c"]], scoring.metric("spm"))
    assert (result.counts[0], result.sys_len, result.ref_len) == (2, 4, 5)


def test_a_test_set_that_cannot_be_downloaded(
    reference: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from sacrebleu.dataset import DATASETS

    monkeypatch.setattr(DATASETS["wmt14/full"], "_outdir", str(tmp_path / "cache"))
    monkeypatch.setattr(DATASETS["wmt14/full"], "_rawdir", str(tmp_path / "cache" / "raw"))
    monkeypatch.setattr(DATASETS["wmt14/full"], "data", [f"file://{tmp_path}/no-such.tgz"])
    result = run("score", "--sys", reference, "-t", "wmt14/full", "-l", "en-de")
    assert result.exit_code == 2, (result.output, result.exception)
    assert "sacrebleu cannot download the test set wmt14/full" in result.stderr


def test_subwords_in_translations_are_noted(tmp_path: Path) -> None:
    references = lines(tmp_path / "ref", ["one two three four"] * 9)
    for text, noted in (("o@@ ne two three four", True), ("\u2581one two three f our", True),
                        ("one two three four", False)):  # fmt: skip
        found = run(
            "score", "--sys", lines(tmp_path / "sys", [text] * 9), "--reference", references
        )
        assert found.exit_code == 0
        assert ("note: Many translations have subwords" in found.stderr) == noted
