"""The compiled library is built and linked without a GPU."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.building import BUILD, ROOT, needs_nvcc, run

from lightseq_fairseq.base import library


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


RECORDING_NVCC = """#!/bin/sh
[ "$1" = --version ] && echo "Cuda compilation tools, release {cuda}, V{cuda}.88" && exit
echo "$@" >>{folder}/calls
while [ "$1" != -o ]; do shift; done
touch "$2"
"""


def test_a_quick_build_optimises_most_kernels_and_leaves_the_library_in_use(tmp_path):
    cuda = torch.version.cuda or "13.0"
    environment = toolkit_without_cublas(tmp_path, cuda)
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.write_text(RECORDING_NVCC.format(cuda=cuda, folder=tmp_path))
    for folder in ("cuda/include", "csrc"):
        (tmp_path / folder).mkdir()
    (tmp_path / "cuda" / "include" / "cublasLt.h").touch()
    for stem in ("short_bwd", "embedding"):
        (tmp_path / "csrc" / f"{stem}.cu").touch()
    calls = {}
    for quick in ("0", "1"):
        done = build_in(tmp_path, **environment, LIGHTSEQ_CUDA_QUICK=quick)
        assert done.returncode == 0, done.stderr
        calls[quick] = (tmp_path / "calls").read_text().splitlines()
        (tmp_path / "calls").unlink()
        (described,) = (tmp_path / "lib").glob("*.json")
        assert json.loads(described.read_text())["quick"] is (quick == "1")
    fast = ["--Ofast-compile=max" in call for call in calls["1"]]
    assert fast == ["short_bwd" in call and "-c" in call.split() for call in calls["1"]]
    assert len(fast) == 3 and any(fast)
    assert not any("Ofast" in call or "thrust" in call for call in calls["0"])
    code = "import runpy, sys; m = runpy.run_path(sys.argv[1]); print(m['OBJECTS'], m['OUTPUT'])"
    folders = run([sys.executable, "-c", code, BUILD[1]], LIGHTSEQ_CUDA_QUICK="1").stdout.split()
    assert folders == [str(ROOT / "build" / "quick")] * 2


UNIT = """#include "common/{header}.cuh"
namespace lightseq {{
namespace {{

int value() {{
  return {value};
}}

}}  // namespace
{after}
}}  // namespace lightseq
"""


def test_a_quick_build_compiles_units_as_one_that_also_compile_alone(tmp_path):
    """Units before a unit have no header that it uses and does not include."""
    (tmp_path / "common" / "ptx").mkdir(parents=True)
    for header, text in {
        "size": "constexpr int kSize = 1;",
        "none": "// kSize is another name\nconstexpr int kNone = 2;",
        "string": "#include <string>\nconstexpr int kString = 3;",
        "all": '#include "common/none.cuh"\n#include "common/size.cuh"\n#include <string>',
        "ptx/wgmma": "",
    }.items():
        (tmp_path / "common" / f"{header}.cuh").write_text(f"#pragma once\n{text}\n")
    for stem, header, value in (
        ("a", "size", "kSize"),
        ("b_lacks_size", "none", "kSize + kNone"),
        ("c", "none", "kNone;  // no kSize"),
        ("d", "string", "0"),
        ("e_lacks_string", "none", "std::string().size() + kNone"),
        ("f", "all", "kSize + kNone"),
        ("short_bwd", "none", "kNone"),
        ("wgmma", "ptx/wgmma", "0"),
    ):
        after = f"int {stem}(\n    int x) {{\n  return value() + x;\n}}\n" if len(stem) < 2 else ""
        text = UNIT.format(header=header, value=value, after=after)
        (tmp_path / f"{stem}.cu").write_text(text)
    (tmp_path / "no_unnamed_namespace.cu").write_text("constexpr int kNone = 2;\n")
    build = runpy.run_path(BUILD[1])
    units = sorted(tmp_path.glob("*.cu"))
    groups = build["groups_of"](units, [tmp_path], build["kind_of"])
    found = sorted([unit.stem for unit in group] for group in groups)
    assert found == [
        ["a", "c", "d", "f"],
        ["b_lacks_size", "e_lacks_string"],
        ["no_unnamed_namespace"],
        ["short_bwd"],
        ["wgmma"],
    ]
    text = build["joined"](next(group for group in groups if len(group) == 4))
    assert re.findall(r'#line 1 "(\w+).cu"', text) == found[0]
    assert re.findall(r"using namespace unit_(\w);", text) == found[0]
    compiler = ["g++", "-fsyntax-only", "-I", str(tmp_path), "-x", "c++", "-"]
    done = subprocess.run(compiler, input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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
