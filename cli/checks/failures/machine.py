"""The machine: network, packages, processes, memory and files."""

from __future__ import annotations

import errno
import os
import re

from lightseq_fairseq.cli.checks import Request
from lightseq_fairseq.cli.checks.failures.cause import Cause
from lightseq_fairseq.cli.checks.failures.known import Known, Rule
from lightseq_fairseq.cli.words.command_lines import ended


def _worker(found: re.Match[str], request: Request) -> str:
    pid, signal, status = found.groups()
    how = (
        f"was killed ({signal})" if signal else f"ended with status {status}" if status else "ended"
    )
    return (
        f"A process that loads data (pid {pid}) {how}, often because the machine is out of memory: "
        f"lower --num-workers or --data-buffer-size{_resumes(request)}."
    )


def _ended(found: re.Match[str], request: Request) -> str:
    """A process that this one has started."""
    how = f"with {found[2]}" if found[2].startswith("SIG") else f"with status {found[2]}"
    why = ", often because the machine is out of memory" if found[2] == "SIGKILL" else ""
    return f"Process {found[1]} of this command ended {how}{why}{_resumes(request)}."


# Messages of gloo, NCCL and the rendezvous store if another rank is gone.
_GONE = re.compile(
    r"Connection (closed|reset) by peer|Connection was likely closed|Broken pipe|Socket Timeout|"
    r"Read(ing)? error|Write error|ncclRemoteError|ncclSystemError|remote process exited|"
    r"NCCL communicator was aborted|Timed out waiting \d+ ?ms for (send|recv)|"
    r"failed to (recv|send), got|connectFullMesh failed"
)
_NOT_COME = re.compile(r"Timed out after (\d+) seconds waiting for clients\. (\d+)/(\d+)")


def _rank(failure: Cause, request: Request) -> str | None:
    """Errors of a rank if other ranks have ended or have never connected."""
    by_gloo = failure.kind == "RuntimeError" and "gloo" in failure.text.lower()
    if not by_gloo and failure.kind not in (
        "DistBackendError",
        "DistNetworkError",
        "DistStoreError",
    ):
        return None
    if found := _NOT_COME.search(failure.text):
        return (
            f"Only {found[2]} of {found[3]} ranks connected within {found[1]} seconds: give all "
            "ranks the same --distributed-init-method, or the same MASTER_ADDR and MASTER_PORT; "
            "the logs of the missing ranks say why they did not connect."
        )
    if _GONE.search(failure.text):
        return f"Another rank has ended: its own log says why{_resumes(request)}."
    return None


def _resumes(request: Request) -> str:
    """The end of a sentence that tells a user of lightseq-train how to continue."""
    if not hasattr(request.args, "max_update"):
        return ""
    return "; run the same command again to resume from the last checkpoint"


_OUT_OF_MEMORY = (
    "The GPU is out of memory: lower --max-tokens (in training, raise --update-freq by the same "
    "factor to keep the batch size, or add --checkpoint-activations instead), or choose a smaller "
    "model."
)

_REASONS = {
    errno.ENOENT: "does not exist",
    errno.EACCES: "cannot be opened (permission denied)",
    errno.EPERM: "cannot be opened (not permitted)",
    errno.EISDIR: "is a folder, not a file",
    errno.ENOTDIR: "has a file in place of a folder in its path",
    errno.EEXIST: "exists already",
    errno.EROFS: "is on a read-only file system",
    errno.ENOSPC: "is on a full disk",
}


def _files(failure: Cause, request: Request) -> str | None:
    """A file that the user named, or a file in the checkpoint folder of training."""
    if failure.kind == "FileExistsError" and failure.errno is None:  # lightseq-preprocess
        return (
            f"{failure.text} exists already: choose another --destdir, delete the old folder, or "
            f"use that dictionary with --srcdict or --tgtdict."
        )
    if failure.kind == "FileNotFoundError" and failure.filename is None and failure.errno is None:
        name, number = failure.text, errno.ENOENT  # --user-dir, raised with the path alone
    elif found := re.fullmatch(r"file (.*) not found", failure.text):  # a model of --bpe
        name, number = found[1], errno.ENOENT
    else:
        name, number = failure.filename or "", failure.errno or 0
    if number not in _REASONS or not name:
        return None
    read = getattr(request.args, "path", None)  # None in training
    save_dir = getattr(request.args, "save_dir", None)
    is_read = number == errno.ENOENT and any(
        _lies_in(name, path) for path in _named_paths(request) if path != save_dir
    )
    in_save_dir = save_dir and (_lies_in(name, save_dir) or _lies_in(save_dir, name))
    if read is None and in_save_dir and not is_read:
        reason = os.strerror(number).lower()
        return f"Checkpoints cannot be written to {save_dir} ({reason}): choose another --save-dir."
    if name in (read or "").split(os.pathsep):
        return f"The checkpoint {name} {_REASONS[number]}: check --path."
    if any(_lies_in(name, path) for path in _named_paths(request)):
        return f"{name} {_REASONS[number]}: check the path."
    return None


def _lies_in(name: str, path: str) -> bool:
    """Whether ``name`` is ``path``, is below it, or is ``path`` followed by a dot and more."""
    name, path = os.path.abspath(name), os.path.abspath(path)
    return name == path or name.startswith((path + os.sep, path + "."))


def _named_paths(request: Request) -> list[str]:
    words = [word.partition("=")[2] if word.startswith("-") else word for word in request.argv]
    return [part for word in words for part in re.split("[:,]", word) if part]


_NO_PACKAGE = "ImportError ModuleNotFoundError"

RULES: tuple[Rule, ...] = (
    # fairseq downloads a file, and there is no network.
    Known(
        r"(?s:.*?)Pool\(host='([^']+)'.* with url: (\S+)",
        "{1}{2} cannot be downloaded: check the network, or use local files (for --bpe gpt2 with "
        "--gpt2-encoder-json and --gpt2-vocab-bpe).",
    ),
    Known(
        "No module named 'requests'$",
        "A file given by its URL (by default those of --bpe gpt2) is downloaded with the package "
        "requests, which is not installed: run pip install requests, or use local files.",
        kind=_NO_PACKAGE,
    ),
    Known(  # fairseq's own message
        r"(?s).*?(Please\s+install\s.*)",
        lambda found, request: ended(found[1]),
        kind=_NO_PACKAGE,
    ),
    Known(
        r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) "
        r"(?:is killed by signal: ([^.]+)|exited unexpectedly(?: with exit code (\d+))?)",
        _worker,
    ),
    Known(
        r"process (\d+) terminated with (?:signal |exit code )(\w+)",
        _ended,
        kind="ProcessExitedException",
    ),
    _rank,
    Known("", _OUT_OF_MEMORY, kind="OutOfMemoryError"),
    # Allocations of our kernels raise a RuntimeError with only this message.
    Known("CUDA out of memory", _OUT_OF_MEMORY),
    _files,
)
