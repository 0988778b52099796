"""Metadata is in setup.cfg. This adds the CUDA build, which runs only where it is asked for."""

import os
import subprocess
import sys
from pathlib import Path

from setuptools import Command, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

BUILD_CUDA = os.environ.get("LIGHTSEQ_BUILD") == "1"


class BuildCuda(Command):
    """Compile csrc before the package's files are collected; a failure stops the install."""

    user_options: list = []
    editable_mode = False

    def initialize_options(self):
        pass

    def finalize_options(self):
        pass

    def run(self):
        if subprocess.run([sys.executable, "scripts/build_cuda.py"]).returncode != 0:
            sys.exit("LIGHTSEQ_BUILD=1 asks for the CUDA kernels; their build failed (see above).")

    def get_source_files(self):
        return []

    def get_outputs(self):
        return []

    def get_output_mapping(self):
        return {}


class Build(build):
    sub_commands = [("build_cuda", lambda self: BUILD_CUDA), *build.sub_commands]


class PlatformWheel(bdist_wheel):
    """A wheel that holds the library runs on one platform, under any Python 3."""

    def finalize_options(self):
        super().finalize_options()
        self.root_is_pure = not BUILD_CUDA and not any(Path("lightseq_fairseq/_lib").glob("*.so"))

    def get_tag(self):
        return ("py3", "none", super().get_tag()[2])


setup(cmdclass={"build": Build, "build_cuda": BuildCuda, "bdist_wheel": PlatformWheel})
