"""This package's commands, run in processes forked from one that has imported torch and fairseq.

These imports take most of the time of a small run, and most of the rest is fairseq's configuration,
which the server composes, too (`compositions`). `path` is a PATH on which ``lightseq-train`` and
the others are scripts of this module. Such a script passes its arguments, environment, folder and
open files to the server, which forks; it ends as the forked process ends.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

BIN = Path(sys.executable).parent
MODULES = (
    "torch._dynamo",
    "lightseq_fairseq.plugins",
    "matplotlib.figure",
    "fairseq.quantization_utils",
    "sacrebleu",
)
LOAD = "load"  # in the place of a command's name
SCRIPT = """#!{python} -IS
import json, os, socket, sys
name, *words = sys.argv
if words[:1] == ["-u"]:
    words = words[1:]
if name.endswith(("/python", "/python3")) and words[:1] not in (["-m"], ["-c"]):
    os.execv({python!r}, [{python!r}, *words])
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    request = json.dumps([[name, *words], os.getcwd(), dict(os.environ)]).encode() + b"\\n"
    sent = socket.send_fds(server, [request], [0, 1, 2])
    server.sendall(request[sent:])
    status = int(server.recv(9))
if status < 0:
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


def path(before: str = "") -> str:
    """The value of PATH with the forked commands, then the environment's, then the caller's.

    Code ``before`` runs before the imports.
    """
    return _path(before)


@functools.cache  # by the value: one server, whether or not a caller names it
def _path(before: str) -> str:
    folder = tempfile.TemporaryDirectory(prefix="commands-")
    address = f"{folder.name}/server"
    scripts = Path(folder.name, "bin")
    scripts.mkdir()
    points = metadata.entry_points(group="console_scripts")
    ours = [point.name for point in points if point.module.startswith("lightseq_fairseq.")]
    for name in (*ours, "python", "python3"):
        (scripts / name).write_text(SCRIPT.format(python=sys.executable, address=address))
        (scripts / name).chmod(0o755)
    server = subprocess.Popen(
        [sys.executable, __file__, address, before], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert server.stdin is not None and server.stdout is not None
    server.stdout.readline()  # it listens
    atexit.register(folder.cleanup)
    atexit.register(server.stdin.close)  # which ends it
    return os.pathsep.join([str(scripts), str(BIN), os.environ["PATH"]])


def python(before: str = "") -> Path:
    """The Python on that path. It forks for ``-m MODULE`` and ``-c CODE``; signals get lost."""
    return Path(path(before).partition(os.pathsep)[0], "python")


@functools.cache
def load(*modules: str) -> None:
    """From now on the processes on that path have imported these modules, too."""
    address = str(python().parents[1] / "server")
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        server.sendall(json.dumps([[LOAD, *modules], "", {}]).encode() + b"\n")
        assert server.recv(9) == b"0"


def serve(address: str, before: str) -> tuple[list[str], str, dict[str, str]] | None:
    """Forks for each command; returns the command in the forked process, and None in the server at
    the end of its input."""
    with socket.socket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as waiting:
        listener.bind(address)
        listener.listen()
        print("listens", flush=True)
        os.fsync = lambda number: None  # as in conftest.py
        exec(before, {})
        # And so torch and fairseq.
        import_all(MODULES)
        compose()
        gc.freeze()
        waiting.register(sys.stdin, selectors.EVENT_READ)
        waiting.register(listener, selectors.EVENT_READ)
        while True:
            key = waiting.select()[0][0]  # one at a time: it can make another one void
            if key.fileobj is sys.stdin:
                return None
            if key.fileobj is listener:
                connection, _ = listener.accept()
                request, files, _, _ = socket.recv_fds(connection, 1 << 16, 3)
                while not request.endswith(b"\n"):
                    request += connection.recv(1 << 16)
                (name, *modules), _, _ = json.loads(request)
                if name == LOAD:
                    import_all(modules)
                    connection.sendall(b"0")
                    connection.close()
                    continue
                child = os.fork()
                if child == 0:
                    connection.close()
                    for number, file in enumerate(files):
                        os.dup2(file, number)
                        os.close(file)
                    command: tuple[list[str], str, dict[str, str]] = json.loads(request)
                    return command
                for file in files:
                    os.close(file)
                waiting.register(os.pidfd_open(child), selectors.EVENT_READ, (child, connection))
                waiting.register(connection, selectors.EVENT_READ, (child, None))
                continue
            child, connection = key.data
            waiting.unregister(key.fileobj)
            if connection is None:  # the script has been killed
                os.kill(child, signal.SIGKILL)
                continue
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            os.close(key.fd)
            if connection in waiting.get_map():
                waiting.unregister(connection)
                connection.sendall(b"%d" % status)
            connection.close()


def import_all(modules: Iterable[str]) -> None:
    for module in modules:
        importlib.import_module(module)
    gc.freeze()  # the forked processes need not go through what they share


def compose() -> None:
    """Composes the usual configurations, which the forked processes then copy."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    importlib.import_module("helpers.compositions")
    del sys.path[0]
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    train, generate = options.get_training_parser, options.get_generation_parser
    recipe = "--arch ls_transformer --optimizer ls_adam --lr-scheduler inverse_sqrt --criterion "
    for parser, words in (
        (train, f"{recipe} ls_label_smoothed_cross_entropy"),
        (train, f"{recipe} ls_cross_entropy --task language_modeling"),
        (train, f"{recipe.replace('ls_', '')} label_smoothed_cross_entropy"),
        (generate, "--path x"),
        (generate, "--path x --task language_modeling"),
    ):
        args = options.parse_args_and_arch(parser(), ["data", *words.split()])
        if parser is generate:
            args.arch = "wav2vec2"  # fairseq-generate's default
        convert_namespace_to_omegaconf(args)


def run(words: list[str], folder: str, environment: dict[str, str]) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    os.environ["PYTHON_EXEC"] = str(Path(sys.argv[1]).with_name("bin") / "python")  # of torchrun
    if Path(words[0]).name in ("python", "python3"):
        _, kind, program, *sys.argv[1:] = words
        for name in ("scripts", "examples"):  # `helpers` has found those of the root
            if Path(folder, name).is_dir():
                sys.modules.pop(name, None)
        sys.path[:1] = [folder, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
        if kind == "-m":
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            exec(program, {"__name__": "__main__"})
        return
    (point,) = metadata.entry_points(group="console_scripts", name=Path(words[0]).name)
    # As if it were the environment's script; a process that it spawns imports this file.
    script = str(BIN / point.name)
    sys.argv, sys.path[0] = [script, *words[1:]], str(BIN)
    sys.modules["__main__"].__file__ = script
    sys.exit(point.load()())


def main() -> None:
    command = serve(*sys.argv[1:])
    if command is None:
        return
    status = 0
    try:
        run(*command)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception:
        sys.excepthook(*sys.exc_info())
        status = 1
    # What Python does at its end, except that it takes all modules apart, for a second.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 0xFF)


if __name__ == "__main__":
    main()
