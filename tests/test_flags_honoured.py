"""Every setting that docs/flags.md calls honoured in training: fairseq's run, on our step.

Each line of settings is trained twice, by us on the captured step and by fairseq, without dropout.
Losses, logged statistics and the files written agree; and where fairseq's run differs from the one
without these settings, so does ours.
"""

from __future__ import annotations

from pathlib import Path

import flag_runs
import pytest
import training_runs as runs
from flag_runs import PLAIN, Proofs, Trace, names, table, train

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
    "--lr-scheduler cosine --lr 0.02 --min-lr 0.001 --t-mult 2 --lr-period-updates 3 "
    "--max-update 8",
    "--lr-scheduler polynomial_decay --total-num-update 4 --end-learning-rate 0.001 --power 2",
    "--lr-scheduler tri_stage --warmup-steps 1 --hold-steps 1 --decay-steps 2 "
    "--init-lr-scale 0.5 --final-lr-scale 0.1",
    "--lr-scheduler tri_stage --phase-ratio (0.25,0.25,0.5)",
    "--lr-scheduler triangular --max-lr 0.02 --lr-period-updates 3 --shrink-min",
    "--lr-scheduler step --lr 0.02 --min-lr 0.015 --lr-deacy-period 2 --lr-decay 0.4",
    "--lr-scheduler manual --update2lr {'1-2':0.01,'3':0.03} --epoch2lr {'1':0.02}",
    "--disable-validation None --lr-scheduler reduce_lr_on_plateau --lr-patience 1 "
    "--lr-threshold 0.9 --max-epoch 4 --max-update 0",
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
LOG = [
    "--log-file {folder}/log --no-progress-bar --log-format simple --log-interval 2 "
    "--user-dir {folder}/user",
]
LINES = [*MODEL, *STEP, *SCHEDULES, *DATA, *VALIDATION, *CHECKPOINTS, *LOG]
DROPOUT = MODEL[-2:]  # ours are other bits
SIXTEEN_BITS = STEP[-2:]
# What every run is given besides.
GIVEN = " ".join(runs.command_line(Path("data"), Path("save"), {**runs.LS, **PLAIN}))
PROVEN: Proofs = {("train", table.HONOURED): names(GIVEN, *LINES)}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return flag_runs.inputs(tmp_path_factory.mktemp("inputs"))


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
    assert ours.refusals == []
    assert ours.agrees(theirs, tolerance), (vars(ours), vars(theirs))
    assert not theirs.agrees(plain, 1e-5)
    assert not ours.agrees(plain, 1e-5)
