#!/usr/bin/env bash
# All checks that need a GPU: compile for it, run every test marked gpu without a single skip, run
# the kernel tests under compute-sanitizer (memcheck, racecheck). Without compute-sanitizer the tests
# run all the same, and the whole fails. JOBS files at a time, 4 if not said. Uses the Python it is
# given as it is and installs nothing; logs, test reports, result rows (COMMIT names the commit where
# there is no .git) and exit status are left in a folder.
#
# CHECKS names what is run of "tests memcheck racecheck", all of it if not said.
#
# ACTS_AS=80 (or 89, 120) makes the same checks of the code and the choices that GPUs of that compute
# capability take, on a Hopper card; give each a folder of its own.
#
#   PYTHON=.venv/bin/python bash scripts/gpu_check.sh [log folder, default build/gpu_check]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

root=$PWD
log=${1:-build/gpu_check}
mkdir -p "$log"
log=$(cd "$log" && pwd)
rm -f "$log"/*.txt "$log"/*.xml
python=$(command -v "${PYTHON:-python3}") || {
    echo "gpu_check: ${PYTHON:-python3} was not found" >&2
    exit 1
}
case $python in /*) ;; *) python=$PWD/$python ;; esac

step() { # name, command: its output goes to <name>.txt and to the terminal
    local name=$1
    shift
    echo "== $name"
    "$@" 2>&1 | tee "$log/$name.txt"
}

step machine "$python" - <<'PYTHON'
import platform, sys
import torch
if not torch.cuda.is_available():
    sys.exit("gpu_check: torch sees no GPU")
print(f"python {platform.python_version()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
print(*(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())), sep="\n")
PYTHON

library=$root/lightseq_fairseq/_lib
words=()
if [ -n "${ACTS_AS:-}" ]; then
    library=$log/_lib
    words=(--acts-as "$ACTS_AS" --output "$library" --objects "$log/objects")
fi
step build "$python" scripts/build_cuda.py "${words[@]}"

# The package as it would be installed (setup.cfg puts cli/ into it), of links into this checkout.
# The tests run from another folder, where the checkout itself is not importable.
site=$log/site
rm -rf "$site"
mkdir -p "$site/lightseq_fairseq"
ln -sfn "$root"/lightseq_fairseq/* "$root/cli" "$site/lightseq_fairseq/"
ln -sfn "$library" "$site/lightseq_fairseq/_lib"
export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}  # references on the CPU, of several files at a time
cd "$log"

# One file of tests, alone or under a tool of compute-sanitizer, which fails it by what it finds.
# Checked accesses are ten to a hundred times slower: there the largest tests are left out. No
# backtraces: they would hold on to Python's frames, and so to every tensor of every test.
run() { # tests, memcheck or racecheck; name of the file
    local name=$1-$2
    local words=("$python" -m pytest -c "$root/pyproject.toml" --rootdir "$root"
        -p no:cacheprovider -rs --junitxml="$log/$name.xml" "$(find "$root/tests" -name "$2.py")" -m)
    local status=0 began=$SECONDS
    if [ "$1" = tests ]; then
        "${words[@]}" gpu
    else
        compute-sanitizer --tool "$1" --error-exitcode 9 --target-processes all \
            --show-backtrace no \
            "${words[@]}" "gpu and not large"
    fi >"$log/$name.txt" 2>&1 || status=$?
    echo "$name: $(tail -n 1 "$log/$name.txt") ($((SECONDS - began)) s, status $status)"
    return $((status > 0))
}
export -f run
export root log python

# Files without a GPU test are not imported: they may need packages that this machine lacks.
# Those for which all others wait come last.
mapfile -t all < <(find "$root/tests" -name 'test_*.py' | sort)
mapfile -t files < <({
    grep -l 'mark\.gpu' "${all[@]}" | xargs -d '\n' grep -L 'mark\.alone'
    grep -l 'mark\.alone' "${all[@]}"
} | xargs -d '\n' basename -s .py)
# Tests that run out of memory on purpose, look at time or train are not checked again for accesses.
unchecked="allocate|background|generation|model|parity|races|ranks|step|step_faults|step_memory"
# Races are looked for where no kernel of cuBLAS runs, which racecheck does not bring to an end.
sanitizer=$(command -v compute-sanitizer || true)
checks=" ${CHECKS:-tests memcheck racecheck} "
list() {
    {
        if [ -n "$sanitizer" ]; then
            echo "racecheck test_races_cuda"
            printf 'memcheck %s\n' "${files[@]}" | grep _cuda | grep -v -E "_($unchecked)_cuda"
        fi
        printf 'tests %s\n' "${files[@]}"
    } | while read -r check file; do
        if [[ $checks = *" $check "* ]]; then echo "$check $file"; fi
    done
}
status=0
echo "== tests"
# shellcheck disable=SC2016
list | xargs -P "${JOBS:-4}" -L 1 bash -c 'run "$@"' run | tee "$log/tests.txt" || status=1

# One row a check, for scripts/results.
step results env COMMIT="${COMMIT:-$(git -C "$root" rev-parse HEAD 2>/dev/null || true)}" \
    "$python" - "$log" <<'PYTHON' || status=1
import datetime, json, os, re, sys
from pathlib import Path
from xml.etree import ElementTree
import torch
log = Path(sys.argv[1])
found = []
for kind in ("tests", "memcheck", "racecheck"):
    reports = sorted(log.glob(f"{kind}-*.xml"))
    logs = sorted(log.glob(f"{kind}-*.txt"))
    if not logs:
        continue
    if without := {path.stem for path in logs} - {path.stem for path in reports}:
        sys.exit(f"no rows: {', '.join(sorted(without))} ended without a report")
    suites = [ElementTree.parse(report).getroot().find("testsuite") for report in reports]
    keys = ("tests", "failures", "errors", "skipped")
    case = f"{kind}/sm_{os.environ['ACTS_AS']}" if os.environ.get("ACTS_AS") else kind
    row = {"case": case, **{key: sum(int(suite.get(key)) for suite in suites) for key in keys}}
    if kind != "tests":
        text = "".join(path.read_text() for path in logs)
        row["summary"] = sorted(set(re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", text)))
    found.append(row)
common = {
    "commit": os.environ["COMMIT"],
    "date": datetime.date.today().isoformat(),
    "gpu": torch.cuda.get_device_name(),
    "torch": torch.__version__,
    "system": "ours",
}
rows = [json.dumps({**common, **row}) for row in found]
(log / "gpu_check.json").write_text("[\n" + ",\n".join(rows) + "\n]\n")
print(*rows, sep="\n")
sys.exit(any(row["tests"] == 0 or row["skipped"] > 0 for row in found))
PYTHON

if [ -z "$sanitizer" ]; then
    echo "gpu_check: compute-sanitizer is not on the PATH; memcheck and racecheck did not run" >&2
    status=1
fi
echo "gpu_check: $([ $status = 0 ] && echo passed || echo FAILED), logs in $log"
exit $status
