#!/usr/bin/env python3
"""Record the results of a checkout bit by bit, to prove that a refactoring changes nothing.

    python -m scripts.freeze --out A            # in the checkout before the change
    python -m scripts.freeze --out B --from A   # after it; also resumes from A's checkpoints
    diff -r A/frozen B/frozen

Runs the commands of the checkout that contains this file, on a generated corpus. The folder
``frozen`` contains digests of all tensors in checkpoints of 200 updates, translations, the help
text of every command, and docs/flags.md. With --gpu, training runs on the GPU with cuBLASLt's first
proposal for every product (LIGHTSEQ_LINEAR_SEARCH=0), without the cases in float64; otherwise on a
CPU.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = (
    "train generate validate interactive preprocess import_ export average score bench doctor"
)
UPDATES, EVERY = 200, 50
MODEL = (
    "--arch ls_transformer --encoder-layers 2 --decoder-layers 2 --encoder-embed-dim 64 "
    "--encoder-ffn-embed-dim 128 --encoder-attention-heads 4 --decoder-embed-dim 64 "
    "--decoder-ffn-embed-dim 128 --decoder-attention-heads 4 --dropout 0.2 --attention-dropout 0.1 "
    "--activation-dropout 0.1 --optimizer ls_adam --criterion ls_label_smoothed_cross_entropy "
    "--label-smoothing 0.1 --lr 3e-3 --lr-scheduler inverse_sqrt --warmup-updates 40 "
    "--max-tokens 300 --clip-norm 1 --weight-decay 1e-4 --num-workers 0 --fp16-scale-window 128"
)
PRE = "--encoder-normalize-before --decoder-normalize-before"
PAIR = "-s de -t en"
# Name -> additional flags, and the precisions to run.
CASES = {
    "post": (PAIR, "fp64 fp32 bf16 fp16"),
    "pre": (f"{PAIR} {PRE} --share-all-embeddings --update-freq 1,2", "fp64 fp32 bf16 fp16"),
    "update-freq": (f"{PAIR} --update-freq 3 --sentence-avg --report-accuracy", "fp32 bf16"),
    "pack-tokens": (f"{PAIR} --pack-tokens --share-decoder-input-output-embed", "fp32 bf16"),
    "fairseqs-step": (f"{PAIR} --store-ema --ignore-prefix-size 1", "fp32 bf16"),
    "layerdrop": (f"{PAIR} --encoder-layerdrop 0.3", "fp32"),
    "multilingual": (
        "--task multilingual_translation --lang-pairs de-en,en-de "
        "--arch ls_multilingual_transformer --share-decoders",
        "fp32 bf16",
    ),
}
FLAGS = {
    "fp64": "",
    "fp32": "",
    "bf16": "--bf16",
    "fp16": "--fp16 --fp16-init-scale 4",
}
IN_FLOAT64 = (
    "import torch; torch.set_default_dtype(torch.float64)\n"
    "from lightseq_fairseq.cli.train import main; main()"
)


def corpus(folder: Path) -> None:
    """Write 1200 training pairs: the target is the reversed source, each word translated."""
    draw = random.Random(1)
    folder.mkdir(parents=True)
    for split, count in {"train": 1200, "valid": 60, "test": 60}.items():
        lines = [draw.choices(range(90), k=min(draw.randint(1, 30), 29)) for _ in range(count)]
        for language, letter, step in (("de", "w", 1), ("en", "w", -1)):
            text = "".join(" ".join(f"{letter}{i}" for i in line[::step]) + "\n" for line in lines)
            (folder / f"{split}.{language}").write_text(text)


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

    def python(self, *words: str | Path) -> str:
        done = subprocess.run(
            [sys.executable, *map(str, words)], cwd=self.site, env=self.environment,
            capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            sys.exit(f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        return done.stdout

    def run(self, command: str, *words: str | Path) -> str:
        return self.python("-m", f"lightseq_fairseq.cli.{command}", *words)


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
    checkout, data = Checkout(out), out / "data"
    corpus(out / "text")
    texts = [word for split in ("train", "valid", "test")
             for word in (f"--{split}pref", str(out / "text" / split))]  # fmt: skip
    checkout.run(
        "preprocess", "-s", "de", "-t", "en", "--joined-dictionary", "--destdir", data, *texts
    )
    for path in list(data.glob("*.de-en.*")):  # the same data as language pair en-de
        shutil.copy(path, path.with_name(path.name.replace("de-en", "en-de")))

    def train(name: str, kind: str, flags: str, *more: str | Path) -> Path:
        folder = out / "runs" / f"{name}-{kind}"
        place = "" if given.gpu else "--cpu"
        no_flat = "--fp16-no-flatten-grads" if kind == "fp16" and not given.gpu else ""
        words = shlex.split(
            f"{MODEL} {flags} {FLAGS[kind]} {place} {no_flat} --max-update {UPDATES} "
            f"--save-interval-updates {EVERY} --no-epoch-checkpoints --disable-validation"
        )
        run = ("-c", IN_FLOAT64) if kind == "fp64" else ("-m", "lightseq_fairseq.cli.train")
        checkout.python(*run, data, *words, "--save-dir", folder, *more)
        return folder

    for name in filter(None, given.only.split(",")):
        flags, kinds = CASES[name]
        for kind in kinds.split():
            if given.gpu and kind == "fp64":
                continue
            folder = train(name, kind, flags)
            saved = sorted(folder.glob("checkpoint_*_*.pt"), key=lambda path: path.stat().st_mtime)
            for path in saved:
                (frozen / f"{folder.name}-{path.stem}.txt").write_text(digests(path))
            if given.before is not None:
                half = given.before.resolve() / "runs" / folder.name / saved[1].name
                again = train(f"{name}-again", kind, flags, "--restore-file", half)
                last = next(again.glob(saved[-1].name))
                expected = (frozen / f"{folder.name}-{last.stem}.txt").read_text()
                if digests(last) != expected:
                    sys.exit(f"{folder.name}: resumed from {half}, the run ends with other bits")
            print(folder.name, len(saved), flush=True)
    model = out / "runs" / "pre-fp32" / "checkpoint_last.pt"
    model = given.before.resolve() / "runs/pre-fp32/checkpoint_last.pt" if given.before else model
    if model.exists():
        place = [] if given.gpu else ["--cpu"]
        for name, flags in {
            "beam": "--beam 4 --lenpen 0.6", "diverse": "--beam 4 --diverse-beam-groups 2",
            "tokens": "--max-tokens 300 --beam 2", "one": "--batch-size 1 --beam 3 --nbest 3",
            "ngrams": "--beam 4 --no-repeat-ngram-size 2", "prefix": "--prefix-size 2",
        }.items():  # fmt: skip
            said = checkout.run("generate", data, "--path", model, *place, *flags.split())
            lines = [
                line for line in said.splitlines() if line[:2] in ("S-", "T-", "H-", "D-", "P-")
            ]
            (frozen / f"generate-{name}.txt").write_text("\n".join(lines) + "\n")
    for command in COMMANDS.split():
        (frozen / f"help-{command}.txt").write_text(checkout.run(command, "--help"))
    shutil.copy(ROOT / "docs/flags.md", frozen)


if __name__ == "__main__":
    main()
