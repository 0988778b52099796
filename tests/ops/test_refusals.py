"""What each op says about a wrong argument: the messages are those of refusals.txt.

Each argument of tests/ops/test_registry.py is changed in a few ways. A change that is not in the
file is accepted.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ops_testing import make_cast
from test_registry import ARGUMENTS, arguments_of, op_of
from torch import Tensor

GOLDEN = Path(__file__).with_name("refusals.txt")


def changes(x: Any) -> dict[str, Any]:
    """What may be wrong with x, if x is right."""
    if isinstance(x, str):
        return {"unknown": "swish"}
    if isinstance(x, float):
        return {str(other): other for other in (-0.5, 0.0, 1.0, math.nan)}
    if isinstance(x, bool):
        return {"the other": not x}
    if isinstance(x, int):
        return {"negative": -1, "0": 0, "one more": x + 1}
    if not isinstance(x, Tensor):
        return {}
    found = {"missing": None, "int8": torch.zeros(x.shape, dtype=torch.int8)}
    if x.is_floating_point():
        types = [torch.float16, torch.float32, torch.float64]
    else:
        types = [torch.int32, torch.int64, torch.float32]
    found |= {str(dtype).removeprefix("torch."): x.to(dtype) for dtype in types if dtype != x.dtype}
    numbers = x.view(torch.uint8) if x.itemsize == 1 else x  # fp8 cannot be copied in all ways
    found["one dimension more"] = x[None]
    for dim, size in enumerate(x.shape):
        if size:
            found[f"shorter in dimension {dim}"] = numbers.narrow(dim, 0, size - 1).clone()
    if x.dim() > 0:
        found["elements apart"] = torch.stack((numbers, numbers), -1)[..., 0]
    if x.dim() > 1:
        found["rows apart"] = torch.cat((numbers, numbers), -1)[..., : x.shape[-1]]
    if not x.is_floating_point() and x.itemsize > 1:
        found |= {"one less": x - 1, "one more": x + 1}
    if x.is_floating_point() and x.itemsize > 1:
        found["three times as much"] = x * 3
    return {
        name: y.view(x.dtype) if isinstance(y, Tensor) and y.dtype == torch.uint8 else y
        for name, y in found.items()
    }


def wrong(name: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Each change in words, and the arguments with it."""
    given = inspect.signature(op_of(name)).bind(*arguments_of(name))
    given.apply_defaults()
    arguments = given.args
    for place, (parameter, x) in enumerate(given.arguments.items()):

        def replaced(y: Any, place: int = place) -> tuple[Any, ...]:
            return *arguments[:place], y, *arguments[place + 1 :]

        if isinstance(x, tuple):
            yield f"{parameter}, missing", replaced(None)
            for field, of_group in x._asdict().items():
                for change, y in changes(of_group).items():
                    yield f"{parameter}.{field}, {change}", replaced(x._replace(**{field: y}))
        elif x is None and parameter.endswith("cast"):
            yield f"{parameter}, present", replaced(make_cast())
        for change, y in changes(x).items():
            yield f"{parameter}, {change}", replaced(y)


def refusals(name: str) -> Iterator[str]:
    call: Callable[..., Any] = op_of(name)
    for change, arguments in wrong(name):
        try:
            call(*copy.deepcopy(arguments))
        except ValueError as error:
            before, _, message = str(error).partition(": ")
            assert before == name.split()[0], error
            yield f"{change}: {message}"
        except (AttributeError, IndexError, RuntimeError, TypeError) as error:
            yield f"{change}: {type(error).__name__}"


@pytest.mark.filterwarnings("ignore:torch.searchsorted")  # of boundaries that are apart
@pytest.mark.parametrize("name", ARGUMENTS)
def test_each_wrong_argument_is_refused_in_the_words_of_the_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a difference is intended, the section in the temporary folder is the new one."""
    monkeypatch.delenv("LIGHTSEQ_CHECK_INDICES", raising=False)
    section = "".join(f"  {line}\n" for line in refusals(name))
    found = tmp_path / "section.txt"
    found.write_text(f"{name}\n{section}")
    golden = GOLDEN.read_text().partition(f"\n{name}\n")[2]
    is_equal = golden.startswith(section) and not golden[len(section) :].startswith("  ")
    assert is_equal, f"if this change is wanted, the section in {GOLDEN} is that of {found}"
