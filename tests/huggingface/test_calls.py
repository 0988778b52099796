"""What a call can ask for: states, tuples, positions, packed sentences, compiled models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.accelerated import assert_ours, assert_same, one_warning, pair

import lightseq_fairseq.huggingface as lightseq
from lightseq_fairseq.layers.stack import Stack
from scripts.random_models import POSITIONS, Result, batch_of, computed, mask_of

LENGTHS = (4, 7, 2)


def both(plain: Any, ours: Any, batch: dict[str, Any], **options: Any) -> tuple[Result, Result]:
    """Their results, which are the same."""
    found, expected = computed(ours, batch, **options), computed(plain, batch, **options)
    assert_same(found, expected)
    return found, expected


@pytest.mark.parametrize("name", ["BertForMaskedLM", "RobertaForSequenceClassification"])
def test_hidden_states(name: str) -> None:
    plain, ours = pair(name)
    batch = batch_of(plain, mask_of(LENGTHS))
    found, _ = both(plain, ours, batch, output_hidden_states=True)
    assert len(found.states) == 3
    for model in (plain, ours):
        model.config.output_hidden_states = True
    found, _ = both(plain, ours, batch)
    assert len(found.states) == 3
    assert_ours(ours, 2)


def test_gradients_through_hidden_states() -> None:
    plain, ours = pair("BertModel")
    batch = batch_of(plain, mask_of(LENGTHS))
    real = batch["attention_mask"].bool()
    for model in (plain, ours):
        states = model(**batch, output_hidden_states=True).hidden_states
        sum((n + 1) * x[real].square().mean() for n, x in enumerate(states)).backward()
    expected = dict(plain.named_parameters())
    for key, parameter in ours.named_parameters():
        if expected[key].grad is None:
            assert parameter.grad is None, key
        else:
            torch.testing.assert_close(parameter.grad, expected[key].grad, atol=1e-5, rtol=1e-5)
    assert_ours(ours)


@pytest.mark.parametrize("some", [1, [0, -1]])
def test_some_hidden_states(some: Any) -> None:
    plain, ours = pair("BertForMaskedLM")
    batch = batch_of(plain, mask_of(LENGTHS))
    with one_warning("it returns some hidden states"):
        found = ours(**batch, output_hidden_states=some).hidden_states
    expected = plain(**batch, output_hidden_states=some).hidden_states
    assert [x is None for x in found] == [x is None for x in expected]
    # These hooks stay, but collect nothing more.
    both(plain, ours, batch)
    assert lightseq.report(ours).calls == 1


def test_attentions() -> None:
    plain, ours = pair("RobertaForTokenClassification", attn_implementation="eager")
    batch = batch_of(plain, mask_of(LENGTHS))
    with one_warning("it returns attentions"):
        found = ours(**batch, output_attentions=True).attentions
    for mine, theirs in zip(found, plain(**batch, output_attentions=True).attentions, strict=True):
        torch.testing.assert_close(mine, theirs)
    both(plain, ours, batch)
    coverage = lightseq.report(ours)
    assert (coverage.calls, coverage.fallbacks) == (1, {"it returns attentions": 1})
    assert str(coverage) == (
        "accelerated: 1 calls\nHugging Face's forward: 1 calls, because it returns attentions"
    )


@pytest.mark.parametrize("name", ["BertModel", "BertForSequenceClassification"])
@pytest.mark.parametrize("states", [False, True])
def test_tuples(name: str, states: bool) -> None:
    plain, ours = pair(name)
    batch = batch_of(plain, mask_of(LENGTHS))
    real = batch["attention_mask"].bool()
    for _ in range(2):
        found, expected = (
            model(**batch, return_dict=False, output_hidden_states=states)
            for model in (ours, plain)
        )
        assert type(found) is tuple and len(found) == len(expected)
        for mine, theirs in zip(found, expected):
            if isinstance(mine, tuple):
                assert len(mine) == len(theirs) == 3
                mine, theirs = mine[1], theirs[1]
            if mine.dim() == 3:
                mine, theirs = mine[real], theirs[real]
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
        for model in (ours, plain):
            model.config.return_dict = False
    assert_ours(ours, 2)


@pytest.mark.parametrize("name", ["BertForMaskedLM", "RobertaForMaskedLM"])
def test_given_positions(name: str) -> None:
    plain, ours = pair(name)
    batch = batch_of(plain, mask_of(LENGTHS))
    padding = 0 if plain.config.pad_token_id is None else plain.config.pad_token_id
    for shape in ((3, 7), (1, 7)):
        positions = torch.randint(0, POSITIONS, shape)
        positions[:, 0] = padding  # whose row of RoBERTa has no gradient
        both(plain, ours, {**batch, "position_ids": positions})
    assert_ours(ours)
    for position in (-1, POSITIONS):
        with pytest.raises((IndexError, RuntimeError)):
            ours(**batch, position_ids=torch.full((3, 7), position))


def test_indices_without_a_row_are_errors() -> None:
    _, ours = pair("BertForMaskedLM")
    batch = batch_of(ours, mask_of(LENGTHS))
    for name, wrong in (("input_ids", 24), ("input_ids", -1), ("token_type_ids", 2)):
        with pytest.raises((IndexError, ValueError)):
            ours(**{**batch, name: torch.full((3, 7), wrong)})


@pytest.mark.parametrize("name", ["BertForMaskedLM", "RobertaForMaskedLM"])
def test_more_tokens_than_positions_are_an_error(name: str) -> None:
    plain, ours = pair(name)
    batch = {"input_ids": torch.full((2, POSITIONS + 1), 5)}
    for model in (plain, ours):
        with pytest.raises((IndexError, RuntimeError)):
            model(**batch)


@pytest.mark.parametrize("name", ["BertForMaskedLM", "RobertaForMaskedLM"])
def test_given_embeddings(name: str) -> None:
    plain, ours = pair(name)
    batch = batch_of(plain, mask_of(LENGTHS))
    ids = batch.pop("input_ids")
    gradients = []
    for model in (plain, ours):
        embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
        model(**batch, inputs_embeds=embedded).loss.backward()
        gradients.append(embedded.grad)
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        batch["inputs_embeds"] = plain.get_input_embeddings()(ids)
    both(plain, ours, batch)
    assert_ours(ours)
    for model in (plain, ours):
        with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
            model(input_ids=ids, inputs_embeds=batch["inputs_embeds"])


@pytest.mark.parametrize("name", ["BertForMaskedLM", "RobertaForMaskedLM"])
def test_inputs_of_other_dtypes_and_strides(name: str) -> None:
    plain, ours = pair(name)
    batch = batch_of(plain, mask_of(LENGTHS))
    mask = batch["attention_mask"]
    for dtype in (torch.bool, torch.int32, torch.float32):
        both(plain, ours, {**batch, "attention_mask": mask.to(dtype)})
    for key in ("input_ids", "token_type_ids"):
        both(plain, ours, {**batch, key: batch[key].int()})
    both(plain, ours, {**batch, "token_type_ids": batch["token_type_ids"][:1]})
    strided = {key: batch[key].t().contiguous().t() for key in batch if key != "labels"}
    both(plain, ours, {**batch, **strided})
    assert_ours(ours, 7)


def test_masks_of_pairs_of_tokens() -> None:
    plain, ours = pair("BertForSequenceClassification")
    batch = batch_of(plain, mask_of([6, 6]))
    pairs = torch.rand(2, 1, 6, 6) < 0.6
    batch["attention_mask"] = pairs | torch.eye(6, dtype=torch.bool)
    with one_warning("the attention mask is not of the shape [sentences, tokens]"):
        both(plain, ours, batch)


def test_states_of_another_encoder() -> None:
    plain, ours = pair("BertModel")
    batch = batch_of(plain, mask_of(LENGTHS))
    for name, value in (("encoder_hidden_states", torch.randn(3, 2, 16)), ("past_key_values", ())):
        with one_warning(f"it is called with {name}"):
            try:
                ours(**batch, **{name: value})
            except (ValueError, AttributeError, TypeError):
                assert name != "encoder_hidden_states"
    with one_warning("it is called with other arguments"):
        ours(batch["input_ids"], batch["attention_mask"], None, None, None, None)


@pytest.mark.parametrize("name", ["BertForMaskedLM", "RobertaForTokenClassification"])
def test_packed_sentences(name: str) -> None:
    """They do not see each other, as apart; Hugging Face's layers on a CPU would mix them."""
    plain, ours = pair(name)
    batch = batch_of(plain, mask_of(LENGTHS))
    real = batch.pop("attention_mask").bool()
    packed = {key: value[real][None] for key, value in batch.items()}
    start = 0 if name.startswith("Bert") else plain.config.pad_token_id + 1
    packed["position_ids"] = torch.cat([torch.arange(n) for n in LENGTHS])[None] + start
    ends = torch.tensor([0, 4, 11, 13], dtype=torch.int32)
    packed |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    packed |= {"max_length_q": max(LENGTHS), "max_length_k": max(LENGTHS)}
    if name.startswith("Roberta"):  # whose positions count no pads
        batch["input_ids"] = batch["input_ids"].clamp(min=2)
        packed["input_ids"] = packed["input_ids"].clamp(min=2)
    found = computed(ours, packed)
    expected = computed(plain, {**batch, "attention_mask": real.long()})
    logits = expected.outputs["logits"][real][None]
    assert_same(found, expected._replace(outputs={"logits": logits}))
    assert_ours(ours, 1)
    del packed["max_length_q"]
    with one_warning("cu_seq_lens_q comes with a mask, without max_length_q or with a batch"):
        ours(**packed)


@pytest.mark.parametrize("some", [False, True])
def test_gradient_checkpointing(some: bool) -> None:
    plain, ours = pair("BertForMaskedLM")
    batch = batch_of(plain, mask_of(LENGTHS))
    stacks: list[Any] = []
    for model in (plain, ours):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if some:
            model.bert.encoder.layer[0].gradient_checkpointing = False
    if some:
        with one_warning("only some layers are checkpointed"):
            both(plain, ours, batch)
        return
    with pytest.MonkeyPatch.context() as patch:
        run = Stack.__init__

        def watched(self: Stack, *args: Any, **options: Any) -> None:
            run(self, *args, **options)
            stacks.append(self.recomputes)

        patch.setattr(Stack, "__init__", watched)
        both(plain, ours, batch)
        ours.gradient_checkpointing_disable()
        both(plain, ours, batch)
    assert stacks == [True, False]
    assert_ours(ours)


def test_compiled() -> None:
    plain, ours = pair("BertForSequenceClassification")
    compiled = torch.compile(ours, backend="eager")
    for lengths in (LENGTHS, (3, 5)):
        batch = batch_of(plain, mask_of(lengths))
        found, expected = compiled(**batch), plain(**batch)
        torch.testing.assert_close(found.logits, expected.logits, atol=1e-5, rtol=1e-5)
        found.loss.backward()
    assert_ours(ours, 2)


def test_evaluation_without_gradients_comes_first() -> None:
    plain, ours = pair("BertForMaskedLM")
    batch = batch_of(plain, mask_of(LENGTHS))
    with torch.inference_mode():
        ours.eval()(**batch)
    ours.train()
    both(plain, ours, batch)
    assert_ours(ours, 2)


def test_rows_of_pads_are_zero() -> None:
    _, ours = pair("BertModel")
    batch = batch_of(ours, mask_of(LENGTHS))
    found = ours(**batch).last_hidden_state[batch["attention_mask"] == 0]
    assert len(found) == 8 and not found.any()
    assert_ours(ours)
