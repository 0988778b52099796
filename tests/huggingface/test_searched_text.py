"""``generate`` of accelerated language models: the sequences and scores of plain ones, and samples
of the same distribution, by our search."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from helpers.accelerated import transformers
from test_searched_generate import FEW_RESULTS, USUAL, assert_same, reasons
from torch import Tensor

import lightseq_fairseq.huggingface as lightseq
from scripts import random_models as models
from scripts.random_models import EOS

WORDS = 40
PADS = torch.arange(4)  # columns


def build(source: random.Random, **config: Any) -> Any:
    """A GPT-2 in evaluation, whose results end at many lengths."""
    model = models.build("GPT2LMHeadModel", **config)
    return models.with_ends(model, source)


def prompts(source: random.Random, model: Any, has_ngrams: bool = True) -> dict[str, Tensor]:
    """Prompts of several lengths, with pads on their left, or without a mask.

    has_ngrams: n-grams are not to be repeated. Then all pads are eos, and otherwise at times
    another token, or between tokens.
    """
    kinds = ("left", "left", "none", *["left holes"] * (not has_ngrams))
    batch = models.random_batch(source, model, kinds)
    batch = {name: x for name, x in batch.items() if name != "labels"}
    if "attention_mask" in batch and (has_ngrams or source.random() < 0.5):
        batch["input_ids"].masked_fill_(batch["attention_mask"] == 0, EOS)
    return batch


@pytest.mark.filterwarnings("ignore:Unfeasible length", "ignore:lightseq")
@pytest.mark.parametrize("seed", range(5))
def test_random_options(seed: int) -> None:
    source, lengths = random.Random(seed), set()
    torch.manual_seed(seed)
    transformers.logging.set_verbosity_error()
    plain = build(source, **models.random_config(source, "GPT2"))
    ours = lightseq.accelerate(copy.deepcopy(plain))
    for _ in range(10):
        options = models.random_options(source, plain.config)
        if "eos_token_id" in options:  # so pads are other tokens
            options.pop("no_repeat_ngram_size", None)
        batch = prompts(source, plain, "no_repeat_ngram_size" in options)
        if "attention_mask" not in batch:  # transformers would make one from the pads
            options.pop("pad_token_id", None)
        if batch["input_ids"].shape[1] == 1:
            options.pop("forced_bos_token_id", None)
        expected, found = (model.generate(**batch, **options) for model in (plain, ours))
        lengths.add(assert_same(found, expected).shape[1])
    coverage = lightseq.report(ours)
    assert set(coverage.fallbacks) <= {FEW_RESULTS, *USUAL} and coverage.calls >= 8
    assert len(lengths) > 4


@pytest.fixture(scope="module")
def gpt2() -> tuple[Any, Any]:
    """A plain model and an accelerated copy."""
    torch.manual_seed(5)
    transformers.logging.set_verbosity_error()
    plain = build(random.Random(5), n_positions=12)
    return plain, lightseq.accelerate(copy.deepcopy(plain))


def batch_of_three() -> dict[str, Tensor]:
    mask = models.mask_of((2, 4, 3)).flip(1)
    ids = torch.arange(12).view(3, 4) + 5
    return {"input_ids": ids.masked_fill(mask == 0, EOS), "attention_mask": mask}


FALLBACKS: list[tuple[str, dict[str, Any]]] = [
    ("generate samples among beams", {"do_sample": True, "num_beams": 2}),
    ("generate has a MinPLogitsWarper", {"do_sample": True, "min_p": 0.1}),
    ("generate has a RepetitionPenaltyLogitsProcessor", {"repetition_penalty": 1.3}),
    ("generate has 2 eos tokens", {"eos_token_id": [EOS, 5]}),
    ("the first token is forced", {
        "input_ids": torch.tensor([[7]]), "attention_mask": None, "forced_bos_token_id": 5,
    }),
    ("a prompt ends with a pad", {"attention_mask": models.mask_of((2, 4, 3))}),
    ("the position_ids do not count the tokens of the mask", {
        "position_ids": torch.arange(4).expand(3, 4)
    }),
    ("generate is called with token_type_ids", {"token_type_ids": torch.ones(3, 4).long()}),
    ("n-grams with pads are not to be repeated (no_repeat_ngram_size)", {
        "no_repeat_ngram_size": 2, "input_ids": torch.arange(12).view(3, 4) + 5,
    }),
    ("generate returns numbers of each step", {
        "return_dict_in_generate": True, "output_scores": True
    }),
]  # fmt: skip


@pytest.mark.parametrize("reason, given", FALLBACKS)
def test_fallbacks(gpt2: tuple[Any, Any], reason: str, given: dict[str, Any]) -> None:
    plain, ours = gpt2[0], copy.deepcopy(gpt2[1])
    found = []
    with reasons() as texts:
        for model in (plain, ours, ours):
            torch.manual_seed(6)
            found.append(model.generate(**{**batch_of_three(), "max_new_tokens": 5, **given}))
    assert texts == [f"lightseq: Hugging Face's own generate runs, because {reason}."]
    for each in found[1:]:
        mine, theirs = (x if isinstance(x, Tensor) else x.sequences for x in (each, found[0]))
        assert mine.tolist() == theirs.tolist()
    assert lightseq.report(ours).fallbacks[reason] == 2


def test_positions_and_embeddings(gpt2: tuple[Any, Any]) -> None:
    """Pads have no positions; a result may end before the positions do."""
    plain, ours = gpt2[0], copy.deepcopy(gpt2[1])
    ids = torch.arange(20).view(2, 10) + 5
    batch = {"input_ids": ids, "attention_mask": models.mask_of((10, 10)).index_fill(1, PADS, 0)}
    found = [model.generate(**batch, max_length=16, num_beams=2) for model in (plain, ours)]
    assert_same(*found)
    assert not lightseq.report(ours).fallbacks
    first = int(plain.generate(ids[:1], max_new_tokens=1)[0, -1])
    embedded = plain.get_input_embeddings()(ids)
    with reasons() as texts:
        for given in (
            {"inputs": ids[:1], "max_length": 14, "eos_token_id": first},
            {"inputs_embeds": embedded, "max_new_tokens": 2},
        ):
            assert_same(*(model.generate(**given) for model in (ours, plain)))
    assert "a sentence has more tokens than there are positions" in texts[0]
    assert "generate is called with inputs_embeds" in texts[1]


@pytest.mark.parametrize(
    "ids, mask, is_ours",
    [
        ([[EOS, EOS, 7, 8], [5, 6, 7, 8]], [[0, 0, 1, 1], [1, 1, 1, 1]], True),
        ([[9, 9, 9, 8]], [[0, 0, 0, 1]], False),
        ([[7, 9, 8, 7]], [[1, 0, 1, 1]], False),
        ([[EOS, 8, EOS, 7]], [[0, 1, 1, 1]], False),
        ([[7, 8, 8, 7]], [[1, 1, 1, 1]], True),
    ],
    ids=["eos", "another token", "between tokens", "eos in the prompt", "no pads"],
)
def test_ngrams_with_pads(
    gpt2: tuple[Any, Any], ids: list[list[int]], mask: list[list[int]], is_ours: bool
) -> None:
    """In transformers they count. The model repeats one token, which is that of some pads."""
    plain, ours = (copy.deepcopy(model) for model in gpt2)
    with torch.no_grad():
        for model in (plain, ours):
            model.transformer.wte.weight[9] *= 8
    batch = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
    options = {"max_new_tokens": 7, "no_repeat_ngram_size": 2, "num_beams": 2}
    assert_same(*(model.generate(**batch, **options) for model in (ours, plain)))
    assert bool(lightseq.report(ours).fallbacks) != is_ours


SAMPLES: list[dict[str, Any]] = [
    {"top_k": 0},
    {"top_k": 4},
    {"top_k": 0, "top_p": 0.7},
    {"top_k": 6, "top_p": 0.8, "temperature": 1.6},
    {"top_k": 0, "temperature": 0.6, "min_new_tokens": 2, "suppress_tokens": [9, 11]},
    {"top_k": 5, "no_repeat_ngram_size": 2, "renormalize_logits": True},
]


@pytest.mark.parametrize("options", SAMPLES)
def test_samples(gpt2: tuple[Any, Any], options: dict[str, Any]) -> None:
    """The first and the second token are distributed as those of transformers; a seed repeats
    them."""
    plain, ours = gpt2[0], copy.deepcopy(gpt2[1])
    count, batch = 3000, {name: x[:2] for name, x in batch_of_three().items()}
    options = {
        "do_sample": True, "max_new_tokens": 2, "num_return_sequences": count, **options
    }  # fmt: skip
    torch.manual_seed(7)
    expected = plain.generate(**batch, **options)
    found = ours.generate(**batch, **options)
    assert found.shape == expected.shape
    assert torch.equal(found[:, :4], expected[:, :4])
    for place in (4, 5):
        for sentence in (slice(count), slice(count, None)):
            mine, theirs = (x[sentence, place].bincount(minlength=WORDS) for x in (found, expected))
            # Two counts of n draws each: their difference has at most this standard deviation.
            spread = (mine + theirs).clamp_min(1).sqrt()
            assert ((mine - theirs).abs() < 5 * spread).all()
            assert (mine > 0).sum() > 3
    drawn = [ours.generate(**batch, **options) for _ in range(2) if torch.manual_seed(8)]
    assert torch.equal(*drawn) and not torch.equal(drawn[0], found)
    assert not lightseq.report(ours).fallbacks


def test_weights_and_graphs(gpt2: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are those of now; graphs and their addresses stay from call to call."""
    monkeypatch.setattr("lightseq_fairseq.generation.decoder._most_kept", lambda device: 1e9)
    plain, ours = (copy.deepcopy(model) for model in gpt2)
    seen = set()
    for beam, length in ((2, 4), (2, 3), (1, 4), (2, 4)):
        with torch.no_grad():
            for model in (plain, ours):
                model.transformer.h[0].mlp.c_fc.weight.mul_(1.1)
                model.transformer.wte.weight.mul_(0.9)
        batch = {name: x[:, -length:] for name, x in batch_of_three().items()}
        options = {"num_beams": beam, "max_length": 10}
        assert_same(ours.generate(**batch, **options), plain.generate(**batch, **options))
        decoder = ours._lightseq.decoder
        read = [x for layer in decoder.layers for p in layer.parts for x in (p.weight, p.bias)]
        read += [decoder._matrix, decoder._positions, decoder._words["weight"]]
        seen.add((id(decoder.steps._graphs), *(x.data_ptr() for x in read)))
    assert len(seen) == 1 and not lightseq.report(ours).fallbacks
    ours.resize_token_embeddings(WORDS + 3)
    assert ours.generate(**batch_of_three(), max_length=10).shape[1] <= 10


def test_double_and_bfloat16(gpt2: tuple[Any, Any]) -> None:
    plain, ours = (copy.deepcopy(model) for model in gpt2)
    batch = batch_of_three()
    options = {"num_beams": 3, "max_new_tokens": 5, "output_scores": True}
    options["return_dict_in_generate"] = True
    expected = plain.generate(**batch, **options)
    with reasons() as texts:
        assert_same(ours.double().generate(**batch, **options), expected)
    assert "its parameters are float64" in texts[0]
    ours = copy.deepcopy(gpt2[1])
    with torch.autocast("cpu", torch.bfloat16):
        found = ours.generate(**batch, **options)
    torch.testing.assert_close(
        found.sequences_scores, expected.sequences_scores, rtol=0.05, atol=0.05
    )
    assert not lightseq.report(ours).fallbacks
    assert next(ours._lightseq.decoder.parameters()).dtype == torch.bfloat16
