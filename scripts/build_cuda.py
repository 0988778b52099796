#!/usr/bin/env python3
"""Compile csrc/ into one library for a CUDA major version, any supported Python and torch.

The sources use torch's stable C++ interface (torch/csrc/stable, pinned to 2.11). So the build needs
only torch's headers, also from a CPU build of torch, and neither Python's headers nor pybind11.

    csrc/<family>/<stem>.cu  ->  build/cuda/<stem>-<fingerprint>.o and .txt: ptxas's report
                             ->  lightseq_fairseq/_lib/liblightseq_cu<major>.so

The fingerprint is a hash of everything that an object depends on, so unchanged units are not
compiled again. CUDA's runtime is linked statically: the library also loads on a machine without a
GPU and without CUDA.

With LIGHTSEQ_CUDA_QUICK=1 the build only shows that all units compile and link, and which kernels
spill registers. Its folder is build/quick, and its library refuses to load where a GPU is in use.
nvcc reads torch's headers for most of its time, so a quick build compiles several units as one.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from scripts.csrc_units import groups_of, included, joined, text_of  # noqa: E402

QUICK = os.environ.get("LIGHTSEQ_CUDA_QUICK") == "1"
OBJECTS = ROOT / "build" / ("quick" if QUICK else "cuda")
OUTPUT = OBJECTS if QUICK else ROOT / "lightseq_fairseq" / "_lib"
TORCH_MINIMUM = (2, 11)
STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020b000000000000"  # 2.11, one byte per number
ALL_ARCHITECTURES = ("80", "86", "89", "90", "100", "120")
DEFAULT_ARCHITECTURES = ("80", "90")
OLDEST_ARCHITECTURE = 80  # bfloat16 on the tensor cores, asynchronous copies
# Unfinished files of an interrupted build: objects and libraries named after its process ID.
PARTIAL = re.compile(r"(?:\w+-[0-9a-f]{16}|liblightseq_cu\d+)\.(\d+)(?:\.o|\.cu)?")
RESOURCES = re.compile(r"ptxas info|Compile time|\s+\d+ bytes stack frame")
# Units that include this have instructions that only sm_90 has; nvcc calls that target sm_90a.
WGMMA = '"common/ptx/wgmma.cuh"'
# Units that take nvcc longest, and whose kernels may spill registers. A quick build does not
# optimise them; of the others, it optimises the kernels, so that ptxas reports spilled registers.
UNOPTIMISED = frozenset({"mma_bwd", "mma_fwd", "short_bwd", "wgmma_bwd"})
# A header that a quick build reads in place of thrust's.
SHORT_THRUST = ROOT / "csrc" / "common" / "quick" / "thrust" / "complex.h"
HOPPER = "sm_90"  # the GPU that runs a library built with --acts-as
HOST_FLAGS = "-fPIC,-fvisibility=hidden,-Wall,-Wextra,-Wno-unknown-pragmas"


class BuildError(Exception):
    """Raised if the library cannot be built; the text says why."""


@dataclass(frozen=True)
class Toolchain:
    """The compiler, the folder of torch, and the folder of cuBLAS's headers if nvcc lacks them."""

    nvcc: str
    cuda: str
    torch: Path
    cublas: Path | None

    @property
    def major(self) -> str:
        return self.cuda.partition(".")[0]


def pip_folders(pattern: str) -> list[Path]:
    """Matches of the pattern in the folder into which pip installs NVIDIA's packages."""
    spec = importlib.util.find_spec("nvidia")
    sites = (spec and spec.submodule_search_locations) or ()
    return [path for site in sites for path in Path(site).glob(pattern)]


def find_nvcc() -> str:
    """Return the path of nvcc: from CUDA_HOME if set, else the PATH, pip, or /usr/local/cuda."""
    home = os.environ.get("CUDA_HOME")
    places = [f"{home}/bin/nvcc"] if home else ["nvcc", "/usr/local/cuda/bin/nvcc"]
    candidates = places if home else [places[0], *map(str, pip_folders("cu*/bin/nvcc")), places[1]]
    for candidate in candidates:
        if path := shutil.which(candidate):
            return path
    raise BuildError(
        f"nvcc (the CUDA compiler) was not found: {' and '.join(places)} do not exist; "
        "install the CUDA toolkit, or set CUDA_HOME, or let pip install a compiler: "
        "bash scripts/setup.sh nvcc"
    )


def cuda_version(nvcc: str) -> str:
    """Return the version of the CUDA toolkit, for example 13.0."""
    answer = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"release (\d+\.\d+)", answer)
    if found is None:
        raise BuildError(f"{nvcc} --version does not print a release")
    return found[1]


def cublas_package(cuda: str) -> str:
    """Return the pip package that contains cuBLAS and its headers."""
    major = int(cuda.partition(".")[0])
    return f"nvidia-cublas=={major}.*" if major >= 13 else f"nvidia-cublas-cu{major}"


def find_cublas(nvcc: str, cuda: str) -> Path | None:
    """Return the pip package's folder with cublasLt.h; None if the toolkit has this header."""
    toolkit = Path(nvcc).resolve().parent.parent
    for folder in (toolkit / "include", *toolkit.glob("targets/*/include")):
        if (folder / "cublasLt.h").exists():
            return None
    for name in (f"cu{cuda.partition('.')[0]}", "cublas"):
        for header in pip_folders(f"{name}/include/cublasLt.h"):
            return header.parent
    raise BuildError(
        f"cublasLt.h was found neither in {toolkit} nor in {sys.prefix}; "
        f"install it: pip install --no-deps '{cublas_package(cuda)}'"
    )


def missing_packages() -> list[str]:
    """The pip packages with headers that nvcc lacks: one, or none."""
    nvcc = find_nvcc()
    cuda = cuda_version(nvcc)
    try:
        find_cublas(nvcc, cuda)
    except BuildError:
        return [cublas_package(cuda)]
    return []


def install(package: str) -> None:
    """Install a package for the Python that runs this, without its dependencies."""
    say(f"installing {package} (headers that the CUDA kernels need)")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", package]
    if subprocess.run(command).returncode != 0:
        raise BuildError(f"{package} cannot be installed: pip says why")


def find_torch() -> tuple[Path, str, str | None]:
    """torch's folder, its version, and the CUDA version that it was built for, if any."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise BuildError(
            f"{sys.executable} has no torch, whose headers the build needs: install torch first"
        )
    torch = Path(spec.origin).parent
    cuda = runpy.run_path(str(torch / "version.py"))["cuda"]  # importing torch takes seconds
    return torch, importlib.metadata.version("torch"), cuda


def find_toolchain() -> Toolchain:
    nvcc = find_nvcc()
    torch, version, wanted = find_torch()
    if tuple(int(number) for number in version.split(".")[:2]) < TORCH_MINIMUM:
        raise BuildError(f"torch {version} is too old: 2.11 or later is needed")
    cuda = cuda_version(nvcc)
    if wanted is not None and wanted.partition(".")[0] != cuda.partition(".")[0]:
        raise BuildError(
            f"{nvcc} is CUDA {cuda} but torch {version} was built for CUDA {wanted}: "
            "set CUDA_HOME to a toolkit of the same major version"
        )
    return Toolchain(nvcc, cuda, torch, find_cublas(nvcc, cuda))


def asked_architectures(text: str) -> tuple[str, ...]:
    """Return the compute capabilities in the user's text, for example 80,90, or all."""
    if text == "all":
        return ALL_ARCHITECTURES
    architectures = tuple(re.findall(r"\w+", text))
    for architecture in architectures:
        number = re.match(r"\d+", architecture)
        if number is None or int(number[0]) < OLDEST_ARCHITECTURE:
            raise argparse.ArgumentTypeError(
                f"the kernels need sm_{OLDEST_ARCHITECTURE} or later, but sm_{architecture} was "
                "given: remove it"
            )
    return architectures


def visible_architectures() -> tuple[str, ...]:
    """Return the compute capabilities of this machine's GPUs, as in ("90",); () without a GPU."""
    if not shutil.which("nvidia-smi"):
        return ()
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True).stdout
    found = {major + minor for major, minor in re.findall(r"^(\d+)\.(\d)$", answer, re.M)}
    return tuple(sorted(found, key=int))


def choose_architectures(wanted: tuple[str, ...]) -> tuple[str, ...]:
    """Return `wanted` if not empty, else this machine's supported GPUs, else the default.

    Raises BuildError if this machine has GPUs but none is supported.
    """
    if wanted:
        return wanted
    visible = visible_architectures()
    usable = tuple(number for number in visible if int(number) >= OLDEST_ARCHITECTURE)
    if visible and not usable:
        raise BuildError(
            f"the kernels need a GPU of sm_{OLDEST_ARCHITECTURE} or later and this machine has "
            f"sm_{', sm_'.join(visible)}"
        )
    return usable or DEFAULT_ARCHITECTURES


def require_use() -> None:
    """Raise BuildError if neither this machine's GPUs nor its torch can use the kernels."""
    _, version, cuda = find_torch()
    if cuda is None and not visible_architectures():
        raise BuildError(f"torch {version} has no CUDA and this machine has no GPU")


def ptx_to_act_as(capability: int) -> str:
    """Return the architecture of the PTX that a Hopper GPU runs to act as ``capability``."""
    return str(min(capability, 90))


def architecture_flags(
    architectures: tuple[str, ...], source: str, acts_as: int | None = None
) -> list[str]:
    """Return nvcc's flags: machine code for each architecture, and PTX of the newest.

    GPUs that are newer than all of them run the PTX. With ``acts_as``: one PTX, and its machine
    code for Hopper, so that the driver need not compile the PTX again in each test process.
    """
    newest = max(architectures, key=lambda name: int(re.sub(r"\D", "", name)))
    ptx = f"-gencode=arch=compute_{newest},code=compute_{newest}"
    if acts_as is not None:
        assembled = f"-gencode=arch=compute_{newest},code={HOPPER}"
        return [assembled, ptx, f"-DLIGHTSEQ_ACTS_AS={acts_as}"]
    defined = []
    if WGMMA in source:
        architectures = tuple("90a" if a == "90" else a for a in architectures)
        defined = ["-DLIGHTSEQ_SM90A"] if "90a" in architectures else []
    return [*(f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures), ptx, *defined]


def fingerprint(parts: list[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


def say(text: str) -> None:
    """Print in one write, so that lines of parallel compilers do not mix."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def run_compiler(command: list[str]) -> list[str]:
    """Run the command, print its warnings, and return ptxas's report of the kernels' resources."""
    result = subprocess.run(command, capture_output=True, text=True)
    lines = (result.stdout + result.stderr).splitlines()
    report = [line for line in lines if RESOURCES.match(line)]
    said = "\n".join(line for line in lines if not RESOURCES.match(line)).strip()
    if result.returncode != 0:
        raise BuildError(f"{' '.join(command)}\n{said}")
    if said:
        say(said)
    return report


def remove_partials(folder: Path) -> None:
    """Remove the files of interrupted builds from the folder, but not those of running builds."""
    for path in folder.glob("*"):
        partial = PARTIAL.fullmatch(path.name)
        if partial is not None:
            try:
                os.kill(int(partial[1]), 0)  # signal 0 only checks that the process exists
            except ProcessLookupError:
                path.unlink(missing_ok=True)
            except PermissionError:
                pass  # the process exists and belongs to another user


def kind_of(unit: Path) -> tuple[bool, bool]:
    """Equal for units that a quick build compiles with the same options."""
    return WGMMA in text_of(unit), unit.stem in UNOPTIMISED


def compile_sources(
    toolchain: Toolchain, sources: Path, objects: Path, architectures: tuple[str, ...], jobs: int,
    acts_as: int | None,
) -> list[Path]:  # fmt: skip
    """Return the object files of all .cu files; compile those that do not exist yet."""
    units = list(sources.rglob("*.cu"))
    if not units:
        raise BuildError(f"{sources} has no .cu file")
    flags = ["-std=c++20", "-O3", "-Xptxas", "-v", "-Xcompiler", HOST_FLAGS]
    flags += [] if QUICK else ["-lineinfo"]  # for profilers; it takes nvcc a twelfth of its time
    flags += [STABLE_ABI]
    folders = [
        *([f"-I{SHORT_THRUST.parents[1]}"] if QUICK else ()),
        *(f"-I{sources}", "-isystem", str(toolchain.torch / "include")),
        *(("-isystem", str(toolchain.cublas)) if toolchain.cublas else ()),
    ]
    # Hash contents, not folders: when pip builds a wheel, the folder of the headers has a new name.
    others = [
        (toolchain.torch / "version.py").read_bytes(),
        *([(toolchain.cublas / "cublasLt.h").read_bytes()] if toolchain.cublas else ()),
        f"{toolchain.nvcc} {toolchain.cuda} {flags} {architectures} {acts_as}".encode(),
        *([SHORT_THRUST.read_bytes()] if QUICK else ()),
    ]
    objects.mkdir(parents=True, exist_ok=True)
    remove_partials(objects)

    def compile_one(group: list[Path]) -> tuple[Path, BuildError | None]:
        first = group[0]
        headers = {header for unit in group for header in included(unit, sources)[0]}
        text = text_of(first) if len(group) == 1 else joined(group)
        hurried = ["--Ofast-compile=max"] if QUICK and first.stem in UNOPTIMISED else []
        read = [text.encode(), *(path.read_bytes() for path in sorted(headers))]
        parts = [*read, *others, *map(str.encode, hurried)]
        target = objects / f"{first.stem}-{fingerprint(parts)}.o"
        if target.exists():
            return target, None
        names = ", ".join(unit.name for unit in group)
        say(f"compiling {names} for sm_{', sm_'.join(architectures)}")
        partial = target.with_suffix(f".{os.getpid()}.o")  # an interrupted nvcc leaves no object
        source = first if len(group) == 1 else partial.with_suffix(".cu")
        try:
            if source != first:
                source.write_text(text)
            targets = architecture_flags(architectures, text, acts_as)
            command = [toolchain.nvcc, *flags, *hurried, *folders, *targets]
            command += ["-c", str(source), "-o", str(partial)]
            target.with_suffix(".txt").write_text("\n".join(run_compiler(command)) + "\n")
            partial.replace(target)
        except BuildError as error:
            return target, error
        finally:
            if source != first:
                source.unlink(missing_ok=True)
        return target, None

    # The longest first, so that no compiler runs alone at the end.
    def length(group: list[Path]) -> tuple[bool, int, str]:
        size = sum(unit.stat().st_size for unit in group)
        return group[0].stem not in UNOPTIMISED, -size, group[0].stem

    torch = toolchain.torch / "include"
    groups = groups_of(units, [sources, torch], kind_of) if QUICK else [[unit] for unit in units]
    with ThreadPoolExecutor(jobs) as pool:
        results = sorted(
            pool.map(compile_one, sorted(groups, key=length)), key=lambda result: result[0].name
        )
    if errors := [str(error) for _, error in results if error]:
        raise BuildError("\n\n".join(errors))
    current = {target for target, _ in results}
    for unit in units:
        for old in objects.glob(f"{unit.stem}-????????????????.o"):
            if old not in current:
                old.unlink()
                old.with_suffix(".txt").unlink(missing_ok=True)
    return [target for target, _ in results]


def build(
    sources: Path, objects: Path, output: Path, architectures: tuple[str, ...], jobs: int,
    acts_as: int | None = None,
) -> Path:  # fmt: skip
    """Compile and link the library, write its description (.json), and return its path."""
    toolchain = find_toolchain()
    if acts_as is not None:
        architectures = (ptx_to_act_as(acts_as),)
    architectures = choose_architectures(architectures)
    compiled = compile_sources(toolchain, sources, objects, architectures, jobs, acts_as)
    library = output / f"liblightseq_cu{toolchain.major}.so"
    record = {
        "cuda": toolchain.cuda,
        "architectures": list(architectures),
        "acts_as": acts_as,
        "quick": QUICK,
        "objects": [path.name for path in compiled],
    }
    description = library.with_suffix(".json")
    if library.exists() and description.exists() and json.loads(description.read_text()) == record:
        print(f"{library} is up to date")
    else:
        output.mkdir(parents=True, exist_ok=True)
        remove_partials(output)
        description.unlink(missing_ok=True)
        # Link to another name, then rename: a process that has loaded the old library keeps it.
        partial = library.with_suffix(f".{os.getpid()}")
        command = [toolchain.nvcc, "-shared", "-cudart", "static", "-o", str(partial)]
        command += [str(path) for path in compiled]
        # pip's nvcc has the runtime in lib and looks for it in lib64.
        command += [f"-L{Path(toolchain.nvcc).resolve().parent.parent / 'lib'}"]
        command += [f"-L{toolchain.torch / 'lib'}", "-ltorch_cpu", "-ldl"]
        # --no-undefined: symbols that torch lacks must fail here, not on the user's machine.
        # --exclude-libs: symbols of the static CUDA runtime stay private, because torch may load
        # its own runtime.
        command += ["-Xlinker", "--no-undefined", "-Xlinker", "--exclude-libs=ALL"]
        run_compiler(command)
        partial.replace(library)
        description.write_text(json.dumps(record, indent=1) + "\n")
        print(f"built {library} (CUDA {toolchain.cuda}, sm_{', sm_'.join(architectures)})")
    (output / "skipped.txt").unlink(missing_ok=True)
    return library


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--architectures",
        type=asked_architectures,
        default=os.environ.get("LIGHTSEQ_CUDA_ARCHITECTURES", ""),
        help="compute capabilities to compile for, for example 80,90, or all (default: "
        "LIGHTSEQ_CUDA_ARCHITECTURES if it is set, else the GPUs of this machine, else 80,90)",
    )
    parser.add_argument(
        "--acts-as",
        type=int,
        choices=(80, 86, 89, 100, 120),
        help="build a library for tests: on a Hopper GPU it runs the code for this compute "
        "capability; set --output and --objects to other folders than the defaults",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count() or 1,
        help="number of parallel compilers (default: the number of CPU cores)",
    )
    parser.add_argument(
        "--sources",
        type=Path,
        default=ROOT / "csrc",
        help="folder of the .cu files, which may be in folders (default: csrc)",
    )
    parser.add_argument(
        "--objects",
        type=Path,
        default=OBJECTS,
        help="folder for the objects and ptxas's reports (default: build/cuda or build/quick)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=OUTPUT,
        help="folder for the library (default: lightseq_fairseq/_lib, where it is loaded from, or "
        "build/quick)",
    )
    parser.add_argument(
        "--install-headers",
        action="store_true",
        help="if cuBLAS's headers are missing, first install the pip package that has them",
    )
    parser.add_argument(
        "--if-possible",
        action="store_true",
        help="if nvcc is missing, or if no GPU of this machine is supported, do not fail: print "
        "the reason, record it for lightseq-doctor, and exit with status 0",
    )
    parser.add_argument(
        "--if-useful",
        action="store_true",
        help="as --if-possible; also compile nothing if torch is a CPU build, the machine has no "
        "GPU, and --architectures is not set",
    )
    arguments = parser.parse_args()
    in_use = arguments.output.resolve() == OUTPUT or arguments.objects.resolve() == OBJECTS
    if arguments.acts_as is not None and in_use:
        parser.error("--acts-as needs an --output and --objects other than the defaults")
    try:
        if arguments.if_possible or arguments.if_useful:
            try:
                find_nvcc()
                choose_architectures(arguments.architectures)
                if arguments.if_useful and not arguments.architectures:
                    require_use()
            except BuildError as reason:
                arguments.output.mkdir(parents=True, exist_ok=True)
                (arguments.output / "skipped.txt").write_text(f"{reason}\n")
                print(f"CUDA build skipped: {reason}")
                return 0
        for package in missing_packages() if arguments.install_headers else ():
            install(package)
        build(
            arguments.sources.resolve(),
            arguments.objects.resolve(),
            arguments.output.resolve(),
            arguments.architectures,
            arguments.jobs,
            arguments.acts_as,
        )
    except BuildError as error:
        print(f"CUDA build failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
