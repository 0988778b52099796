"""``lightseq-eval-lm``: fairseq-eval-lm that builds this package's model."""

from __future__ import annotations

import click

from lightseq_fairseq.cli.start.launch import launcher, run_fairseq


@launcher("eval-lm")
@click.option("--native", is_flag=True, help="Build fairseq's own model from the checkpoint.")
def main(words: list[str], native: bool) -> None:
    """Measure the perplexity of a language model on a binarised text.

    Takes every option of fairseq-eval-lm, and checkpoints that lightseq-train or fairseq-train
    wrote:

    \b
        lightseq-eval-lm data-bin/wikitext-103 --path checkpoints/checkpoint_best.pt \\
            --gen-subset test --tokens-per-sample 512 --context-window 400

    The loss is in base 2, and the perplexity is 2 to the power of the loss. With
    --context-window N, each token but the first N has at least N tokens of context; the context is
    a part of --tokens-per-sample. --output-word-probs prints the log-probability of each word.
    --output-word-stats prints the sum of the log-probabilities for each word of the dictionary.
    With --num-shards and --shard-id, only one part of the text is measured.
    """
    run_fairseq("eval-lm", words, native=native)


if __name__ == "__main__":
    main()
