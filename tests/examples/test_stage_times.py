"""Before a stage of an example runs, a line says what it does, and what it took where."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from helpers.multi30k_runs import EXAMPLES

TIME = r"\b(s|seconds?|minutes?|hours?|MB|GB)\b"


UNMEASURED = ("bart", "multilingual")  # their stages have no times yet


def scripts() -> list[Path]:
    found = [path for path in sorted(EXAMPLES.rglob("*.sh")) if '"== ' in path.read_text()]
    return [path for path in found if path.parent.name not in UNMEASURED]


@pytest.mark.parametrize("script", scripts(), ids=lambda path: path.parent.name + "/" + path.stem)
def test_each_stage_says_what_it_takes(script: Path) -> None:
    code = script.read_text(encoding="utf-8").replace("\\\n", " ")
    times = dict(re.findall(r"(\w*took)=\"(.*)\"", code))
    stages = re.findall(r"^ *echo \"== (.*)\"$", code, re.M)
    assert stages
    for stage in stages:
        said = re.sub(r"\$(\w*took)", lambda match: times[match[1]], stage)
        assert re.search(TIME, said) and re.search(r"EPYC|CPU core|H200|GB", said), said
