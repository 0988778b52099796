#!/usr/bin/env bash
# All checks that need no GPU: style, types, generated files, CUDA compile and link, the wheel, tests.
# Sets up .venv first, with what the checks need. Every check runs; the exit status is 0 if all of
# them passed.
#
#   bash scripts/test.sh [pytest's arguments, with which the wheel is not checked]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh docs,test
PATH=$PWD/.venv/bin:$PATH

# Commands that fail when a generated file is older than what it is generated from.
up_to_date=("python -m scripts.tables --check" "python -m scripts.flags --check")

failed=()
check() {
    echo "== $*"
    "$@" || failed+=("$*")
}

check ruff check --quiet .
check ruff format --check --quiet .
mapfile -t cuda_sources < <(find csrc -name '*.cu' -o -name '*.cuh' -o -name '*.h' | sort)
check clang-format --dry-run -Werror "${cuda_sources[@]}"
check mypy --no-error-summary
for command in "${up_to_date[@]}"; do
    # shellcheck disable=SC2086
    check $command
done
check python scripts/build_cuda.py --install-headers --if-possible
if [ $# = 0 ]; then check bash scripts/check_wheel.sh; fi

# Hide the GPUs, so that the tests are the same on every machine: if autograd sees a GPU it starts
# threads, and processes that some tests fork would fail. gpu_check.sh runs the tests on a GPU.
export CUDA_VISIBLE_DEVICES=
# Two processes of one thread each: the tests' tensors are too small for more. All tests of a file
# run in one of them, so that its fixtures are made once.
export OMP_NUM_THREADS=1
check python -m pytest -n 2 --dist loadfile "$@"

for command in "${failed[@]}"; do
    echo "failed: $command" >&2
done
exit $((${#failed[@]} > 0))
