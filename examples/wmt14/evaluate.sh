#!/usr/bin/env bash
# WMT14 English-German: average a run's last checkpoints, translate newstest2014, print both scores
# (see README.md).
#
#   bash examples/wmt14/evaluate.sh RUN [--average N] [--reference FILE] [--results FILE]
#
# RUN is the folder that train.sh prints at its end. --average sets the number of epoch checkpoints
# to average (default 10). sacrebleu downloads the test set wmt14/full, unless --reference is given.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
run=
average=10
against=(--test-set wmt14/full --language-pair en-de)
results=$here/results/bleu.json

while [ $# -gt 0 ]; do
    case $1 in
        --average) average=${2:?--average needs a number}; shift 2 ;;
        --reference) against=(--reference "${2:?--reference needs a file}"); shift 2 ;;
        --results) results=${2:?--results needs a file}; shift 2 ;;
        -*) echo "evaluate.sh: unknown argument $1 (see the top of ${BASH_SOURCE[0]})" >&2; exit 2 ;;
        *) run=$1; shift ;;
    esac
done
if [ ! -e "$run/settings" ]; then
    echo "evaluate.sh: '$run' is no folder of a run; give the folder that train.sh prints at its end" >&2
    exit 2
fi
run=$(realpath "$run") results=$(realpath -m "$results")
mapfile -d '' -t settings <"$run/settings"
if [ ${#settings[@]} != 5 ]; then
    echo "evaluate.sh: $run/settings was not written by this version of train.sh; run train.sh again" \
        "with the same arguments" >&2
    exit 2
fi
system=${settings[0]} recipe=${settings[1]} seed=${settings[2]} precision=${settings[3]}
data=${settings[4]}
native=()
[ "$system" = lightseq ] || native=(--native)

echo "== averaging, translating newstest2014, scoring (translating: 1 s on an H200)"
lightseq-average --inputs "$run/checkpoints" --num-epoch-checkpoints "$average" \
    --output "$run/averaged.pt"
(cd "$root" && python3 -m examples.curves "$run/train.log" "$run/curves.svg" \
    --title "WMT14 en-de, $recipe, $system")
lightseq-generate "$data/bin" ${native[@]+"${native[@]}"} --source-lang en --target-lang de \
    --path "$run/averaged.pt" --beam 4 --lenpen 0.6 --max-tokens 4096 \
    --remove-bpe >"$run/generate.log"
bleu=$(lightseq-score --sys "$run/generate.log" "${against[@]}" --detokenize de \
    --json "$run/bleu.json")
split=$(lightseq-score --sys "$run/generate.log" --compound-split --json "$run/split.json")
(cd "$root" && python3 -m examples.record "$run/checkpoints/checkpoint_last.pt" "$run/bleu.json" \
    "$run/split.json" --results "$results" --case "wmt14 en-de $recipe $precision" \
    --system "$system" --seed "$seed")
printf '%s\n' "$split" "$bleu"
