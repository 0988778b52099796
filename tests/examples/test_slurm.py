"""train.sbatch: bash runs its body, and stand-ins for Slurm's two commands run the tasks here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.cli_runs import SMALL, binarise

SCRIPT = Path(__file__).parents[2] / "examples/slurm/train.sbatch"

# Starts the tasks, and sends SIGUSR1 to all of them when the first one logs an update.
SRUN = """
while [[ $1 == --* ]]; do shift; done
pids=()
for ((task = 0; task < SLURM_NTASKS; task++)); do
    SLURM_PROCID=$task SLURM_LOCALID=$task "$@" >>"task$task.log" 2>&1 &
    pids+=($!)
done
until grep -q num_updates task0.log; do
    kill -0 "${pids[0]}" || break
    sleep 0.1
done
kill -USR1 "${pids[@]}"
status=0
for pid in "${pids[@]}"; do
    wait "$pid" || { code=$?; status=$((code > status ? code : status)); }
done
exit $status
"""
SCONTROL = """
case $1 in
    show) echo 127.0.0.1 ;;
    requeue) echo "$2" >>requeued ;;
esac
"""

JOB = {
    "JOB_ID": "4711", "JOB_NODELIST": "here", "NNODES": "1", "NODEID": "0", "NTASKS": "2",
    "NTASKS_PER_NODE": "2",
}  # fmt: skip


def submit(folder: Path, *words: str | Path, srun: str = SRUN) -> int:
    """Runs the script's body in ``folder`` as a job of two tasks; returns its exit status."""
    commands = folder / "commands"
    commands.mkdir(exist_ok=True)
    for name, body in (("srun", srun), ("scontrol", SCONTROL)):
        (commands / name).write_text(f"#!/usr/bin/env bash\n{body}")
        (commands / name).chmod(0o755)
    path = [str(commands), str(Path(sys.executable).parent), os.environ["PATH"]]
    variables = {f"SLURM_{name}": value for name, value in JOB.items()}
    variables["LIGHTSEQ_LOG_LEVEL"] = "debug"
    environment = {**os.environ, **variables, "PATH": os.pathsep.join(path)}
    words = tuple(map(str, words))
    return subprocess.run(["bash", str(SCRIPT), *words], cwd=folder, env=environment).returncode


def test_a_job_saves_is_queued_again_and_resumes(tmp_path: Path) -> None:
    data = binarise(tmp_path / "corpus")
    words = [data, "--arch", "ls_transformer_tiny", *SMALL, "--max-update", "1000000"]
    words += ["--save-dir", "run", "--log-interval", "1", "--disable-validation"]
    words += ["--save-interval", "1000000"]
    logs = [tmp_path / f"task{rank}.log" for rank in range(2)]
    assert submit(tmp_path, *words) == 138
    for log in logs:
        assert "lightseq-train: stopped by SIGUSR1" in log.read_text()
    first = logs[0].read_text()
    for rank, log in enumerate(logs):
        assert f"distributed init (rank {rank}): tcp://127.0.0.1:24711" in log.read_text()
    for log in logs:
        log.write_text("")
    assert submit(tmp_path, *words) == 138
    saved = max(map(int, re.findall(r"@ (\d+) updates, score", first)))
    assert f"@ {saved} updates)" in re.search(r"Loaded checkpoint .*", logs[0].read_text())[0]
    assert (tmp_path / "requeued").read_text() == "4711\n4711\n"


@pytest.mark.parametrize("status", [0, 1, 143])
def test_a_job_that_ends_otherwise_is_not_queued_again(tmp_path: Path, status: int) -> None:
    assert submit(tmp_path, "data-bin", srun=f'echo "$@" >words; exit {status}') == status
    assert not (tmp_path / "requeued").exists()
    words = "--kill-on-bad-exit=0 lightseq-train data-bin"
    distributed = "--distributed-world-size 2 --distributed-port 24711"
    assert (tmp_path / "words").read_text() == f"{words} {distributed}\n"


def test_shellcheck_finds_nothing() -> None:
    done = subprocess.run([Path(sys.executable).parent / "shellcheck", SCRIPT], capture_output=True)
    assert done.returncode == 0, done.stdout.decode()


def test_slurm_is_asked_for_the_signal_and_to_requeue() -> None:
    asked = re.findall(r"^#SBATCH (\S+)", SCRIPT.read_text(), re.M)
    assert {"--signal=USR1@120", "--requeue", "--open-mode=append"} <= set(asked)
