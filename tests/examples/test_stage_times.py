"""Before a stage of an example runs, a line says what it does, and what it took where.

A size that was not measured sets no ``took``, and the line prints none.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest
from helpers.multi30k_runs import EXAMPLES

TIME = r"\b(s|seconds?|minutes?|hours?|MB|GB)\b"
PLACE = r"EPYC|CPU core|H200|GB"


def scripts() -> list[Path]:
    return [path for path in sorted(EXAMPLES.rglob("*.sh")) if '"== ' in path.read_text()]


@pytest.mark.parametrize("script", scripts(), ids=lambda path: path.parent.name + "/" + path.stem)
def test_each_stage_says_what_it_takes(script: Path) -> None:
    code = script.read_text(encoding="utf-8").replace("\\\n", " ")
    took = defaultdict(list)  # of each size
    for name, time in re.findall(r"(\w*took)=\"(.*)\"", code):
        took[name].append(time)
    stages = re.findall(r"^ *echo \"== (.*)\"$", code, re.M)
    assert stages
    for stage in stages:
        names = set(re.findall(r"\$\{?(\w*took)", stage))
        times = [stage.replace(f"${name}", time) for name in names for time in took[name]]
        for said in times or [stage]:
            assert re.search(TIME, said) and re.search(PLACE, said), said
