"""Each row of docs/flags.md is run by a test, and agrees with what that test finds."""

from __future__ import annotations

import operator

import pytest
import test_flags
import test_flags_fallback
import test_flags_ranks
import test_flags_services
import test_flags_subwords
import test_flags_translation
import test_flags_works
import test_generation_flags
from helpers.flag_runs import pieces, prove, rows, table

MODULES = (
    test_flags,
    test_flags_fallback,
    test_flags_works,
    test_flags_ranks,
    test_flags_services,
    test_flags_subwords,
    test_flags_translation,
    test_generation_flags,
)
KINDS = (table.WORKS, table.FALLBACK, table.REFUSED, table.UNREAD)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("command", table.COMMANDS)
def test_every_row_has_a_proof(command: str, kind: str) -> None:
    proven = set().union(*(module.PROVEN.get((command, kind), set()) for module in MODULES))
    assert proven == rows(command, kind)


def test_a_proof_finds_out_who_ignores_a_setting() -> None:
    def fairseqs(line: str, native: bool) -> set[str]:
        return {piece for piece in pieces(line) if "idle" not in piece}

    def deaf(line: str, native: bool) -> set[str]:
        return fairseqs(line, native) - (set() if native else {"--seed 3"})

    prove("--idle | --lr 1 --seed 3", fairseqs, operator.eq)
    with pytest.raises(AssertionError, match="fairseq's: "):
        prove("--lr 1 --seed 3", deaf, operator.eq)
    with pytest.raises(AssertionError, match=r"\['--idle 1'\] can be left out"):
        prove("--lr 1 --idle 1", fairseqs, operator.eq)
