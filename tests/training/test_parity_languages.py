"""Every update of --task translation_multi_simple_epoch equals fairseq's: the same pairs, the same
language tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helpers.languages as languages
import helpers.parity as parity
import pytest
from helpers.parity import LS, NATIVE, command_line, compare, train

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "virtual epochs": {"virtual_epoch_size": 50, "sampling_temperature": 5},
    "every pair": {"sampling_method": "concat", "truncate_source": True},
    "one iterator": {"sampling_method": "RoundRobin", "num_workers": 1},
    "replaced ends": {"lang_tok_replacing_bos_eos": True, "sampling_method": "uniform"},
    "target only": {"encoder_langtok": "tgt", "decoder_langtok": None},
    "mbart": {"arch": "mbart_base", "lang_tok_style": "mbart", **parity.PRE_NORM},
    "bart": {
        "arch": "bart_base",
        "sampling_weights": "{'main:aa-bb':1,'main:bb-aa':2,'main:aa-cc':3}",
    },
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return languages.write(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize("case", CASES)
def test_fifty_updates(data: Path, case: str) -> None:
    flags = {**languages.TASK, "lr": 3e-3, **CASES[case]}
    native = train(command_line(data, NATIVE, **flags), 50)
    ours = train(command_line(data, LS, **flags), 50)
    compare(ours, native)
    assert all(len(update.sample_sizes) == 1 for update in ours)  # the captured step
    assert any(len(set(update.sample_sizes)) == 2 for update in native)
    assert native[-1].logged["loss"] < 0.95 * native[0].logged["loss"]
