#!/usr/bin/env bash
# Summaries: write the first sentence of a docstring from the rest. Take the docstrings of Python's
# standard library, pre-train BART on them, fine-tune it on pairs of text and summary, summarise the
# docstrings of other files, and score.
#
#   bash examples/summaries/run.sh [--native] [--size cpu|gpu] [--pretraining-updates N]
#                                  [--updates N] [--files N] [--seed N] [--out DIR]
#
# --native trains and summarises with fairseq's own model, optimizer and criteria, with the same
# data, noise and flags. The default of --size is gpu if there is a GPU, else cpu. --files N takes N
# files for training, and N / 10 for each other split.
set -euo pipefail

# shellcheck source=examples/functions.sh
. "$(dirname "${BASH_SOURCE[0]}")/../functions.sh"
read_flags "$@"
set_up filelock matplotlib sentencepiece
size=${size:-$(size_of_this_machine)}

# The other settings of both trainings are the recipe's, which the first lines of a training name.
case $size in
    cpu)
        pretraining=${pretraining_updates:-1000} updates=${updates:-400}
        sizes=(--encoder-layers 2 --encoder-embed-dim 128 --encoder-ffn-embed-dim 256
            --encoder-attention-heads 4
            --decoder-layers 2 --decoder-ffn-embed-dim 256 --decoder-attention-heads 4)
        # Few epochs, so there is no overfitting.
        pretrain=(--lr 2e-3 --max-tokens 1024 --dropout 0 --attention-dropout 0)
        tune=(--lr 1e-3 --max-tokens 2048)
        pretraining_took="1000 updates: 3.5 minutes on one CPU core"
        took="400 updates: 2 minutes on one CPU core"
        summaries_took="13 s on one CPU core"
        ;;
    gpu)
        pretraining=${pretraining_updates:-5000} updates=${updates:-600}
        sizes=(--encoder-layers 6 --encoder-embed-dim 256 --encoder-ffn-embed-dim 1024
            --encoder-attention-heads 4
            --decoder-layers 6 --decoder-ffn-embed-dim 1024 --decoder-attention-heads 4)
        pretrain=(--lr 1e-3 --max-tokens 8192 --bf16 --num-workers 8)
        tune=(--lr 3e-4 --max-tokens 8192 --bf16 --dropout 0.3)
        ;;
esac

run=$out/$size-$system-seed$seed
text=$run/text
begin_again "$out" "${run##*/}"
mkdir -p "$text"

echo "== data: docstrings of $(python3 --version) (22 s on one CPU core)"
(cd "$root" && python3 -m examples.summaries.docstrings "$text" ${files:+--files "$files"})
python3 - "$text" <<'END'
import sys
from sentencepiece import SentencePieceTrainer as Trainer
Trainer.train(input=f"{sys.argv[1]}/train.all", model_prefix=f"{sys.argv[1]}/sp", vocab_size=3000,
              hard_vocab_limit=False, minloglevel=2)
END
lightseq-preprocess --only-source --sentencepiece "$text/sp.model" \
    --trainpref "$text/train.all" --validpref "$text/valid.all" --destdir "$run/docstrings"
lightseq-preprocess -s text -t summary --joined-dictionary --sentencepiece "$text/sp.model" \
    --trainpref "$text/train" --validpref "$text/valid" --testpref "$text/test" --destdir "$run/bin"

# Trains with the recipe's settings. Five validations, each with a checkpoint.
train() { # UPDATES LOG FLAG...
    local every=$((($1 + 4) / 5)) interval=$((($1 + 29) / 30)) updates=$1 log=$2
    shift 2
    lightseq-train ${native[@]+"${native[@]}"} --arch ls_bart_base "${sizes[@]}" --update-freq 1 \
        --max-update "$updates" --seed "$seed" --distributed-world-size 1 \
        --save-interval-updates "$every" --keep-interval-updates 1 --save-interval 100000 \
        --validate-interval 100000 --no-epoch-checkpoints --log-format json \
        --log-interval "$interval" "$@" 2>&1 | tee -i "$run/$log.log"
    (cd "$root" && python3 -m examples.curves "$run/$log.log" "$run/$log.svg" \
        --title "Docstrings, $log, $size, $system")
}

echo "== pre-training: $size, $system, $pretraining updates" \
    "${pretraining_took:+($pretraining_took)}"
train "$pretraining" pre-training "$run/docstrings" --task denoising --sample-break-mode eos \
    "${pretrain[@]}" --save-dir "$run/pretrained"

echo "== fine-tuning: $size, $system, $updates updates${took:+ ($took)}"
train "$updates" fine-tuning "$run/bin" -s text -t summary \
    --finetune-from-model "$run/pretrained/checkpoint_best.pt" "${tune[@]}" --save-dir "$run/tuned"

echo "== summaries of the docstrings of other files${summaries_took:+ ($summaries_took)}"
lightseq-generate "$run/bin" ${native[@]+"${native[@]}"} --path "$run/tuned/checkpoint_best.pt" \
    --beam 4 --max-len-b 40 --no-repeat-ngram-size 3 --max-tokens 4096 \
    --output-text "$run/summaries.txt" >"$run/generate.log"
(cd "$root" && python3 -m examples.summaries.rouge "$run/summaries.txt" "$text/test.text" \
    "$text/test.summary" --json "$run/rouge.json")
(cd "$root" && python3 -m examples.record "$run/tuned/checkpoint_last.pt" "$run/rouge.json" \
    --results "$out/rouge.json" --case "docstrings, $size" --system "$system" --seed "$seed")
