"""``accelerate`` leaves Hugging Face's object; its copies, files, and models it refuses."""

from __future__ import annotations

import copy
import inspect
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.accelerated import assert_ours, assert_same, pair
from safetensors.torch import load_file
from torch import nn

import lightseq_fairseq.huggingface as lightseq
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.huggingface import calls
from lightseq_fairseq.huggingface.copies import copies
from lightseq_fairseq.memory.parameters import as_one
from scripts.random_models import batch_of, build, computed, mask_of

LENGTHS = (4, 7, 2)


def used(name: str = "BertForMaskedLM") -> tuple[Any, Any, dict[str, Any]]:
    """A plain model, an accelerated one that has computed a batch, and the batch."""
    plain, ours = pair(name)
    batch = batch_of(plain, mask_of(LENGTHS))
    computed(ours, batch)
    return plain, ours, batch


def assert_bitwise(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(found) == list(expected)
    assert all(found[name].equal(expected[name]) for name in expected)


def test_the_object_stays() -> None:
    from transformers import BertModel, PreTrainedModel

    plain, ours, _ = used()
    names, modules = ([type(m) for m in x.modules()] for x in (plain, ours))
    assert [(x.__module__, x.__qualname__) for x in names] == [
        (x.__module__, x.__qualname__) for x in modules
    ]
    assert isinstance(ours.bert, BertModel) and isinstance(ours.bert, PreTrainedModel)
    assert [n for n, _ in ours.named_modules()] == [n for n, _ in plain.named_modules()]
    assert [n for n, _ in ours.named_buffers()] == [n for n, _ in plain.named_buffers()]
    assert_bitwise(ours.state_dict(), plain.state_dict())
    assert inspect.signature(ours.bert.forward) == inspect.signature(plain.bert.forward)
    parameters = dict(ours.named_parameters())
    assert lightseq.accelerate(ours) is ours
    assert all(p is parameters[name] for name, p in ours.named_parameters())


def test_accelerate_twice() -> None:
    plain, ours, batch = used()
    again = lightseq.accelerate(ours)
    assert lightseq.report(again).calls == 1
    assert_same(computed(again, batch), computed(plain, batch))
    assert_ours(again, 2)


def test_two_models_at_once() -> None:
    first, second = used("BertForMaskedLM"), used("RobertaForSequenceClassification")
    both = nn.ModuleList([first[1], second[1]])
    for plain, ours, batch in (first, second, first):
        assert_same(computed(ours, batch), computed(plain, batch))
    assert lightseq.report(both).calls == 5
    alone = nn.ModuleList([build("BertModel"), build("XLMRobertaModel")])
    lightseq.accelerate(alone)
    with torch.no_grad():
        for model in alone:
            model(torch.full((2, 3), 5))
    assert_ours(alone, 2)


def test_restore() -> None:
    plain, ours, batch = used()
    assert lightseq.restore(ours) is ours
    assert [type(m) for m in ours.modules()] == [type(m) for m in plain.modules()]
    assert vars(ours.bert).keys() == vars(plain.bert).keys()
    assert computed(ours, batch).loss.equal(computed(plain, batch).loss)
    for function in (lightseq.report, lightseq.restore):
        with pytest.raises(UserError, match=r"^BertForMaskedLM is not accelerated: lightseq"):
            function(ours)
    assert_same(computed(lightseq.accelerate(ours), batch), computed(plain, batch))


def test_deepcopy() -> None:
    plain, ours, batch = used()
    copied = copy.deepcopy(ours)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
    assert_same(computed(copied, batch), computed(plain, batch))
    assert_ours(copied, 1)
    assert lightseq.report(ours).calls == 1
    assert not any(p.any() for p in ours.parameters())


def test_files_of_the_object_need_no_lightseq(tmp_path: Path) -> None:
    plain, ours, batch = used()
    torch.save(ours, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    for found in (pickle.loads(pickle.dumps(ours)), loaded):
        assert [type(m) for m in found.modules()] == [type(m) for m in plain.modules()]
        assert vars(found.bert).keys() == vars(plain.bert).keys()
        assert_bitwise(found.state_dict(), plain.state_dict())
        assert computed(found, batch).loss.equal(computed(plain, batch).loss)
    assert b"lightseq" not in pickle.dumps(ours)


def test_save_pretrained(tmp_path: Path) -> None:
    plain, ours, batch = used()
    for name, model in (("plain", plain), ("ours", ours)):
        model.save_pretrained(tmp_path / name)
    for file in (tmp_path / "plain").iterdir():
        assert (tmp_path / "ours" / file.name).read_bytes() == file.read_bytes(), file
    loaded = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "ours").train()
    assert_bitwise(loaded.state_dict(), plain.state_dict())
    assert_same(computed(lightseq.accelerate(loaded), batch), computed(plain, batch))
    assert_ours(loaded)


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict(assign: bool) -> None:
    _, ours, batch = used()
    other = build("BertForMaskedLM")
    ours.load_state_dict(copy.deepcopy(other).state_dict(), assign=assign)
    ours.tie_weights()
    other.tie_weights()
    for _ in range(2):
        assert_same(computed(ours, batch), computed(other, batch))
    assert_ours(ours)


@pytest.mark.parametrize("rows", [32, 9])
def test_resize_token_embeddings(rows: int) -> None:
    models = [*used()[:2]]
    for model in models:
        torch.manual_seed(3)
        model.resize_token_embeddings(rows, mean_resizing=False)
    batch = batch_of(models[0], mask_of(LENGTHS))
    batch["input_ids"] %= rows
    batch["labels"] = batch["labels"].clamp(max=rows - 1)
    plain, ours = models
    assert_same(computed(ours, batch), computed(plain, batch))
    assert ours.cls.predictions.decoder.weight is ours.bert.embeddings.word_embeddings.weight
    assert_ours(ours)


def test_tied_weights_stay_tied() -> None:
    plain, ours, batch = used()
    for model in (ours, copy.deepcopy(ours), ours.double().float()):
        words = model.bert.embeddings.word_embeddings.weight
        assert model.cls.predictions.decoder.weight is words
        with torch.no_grad():
            words[5] += 1.0
        assert_same(computed(model, batch), computed(copy_with(plain, words), batch))


def copy_with(model: Any, words: torch.Tensor) -> Any:
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.bert.embeddings.word_embeddings.weight.copy_(words)
    return copied


def test_other_dtypes_later() -> None:
    plain, ours, batch = used()
    for model in (plain, ours):
        model.double()
    assert_same(computed(ours, batch), computed(plain, batch), 1e-12)
    for model in (plain, ours):
        model.to(torch.float32)
    assert_same(computed(ours, batch), computed(plain, batch))
    assert_ours(ours, 3)


def test_changes_of_single_weights() -> None:
    plain, ours, batch = used()
    for model in (plain, ours):
        torch.manual_seed(3)
        block = model.bert.encoder.layer[0].attention.self
        block.key.weight.data = torch.randn(16, 16)
        block.value.weight = nn.Parameter(torch.randn(16, 16))
        with torch.no_grad():
            model.bert.encoder.layer[1].output.LayerNorm.bias.fill_(0.5)
    assert_same(computed(ours, batch), computed(plain, batch))
    assert_ours(ours)


@pytest.mark.parametrize("autocast", [False, True])
def test_parameters_are_not_moved(autocast: bool) -> None:
    """Others may refer to their memory, as optimizers and processes do."""
    _, ours = pair("BertForMaskedLM")
    memory = [(p.untyped_storage()._cdata, p.data_ptr()) for p in ours.parameters()]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        computed(ours, batch_of(ours, mask_of(LENGTHS)))
    assert memory == [(p.untyped_storage()._cdata, p.data_ptr()) for p in ours.parameters()]
    assert_ours(ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_projections_are_copied_side_by_side(dtype: torch.dtype) -> None:
    _, ours, _ = used()
    groups = ours.bert._lightseq.family.groups(ours.bert)
    made = copies(groups, dtype)
    assert len(groups) == 4 and len(made) == 12
    for group in groups:
        parts = [made[id(p)] for p in group]
        assert as_one(parts).data_ptr() == parts[0].data_ptr()
        assert parts[0].data_ptr() % 64 == 0
        assert all(part.equal(p.to(dtype)) for part, p in zip(parts, group))


def test_only_what_is_to_be_moved_or_cast_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []

    def watched(blocks: Any, dtype: torch.dtype) -> Any:
        counts.append((sum(map(len, blocks)), dtype))
        return copies(blocks, dtype)

    monkeypatch.setattr(calls, "copies", watched)
    _, ours, batch = used()
    with torch.autocast("cpu", torch.bfloat16):
        ours(**batch)
        ours.bfloat16()(**batch)
    projections, layers = 2 * 6, 2 * 16
    assert counts == [
        (projections, torch.float32), (layers, torch.bfloat16), (projections, torch.bfloat16)
    ]  # fmt: skip
    assert_ours(ours)


def test_files_of_accelerate(tmp_path: Path) -> None:
    """Which takes parameters of one storage for tied ones."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from safetensors.torch import save_model

    AcceleratorState._reset_state(reset_partial_state=True)
    for name, model in zip(("plain", "ours"), used()):
        accelerator = Accelerator(cpu=True)
        prepared = accelerator.prepare(model)
        accelerator.save_state(tmp_path / name)
        save_model(accelerator.unwrap_model(prepared), tmp_path / name / "alone.safetensors")
    for name in ("model", "alone"):
        files = (tmp_path / kind / f"{name}.safetensors" for kind in ("ours", "plain"))
        found, expected = map(load_file, files)
        assert len(expected) > 40
        assert_bitwise(found, expected)
    AcceleratorState._reset_state(reset_partial_state=True)


FROZEN = {
    "embeddings": ("bert.embeddings",),
    "only the head trained": ("bert.",),
    "first layer": ("bert.embeddings", "bert.encoder.layer.0."),
    "queries": ("query", "LayerNorm.bias"),
    "biases": ("bias",),
}


@pytest.mark.parametrize("which", FROZEN)
@pytest.mark.parametrize("autocast", [False, True])
def test_frozen_parameters(which: str, autocast: bool) -> None:
    """Also those that are frozen or trained again after the first call."""
    plain, ours, batch = used("BertForSequenceClassification")
    for frozen in (FROZEN[which], ()):
        for model in (plain, ours):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(not any(part in name for part in frozen))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found, expected = computed(ours, batch), computed(plain, batch)
        if autocast:
            assert found.gradients.keys() == expected.gradients.keys()
            for name, gradient in expected.gradients.items():
                near = 0.1 * float(gradient.norm()) + 1e-4
                assert float((found.gradients[name] - gradient).norm()) < near, name
        else:
            assert_same(found, expected)
    assert_ours(ours)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "decoder": ("BertLMHeadModel", {"is_decoder": True}, "BertModel with a decoder (is_decoder)"),
    "cross attention": (
        "BertLMHeadModel", {"is_decoder": True, "add_cross_attention": True},
        "BertModel with a decoder (is_decoder)",
    ),
    "chunks": (
        "RobertaModel", {"chunk_size_feed_forward": 4},
        "RobertaModel with chunk_size_feed_forward 4",
    ),
    "wide heads": (
        "BertModel", {"hidden_size": 136, "num_attention_heads": 1},
        "BertModel with a head width of 136, which must be a multiple of 8 up to 128,",
    ),
    "odd heads": (
        "BertModel", {"hidden_size": 24, "num_attention_heads": 2},
        "BertModel with a head width of 12, which must be a multiple of 8 up to 128,",
    ),
    "odd width": (
        "CamembertModel", {"intermediate_size": 20},
        "CamembertModel with a feed-forward width of 20, which must be a multiple of 8,",
    ),
    "activation": ("BertModel", {"hidden_act": "mish"}, "BertModel with the activation mish"),
}  # fmt: skip


@pytest.mark.parametrize("which", REFUSED)
def test_refusals(which: str) -> None:
    name, config, what = REFUSED[which]
    model = nn.ModuleList([build("BertModel"), build(name, **config)])
    with pytest.raises(UserError) as raised:
        lightseq.accelerate(model)
    assert str(raised.value) == (
        f"{what} is not supported: use the plain model and Trainer of transformers."
    )
    with pytest.raises(UserError, match="is not accelerated"):  # nor is the other one
        lightseq.report(model)


def test_another_forward_of_the_encoder_is_refused() -> None:
    """It would hide ours."""
    model = build("BertForMaskedLM")
    model.bert.forward = model.bert.forward
    with pytest.raises(UserError, match=r"^BertModel with another forward, such as that of device"):
        lightseq.accelerate(model)


def test_a_forward_around_ours() -> None:
    _, ours, batch = used()
    ours.bert.forward = torch.no_grad()(ours.bert.forward)
    assert not ours.bert(batch["input_ids"]).last_hidden_state.requires_grad
    assert_ours(ours, 2)


def test_other_models_are_refused() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(vocab_size=24, **sizes))
    with pytest.raises(UserError) as raised:
        lightseq.accelerate(model)
    assert str(raised.value) == (
        "T5ForConditionalGeneration is not supported (supported: BERT, RoBERTa, XLM-R, CamemBERT, "
        "ModernBERT, BART, mBART, M2M-100, NLLB, Pegasus, Marian, ViT and GPT-2): use the plain "
        "model and Trainer of transformers."
    )


def test_a_name_is_no_model() -> None:
    name: Any = "roberta-base"
    with pytest.raises(UserError, match=r"needs a model, not 'roberta-base': load it first"):
        lightseq.accelerate(name)


def test_the_module_lists_its_public_names() -> None:
    """Also those that are imported at their first use; no inner ones, such as Any."""
    public = [name for name in dir(lightseq) if not name.startswith("_")]
    assert public == sorted(lightseq.__all__)
    assert all(hasattr(lightseq, name) for name in public)


def test_old_transformers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("BertModel")
    # transformers replaces its module when it imports a model.
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.57.1")
    with pytest.raises(UserError) as raised:
        lightseq.accelerate(model)
    assert str(raised.value) == (
        "lightseq.accelerate needs transformers 5, but 4.57.1 is installed: "
        "pip install --upgrade transformers"
    )


@pytest.mark.parametrize("mark", ["ds_id", "device_mesh"])
def test_divided_parameters_are_refused(mark: str) -> None:
    """As DeepSpeed's ZeRO-3 and FSDP have them."""
    _, ours, batch = used()
    weight = nn.Parameter(torch.zeros(16, 16))
    setattr(weight, mark, 1)
    ours.bert.encoder.layer[0].attention.self.query.weight = weight
    with pytest.raises(UserError) as raised:
        ours(**batch)
    assert str(raised.value) == (
        "FSDP and DeepSpeed's ZeRO-3 need Hugging Face's layers: use DDP, or remove "
        "lightseq.accelerate."
    )


def test_all_sizes_of_heads_are_supported() -> None:
    for width in (8, 128):
        plain, ours = pair("BertModel", hidden_size=width, num_attention_heads=1)
        batch = batch_of(plain, mask_of(LENGTHS))
        assert_same(computed(ours, batch), computed(plain, batch))
        assert_ours(ours)
