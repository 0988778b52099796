"""Each row of docs/flags.md is run by a test, and is what that test says."""

from __future__ import annotations

import pytest
import test_flags
import test_flags_fallback
import test_flags_honoured
import test_flags_ranks
import test_flags_services
import test_flags_text
import test_flags_translation
import test_generation_flags
from flag_runs import rows, table

MODULES = (
    test_flags,
    test_flags_fallback,
    test_flags_honoured,
    test_flags_ranks,
    test_flags_services,
    test_flags_text,
    test_flags_translation,
    test_generation_flags,
)
KINDS = (table.HONOURED, table.FALLBACK, table.REFUSED, table.UNREAD)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("command", table.COMMANDS)
def test_every_row_has_a_proof(command: str, kind: str) -> None:
    proven = set().union(*(module.PROVEN.get((command, kind), set()) for module in MODULES))
    assert proven == rows(command, kind)
