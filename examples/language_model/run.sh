#!/usr/bin/env bash
# A GPT on the source of Python's standard library: write the text, learn and apply BPE, train,
# measure the test perplexity, continue a prompt.
#
#   bash examples/language_model/run.sh [--native] [--size cpu|gpu] [--updates N] [--files N]
#                                       [--seed N] [--out DIR]
#
# --native trains, evaluates and continues with fairseq's own model, optimizer and criterion, with
# the same data and flags. The default of --size is gpu if there is a GPU, else cpu. --files N takes
# N files for training, and N / 10 for each other split.
set -euo pipefail

# shellcheck source=examples/functions.sh
. "$(dirname "${BASH_SOURCE[0]}")/../functions.sh"
read_flags "$@"
set_up filelock matplotlib subword_nmt
size=${size:-$(size_of_this_machine)}

case $size in
    # Training is shorter than an epoch: no text is seen twice, so no dropout is needed.
    cpu)
        updates=${updates:-2000} block=256
        took="2000 updates: 6.5 minutes on one CPU core"
        recipe=(--decoder-layers 4 --decoder-embed-dim 256 --decoder-ffn-embed-dim 1024
            --decoder-attention-heads 4 --dropout 0 --attention-dropout 0
            --max-tokens 512 --lr 2e-3)
        ;;
    gpu)
        updates=${updates:-1000} block=512
        took="1000 updates: 17 s on an H200, with --native 67 s"
        recipe=(--decoder-layers 8 --decoder-embed-dim 512 --decoder-ffn-embed-dim 2048
            --decoder-attention-heads 8 --dropout 0.1 --attention-dropout 0.1
            --max-tokens 16384 --lr 1e-3 --bf16)
        ;;
esac

run=$out/$size-$system
text=$run/text
bin=$run/bin
checkpoints=$run/checkpoints
begin_again "$out" "${run##*/}"
mkdir -p "$text"

echo "== data: the standard library of $(python3 --version) (27 s on one core of an AMD EPYC)"
(cd "$root" && python3 -m examples.library_text "$text" ${files:+--files "$files"})
TQDM_DISABLE=1 subword-nmt learn-bpe -s 2000 <"$text/train.txt" >"$text/codes"
for split in train valid test; do
    subword-nmt apply-bpe -c "$text/codes" <"$text/$split.txt" >"$text/$split.bpe"
done
lightseq-preprocess --only-source --destdir "$bin" \
    --trainpref "$text/train.bpe" --validpref "$text/valid.bpe" --testpref "$text/test.bpe"

every=$(((updates + 4) / 5)) # updates between two validations, each with a checkpoint
echo "== training: $size, $system, $updates updates ($took)"
lightseq-train "$bin" ${native[@]+"${native[@]}"} --task language_modeling \
    --arch ls_transformer_lm_gpt --share-decoder-input-output-embed "${recipe[@]}" \
    --tokens-per-sample "$block" \
    --optimizer ls_adam --adam-betas '(0.9, 0.98)' --weight-decay 0.01 --clip-norm 1.0 \
    --lr-scheduler polynomial_decay --warmup-updates $((updates / 10)) \
    --total-num-update "$updates" --max-update "$updates" \
    --criterion ls_cross_entropy --seed "$seed" --num-workers 0 --distributed-world-size 1 \
    --save-dir "$checkpoints" --save-interval-updates "$every" --keep-interval-updates 1 \
    --save-interval 100000 --validate-interval 100000 --no-epoch-checkpoints \
    --log-format json --log-interval $(((updates + 29) / 30)) 2>&1 | tee -i "$run/train.log"
(cd "$root" && python3 -m examples.curves "$run/train.log" "$run/curves.svg" \
    --title "Python's standard library, $size, $system")

echo "== test perplexity (--size cpu: 25 s on one core of an AMD EPYC)"
lightseq-eval-lm "$bin" ${native[@]+"${native[@]}"} --path "$checkpoints/checkpoint_best.pt" \
    --gen-subset test --tokens-per-sample "$block" --batch-size 8 2>&1 | tee -i "$run/evaluate.log"
version=$(python3 -c 'import platform; print(platform.python_version())')
scores='{"python": "'$version'", "bits_per_token": \1, "perplexity": \2}'
sed -nE "s/.*Loss \\(base 2\\): ([0-9.]+), Perplexity: ([0-9.]+)$/$scores/p" "$run/evaluate.log" \
    >"$run/perplexity.json"

echo "== a prompt, continued (--size cpu: 4 s on one core of an AMD EPYC)"
(cd "$root" && python3 -m examples.language_model.prompt "$run" ${native[@]+"${native[@]}"}) |
    tee "$run/continued.txt"

(cd "$root" && python3 -m examples.record "$checkpoints/checkpoint_last.pt" "$run/perplexity.json" \
    --results "$out/perplexity.json" --case "Python's standard library, $size" \
    --system "$system" --seed "$seed")
for scores in "$out/$size"-*/perplexity.json; do # of both systems, if both have run
    name=$(basename "$(dirname "$scores")")
    echo "$name: test perplexity $(sed -E 's/.*"perplexity": ([0-9.]+).*/\1/' "$scores")"
done
