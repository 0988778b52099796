"""``lightseq-validate``: fairseq-validate that builds this package's model."""

from __future__ import annotations

import click

from lightseq_fairseq.cli import defaults
from lightseq_fairseq.cli.launch import launcher, run


@launcher("validate")
@click.option("--native", is_flag=True, help="Build fairseq's own model from the checkpoint.")
def main(words: list[str], native: bool) -> None:
    """Measure the loss of a checkpoint on a binarised split.

    Takes every option of fairseq-validate, and checkpoints that lightseq-train or fairseq-train
    wrote; --task translation is filled in where no task is named:

    \b
        lightseq-validate data-bin/wmt14_en_de --path checkpoints/checkpoint_best.pt \\
            --valid-subset test --max-tokens 4096
    """
    # fairseq-validate has no default task and fails without one.
    named = defaults.is_given(words, ("--task",))
    run("validate", words if named else ["--task", "translation", *words], native=native)


if __name__ == "__main__":
    main()
