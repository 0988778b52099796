"""``generate`` of accelerated language models: the sequences and scores of plain ones, and samples
of the same distribution, by our search."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import test_seq2seq as pairs
import torch
from helpers.accelerated import transformers
from test_searched_generate import FEW_RESULTS, USUAL, assert_same, reasons
from torch import Tensor

import lightseq_fairseq.huggingface as lightseq

WORDS, EOS, PAD = 40, 2, 0
PADS = torch.arange(4)  # columns


def build(source: random.Random, **config: Any) -> Any:
    """A GPT-2 in evaluation, whose results end at many lengths."""
    settings = {
        "vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": source.choice((2, 4)),
        "n_positions": 40, "bos_token_id": 1, "eos_token_id": EOS, "pad_token_id": PAD,
        "activation_function": source.choice(("gelu_new", "relu")), **config,
    }  # fmt: skip
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        model.lm_head.weight[EOS] *= source.uniform(1, 2)
    return model


def prompts(source: random.Random, pad: int = PAD, most: int = 8) -> dict[str, Tensor]:
    """Prompts of several lengths, with pads on their left, or without a mask; some with holes."""
    lengths = [source.randint(1, most) for _ in range(source.randint(1, 4))]
    ids = torch.randint(3, WORDS, (len(lengths), max(lengths)))
    if source.random() < 0.2:
        return {"input_ids": ids}
    mask = pairs.mask_of(lengths).flip(1)
    mask[:, :-1] &= torch.rand(mask[:, :-1].shape) > source.choice((0.0, 0.0, 0.2))
    return {"input_ids": ids.masked_fill(mask == 0, pad), "attention_mask": mask}


def random_options(source: random.Random) -> dict[str, Any]:
    """Options that our search covers, each left out at times."""
    drawn = {
        "forced_eos_token_id": EOS,
        "forced_bos_token_id": 5,  # has an effect after a prompt of one token only
        "no_repeat_ngram_size": source.choice((2, 3)),
        "min_length": source.randint(0, 14),
        "min_new_tokens": source.randint(0, 6),
        "bad_words_ids": [[7]],
        "suppress_tokens": source.sample(range(8, WORDS), source.randint(1, 3)),
        "pad_token_id": source.choice((0, 4, EOS)),
        "renormalize_logits": True,
        "use_cache": False,
    }
    options = {name: value for name, value in drawn.items() if source.random() < 0.25}
    if "forced_eos_token_id" not in options and source.random() < 0.2:
        options["eos_token_id"] = None
    beam = options["num_beams"] = source.choice((1, 2, 4))
    options["max_new_tokens"] = source.randint(1, 14)
    if beam > 1:
        options |= {
            "early_stopping": source.choice((True, False, "never")),
            "length_penalty": source.choice((0.0, 1.0, -0.5, 2.0)),
            "num_return_sequences": source.randint(1, beam),
            "return_dict_in_generate": source.random() < 0.5,
            "output_scores": source.random() < 0.7,
        }
    return options


@pytest.mark.filterwarnings("ignore:Unfeasible length", "ignore:lightseq")
@pytest.mark.parametrize("seed", range(5))
def test_random_options(seed: int) -> None:
    source, lengths = random.Random(seed), set()
    torch.manual_seed(seed)
    transformers.logging.set_verbosity_error()
    plain = build(source)
    ours = lightseq.accelerate(copy.deepcopy(plain))
    for _ in range(10):
        options = random_options(source)
        batch = prompts(source, options.get("pad_token_id", PAD))
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
    mask = pairs.mask_of((2, 4, 3)).flip(1)
    return {"input_ids": torch.arange(12).view(3, 4) + 5, "attention_mask": mask}


FALLBACKS: list[tuple[str, dict[str, Any]]] = [
    ("generate samples among beams", {"do_sample": True, "num_beams": 2}),
    ("generate has a MinPLogitsWarper", {"do_sample": True, "min_p": 0.1}),
    ("generate has a RepetitionPenaltyLogitsProcessor", {"repetition_penalty": 1.3}),
    ("generate has 2 eos tokens", {"eos_token_id": [EOS, 5]}),
    ("the first token is forced", {
        "input_ids": torch.tensor([[7]]), "attention_mask": None, "forced_bos_token_id": 5,
    }),
    ("a prompt ends with a pad", {"attention_mask": pairs.mask_of((2, 4, 3))}),
    ("the position_ids do not count the tokens of the mask", {
        "position_ids": torch.arange(4).expand(3, 4)
    }),
    ("generate is called with token_type_ids", {"token_type_ids": torch.ones(3, 4).long()}),
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
    batch = {"input_ids": ids, "attention_mask": pairs.mask_of((10, 10)).index_fill(1, PADS, 0)}
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
