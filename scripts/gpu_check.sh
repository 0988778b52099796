#!/usr/bin/env bash
# All checks that need a GPU: compile for it, run every test marked gpu (a skipped test is a
# failure, unless it is one of fp8 and the GPU has no fp8), and run the kernel tests under
# compute-sanitizer (memcheck, racecheck). Without compute-sanitizer the tests still run, but the
# exit status is 1.
#
#   PYTHON=.venv/bin/python bash scripts/gpu_check.sh [log folder, default build/gpu_check]
#
# The script installs nothing. It writes logs, test reports and result rows to the log folder.
# Environment variables:
#   PYTHON    the Python to use (default python3)
#   JOBS      test files that run in parallel (default 4)
#   CHECKS    some of "tests memcheck racecheck" (default: all)
#   COMMIT    the commit for the result rows, if there is no .git folder
#   ACTS_AS   80, 86, 89, 100 or 120: on a Hopper GPU, check the code for that compute capability;
#             use another log folder for each
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

step() { # NAME COMMAND...: runs it; its output goes to <name>.txt and to the terminal
    local name=$1
    shift
    echo "== $name"
    "$@" 2>&1 | tee "$log/$name.txt"
}

step machine "$python" - <<'PYTHON'
import importlib.util, platform, sys
import torch
if importlib.util.find_spec("pytest") is None:
    sys.exit("gpu_check: pytest is missing: run bash scripts/setup.sh test")
if not torch.cuda.is_available():
    sys.exit("gpu_check: torch finds no GPU")
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

# The package as it would be installed (setup.cfg puts cli/ into it), made of links into this
# checkout. The tests run from another folder, so that they cannot import the checkout itself.
site=$log/site
rm -rf "$site"
mkdir -p "$site/lightseq_fairseq"
ln -sfn "$root"/lightseq_fairseq/* "$root/cli" "$site/lightseq_fairseq/"
ln -sfn "$library" "$site/lightseq_fairseq/_lib"
export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}  # several test files share the CPU
cd "$log"

# Runs one test file, directly or under a tool of compute-sanitizer, whose findings fail the file.
# The tool makes memory accesses ten to a hundred times slower, so tests marked large are left out.
# No backtraces: they would keep Python's frames alive, and so all tensors of all tests.
run() { # CHECK FILE: CHECK is tests, memcheck or racecheck
    local name=$1-$2
    local words=("$python" -m pytest -c "$root/pyproject.toml" --rootdir "$root"
        -p no:cacheprovider -rs --junitxml="$log/$name.xml" "$(find "$root/tests" -name "$2.py")" -m)
    local status=0 began=$SECONDS
    if [ "$1" = tests ]; then
        "${words[@]}" gpu
    else
        # With expandable segments, torch tries calls that may fail, which count as errors.
        PYTORCH_ALLOC_CONF=expandable_segments:False \
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
# All tests of files named *_cuda.py are GPU tests; so are tests marked gpu in other files.
# Those of tests/training take longest and come first; files with tests that must run alone, last.
mapfile -t all < <({
    find "$root/tests" -name 'test_*_cuda.py'
    grep -rl --include 'test_*.py' 'mark\.gpu' "$root/tests"
} | sort --reverse --unique)
mapfile -t files < <({
    grep -L 'mark\.alone' "${all[@]}"
    grep -l 'mark\.alone' "${all[@]}"
} | xargs -d '\n' basename -s .py)
# memcheck leaves out files whose tests run out of memory on purpose, measure time, train, generate,
# or are all marked large.
unchecked="accelerate|algorithm_table|allocate|background|engine|generation|model|modernbert|our_trainer|parity|races|ranks"
unchecked+="|searched_generate|searched_text|step|step_faults|step_memory"
# racecheck runs only test_races_cuda: most cuBLAS kernels, which other tests call, hang under it.
sanitizer=$(command -v compute-sanitizer || true)
checks=" ${CHECKS:-tests memcheck racecheck} "
list() {
    {
        if [ -n "$sanitizer" ]; then
            echo "racecheck test_races_cuda"
            # Sorted: attention takes longest.
            printf 'memcheck %s\n' "${files[@]}" | grep _cuda | grep -v -E "_($unchecked)_cuda" | sort
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

# One row per check, for scripts/results.
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
    keys = ("tests", "failures", "errors")
    case = f"{kind}/sm_{os.environ['ACTS_AS']}" if os.environ.get("ACTS_AS") else kind
    row = {"case": case, **{key: sum(int(suite.get(key)) for suite in suites) for key in keys}}
    skips = [skip.get("message") or "" for suite in suites for skip in suite.iter("skipped")]
    # skip_without_fp8 in tests/helpers/ops_testing.py
    without_fp8 = sum(skip.endswith("has no fp8") for skip in skips)
    row |= {"tests": row["tests"] - without_fp8, "skipped": len(skips) - without_fp8}
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
