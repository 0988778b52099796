from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import helpers.training_runs as runs
import pytest

from lightseq_fairseq.base import files
from lightseq_fairseq.base.errors import UserError


def write(path: Path, content: bytes) -> None:
    with files.atomic_writer(path) as file:
        file.write(content)


def another(folder: Path, begins: str) -> subprocess.Popen[str]:
    """A second process that runs ``begins`` and prints "within" while it holds the file or lock."""
    code = f"from lightseq_fairseq.base import files\nimport sys\n{begins}\n"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "within\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.communicate("\n", timeout=60)
    assert process.returncode == 0


USES = """
with files.sole_user(sys.argv[1]):
    print("within", flush=True)
    sys.stdin.readline()
"""
WRITES = """
with files.atomic_writer(sys.argv[1] + "/x.pt") as file:
    file.write(b"theirs " * 9999)
    file.flush()
    print("within", flush=True)
    sys.stdin.readline()
    file.write(b"whole")
"""


class TestWrites:
    def test_two_processes_write_files_of_their_own(self, tmp_path: Path) -> None:
        other = another(tmp_path, WRITES)
        write(tmp_path / "x.pt", b"ours")
        assert (tmp_path / "x.pt").read_bytes() == b"ours"
        assert len(os.listdir(tmp_path)) == 2  # the file that the other process is writing stays
        end(other)
        assert (tmp_path / "x.pt").read_bytes() == b"theirs " * 9999 + b"whole"
        assert os.listdir(tmp_path) == ["x.pt"]

    def test_what_a_killed_process_leaves_goes(self, tmp_path: Path) -> None:
        other = another(tmp_path, WRITES)
        other.kill()
        other.wait()
        assert len(os.listdir(tmp_path)) == 1
        write(tmp_path / "y.pt", b"ours")
        assert os.listdir(tmp_path) == ["y.pt"]

    def test_another_machines_files_go_when_they_are_old(self, tmp_path: Path) -> None:
        names = [f"x.pt.0123abcd-{i:08x}.tmp" for i in range(2)]
        for name in (*names, "x.pt.tmp", "my-notes.tmp"):
            (tmp_path / name).write_bytes(b"")
        os.utime(tmp_path / names[1], (time.time() - 2 * 86400,) * 2)
        write(tmp_path / "x.pt", b"ours")
        left = {"x.pt", names[0], "x.pt.tmp", "my-notes.tmp"}
        assert set(os.listdir(tmp_path)) == left

    def test_links_under_such_names_are_not_followed(self, tmp_path: Path) -> None:
        victim = tmp_path / "victim"
        victim.write_bytes(b"precious")
        for name in ("x.pt.tmp", f"x.pt.{files._machine()}-00000000.tmp"):
            (tmp_path / name).symlink_to(victim)
        write(tmp_path / "x.pt", b"ours")
        assert victim.read_bytes() == b"precious"

    def test_errors_of_the_file_and_of_the_block(self, tmp_path: Path) -> None:
        path = tmp_path / "x.pt"
        path.write_bytes(b"old")
        with pytest.raises(FileNotFoundError, match="another file"), files.atomic_writer(path):
            raise FileNotFoundError("another file")
        with (
            pytest.raises(UserError, match=r"^Cannot write /dev/full \(No space .*\); stop\.$"),
            files.atomic_writer("/dev/full", "; stop", streams=True) as file,
        ):
            file.write(b"new" * 9999)
        assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["x.pt"]

    def test_mode_is_what_umask_leaves(self, tmp_path: Path) -> None:
        before = os.umask(0o027)
        try:
            write(tmp_path / "x.pt", b"")
        finally:
            os.umask(before)
        assert (tmp_path / "x.pt").stat().st_mode & 0o777 == 0o640

    def test_where_there_are_no_locks(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuses(*_: object) -> None:
            raise OSError(37, "No locks available")

        monkeypatch.setattr(files.fcntl, "lockf", refuses)
        leftover = tmp_path / f"x.pt.{files._machine()}-00000000.tmp"
        leftover.write_bytes(b"")
        write(tmp_path / "x.pt", b"ours")
        assert leftover.exists()  # another process may still write it
        with files.sole_user(str(tmp_path)), files.sole_user(str(tmp_path)):
            pass


class TestPlaced:
    def test_a_file_and_a_folder(self, tmp_path: Path) -> None:
        file, folder = tmp_path / "rows", tmp_path / "model"
        file.write_bytes(b"old")
        (tmp_path / "link").symlink_to(file)
        with files.placed(tmp_path / "link") as place:
            place.write_bytes(b"new")
            place.with_suffix(".scratch").write_bytes(b"")
            assert file.read_bytes() == b"old"
        with files.placed(folder) as place:
            (place / "within").mkdir(parents=True)
            (place / "within" / "weights").write_bytes(b"theirs")
            assert not folder.exists()
        assert file.read_bytes() == b"new" and (tmp_path / "link").is_symlink()
        assert (folder / "within" / "weights").read_bytes() == b"theirs"
        assert sorted(os.listdir(tmp_path)) == ["link", "model", "rows"]

    def test_what_a_killed_process_leaves_goes(self, tmp_path: Path) -> None:
        code = """
with files.placed(sys.argv[1] + "/model") as place:
    place.mkdir()
    print("within", flush=True)
    sys.stdin.readline()
"""
        others = [another(tmp_path, code) for _ in range(2)]
        others[0].kill()
        others[0].wait()
        assert len(os.listdir(tmp_path)) == 4
        write(tmp_path / "x.pt", b"ours")
        assert len(os.listdir(tmp_path)) == 3  # the folder that the other process is making stays
        end(others[1])
        assert sorted(os.listdir(tmp_path)) == ["model", "x.pt"]

    def test_errors_leave_what_there_was(self, tmp_path: Path) -> None:
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "weights").write_bytes(b"old")
        os.mkfifo(tmp_path / "pipe")
        (tmp_path / "file").touch()
        for name in ("file", "pipe", "no/model"):
            with (
                pytest.raises(UserError, match=f"Cannot write {tmp_path}/{name} \\("),
                files.placed(tmp_path / name) as place,
            ):
                place.mkdir()
        with pytest.raises(KeyError), files.placed(tmp_path / "other") as place:
            place.mkdir()
            raise KeyError
        assert (tmp_path / "model" / "weights").read_bytes() == b"old"
        assert sorted(os.listdir(tmp_path)) == ["file", "model", "pipe"]

    def test_a_folder_is_replaced_whole(self, tmp_path: Path) -> None:
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "old").touch()
        with files.placed(tmp_path / "model") as place:
            place.mkdir()
            (place / "new").touch()
        assert os.listdir(tmp_path) == ["model"] and os.listdir(tmp_path / "model") == ["new"]


class TestSoleUser:
    def test_a_second_one_is_told_and_harms_nothing(self, tmp_path: Path) -> None:
        other = another(tmp_path, USES)
        before = {path: path.read_bytes() for path in tmp_path.iterdir()}
        for _ in range(2):
            with pytest.raises(UserError) as caught, files.sole_user(str(tmp_path)):
                pass
        assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
        end(other)
        sentence = str(caught.value)
        assert str(tmp_path) in sentence and f"process {other.pid} on " in sentence
        assert f", since {time.strftime('%Y-')}" in sentence
        assert "--save-dir" in sentence and "\n" not in sentence
        assert os.listdir(tmp_path) == []
        with files.sole_user(str(tmp_path)):
            pass

    def test_a_killed_one_leaves_the_folder_free(self, tmp_path: Path) -> None:
        forks = USES.replace("sys.stdin", "__import__('os').fork(); sys.stdin")
        other = another(tmp_path, forks)
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
        # the lock is free at once, although a child of the killed process still lives
        with files.sole_user(str(tmp_path)):
            pass
        assert other.stdin is not None
        other.stdin.close()  # ends the child
        assert os.listdir(tmp_path) == []

    def test_a_link_is_not_followed(self, tmp_path: Path) -> None:
        (tmp_path / "victim").write_bytes(b"precious")
        (tmp_path / files._LOCK).symlink_to(tmp_path / "victim")
        with files.sole_user(str(tmp_path)):
            pass
        assert (tmp_path / "victim").read_bytes() == b"precious"

    def test_many_take_turns(self, tmp_path: Path) -> None:
        """Processes take locks and remove the lock files at the same time; never two are within."""

        def work() -> None:
            entered = 0
            while entered < 30:
                try:
                    with files.sole_user(str(tmp_path)):
                        (tmp_path / "within").mkdir()
                        (tmp_path / "within").rmdir()
                    entered += 1
                except UserError:
                    time.sleep(0.0005)

        children = [runs.fork(work) for _ in range(4)]
        assert [runs.exit_status(child) for child in children] == [0] * 4
        assert os.listdir(tmp_path) == []
