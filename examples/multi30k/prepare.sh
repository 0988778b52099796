#!/usr/bin/env bash
# Multi30k English-German: tokenise, split into subwords, binarise.
#
#   bash examples/multi30k/prepare.sh [FOLDER]        default: examples/multi30k/data
#
# Environment variables: MULTI30K (default: examples/multi30k/raw) is the folder of the raw files
# {train,val,test_2016_flickr}.{en,de}.gz of task 1 in the multi30k dataset's repository; MERGES
# (default: 8000) is the number of subword merges. FOLDER can be copied to another machine: training
# and scoring there need nothing else.
set -euo pipefail

# shellcheck source=examples/functions.sh
. "$(dirname "${BASH_SOURCE[0]}")/../functions.sh"
raw=${MULTI30K:-$here/raw}
merges=${MERGES:-8000}
data=${1:-$here/data}

for split in train val test_2016_flickr; do
    for lang in en de; do
        if [ ! -e "$raw/$split.$lang.gz" ]; then
            echo "prepare.sh: $raw/$split.$lang.gz is missing; set MULTI30K to a folder with the" \
                "task 1 raw files of the multi30k dataset's repository" >&2
            exit 2
        fi
    done
done

set_up sacremoses subword_nmt
echo "== data: tokens, subwords, data-bin (23 s on one core of an AMD EPYC)"
text=$data/text
begin_again "$data" text bin
mkdir -p "$text"

for split in train val test_2016_flickr; do
    for lang in en de; do
        gzip -dc "$raw/$split.$lang.gz" >"$text/$split.$lang"
        sacremoses -q -l "$lang" tokenize -a <"$text/$split.$lang" >"$text/$split.tok.$lang"
    done
done
cat "$text/train.tok.en" "$text/train.tok.de" |
    TQDM_DISABLE=1 subword-nmt learn-bpe -s "$merges" >"$text/codes"
for split in train val test_2016_flickr; do
    for lang in en de; do
        subword-nmt apply-bpe -c "$text/codes" <"$text/$split.tok.$lang" >"$text/$split.bpe.$lang"
    done
done
lightseq-preprocess --source-lang en --target-lang de --joined-dictionary --destdir "$data/bin" \
    --trainpref "$text/train.bpe" --validpref "$text/val.bpe" \
    --testpref "$text/test_2016_flickr.bpe"
