# Functions for the scripts of several examples. This file sets root to the folder of the repository,
# and here to the folder of the script that sources it.
# shellcheck shell=bash
# shellcheck disable=SC2034 # the scripts read these variables

here=$(cd "$(dirname "${BASH_SOURCE[1]}")" && pwd)
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# Reads the flags of a script: read_flags "$@"
#
# The comment at the top of the script names its flags, such as [--size cpu|gpu] [--updates N], and
# is printed by --help. Each flag sets the variable of its name (without-pretraining:
# without_pretraining); a flag without a value sets it to yes. [-- WORD...] sets words. Defaults of
# all scripts: seed=1, out=$here/out; the others are unset without their flags. system and native
# are those of --native. Ends the script at a flag that the comment lacks, or at a wrong value.
#
# A number consists of digits: the scripts use it in bash arithmetic, which would evaluate any other
# text as an expression.
read_flags() {
    local page flag form value name must
    page=$(awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' "$0")
    for flag in $(grep -oE '\[--[a-z-]+' <<<"$page" | tr -d '['); do
        name=${flag#--}
        unset "${name//-/_}" # a variable of the environment is no flag
    done
    words=()
    while [ $# -gt 0 ]; do
        flag=$1
        if [ "$flag" = --help ]; then
            echo "$page"
            exit
        elif [[ ! $flag =~ ^--[a-z-]*$ || ! $page =~ \["$flag"(\ ([^]]*))?\] ]]; then
            echo "${0##*/}: unknown argument $flag (see bash $0 --help)" >&2
            exit 2
        fi
        form=${BASH_REMATCH[2]} value=${2:-} name=${flag#--} must=
        case $form in
            '') value=yes; set -- yes "$@" ;;
            WORD...) words=("${@:2}"); break ;;
            N) must="a number"; [[ $value =~ ^[0-9]+$ ]] && must= ;;
            '"N N ..."') must="numbers"; [[ $value =~ ^\ *[0-9]+(\ +[0-9]+)*\ *$ ]] && must= ;;
            *'|'*) must=${form//|/ or }; [[ $value =~ ^($form)$ ]] && must= ;;
            DIR) must="a folder"; [ -n "$value" ] && must= ;;
        esac
        if [ -n "$must" ]; then
            echo "${0##*/}: $flag must be $must${value:+, not $value}" >&2
            exit 2
        fi
        printf -v "${name//-/_}" %s "$value"
        shift 2
    done
    seed=${seed:-1} out=$(realpath -m "${out:-$here/out}")
    if [ -n "${native:-}" ]; then
        system=fairseq native=(--native)
    else
        system=lightseq native=()
    fi
}

# Sets up and activates .venv, unless the environment has lightseq-train and these modules; then sets
# activated, because the user's shell has not activated it. Sets COMMIT, if it is empty, to the current commit. So the result row names the commit at the start of
# the run, even if HEAD changes later.
#
#   set_up MODULE...
set_up() {
    local modules commit
    modules=$(IFS=,; echo "$*")
    if ! command -v lightseq-train >/dev/null || ! python3 -c "import $modules" 2>/dev/null; then
        echo "== set-up: torch, fairseq (2 minutes on one core of an AMD EPYC, and downloads)"
        bash "$root/scripts/setup.sh"
        # shellcheck disable=SC1091
        . "$root/.venv/bin/activate"
        activated=yes
    fi
    if [ -z "${COMMIT:-}" ] && commit=$(git -C "$root" rev-parse HEAD 2>/dev/null); then
        export COMMIT=$commit
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
    trap 'if [ $? = 130 ]; then how_to_resume; fi' EXIT
}

# After Ctrl-C. The command that was interrupted has said that it resumes if it is given again.
how_to_resume() {
    echo "${0##*/}: to resume, type the lightseq-train command that is printed above;" \
        "bash $0 begins again and removes this run" >&2
}

# Prints gpu if torch sees a GPU, else cpu.
size_of_this_machine() {
    python3 -c 'import torch; print("gpu" if torch.cuda.is_available() else "cpu")'
}
