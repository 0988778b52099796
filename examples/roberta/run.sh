#!/usr/bin/env bash
# A RoBERTa that tells whether a German caption is the translation of an English one: write the
# text, learn and apply BPE, pre-train, fine-tune, measure the accuracy on the test pairs.
#
#   bash examples/roberta/run.sh [--native] [--size cpu|gpu] [--updates N] [--files N] [--seed N]
#                                [--without-pretraining] [--data DIR] [--out DIR]
#
# --native trains and evaluates fairseq's own model, optimizer and criteria, with the same data and
# flags. The default of --size is gpu if there is a GPU, else cpu. --updates N is the number of
# updates of each of the two trainings. --files N takes N files of the standard library for
# pre-training, and N / 10 for validation. --data is the folder that examples/multi30k/prepare.sh
# wrote, or will write.
set -euo pipefail

# shellcheck source=examples/functions.sh
. "$(dirname "${BASH_SOURCE[0]}")/../functions.sh"
read_flags "$@"
data=${data:-$root/examples/multi30k/data} without=${without_pretraining:-}
set_up filelock matplotlib sacremoses subword_nmt
size=${size:-$(size_of_this_machine)}

case $size in
    # Training has few epochs, so it needs no dropout against overfitting.
    cpu)
        updates=${updates:-1000} files=${files:-60}
        run_took="4 minutes on one CPU core"
        took="1000 updates: 3 minutes on one CPU core"
        model=(--encoder-layers 2 --encoder-embed-dim 128 --encoder-ffn-embed-dim 256
            --encoder-attention-heads 4 --dropout 0 --attention-dropout 0)
        pretrain=(--max-tokens 2048 --lr 3e-3)
        finetune=(--max-tokens 4096 --batch-size 64 --lr 1e-3)
        ;;
    gpu)
        updates=${updates:-3000}
        run_took="3.5 minutes on an H200 beside other work"
        took="3000 updates: 82 s on an H200 beside other work"
        model=(--encoder-layers 6 --encoder-embed-dim 512 --encoder-ffn-embed-dim 2048
            --encoder-attention-heads 8 --dropout 0.1 --attention-dropout 0.1)
        pretrain=(--max-tokens 16384 --lr 1e-3 --bf16)
        finetune=(--max-tokens 8192 --batch-size 128 --lr 1e-4 --bf16)
        ;;
esac

[ -e "$data/bin" ] || bash "$root/examples/multi30k/prepare.sh" "$data"
case="Multi30k pairs, $size"
kind=$size
if [ -n "$without" ]; then case="$case, without pre-training" kind=$size-without; fi
run=$out/$kind-$system-seed$seed
text=$run/text
begin_again "$out" "${run##*/}"
mkdir -p "$text"

echo "== data: Multi30k and the standard library of $(python3 --version)" \
    "(all stages: $run_took)"
(cd "$root" && python3 -m examples.library_text "$text/library" ${files:+--files "$files"})
for lang in en de; do
    cp "$data/text/train.tok.$lang" "$text/train.tok.$lang"
    cp "$data/text/val.tok.$lang" "$text/valid.tok.$lang"
    cp "$data/text/test_2016_flickr.tok.$lang" "$text/test.tok.$lang"
done
for split in train valid test; do mv "$text/library/$split.txt" "$text/$split.tok.py"; done
cat "$text"/train.tok.* | TQDM_DISABLE=1 subword-nmt learn-bpe -s 4000 >"$text/codes"
for split in train valid test; do
    for lang in en de py; do
        subword-nmt apply-bpe -c "$text/codes" <"$text/$split.tok.$lang" >"$text/$split.$lang"
    done
done
(cd "$root" && python3 -m examples.roberta.pairs "$text")
lightseq-preprocess --only-source --destdir "$run/bin" \
    --trainpref "$text/masked.train" --validpref "$text/masked.valid"
for part in input0 input1 label; do
    dictionary=(--srcdict "$run/bin/dict.txt")
    if [ "$part" = label ]; then dictionary=(); fi # the labels have their own
    lightseq-preprocess --only-source ${dictionary[@]+"${dictionary[@]}"} \
        --trainpref "$text/train.$part" --validpref "$text/valid.$part" \
        --testpref "$text/test.$part" --destdir "$run/pairs/$part"
done

every=$(((updates + 4) / 5)) # updates between two validations, each with a checkpoint
# One worker: without any, fairseq draws masks in two threads from one generator while it validates,
# so that two equal native runs differ.
common=(--arch ls_roberta "${model[@]}" --optimizer ls_adam --adam-betas '(0.9, 0.98)'
    --weight-decay 0.01 --clip-norm 1.0 --lr-scheduler polynomial_decay
    --warmup-updates $((updates / 10)) --total-num-update "$updates" --max-update "$updates"
    --seed "$seed" --num-workers 1 --distributed-world-size 1
    --save-interval-updates "$every" --keep-interval-updates 1 --save-interval 100000
    --validate-interval 100000 --no-epoch-checkpoints
    --log-format json --log-interval $(((updates + 29) / 30)))

tuned_from=()
if [ -z "$without" ]; then
    echo "== pre-training: $size, $system, $updates updates (all stages: $run_took)"
    lightseq-train "$run/bin" ${native[@]+"${native[@]}"} --task masked_lm \
        "${common[@]}" "${pretrain[@]}" --criterion ls_masked_lm \
        --sample-break-mode eos --tokens-per-sample 256 \
        --save-dir "$run/pretrained" 2>&1 | tee -i "$run/pretrain.log"
    (cd "$root" && python3 -m examples.curves "$run/pretrain.log" "$run/pretrain.svg" \
        --title "Masked captions and source code, $size, $system")
    tuned_from=(--finetune-from-model "$run/pretrained/checkpoint_best.pt")
fi

echo "== fine-tuning: $size, $system, $updates updates ($took)"
task=(--task sentence_prediction --num-classes 2 --init-token 0 --separator-token 2
    --max-positions 256)
lightseq-train "$run/pairs" ${native[@]+"${native[@]}"} "${task[@]}" \
    "${common[@]}" "${finetune[@]}" --criterion ls_sentence_prediction \
    ${tuned_from[@]+"${tuned_from[@]}"} \
    --best-checkpoint-metric accuracy --maximize-best-checkpoint-metric \
    --save-dir "$run/tuned" 2>&1 | tee -i "$run/finetune.log"
(cd "$root" && python3 -m examples.curves "$run/finetune.log" "$run/finetune.svg" \
    --title "Pairs of captions, $size, $system")

echo "== accuracy on the test pairs (all stages: $run_took)"
lightseq-validate "$run/pairs" ${native[@]+"${native[@]}"} "${task[@]}" \
    --path "$run/tuned/checkpoint_best.pt" --valid-subset test --batch-size 64 \
    --log-format json 2>&1 | tee -i "$run/evaluate.log"
scores='{"pretraining_updates": '$([ -z "$without" ] && echo "$updates" || echo 0)
sed -nE "s/.*\"test_accuracy\": \"([0-9.]+)\".*/$scores, \"accuracy\": \\1}/p" "$run/evaluate.log" \
    >"$run/accuracy.json"

(cd "$root" && python3 -m examples.record "$run/tuned/checkpoint_last.pt" "$run/accuracy.json" \
    --results "$out/accuracy.json" --case "$case" --system "$system" --seed "$seed")
for scores in "$out/$size"-*/accuracy.json; do # of all runs of this size
    name=$(basename "$(dirname "$scores")")
    echo "$name: accuracy $(sed -E 's/.*"accuracy": ([0-9.]+).*/\1/' "$scores")%"
done
