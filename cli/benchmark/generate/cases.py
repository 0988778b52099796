"""The cases of ``lightseq-bench generate``, the systems, and the commands that run them."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import NamedTuple

import torch  # noqa: F401  (loads cuBLAS, see `_cublas`)

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.benchmark.train import shapes
from lightseq_fairseq.cli.benchmark.train.commands import FOR_TORCH
from lightseq_fairseq.cli.benchmark.train.corpus import LONGEST
from lightseq_fairseq.cli.benchmark.train.shapes import (
    BART,
    LANGUAGE,
    MASKED,
    NLLB,
    TRANSLATION,
    Shape,
)

# Our name -> the name in fairseq, torch and CTranslate2.
PRECISIONS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
TRAINED = "trained"  # a translation model of the user, whose sentences end where it ends them
SHAPES = {**shapes.SHAPES, TRAINED: shapes.SHAPES["base"]}  # its sizes are those of its checkpoint
TEXTS = 32  # default number of texts to summarise in a batch
MAX_TOKENS = 18_500  # default token limit of a batch that is filled by tokens


class Case(NamedTuple):
    """A model, its batches, hypotheses per sentence, a precision.

    Attributes:
        batch: sentences or prompts per batch; None: as many as ``max_tokens`` allow.
        max_tokens: limit of source tokens per batch, with pads; None: no limit.
        beam: hypotheses per sentence; 0 for RoBERTa, whose features of the sentences are computed.
        prompt: tokens of each prompt of a language model, otherwise 0.
        new: tokens to generate greedily, the last of which is ``</s>``; 0: it is no case of drawn
            prompts or texts.
        source: tokens of the shortest and of the longest text, without ``</s>``, for BART with
            drawn texts.
    """

    model: str
    batch: int | None
    max_tokens: int | None
    beam: int
    precision: str
    prompt: int = 0
    new: int = 0
    source: tuple[int, int] | None = None

    @classmethod
    def parse(cls, text: str) -> Case:
        """The case that ``text`` names, as ``t2t_big/b32/beam4/bf16``, ``.../btokens4096/...``,
        ``gpt2_124m/b32/128+256/bf16``, ``bart_large/b32/260-440+128/bf16``,
        ``roberta_base/b32/features/bf16`` or ``bart_large/cnn/beam4/bf16``.

        Raises:
            UserError: there is no such case.
        """
        n = r"([1-9]\d*)"
        drawn = re.fullmatch(rf"(\w+)/b{n}/(?:{n}-)?{n}\+{n}/(\w+)", text)
        model, precision = drawn.group(1, 6) if drawn else ("", "")
        if drawn and model in (BART if drawn[3] else LANGUAGE) and precision in PRECISIONS:
            count, longest, new = map(int, drawn.group(2, 4, 5))
            most, shortest = positions(SHAPES[model]), int(drawn[3] or 0)
            if shortest and (not shortest <= longest < most or new > most):
                raise UserError(
                    f"There is no case {text}: {model} has {most} positions, so texts can have up "
                    f"to {most - 1} tokens, those of the shortest text first, and {most} new ones."
                )
            if shortest:
                return cls(model, count, None, 1, precision, 0, new, (shortest, longest))
            if longest + new > most:
                raise UserError(
                    f"The case {text} is too large: {model} has {most} positions, so prompt and "
                    "new tokens can be at most that many together."
                )
            return cls(model, count, None, 1, precision, longest, new)
        texts = re.fullmatch(r"([\w.]+)/cnn([1-9]\d*)?/beam([1-9]\d*)/(\w+)", text)
        if texts is not None and texts[1] in BART and texts[4] in PRECISIONS:
            return cls(texts[1], int(texts[2] or TEXTS), None, int(texts[3]), texts[4])
        batches = r"b(?:([1-9]\d*)|tokens([1-9]\d*)?)"
        found = re.fullmatch(rf"([\w.]+)/{batches}/(?:beam([1-9]\d*)|features)/(\w+)", text)
        model, sentences, tokens, beam, precision = found.groups() if found else [""] * 5
        translates = [*TRANSLATION, *NLLB, TRAINED]
        if model not in (MASKED if beam is None else translates) or precision not in PRECISIONS:
            raise UserError(
                f"There is no case {text}: write <model>/<batch>/beam<n>/<precision>, for example "
                "t2t_big/btokens4096/beam5/bf16, or <model>/b<prompts>/<prompt>+<new>/<precision>, "
                "for example gpt2_124m/b32/128+256/bf16 or bart_large/b32/260-440+128/bf16, or "
                "<model>/<batch>/features/<precision>, "
                "for example roberta_base/b32/features/bf16. A batch is b<sentences> or "
                f"btokens<source tokens>, or cnn<texts> for texts to summarise; models are "
                f"{', '.join(translates)}; with cnn {', '.join(BART)}; with prompts "
                f"{', '.join(LANGUAGE)}; with features {', '.join(MASKED)}; precisions are "
                f"{', '.join(PRECISIONS)}."
            )
        batch = None if sentences is None else int(sentences)
        max_tokens = int(tokens or MAX_TOKENS) if batch is None else None
        longest = LONGEST + (beam is None)  # RoBERTa's sentences begin with <s>
        if max_tokens is not None and max_tokens < longest:
            raise UserError(
                f"The case {text} is too small: the longest sentence has {longest} tokens, so "
                "btokens must be at least that."
            )
        return cls(model, batch, max_tokens, int(beam or 0), precision)

    def __str__(self) -> str:
        if self.new:
            read = "{}-{}".format(*self.source) if self.source else self.prompt
            return f"{self.model}/b{self.batch}/{read}+{self.new}/{self.precision}"
        if self.shape.is_bart:
            number = "" if self.batch == TEXTS else str(self.batch)
            return f"{self.model}/cnn{number}/beam{self.beam}/{self.precision}"
        tokens = "tokens" if self.max_tokens == MAX_TOKENS else f"tokens{self.max_tokens}"
        result = f"beam{self.beam}" if self.beam else "features"
        return f"{self.model}/b{self.batch or tokens}/{result}/{self.precision}"

    @property
    def shape(self) -> Shape:
        return SHAPES[self.model]

    @property
    def is_trained(self) -> bool:
        return self.model == TRAINED


def positions(shape: Shape) -> int:
    """Positions of a language model: the size of its learned table; 1024 if sinusoidal."""
    return shape.positions or 1024


class System(NamedTuple):
    """How a case is run.

    Attributes:
        module: the module of this package that runs it, with the package of the system's name;
            None: `decode` or, for RoBERTa, `encode`.
        warm_up: passes over the test set before the timed ones. In the warm-up, ours captures a
            graph for each shape, and all systems fill their memory pools.
        native: use fairseq's own model and search.
    """

    module: str | None = None
    warm_up: int = 1
    native: bool = False


SYSTEMS = {
    "ours": System(warm_up=2),
    "fairseq_no_cudnn": System(native=True),
    "ctranslate2": System(module="ctranslate"),
    "transformers": System(module="hugging_face", warm_up=2),
}


def why_not(system: str, case: Case) -> str | None:
    """The reason if the system cannot run the case on this machine, else None."""
    if system == "ctranslate2" and case.model in LANGUAGE + MASKED:
        return "CTranslate2 cannot load fairseq's language models and RoBERTa."
    if system == "transformers" and (case.is_trained or case.model in TRANSLATION):
        return "transformers has no such translation model."
    if system == "transformers" and case.prompt and not _is_gpt2(case.shape):
        return "transformers runs only GPT-2 here, and this model differs from it."
    if SYSTEMS[system].module and importlib.util.find_spec(system) is None:
        return f"{system} is not installed."
    return None


def _is_gpt2(shape: Shape) -> bool:
    """Whether GPT-2 of transformers does the same work; its positions are always learned."""
    return shape.is_language_model and shape.normalize_before and shape.activation == "gelu"


def command(
    case: Case, system: str, folder: Path, report: Path, sentences: int, passes: int, gpu: bool
) -> list[str]:
    """The command of one run, with ``passes`` timed passes over ``sentences`` sentences."""
    how = SYSTEMS[system]
    module = how.module or ("decode" if case.beam else "encode")
    words = [sys.executable, "-m", f"{__package__}.{module}", "--report", str(report)]
    words += ["--case", str(case), "--data", str(folder), "--sentences", str(sentences)]
    words += ["--warm-up", str(how.warm_up), "--passes", str(passes)]
    return words + ["--native"] * how.native + ["--cpu"] * (not gpu)


def environment(system: str, logs: Path) -> dict[str, str]:
    """Environment variables of the run, in addition to the benchmark's own environment.

    CTranslate2's wheel loads cuBLAS 12 by file name. Links in the folder ``logs`` give it torch's
    copy under that name; the first batch shows whether this works.
    """
    found = {**FOR_TORCH, "LIGHTSEQ_CUDNN_ATTENTION": "0"}
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
    """The files of cuBLAS that torch has loaded in this process."""
    maps = Path("/proc/self/maps")
    text = maps.read_text(encoding="utf-8") if maps.exists() else ""
    return sorted({Path(name) for name in re.findall(r"/\S+/libcublas(?:Lt)?\.so\S*", text)})
