"""Metadata is in setup.cfg. LIGHTSEQ_BUILD=1 adds the CUDA kernels; without it a wheel has none.

A wheel with kernels is for one CUDA major, which its version names (0.1.0+cu13), and for any Python
and any torch from 2.11 on. Its tag names the oldest glibc that has all that the library needs.
"""

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Command, Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.command.egg_info import egg_info

TORCH = "torch==2.13.0"  # whose headers the kernels need; for pip's isolated build environment

cuda_major = ""  # of the kernels, if they are asked for
build_requires = []
package_files = ["py.typed"]

if os.environ.get("LIGHTSEQ_BUILD") == "1":
    script = runpy.run_path("scripts/build_cuda.py")
    try:
        cuda_major = script["cuda_version"](script["find_nvcc"]()).partition(".")[0]
    except script["BuildError"] as error:
        sys.exit(f"LIGHTSEQ_BUILD=1 asks for the CUDA kernels, which cannot be built: {error}")
    build_requires = [TORCH, *script["missing_packages"]()]
    package_files += [f"_lib/liblightseq_cu{cuda_major}.{suffix}" for suffix in ("so", "json")]


def glibc() -> str:
    """The glibc version that the library needs, such as 2_34."""
    command = ["readelf", "--version-info", f"lightseq_fairseq/{package_files[1]}"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    versions = re.findall(r"\bGLIBC_(\d+)\.(\d+)", listed)
    return "_".join(max(versions, key=lambda version: [int(number) for number in version]))


class BuildCuda(Command):
    """Compile csrc before the package's files are collected; a failure stops the install."""

    user_options: list = []
    editable_mode = False

    def initialize_options(self):
        pass

    def finalize_options(self):
        pass

    def run(self):
        build = [sys.executable, "scripts/build_cuda.py", "--output", "lightseq_fairseq/_lib"]
        if subprocess.run(build).returncode != 0:
            sys.exit("LIGHTSEQ_BUILD=1 asks for the CUDA kernels; their build failed (see above).")

    def get_source_files(self):
        return []

    def get_outputs(self):
        return []

    def get_output_mapping(self):
        return {}


class Build(build):
    sub_commands = [("build_cuda", lambda self: bool(cuda_major)), *build.sub_commands]

    def run(self):
        for earlier in Path("build").glob("lib*"):
            shutil.rmtree(earlier)  # its files would be packed too
        super().run()


class EggInfo(egg_info):
    """Wheels for different CUDA majors have different names; sources are for any."""

    def finalize_options(self):
        if cuda_major and "sdist" not in self.distribution.commands:
            self.tag_build = f"+cu{cuda_major}"
        super().finalize_options()


class KernelWheel(bdist_wheel):
    def finalize_options(self):
        self.get_finalized_command("egg_info")  # completes the version
        super().finalize_options()

    def get_tag(self):
        platform = super().get_tag()[2]
        if cuda_major:
            platform = platform.replace("linux", f"manylinux_{glibc()}")
        return ("py3", "none", platform)


class Package(Distribution):
    def has_ext_modules(self):
        return bool(cuda_major)  # the kernels make the package one for a platform


setup(
    distclass=Package,
    cmdclass={
        "build": Build,
        "build_cuda": BuildCuda,
        "egg_info": EggInfo,
        "bdist_wheel": KernelWheel,
    },
    setup_requires=build_requires,
    package_data={"lightseq_fairseq": package_files, "lightseq_fairseq.cli.words": ["*.json"]},
)
