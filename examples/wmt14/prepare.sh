#!/usr/bin/env bash
# WMT14 English-German: download, tokenise, split into subwords, binarise.
#
#   bash examples/wmt14/prepare.sh [--from DIR] [FOLDER]       default: examples/wmt14/data
#
# --from takes the archives from DIR instead of downloading them. Environment variables: MERGES is
# the number of joint subword merges (default 32000), JOBS the number of processes (default: one per
# core). FOLDER/bin and FOLDER/text/test.de can be copied to another machine: training and scoring
# need nothing else.
set -euo pipefail

# shellcheck source=examples/functions.sh
. "$(dirname "${BASH_SOURCE[0]}")/../functions.sh"
archives=
data=
merges=${MERGES:-32000}
jobs=${JOBS:-$(nproc)}
urls=(
    http://statmt.org/wmt13/training-parallel-europarl-v7.tgz
    http://statmt.org/wmt13/training-parallel-commoncrawl.tgz
    http://statmt.org/wmt14/training-parallel-nc-v9.tgz
    http://data.statmt.org/wmt17/translation-task/dev.tgz
    http://statmt.org/wmt14/test-full.tgz
)
corpora=(training/europarl-v7.de-en commoncrawl.de-en training/news-commentary-v9.de-en)

while [ $# -gt 0 ]; do
    case $1 in
        --from) archives=${2:?--from needs a folder}; shift 2 ;;
        -*) echo "prepare.sh: unknown argument $1 (see the top of ${BASH_SOURCE[0]})" >&2; exit 2 ;;
        *) data=$1; shift ;;
    esac
done
data=${data:-$here/data}

if [ -n "$archives" ]; then
    for url in "${urls[@]}"; do
        if [ ! -e "$archives/${url##*/}" ]; then
            echo "prepare.sh: $archives/${url##*/} is missing; download it from $url" >&2
            exit 2
        fi
    done
else
    echo "== archives: downloading 1.6 GB"
    archives=$data/archives
    mkdir -p "$archives"
    for url in "${urls[@]}"; do
        file=$archives/${url##*/}
        [ -e "$file" ] || { curl -fL --retry 3 "$url" -o "$file.part" && mv "$file.part" "$file"; }
    done
fi

raw=$data/raw
text=$data/text
begin_again "$data" raw text bin
mkdir -p "$raw" "$text"
for url in "${urls[@]}"; do
    tar -xzf "$archives/${url##*/}" -C "$raw"
done

in_chunks() { # COMMAND WORD...: pipes standard input through COMMAND, JOBS chunks at a time
    local chunks
    chunks=$(mktemp -d "$text/chunks.XXXXXX")
    split -a 4 -l 200000 - "$chunks/"
    # The last argument is the chunk's file. COMMAND and WORDs are arguments, not part of the script,
    # so that bash does not evaluate special characters in the names of folders.
    # shellcheck disable=SC2016
    find "$chunks" -type f -print0 |
        xargs -0 -P "$jobs" -n 1 bash -c '"${@:1:$#-1}" <"${!#}" >"${!#}.out"' in_chunks "$@"
    cat "$chunks"/*.out
    rm -r "$chunks"
}

# Carriage returns become spaces: sacremoses would treat them as ends of lines.
tokenise() { # LANG [normalize -c]
    tr '\r\t' '  ' | in_chunks sacremoses -q -l "$@" tokenize -a
}

segments() { # FILE.sgm: prints its sentences
    grep '<seg id' "$1" | sed -e 's/<seg id="[0-9]*">\s*//g' -e 's/\s*<\/seg>\s*//g'
}

echo "== tokens (all stages: about 2 hours on one core of an AMD EPYC, computed from Multi30k)"
for lang in en de; do
    for corpus in "${corpora[@]}"; do
        cat "$raw/$corpus.$lang"
    done | tokenise "$lang" normalize -c >"$text/train.tok.$lang"
    tokenise "$lang" normalize -c <"$raw/dev/newstest2013.$lang" >"$text/valid.tok.$lang"
done
segments "$raw/test-full/newstest2014-deen-src.en.sgm" >"$text/test.en"
segments "$raw/test-full/newstest2014-deen-ref.de.sgm" >"$text/test.de"
for lang in en de; do
    sed "s/’/'/g" "$text/test.$lang" | tokenise "$lang" >"$text/test.tok.$lang"
done
for split in train valid test; do
    if [ "$(wc -l <"$text/$split.tok.en")" != "$(wc -l <"$text/$split.tok.de")" ]; then
        echo "prepare.sh: $split has more lines in one language than in the other; the archives are" \
            "damaged; delete them and run prepare.sh again" >&2
        exit 1
    fi
done

echo "== subwords (all stages: about 2 hours on one core of an AMD EPYC, computed from Multi30k)"
cat "$text/train.tok.en" "$text/train.tok.de" |
    TQDM_DISABLE=1 subword-nmt learn-bpe -s "$merges" >"$text/codes"
for split in train valid test; do
    for lang in en de; do
        in_chunks subword-nmt apply-bpe -c "$text/codes" \
            <"$text/$split.tok.$lang" >"$text/$split.bpe.$lang"
    done
done

# Keep the pairs that Moses' clean-corpus-n.perl -ratio 1.5 keeps: 1 to 250 subwords per side, and
# neither side more than one and a half times as long as the other.
paste "$text/train.bpe.en" "$text/train.bpe.de" |
    EN=$text/train.clean.en DE=$text/train.clean.de awk -F '\t' '
        { m = split($1, words, " "); n = split($2, words, " ") }
        m && n && m <= 250 && n <= 250 && m <= 1.5 * n && n <= 1.5 * m {
            print $1 >ENVIRON["EN"]; print $2 >ENVIRON["DE"]
        }'

lightseq-preprocess --source-lang en --target-lang de --joined-dictionary --destdir "$data/bin" \
    --trainpref "$text/train.clean" --validpref "$text/valid.bpe" --testpref "$text/test.bpe" \
    --workers "$jobs"
