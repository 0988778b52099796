#!/usr/bin/env bash
# Multi30k English-German: train, average, translate test_2016_flickr, score, write the result's row.
#
#   bash examples/multi30k/run.sh [--native] [--seed N] [--updates N] [--data DIR] [--out DIR]
#                                 [--results FILE]
#
# --native runs stock fairseq's model, optimizer and criterion with the same flags. PRECISION is
# fp32 (default), fp16 or bf16. An interrupted run continues where its last checkpoint stands; to
# train anew, delete its folder under DIR.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
system=lightseq
native=()
seed=1
updates=8000
data=$here/data
out=$here/out
results=$here/results/bleu.json
precision=${PRECISION:-fp32}

while [ $# -gt 0 ]; do
    case $1 in
        --native) system=fairseq native=(--native); shift ;;
        --seed) seed=${2:?--seed needs a number}; shift 2 ;;
        --updates) updates=${2:?--updates needs a number}; shift 2 ;;
        --data) data=${2:?--data needs a folder}; shift 2 ;;
        --out) out=${2:?--out needs a folder}; shift 2 ;;
        --results) results=${2:?--results needs a file}; shift 2 ;;
        *) echo "run.sh: unknown argument $1 (see the top of ${BASH_SOURCE[0]})" >&2; exit 2 ;;
    esac
done
case $precision in
    fp32) precision_flag=() ;;
    fp16 | bf16) precision_flag=("--$precision") ;;
    *) echo "run.sh: PRECISION must be fp32, fp16 or bf16, not $precision" >&2; exit 2 ;;
esac

[ -e "$data/bin" ] || bash "$here/prepare.sh" "$data"
run=$out/$system-seed$seed-$precision
checkpoints=$run/checkpoints
mkdir -p "$run"

# fairseq makes one more update each time it resumes a run that is complete, hence the mark.
if [ ! -e "$run/trained-$updates" ]; then
    echo "== $system, seed $seed: training, $updates updates"
    lightseq-train "$data/bin" ${native[@]+"${native[@]}"} --source-lang en --target-lang de \
        --arch ls_transformer --share-all-embeddings --dropout 0.3 \
        --encoder-layers 4 --encoder-embed-dim 128 --encoder-ffn-embed-dim 256 \
        --decoder-layers 4 --decoder-embed-dim 128 --decoder-ffn-embed-dim 256 \
        --encoder-attention-heads 4 --decoder-attention-heads 4 \
        --optimizer ls_adam --adam-betas '(0.9, 0.98)' --clip-norm 0.0 \
        --lr 5e-3 --lr-scheduler inverse_sqrt --warmup-updates 2000 --warmup-init-lr 1e-7 \
        --criterion ls_label_smoothed_cross_entropy --label-smoothing 0.1 \
        --max-tokens 4096 --max-update "$updates" --seed "$seed" --distributed-world-size 1 \
        ${precision_flag[@]+"${precision_flag[@]}"} \
        --save-dir "$checkpoints" --no-epoch-checkpoints \
        --save-interval-updates $(((updates + 63) / 64)) --keep-interval-updates 10 \
        --log-format json --log-interval $(((updates + 79) / 80)) 2>&1 | tee -a "$run/train.log"
    touch "$run/trained-$updates"
fi

echo "== $system, seed $seed: averaging, translating, scoring"
lightseq-average --inputs "$checkpoints" --num-update-checkpoints 10 --output "$run/averaged.pt"
python3 "$here/../curves.py" "$run/train.log" "$run/curves.svg" --title "Multi30k en-de, $system"
lightseq-generate "$data/bin" ${native[@]+"${native[@]}"} --source-lang en --target-lang de \
    --path "$run/averaged.pt" --beam 5 --max-len-a 1.5 --max-len-b 10 --max-tokens 4096 \
    --remove-bpe >"$run/generate.log"
bleu=$(lightseq-score --sys "$run/generate.log" --reference "$data/text/test_2016_flickr.de" \
    --detokenize de --json "$run/bleu.json")
python3 "$here/../record.py" "$checkpoints/checkpoint_last.pt" "$run/bleu.json" \
    --results "$results" --case "multi30k en-de test_2016_flickr $precision" \
    --system "$system" --seed "$seed"
echo "$bleu"
