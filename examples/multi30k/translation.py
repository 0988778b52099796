"""Compare both systems' translations with the same flags; or time validations with --eval-bleu.

    python -m examples.multi30k.translation --checkpoint FILE [--jobs N] [--case NAME ...]
        [--data DIR] [--out DIR] [--results FILE] [-- WORD...]
    python -m examples.multi30k.translation --checkpoint FILE --eval-bleu [--updates N]
        [--data DIR] [--out DIR] [--results FILE] [-- WORD...]

FILE is the averaged.pt of a run of run.sh. WORDs are passed to every lightseq-generate or
lightseq-train.

The first command translates test_2016_flickr with all ``SETTINGS``, and writes one row per case to
the results. Scores are those that fairseq prints: log2 of a hypothesis's probability, divided by
its length to the power of --lenpen. A row:

* ``case`` (setting and precision), ``system``, ``flags``, ``sentences``, ``hypotheses``
* ``identical_share``: share of sentences whose hypotheses all have the same subwords, in the same
  order
* ``greatest_score_difference``: of two hypotheses with the same subwords
* ``differences``: pairs of hypotheses with different subwords, as [sentence, rank, our score,
  fairseq's score]
* ``greatest_gap_of_a_difference``: the largest difference between the two scores of such a pair;
  null if there is none
* ``bleu``, ``fairseq_bleu``, ``bleu_difference``, ``signature``

The command fails if a row exceeds ``BOUNDS``.

The second command trains from FILE with both systems, one after the other, and validates six times
with beam 5. It writes one row per system:

* ``validation_s``: wall seconds of each validation with losses and text, from the arrival of the
  log line "begin validation" to the arrival of its results
* ``s_per_validation``: the median of these, without the first
* ``bleu`` of the last validation, ``updates``
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.score import score

from ..curves import RECORD
from ..record import Row, circumstances, write_row
from ..side_by_side import Command, run_all

HERE = Path(__file__).resolve().parent
SETTINGS = {
    "beam-1": "--beam 1",
    "beam-4": "--beam 4",
    "beam-5": "--beam 5",
    "lenpen-0.6": "--beam 4 --lenpen 0.6",
    "min-len": "--beam 5 --min-len 15",
    "max-len": "--beam 5 --max-len-a 0.8 --max-len-b 2",
    "no-repeat-ngram-3": "--beam 5 --no-repeat-ngram-size 3",
    "nbest-4": "--beam 5 --nbest 4",
}
CASES = [*(f"{setting}/fp32" for setting in SETTINGS), "beam-5/fp16"]
# precision -> minimum of identical_share, and maxima of other figures of a row
BOUNDS = {
    "fp32": (0.998, {"greatest_score_difference": 1e-4, "greatest_gap_of_a_difference": 1e-5}),
    "fp16": (0.97, {"bleu_difference": 0.1}),
}
SYSTEMS = ("ours", "fairseq_no_cudnn")
VALIDATIONS = 6
# fairseq is fastest without cuDNN attention. This overrides the caller's environment.
ENVIRONMENT = {"LIGHTSEQ_CUDNN_ATTENTION": "0"}

Hypotheses = dict[int, list[tuple[float, str]]]  # sentence -> (score, tokens), best first


def flags_of(case: str) -> str:
    setting, _, precision = case.partition("/")
    return SETTINGS[setting] + " --fp16" * (precision == "fp16")


def hypotheses(output: Path) -> Hypotheses:
    """Return all hypotheses in the output of lightseq-generate or fairseq-generate.

    Raises:
        ValueError: a score is not finite.
    """
    found: Hypotheses = {}
    with output.open(encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("H-"):
                number, log_probability, tokens = line.rstrip("\n").split("\t")
                if not math.isfinite(float(log_probability)):
                    raise ValueError(f"{output} has a score of {log_probability}")
                found.setdefault(int(number[2:]), []).append((float(log_probability), tokens))
    return found


def compare(ours: Hypotheses, fairseq: Hypotheses) -> Row:
    """Return the figures of a row except BLEU.

    Raises:
        ValueError: the systems have different sentences, or different numbers of hypotheses for a
            sentence.
    """
    if {n: len(its) for n, its in ours.items()} != {n: len(its) for n, its in fairseq.items()}:
        raise ValueError("the two systems have different numbers of hypotheses for a sentence")
    same: list[float] = []
    differences: list[tuple[int, int, float, float]] = []
    for number in sorted(ours):
        for rank, (a, b) in enumerate(zip(ours[number], fairseq[number]), 1):
            if a[1] == b[1]:
                same.append(abs(a[0] - b[0]))
            else:
                differences.append((number, rank, a[0], b[0]))
    different = {number for number, *_ in differences}
    return {
        "sentences": len(ours),
        "hypotheses": len(same) + len(differences),
        "identical_share": (len(ours) - len(different)) / len(ours),
        "greatest_score_difference": max(same, default=None),
        "differences": differences,
        "greatest_gap_of_a_difference": max((abs(a - b) for *_, a, b in differences), default=None),
    }


def broken(row: Row) -> Iterator[str]:
    """Yield a sentence for each figure of a row that exceeds the bounds of its precision."""
    least, most = BOUNDS[row["case"].rpartition("/")[2]]
    if row["identical_share"] < least:
        yield (
            f"{row['case']}: {row['identical_share']:.2%} of the sentences are identical, "
            f"less than {least:.1%}"
        )
    for figure, bound in most.items():
        if row[figure] is not None and row[figure] > bound:
            yield f"{row['case']}: {figure} is {row[figure]:.3g}, more than {bound:g}"


def bleu(output: Path, reference: Path) -> Row:
    """Return the row of lightseq-score for the output, with subwords joined and detokenised."""
    words = Path(f"{output}.words")
    text = output.read_text(encoding="utf-8")
    # Join subwords as fairseq's --remove-bpe does, also if a length limit has cut a word short.
    words.write_text(re.sub(r"@@( |$)", "", text, flags=re.MULTILINE), encoding="utf-8")
    with words.open(encoding="utf-8") as system, reference.open(encoding="utf-8") as lines:
        return score(system, lines, None, None, detokenize="de", compound_split=False)[0]


def compare_all(args: argparse.Namespace) -> None:
    """Translate and compare; exit with a message if a command failed or a bound is exceeded."""
    folder: Path = args.out / "translation"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    about, problems = circumstances(), list[str]()

    def output(case: str, system: str) -> Path:
        return folder / f"{case.replace('/', '-')}-{system}"

    def command(case: str, system: str) -> Command:
        words: list[str | Path] = ["lightseq-generate", args.data / "bin"]
        words += ["--native"] * (system != "ours")
        words += ["--source-lang", "en", "--target-lang", "de", "--path", args.checkpoint]
        words += ["--max-tokens", "4096", "--distributed-world-size", "1", *flags_of(case).split()]
        words += ["--output", output(case, system), *args.words]
        # Parallel processes disturb the timing of GEMM algorithms, so turn their search off.
        environment = {**ENVIRONMENT, "LIGHTSEQ_LINEAR_SEARCH": "0", "OMP_NUM_THREADS": "1"}
        return Command(words, Path(f"{output(case, system)}.log"), environment)

    def done(name: str) -> None:
        case = name.rpartition("/")[0]
        ours, fairseq = (output(case, system) for system in SYSTEMS)
        if not (ours.exists() and fairseq.exists()):
            return  # the other system has not translated this case yet
        reference = args.data / "text" / "test_2016_flickr.de"
        try:
            figures = compare(hypotheses(ours), hypotheses(fairseq))
            score_row, fairseq_bleu = bleu(ours, reference), bleu(fairseq, reference)["bleu"]
        except (ValueError, UserError) as error:
            problems.append(f"{case}: {error}")
            return
        row = {
            **about, "case": case, "system": "ours", "flags": flags_of(case), **figures,
            **score_row, "fairseq_bleu": fairseq_bleu,
            "bleu_difference": round(abs(score_row["bleu"] - fairseq_bleu), 2),
        }  # fmt: skip
        write_row(row, args.results)
        print(json.dumps(row), flush=True)
        problems.extend(broken(row))

    commands = {
        f"{case}/{system}": command(case, system)
        for case in args.case or CASES
        for system in reversed(SYSTEMS)
    }
    problems += [f"{name} failed" for name in run_all(commands, args.jobs, done)]
    if problems:
        sys.exit(f"translation.py: {'; '.join(problems)}")


def validate(system: str, args: argparse.Namespace) -> Row:
    """Train with validations by beam search, and return the figures of a row."""
    folder: Path = args.out / "eval-bleu" / system
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    every = -(-args.updates // VALIDATIONS)
    words: list[str | Path] = ["bash", HERE / "run.sh", *["--native"] * (system != "ours")]
    words += ["--updates", str(args.updates), "--data", args.data, "--out", folder, "--"]
    # Start from a trained model, so that translations have realistic lengths.
    words += ["--finetune-from-model", args.checkpoint]
    words += ["--log-level", "debug"]  # else "begin validation" is not logged
    words += ["--no-save", "--save-interval-updates", "0"]
    words += ["--validate-interval-updates", str(every), "--log-interval", str(every)]
    words += ["--eval-bleu", "--eval-bleu-args", '{"beam": 5, "max_len_a": 1.5, "max_len_b": 10}']
    words += ["--eval-bleu-detok", "moses", "--eval-bleu-detok-args", '{"target_lang": "de"}']
    words += ["--eval-bleu-remove-bpe", *args.words]
    environment = {**os.environ, **ENVIRONMENT, "PRECISION": "fp32"}
    seconds: list[float] = []
    last: dict[str, Any] = {}
    with (folder / "output.txt").open("w", encoding="utf-8") as output, subprocess.Popen(
        words, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, encoding="utf-8",
    ) as process:  # fmt: skip
        assert process.stdout is not None
        began = time.perf_counter()
        # Measure when lines arrive, because times in the log are in whole seconds.
        for line in process.stdout:
            arrived = time.perf_counter()
            output.write(line)
            match = RECORD.search(line)
            if "| begin validation on " in line:
                began = arrived
            elif match is not None and match[1] == "valid":
                seconds.append(arrived - began)
                last = json.loads(match[2])
    if process.returncode != 0 or len(seconds) < 2:
        sys.exit(f"translation.py: training with {system} failed: see {folder / 'output.txt'}")
    return {
        "updates": int(last["valid_num_updates"]),
        "s_per_validation": round(median(seconds[1:]), 3),
        "validation_s": [round(second, 3) for second in seconds],
        "bleu": float(last["valid_bleu"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, required=True, help="averaged.pt of run.sh")
    parser.add_argument("--case", action="append", choices=CASES, metavar="NAME",
                        help=f"only this case; repeatable: {', '.join(CASES)}")  # fmt: skip
    parser.add_argument(
        "--eval-bleu", action="store_true", help="instead, measure the time of validations"
    )
    parser.add_argument(
        "--updates", type=int, default=300, help="updates to train with --eval-bleu  [300]"
    )
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2),
                        help="parallel translations  [half the CPU cores]")  # fmt: skip
    parser.add_argument(
        "--data", type=Path, default=HERE / "data", help="folder that prepare.sh wrote"
    )
    parser.add_argument("--out", type=Path, default=HERE / "out", help="folder for the outputs")
    parser.add_argument("--results", type=Path, help="JSON file for the result rows",
                        default=HERE.parents[1] / "scripts/results/translation-h200.json",
                        )  # fmt: skip
    parser.add_argument("words", nargs="*", metavar="-- WORD",
                        help="arguments of lightseq-generate or lightseq-train")  # fmt: skip
    args = parser.parse_args()
    if args.jobs < 1 or args.updates < 2:
        parser.error("--jobs must be at least 1 and --updates at least 2")
    for program in ("lightseq-generate", "lightseq-train"):
        if shutil.which(program) is None:
            sys.exit(f"translation.py: {program} is not on the PATH; activate its environment")
    if not args.checkpoint.exists():
        sys.exit(f"translation.py: {args.checkpoint} does not exist")
    if not (args.data / "bin").exists():
        subprocess.run(["bash", HERE / "prepare.sh", args.data], check=True)
    args.checkpoint, args.out = args.checkpoint.resolve(), args.out.resolve()
    if not args.eval_bleu:
        compare_all(args)
        return
    for system in reversed(SYSTEMS):
        row = {**circumstances(), "case": "eval_bleu/fp32", "system": system}
        row |= validate(system, args)
        write_row(row, args.results)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
