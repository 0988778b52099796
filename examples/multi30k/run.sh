#!/usr/bin/env bash
# Multi30k English-German: train, average checkpoints, translate test_2016_flickr, score, and write
# the result's row to bleu.json in the --out folder.
#
#   bash examples/multi30k/run.sh [--native] [--model small|t2t_big] [--seed N] [--updates N]
#                                 [--data DIR] [--out DIR] [-- WORD...]
#
# --native trains fairseq's own model, optimizer and criterion with the same flags. The environment
# variable PRECISION is fp32 (default of small), fp16, bf16 (default of t2t_big) or fp8. An
# interrupted run resumes from its last checkpoint; to train again from the start, delete its folder
# in DIR. WORDs are passed to lightseq-train. If training saves no checkpoint (--no-save), the script
# ends after the loss curves; t2t_big is trained like this.
set -euo pipefail

# shellcheck source=examples/functions.sh
. "$(dirname "${BASH_SOURCE[0]}")/../functions.sh"
read_flags "$@"
data=${data:-$here/data} model=${model:-small}
set_up filelock matplotlib
# every: updates between two validations; for the small model also between two checkpoints.
case $model in
    small)
        updates=${updates:-8000} precision=${PRECISION:-fp32} every=$(((updates + 63) / 64))
        took="8000 updates: 92 s on an H200 beside 5 other runs, with --native 7 minutes"
        recipe=(--arch ls_transformer
            --encoder-layers 4 --encoder-embed-dim 128 --encoder-ffn-embed-dim 256
            --decoder-layers 4 --decoder-embed-dim 128 --decoder-ffn-embed-dim 256
            --encoder-attention-heads 4 --decoder-attention-heads 4
            --lr 5e-3 --warmup-updates 2000
            --no-epoch-checkpoints --save-interval-updates "$every" --keep-interval-updates 10)
        ;;
    t2t_big)
        updates=${updates:-2000} precision=${PRECISION:-bf16} every=$(((updates + 15) / 16))
        took="2000 updates: 64 s on an H200 beside 3 other runs, with --native 4 minutes"
        recipe=(--arch ls_transformer_wmt_en_de_big_t2t --lr 5e-4 --warmup-updates 1000
            --no-save --validate-interval-updates "$every")
        ;;
esac
case $precision in
    fp32) precision_flag=() ;;
    fp16 | bf16) precision_flag=("--$precision") ;;
    fp8) precision_flag=(--bf16 --fp8) ;;
    *) echo "run.sh: PRECISION must be fp32, fp16, bf16 or fp8, not $precision" >&2; exit 2 ;;
esac

[ -e "$data/bin" ] || bash "$here/prepare.sh" "$data"
run=$out/$model-$system-seed$seed-$precision
checkpoints=$run/checkpoints
mkdir -p "$run"

# fairseq does one more update whenever it resumes a complete run, so mark complete runs by a file.
if [ ! -e "$run/trained-$updates" ]; then
    echo "== $model, $system, seed $seed: training, $updates updates ($took)"
    # Do not validate and save at the ends of epochs: an epoch has about as many updates as `every`.
    lightseq-train "$data/bin" ${native[@]+"${native[@]}"} --source-lang en --target-lang de \
        "${recipe[@]}" --share-all-embeddings --dropout 0.3 \
        --optimizer ls_adam --adam-betas '(0.9, 0.98)' --clip-norm 0.0 \
        --lr-scheduler inverse_sqrt --warmup-init-lr 1e-7 \
        --criterion ls_label_smoothed_cross_entropy --label-smoothing 0.1 \
        --max-tokens 4096 --max-update "$updates" --seed "$seed" --distributed-world-size 1 \
        ${precision_flag[@]+"${precision_flag[@]}"} \
        --save-dir "$checkpoints" --save-interval 100000 --validate-interval 100000 \
        --log-format json --log-interval $(((every + 4) / 5)) \
        ${words[@]+"${words[@]}"} 2>&1 | tee -i -a "$run/train.log"
    touch "$run/trained-$updates"
fi

(cd "$root" && python3 -m examples.curves "$run/train.log" "$run/curves.svg" \
    --title "Multi30k en-de, $model, $system")
[ -e "$checkpoints/checkpoint_last.pt" ] || exit 0 # --no-save

echo "== $model, $system, seed $seed: averaging, translating, scoring" \
    "(at most a minute on one core of an AMD EPYC)"
lightseq-average --inputs "$checkpoints" --num-update-checkpoints 10 --output "$run/averaged.pt"
lightseq-generate "$data/bin" ${native[@]+"${native[@]}"} --source-lang en --target-lang de \
    --path "$run/averaged.pt" --beam 5 --max-len-a 1.5 --max-len-b 10 --max-tokens 4096 \
    --remove-bpe >"$run/generate.log"
bleu=$(lightseq-score --sys "$run/generate.log" --reference "$data/text/test_2016_flickr.de" \
    --detokenize de --json "$run/bleu.json")
(cd "$root" && python3 -m examples.record "$checkpoints/checkpoint_last.pt" "$run/bleu.json" \
    --results "$out/bleu.json" --case "multi30k en-de test_2016_flickr $precision" \
    --system "$system" --seed "$seed")
echo "$bleu"
