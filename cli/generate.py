"""``lightseq-generate``: fairseq-generate that builds this package's model."""

from __future__ import annotations

import click

from lightseq_fairseq.cli.launch import launcher, run


@launcher("generate")
@click.option("--native", is_flag=True, help="Build fairseq's own model from the checkpoint.")
def main(words: list[str], native: bool) -> None:
    """Translate a binarised test set and score it.

    Takes every option of fairseq-generate, and checkpoints that lightseq-train or fairseq-train
    wrote:

    \b
        lightseq-generate data-bin/wmt14_en_de --path checkpoints/checkpoint_best.pt \\
            --beam 4 --lenpen 0.6 --remove-bpe
    """
    run("generate", words, native=native)


if __name__ == "__main__":
    main()
