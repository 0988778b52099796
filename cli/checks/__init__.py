"""Checks of a command's input, and messages for failures of fairseq and torch.

`CHECKS` lists all checks, in the order in which they run. After them, `messages.explain` turns
known failures into sentences.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import click

from lightseq_fairseq.cli.words.registries import data_of


@dataclass
class Request:
    """The user's command: its words, and fairseq's namespace once it is parsed.

    Attributes:
        command: train, generate, ...
        parser: fairseq's, with the flags of the task, the arch and so on.
        note: called with each sentence about a setting without effect; None: it is printed.
    """

    argv: Sequence[str] = ()
    args: argparse.Namespace = field(default_factory=argparse.Namespace)
    command: str = ""
    parser: argparse.ArgumentParser = field(default_factory=argparse.ArgumentParser)
    note: Callable[[str], None] | None = None

    def say(self, sentence: str) -> None:
        """A note; with several ranks, rank 0 says it for all."""
        if os.environ.get("RANK", "0") != "0":
            return
        if self.note is not None:
            self.note(sentence)
        else:
            click.echo(f"lightseq-{self.command}: note: {sentence}", err=True)


class Check(NamedTuple):
    """A check, which raises UserError on input that it does not accept.

    Attributes:
        function: its module in this folder, and its name there.
        commands: those that run it; empty: all.
        data: the kind of data, as `data_of` names it, with which it runs; empty: every kind.
    """

    function: str
    commands: str = ""
    data: str = ""


WORDS, SETTINGS, FAIRSEQ = "before parsing", "after parsing", "inside fairseq"

CHECKS: dict[str, tuple[Check, ...]] = {
    WORDS: (
        Check("checkpoints:of_path", "generate interactive validate eval-lm"),  # it exists
        Check("names:registered"),  # there is such a task, optimizer, ...
        Check("names:arch", "train"),  # is named
        Check("names:task_fits_arch", "train"),
    ),
    # Nothing is loaded yet, and nothing has been written.
    SETTINGS: (
        Check("checkpoints:folder", "train"),
        Check("sizes:from_checkpoint", "train"),
        Check("flags:supported"),  # by our model, unless --native; notes on settings without effect
        Check("values:path", "generate interactive validate eval-lm"),
        Check("values:input_file", "interactive"),
        Check("checkpoints:same_data", "validate"),
        Check("checkpoints:answers", "generate interactive"),
        Check("checkpoints:direction", "generate interactive", data="sentence pairs"),
        Check("raw_text:known_tokenizer", "generate interactive"),
        Check("values:texts"),  # those that fairseq evaluates, joiners of subwords, NaN
        Check("values:numbers"),  # counts, ranks, rates
        Check("machine:backend"),  # sets gloo if no GPU is used
        Check("search:unknown_words"),  # --replace-unk
        Check("search:length_penalty"),
        Check("search:of_translation", "generate interactive"),  # with a language model
        Check("values:criterion_of_classes"),
        Check("search:constraints", "generate"),
        Check("machine:precision", "train"),
        Check("own_flags:pack_tokens", "train"),
        Check("own_flags:fp8", "train"),
        Check("own_flags:lora", "train"),
        Check("checkpoints:first", "train"),
        Check("checkpoints:best_metric", "train"),
        Check("checkpoints:same_best_metric", "train"),
        Check("checkpoints:trained_head", "validate interactive"),
        Check("pairs:pairs", data="sentence pairs"),
        Check("languages:languages", data="sentence pairs sampled from several languages"),
        Check("text:text", data="running text"),
        Check("text:masked_text", data="text to mask"),
        Check("noise:text", data="text to noise"),
        Check("noise:texts", data="texts to noise of several languages"),
        Check("classes:classes", data="sentences with labels"),
        Check("pairs:sentences", data="other data of fairseq"),
    ),
    # `fairseq_compat.patching` installs them. Each runs where fairseq knows what it checks.
    FAIRSEQ: (
        Check("inside_fairseq:load_model_ensemble", "generate interactive validate eval-lm"),
        Check("inside_fairseq:make_dataset"),
        Check("inside_fairseq:eval_lm_dataloader", "eval-lm"),
        Check("inside_fairseq:load_checkpoint", "train"),
        Check("inside_fairseq:some_to_batch", "train generate validate eval-lm"),
        Check("inside_fairseq:batch_by_size"),
    ),
}


def run(moment: str, request: Request) -> None:
    """Runs the checks of a moment.

    Raises:
        UserError: the message of the first check that fails.
    """
    for check in CHECKS[moment]:
        if check.commands and request.command not in check.commands.split():
            continue
        if check.data and data_of(request.args.task) != check.data:
            continue
        module, _, name = check.function.partition(":")
        getattr(importlib.import_module(f"{__name__}.{module}"), name)(request)
