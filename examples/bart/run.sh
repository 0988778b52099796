#!/usr/bin/env bash
# What does pre-training give to translation? Pre-train BART on the captions of Multi30k, German and
# English, then train German to English on some of the pairs, with the pre-trained model and from
# scratch; translate test_2016_flickr, score, and draw BLEU over the number of pairs.
#
#   bash examples/bart/run.sh [--native] [--size cpu|gpu] [--pairs "N N ..."] [--seed N]
#                             [--pretraining-updates N] [--updates N] [--data DIR] [--out DIR]
#
# --native trains and translates with fairseq's own model, optimizer and criteria, on the same data
# and noise and with the same flags. The default of --size is gpu if there is a GPU, else cpu.
# --updates N is the number of updates of each training on pairs. --data is the folder that
# examples/multi30k/prepare.sh wrote, or will write. An interrupted run continues: trainings that
# have a score are not repeated. To train again from the start, delete the run's folder in DIR.
set -euo pipefail

# shellcheck source=examples/functions.sh
. "$(dirname "${BASH_SOURCE[0]}")/../functions.sh"
read_flags "$@"
data=${data:-$root/examples/multi30k/data}
set_up filelock matplotlib sacremoses subword_nmt
size=${size:-$(size_of_this_machine)}

case $size in
    cpu)
        counts=${pairs:-1000 5000} pretraining=${pretraining_updates:-1000} updates=${updates:-500}
        took="an update: 0.5 s on one CPU core"
        model=(--encoder-layers 2 --encoder-embed-dim 128 --encoder-ffn-embed-dim 256
            --encoder-attention-heads 4
            --decoder-layers 2 --decoder-ffn-embed-dim 256 --decoder-attention-heads 4)
        # Its epochs are too few for overfitting.
        pretrain=(--lr 2e-3 --max-tokens 2048 --dropout 0 --attention-dropout 0)
        tune=(--lr 1e-3 --max-tokens 2048 --dropout 0.1)
        ;;
    gpu)
        counts=${pairs:-1000 5000 29000} pretraining=${pretraining_updates:-12000}
        updates=${updates:-2500}
        model=(--encoder-layers 6 --encoder-embed-dim 256 --encoder-ffn-embed-dim 1024
            --encoder-attention-heads 4
            --decoder-layers 6 --decoder-ffn-embed-dim 1024 --decoder-attention-heads 4)
        # A batch has some 500 captions, each with noise of its own.
        pretrain=(--lr 1e-3 --max-tokens 8192 --dropout 0.1 --bf16 --num-workers 8)
        tune=(--lr 7e-4 --max-tokens 4096 --dropout 0.3 --bf16)
        ;;
esac

[ -e "$data/bin" ] || bash "$root/examples/multi30k/prepare.sh" "$data"
run=$out/$size-$system-seed$seed
text=$run/text
mkdir -p "$text"

echo "== data: captions of both languages (10 s on one CPU core)"
dictionary=$data/bin/dict.de.txt # of both languages
cat "$data/text/train.bpe.de" "$data/text/train.bpe.en" >"$text/train"
cat "$data/text/val.bpe.de" "$data/text/val.bpe.en" >"$text/valid"
[ -e "$run/bin/valid.idx" ] || lightseq-preprocess --only-source --srcdict "$dictionary" \
    --trainpref "$text/train" --validpref "$text/valid" --destdir "$run/bin"

# Flags of all trainings. The rate falls to 0; eight validations, each with a checkpoint.
flags_of() { # UPDATES
    echo --arch ls_bart_base "${model[@]}" --optimizer ls_adam --weight-decay 0.01 \
        --clip-norm 1.0 --lr-scheduler polynomial_decay --warmup-updates $(($1 / 10)) \
        --total-num-update "$1" --max-update "$1" --seed "$seed" --distributed-world-size 1 \
        --save-interval-updates $((($1 + 7) / 8)) --keep-interval-updates 1 \
        --save-interval 100000 --validate-interval 100000 --no-epoch-checkpoints \
        --log-format json --log-interval $((($1 + 29) / 30))
}

if [ ! -e "$run/pretrained-$pretraining" ]; then
    echo "== pre-training: $size, $system, $pretraining updates${took:+ ($took)}"
    # A block is a caption, as in translation.
    # shellcheck disable=SC2046
    lightseq-train "$run/bin" ${native[@]+"${native[@]}"} --task denoising \
        --sample-break-mode eos --mask 0.3 --mask-length span-poisson --poisson-lambda 3 \
        --replace-length 1 --mask-random 0.1 --rotate 0 --criterion ls_cross_entropy \
        $(flags_of "$pretraining") --adam-betas '(0.9, 0.98)' "${pretrain[@]}" \
        --save-dir "$run/pretrained" 2>&1 | tee -i -a "$run/pretrain.log"
    touch "$run/pretrained-$pretraining"
fi
(cd "$root" && python3 -m examples.curves "$run/pretrain.log" "$run/pretrain.svg" \
    --title "Noised captions, $size, $system")

# Trains on the first PAIRS pairs, from the pre-trained model or from scratch; translates, scores.
translate() { # PAIRS pre-trained|scratch
    local pairs=$1 begin=$2 folder=$run/$1-$2 from=()
    [ ! -e "$folder/bleu.json" ] || return 0
    echo "== German to English: $pairs pairs, $begin, $size, $system, $updates updates" \
        "${took:+($took)}"
    if [ "$begin" = pre-trained ]; then
        from=(--finetune-from-model "$run/pretrained/checkpoint_best.pt")
    fi
    # shellcheck disable=SC2046
    lightseq-train "$run/pairs$pairs" ${native[@]+"${native[@]}"} --source-lang de \
        --target-lang en --criterion ls_label_smoothed_cross_entropy --label-smoothing 0.1 \
        $(flags_of "$updates") --adam-betas '(0.9, 0.98)' "${tune[@]}" \
        ${from[@]+"${from[@]}"} --save-dir "$folder/checkpoints" 2>&1 | tee -i -a "$folder.log"
    lightseq-generate "$run/pairs$pairs" ${native[@]+"${native[@]}"} --source-lang de \
        --target-lang en --path "$folder/checkpoints/checkpoint_best.pt" --beam 5 \
        --max-len-a 1.5 --max-len-b 10 --max-tokens 4096 --remove-bpe >"$folder/generate.log"
    lightseq-score --sys "$folder/generate.log" --reference "$data/text/test_2016_flickr.en" \
        --detokenize en --json "$folder/score.json"
    echo "{\"pairs\": $pairs, \"begin\": \"$begin\", \"pretraining_updates\": $pretraining}" \
        >"$folder/about.json"
    (cd "$root" && python3 -m examples.record "$folder/checkpoints/checkpoint_last.pt" \
        "$folder/score.json" "$folder/about.json" --results "$out/bleu.json" --system "$system" \
        --seed "$seed" --case "multi30k de-en, $size, $pairs pairs, $begin")
    mv "$folder/score.json" "$folder/bleu.json"
}

for pairs in $counts; do
    if [ ! -e "$run/pairs$pairs/test.de-en.de.idx" ]; then
        for lang in de en; do
            head -n "$pairs" "$data/text/train.bpe.$lang" >"$text/train$pairs.$lang"
        done
        lightseq-preprocess --source-lang de --target-lang en --joined-dictionary \
            --srcdict "$dictionary" --trainpref "$text/train$pairs" \
            --validpref "$data/text/val.bpe" --testpref "$data/text/test_2016_flickr.bpe" \
            --destdir "$run/pairs$pairs"
    fi
    for begin in scratch pre-trained; do translate "$pairs" "$begin"; done
done
(cd "$root" && python3 -m examples.bart.gain "$out/bleu.json" "$out/$size.svg" --size "$size")
