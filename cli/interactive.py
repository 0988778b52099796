"""``lightseq-interactive``: fairseq-interactive that builds this package's model."""

from __future__ import annotations

import click

from lightseq_fairseq.cli.launch import launcher, run


@launcher("interactive")
@click.option("--native", is_flag=True, help="Build fairseq's own model from the checkpoint.")
def main(words: list[str], native: bool) -> None:
    """Translate lines from the terminal, a pipe or a file (--input).

    Takes every option of fairseq-interactive, and checkpoints that lightseq-train or fairseq-train
    wrote:

    \b
        lightseq-interactive data-bin/wmt14_en_de --path checkpoints/checkpoint_best.pt \\
            --beam 4 --remove-bpe < test.bpe.de
    """
    run("interactive", words, native=native)


if __name__ == "__main__":
    main()
