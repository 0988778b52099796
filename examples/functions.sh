# Functions for the run.sh of several examples. Set root to the folder of the repository before you
# source this file.
# shellcheck shell=bash

# Ends the script if a VALUE is no whole number. run.sh uses the values in bash arithmetic, which
# would evaluate any other text as an expression.
#
#   require_numbers FLAGS VALUE...
require_numbers() {
    local flags=$1 number
    shift
    for number in "$@"; do
        case $number in
            *[!0-9]*) echo "run.sh: $flags must be numbers, not $number" >&2; exit 2 ;;
        esac
    done
}

# Sets up and activates .venv, unless the environment has lightseq-train and these modules.
#
#   set_up_unless_there MODULE...
set_up_unless_there() {
    local modules
    modules=$(IFS=,; echo "$*")
    if ! command -v lightseq-train >/dev/null || ! python3 -c "import $modules" 2>/dev/null; then
        echo "== set-up: torch, fairseq (2 minutes on one core of an AMD EPYC, and downloads)"
        # shellcheck disable=SC2154
        bash "$root/scripts/setup.sh"
        # shellcheck disable=SC1091
        . "$root/.venv/bin/activate"
    fi
}

# Makes OUT, and removes these folders in it: a run never resumes an earlier one. Ends the script if
# OUT has one of them that no example has made.
#
#   begin_again OUT FOLDER...
begin_again() {
    local out=$1 mark=$1/.made-by-an-example folder
    shift
    for folder in "$@"; do
        [ -e "$out/$folder" ] || continue
        if [ ! -e "$mark" ]; then
            echo "${0##*/}: $out/$folder exists, and no example has made it: choose another folder" >&2
            exit 2
        fi
        echo "removing $out/$folder, of an earlier run"
        rm -rf "${out:?}/$folder"
    done
    mkdir -p "$out"
    touch "$mark"
}

# Prints gpu if torch sees a GPU, else cpu.
size_of_this_machine() {
    python3 -c 'import torch; print("gpu" if torch.cuda.is_available() else "cpu")'
}

# Sets COMMIT, if it is empty, to the current commit. So the result row names the commit at the
# start of the run, even if HEAD changes later.
keep_commit() {
    local commit
    if [ -z "${COMMIT:-}" ] && commit=$(git -C "$root" rev-parse HEAD 2>/dev/null); then
        export COMMIT=$commit
    fi
}
