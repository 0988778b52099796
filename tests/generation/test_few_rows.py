"""With few rows in 16 bits, a product computes the end of the sublayer before it, too, and the
hypotheses are the same."""

from __future__ import annotations

import copy
from typing import Any

import helpers.counting as counting
import helpers.digits as digits
import helpers.parity as parity
import pytest
from helpers.parity import LS, command_line

from lightseq_fairseq import ops
from lightseq_fairseq.generation import decoder as step_decoder

PRE_NORM = {"encoder_normalize_before": True, "decoder_normalize_before": True}


def translation_model(**flags: Any) -> tuple[Any, Any]:
    toy = digits.toy()
    cfg = parity.parse(command_line(toy.folder, LS, **{**digits.TOY, **flags}))
    return parity.build(cfg)[:2]


def hypotheses(task: Any, model: Any, beam: int) -> list[Any]:
    if hasattr(model, "encoder"):
        generator = task.build_generator([model], digits.GenerationConfig(beam=beam, max_len_b=9))
        (sample,) = digits.first_held_out(task, 1)
        found = task.inference_step(generator, [model], sample)
    else:
        found = counting.generate(task, [model], counting.prompts(5), beam=beam, max_len_b=9)
    each = found.values() if isinstance(found, dict) else found
    return [[(h["tokens"].tolist(), h["positional_scores"].tolist()) for h in x] for x in each]


@pytest.mark.parametrize("beam", [1, 4, 7])
@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("translation", {}), ("translation", PRE_NORM), ("translation", {"activation_fn": "gelu"}),
        ("text", {}), ("text", {"activation_fn": "gelu_accurate"}),
    ],
)  # fmt: skip
def test_the_ends_of_sublayers_join_products(
    kind: str, flags: dict[str, Any], beam: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "text":
        task, model, _ = counting.variant(**flags)
    else:
        task, model = translation_model(**flags)
    model = model.bfloat16().eval()
    calls = []
    run = ops.norm_linear_fwd

    def counted(*arguments: Any, **named: Any) -> Any:
        calls.append(len(arguments[0]))
        return run(*arguments, **named)

    monkeypatch.setattr(ops, "norm_linear_fwd", counted)
    joined = hypotheses(task, copy.deepcopy(model), beam)
    if beam > 6:
        assert beam not in calls
        return
    assert beam in calls and max(calls) <= 6  # those of a prompt, too
    calls.clear()
    monkeypatch.setattr(step_decoder, "takes_rows", lambda x: False)
    apart = hypotheses(task, model, beam)
    assert not calls
    assert joined == apart
