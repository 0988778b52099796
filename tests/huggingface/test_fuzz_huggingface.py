"""``scripts.fuzz_huggingface`` runs, and finds models that compute something else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.accelerated import needs_captured_step

import lightseq_fairseq.huggingface as lightseq
from scripts import fuzz_huggingface as fuzz
from scripts.random_models import build

pytestmark = needs_captured_step


def ended(*words: str) -> int | str | None:
    with pytest.raises(SystemExit) as raised:
        fuzz.main([*words, "--seed", "3", "--family", "GPT2"])
    return raised.value.code


def test_two_configurations(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("--count", "2") == 0
    *lines, counts = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["0", "1"]
    assert all("GPT2" in line and ": same" in line for line in lines) and counts == "2 same"


@pytest.mark.parametrize("part", fuzz.PARTS)
def test_a_difference_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, part: str) -> None:
    accelerate = lightseq.accelerate

    def changed(model: Any) -> Any:
        with torch.no_grad():
            model.lm_head.weight.mul_(-1.0)
        return accelerate(model)

    case = fuzz.Case.draw(2, 1, ("GPT2",), "cpu")
    case.name, case.masks = "GPT2LMHeadModel", "ragged"
    plain = build(case.name, case.dtype, **case.config)
    fuzz.PARTS[part](case, plain, tmp_path)
    monkeypatch.setattr(lightseq, "accelerate", changed)
    monkeypatch.setattr(fuzz, "PARTS", {part: fuzz.PARTS[part]})
    with pytest.raises(fuzz.Differs):
        fuzz.PARTS[part](case, plain, tmp_path)


def test_an_error_is_a_difference(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*given: Any) -> None:
        raise ValueError("no such thing")

    monkeypatch.setattr(fuzz, "PARTS", {"files": broken})
    assert ended("--count", "1") == 1
    assert "files fail: ValueError in test_fuzz_huggingface.py" in capsys.readouterr().out
