"""``lightseq-generate``: fairseq-generate that builds this package's model."""

from __future__ import annotations

import contextlib
import os
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import click

from lightseq_fairseq.base import families
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli import score
from lightseq_fairseq.cli.checks.trained_task import with_task
from lightseq_fairseq.cli.start.commands import CommandError
from lightseq_fairseq.cli.start.launch import launcher, run_fairseq
from lightseq_fairseq.cli.translate import text_file
from lightseq_fairseq.cli.translate.ahead import searched_together
from lightseq_fairseq.cli.translate.cached_config import looked_up_once
from lightseq_fairseq.cli.translate.cpu_samples import left_on_cpu
from lightseq_fairseq.cli.translate.output import GenerationOutput
from lightseq_fairseq.cli.translate.text_output import output_text, refuse_inputs, text_output
from lightseq_fairseq.cli.translate.unknown_words import SUBWORDS, UnknownWords, counted
from lightseq_fairseq.cli.words.argv import is_given, one_process
from lightseq_fairseq.fairseq_compat import scoring


@launcher("generate")
@click.option("--native", is_flag=True, help="Build fairseq's own model from the checkpoint.")
@click.option(
    "--output", metavar="FILE", type=click.Path(path_type=Path),
    help="At the end, write the translations to this file instead of the terminal, and the score "
    "to both.",
)  # fmt: skip
@click.option(
    "--reference", metavar="FILE", type=click.File(encoding="utf-8"),
    help="Score against the lines of this file.  [default: the targets in the binarised data, in "
    "which rare words are <unk>]",
)  # fmt: skip
@click.option(
    "--input", "source", metavar="FILE", type=click.Path(path_type=Path),
    help="Translate the lines of this text file, which may have millions, into --output-text. The "
    "same command resumes after a stop.",
)  # fmt: skip
@output_text
def main(
    words: list[str], native: bool, output: Path | None, reference: TextIO | None,
    source: Path | None, output_text: Path | None,
) -> None:  # fmt: skip
    """Translate a binarised test set and score it, or continue prompts by a language model.

    Takes every option of fairseq-generate, and checkpoints that lightseq-train or fairseq-train
    wrote:

    \b
        lightseq-generate data-bin/wmt14_en_de --path checkpoints/checkpoint_best.pt \\
            --beam 4 --lenpen 0.6 --remove-bpe --output out --reference newstest2014.de

    With a language model, each block of the test set is a prompt. With --prefix-size N,
    only the first N tokens of each block are the prompt.

    The last line is sacrebleu's BLEU of the D- lines, with its signature. The target language
    chooses its tokenizer, as in sacrebleu. --scoring adds a score that fairseq computes; with
    --scoring sacrebleu, the flags --sacrebleu-tokenizer, --sacrebleu-lowercase and
    --sacrebleu-char-level apply to both. Continued prompts are scored only with --reference.

    All GPUs are used; each translates a part of the batches. The output is the same as with one
    GPU, except with --sampling. --distributed-world-size sets the number of GPUs. With
    --distributed-rank, only the part of that rank is translated, as in fairseq.
    """

    read = None if reference is None else reference.name
    refuse_inputs({"--output": output, "--output-text": output_text}, source, read)
    if source is not None:
        _translate_file(words, native, source, output_text, output or reference)
        return

    def translate(fairseq_main: Callable[[Any], Any], args: Namespace) -> None:
        _translate(fairseq_main, args, words, output, reference, output_text)

    run_fairseq("generate", words, native=native, complete=with_task, around=translate)


def _translate_file(
    words: list[str], native: bool, source: Path, target: Path | None, others: Any
) -> None:
    if target is None or others is not None:
        raise UserError(
            "--input translates a text file into the file of --output-text: add it, and remove "
            "--output and --reference (lightseq-score computes BLEU of two files)."
        )

    def translate(fairseq_main: Callable[[Any], Any], cfg: Any) -> None:
        _note(text_file.translate(cfg, target, words), "" if cfg.bpe else SUBWORDS)

    def complete(argv: list[str]) -> list[str]:
        return one_process(with_task(argv))

    # Of torchrun: fairseq would make one group of the processes.
    os.environ.pop("MASTER_ADDR", None)
    given = [*words, "--input", str(source)]
    try:
        run_fairseq("interactive", given, native=native, complete=complete, around=translate)
    except CommandError as error:
        error.program = "lightseq-generate"
        raise


def _translate(
    fairseq_main: Callable[[Any], Any], args: Namespace, words: list[str],
    output: Path | None, reference: TextIO | None, texts: Path | None,
) -> None:  # fmt: skip
    references = None if reference is None else _references(args, reference)
    path = output if args.results_path is None else _results(args, output)
    asked_for_score = is_given(words, ("--scoring",))
    shared = args.distributed_world_size > 1 and not is_given(words, ("--distributed-rank",))
    if shared and asked_for_score:
        raise UserError(
            f"--scoring {args.scoring} works in one process only, but this command starts "
            f"{args.distributed_world_size}: add --distributed-world-size 1, or remove --scoring "
            "(sacrebleu's BLEU is always computed)."
        )
    metric = _metric(args, words)
    quiet, args.quiet, args.results_path = args.quiet, False, None
    unscored: UserError | None = None
    with (
        text_output(path) if path else contextlib.nullcontext() as file,
        text_output(texts) if texts else contextlib.nullcontext() as plain,
    ):
        out = GenerationOutput(file, quiet, asked_for_score)
        if shared:
            from lightseq_fairseq.cli.translate import several_gpus

            several_gpus.translate(args, out)
        else:
            with (
                contextlib.redirect_stdout(out),
                left_on_cpu(),
                searched_together(args),
                counted(out.unknown),
            ):
                fairseq_main(looked_up_once(args))
        if plain is not None:
            plain.writelines(f"{line}\n" for line in out.output.texts())
        _note(out.unknown)
        if families.has_prompts(args.task) and reference is None:
            return  # the targets are the prompts, and each result begins with its prompt
        try:
            title = f"Generate {args.gen_subset} with beam={args.beam}"
            out.result(title, None if reference is None else reference.name, references, metric)
        except UserError as error:
            unscored = error  # still write the translations
    if unscored is not None:
        raise unscored


def _references(args: Namespace, file: TextIO) -> list[str]:
    """The lines of --reference; raises UserError if they are not as many as the sentences."""
    from lightseq_fairseq.cli.checks import pairs  # imports fairseq

    lines, count = score.lines_of(file), pairs.sentences_of(args)
    if count not in (None, len(lines)):
        raise UserError(
            f"--reference {file.name} has {len(lines)} lines, but the split {args.gen_subset} of "
            f"{args.data} has {count} sentences: use the references of this split."
        )
    return lines


def _note(unknown: UnknownWords, advice: str = "") -> None:
    if (note := unknown.sentence()) is not None:
        click.echo(f"lightseq-generate: note: {note}{advice}", err=True)


def _metric(args: Namespace, words: list[str]) -> Any:
    """The BLEU of the last line; sets the same tokenizer for the score of --scoring sacrebleu."""
    from lightseq_fairseq.cli.checks import pairs  # imports fairseq

    if is_given(words, ("--sacrebleu-tokenizer",)):  # only with --scoring sacrebleu
        tokenizer = args.sacrebleu_tokenizer
    else:
        tokenizer = scoring.usable_tokenizer(pairs.target_language(args))
    if args.scoring != "sacrebleu":
        return scoring.metric(tokenizer)
    args.sacrebleu_tokenizer = tokenizer
    return scoring.metric(tokenizer, args.sacrebleu_lowercase, args.sacrebleu_char_level)


def _results(args: Namespace, output: Path | None) -> Path:
    """The file for fairseq's ``--results-path``; creates the folder, as fairseq does."""
    if output is not None:
        raise UserError("--output and --results-path cannot be used together: remove one.")
    folder = Path(args.results_path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"generate-{args.gen_subset}.txt"


if __name__ == "__main__":
    main()
