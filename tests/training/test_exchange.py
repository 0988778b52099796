"""Pieces of the gradient are finished while backward runs, and the next forward waits for the
parameters, in every family of models."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import helpers.training_runs as runs
import pytest
import torch
from helpers import parity
from torch import Tensor

from lightseq_fairseq.memory.gradients import DirectGradients
from lightseq_fairseq.step.exchange import Exchange

Data = Callable[[str], Path]
MULTILINGUAL = {
    "arch": "ls_multilingual_transformer",
    "task": "multilingual_translation",
    "lang_pairs": "src-tgt,tgt-src",
    "source_lang": None,
    "target_lang": None,
    "share_decoder_input_output_embed": None,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "translation": ("pairs", {}),
    "shared embeddings": (
        "pairs", {"share_decoder_input_output_embed": None, "share_all_embeddings": True}
    ),
    "recomputed layers": ("pairs", {"checkpoint_activations": True, "decoder_layers": 2}),
    "micro-batches": ("pairs", {"update_freq": 2}),
    "languages": ("pairs", MULTILINGUAL),
    "running text": ("text", runs.TEXT),
    "masked text": ("text", runs.MASKED),
    "classes": ("classes", runs.CLASSES),
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    folder = tmp_path_factory.mktemp("data")
    written = {
        "pairs": parity.write_corpus(folder / "pairs", pairs=48),
        "text": parity.write_text(folder / "text"),
        "classes": parity.write_classes(folder / "classes"),
    }
    return written.__getitem__


def note(file: Path, exchange: Exchange, line: str) -> None:
    with file.with_suffix(f".{exchange.ranks.rank}").open("a") as lines:
        print(line, file=lines)


def notes(file: Path, rank: int) -> list[str]:
    return file.with_suffix(f".{rank}").read_text().splitlines()


@contextmanager
def watched(file: Path) -> Iterator[None]:
    """Compares each piece as it is finished with the gradient that is sent.

    Writes a line for each update: how many writes of its last backward pass came after each piece
    was finished; -1 if a piece changed.
    """
    write, written = DirectGradients.write, DirectGradients.written
    finish, add_up = Exchange.finish, Exchange.add_up
    finished: dict[int, tuple[int, torch.Tensor]] = {}
    writes = 0

    def begins(self: DirectGradients, *arguments: Any) -> Any:
        nonlocal writes
        writes = 0
        return write(self, *arguments)

    def counted(self: DirectGradients, parameters: Any) -> None:
        nonlocal writes
        writes += 1
        written(self, parameters)

    def copied(self: Exchange, place: int) -> None:
        finished[place] = writes, self.gradients.flat[self.pieces[place]].clone()
        finish(self, place)

    def compared(self: Exchange) -> None:
        flat = self.gradients.flat
        later = [
            writes - finished[place][0] if torch.equal(finished[place][1], flat[piece]) else -1
            for place, piece in enumerate(self.pieces)
        ]
        note(file, self, json.dumps(later))
        finished.clear()
        add_up(self)

    with (
        mock.patch.object(DirectGradients, "write", begins),
        mock.patch.object(DirectGradients, "written", counted),
        mock.patch.object(Exchange, "finish", copied),
        mock.patch.object(Exchange, "add_up", compared),
    ):
        yield


@pytest.mark.parametrize("case", CASES)
def test_pieces_are_final_when_they_are_finished(data: Data, tmp_path: Path, case: str) -> None:
    of, flags = CASES[case]
    with watched(tmp_path / "later"):
        runs.run_ranks(
            data(of), tmp_path / "run", 2, **{**runs.LS, "no_save": True, "max_update": 2, **flags}
        )
    for rank in range(2):
        updates = [json.loads(line) for line in notes(tmp_path / "later", rank)]
        assert all(later >= 0 for update in updates for later in update)
        # The first backward counts the writes. Afterwards the end of the memory is finished first,
        # and the start at the end.
        first, second = updates
        assert set(first) == {0} or case in ("micro-batches", "languages")
        assert max(second) > 0
        if case != "languages":  # whose last one may lie anywhere in memory
            assert second == sorted(second, reverse=True)
            assert second[-1] == 0


GATHERED = {
    **CASES,
    "pre-norm": (
        "pairs",
        {
            "encoder_normalize_before": True, "decoder_normalize_before": True,
            "encoder_layers": 2, "decoder_layers": 2,
        },
    ),
    "norm of embeddings": ("pairs", {"layernorm_embedding": True}),
    "pre-norm text": (
        "text",
        {
            **runs.TEXT, "decoder_normalize_before": True, "decoder_layers": 2,
            "share_decoder_input_output_embed": None,
        },
    ),
    "projected embeddings": (
        "text",
        {
            **runs.TEXT, "decoder_input_dim": 20, "decoder_output_dim": 28,
            "share_decoder_input_output_embed": None,
        },
    ),
    "bf16": ("pairs", {"bf16": True}),
    "fp8": ("pairs", {"bf16": True, "fp8": True, "encoder_attention_heads": 2}),
}  # fmt: skip


@contextmanager
def arriving_late(file: Path) -> Iterator[None]:
    """From the all-gather on, parameters are NaN until the step waits for them.

    Writes a line for each wait: the share of the parameters that have arrived.
    """
    gather, wait_until = Exchange.gather, Exchange.wait_until
    due: Tensor | None = None  # the parameters, while some of them are NaN

    def starts(self: Exchange) -> None:
        nonlocal due
        gather(self)
        self.wait()
        low = self.gradients.buffer.data
        due = low.clone()
        low.fill_(torch.nan)

    def arrives(self: Exchange, end: int) -> None:
        nonlocal due
        wait_until(self, end)
        if due is None:
            return
        low = self.gradients.buffer.data.data  # as the collective, it changes no tensor's version
        low[:end] = due[:end]
        if end == len(low):
            due = None
        note(file, self, str(end / len(low)))

    with (
        mock.patch.object(Exchange, "gather", starts),
        mock.patch.object(Exchange, "wait_until", arrives),
    ):
        yield


@pytest.mark.parametrize("case", GATHERED)
def test_forward_waits_for_what_it_reads(data: Data, tmp_path: Path, case: str) -> None:
    """And validation and checkpoints for everything."""
    of, flags = GATHERED[case]
    flags = {
        **runs.LS, "max_update": 4, "validate_interval_updates": 3, "disable_validation": None,
        "zero_sharding": "os", **flags,
    }  # fmt: skip
    expected = runs.run_ranks(data(of), tmp_path / "whole", 2, **flags)
    with arriving_late(tmp_path / "arrived"):
        found = runs.run_ranks(data(of), tmp_path / "late", 2, **flags)
    assert found == expected
    assert runs.differing(runs.trained(tmp_path / "late"), runs.trained(tmp_path / "whole")) == []
    for rank in range(2):
        lines = notes(tmp_path / "arrived", rank)
        assert lines.count("1.0") == 4  # updates
        assert case == "fp8" or len(set(lines)) > 2
    states = [
        torch.load(tmp_path / name / "checkpoint_last.pt", weights_only=False)["extra_state"]
        for name in ("late", "whole")
    ]
    assert states[0]["val_loss"] == states[1]["val_loss"]
