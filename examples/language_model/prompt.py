"""Continue a prompt with the language model of run.sh.

    python -m examples.language_model.prompt RUN [--prompt TEXT] [--tokens N] [--seed N] [--native]

RUN is the folder of a run, such as examples/language_model/out/cpu-lightseq. Each token is drawn
by top-p sampling with p = 0.8.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lightseq_fairseq import LanguageModel
from lightseq_fairseq.base.errors import UserError

from ..library_text import to_text, to_words

# The prompt ends with a line break and the indentation of the next line: both are one word.
PROMPT = "def read(self, name):\n    "


def continued(run: Path, prompt: str, tokens: int, seed: int, native: bool) -> str:
    """Return the prompt and at most ``tokens`` tokens after it as a text."""
    model = LanguageModel.from_pretrained(
        run / "checkpoints", run / "bin", native=native,
        bpe="subword_nmt", bpe_codes=str(run / "text/codes"),
    )  # fmt: skip
    (best,) = model.generate(
        to_words(prompt), beam=1, sampling=True, sampling_topp=0.8, seed=seed,
        max_len_a=1, max_len_b=tokens,
    )  # fmt: skip
    return to_text(best.text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of a run of run.sh")
    parser.add_argument("--prompt", default=PROMPT, help="text to continue  [%(default)r]")
    parser.add_argument("--tokens", type=int, default=100, help="maximum of new tokens  [100]")
    parser.add_argument("--seed", type=int, default=1, help="seed of the sampling  [1]")
    parser.add_argument("--native", action="store_true", help="use fairseq's own model")
    args = parser.parse_args()
    try:
        print(continued(args.run, args.prompt, args.tokens, args.seed, args.native))
    except UserError as error:
        sys.exit(f"prompt.py: {error}")


if __name__ == "__main__":
    main()
