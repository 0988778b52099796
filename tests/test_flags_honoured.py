"""Every setting that docs/flags.md calls honoured in training: fairseq's run, on our step.

Each line of settings is trained twice, by us on the captured step and by fairseq, without dropout.
Losses, logged statistics and the files written agree; and where fairseq's run differs from the one
without these settings, so does ours.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import training_runs as runs
from test_flags import SETTINGS, names, rows, table

import fairseq_cli.train  # isort: skip

PLAIN: dict[str, Any] = {
    "dropout": 0, "attention-dropout": 0, "activation-dropout": 0, "max-update": 4,
    "log-format": "json", "log-interval": 1, "share-decoder-input-output-embed": None,
    "warmup-updates": None, "lr-scheduler": "fixed", "max-tokens": 128,
    "disable-validation": True, "no-save": True,
}  # fmt: skip

# {folder}, {checkpoint} and {vectors} are the files of the fixture `inputs`; None leaves out a flag
# of PLAIN.
MODEL = [
    "--activation-fn gelu --encoder-embed-dim 24 --encoder-ffn-embed-dim 40 --encoder-layers 2 "
    "--encoder-attention-heads 4 --encoder-normalize-before --encoder-learned-pos "
    "--decoder-ffn-embed-dim 48 --decoder-layers 3 --decoder-attention-heads 1 "
    "--layernorm-embedding --max-source-positions 9 --max-target-positions 9 "
    "--skip-invalid-size-inputs-valid-test",
    "--decoder-embed-dim 32 --decoder-output-dim 24 --decoder-normalize-before "
    "--no-decoder-final-norm --decoder-learned-pos --no-scale-embedding --export",
    "--share-all-embeddings --no-token-positional-embeddings",
    "--share-decoder-input-output-embed --encoder-embed-path {vectors} "
    "--decoder-embed-path {vectors}",
    "--dropout 0.4 --attention-dropout 0.3 --activation-dropout 0.2",
    "--relu-dropout 0.3",
]
STEP = [
    "--label-smoothing 0.3 --report-accuracy --ignore-prefix-size 1 --sentence-avg "
    "--clip-norm 0.01 --adam-betas (0.5,0.7) --adam-eps 0.1 --weight-decay 10",
    "--max-update 0 --update-freq 2,3 --max-epoch 2 --skip-remainder-batch",
    "--stop-min-lr 1",
    "--max-update 99 --stop-time-hours 0.00000001",
    "--bf16",
    "--fp16 --fp16-no-flatten-grads --fp16-init-scale 64 --fp16-scale-window 2 "
    "--fp16-scale-tolerance 0.5 --threshold-loss-scale 16 --min-loss-scale 0.01",
]
SCHEDULES = [
    "--lr-scheduler fixed --lr 0.02,0.05 --force-anneal 2 --lr-shrink 0.5 --warmup-updates 3 "
    "--max-epoch 3 --max-update 0",
    "--lr-scheduler inverse_sqrt --warmup-updates 3 --warmup-init-lr 0.001",
    "--lr-scheduler cosine --lr 0.02 --min-lr 0.001 --t-mult 2 --lr-period-updates 3",
    "--lr-scheduler polynomial_decay --total-num-update 4 --end-learning-rate 0.001 --power 2",
    "--lr-scheduler tri_stage --warmup-steps 1 --hold-steps 1 --decay-steps 2 "
    "--init-lr-scale 0.5 --final-lr-scale 0.1",
    "--lr-scheduler tri_stage --phase-ratio (0.25,0.25,0.5)",
    "--lr-scheduler triangular --max-lr 0.02 --lr-period-updates 3 --shrink-min",
    "--lr-scheduler step --lr 0.02 --min-lr 0.001 --lr-deacy-period 2 --lr-decay 0.5",
    "--lr-scheduler manual --update2lr {'1-2':0.01,'3':0.03} --epoch2lr {'1':0.02}",
    "--disable-validation None --lr-scheduler reduce_lr_on_plateau --lr-patience 0 "
    "--lr-threshold 0.9 --max-epoch 3 --max-update 0",
]
DATA = [
    "--max-tokens 60 --seed 9 --curriculum 1 --update-ordered-indices-seed "
    "--update-epoch-batch-itr True --max-epoch 2 --max-update 0",
    "--batch-size 6 --required-batch-size-multiple 4 --required-seq-len-multiple 4 "
    "--left-pad-source --left-pad-target --truncate-source --max-source-positions 5 "
    "--num-workers 1 --data-buffer-size 2",
    "--source-lang tgt --target-lang src --train-subset valid --dataset-impl raw "
    "--task translation",
    "--upsample-primary 3",
]
WITH_FILES = "--disable-validation None --no-save None --no-epoch-checkpoints "
VALIDATION = [
    WITH_FILES
    + "--save-interval-updates 2 --keep-interval-updates 1 --keep-interval-updates-pattern 4 "
    "--checkpoint-suffix _x --no-last-checkpoints --validate-interval-updates 3 "
    "--max-tokens-valid 40 --valid-subset valid --ignore-unused-valid-subsets",
    "--disable-validation None --no-save None --save-interval 2 --keep-last-epochs 1 --max-epoch 4 "
    "--max-update 0 --validate-interval 2 --validate-after-updates 6 --batch-size-valid 3 "
    "--max-valid-steps 1 --fixed-validation-seed 5 --skip-invalid-size-inputs-valid-test",
    WITH_FILES + "--keep-best-checkpoints 2 --best-checkpoint-metric nll_loss "
    "--maximize-best-checkpoint-metric --patience 1 --max-epoch 4 --max-update 0",
    "--disable-validation None "
    '--eval-bleu --eval-bleu-args {"beam":2,"max_len_b":9} --eval-bleu-detok space '
    "--eval-bleu-detok-args {} --eval-bleu-remove-bpe --eval-bleu-print-samples",
    "--disable-validation None --cpu "
    '--eval-bleu --eval-tokenized-bleu --eval-bleu-args {"max_len_b":9} --combine-valid-subsets',
]
CHECKPOINTS = [
    WITH_FILES + "--restore-file {checkpoint} --max-update 6 --no-save-optimizer-state",
    "--restore-file {checkpoint} --max-update 6 --reset-optimizer --reset-lr-scheduler "
    "--reset-meters --reset-dataloader",
    "--restore-file {checkpoint} --max-update 6 --optimizer-overrides {'weight_decay':20}",
    "--finetune-from-model {checkpoint}",
    "--continue-once {checkpoint} --max-update 6",
]
ELSEWHERE = [
    "--log-file {folder}/log --no-progress-bar --log-format simple --log-interval 2 "
    "--user-dir {folder}/user",
    "--tokenizer space --bpe bert --scoring sacrebleu",
]
LINES = [*MODEL, *STEP, *SCHEDULES, *DATA, *VALIDATION, *CHECKPOINTS, *ELSEWHERE]
DROPOUT = MODEL[-2:]  # ours are other bits
SIXTEEN_BITS = STEP[-2:]
# fairseq itself does the same with and without these on this corpus.
SILENT = [ELSEWHERE[1]]

# Not run here: names of the parts themselves (test_fast_path.py), and services for logging.
NOT_RUN = {
    "data", "--save-dir", "--help", "--arch", "--optimizer", "--criterion", "--aim-repo",
    "--aim-run-hash", "--azureml-logging", "--tensorboard-logdir", "--wandb-project",
    "--write-checkpoints-asynchronously",
}  # fmt: skip


def test_every_honoured_setting_is_tried() -> None:
    # Of tokenizers and the like only the choice itself reaches training.
    kept = ("--tokenizer", "--bpe", "--scoring")
    settings = {
        name
        for name in rows("train", table.HONOURED)
        if not any(choice.startswith(kept) for choice in SETTINGS[name].choices)
    }
    assert set().union(*map(names, LINES)) | NOT_RUN == settings


class Trace:
    """What a run shows: losses, the statistics it logs, the files it leaves."""

    def __init__(self, losses: list[float], logged: list[dict[str, Any]], files: list[str]) -> None:
        self.losses, self.files = losses, files
        # As text: fairseq logs numbers so. Times are each run's own.
        own = ("wall", "wps", "ups")
        self.logged = [{k: v for k, v in x.items() if not k.endswith(own)} for x in logged]

    def agrees(self, other: Trace, tolerance: float) -> bool:
        if self.files != other.files or len(self.logged) != len(other.logged):
            return False
        if self.losses != pytest.approx(other.losses, rel=tolerance):
            return False
        return all(
            ours.keys() == theirs.keys()
            and all(_close(ours[k], theirs[k], 10 * tolerance + 1e-3) for k in ours)
            for ours, theirs in zip(self.logged, other.logged, strict=True)
        )


def _close(a: Any, b: Any, tolerance: float) -> bool:
    try:
        return float(a) == pytest.approx(float(b), rel=tolerance, abs=tolerance)
    except ValueError:
        return bool(a == b)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("inputs")
    data = runs.corpus(folder / "corpus")
    for side in ("src", "tgt"):  # the second part of a sharded training set
        shutil.copy(data / f"valid.src-tgt.{side}", data / f"train1.src-tgt.{side}")
    (folder / "user").mkdir()
    (folder / "user" / "__init__.py").touch()
    vectors = folder / "vectors"
    rows = [f"w{i} " + " ".join(f"{(i * j) % 7 / 7}" for j in range(16)) for i in range(90)]
    vectors.write_text("\n".join([f"{len(rows)} 16", *rows]) + "\n")
    found = {"folder": folder, "data": data, "vectors": vectors}
    train(found, folder / "saved", "--max-update 3 --no-save None", native=True)
    return {**found, "checkpoint": folder / "saved" / "checkpoint_last.pt"}


def train(inputs: dict[str, Path], save_dir: Path, line: str, native: bool) -> Trace:
    for name, path in inputs.items():
        line = line.replace(f"{{{name}}}", str(path))
    given: dict[str, Any] = {}
    for word in line.split():
        if word.startswith("--"):
            given[name := word[2:]] = True
        else:
            given[name] = None if word == "None" else word
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    root, level = logging.getLogger(), logging.getLogger().level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    vars(fairseq_cli.train.should_stop_early).clear()
    try:
        parts = runs.NATIVE if native else runs.LS
        losses = runs.run(inputs["data"], save_dir, native, **{**parts, **PLAIN, **given})
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
    assert not any("training takes fairseq's own steps" in r.getMessage() for r in records)
    logged = [
        json.loads(r.getMessage()) for r in records if r.name in ("train_inner", "train", "valid")
        and r.getMessage().startswith("{")
    ]  # fmt: skip
    files = sorted(path.name for path in save_dir.glob("*")) if save_dir.exists() else []
    return Trace(losses, logged, files)


@pytest.fixture(scope="module")
def plain(inputs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return train(inputs, tmp_path_factory.mktemp("plain") / "save", "", native=True)


@pytest.mark.parametrize("line", LINES)
def test_ours_does_what_fairseq_does(
    inputs: dict[str, Path], plain: Trace, tmp_path: Path, line: str
) -> None:
    ours = train(inputs, tmp_path / "ours", line, native=False)
    theirs = train(inputs, tmp_path / "theirs", line, native=True)
    tolerance = 0.1 if line in DROPOUT else 3e-3 if line in SIXTEEN_BITS else 1e-5
    assert ours.agrees(theirs, tolerance), (vars(ours), vars(theirs))
    assert theirs.agrees(plain, 1e-5) == (line in SILENT)
    assert ours.agrees(plain, 1e-5) == (line in SILENT)
