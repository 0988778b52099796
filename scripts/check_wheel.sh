#!/usr/bin/env bash
# Installs this package as its users do, and runs it: an sdist; a wheel from it, in pip's own build
# environment; a new environment with torch, the wheel and fairseq; there, on a CPU, doctor,
# training, translation and both benchmarks.
#
# If this checkout has the kernels compiled, the wheel has them too, linked from the same objects.
#
#   PATH=$PWD/.venv/bin:$PATH bash scripts/check_wheel.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

root=$PWD
work=$root/build/check_wheel
log=$work/log
rm -rf "$work"
objects=build/cuda library=lightseq_fairseq/_lib
if [ "${LIGHTSEQ_CUDA_QUICK:-}" = 1 ]; then objects=build/quick library=$objects; fi
mkdir -p "$work/run" "$objects"
export PIP_DISABLE_PIP_VERSION_CHECK=1 LIGHTSEQ_BUILD=0
export PIP_NO_COMPILE=no # which pip reads as --no-compile: few modules are imported below
if compgen -G "$library/*.so" >/dev/null; then LIGHTSEQ_BUILD=1; fi

run() {
    echo "check_wheel: ${*//$work\//}"
    "$@" >>"$log" 2>&1 || {
        tail -n 50 "$log"
        echo "check_wheel: $1 failed; all output is in $log" >&2
        exit 1
    }
}

run python -c "from setuptools import build_meta; build_meta.build_sdist('$work')"
sources=$work/sources # with a version in its name, pip would cache the wheel of the first run
mkdir -p "$sources/build"
tar -xzf "$work"/*.tar.gz -C "$sources" --strip-components 1
ln -s "$root/$objects" "$sources/$objects"
run python -m pip wheel --no-deps --wheel-dir "$work/dist" "$sources"
wheel=$(echo "$work"/dist/*.whl)

run python -m venv "$work/venv"
PATH=$work/venv/bin:$PATH
run pip install torch==2.13.0 "$wheel[fairseq,bench]"
run env -u CUDA_HOME pip install --no-deps fairseq==0.12.2

cd "$work/run" # not the checkout, whose modules Python would find first
unset PYTHONPATH
export CUDA_VISIBLE_DEVICES='' OMP_NUM_THREADS=1
python - <<'PYTHON'
import os, random, sys
from lightseq_fairseq import ops
from lightseq_fairseq.ops import library

status = library.load()
if os.environ["LIGHTSEQ_BUILD"] == "1":
    assert str(status.path).startswith(sys.prefix), status
    assert set(status.kernels) == set(ops.REFERENCES), status

random.seed(1)
for split, pairs in (("train", 400), ("valid", 20), ("test", 20)):
    with open(f"{split}.de", "w") as source, open(f"{split}.en", "w") as target:
        for _ in range(pairs):
            words = random.choices(range(20), k=random.randint(3, 9))
            print(*(f"w{word}" for word in words), file=source)
            print(*(f"v{word}" for word in words), file=target)
PYTHON
run lightseq-doctor
run lightseq-preprocess --source-lang de --target-lang en --destdir data \
    --trainpref train --validpref valid --testpref test
run lightseq-train data --arch ls_transformer_tiny --cpu --max-update 20 --max-tokens 400 \
    --num-workers 0 --no-epoch-checkpoints
run python -m lightseq_fairseq generate data --path checkpoints/checkpoint_last.pt --cpu \
    --max-len-b 10 --num-workers 0 --output out
test "$(grep -c '^D-' out)" = 20
run lightseq-score --sys out --reference test.en
small=(--systems ours --rounds 1 --vocabulary 500)
run lightseq-bench train --case tiny/256/bf16 "${small[@]}" --pairs 500 --updates 50 --warm-up 0 \
    --workers 0
run lightseq-bench generate --case tiny/b32/beam4/fp32 "${small[@]}" --sentences 32 --passes 1

cd "$root"
echo "check_wheel: $(basename "$wheel") installs into a new environment and runs"
rm -rf "$work"
