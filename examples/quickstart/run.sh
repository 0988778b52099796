#!/usr/bin/env bash
# German number names to English: set up, make the data, train, translate, score.
#
#   bash examples/quickstart/run.sh [--native] [--updates N] [--pairs N] [--seed N] [--out DIR]
#
# --native trains and translates with fairseq's own model, optimizer and criterion instead.
set -euo pipefail

# shellcheck source=examples/functions.sh
. "$(dirname "${BASH_SOURCE[0]}")/../functions.sh"
read_flags "$@"
updates=${updates:-500} pairs=${pairs:-15000}
set_up matplotlib num2words subword_nmt

text=$out/text
bin=$out/bin
checkpoints=$out/checkpoints
begin_again "$out" text bin checkpoints
mkdir -p "$text"

echo "== data: $pairs training pairs (15000: 12 s on one core of an AMD EPYC)"
python3 "$here/make_data.py" "$text" --pairs "$pairs"
cat "$text/train.de" "$text/train.en" | TQDM_DISABLE=1 subword-nmt learn-bpe -s 100 >"$text/codes"
for split in train valid test; do
    for lang in de en; do
        subword-nmt apply-bpe -c "$text/codes" <"$text/$split.$lang" >"$text/$split.bpe.$lang"
    done
done
lightseq-preprocess --source-lang de --target-lang en --joined-dictionary --destdir "$bin" \
    --trainpref "$text/train.bpe" --validpref "$text/valid.bpe" --testpref "$text/test.bpe"

echo "== training: $updates updates (500: 85 s on one core of an AMD EPYC)"
lightseq-train "$bin" ${native[@]+"${native[@]}"} --source-lang de --target-lang en \
    --arch ls_transformer --share-all-embeddings \
    --encoder-layers 2 --encoder-embed-dim 128 --encoder-ffn-embed-dim 512 \
    --decoder-layers 2 --decoder-embed-dim 128 --decoder-ffn-embed-dim 512 \
    --encoder-attention-heads 4 --encoder-normalize-before \
    --decoder-attention-heads 4 --decoder-normalize-before \
    --dropout 0 --max-tokens 2048 --max-update "$updates" --seed "$seed" --num-workers 0 \
    --optimizer ls_adam --adam-betas '(0.9, 0.98)' --clip-norm 1.0 \
    --lr 3e-3 --lr-scheduler polynomial_decay \
    --warmup-updates $((updates / 10)) --total-num-update "$updates" \
    --criterion ls_label_smoothed_cross_entropy --label-smoothing 0.1 \
    --eval-bleu --eval-bleu-args '{"beam": 1, "max_len_b": 40}' \
    --eval-bleu-detok space --eval-bleu-remove-bpe \
    --save-dir "$checkpoints" --no-epoch-checkpoints \
    --log-format json --log-interval $(((updates + 29) / 30)) 2>&1 | tee -i "$out/train.log"

echo "== translating the test set (5 s on one core of an AMD EPYC)"
lightseq-generate "$bin" ${native[@]+"${native[@]}"} --source-lang de --target-lang en \
    --path "$checkpoints/checkpoint_last.pt" --beam 1 --max-len-b 40 --max-tokens 4096 \
    --remove-bpe --output-text "$out/test.hyp.en" >"$out/generate.log"

(cd "$root" && python3 -m examples.curves "$out/train.log" "$out/curves.svg" \
    --title "German number names to English")
echo "after $SECONDS s: translations: $out/test.hyp.en   curves: $out/curves.svg"
number=vierhundertsechstausendacht # four hundred and six thousand and eight
if [ -n "${activated:-}" ]; then
    echo "before you translate, type: . $root/.venv/bin/activate"
fi
echo "translate a number (the line D-0): echo $number | lightseq-interactive $bin --beam 1 --max-len-b 40 \\
    --path $checkpoints/checkpoint_last.pt --bpe subword_nmt --bpe-codes $text/codes --remove-bpe"
echo "in Python: python3 -c 'from lightseq_fairseq import Translator; print(Translator.from_pretrained(
    \"$checkpoints\", \"$bin\", bpe=\"subword_nmt\", bpe_codes=\"$text/codes\", remove_bpe=True
).translate(\"$number\", beam=1, max_len_b=40).text)'"
lightseq-score --sys "$out/test.hyp.en" --reference "$text/test.en" --json "$out/bleu.json"
