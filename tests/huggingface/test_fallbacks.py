"""Changed models are computed by Hugging Face's forward: rightly, counted, with one warning."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.accelerated import assert_ours, assert_same, one_warning, pair
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import lightseq_fairseq.huggingface as lightseq
from scripts.random_models import batch_of, build, computed, mask_of

LENGTHS = (4, 7, 2)


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * super().forward(x)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2.0 * weight


class Quantised(nn.Parameter):
    """A parameter as a quantised layer has it."""


def subclass(block: Any) -> None:
    block.query.__class__ = Scaled


def hook(block: Any) -> None:
    block.value.register_forward_hook(lambda module, inputs, output: output + 1.0)


def early_hook(block: Any) -> None:
    block.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.5, *inputs[1:]))


def other_forward(block: Any) -> None:
    block.key.forward = lambda x: 2.0 * nn.Linear.forward(block.key, x)


def parametrized(block: Any) -> None:
    parametrize.register_parametrization(block.key, "weight", Doubled())


def without_bias(block: Any) -> None:
    block.query.register_parameter("bias", None)


def quantised(block: Any) -> None:
    block.query.weight = Quantised(block.query.weight.detach().clone())


def other_dropout(block: Any) -> None:
    block.dropout = nn.AlphaDropout(0.0)


def twice(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
    return 2.0 * ALL_ATTENTION_FUNCTIONS["sdpa"](module, q, k, v, mask, **options)[0], None


def other_attention(block: Any) -> None:
    ALL_ATTENTION_FUNCTIONS.register("twice", twice)
    ALL_MASK_ATTENTION_FUNCTIONS.register("twice", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    block.config._attn_implementation = "twice"


def decoder(block: Any) -> None:
    block.config.is_decoder = True
    block.config.use_cache = False


CHANGES: dict[Callable[[Any], None], str] = {
    other_attention: "its attention is twice",
    decoder: "it is a decoder",
    subclass: "a layer has test_fallbacks.Scaled in place of Linear",
    hook: "a Linear has hooks",
    early_hook: "a BertSelfAttention has hooks",
    other_forward: "a Linear has another forward",
    parametrized: "a layer has torch.nn.utils.parametrize.ParametrizedLinear in place of Linear",
    without_bias: "a layer has no weight or bias",
    quantised: "a layer has a Quantised as weight or bias",
    other_dropout: "a layer has torch.nn.modules.dropout.AlphaDropout in place of Dropout",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("first", ["changed first", "changed later"])
def test_changed_layers(change: Callable[[Any], None], first: str) -> None:
    plain, ours = pair("BertForSequenceClassification")
    batch = batch_of(plain, mask_of(LENGTHS))
    if first == "changed later":
        assert_same(computed(ours, batch), computed(plain, batch))
    for model in (plain, ours):
        change(model.bert.encoder.layer[1].attention.self)
    with one_warning(CHANGES[change]):
        for _ in range(2):
            assert_same(computed(ours, batch), computed(plain, batch))
    assert lightseq.report(ours).fallbacks == {CHANGES[change]: 2}


@pytest.mark.parametrize("first", ["changed first", "changed later"])
def test_other_activations(first: str) -> None:
    plain = build("BertForMaskedLM", hidden_act="gelu")
    ours = copy.deepcopy(plain)
    batch = batch_of(plain, mask_of(LENGTHS))
    if first == "changed later":
        lightseq.accelerate(ours)
    for model in (plain, ours):
        for layer in model.bert.encoder.layer:
            layer.intermediate.intermediate_act_fn = nn.ReLU()
    lightseq.accelerate(ours)
    with one_warning("a layer has torch.nn.modules.activation.ReLU in place of GELUActivation"):
        assert_same(computed(ours, batch), computed(plain, batch))


def test_a_configuration_that_changes_later() -> None:
    """Modules do not read it again."""
    plain, ours = pair("BertForMaskedLM", hidden_act="gelu")
    batch = batch_of(plain, mask_of(LENGTHS))
    for model in (plain, ours):
        model.config.hidden_act, model.config.layer_norm_eps = "relu", 0.1
        model.config.num_attention_heads, model.config.hidden_dropout_prob = 4, 0.5
    assert_same(computed(ours, batch), computed(plain, batch))
    assert_ours(ours)


def test_fewer_layers() -> None:
    plain, ours = pair("BertForMaskedLM", num_hidden_layers=3)
    batch = batch_of(plain, mask_of(LENGTHS))
    for count in (3, 2):
        for model in (plain, ours):
            model.bert.encoder.layer = model.bert.encoder.layer[:count]
        assert_same(computed(ours, batch), computed(plain, batch))
    assert_ours(ours, 2)
    for model in (plain, ours):
        model.bert.encoder.layer = model.bert.encoder.layer[:0]
    with one_warning("it has no layers"):
        assert_same(computed(ours, batch), computed(plain, batch))


def test_one_warning_for_each_reason() -> None:
    _, ours = pair("BertForSequenceClassification")
    batch = batch_of(ours, mask_of(LENGTHS))
    block = ours.bert.encoder.layer[0].attention.self
    with one_warning("a Linear has hooks"):
        handle = block.query.register_forward_hook(lambda *given: None)
        ours(**batch)
        ours(**batch)
    handle.remove()
    ours(**batch)
    with one_warning("it returns attentions"):
        ours(**batch, output_attentions=True)
    coverage = lightseq.report(ours)
    assert coverage.calls == 1
    assert coverage.fallbacks == {"a Linear has hooks": 2, "it returns attentions": 1}


def test_own_forward_of_a_layer_is_no_change() -> None:
    """As transformers 5.0 leaves it after it has collected attentions."""
    plain, ours = pair("BertForMaskedLM")
    for layer in ours.bert.encoder.layer:
        layer.forward = layer.forward
    batch = batch_of(plain, mask_of(LENGTHS))
    assert_same(computed(ours, batch), computed(plain, batch))
    assert_ours(copy.deepcopy(ours), 0)
    copied = copy.deepcopy(ours)
    assert_same(computed(copied, batch), computed(plain, batch))
    assert_ours(copied, 1)


def test_hooks_of_the_embedding_are_called() -> None:
    """As NEFTune has them; our layers compute the rest."""
    plain, ours = pair("BertForSequenceClassification")
    for model in (plain, ours):
        for module in (model.get_input_embeddings(), model.bert.embeddings):
            module.register_forward_hook(lambda module, inputs, output: output * 1.5)
    batch = batch_of(plain, mask_of(LENGTHS))
    assert_same(computed(ours, batch), computed(plain, batch))
    assert_ours(ours)


def test_noise_of_neftune() -> None:
    try:
        from transformers.integrations.neftune import neftune_post_forward_hook
    except ImportError:  # transformers 5.0
        from transformers.trainer_utils import neftune_post_forward_hook

    plain, ours = pair("BertForSequenceClassification")
    for model in (plain, ours):
        table = model.get_input_embeddings()
        table.neftune_noise_alpha = 5.0
        table.register_forward_hook(neftune_post_forward_hook)
    batch = batch_of(plain, mask_of(LENGTHS))
    results = []
    for model in (ours, plain):
        torch.manual_seed(3)
        results.append(computed(model, batch))
    assert_same(*results)
    assert_ours(ours)
    torch.manual_seed(4)
    assert not computed(ours, batch).loss.equal(results[0].loss)


@pytest.mark.parametrize("later", [False, True])
def test_lora(later: bool) -> None:
    """The adapter trains as without acceleration."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    plain = build("BertForSequenceClassification")
    ours = copy.deepcopy(plain)
    config = peft.LoraConfig(r=4, target_modules=["query", "value"], task_type="SEQ_CLS")
    batch = batch_of(plain, mask_of(LENGTHS))
    adapted = []
    for model in (plain, ours):
        if later and model is ours:
            lightseq.accelerate(model)(**batch)
        torch.manual_seed(5)
        found = peft.get_peft_model(model, config).train()
        adapted.append(found if later or model is plain else lightseq.accelerate(found))
    with torch.no_grad():
        for model in adapted:
            torch.manual_seed(6)
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_()
    calls = lightseq.report(adapted[1]).calls
    with one_warning("in place of Linear"):
        for _ in range(2):
            found, expected = (computed(model, batch) for model in reversed(adapted))
            assert_same(found, expected)
            assert any(g.any() for name, g in found.gradients.items() if "lora_A" in name)
            with torch.no_grad():
                for model in adapted:
                    for parameter in model.parameters():
                        if parameter.grad is not None:
                            parameter -= 0.1 * parameter.grad
    assert lightseq.report(adapted[1]).calls == calls
    merged = lightseq.accelerate(adapted[1].merge_and_unload())
    before = lightseq.report(merged).calls
    assert_same(computed(merged, batch), computed(adapted[0].merge_and_unload(), batch))
    assert lightseq.report(merged).calls == before + 1


def test_pads_before_a_row_that_a_head_reads() -> None:
    plain, ours = pair("BertForPreTraining")
    batch = batch_of(plain, mask_of(LENGTHS, left=True))
    with one_warning("a sentence begins with a pad"):
        assert_same(computed(ours, batch), computed(plain, batch))
    plain, ours = pair("BertModel")
    given = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with one_warning("a sentence begins with a pad"):
        found, expected = (model(**given).pooler_output for model in (ours, plain))
    torch.testing.assert_close(found, expected)


def test_pads_in_question_answering() -> None:
    plain, ours = pair("BertForQuestionAnswering")
    with one_warning("question answering also reads the features of pads"):
        batch = batch_of(plain, mask_of(LENGTHS))
        found, expected = ours(**batch), plain(**batch)
    torch.testing.assert_close(found.start_logits, expected.start_logits)  # also at pads
    for mask in (mask_of([6, 6]), None):
        batch = batch_of(plain, mask_of([6, 6]))
        batch["attention_mask"] = mask
        assert_same(computed(ours, batch), computed(plain, batch))
    assert lightseq.report(ours).calls == 2


def test_autocast_in_float16() -> None:
    plain, ours = pair("BertForMaskedLM")
    batch = batch_of(plain, mask_of(LENGTHS))
    with torch.autocast("cpu", torch.float16), one_warning("autocast computes in float16"):
        found, expected = ours(**batch), plain(**batch)
    torch.testing.assert_close(found.loss, expected.loss)


def test_parameters_of_several_dtypes() -> None:
    _, ours = pair("BertForMaskedLM")
    ours.bert.encoder.bfloat16()
    batch = batch_of(ours, mask_of(LENGTHS))
    with one_warning("its parameters have several dtypes"), pytest.raises(RuntimeError):
        ours(**batch)


def test_autocast_of_float16() -> None:
    plain, ours = (model.half() for model in pair("BertForMaskedLM"))
    batch = batch_of(plain, mask_of(LENGTHS))
    assert_same(computed(ours, batch), computed(plain, batch), 2e-2)
    assert_ours(ours)
    # Hugging Face's forward does not compute this on a CPU, either.
    reason = "its parameters are neither bfloat16 nor float32"
    with torch.autocast("cpu", torch.bfloat16), one_warning(reason), pytest.raises(RuntimeError):
        ours(**batch)


def test_parameters_elsewhere() -> None:
    """As accelerate has those that it moves to the device when a layer runs."""
    plain, ours = pair("BertForMaskedLM")
    for model in (plain, ours):
        layer = model.bert.encoder.layer[1]
        kept = copy.deepcopy(layer)
        layer.to("meta").forward = kept.forward
    batch = batch_of(plain, mask_of(LENGTHS))
    with one_warning("parameters are on meta"):
        assert_same(computed(ours, batch), computed(plain, batch))


def some_checkpoints(model: Any) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.bert.encoder.layer[1].gradient_checkpointing = False


def linear_hook(model: Any) -> None:
    hook(model.bert.encoder.layer[1].attention.self)


def nothing(model: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("name", "change", "left", "reason"),
    [
        ("BertForMaskedLM", some_checkpoints, False, "only some layers are checkpointed"),
        ("BertForMaskedLM", linear_hook, False, "a Linear has hooks"),
        ("BertForNextSentencePrediction", nothing, True, "a sentence begins with a pad"),
        ("BertForQuestionAnswering", nothing, False, "question answering also reads"),
    ],
)
def test_masks_of_a_fallback_are_those_of_hugging_face(
    name: str, change: Callable[[Any], None], left: bool, reason: str
) -> None:
    plain, ours = pair(name, hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3)
    batch = batch_of(plain, mask_of(LENGTHS, left))
    results = []
    with one_warning(reason):
        for model in (ours, plain):
            change(model)
            torch.manual_seed(3)
            results.append(computed(model, batch))
    assert_same(*results)
