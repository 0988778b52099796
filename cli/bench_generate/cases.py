"""What is translated, by which systems, and the commands that do it."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import NamedTuple

from lightseq_fairseq.cli.bench_train.cases import SHAPES, Shape
from lightseq_fairseq.errors import UserError

# As fairseq, torch and CTranslate2 call them.
PRECISIONS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


class Case(NamedTuple):
    """A model, the sentences of a batch (None: by tokens), hypotheses a sentence, a precision."""

    model: str
    batch: int | None
    beam: int
    precision: str

    @classmethod
    def parse(cls, text: str) -> Case:
        """The case that ``text`` names, as in ``t2t_big/b32/beam4/bf16``.

        Raises:
            UserError: there is no such case.
        """
        found = re.fullmatch(r"(\w+)/b([1-9]\d*|tokens)/beam([1-9]\d*)/(\w+)", text)
        if found is None or found[1] not in SHAPES or found[4] not in PRECISIONS:
            raise UserError(
                f"There is no case {text}: a case is <model>/b<sentences of a batch, or the word "
                f"tokens>/beam<n>/<precision>, with a model of {', '.join(SHAPES)} and a precision "
                f"of {', '.join(PRECISIONS)}, for example t2t_big/btokens/beam5/bf16."
            )
        batch = None if found[2] == "tokens" else int(found[2])
        return cls(found[1], batch, int(found[3]), found[4])

    def __str__(self) -> str:
        return f"{self.model}/b{self.batch or 'tokens'}/beam{self.beam}/{self.precision}"

    @property
    def shape(self) -> Shape:
        return SHAPES[self.model]


class System(NamedTuple):
    """How a case is translated.

    Attributes:
        module: the program of this package that does it.
        warm_up: passes over the test set before the timed ones. Ours captures a graph for each of
            its shapes; all fill their memory pools.
        native: fairseq's own model and search.
    """

    module: str = "decode"
    warm_up: int = 1
    native: bool = False


SYSTEMS = {
    "ours": System(warm_up=2),
    "fairseq_no_cudnn": System(native=True),
    "ctranslate2": System(module="ctranslate"),
}


def why_not(system: str, case: Case) -> str | None:
    """A sentence if this machine cannot run the system."""
    if system == "ctranslate2" and importlib.util.find_spec("ctranslate2") is None:
        return "ctranslate2 is not installed."
    return None


def command(
    case: Case, system: str, folder: Path, report: Path, sentences: int, max_tokens: int,
    passes: int, gpu: bool,
) -> list[str]:  # fmt: skip
    """The command of one run: the first so many sentences, so many times."""
    how = SYSTEMS[system]
    words = [sys.executable, "-m", f"{__package__}.{how.module}", "--report", str(report)]
    words += ["--case", str(case), "--data", str(folder), "--sentences", str(sentences)]
    words += ["--max-tokens", str(max_tokens), "--warm-up", str(how.warm_up)]
    words += ["--passes", str(passes)]
    return words + ["--native"] * how.native + ["--cpu"] * (not gpu)


def environment(system: str, logs: Path) -> dict[str, str]:
    """What the run finds in its environment besides the bench's own.

    CTranslate2's wheel asks for cuBLAS 12 by file name. It gets the copy that torch has loaded,
    under that name, by links in the folder ``logs``; its first batch shows whether they agree.
    """
    found = {"OMP_WAIT_POLICY": "passive", "LIGHTSEQ_CUDNN_ATTENTION": "0"}
    if system == "ctranslate2" and (cublas := _cublas()):
        links = logs.resolve() / "cublas12"
        links.mkdir(parents=True, exist_ok=True)
        for path in cublas:
            link = links / f"{path.name.partition('.so')[0]}.so.12"
            link.unlink(missing_ok=True)
            link.symlink_to(path)
        before = [str(links), str(cublas[0].parent), os.environ.get("LD_LIBRARY_PATH", "")]
        found["LD_LIBRARY_PATH"] = ":".join(filter(None, before))
    return found


def _cublas() -> list[Path]:
    """The files of cuBLAS that this process has loaded, which torch has done."""
    import torch  # noqa: F401

    maps = Path("/proc/self/maps")
    text = maps.read_text(encoding="utf-8") if maps.exists() else ""
    return sorted({Path(name) for name in re.findall(r"/\S+/libcublas(?:Lt)?\.so\S*", text)})
