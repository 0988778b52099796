#!/usr/bin/env bash
# Everything in one command: .venv with torch, fairseq, this package and its CUDA kernels. Needs no
# root, may be run again at any time, and then does only what is missing. It compiles no kernels if
# nvcc is missing, if no GPU here is new enough, or if torch is a CPU build and there is no GPU.
#
#   bash scripts/setup.sh [extras of setup.cfg to install besides those that users need]
#
#   PYTHON=python3.12 bash scripts/setup.sh    another Python (default: the first of 3.10 to 3.13)
#   LIGHTSEQ_BUILD=1                           the CUDA kernels are wanted: no nvcc is an error
#   LIGHTSEQ_BUILD=possible                    compile them if there is nvcc, also without a GPU
#   LIGHTSEQ_BUILD=0                           leave the CUDA kernels out
#   LIGHTSEQ_CUDA_ARCHITECTURES=80,90          compile for these instead of this machine's GPU
#   LIGHTSEQ_FAIRSEQ_HOOK=0                    no import hook for fairseq (lightseq_fairseq.startup)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ "${1:-}" = --help ]; then
    awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' "$0"
    exit
fi

fail() {
    echo "setup: $*" >&2
    exit 1
}

is_supported() {
    "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
        if is_supported "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    fail "${PYTHON:-python3} is not Python 3.10 to 3.13: install one of them and name it," \
        "as in PYTHON=python3.11 bash scripts/setup.sh"
}

known=" $(awk '/^\[options.extras_require\]/ { on = 1; next } /^\[/ { on = 0 }
    on && /^[a-z]+ *=/ { printf "%s ", $1 }' setup.cfg)"
given=${1:-}
for extra in ${given//,/ }; do
    [[ $known == *" $extra "* ]] || fail "$extra is none of the extras in setup.cfg:$known"
done

[[ ${LIGHTSEQ_BUILD:-useful} =~ ^(0|1|useful|possible)$ ]] ||
    fail "LIGHTSEQ_BUILD is $LIGHTSEQ_BUILD: set it to 0, 1 or possible"

if [ -x .venv/bin/pip ]; then # pip comes last: a .venv without it is unfinished
    is_supported .venv/bin/python ||
        fail ".venv holds a Python other than 3.10 to 3.13: remove .venv and run this again"
else
    python=$(find_python)
    echo "setup: .venv from $python ($("$python" --version))"
    "$python" -m venv .venv || fail "$python cannot make a virtual environment (on Debian and" \
        "Ubuntu: install python3-venv); remove .venv and run this again"
fi
python=$PWD/.venv/bin/python
export PIP_DISABLE_PIP_VERSION_CHECK=1

if ! "$python" -c 'import re, torch
assert tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) >= (2, 11)' 2>/dev/null; then
    echo "setup: torch 2.13.0"
    "$python" -m pip install --quiet torch==2.13.0
fi

case ${LIGHTSEQ_BUILD:-useful} in
    0) build=(true) && echo "setup: CUDA kernels left out (LIGHTSEQ_BUILD=0)" ;;
    1) build=("$python" scripts/build_cuda.py --install-headers) ;;
    useful | possible)
        build=("$python" scripts/build_cuda.py --install-headers "--if-${LIGHTSEQ_BUILD:-useful}")
        ;;
esac
# The kernels need only torch and nvcc, so they are compiled while pip goes on.
kernels=
compile_kernels() {
    "${build[@]}" &
    kernels=$!
    trap 'kill "$kernels" 2>/dev/null || true' EXIT
}
[[ ,$given, == *,nvcc,* ]] || compile_kernels

extras=fairseq,export,bench,examples${1:+,$1}
stamp=.venv/lightseq-setup-$extras
wanted=$(cat setup.cfg setup.py pyproject.toml; pwd)
if [ "$wanted" != "$(cat "$stamp" 2>/dev/null)" ]; then
    echo "setup: lightseq_fairseq and what it needs"
    # Unset LIGHTSEQ_BUILD: pip would fetch another torch for the build.
    env -u LIGHTSEQ_BUILD "$python" -m pip install --quiet --editable ".[$extras]"
    echo "$wanted" >"$stamp"
fi
[ -n "$kernels" ] || compile_kernels # by the compiler that pip has installed

# fairseq comes last, because pip would then warn that fairseq's own requirements are not met.
if ! "$python" -c 'import importlib.metadata; importlib.metadata.version("fairseq")' 2>/dev/null; then
    echo "setup: fairseq 0.12.2 (compiles for a minute)"
    # --no-deps: its metadata pins versions that no longer install; setup.cfg names what it needs.
    # With CUDA_HOME set, fairseq would compile CUDA code that this package does not use.
    env -u CUDA_HOME "$python" -m pip install --quiet --no-deps fairseq==0.12.2 ||
        fail "fairseq 0.12.2 is compiled while it is installed: a C++ compiler (g++) and Python's" \
            "headers (python3-dev) are needed"
fi

# Without this hook fairseq-train, fairseq's other commands and notebooks cannot import fairseq.
# (-W: the hook of an earlier version imports the module before -m runs it; runpy warns about that.)
if [ "${LIGHTSEQ_FAIRSEQ_HOOK:-}" = 0 ]; then
    "$python" -W ignore::RuntimeWarning:runpy -m lightseq_fairseq.startup --remove
else
    "$python" -W ignore::RuntimeWarning:runpy -m lightseq_fairseq.startup
fi

wait "$kernels"
PATH=$PWD/.venv/bin:$PATH "$python" -m lightseq_fairseq.cli.doctor
echo "setup: done; activate it with: . .venv/bin/activate"
