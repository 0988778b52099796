#!/usr/bin/env bash
# WMT14 English-German: train one of the published recipes, on all GPUs of this machine.
#
#   bash examples/wmt14/train.sh [--native] [--recipe vaswani-big|t2t-big] [--seed N] [--updates N]
#                                [--data DIR] [--out DIR] [-- WORD...]
#
# --native trains fairseq's own model, optimizer and criterion with the same flags. The environment
# variable PRECISION is fp16 (default, as published), bf16 or fp32. An interrupted run resumes from
# its last checkpoint; to train again from the start, delete its folder in the --out folder. WORDs
# are flags of lightseq-train, which override the recipe's.
set -euo pipefail

# shellcheck source=examples/functions.sh
. "$(dirname "${BASH_SOURCE[0]}")/../functions.sh"
read_flags "$@"
data=${data:-$here/data} recipe=${recipe:-vaswani-big} precision=${PRECISION:-fp16}
case $precision in
    fp32) precision_flag=() ;;
    fp16 | bf16) precision_flag=("--$precision") ;;
    *) echo "train.sh: PRECISION must be fp32, fp16 or bf16, not $precision" >&2; exit 2 ;;
esac
# batches: number of batches of --max-tokens in an update, over all GPUs and --update-freq.
case $recipe in
    vaswani-big) # Ott et al. 2018: 128 GPUs
        batches=128
        updates=${updates:-30000}
        took="30000 updates: 11 hours"
        flags=(--arch ls_transformer_vaswani_wmt_en_de_big --max-tokens 3584
            --lr 0.001 --warmup-init-lr 1e-07 --dropout 0.3 --weight-decay 0.0) ;;
    t2t-big) # LightSeq's training example: 8 GPUs
        batches=8
        updates=${updates:-100000}
        took="100000 updates: 5 hours"
        flags=(--arch ls_transformer_wmt_en_de_big_t2t --max-tokens 8192
            --lr 5e-4 --dropout 0.3 --weight-decay 0.0001) ;;
esac
if [ ! -e "$data/bin" ]; then
    echo "train.sh: $data/bin is missing; make it with bash $here/prepare.sh $data" >&2
    exit 2
fi

data=$(cd "$data" && pwd)
run=$out/$system-$recipe-seed$seed-$precision
mkdir -p "$run"
printf '%s\0' "$system" "$recipe" "$seed" "$precision" "$data" >"$run/settings" # for evaluate.sh
gpus=$(python3 -c 'import torch; print(max(1, torch.cuda.device_count()))')

# fairseq does one more update whenever it resumes a complete run, so mark complete runs by a file.
if [ ! -e "$run/trained-$updates" ]; then
    echo "== $system, $recipe, seed $seed: training, $updates updates on $gpus GPUs" \
        "($took on one H200 with lightseq, computed from the speeds in docs/measured.md)"
    lightseq-train "$data/bin" ${native[@]+"${native[@]}"} --source-lang en --target-lang de \
        "${flags[@]}" --share-all-embeddings \
        --optimizer ls_adam --adam-betas '(0.9, 0.98)' --clip-norm 0.0 \
        --lr-scheduler inverse_sqrt --warmup-updates 4000 \
        --criterion ls_label_smoothed_cross_entropy --label-smoothing 0.1 \
        --update-freq $(((batches + gpus - 1) / gpus)) --distributed-world-size "$gpus" \
        --max-update "$updates" --seed "$seed" ${precision_flag[@]+"${precision_flag[@]}"} \
        --save-dir "$run/checkpoints" --keep-last-epochs 10 \
        --log-format json --log-interval 100 ${words[@]+"${words[@]}"} 2>&1 | tee -a "$run/train.log"
    touch "$run/trained-$updates"
fi
printf '== next: bash %q %q\n' "$here/evaluate.sh" "$run"
