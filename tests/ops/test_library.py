"""The compiled library: it is built, linked and loaded without a GPU; references replace missing
kernels."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightseq_fairseq.base import library

ROOT = Path(__file__).resolve().parents[2]
BUILD = [sys.executable, str(ROOT / "scripts" / "build_cuda.py")]

# The sources that have kernels.
STEMS = {p.stem for p in (ROOT / "csrc").rglob("*.cu") if "__global__" in p.read_text()}

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH")


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=900
    )


def in_fresh_python(code: str, *arguments: object) -> str:
    result = run([sys.executable, "-W", "error", "-c", code, *map(str, arguments)])
    assert result.returncode == 0, result.stderr
    return result.stdout


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


@needs_nvcc
def test_built_library_loads_and_attaches_its_kernels(tmp_path):
    """nvcc compiles it with the headers of this torch; it is linked, and loaded with or without a
    GPU."""
    built = run([*BUILD, "--output", str(tmp_path)])
    assert built.returncode == 0, built.stderr
    status = json.loads(in_fresh_python(STATUS, tmp_path))
    assert status["reason"] == ""
    assert Path(status["path"]).parent == tmp_path
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
def test_memory_bound_kernels_spill_no_registers(tmp_path):
    """ptxas's reports show it. These kernels are limited by bandwidth, which spilled registers
    would use.

    Attention is limited by instructions; some of its kernels spill a few registers.
    """
    built = run([*BUILD, "--output", str(tmp_path)])
    assert built.returncode == 0, built.stderr
    described = json.loads(next(tmp_path.glob("*.json")).read_text())
    found = {}
    for name in described["objects"]:
        report = (ROOT / "build" / "cuda" / name).with_suffix(".txt").read_text()
        found[name.partition("-")[0]] = re.findall(
            r"properties for (\S+)\n.* (\d+) bytes spill stores, (\d+) bytes", report
        )
    assert {stem for stem, kernels in found.items() if kernels} >= STEMS
    spilled = {stem for stem, kernels in found.items() if any(x[1:] != ("0", "0") for x in kernels)}
    assert spilled <= {"short_bwd", "tf32_bwd", "wgmma_bwd", "mma_bwd", "mma_fwd"}


def test_without_a_library_references_stand_in_and_say_so_once(tmp_path):
    result = run([sys.executable, "-W", "error", "-c", CALL_AS_ON_A_GPU, str(tmp_path)])
    assert result.returncode == 0, result.stderr
    status = json.loads(result.stdout)
    assert status["path"] is None and status["kernels"] == []
    assert "have not been compiled" in status["reason"]
    assert result.stderr.count("slow PyTorch code") == 1
    assert status["reason"] in result.stderr


def test_a_library_that_does_not_load_is_named(tmp_path):
    (tmp_path / "liblightseq_cu13.so").write_text("not a library")
    (tmp_path / "liblightseq_cu13.json").write_text('{"architectures": ["90"]}')
    code = f"import torch; torch.version.cuda = '13.0'\n{STATUS}"
    status = json.loads(in_fresh_python(code, tmp_path))
    assert status["path"] is None
    assert f"{tmp_path}/liblightseq_cu13.so cannot be loaded" in status["reason"]


@pytest.mark.parametrize(("gpu", "loads"), [((7, 5), False), ((9, 0), True), (None, True)])
def test_a_library_for_other_gpus_is_left_alone(tmp_path, gpu, loads):
    (tmp_path / "liblightseq_cu13.so").write_text("not a library, which shows when it is loaded")
    (tmp_path / "liblightseq_cu13.json").write_text('{"architectures": ["80", "90"]}')
    code = (
        f"from lightseq_fairseq.base import library; library._gpu_in_use = lambda: {gpu}\n{STATUS}"
    )
    status = json.loads(
        in_fresh_python(f"import torch; torch.version.cuda = '13.0'\n{code}", tmp_path)
    )
    assert status["path"] is None and status["kernels"] == []
    if loads:
        assert "cannot be loaded" in status["reason"]
    else:
        assert "compiled for sm_80, sm_90, but the GPU in use is sm_75" in status["reason"]


@pytest.mark.parametrize(
    ("shown", "said"),
    [("0", "cannot be loaded"), ("1", "GPU in use is sm_80"), ("", "cannot be loaded")],
)
def test_the_gpu_that_cuda_shows_decides_and_cuda_stays_untouched(tmp_path, shown, said):
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
    assert said in json.loads(in_fresh_python(code, tmp_path))["reason"]


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


# --- Building --------------------------------------------------------------------------------


def test_without_nvcc_a_wanted_build_fails(tmp_path):
    result = run([*BUILD, "--output", str(tmp_path)], CUDA_HOME=str(tmp_path))
    assert result.returncode == 1
    assert "nvcc (the CUDA compiler) was not found" in result.stderr
    assert not list(tmp_path.iterdir())


def test_pips_compiler_is_found_where_none_is_on_the_path(tmp_path):
    nvcc = tmp_path / "nvidia" / "cu13" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.touch(mode=0o755)
    code = "import runpy, sys; print(runpy.run_path(sys.argv[1])['find_nvcc']())"
    find = [sys.executable, "-c", code, BUILD[1]]
    environment = {"PYTHONPATH": str(tmp_path), "CUDA_HOME": "", "PATH": str(tmp_path)}
    assert run(find, **environment).stdout == f"{nvcc}\n"
    environment["CUDA_HOME"] = str(tmp_path / "other")  # only the one that the user names
    assert "was not found" in run(find, **environment).stderr


def test_without_nvcc_an_optional_build_is_skipped_in_one_line(tmp_path):
    command = [*BUILD, "--if-possible", "--output", str(tmp_path)]
    result = run(command, CUDA_HOME=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("CUDA build skipped: nvcc") and result.stdout.count("\n") == 1
    with pytest.raises(FileNotFoundError, match="the CUDA build was skipped: nvcc"):
        library.find(tmp_path, None)


def toolkit_without_cublas(folder: Path, cuda: str) -> dict[str, str]:
    """An environment whose toolkit has a compiler but no cublasLt.h, and which has no pip package
    of it."""
    nvcc = folder / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {cuda}, V{cuda}.88'\n")
    nvcc.chmod(0o755)
    (folder / "site" / "nvidia").mkdir(parents=True)
    (folder / "site" / "nvidia" / "__init__.py").touch()  # hides the installed package
    return {"CUDA_HOME": str(folder / "cuda"), "PYTHONPATH": str(folder / "site")}


@pytest.mark.parametrize(
    ("cuda", "package", "header"),
    [
        ("13.0", "nvidia-cublas==13.*", "site/nvidia/cu13/include"),
        ("12.9", "nvidia-cublas-cu12", "site/nvidia/cublas/include"),
        ("13.0", "nvidia-cublas==13.*", "cuda/include"),
        ("13.0", "nvidia-cublas==13.*", "cuda/targets/x86_64-linux/include"),
    ],
)
def test_package_with_cublas_headers_is_named_where_they_lack(tmp_path, cuda, package, header):
    environment = toolkit_without_cublas(tmp_path, cuda)
    code = "import runpy, sys; print(runpy.run_path(sys.argv[1])['missing_packages']())"
    missing = [sys.executable, "-c", code, BUILD[1]]
    assert run(missing, **environment).stdout == f"['{package}']\n"
    (tmp_path / header).mkdir(parents=True)
    (tmp_path / header / "cublasLt.h").touch()
    assert run(missing, **environment).stdout == "[]\n"


def test_missing_headers_are_installed_by_pip_where_that_is_asked_for(tmp_path):
    environment = toolkit_without_cublas(tmp_path, torch.version.cuda or "13.0")
    pip = tmp_path / "site" / "pip.py"
    pip.write_text("import sys; sys.exit(' '.join(sys.argv[1:]))")
    command = [*BUILD, "--install-headers", "--output", str(tmp_path / "lib")]
    result = run(command, **environment)
    assert result.returncode == 1
    words, failure = result.stderr.splitlines()
    assert words.startswith("install --quiet --no-deps nvidia-cublas")
    assert failure.startswith("CUDA build failed: nvidia-cublas")
    assert "pip" not in run([*command, "--if-possible"], CUDA_HOME=str(tmp_path)).stderr


def test_without_cublas_headers_the_build_says_what_to_install(tmp_path):
    cuda = torch.version.cuda or "13.0"
    environment = toolkit_without_cublas(tmp_path, cuda)
    result = run([*BUILD, "--output", str(tmp_path / "lib")], **environment)
    assert result.returncode == 1
    assert result.stderr.startswith("CUDA build failed: cublasLt.h was found neither in")
    assert "; install it: pip install --no-deps 'nvidia-cublas" in result.stderr


@needs_nvcc
def test_a_gpu_that_is_too_old_is_named(tmp_path):
    """At set-up, the build is then skipped, as without nvcc."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 7.5\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    command = [*BUILD, "--output", str(tmp_path / "lib")]
    wanted = run(command, PATH=path)
    assert wanted.returncode == 1 and "sm_75" in wanted.stderr
    skipped = run([*command, "--if-possible"], PATH=path)
    assert skipped.returncode == 0, skipped.stderr
    assert skipped.stdout.startswith("CUDA build skipped: ") and skipped.stdout.count("\n") == 1
    assert "sm_75" in (tmp_path / "lib" / "skipped.txt").read_text()


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch can use the kernels")
def test_kernels_that_this_machine_cannot_use_are_compiled_only_if_asked_for(tmp_path):
    environment = toolkit_without_cublas(tmp_path, "13.0")
    path = {"PATH": str(tmp_path)}  # without nvidia-smi
    command = [*BUILD, "--if-useful", "--output", str(tmp_path / "lib")]
    result = run(command, **environment, **path)
    assert result.returncode == 0, result.stderr
    reason = f"torch {torch.__version__} has no CUDA and this machine has no GPU"
    assert result.stdout == f"CUDA build skipped: {reason}\n"
    assert (tmp_path / "lib" / "skipped.txt").read_text() == f"{reason}\n"
    for asked in (["--architectures", "90"], []):
        if not asked:
            (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 9.0\n")
            (tmp_path / "nvidia-smi").chmod(0o755)
        wanted = run([*command, *asked], **environment, **path)
        assert wanted.returncode == 1 and "cublasLt.h was found neither in" in wanted.stderr


@pytest.mark.parametrize(("asked", "named"), [("80,75", "sm_75"), ("native", "sm_native")])
def test_asking_for_a_gpu_that_is_too_old_is_an_error(tmp_path, asked, named):
    """Also if the build may be skipped, because the user has requested this architecture."""
    command = [*BUILD, "--if-possible", "--output", str(tmp_path / "lib")]
    result = run(command, LIGHTSEQ_CUDA_ARCHITECTURES=asked)
    assert result.returncode != 0
    assert f"the kernels need sm_80 or later, but {named} was given" in result.stderr
    assert not (tmp_path / "lib").exists()


def build_in(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return run(
        [
            *BUILD,
            *("--sources", str(folder / "csrc"), "--objects", str(folder / "objects")),
            *("--output", str(folder / "lib"), "--architectures", "80"),
        ],
        **environment,
    )


@needs_nvcc
@pytest.mark.parametrize(("acts_as", "ptx"), [(80, "80"), (89, "89"), (120, "90")])
def test_a_library_that_acts_as_another_gpu_is_made_of_its_ptx(tmp_path, acts_as, ptx):
    (tmp_path / "csrc").mkdir()
    source = f"static_assert(LIGHTSEQ_ACTS_AS == {acts_as});\n__global__ void empty() {{}}\n"
    source += f"#ifdef __CUDA_ARCH__\nstatic_assert(__CUDA_ARCH__ == {ptx}0);\n#endif\n"
    (tmp_path / "csrc" / "empty.cu").write_text(source)
    result = run(
        [
            *(*BUILD, "--acts-as", str(acts_as), "--sources", str(tmp_path / "csrc")),
            *("--objects", str(tmp_path / "objects"), "--output", str(tmp_path / "lib")),
        ]
    )
    assert result.returncode == 0, result.stderr
    (described,) = (tmp_path / "lib").glob("*.json")
    record = json.loads(described.read_text())
    assert (record["acts_as"], record["architectures"]) == (acts_as, [ptx])
    (report,) = (tmp_path / "objects").glob("*.txt")
    assert set(re.findall(r"for '(\w+)'", report.read_text())) == {"sm_90"}


@pytest.mark.parametrize("given", ["--output", "--objects"])
def test_a_library_for_tests_never_replaces_the_one_in_use(tmp_path, given):
    """It needs its own folders for library and objects; the usual ones are not touched, with nvcc
    or without."""
    result = run([*BUILD, "--acts-as", "80", given, str(tmp_path)], CUDA_HOME=str(tmp_path))
    assert result.returncode == 2
    assert "--acts-as needs an --output and --objects other than the defaults" in result.stderr


@needs_nvcc
def test_only_what_changed_is_compiled_again(tmp_path):
    common = tmp_path / "csrc" / "common"
    common.mkdir(parents=True)
    (common / "size.cuh").write_text("constexpr int kSize = 1;\n")
    for stem in ("first", "second"):
        source = f'#include "common/size.cuh"\n__global__ void {stem}(int* x) {{ *x = kSize; }}\n'
        (tmp_path / "csrc" / f"{stem}.cu").write_text(source)

    def compiled() -> list[str]:
        result = build_in(tmp_path)
        assert result.returncode == 0, result.stderr
        lines = result.stdout.splitlines()
        return sorted(line.split()[1] for line in lines if line.startswith("compiling"))

    assert compiled() == ["first.cu", "second.cu"]
    (made,) = (tmp_path / "lib").glob("*.so")
    linked = made.stat().st_ino
    assert compiled() == []
    assert made.stat().st_ino == linked
    (tmp_path / "csrc" / "second.cu").write_text("__global__ void second() {}\n")
    assert compiled() == ["second.cu"]
    assert made.stat().st_ino != linked
    (common / "size.cuh").write_text("constexpr int kSize = 2;\n")
    assert compiled() == ["first.cu"]  # the other one does not include the header any more
    objects = {path.name.partition("-")[0] for path in (tmp_path / "objects").iterdir()}
    assert objects == {"first", "second"}
    assert len(list((tmp_path / "objects").iterdir())) == 4  # including ptxas's reports


@needs_nvcc
def test_objects_serve_again_wherever_sources_and_headers_lie(tmp_path):
    """A wheel is built in other folders: those of an sdist and of pip's environment."""
    for checkout in ("here", "there"):
        (tmp_path / checkout / "csrc").mkdir(parents=True)
        (tmp_path / checkout / "csrc" / "empty.cu").write_text("__global__ void empty() {}\n")
        (tmp_path / checkout / "objects").symlink_to(tmp_path)
    assert "compiling empty.cu" in build_in(tmp_path / "here").stdout
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "torch").symlink_to(Path(torch.__file__).parent)
    again = build_in(tmp_path / "there", PYTHONPATH=str(tmp_path / "site"))
    assert again.returncode == 0, again.stderr
    assert "compiling" not in again.stdout and list(tmp_path.glob("there/lib/*.so"))


@needs_nvcc
def test_what_an_interrupted_build_left_goes_with_the_next(tmp_path):
    """Files of a process that still runs stay, because another build may run at the same time."""
    for folder in ("csrc", "objects", "lib"):
        (tmp_path / folder).mkdir()
    (tmp_path / "csrc" / "empty.cu").write_text("__global__ void empty() {}\n")
    gone = subprocess.Popen(["true"])
    gone.wait()
    names = f"objects/old-{'0a' * 8}.{{}}.o", "lib/liblightseq_cu13.{}"
    for pid in (gone.pid, os.getpid()):
        for name in names:
            (tmp_path / name.format(pid)).touch()
    result = build_in(tmp_path)
    assert result.returncode == 0, result.stderr
    assert not any((tmp_path / name.format(gone.pid)).exists() for name in names)
    assert all((tmp_path / name.format(os.getpid())).exists() for name in names)


@needs_nvcc
@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("__global__ void broken() { undeclared = 1; }\n", '"undeclared" is undefined'),
        ("void missing();\nvoid caller() { missing(); }\n", "undefined reference to `missing()'"),
    ],
    ids=["compile", "link"],
)
def test_a_failing_build_stops_with_the_compilers_message(tmp_path, source, said):
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "broken.cu").write_text(source)
    result = build_in(tmp_path)
    assert result.returncode == 1
    assert said in result.stderr and "broken" in result.stderr
    assert not list(tmp_path.glob("lib/*.so"))


@needs_nvcc
def test_an_unknown_architecture_is_refused_by_the_compiler(tmp_path):
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "empty.cu").write_text("__global__ void empty() {}\n")
    command = [*BUILD, "--sources", str(tmp_path / "csrc"), "--objects", str(tmp_path / "objects")]
    result = run([*command, "--output", str(tmp_path / "lib"), "--architectures", "12345"])
    assert result.returncode == 1
    assert "compute_12345" in result.stderr
