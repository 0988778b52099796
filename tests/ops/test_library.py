"""The compiled library is found and loaded without a GPU; references replace missing kernels."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE

import pytest
from helpers.building import BUILD, ROOT, needs_nvcc, run

from lightseq_fairseq.base import library

# The sources that have kernels.
STEMS = {p.stem for p in (ROOT / "csrc").rglob("*.cu") if "__global__" in p.read_text()}


def in_fresh_python(code: str, *arguments: object) -> str:
    result = run([sys.executable, "-W", "error", "-c", code, *map(str, arguments)])
    assert result.returncode == 0, result.stderr
    return result.stdout


# Imports torch, and forks for each line of its input: code, a file for the output, arguments.
FORKS = """
import json, os, sys, traceback
import torch
for line in sys.stdin:
    code, output, *arguments = json.loads(line)
    child = os.fork()
    if child == 0:
        status = 1
        for number, name in ((1, output), (2, f"{output}.errors")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        try:
            sys.argv[1:] = arguments
            exec(code, {"__name__": "__main__"})
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def in_fork(tmp_path_factory) -> Iterator[Callable[..., str]]:
    """As `in_fresh_python`, in a process that has imported torch, but nothing of ours."""
    output = tmp_path_factory.mktemp("fork") / "output"
    command = [sys.executable, "-W", "error", "-c", FORKS]
    with subprocess.Popen(command, text=True, stdin=PIPE, stdout=PIPE) as server:

        def run_code(code: str, *arguments: object) -> str:
            words = [code, *map(str, (output, *arguments))]
            server.stdin.write(f"{json.dumps(words)}\n")
            server.stdin.flush()
            assert server.stdout.readline() == "0\n", Path(f"{output}.errors").read_text()
            return output.read_text()

        yield run_code
        server.stdin.close()


# --- Finding ---------------------------------------------------------------------------------


def test_library_of_torchs_own_cuda_major_is_found(tmp_path):
    for major in (9, 12, 13):
        (tmp_path / f"liblightseq_cu{major}.so").touch()
    assert library.find(tmp_path, "12.6").name == "liblightseq_cu12.so"
    assert library.find(tmp_path, "13.0").name == "liblightseq_cu13.so"
    assert library.find(tmp_path, None).name == "liblightseq_cu13.so"


@pytest.mark.parametrize(
    ("files", "cuda", "said"),
    [
        ({}, "13.0", "the CUDA kernels have not been compiled"),
        ({}, None, "the CUDA kernels have not been compiled"),
        ({"skipped.txt": "no nvcc\n"}, "13.0", "the CUDA build was skipped: no nvcc"),
        ({"liblightseq_cu13.so": ""}, "12.6", "is for CUDA 13, but torch is for CUDA 12.6"),
    ],
)
def test_what_is_missing_is_said(tmp_path, files, cuda, said):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(FileNotFoundError, match=said) as caught:
        library.find(tmp_path, cuda)
    assert library.BUILD_COMMAND in str(caught.value)


@pytest.mark.parametrize(
    ("architectures", "capability", "runs"),
    [
        (("80", "90"), (8, 0), True),
        (("80", "90"), (8, 9), True),  # machine code of 8.0 runs on all 8.x
        (("80", "90"), (9, 0), True),
        (("80", "90"), (12, 0), True),  # by the PTX of the newest architecture
        (("80", "90"), (7, 5), False),
        (("86", "120"), (8, 0), False),
        (("86", "120"), (9, 0), False),
        (("75",), (8, 6), True),
        (("80",), (9, 0), False),  # compiled without the launches that Hopper needs
        (("80", "89"), (12, 0), False),
        ((), (9, 0), False),
    ],
)
def test_covers(architectures, capability, runs):
    assert library.covers(architectures, capability) is runs


def test_a_library_that_acts_as_on_older_gpus_runs_on_newer_ones():
    assert library.covers(("80",), (9, 0), acts_as=80)
    assert library.covers(("90",), (9, 0), acts_as=120)
    assert not library.covers(("90",), (8, 9), acts_as=120)


T4, A100, H100 = (
    library.Gpu(f"GPU-{name}", capability)
    for name, capability in (("1a2b", (7, 5)), ("1a77", (8, 0)), ("9f00", (9, 0)))
)
BY_BUS = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@pytest.mark.parametrize(
    ("environment", "shown"),
    [
        ({}, [H100, A100, T4]),
        (BY_BUS, [T4, A100, H100]),
        ({**BY_BUS, "CUDA_VISIBLE_DEVICES": "0"}, [T4]),
        ({"CUDA_VISIBLE_DEVICES": "0"}, [H100]),
        ({"CUDA_VISIBLE_DEVICES": " 2, 0"}, [T4, H100]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, []),
        ({"CUDA_VISIBLE_DEVICES": "1,7,0"}, [A100]),  # up to the first that does not exist
        ({"CUDA_VISIBLE_DEVICES": "GPU-1a2b,GPU-9f"}, [T4, H100]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1a"}, []),  # the beginning of two
        ({"CUDA_VISIBLE_DEVICES": "MIG-1234"}, [H100, A100, T4]),
    ],
)
def test_visible_gpus(environment, shown):
    assert library.visible([T4, A100, H100], environment) == shown


# --- Loading ---------------------------------------------------------------------------------

STATUS = """
import dataclasses, json, sys
from pathlib import Path
from lightseq_fairseq.base import library
library.DIRECTORY = Path(sys.argv[1])
from lightseq_fairseq import ops
status = library.load()
assert library.load() is status
assert set(status.kernels) | set(status.references) == set(ops.REFERENCES)
print(json.dumps(dataclasses.asdict(status), default=str))
"""

# Calls an op as the dispatcher does for CUDA tensors; here the tensors are in host memory.
CALL_AS_ON_A_GPU = (
    STATUS
    + """
import torch
cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
rng = torch.tensor([1, 2])
for _ in range(2):
    mask = torch.ops.lightseq.dropout_mask.default.redispatch(cuda, rng, 3, 4, 5, 0.5)
    assert torch.equal(mask, ops.dropout_mask(rng, 3, 4, 5, 0.5))
    norm = torch.ops.lightseq.adam_norm.default.redispatch(cuda, torch.ones(4))
    assert norm.item() == 2
"""
)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of a library that nvcc has compiled with the headers of this torch."""
    folder = tmp_path_factory.mktemp("built")
    # As in scripts/test.sh, whose objects serve again.
    quick = "1" if shutil.which("nvidia-smi") is None else "0"
    done = run([*BUILD, "--output", str(folder)], LIGHTSEQ_CUDA_QUICK=quick)
    assert done.returncode == 0, done.stderr
    return folder


@needs_nvcc
def test_built_library_loads_and_attaches_its_kernels(built):
    """It is linked, and loaded with or without a GPU."""
    status = json.loads(in_fresh_python(STATUS, built))
    assert status["reason"] == ""
    assert Path(status["path"]).parent == built
    assert status["architectures"]
    assert {"dropout_mask", "linear_fwd", "linear_bwd"} <= set(status["kernels"])

    # The CUDA runtime is linked in; torch's CUDA part and cuBLAS are looked up at run time.
    needed = run(["readelf", "-d", status["path"]]).stdout
    assert "libtorch_cpu.so" in needed
    assert "libcuda" not in needed and "libtorch_cuda" not in needed and "libcublas" not in needed

    # It uses only torch's stable C interface, so it works with later versions, and nothing of
    # Python.
    symbols = run(["readelf", "--dyn-syms", "--wide", status["path"]]).stdout
    undefined = re.findall(r" UND (\w+)", symbols)
    assert "aoti_torch_get_data_ptr" in undefined
    assert [name for name in undefined if re.match(r"Py|_Py|_Z\w*(2at|3c10|5torch)", name)] == []


@needs_nvcc
def test_memory_bound_kernels_spill_no_registers(built):
    """ptxas's reports show it. These kernels are limited by bandwidth, which spilled registers
    would use.

    Attention is limited by instructions; some of its kernels spill a few registers.
    """
    described = json.loads(next(built.glob("*.json")).read_text())
    objects = ROOT / "build" / ("quick" if described["quick"] else "cuda")
    found, spilled = set(), set()
    for name in described["objects"]:
        report = (objects / name).with_suffix(".txt").read_text()
        spills = r"properties for (\S+)\n.* (\d+) bytes spill stores, (\d+) bytes"
        for kernel, *counts in re.findall(spills, report):
            # A namespace names the unit if a quick build has compiled several as one.
            unit = re.search(r"(\d+)unit_(\w+)", kernel)
            stem = unit[2][: int(unit[1]) - len("unit_")] if unit else name.partition("-")[0]
            found.add(stem)
            if counts != ["0", "0"]:
                spilled.add(stem)
    assert found >= STEMS
    may_spill = {"short_bwd", "tf32_bwd", "wgmma_bwd", "mma_bwd", "mma_fwd"}
    assert spilled <= may_spill
    assert runpy.run_path(BUILD[1])["UNOPTIMISED"] <= may_spill  # in a quick build


def test_without_a_library_references_stand_in_and_say_so_once(tmp_path):
    result = run([sys.executable, "-W", "error", "-c", CALL_AS_ON_A_GPU, str(tmp_path)])
    assert result.returncode == 0, result.stderr
    status = json.loads(result.stdout)
    assert status["path"] is None and status["kernels"] == []
    assert "have not been compiled" in status["reason"]
    assert result.stderr.count("slow PyTorch code") == 1
    assert status["reason"] in result.stderr


def test_a_library_that_does_not_load_is_named(tmp_path, in_fork):
    (tmp_path / "liblightseq_cu13.so").write_text("not a library")
    (tmp_path / "liblightseq_cu13.json").write_text('{"architectures": ["90"]}')
    code = f"import torch; torch.version.cuda = '13.0'\n{STATUS}"
    status = json.loads(in_fork(code, tmp_path))
    assert status["path"] is None
    assert f"{tmp_path}/liblightseq_cu13.so cannot be loaded" in status["reason"]


@pytest.mark.parametrize(("gpu", "loads"), [((7, 5), False), ((9, 0), True), (None, True)])
def test_a_library_for_other_gpus_is_left_alone(tmp_path, in_fork, gpu, loads):
    (tmp_path / "liblightseq_cu13.so").write_text("not a library, which shows when it is loaded")
    (tmp_path / "liblightseq_cu13.json").write_text('{"architectures": ["80", "90"]}')
    code = (
        f"from lightseq_fairseq.base import library; library._gpu_in_use = lambda: {gpu}\n{STATUS}"
    )
    status = json.loads(in_fork(f"import torch; torch.version.cuda = '13.0'\n{code}", tmp_path))
    assert status["path"] is None and status["kernels"] == []
    if loads:
        assert "cannot be loaded" in status["reason"]
    else:
        assert "compiled for sm_80, sm_90, but the GPU in use is sm_75" in status["reason"]


@pytest.mark.parametrize(("gpu", "said"), [((9, 0), "its kernels are slow"), (None, "cannot be")])
def test_a_quick_library_runs_on_no_gpu(tmp_path, in_fork, gpu, said):
    (tmp_path / "liblightseq_cu13.so").write_text("not a library, which shows when it is loaded")
    (tmp_path / "liblightseq_cu13.json").write_text('{"architectures": ["90"], "quick": true}')
    code = f"from lightseq_fairseq.base import library; library._gpu_in_use = lambda: {gpu}"
    code = f"import torch; torch.version.cuda = '13.0'\n{code}\n{STATUS}"
    status = json.loads(in_fork(code, tmp_path))
    assert status["kernels"] == [] and said in status["reason"]


@pytest.mark.parametrize(
    ("shown", "said"),
    [("0", "cannot be loaded"), ("1", "GPU in use is sm_80"), ("", "cannot be loaded")],
)
def test_the_gpu_that_cuda_shows_decides_and_cuda_stays_untouched(tmp_path, in_fork, shown, said):
    (tmp_path / "liblightseq_cu13.so").write_text("not a library, which shows when it is loaded")
    (tmp_path / "liblightseq_cu13.json").write_text('{"architectures": ["90"]}')
    code = f"""
import os, torch
from lightseq_fairseq.base import library
torch.version.cuda = "13.0"
os.environ["CUDA_VISIBLE_DEVICES"] = "{shown}"
library.gpus = lambda: [library.Gpu("GPU-a", (8, 0)), library.Gpu("GPU-b", (9, 0))]
{STATUS}
assert not torch.cuda.is_initialized()
"""
    assert said in json.loads(in_fork(code, tmp_path))["reason"]


def test_the_library_does_not_import_the_ops():
    """The ops import and load the library; without them it could not register kernels."""
    code = """
import sys
from lightseq_fairseq.base import library
try:
    library.load()
except RuntimeError as error:
    print(error)
assert "lightseq_fairseq.ops" not in sys.modules
"""
    assert in_fresh_python(code) == "lightseq: import lightseq_fairseq.ops before library.load()\n"


def test_importing_the_ops_is_enough_and_says_nothing():
    code = """
import lightseq_fairseq.ops as ops, torch
for name in ops.REFERENCES:
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"lightseq::{name}", "CUDA"), name
"""
    result = run([sys.executable, "-W", "error", "-c", code])
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
