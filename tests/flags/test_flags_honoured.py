"""Every setting that docs/flags.md calls honoured in training: the captured step does what fairseq
does.

Each line of settings is trained twice without dropout, by us on the captured step and by fairseq.
Losses, logged statistics, requests to torch and written files agree, and each setting changes some
of them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from fairseq import checkpoint_utils, trainer
from fairseq.modules import transformer_layer
from helpers.flag_runs import Proofs, prove, proven, table
from helpers.flag_training import Trace, train

from lightseq_fairseq.fairseq_compat.overlay import Overlay

# Names in braces are files of the fixture `inputs`; the value None removes a flag of PLAIN.
VALID = "--disable-validation None "
SAVE = "--no-save None "
MODEL = [
    "--activation-fn gelu --encoder-embed-dim 24 --encoder-ffn-embed-dim 40 --encoder-layers 2 "
    "--encoder-attention-heads 4 --encoder-normalize-before --encoder-learned-pos "
    "--decoder-ffn-embed-dim 48 --decoder-layers 3 --decoder-attention-heads 1 "
    "--layernorm-embedding",
    "--decoder-embed-dim 32 --decoder-output-dim 24 --decoder-normalize-before "
    "--no-decoder-final-norm --decoder-learned-pos --no-scale-embedding",
    "--share-all-embeddings --no-token-positional-embeddings",
    "--share-decoder-input-output-embed --encoder-embed-path {vectors} "
    "--decoder-embed-path {vectors}",
    "--arch transformer_iwslt_de_en",
    # So high a rate that nothing is kept, whatever the random bits.
    "--max-update 2 | --dropout 0.9999999",
    "--attention-dropout 0.9999999 --activation-dropout 0.9999999",
    "--relu-dropout 0.9999999",
    "--checkpoint-activations",
]
STEP = [
    "--label-smoothing 0.3 --report-accuracy --ignore-prefix-size 1 --sentence-avg "
    "--clip-norm 0.01 --adam-eps 0.1 --weight-decay 10",
    "--max-update 20 | --update-freq 2,3 --max-epoch 2 --skip-remainder-batch "
    "--adam-betas (0.5,0.7)",
    "--stop-min-lr 1",
    "--max-update 2",
    "--stop-time-hours 0.00000001",
    "--bf16",
    "--no-save None | --fp16 --fp16-no-flatten-grads --fp16-init-scale 64 --fp16-scale-window 2",
    # First line: one batch of eight overflows. Second line: the first two updates overflow.
    "--fp16 --fp16-init-scale 2000 --lr 1e-9 --max-update 8 | --fp16-scale-tolerance 0.5",
    "--fp16 --fp16-init-scale 8800 --max-update 2 | --threshold-loss-scale 2400",
    "--fp16 --fp16-init-scale 30000000 | --min-loss-scale 20000000",
]
SCHEDULES = [
    "--max-update 0 --max-tokens 500 --max-epoch 4 | --lr 0.02,0.05 --force-anneal 2 "
    "--lr-shrink 0.5 --warmup-updates 3",
    "--lr-scheduler inverse_sqrt | --warmup-updates 3 --warmup-init-lr 0.001",
    "--lr-scheduler cosine --lr 0.02 --min-lr 0.001 --t-mult 2 --lr-period-updates 3 "
    "--max-update 8",
    "--lr-scheduler polynomial_decay --total-num-update 4 --end-learning-rate 0.001 --power 2",
    "--max-update 6 | --lr-scheduler tri_stage --warmup-steps 1 --hold-steps 1 --decay-steps 2 "
    "--init-lr-scale 0.5 --final-lr-scale 0.1",
    "--lr-scheduler tri_stage --phase-ratio (0.25,0.25,0.5)",
    "--lr-scheduler triangular --max-lr 0.02 --lr-period-updates 3 --shrink-min",
    "--lr-scheduler step --lr 0.02 --min-lr 0.007 --lr-deacy-period 1 --lr-decay 0.6",
    "--lr-scheduler manual --update2lr {'1-2':0.01,'3':0.03} --epoch2lr {'1':0.02}",
    VALID + "--max-update 0 --max-tokens 500 --max-epoch 5 | "
    "--lr-scheduler reduce_lr_on_plateau --lr-patience 1 --lr-threshold 0.9",
]
DATA = [
    "{other}",
    "--max-update 0 --max-epoch 2 | --max-tokens 60 --seed 9 --curriculum 1 "
    "--update-ordered-indices-seed",
    "--max-update 0 --max-epoch 2 --max-tokens 200 --task users --user-dir {user} | "
    "--update-epoch-batch-itr True",
    "--batch-size 6 --required-batch-size-multiple 4 --truncate-source --max-source-positions 5 "
    "--num-workers 1 --data-buffer-size 2",
    "--source-lang tgt --target-lang src --train-subset valid",
    "--dataset-impl mmap",
    "--upsample-primary 3",
    "--task users --user-dir {user}",
]
VALIDATION = [
    "--disable-validation None --batch-size-valid 3 --max-valid-steps 1",
    VALID + "| --required-seq-len-multiple 4 --left-pad-source --left-pad-target",
    VALID + "| --max-source-positions 6 --max-target-positions 7 "
    "--skip-invalid-size-inputs-valid-test",
    VALID + "| --max-tokens-valid 40 --validate-interval-updates 3",
    VALID + "--max-update 12 --max-tokens 500 | --validate-interval 2 --validate-after-updates 7",
    "{other} " + VALID + "--ignore-unused-valid-subsets | --valid-subset valid1",
    "{other} " + VALID + "| --ignore-unused-valid-subsets",
    "{other} " + VALID + "--ignore-unused-valid-subsets | --combine-valid-subsets",
    "{other} " + VALID + "--ignore-unused-valid-subsets | --eval-bleu "
    '--eval-bleu-args {"beam":2,"max_len_b":9} --eval-bleu-print-samples --eval-bleu-remove-bpe '
    '--eval-bleu-detok moses --eval-bleu-detok-args {"source_lang":"en","target_lang":"fr"}',
    "{other} " + VALID + "--ignore-unused-valid-subsets --eval-bleu "
    '--eval-bleu-args {"max_len_b":9} | --eval-tokenized-bleu',
    VALID + '--eval-bleu --eval-bleu-args {"max_len_b":9,"sampling":true} '
    "--eval-bleu-print-samples | --fixed-validation-seed 5",
]
CHECKPOINTS = [
    "--no-save None --checkpoint-suffix _x --no-save-optimizer-state",
    SAVE + "| --save-dir {save}/below --no-last-checkpoints --save-interval-updates 2",
    SAVE + "--max-update 7 | --save-interval-updates 2 --keep-interval-updates 1 "
    "--keep-interval-updates-pattern 4",
    SAVE + "--max-update 7 --max-tokens 500 | --no-epoch-checkpoints",
    SAVE + "--max-update 20 --max-tokens 500 | --max-epoch 5 --save-interval 2 "
    "--keep-last-epochs 1",
    SAVE + VALID + "--max-update 10 --max-tokens 500 | "
    "--keep-best-checkpoints 2 --best-checkpoint-metric nll_loss",
    SAVE + VALID + "--max-update 15 --max-tokens 500 | "
    "--maximize-best-checkpoint-metric --patience 1",
    "--max-update 6 | --restore-file {checkpoint}",
    "--restore-file {checkpoint} --max-update 6 | --reset-optimizer",
    "--restore-file {checkpoint} --max-update 6 | --reset-meters --reset-dataloader",
    "--restore-file {checkpoint} --lr-scheduler reduce_lr_on_plateau --max-update 6 | "
    "--reset-lr-scheduler",
    "--restore-file {checkpoint} --max-update 6 | --optimizer-overrides {'weight_decay':20}",
    "--finetune-from-model {checkpoint}",
    "--max-update 6 | --continue-once {checkpoint}",
]
LOG = [
    "--log-interval 2 --log-file {save}/log",
    "--log-format simple",
    "--log-format None | --no-progress-bar",
]
LINES = [*MODEL, *STEP, *SCHEDULES, *DATA, *VALIDATION, *CHECKPOINTS, *LOG]
# Settings -> why fairseq's own step is used
OTHER_PARTS = {
    "--label-smoothing None | --criterion cross_entropy": "the criterion does not support the "
    "captured step",
    "--adam-betas None | --optimizer sgd": "the optimizer is not ls_adam",
}
CPU, EXPORT = "--cpu", "--export"
PROVEN: Proofs = {("train", table.HONOURED): proven(*LINES, *OTHER_PARTS, CPU, EXPORT)}
Run = Callable[[str, bool], Trace]


@pytest.mark.parametrize("line", LINES)
def test_ours_does_what_fairseq_does(run: Run, line: str) -> None:
    tolerance = 3e-3 if {"--fp16", "--bf16"} & {*line.split()} else 1e-5
    ours, _ = prove(line, run, functools.partial(Trace.agrees, tolerance=tolerance))
    assert ours.refusals == []
    assert ours.error.startswith("FloatingPointError: Minimum" if "--min-loss" in line else "")
    assert bool(ours.error) == ("--min-loss" in line)


@pytest.mark.parametrize("line", OTHER_PARTS)
def test_with_other_parts_fairseqs_step_is_taken(run: Run, line: str) -> None:
    ours, _ = prove(line, run, Trace.agrees)
    (reason,) = ours.refusals
    assert reason.startswith(OTHER_PARTS[line]) and not ours.error


def test_a_gpu_is_left_alone(inputs: dict[str, Path], tmp_path: Path) -> None:
    def run(line: str, native: bool) -> Trace:
        with_gpu = Overlay(torch, cuda=Overlay(torch.cuda, is_available=lambda: True))
        with mock.patch.object(trainer, "torch", with_gpu):
            return train(inputs, tmp_path / "save", line or "--cpu None", native)

    ours, _ = prove(CPU, run, Trace.agrees)
    assert ours.refusals == [] and not ours.error


def test_the_checkpoint_is_of_a_model_for_export(inputs: dict[str, Path], tmp_path: Path) -> None:
    """fairseq chooses LayerNorms that TorchScript supports; TorchScript can compile the whole
    model."""
    norm = transformer_layer.LayerNorm

    def run(line: str, native: bool) -> list[bool]:
        folder = tmp_path / f"native{line}" if native else tmp_path
        train(inputs, folder, SAVE + line, native)
        with mock.patch.object(transformer_layer, "LayerNorm", side_effect=norm) as spy:
            (model,), _ = checkpoint_utils.load_model_ensemble([str(folder / "checkpoint_last.pt")])
        model.eval()
        tokens = torch.tensor([[4, 5, 2]])
        scores, _ = torch.jit.script(model)(tokens, torch.tensor([3]), tokens)
        torch.testing.assert_close(scores, model(tokens, torch.tensor([3]), tokens)[0])
        return [call.kwargs["export"] for call in spy.call_args_list]

    ours, _ = prove(EXPORT, run, operator.eq)
    assert ours and all(ours)
