#!/usr/bin/env python3
"""Record the results of a checkout bit by bit, to prove that a refactoring changes nothing.

    python -m scripts.freeze --out A            # in the checkout before the change
    python -m scripts.freeze --out B --from A   # after it; also resumes from A's checkpoints
    diff -r A/frozen B/frozen

Runs the commands of the checkout that contains this file, on a generated corpus: sentence pairs,
text for language models, masked text, and sentences with classes. The folder ``frozen`` contains
digests of all tensors in checkpoints of 200 updates, translations, continued prompts, the help text
of every command, and docs/flags.md. With --gpu, training runs on the GPU with cuBLASLt's first
proposal for every product (LIGHTSEQ_LINEAR_SEARCH=0), without the cases in float64; otherwise on a
CPU.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = (
    "train generate validate interactive preprocess import_ export average score bench doctor "
    "eval_lm hydra_train"
)
UPDATES, EVERY = 200, 50
COMMON = (
    "--optimizer ls_adam --lr 3e-3 --lr-scheduler inverse_sqrt --warmup-updates 40 --clip-norm 1 "
    "--weight-decay 1e-4 --fp16-scale-window 128 --dropout 0.2 --attention-dropout 0.1 "
    "--activation-dropout 0.1"
)
ENCODER = "--encoder-layers 2 --encoder-embed-dim 64 --encoder-ffn-embed-dim 128 " \
          "--encoder-attention-heads 4"  # fmt: skip
DECODER = ENCODER.replace("encoder", "decoder")
PAIR = "-s de -t en"
PRE = "--encoder-normalize-before --decoder-normalize-before"
# Of the commands that train on each kind of data. The name is also the folder of the data.
DATA = {
    "pairs": f"--arch ls_transformer {ENCODER} {DECODER} --label-smoothing 0.1 --max-tokens 300 "
    "--criterion ls_label_smoothed_cross_entropy --num-workers 0",
    "text": f"--task language_modeling --arch ls_transformer_lm {DECODER} --tokens-per-sample 24 "
    "--criterion ls_cross_entropy --max-tokens 240 --num-workers 0",
    # With a worker, which must know the epoch.
    "masked": f"--task masked_lm --arch ls_roberta {ENCODER} --criterion ls_masked_lm "
    "--tokens-per-sample 24 --max-positions 40 --batch-size 10 --num-workers 1",
    "classes": f"--task sentence_prediction --arch ls_roberta {ENCODER} --num-classes 3 "
    "--criterion ls_sentence_prediction --max-positions 40 --init-token 0 --separator-token 2 "
    "--batch-size 10 --num-workers 1",
}
# Name -> data, additional flags, and the precisions to run.
CASES = {
    "post": ("pairs", PAIR, "fp64 fp32 bf16 fp16 fp8"),
    "pre": (
        "pairs",
        f"{PAIR} {PRE} --share-all-embeddings --update-freq 1,2",
        "fp64 fp32 bf16 fp16 fp8",
    ),
    "update-freq": (
        "pairs",
        f"{PAIR} --update-freq 3 --sentence-avg --report-accuracy",
        "fp32 bf16",
    ),
    "pack-tokens": (
        "pairs",
        f"{PAIR} --pack-tokens --share-decoder-input-output-embed",
        "fp32 bf16",
    ),
    "fairseqs-step": ("pairs", f"{PAIR} --store-ema --ignore-prefix-size 1", "fp32 bf16"),
    "layerdrop": ("pairs", f"{PAIR} --encoder-layerdrop 0.3", "fp32"),
    "multilingual": (
        "pairs",
        "--task multilingual_translation --lang-pairs de-en,en-de "
        "--arch ls_multilingual_transformer --share-decoders",
        "fp32 bf16",
    ),
    "language-model": ("text", "--share-decoder-input-output-embed", "fp64 fp32 bf16 fp8"),
    "recomputed": ("text", "--checkpoint-activations --activation-fn gelu", "fp32 bf16"),
    "roberta": ("masked", "", "fp64 fp32 bf16 fp8"),
    "whole-words": ("masked", "--sample-break-mode eos --untie-weights-roberta", "fp32"),
    "fine-tuned": ("classes", "--restore-file {roberta-fp32}", "fp32 bf16 fp8"),
    "regression": ("classes", "--num-classes 1 --regression-target", "fp32"),
}
FLAGS = {
    "fp64": "",
    "fp32": "",
    "bf16": "--bf16",
    "fp16": "--fp16 --fp16-init-scale 4",
    "fp8": "--bf16 --fp8",
}
_BLOCKS = "--task language_modeling --sample-break-mode eos --skip-invalid-size-inputs-valid-test"
# Name -> command, data, the run whose last checkpoint it reads, flags.
OUTPUTS = {
    "generate-beam": ("generate", "pairs", "pre-fp32", "--beam 4 --lenpen 0.6"),
    "generate-diverse": ("generate", "pairs", "pre-fp32", "--beam 4 --diverse-beam-groups 2"),
    "generate-tokens": ("generate", "pairs", "pre-fp32", "--max-tokens 300 --beam 2"),
    "generate-one": ("generate", "pairs", "pre-fp32", "--batch-size 1 --beam 3 --nbest 3"),
    "generate-ngrams": ("generate", "pairs", "pre-fp32", "--beam 4 --no-repeat-ngram-size 2"),
    "generate-prefix": ("generate", "pairs", "pre-fp32", "--prefix-size 2"),
    "generate-bf16": ("generate", "pairs", "post-bf16", "--beam 4 --bf16"),
    "interactive": ("interactive", "pairs", "post-fp32", "--beam 3 --nbest 2"),
    "continue": (
        "generate",
        "text",
        "language-model-fp32",
        f"{_BLOCKS} --prefix-size 3 --beam 3 --max-len-b 20 --batch-size 8",
    ),
    "eval-lm": (
        "eval_lm",
        "text",
        "language-model-fp32",
        "--gen-subset test --tokens-per-sample 24",
    ),
    "validate-pairs": ("validate", "pairs", "post-fp32", "--max-tokens 300"),
    "validate-masked": ("validate", "masked", "roberta-fp32", ""),
    "validate-classes": ("validate", "classes", "fine-tuned-fp32", ""),
}
# Lines of the commands' output that are results.
RESULT = r"^[STHDP]-\d|Loss \(base 2\)|\| valid on"
IN_FLOAT64 = (
    "import torch; torch.set_default_dtype(torch.float64)\n"
    "from lightseq_fairseq.cli.train import main; main()"
)


SIZES = {"train": 1200, "valid": 60, "test": 60}


def corpus(folder: Path) -> None:
    """Write 1200 training pairs: the target is the reversed source, each word translated.

    Each sentence has a class, which is the remainder of its length.
    """
    draw = random.Random(1)
    folder.mkdir(parents=True)
    for split, count in SIZES.items():
        lines = [draw.choices(range(90), k=min(draw.randint(1, 30), 29)) for _ in range(count)]
        for language, letter, step in (("de", "w", 1), ("en", "w", -1)):
            text = "".join(" ".join(f"{letter}{i}" for i in line[::step]) + "\n" for line in lines)
            (folder / f"{split}.{language}").write_text(text)
        (folder / f"{split}.class").write_text("".join(f"c{len(line) % 3}\n" for line in lines))


def binarise(checkout: Checkout, text: Path, out: Path) -> dict[str, Path]:
    """Binarise the corpus; returns the folder of each kind of data."""
    folders = {kind: out / kind for kind in DATA}

    def run(destination: Path, suffix: str, *words: str | Path) -> None:
        texts = [word for split in SIZES for word in (f"--{split}pref", f"{text / split}{suffix}")]
        checkout.run("preprocess", "--destdir", destination, *texts, *words)

    run(folders["pairs"], "", "-s", "de", "-t", "en", "--joined-dictionary")
    for path in list(folders["pairs"].glob("*.de-en.*")):  # the same data as language pair en-de
        shutil.copy(path, path.with_name(path.name.replace("de-en", "en-de")))
    run(folders["text"], ".de", "--only-source")
    run(folders["masked"], ".de", "--only-source")
    words = folders["masked"] / "dict.txt"
    run(folders["classes"] / "input0", ".de", "--only-source", "--srcdict", words)
    run(folders["classes"] / "label", ".class", "--only-source")
    for split in SIZES:  # the targets of regression
        numbers = [len(line.split()) / 30 for line in (text / f"{split}.de").open()]
        lines = "".join(f"{number:.3f}\n" for number in numbers)
        (folders["classes"] / "label" / f"{split}.label").write_text(lines)
    return folders


class Checkout:
    """The commands of this checkout, in a package of links so that no installed one is imported."""

    def __init__(self, work: Path) -> None:
        self.site = work / "site"
        package = self.site / "lightseq_fairseq"
        package.mkdir(parents=True)
        for path in (*(ROOT / "lightseq_fairseq").iterdir(), ROOT / "cli"):
            (package / path.name).symlink_to(path)
        self.environment = {
            **os.environ, "PYTHONPATH": f"{self.site}:{os.environ.get('PYTHONPATH', '')}",
            "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "LIGHTSEQ_LINEAR_SEARCH": "0",
            "COLUMNS": "100", "TERM": "dumb",
        }  # fmt: skip

    def python(self, *words: str | Path, given: str = "") -> str:
        done = subprocess.run(
            [sys.executable, *map(str, words)], cwd=self.site, env=self.environment, input=given,
            capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            sys.exit(f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        return done.stdout

    def run(self, command: str, *words: str | Path, given: str = "") -> str:
        return self.python("-m", f"lightseq_fairseq.cli.{command}", *words, given=given)


def digests(path: Path) -> str:
    """Return a line for each tensor (name, dtype, shape, SHA-256) and number of a checkpoint."""
    lines: list[str] = []

    def visit(name: str, x: Any) -> None:
        if isinstance(x, torch.Tensor):
            data = x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            digest = hashlib.sha256(data).hexdigest()[:24]
            lines.append(f"{name} {x.dtype} {list(x.shape)} {digest}")
        elif isinstance(x, dict):
            for key, value in x.items():
                visit(f"{name}/{key}", value)
        elif isinstance(x, (list, tuple)):
            for place, value in enumerate(x):
                visit(f"{name}/{place}", value)
        elif isinstance(x, (int, float)) and "time" not in name and "wall" not in name:
            lines.append(f"{name} {x!r}")

    state = torch.load(path, map_location="cpu", weights_only=False)
    for key in ("model", "last_optimizer_state", "criterion"):
        visit(key, state[key])
    visit("iterator", state["extra_state"]["train_iterator"])
    visit("ema", state["extra_state"].get("ema", {}))
    visit("scaler", state["extra_state"].get("loss_scaler", {}))
    return "\n".join(sorted(lines)) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument(
        "--from",
        dest="before",
        type=Path,
        help="the --out folder of the run before the change; training then also resumes "
        "from its checkpoints",
    )
    parser.add_argument("--gpu", action="store_true", help="train and translate on the GPU")
    parser.add_argument(
        "--only", default=",".join(CASES), help="cases, separated by commas (default: all)"
    )
    given = parser.parse_args()
    out, frozen = given.out.resolve(), given.out.resolve() / "frozen"
    shutil.rmtree(out, ignore_errors=True)
    frozen.mkdir(parents=True)
    checkout = Checkout(out)
    corpus(out / "text-files")
    data = binarise(checkout, out / "text-files", out / "data")
    runs = (given.before.resolve() if given.before else out) / "runs"

    def train(name: str, case: str, kind: str, *more: str | Path) -> Path:
        source, flags, _ = CASES[case]
        folder = out / "runs" / f"{name}-{kind}"
        # The last flag counts.
        words = shlex.split(f"{COMMON} {DATA[source]} {flags} {FLAGS[kind]}")
        for place, word in enumerate(words):
            if word.startswith("{"):
                words[place] = str(runs / word[1:-1] / "checkpoint_last.pt")
                if not more:  # a resumed run continues its own state
                    words += ["--reset-optimizer", "--reset-dataloader", "--reset-meters"]
        words += [] if given.gpu else ["--cpu"]
        words += ["--fp16-no-flatten-grads"] if kind == "fp16" and not given.gpu else []
        run = ("-c", IN_FLOAT64) if kind == "fp64" else ("-m", "lightseq_fairseq.cli.train")
        checkout.python(
            *run, data[source], *words, "--max-update", str(UPDATES), "--save-interval-updates",
            str(EVERY), "--no-epoch-checkpoints", "--disable-validation", "--save-dir", folder,
            *more,
        )  # fmt: skip
        return folder

    for name in filter(None, given.only.split(",")):
        for kind in CASES[name][2].split():
            if given.gpu and kind == "fp64":
                continue
            folder = train(name, name, kind)
            saved = sorted(folder.glob("checkpoint_*_*.pt"), key=lambda path: path.stat().st_mtime)
            for path in saved:
                (frozen / f"{folder.name}-{path.stem}.txt").write_text(digests(path))
            if given.before is not None:
                half = runs / folder.name / saved[1].name
                again = train(f"{name}-again", name, kind, "--restore-file", half)
                last = next(again.glob(saved[-1].name))
                expected = (frozen / f"{folder.name}-{last.stem}.txt").read_text()
                if digests(last) != expected:
                    sys.exit(f"{folder.name}: resumed from {half}, the run ends with other bits")
            print(folder.name, len(saved), flush=True)

    place = [] if given.gpu else ["--cpu"]
    for name, (command, source, model, flags) in OUTPUTS.items():
        path = runs / model / "checkpoint_last.pt"
        if path.exists():
            said = checkout.run(
                command, data[source], "--path", path, *place, *flags.split(),
                given=(out / "text-files" / "test.de").read_text(),
            )  # fmt: skip
            lines = [line for line in said.splitlines() if re.search(RESULT, line)]
            found = [re.sub(r"^.*? \| INFO \| ", "", line) for line in lines]
            (frozen / f"{name}.txt").write_text("\n".join(found) + "\n")
    for command in COMMANDS.split():
        (frozen / f"help-{command}.txt").write_text(checkout.run(command, "--help"))
    shutil.copy(ROOT / "docs/flags.md", frozen)


if __name__ == "__main__":
    main()
