#!/usr/bin/env bash
# All checks that need a GPU: compile for it, run every test marked gpu without a single skip, run
# the kernel tests under compute-sanitizer (memcheck, racecheck) where it is installed. Uses the
# Python it is given as it is and installs nothing; logs, test report, result rows (COMMIT names the
# commit where there is no .git) and exit status are left in a folder.
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

step build "$python" scripts/build_cuda.py

# The package as it would be installed (setup.cfg puts cli/ into it), of links into this checkout.
# The tests run from another folder, where the checkout itself is not importable.
site=$log/site
rm -rf "$site"
mkdir -p "$site/lightseq_fairseq"
ln -s "$root"/lightseq_fairseq/* "$root/cli" "$site/lightseq_fairseq/"
export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1
cd "$log"
pytest=("$python" -m pytest -c "$root/pyproject.toml" --rootdir "$root" -p no:cacheprovider -m gpu)

# Files without a GPU test are not imported: they may need packages that this machine lacks.
mapfile -t files < <(grep -l 'mark\.gpu' "$root"/tests/test_*.py)

status=0
step tests "${pytest[@]}" -rs --junitxml="$log/tests.xml" "${files[@]}" || status=1

step skips "$python" - "$log/tests.xml" <<'PYTHON' || status=1
import sys
import xml.etree.ElementTree as ElementTree
suite = ElementTree.parse(sys.argv[1]).getroot().find("testsuite")
ran, skipped = int(suite.get("tests")), int(suite.get("skipped"))
print(f"{ran} GPU tests, {skipped} of them skipped")
sys.exit(ran == 0 or skipped > 0)
PYTHON

# Checked accesses are ten to a hundred times slower: the kernel tests, but for the largest. Races
# are looked for where no kernel of cuBLAS runs, which racecheck does not bring to an end.
sanitize() { # tool, tests: compute-sanitizer's findings fail the step
    step "$1" compute-sanitizer --tool "$1" --error-exitcode 9 --target-processes all \
        "$python" -m pytest -c "$root/pyproject.toml" --rootdir "$root" -p no:cacheprovider \
        -m "gpu and not large" "${@:2}" || status=1
}
if command -v compute-sanitizer >/dev/null; then
    mapfile -t kernel_tests < <(printf '%s\n' "${files[@]}" | grep -E '_cuda\.py$' |
        grep -v -E '_(model|parity|races|step)_cuda')
    sanitize memcheck "${kernel_tests[@]}"
    sanitize racecheck "$root/tests/test_races_cuda.py"
else
    echo "== sanitizer: compute-sanitizer is not on the PATH"
fi

# One row a check, for scripts/results.
step results env COMMIT="${COMMIT:-$(git -C "$root" rev-parse HEAD 2>/dev/null || true)}" \
    "$python" - "$log" <<'PYTHON' || status=1
import datetime, json, os, re, sys
from pathlib import Path
from xml.etree import ElementTree
import torch
log = Path(sys.argv[1])
suite = ElementTree.parse(log / "tests.xml").getroot().find("testsuite")
counts = {key: int(suite.get(key)) for key in ("tests", "failures", "errors", "skipped")}
found = [{"case": "tests", **counts}]
for tool in ("memcheck", "racecheck"):
    if (log / f"{tool}.txt").exists():
        text = (log / f"{tool}.txt").read_text()
        summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", text)
        passed = re.findall(r"(\d+) passed", text)
        found.append({"case": tool, "tests": int(passed[-1]) if passed else 0, "summary": summary})
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
PYTHON

echo "gpu_check: $([ $status = 0 ] && echo passed || echo FAILED), logs in $log"
exit $status
