"""``lightseq-interactive``: fairseq-interactive that builds this package's model."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import click

from lightseq_fairseq.base import families
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.checks.trained_task import with_task
from lightseq_fairseq.cli.start.launch import launcher, run_fairseq
from lightseq_fairseq.cli.translate.classes import Classifier, parted, shown
from lightseq_fairseq.cli.translate.output import Lines
from lightseq_fairseq.cli.translate.sentences import Search, load, seed
from lightseq_fairseq.cli.translate.text_output import output_text, refuse_inputs, text_output
from lightseq_fairseq.cli.translate.unknown_words import SUBWORDS, UnknownWords, counted
from lightseq_fairseq.cli.words.argv import is_native, one_process, value
from lightseq_fairseq.fairseq_compat import patching
from lightseq_fairseq.fairseq_compat.lines import buffered_read
from lightseq_fairseq.generation.texts import Translation

logger = logging.getLogger("fairseq_cli.interactive")  # the log is that of fairseq-interactive


@launcher("interactive")
@click.option("--native", is_flag=True, help="Build fairseq's own model from the checkpoint.")
@output_text
def main(words: list[str], native: bool, output_text: Path | None) -> None:
    """Translate or classify lines from the terminal, a pipe or a file (--input).

    If the model is a language model, each line is a prompt, which the model continues. If it is a
    classifier (--task sentence_prediction), its label is printed; a tab separates the two texts of
    a pair.

    Takes every option of fairseq-interactive, and checkpoints that lightseq-train or fairseq-train
    wrote:

    \b
        lightseq-interactive data-bin/wmt14_en_de --path checkpoints/checkpoint_best.pt \\
            --beam 4 --remove-bpe < test.bpe.de

    Each line is answered as soon as it is read. With --buffer-size N, the command reads N lines and
    answers them together, in batches of --batch-size or --max-tokens.
    """
    refuse_inputs({"--output-text": output_text}, value(words, ("--input",)))
    with text_output(output_text) if output_text else contextlib.nullcontext() as texts:
        translate = functools.partial(_translate, texts)

        def complete(argv: list[str]) -> list[str]:
            return one_process(with_task(argv))

        run_fairseq("interactive", words, native=native, complete=complete, around=translate)


class _AtOnce(Lines):
    """Standard output that is flushed after each line; to a pipe Python would buffer 8 KB.

    texts: receives the best translation of each sentence, and an empty line for a skipped one; of
        a classifier the labels.
    """

    def __init__(self, texts: TextIO | None) -> None:
        self.terminal, self.texts, self.written = sys.stdout, texts, 0
        self.sources = 0

    def line(self, line: str) -> None:
        print(line, file=self.terminal, flush=True)
        self.sources += line.startswith("S-")
        found = re.match(r"D-(\d+)\t(?:[^\t]*\t)?(.*)", line)
        if self.texts and found and int(found[1]) >= self.written:
            skipped = int(found[1]) - self.written
            print("\n" * skipped + found[2], file=self.texts, flush=True)
            self.written += skipped + 1


def _translate(texts: TextIO | None, fairseq_main: Callable[[Any], None], cfg: Any) -> None:
    out, unknown = _AtOnce(texts), UnknownWords()
    try:
        with (
            contextlib.redirect_stdout(out),
            patching.within("fairseq_cli.interactive:buffered_read", buffered_read),
        ):
            if families.classifies(cfg.task._name):
                _classify(cfg, unknown)
            elif is_native():
                with counted(unknown):
                    fairseq_main(cfg)
            else:
                _answer(cfg, unknown)
    except Exception as error:
        # fairseq's number is the index in the buffer; add the number of lines before the buffer.
        found = re.match(r"Size of sample #(\d+)", str(error))
        if found is None:
            raise
        number = out.sources + int(found[1])
        text = f"Size of sample #{number}{str(error)[found.end() :]}"
        raise type(error)(text).with_traceback(error.__traceback__) from error
    finally:
        if (note := unknown.sentence()) is not None:
            advice = "" if cfg.bpe else SUBWORDS
            if families.classifies(cfg.task._name):
                advice = advice.replace(" --remove-bpe", "")  # there is no text to join
            click.echo(f"lightseq-interactive: note: {note}{advice}", err=True)


def _answer(cfg: Any, unknown: UnknownWords) -> None:
    """Prints the lines of ``fairseq_cli.interactive.main``, and counts its unknown words.

    cfg: the argument of ``main``.
    """
    began, translating, count = time.perf_counter(), 0.0, 0
    batches, buffer = cfg.dataset, max(cfg.interactive.buffer_size, 1)
    if batches.max_tokens is None and batches.batch_size is None:
        batches.batch_size = 1
    if (batches.batch_size or 0) > buffer:
        raise UserError("--batch-size cannot be larger than --buffer-size.")
    logger.info(cfg)
    seed(cfg)
    logger.info("loading model(s) from %s", cfg.common_eval.path)
    search = Search(load(cfg), cfg)
    if cfg.generation.constraints:
        logger.warning("NOTE: Constrained decoding currently assumes a shared subword vocabulary.")
    if buffer > 1:
        logger.info("Sentence buffer size: %s", buffer)
    logger.info("Type the input sentence and press return:")
    for lines in buffered_read(cfg.interactive.input, buffer):
        for number, translation in enumerate(search.translate(lines, unknown), count):
            translating += translation.seconds
            _print(number, translation)
        count += len(lines)
    logger.info(
        "Total time: %.3f seconds; translation time: %.3f", time.perf_counter() - began, translating
    )


def _classify(cfg: Any, unknown: UnknownWords) -> None:
    """Prints the prediction for each line; arguments as in `_answer`."""
    logger.info("loading model(s) from %s", cfg.common_eval.path)
    loaded, batches, count = load(cfg), cfg.dataset, 0
    classifier = Classifier(loaded.task, loaded.models, loaded.encode)
    logger.info("Type the input sentence and press return:")
    for lines in buffered_read(cfg.interactive.input, max(cfg.interactive.buffer_size, 1)):
        numbered = dict(enumerate(lines, count))
        texts = {
            number: parted(line, number, classifier.inputs)
            for number, line in numbered.items()
            if line
        }
        found = classifier.classify(texts, unknown, batches.max_tokens, batches.batch_size)
        predictions = dict(zip(texts, found))
        for number, line in numbered.items():
            print(f"S-{number}\t{line}")
            print(f"D-{number}\t{shown(predictions[number]) if line else ''}")
        count += len(lines)


def _print(number: int, translation: Translation) -> None:
    """Prints the lines of one sentence; none if the sentence was too long and was skipped."""
    if not translation.hypotheses:
        return
    print(f"S-{number}\t{translation.source}")
    print(f"W-{number}\t{translation.seconds:.3f}\tseconds")
    for words in translation.constraints:
        print(f"C-{number}\t{words}")
    for each in translation.hypotheses:
        print(f"H-{number}\t{each.score}\t{each.words}")
        print(f"D-{number}\t{each.score}\t{each.text}")
        print(f"P-{number}\t{' '.join(f'{score:.4f}' for score in each.token_scores)}")
        if each.alignment is not None:
            print(f"A-{number}\t{' '.join(f'{a}-{b}' for a, b in each.alignment)}")


if __name__ == "__main__":
    main()
