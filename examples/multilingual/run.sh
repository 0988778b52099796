#!/usr/bin/env bash
# Multi30k in all directions by one model: make a folder of Hugging Face with an NLLB model of random
# weights and a tokenizer, import it, binarise the raw captions, train, translate and score each
# direction, and export the model back to Hugging Face.
#
#   bash examples/multilingual/run.sh [--native] [--size cpu|gpu] [--updates N] [--seed N]
#                                     [--raw DIR] [--out DIR] [-- WORD...]
#
# --native trains fairseq's own model, optimizer and criterion with the same data and flags. The
# default of --size is gpu if there is a GPU, else cpu; gpu has NLLB-600M's sizes and 256206 words.
# --raw is the folder of Multi30k's raw files (default: $MULTI30K, or examples/multi30k/raw); of
# English, German, French and Czech it takes the languages that are there. WORDs are passed to
# lightseq-train.
set -euo pipefail

# shellcheck source=examples/functions.sh
. "$(dirname "${BASH_SOURCE[0]}")/../functions.sh"
read_flags "$@"
raw=$(realpath -m "${raw:-${MULTI30K:-$root/examples/multi30k/raw}}")
set_up filelock matplotlib tokenizers transformers
size=${size:-$(size_of_this_machine)}

case $size in
    cpu)
        updates=${updates:-2000}
        recipe=(--lr 5e-3 --dropout 0.1 --attention-dropout 0 --max-tokens 2048)
        data_took="28 s on one CPU core"
        took="an update: 0.5 s on one CPU core"
        translation_took="33 s each on one CPU core"
        export_took="6 s on one CPU core"
        ;;
    gpu)
        updates=${updates:-2000}
        recipe=(--lr 3e-4 --dropout 0.3 --attention-dropout 0.1 --max-tokens 8192 --bf16)
        ;;
esac

run=$out/$size-$system-seed$seed
begin_again "$out" "${run##*/}"
mkdir -p "$run"

echo "== data: a random model, its tokenizer, the captions in its words" \
    "${data_took:+($data_took)}"
(cd "$root" && python3 -m examples.multilingual.model "$raw" "$run/model" "$run/text" \
    --size "$size" --seed "$seed")
lightseq-import "$run/model" "$run/imported"
mapfile -t languages <"$run/imported/languages.txt"
directions=()
for source in "${languages[@]}"; do
    for target in "${languages[@]}"; do
        if [ "$source" = "$target" ]; then continue; fi
        directions+=("$source-$target")
        if [[ $source > $target ]]; then continue; fi # both directions read the same files
        lightseq-preprocess --hf-tokenizer "$run/imported" -s "$source" -t "$target" \
            --trainpref "$run/text/train" --validpref "$run/text/valid" \
            --testpref "$run/text/test" --destdir "$run/bin"
    done
done
pairs=$(IFS=,; echo "${directions[*]}")

echo "== training: $size, $system, $updates updates, $pairs${took:+ ($took)}"
every=$(((updates + 9) / 10)) # updates between two validations, each with a checkpoint
lightseq-train "$run/bin" ${native[@]+"${native[@]}"} --arch ls_transformer \
    --finetune-from-model "$run/imported/model.pt" --task translation_multi_simple_epoch \
    --lang-pairs "$pairs" --lang-dict "$run/imported/languages.txt" \
    --encoder-langtok src --decoder-langtok \
    --sampling-method temperature --sampling-temperature 1.5 \
    --optimizer ls_adam --adam-betas '(0.9, 0.98)' --clip-norm 1.0 \
    --criterion ls_label_smoothed_cross_entropy --label-smoothing 0.1 \
    --lr-scheduler inverse_sqrt --warmup-updates $(((updates + 4) / 5)) --max-update "$updates" \
    "${recipe[@]}" --seed "$seed" --distributed-world-size 1 \
    --save-dir "$run/checkpoints" --save-interval-updates "$every" --keep-interval-updates 1 \
    --save-interval 100000 --validate-interval 100000 --no-epoch-checkpoints \
    --log-format json --log-interval $(((updates + 29) / 30)) \
    ${words[@]+"${words[@]}"} 2>&1 | tee -i "$run/train.log"
(cd "$root" && python3 -m examples.curves "$run/train.log" "$run/curves.svg" \
    --title "Multi30k in ${#directions[@]} directions, $size, $system")

echo "== translation of test_2016_flickr, each direction" \
    "${translation_took:+($translation_took)}"
for direction in "${directions[@]}"; do
    target=${direction#*-}
    lightseq-generate "$run/bin" ${native[@]+"${native[@]}"} -s "${direction%-*}" -t "$target" \
        --path "$run/checkpoints/checkpoint_best.pt" --beam 4 --max-len-a 1.5 --max-len-b 10 \
        --max-tokens 4096 --output-text "$run/$direction.out" >"$run/$direction.log"
    lightseq-score --sys "$run/$direction.out" --reference "$run/text/test.$target" \
        --json "$run/$direction.json" >/dev/null
    (cd "$root" && python3 -m examples.record "$run/checkpoints/checkpoint_last.pt" \
        "$run/$direction.json" --results "$out/bleu.json" \
        --case "multi30k $direction $size" --system "$system" --seed "$seed")
done

echo "== export to Hugging Face: $run/exported${export_took:+ ($export_took)}"
lightseq-export "$run/checkpoints/checkpoint_best.pt" --to huggingface --output "$run/exported"
for direction in "${directions[@]}"; do
    echo "$system, $direction: BLEU $(sed -E 's/.*"bleu": ([0-9.]+).*/\1/' "$run/$direction.json")"
done
