"""What Tab completes in an interactive bash, zsh and fish."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

# How to start each shell, its start-up file in the folder {0}, and what the file contains.
SHELLS = {
    "bash": ("bash --rcfile {0}/rc -i", "rc", 'eval "$(lightseq completion bash)"\nPS1="ready>"'),
    "zsh": (
        "zsh -d -i", ".zshrc",
        'autoload -Uz compinit && compinit -u\neval "$(lightseq completion zsh)"\nPS1="ready>"',
    ),
    "fish": (
        "fish --init-command 'source {0}/rc' -i", "rc",
        "lightseq completion fish | source\nfunction fish_prompt; echo 'ready>'; end",
    ),
}  # fmt: skip
# What is typed before Tab, and then shown.
LINES = {
    "lightseq-train --tas": "--task ",
    "lightseq-train --arch ls_roberta_p": "ls_roberta_prenorm ",
    "lightseq-train --criterion ls_m": "ls_masked_lm ",
    "lightseq-train data --arch ls_roberta --unti": "--untie-weights-roberta ",
    "lightseq-generate data --nbe": "--nbest ",
    "lightseq-doctor --js": "--json ",
    "lightseq comp": "completion ",
}


@pytest.mark.parametrize("shell", SHELLS)
def test_tab(shell: str, tmp_path: Path) -> None:
    if shell != "bash" and shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    command, name, text = SHELLS[shell]
    (tmp_path / name).write_text(text)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    terminal, inside = pty.openpty()
    child = subprocess.Popen(
        command.format(tmp_path), shell=True, stdin=inside, stdout=inside, stderr=inside,
        env={"PATH": path, "HOME": str(tmp_path), "ZDOTDIR": str(tmp_path), "TERM": "xterm"},
        start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(inside)
    try:
        for line, shown in {"": "ready>", **LINES}.items():
            os.write(terminal, f"\x15{line}\t".encode() * bool(line))  # Ctrl-U empties the line
            seen, end = "", time.monotonic() + 30
            while shown not in seen and time.monotonic() < end:
                if select.select([terminal], [], [], 1)[0]:
                    seen += os.read(terminal, 1 << 16).decode()
                    seen = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", seen)  # colours and movements
            assert shown in seen, (line, seen)
    finally:
        os.close(terminal)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, 9)
        child.wait()
