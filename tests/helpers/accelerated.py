"""Small models of `transformers`, their batches, and what an accelerated and a plain one compute.

Shapes: B = sentences, L = longest sentence.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import lightseq_fairseq.huggingface as lightseq
from lightseq_fairseq.huggingface import reader

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

IS_OLDEST = transformers.__version__.startswith("5.0.")
needs_captured_step = pytest.mark.skipif(
    IS_OLDEST, reason="the loop of transformers 5.0 has no place for the captured step"
)

WORDS = 24
LONGEST = 12
SMALL = {
    "vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": LONGEST + 4, "type_vocab_size": 2,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
# Heads that read only the rows of real tokens.
TOKEN_HEADS = ("ForMaskedLM", "ForTokenClassification")
HEADS = (
    "Model",
    *TOKEN_HEADS,
    "ForSequenceClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
)
BERT_HEADS = (*HEADS, "ForNextSentencePrediction", "ForPreTraining")


def build(name: str, dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    """A model in training mode, whose parameters are all random."""
    cls = getattr(transformers, name)
    model = cls(cls.config_class(**{**SMALL, **config})).to(dtype).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def pair(name: str, **config: Any) -> tuple[Any, Any]:
    """A plain model, and an accelerated copy of it."""
    plain = build(name, **config)
    return plain, lightseq.accelerate(copy.deepcopy(plain))


def mask_of(lengths: Sequence[int], left: bool = False) -> Tensor:
    """int64 [B, L], 1 at real tokens."""
    steps = torch.arange(max(lengths))
    real = (steps < torch.tensor(lengths)[:, None]).long()
    return real.flip(1) if left else real


def batch_of(model: Any, mask: Tensor, given: bool = True, types: bool = True) -> dict[str, Any]:
    """Random inputs of a model for these real tokens, and labels that its head reads.

    given: the mask is an argument. types: so are token types.
    """
    config, name, shape = model.config, type(model).__name__, tuple(mask.shape)
    ids = torch.randint(config.vocab_size, shape)
    if torch.rand(()) < 0.7:
        ids = ids.masked_fill(mask == 0, config.pad_token_id)
    batch: dict[str, Any] = {"input_ids": ids}
    if given:
        batch["attention_mask"] = mask
    if types:
        batch["token_type_ids"] = torch.randint(config.type_vocab_size, shape)
    if name.endswith("ForMultipleChoice"):
        batch = {name: value.unflatten(0, (-1, 2)) for name, value in batch.items()}
        batch["labels"] = torch.randint(2, (len(mask) // 2,))
    elif name.endswith(("ForMaskedLM", "ForPreTraining")):
        batch["labels"] = torch.randint(config.vocab_size, shape).masked_fill(mask == 0, -100)
    elif name.endswith("ForTokenClassification"):
        batch["labels"] = torch.randint(config.num_labels, shape).masked_fill(mask == 0, -100)
    elif name.endswith("ForSequenceClassification"):
        is_numbers = config.problem_type == "regression" or config.num_labels == 1
        several = (len(mask), config.num_labels) if config.num_labels > 1 else (len(mask),)
        batch["labels"] = (
            torch.randn(several) if is_numbers else torch.randint(config.num_labels, (len(mask),))
        )
    elif name.endswith("ForQuestionAnswering"):
        batch["start_positions"] = torch.randint(shape[1], (len(mask),))
        batch["end_positions"] = torch.randint(shape[1], (len(mask),))
    elif name.endswith("ForNextSentencePrediction"):
        batch["labels"] = torch.randint(2, (len(mask),))
    if name.endswith("ForPreTraining"):
        batch["next_sentence_label"] = torch.randint(2, (len(mask),))
    return batch


class Result(NamedTuple):
    """What a call has computed; rows of pads are zero."""

    loss: Tensor
    outputs: dict[str, Tensor]
    states: list[Tensor]
    gradients: dict[str, Tensor]


def computed(model: Any, batch: dict[str, Any], **options: Any) -> Result:
    """The results at real tokens and all gradients; those of before are deleted."""
    model.zero_grad()
    found = model(**batch, **options)
    real = batch.get("attention_mask")
    ids = batch.get("input_ids", batch.get("inputs_embeds"))
    assert ids is not None
    length = ids.shape[-1] if "input_ids" in batch else ids.shape[-2]

    def at_tokens(x: Tensor) -> Tensor:
        is_padded = real is not None and real.dim() < 4 and x.dim() > 1 and x.shape[1] == length
        if not is_padded or x.shape[0] != real.flatten(0, -2).shape[0]:
            return x
        flat = real.flatten(0, -2).bool()
        return x.masked_fill(~flat.reshape(*flat.shape, *(1,) * (x.dim() - 2)), 0.0)

    names = {"loss", "hidden_states", "attentions"}
    outputs = {name: at_tokens(x) for name, x in found.items() if name not in names}
    loss = found.get("loss")
    if loss is None:  # a model without a head
        generator = torch.Generator().manual_seed(1)
        loss = sum(
            (x * torch.randn(x.shape, generator=generator).to(x.dtype)).mean()
            for x in outputs.values()
        )
    if loss.requires_grad:
        loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    states = [at_tokens(x) for x in found.get("hidden_states") or ()]
    return Result(loss, outputs, states, gradients)


def assert_same(found: Result, expected: Result, tolerance: float = 1e-5) -> None:
    """All numbers are equal but for this error, absolute or relative."""
    near = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(found.loss, expected.loss, **near)
    assert found.outputs.keys() == expected.outputs.keys()
    assert found.gradients.keys() == expected.gradients.keys()
    for name in expected.outputs:
        torch.testing.assert_close(found.outputs[name], expected.outputs[name], **near)
    assert len(found.states) == len(expected.states)
    for mine, theirs in zip(found.states, expected.states):
        torch.testing.assert_close(mine, theirs, **near)
    for name in expected.gradients:
        torch.testing.assert_close(
            found.gradients[name], expected.gradients[name], **near,
            msg=lambda text, name=name: f"{name}: {text}",
        )  # fmt: skip


def assert_ours(model: Any, calls: int | None = None) -> None:
    """Our layers have computed all calls of a model."""
    coverage = lightseq.report(model)
    assert not coverage.fallbacks, coverage
    assert coverage.calls == calls if calls is not None else coverage.calls > 0


@contextmanager
def by_graphs(is_so: bool = True) -> Iterator[None]:
    """Within it calls take the path of CUDA graphs; on a CPU nothing is captured, so each call runs
    what would be."""
    with pytest.MonkeyPatch.context() as patched:
        if is_so:
            patched.setattr(reader, "captures", lambda device: True)
        yield


@contextmanager
def one_warning(reason: str) -> Iterator[None]:
    """Within it the package warns once, of a fallback for this reason."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    texts = [str(w.message) for w in caught if "lightseq" in str(w.message)]
    assert len(texts) == 1 and reason in texts[0], texts


def random_config(source: random.Random, name: str) -> dict[str, Any]:
    """A random small configuration."""
    head = source.choice((8, 16, 24))
    heads = source.randint(1, 3)
    config: dict[str, Any] = {
        "num_attention_heads": heads, "hidden_size": head * heads,
        "num_hidden_layers": source.randint(1, 3),
        "intermediate_size": 8 * source.randint(1, 6),
        "hidden_act": source.choice(("gelu", "gelu_new", "relu", "silu", "gelu_pytorch_tanh")),
        "type_vocab_size": source.randint(1, 3), "layer_norm_eps": source.choice((1e-12, 1e-5)),
        "attn_implementation": source.choice(("sdpa", "eager")),
    }  # fmt: skip
    if name.endswith("ForSequenceClassification"):
        config["num_labels"] = source.randint(1, 3)
        config["problem_type"] = source.choice((None, "regression"))
    elif name.endswith("ForTokenClassification"):
        config["num_labels"] = source.randint(2, 4)
    return config


def random_mask(source: random.Random, name: str) -> tuple[Tensor, bool]:
    """A random mask that our layers compute with this head, and whether it is an argument."""
    kind = source.choice(("ragged", "full", "none", "one sentence", "one token", "holes"))
    sentences = 1 if kind == "one sentence" else source.randint(1, 4)
    sentences *= 2 if name.endswith("ForMultipleChoice") else 1
    longest = 1 if kind == "one token" else source.randint(2, LONGEST)
    lengths = [source.randint(1, longest) for _ in range(sentences)]
    if kind in ("full", "none", "one token") or name.endswith("ForQuestionAnswering"):
        lengths = [longest] * sentences
    on_left = name.endswith(TOKEN_HEADS) and source.random() < 0.5
    mask = mask_of(lengths, on_left)
    if kind == "holes" and not name.endswith("ForQuestionAnswering"):
        holes = torch.rand(mask.shape) < 0.3
        holes[:, -1 if on_left else 0] = False
        mask = mask * ~holes
    return mask, kind != "none"
