"""`import fairseq` works by itself where `startup` has written its line; nothing else in Python
changes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import lightseq_fairseq
from lightseq_fairseq import startup
from lightseq_fairseq.cli import doctor

ROOT = Path(lightseq_fairseq.__file__).parents[1]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package folder with the line; Python reads it like site-packages."""
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    monkeypatch.delenv(startup.SWITCH, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert startup.main([]) is None
    return tmp_path


def python(site: Path, code: str) -> subprocess.CompletedProcess[str]:
    begin = (
        "import sys\nsys.meta_path[:] = [f for f in sys.meta_path if 'startup' not in repr(f)]\n"
        f"import site; site.addsitedir({str(site)!r})\n"
    )
    command = [sys.executable, "-c", begin + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_fairseq_imports_and_is_repaired(site: Path) -> None:
    run = python(
        site,
        "from importlib.util import find_spec\n"
        "assert find_spec('fairseq').origin and 'torch' not in sys.modules\n"
        "import fairseq.data.data_utils, fairseq_cli.train\n"
        "from lightseq_fairseq import fairseq_compat\n"
        "assert fairseq_compat._prepared and fairseq is sys.modules['fairseq']\n"
        "assert type(fairseq.data.data_utils.np).__name__ == 'Overlay'\n"
        "assert 'startup' not in repr(sys.meta_path)\n"
        "print(fairseq.__version__)\n",
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout[:3] == "0.1" and run.stderr == ""


def test_an_import_that_lacked_a_package_is_made_again(site: Path) -> None:
    """As in a notebook: the import fails, the user installs the package and runs the cell again."""
    run = python(
        site,
        "sys.modules['hydra'] = None\n"
        "try:\n import fairseq\nexcept ImportError as error:\n print('hydra-core' in str(error))\n"
        "del sys.modules['hydra']\n"
        "import fairseq.data.data_utils\n"
        "print(type(fairseq.data.data_utils.np).__name__)\n",
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["True", "Overlay"]


def test_python_starts_without_anything_else(site: Path) -> None:
    run = python(
        site,
        "assert 'import_hook' in repr(sys.meta_path[0])\n"
        "print({'torch', 'fairseq', 'logging', 'typing', 'numpy'} & set(sys.modules))\n",
    )
    assert (run.stdout, run.stderr) == ("set()\n", "")


@pytest.mark.parametrize(
    "before",
    [
        f"import os; os.environ[{startup.SWITCH!r}] = '0'\n",
        "sys.modules['lightseq_fairseq'] = None\n",
        "sys.modules['lightseq_fairseq.startup'] = None\n",
    ],
    ids=["left out", "uninstalled", "broken"],
)
def test_otherwise_nothing_changes(site: Path, before: str) -> None:
    again = f"{before}sys.meta_path.pop(0); site.addsitedir({str(site)!r})\n"
    (site / "fairseq.py").write_text("name = 'the one that is there'\n")
    run = python(site, f"{again}sys.path.insert(0, {str(site)!r})\nimport fairseq\n"
                 "print(fairseq.name, 'startup' in repr(sys.meta_path))\n")  # fmt: skip
    assert (run.stdout, run.stderr) == ("the one that is there False\n", "")


def test_what_keeps_fairseq_back_is_an_import_error(site: Path) -> None:
    run = python(site, "sys.modules['hydra'] = None\nimport fairseq\n")
    assert run.stderr.splitlines()[-1].startswith("ImportError: fairseq needs hydra-core, which")


def test_a_broken_installation_of_ours_does_not_keep_fairseq_back(site: Path) -> None:
    (site / "fairseq.py").write_text("name = 'the one that is there'\n")
    run = python(site, f"sys.path.insert(0, {str(site)!r})\n"
                 "sys.modules['lightseq_fairseq.fairseq_compat'] = None\n"
                 "import fairseq; print(fairseq.name)\n")  # fmt: skip
    assert run.stdout == "the one that is there\n", run.stderr


def test_the_line_is_named_and_can_be_removed(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = site / startup.FILE
    assert doctor.fairseq([])["import_hook"] == str(path)
    monkeypatch.setenv(startup.SWITCH, "0")
    assert doctor.fairseq([])["import_hook"] is None
    monkeypatch.delenv(startup.SWITCH)
    for _ in range(2):
        assert startup.main(["--remove"]) is None
        assert not path.exists()
    assert doctor.fairseq([])["import_hook"] is None
    path.mkdir()
    assert "cannot be changed" in str(startup.main([]))
    assert startup.main(["--what"]) == f"usage: python -m {startup.__name__} [--remove]"
