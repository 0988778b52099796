"""``lightseq-preprocess``: fairseq-preprocess on a current Python and torch."""

from __future__ import annotations

from lightseq_fairseq.cli.start.launch import launcher, run_fairseq


@launcher("preprocess")
def main(words: list[str]) -> None:
    """Build dictionaries and binarise sentence pairs, or running text with --only-source.

    Takes every option of fairseq-preprocess:

    \b
        lightseq-preprocess -s en -t de --trainpref corpus/train.bpe --validpref corpus/valid.bpe \\
            --testpref corpus/test.bpe --destdir data-bin/wmt14_en_de --joined-dictionary
    """
    run_fairseq("preprocess", words)


if __name__ == "__main__":
    main()
