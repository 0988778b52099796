#!/usr/bin/env bash
# All checks that need no GPU: style, types, generated files, CUDA compile and link, the wheel, tests.
# Sets up .venv first, with what the checks need. Every check runs; the exit status is 0 if all of
# them passed.
#
#   bash scripts/test.sh [pytest's arguments, with which the wheel is not checked]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Otherwise each process that a test starts would compile our modules again.
unset PYTHONDONTWRITEBYTECODE

# Commands that fail when a generated file is older than what it is generated from.
up_to_date=("python -m scripts.tables --check" "python -m scripts.flags --check")

failed=$(mktemp)
check() {
    echo "== $*"
    "$@" || echo "failed: $*" >>"$failed"
}

check_texts() {
    check ruff check --quiet .
    check ruff format --check --quiet .
    mapfile -t cuda_sources < <(find csrc -name '*.cu' -o -name '*.cuh' -o -name '*.h' | sort)
    check clang-format --dry-run -Werror "${cuda_sources[@]}"
    check mypy --no-error-summary
    for command in "${up_to_date[@]}"; do
        # shellcheck disable=SC2086
        check $command
    done
}

# Without a GPU nobody will run the kernels, so the build of setup.sh need not make them fast.
compiled=cuda
if ! command -v nvidia-smi >/dev/null; then
    compiled=quick
    export LIGHTSEQ_CUDA_QUICK=1
fi
# The name of an object holds a hash of all that it depends on, so objects of other clones serve too.
objects=${XDG_CACHE_HOME:-$HOME/.cache}/lightseq_fairseq/cuda
mkdir -p "build/$compiled" "$objects"
find "$objects" -type f -mtime +14 -delete
cp --link --no-clobber "$objects"/. "build/$compiled" --recursive 2>/dev/null || true
check env LIGHTSEQ_BUILD=possible bash scripts/setup.sh docs,test
PATH=$PWD/.venv/bin:$PATH
cp --link --no-clobber "build/$compiled"/*-*.* "$objects" 2>/dev/null || true
# The oldest transformers that accelerate supports, in a folder of its own.
oldest=$PWD/build/transformers-5.0.0
# These wait for each other and for files, so they and the tests share the cores.
beside=$(mktemp)
{
    check_texts
    if [ $# = 0 ]; then
        check bash scripts/check_wheel.sh
        # Few of its modules are imported.
        [ -e "$oldest" ] ||
            check pip install --quiet --no-compile --target "$oldest" transformers==5.0.0
    fi
} >"$beside" 2>&1 &

# Hide the GPUs, so that the tests are the same on every machine: if autograd sees a GPU it starts
# threads, and processes that some tests fork would fail. gpu_check.sh runs the tests on a GPU.
export CUDA_VISIBLE_DEVICES=
# Two processes of one thread each: the tests' tensors are too small for more. All tests of a file
# run in one of them, so that its fixtures are made once. tests/conftest.py has the order of the
# files; by default pytest-xdist would begin with the files that have the most tests.
export OMP_NUM_THREADS=1
check python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"

wait
cat "$beside"
if [ $# = 0 ]; then
    check env PYTHONPATH="$oldest" python -m pytest -n 2 --dist loadfile \
        tests/huggingface/test_{accelerate,calls,fallbacks,features,gpt2,modernbert,searched_text}.py \
        tests/huggingface/test_{seq2seq,vit}.py
fi

cat "$failed" >&2
exit "$(wc -l <"$failed")"
