"""Print ROUGE-L of summaries, and some of them beside the texts.

    python -m examples.summaries.rouge SUMMARIES TEXTS REFERENCES --json FILE

ROUGE-L is the F1 of the longest common subsequence of words, in percent, the mean of all lines. For
comparison it is also computed of the *lead*: the first sentence of the text.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from examples.summaries.docstrings import SENTENCE

SHOWN = 5


def rouge_l(summary: str, reference: str) -> float:
    """F1 of the longest common subsequence of the words of two texts, in percent."""
    words, others = (re.findall(r"\w+", text.lower()) for text in (summary, reference))
    longest = [0] * (len(others) + 1)  # of the words so far, and of the first n other words
    for word in words:
        before = longest[:]
        for n, other in enumerate(others, 1):
            longest[n] = before[n - 1] + 1 if word == other else max(before[n], longest[n - 1])
    return 200 * longest[-1] / max(1, len(words) + len(others))


def lead(text: str) -> str:
    """The first sentence of a text, without the name before it."""
    rest = text.partition(": ")[2]
    parts = SENTENCE.match(rest)
    return parts[1] if parts else rest


def main() -> None:
    """Print and write the scores; see the top of the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in ("summaries", "texts", "references"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--json", type=Path, required=True, help="file for the scores")
    args = parser.parse_args()
    summaries, texts, references = (
        path.read_text(encoding="utf-8").split("\n")[:-1]
        for path in (args.summaries, args.texts, args.references)
    )
    scores = {
        name: round(sum(map(rouge_l, lines, references)) / len(references), 2)
        for name, lines in (("rouge_l", summaries), ("rouge_l_of_lead", map(lead, texts)))
    }
    args.json.write_text(json.dumps(scores) + "\n", encoding="utf-8")
    every = max(1, len(texts) // SHOWN)
    for text, summary, reference in [*zip(texts, summaries, references)][::every][:SHOWN]:
        print(f"text:      {text}\nsummary:   {summary}\nreference: {reference}\n")
    print(f"ROUGE-L {scores['rouge_l']}, of the first sentence of the text "
          f"{scores['rouge_l_of_lead']}")  # fmt: skip


if __name__ == "__main__":
    main()
