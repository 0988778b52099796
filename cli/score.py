"""``lightseq-score``: BLEU of translations by sacrebleu, with its signature."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

import click

from lightseq_fairseq.base import utf8
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.start.commands import own
from lightseq_fairseq.cli.translate.text_output import text_output
from lightseq_fairseq.fairseq_compat import scoring

Row = dict[str, Any]


@own("lightseq-score")
@click.option(
    "--sys", "system", required=True, metavar="FILE", type=click.File(encoding="utf-8"),
    help="The output of lightseq-generate or fairseq-generate, or translations, one per line; "
    "- is standard input.",
)  # fmt: skip
@click.option(
    "-r", "--reference", metavar="FILE", type=click.File(encoding="utf-8"),
    help="References, one per line.",
)  # fmt: skip
@click.option("-t", "--test-set", metavar="NAME", help="Test set of sacrebleu, such as wmt14/full.")
@click.option(
    "-l", "--language-pair", metavar="SRC-TGT",
    help="Language pair, such as en-zh; the target language chooses the tokenizer, as in "
    "sacrebleu. --test-set needs it.",
)  # fmt: skip
@click.option(
    "--tokenize", metavar="NAME",
    help="sacrebleu's tokenizer, such as zh, ja-mecab, char, flores200 or intl.  [default: that of "
    "the target language in --language-pair or --detokenize, else 13a]",
)  # fmt: skip
@click.option("--lowercase", is_flag=True, help="Ignore case.")
@click.option(
    "--detokenize", metavar="LANG",
    help="First join the tokens of the translations, by the Moses rules of this language.",
)  # fmt: skip
@click.option(
    "--compound-split", is_flag=True,
    help="Compute BLEU on tokens, with words split at hyphens, as in older papers. References must "
    "be tokenised. Without --reference, the targets in the output of lightseq-generate are used.",
)  # fmt: skip
@click.option(
    "--json", "row_file", metavar="FILE", type=click.Path(path_type=Path),
    help="Also write the score and its signature to this file, as one JSON object.",
)  # fmt: skip
def main(row_file: Path | None, **options: Any) -> None:
    """Score translations, and print BLEU with the signature that makes it comparable.

    \b
        lightseq-generate data-bin --path averaged.pt --remove-bpe >out
        lightseq-score --sys out --test-set wmt14/full --language-pair en-de --detokenize de
        lightseq-score --sys out --reference test.de --detokenize de
        lightseq-score --sys out --compound-split

    If FILE is the output of lightseq-generate or fairseq-generate, its sentences are first sorted
    into the order of the test set.

    <unk> and <<unk>> are unknown words, in translations and references: each counts as one word
    and is never right.
    """
    row, line = score(**options)
    if row_file is not None:
        with text_output(row_file) as file:
            file.write(json.dumps(row) + "\n")
    click.echo(line)


def score(
    system: TextIO, reference: TextIO | None, test_set: str | None, language_pair: str | None,
    detokenize: str | None, compound_split: bool, tokenize: str | None = None,
    lowercase: bool = False,
) -> tuple[Row, str]:  # fmt: skip
    """Computes the score that `main` writes and prints.

    Returns:
        (row, line): ``row`` has "bleu" (0 to 100, two decimals) and "signature"; with
        ``compound_split`` both keys have the prefix "compound_split_". ``line`` is the score in
        sacrebleu's format.

    Raises:
        UserError: a file cannot be scored, or the options exclude each other.
    """
    from sacrebleu.metrics import BLEU

    if reference is not None and test_set is not None:
        raise UserError("--reference and --test-set cannot be used together: remove one.")
    if test_set is not None and language_pair is None:
        raise UserError("--test-set needs --language-pair: -t wmt14/full -l en-de.")
    if compound_split and any((detokenize, test_set, language_pair, tokenize, lowercase)):
        raise UserError(
            "--compound-split scores tokens: remove --detokenize, --test-set, --language-pair, "
            "--tokenize and --lowercase, and set --reference to a tokenised file."
        )
    if tokenize is not None and tokenize not in BLEU.TOKENIZERS:
        raise UserError(
            f"sacrebleu has no tokenizer {tokenize}: choose one of {', '.join(BLEU.TOKENIZERS)}."
        )
    language = detokenize if language_pair is None else _target(language_pair)
    output = Output(_name(system), lines_of(system))
    if compound_split:
        tokens = output.references() if reference is None else lines_of(reference)
        references = [split_compounds(tokens)]
        translations = split_compounds(output.translations(tokens=True))
        # As in fairseq-score: on the tokens as given, without smoothing.
        metric = BLEU(tokenize="none", smooth_method="none", force=True)
    else:
        references = [lines_of(reference)] if reference else _test_set(test_set, language_pair)
        translations = output.translations(tokens=detokenize is not None)
        if detokenize is not None:
            translations = _detokenized(translations, detokenize)
        metric = scoring.metric(tokenize or scoring.tokenizer_of(language), lowercase)
    result, signature = bleu(output.name, translations, references, metric)
    prefix = "compound_split_" if compound_split else ""
    result.name = f"{prefix.replace('_', '-')}BLEU"
    row = {f"{prefix}bleu": round(result.score, 2), f"{prefix}signature": signature}
    return row, result.format(width=2, signature=signature)


def bleu(
    name: str, translations: list[str], references: list[list[str]], metric: Any
) -> tuple[Any, str]:
    """sacrebleu's score of ``translations`` and its signature; unknown words are never right.

    Args:
        name: name of the translations in messages.
        references: one or more lists, each as long as the translations.
        metric: a ``sacrebleu.metrics.BLEU``.

    Raises:
        UserError: there is nothing to score, or the numbers of lines differ.
    """
    for lines in references:
        if not lines and not translations:
            raise UserError(
                f"{name} and its references are empty: score the translations of a test set."
            )
        if len(lines) != len(translations):
            raise UserError(
                f"Every translation needs one reference. Translations in {name}: "
                f"{len(translations)}; references: {len(lines)}. Score exactly the translations "
                "of the whole test set."
            )
    translations = [scoring.marked(text, scoring.IN_TRANSLATION) for text in translations]
    references = [
        [scoring.marked(text, scoring.IN_REFERENCE) for text in side] for side in references
    ]
    if metric.tokenizer_signature == "13a" and _lacks_spaces(references[0]):
        click.echo(
            "note: The references are written without spaces, and the tokenizer 13a splits words "
            "only at spaces and punctuation: name the target language (lightseq-score -l en-zh), "
            "or another tokenizer (--tokenize char).",
            err=True,
        )
    if _has_subwords(translations) and not _has_subwords(references[0]):
        click.echo(
            "note: Many translations have subwords (such as wor@@ ds): join them, for example by "
            "lightseq-generate --remove-bpe, since BLEU compares words.",
            err=True,
        )
    result = metric.corpus_score(translations, references)
    lengths = (len(metric.tokenizer(line).split()) for side in references for line in side)
    if not any(length >= metric.max_ngram_order for length in lengths):
        click.echo(
            "note: No reference has four words. BLEU compares groups of one to four words, so it "
            "says nothing of these texts: compare characters (lightseq-score --tokenize char).",
            err=True,
        )
    return result, str(metric.get_signature())


def _has_subwords(lines: list[str]) -> bool:
    """Whether one of ten lines or more has marks of subword-nmt or of SentencePiece."""
    marked = sum(re.search("@@( |$)|\u2581", line) is not None for line in lines)
    return marked > 0 and 10 * marked >= len(lines)


def _lacks_spaces(lines: list[str]) -> bool:
    """Whether most letters are of scripts without spaces between words: Chinese, Japanese, Thai,
    Lao, Burmese and Khmer."""
    text = "".join("".join(lines).split())
    letters = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
    return 2 * len(re.findall(f"[{letters}]", text)) > len(text)


def _target(pair: str) -> str:
    """The target language of a pair, as sacrebleu reads it."""
    source, _, target = pair.partition("-")
    if not source or not target:
        raise UserError(f"--language-pair is {pair}: write two languages, such as en-de.")
    return target


def split_compounds(lines: Iterable[str]) -> list[str]:
    """Tokenised lines with words split at hyphens, as in fairseq's
    scripts/compound_split_bleu.sh: ``Rhein-Main`` becomes ``Rhein ##AT##-##AT## Main``.

    Words that a tokeniser has already split (``Rhein @-@ Main``, Moses' ``-a``) are not changed.
    """

    # ASCII: published scores were computed by Perl on bytes, where only ASCII spaces count.
    hyphen = re.compile(r"(?<!\S)@-@(?!\S)|(\S)-(\S)", re.ASCII)
    return [
        hyphen.sub(lambda m: f"{m[1]} ##AT##-##AT## {m[2]}" if m[1] else m[0], line)
        for line in lines
    ]


class Output:
    """Translations: plain lines, or the output of a generation.

    fairseq-generate prints a sentence as ``T-<n>`` (target), ``H-<n>`` (hypotheses, the best one
    first) and ``D-<n>`` (the hypotheses, detokenised if --tokenizer or --bpe is set), in the order
    of its batches.

    Args:
        name: its name in messages.
        lines: its lines; `add` appends more.
    """

    def __init__(self, name: str, lines: Iterable[str] = ()) -> None:
        self.name = name
        self.plain: list[str] = []
        self.sentences: dict[str, dict[int, str]] = {"T": {}, "H": {}, "D": {}}
        for line in lines:
            self.add(line)

    def add(self, line: str) -> None:
        """Appends a line, given without its line end."""
        match = re.match(r"([THD])-(\d+)\t(?:.*\t)?(.*)", line)  # H and D also have a score
        if match is None:
            self.plain.append(line)
        else:
            self.sentences[match[1]].setdefault(int(match[2]), match[3])

    def translations(self, tokens: bool) -> list[str]:
        """Translations in the order of the test set. Of a generation, these are the ``H`` lines if
        ``tokens`` is true, else the ``D`` lines."""
        if not self.sentences["H" if tokens else "D"]:
            return self.plain
        return self._ordered("H" if tokens else "D")

    def texts(self) -> list[str]:
        """The best ``D`` line of each sentence, in the order of the test set; empty without one."""
        found = self.sentences["D"]
        return [found.get(number, "") for number in range(max(found, default=-1) + 1)]

    def references(self) -> list[str]:
        """The tokenised targets that a generation has printed."""
        if not self.sentences["T"]:
            raise UserError(
                f"{self.name} contains no target sentences (lines T-...): set --reference to a "
                "tokenised file."
            )
        return self._ordered("T")

    def rebuilt(self) -> tuple[list[str], list[str]]:
        """(translations, targets) of all sentences in the output; some may be missing."""
        targets, translations = self.sentences["T"], self.sentences["D"]
        numbers = sorted(targets.keys() & translations.keys())
        return [translations[n] for n in numbers], [targets[n] for n in numbers]

    def _ordered(self, kind: str) -> list[str]:
        found = self.sentences[kind]
        numbers = set().union(*self.sentences.values())
        missing = set(range(max(numbers) + 1)) - found.keys()
        if missing:
            raise UserError(
                f"{self.name} lacks {len(missing)} sentences (the first is line "
                f"{kind}-{min(missing)}): translate the whole test set without skipping sentences, "
                "and score the complete output."
            )
        return [found[number] for number in range(len(found))]


def lines_of(file: TextIO) -> list[str]:
    """The lines of a file, without their line ends; raises UserError if one is not UTF-8."""
    # As in sacrebleu, a lone CR does not end a line. A standard input of click is not iterable.
    found = utf8.lines(iter(file.buffer.readline, b""), _name(file))
    return [line.removesuffix("\n").removesuffix("\r") for line in found]


def _name(file: TextIO) -> str:
    return utf8.STANDARD_INPUT if file.name == "<stdin>" else file.name


def _test_set(name: str | None, pair: str | None) -> list[list[str]]:
    """The references of one of sacrebleu's test sets, downloaded if needed."""
    from sacrebleu import utils

    if name is None:
        raise UserError("There are no references: set --reference or --test-set.")
    if name not in utils.get_available_testsets():
        raise UserError(f"sacrebleu has no test set {name}: sacrebleu --list shows all names.")
    if pair not in utils.get_langpairs_for_testset(name):
        known = ", ".join(sorted(utils.get_langpairs_for_testset(name)))
        raise UserError(
            f"sacrebleu's test set {name} has no language pair {pair}: choose one of {known}."
        )
    try:
        files = utils.get_reference_files(name, pair)
    except OSError as error:
        raise UserError(
            f"sacrebleu cannot download the test set {name} ({error}): set --reference to a file "
            "with its references."
        ) from error
    references = []
    for path in files:
        with open(path, encoding="utf-8") as file:
            references.append(lines_of(file))
    return references


def _detokenized(lines: Iterable[str], language: str) -> list[str]:
    try:
        from sacremoses import MosesDetokenizer
    except ImportError as error:
        raise UserError(
            "--detokenize needs the package sacremoses: run pip install sacremoses."
        ) from error
    detokenizer = MosesDetokenizer(lang=language)
    return [detokenizer.detokenize(line.split()) for line in lines]


if __name__ == "__main__":
    main()
