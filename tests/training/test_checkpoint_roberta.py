"""Checkpoints of RoBERTa go from fairseq to us and back, and training goes on as if never ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import helpers.parity as parity
import helpers.training_runs as runs
import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.models.roberta import RobertaModel

from lightseq_fairseq.fairseq_compat import patching
from lightseq_fairseq.plugins.roberta import LSRobertaModel

NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    parity.write_text(folder / "text")
    parity.write_classes(folder / "classes")
    parity.write_classes(folder / "numbers", numbers=2)
    return folder


def train(data: Path, folder: Path, ours: bool = True, **flags: Any) -> list[float]:
    flags = {**(runs.MASKED if data.name == "text" else runs.CLASSES), **flags}
    if not ours:
        parts = ("arch", "optimizer", "criterion")
        flags |= {name: flags[name].removeprefix("ls_") for name in parts}
    return runs.run(data, folder, native=not ours, **flags)


KINDS: dict[str, dict[str, Any]] = {
    "text": {},
    "classes": {},
    "numbers": {"num_classes": 2, "regression_target": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_files_go_out_and_in(data: Path, tmp_path: Path, kind: str) -> None:
    flags = {**NO_DROPOUT, "pooler_dropout": None, **KINDS[kind]}
    whole = train(data / kind, tmp_path / "whole", False, max_update=10, **flags)
    for first in (True, False):
        folder = tmp_path / f"ls{first}"
        losses = train(data / kind, folder, first, max_update=5, **flags)
        losses += train(data / kind, folder, not first, max_update=10, **flags)
        assert losses == pytest.approx(whole, rel=1e-5)
        assert b"ls_" not in (folder / "checkpoint_last.pt").read_bytes()


@pytest.mark.parametrize("precision", [{}, {"bf16": True}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_goes_on_in_mid_epoch(
    data: Path, tmp_path: Path, kind: str, precision: dict[str, Any]
) -> None:
    flags = {**KINDS[kind], **precision}
    whole = train(data / kind, tmp_path / "whole", max_update=12, **flags)
    parts = train(data / kind, tmp_path / "parts", max_update=4, **flags)
    parts += train(data / kind, tmp_path / "parts", max_update=12, **flags)
    assert parts == whole and len(set(whole)) == len(whole) == 12
    both = [runs.trained(tmp_path / name) for name in ("whole", "parts")]
    assert runs.differing(*both) == []


def test_fine_tuning_begins_with_either_file(data: Path, tmp_path: Path) -> None:
    flags = {**NO_DROPOUT, "pooler_dropout": None, "max_update": 4}
    found = []
    for pretrained in (True, False):
        path = tmp_path / f"pretrained{pretrained}"
        train(data / "text", path, pretrained, **{**flags, "pooler_dropout": None})
        for ours in (True, False):
            folder = tmp_path / f"tuned{pretrained}{ours}"
            start = {"finetune_from_model": str(path / "checkpoint_last.pt")}
            found.append(train(data / "classes", folder, ours, **flags, **start))
    for losses in found[1:]:
        assert losses == pytest.approx(found[0], rel=1e-5)
    assert found[0] != pytest.approx(train(data / "classes", tmp_path / "x", **flags), rel=1e-5)


@pytest.mark.parametrize("ours", [True, False])
def test_commands_build_our_model(data: Path, tmp_path: Path, ours: bool) -> None:
    train(data / "classes", tmp_path, ours, max_update=1)
    path = str(tmp_path / "checkpoint_last.pt")
    load = checkpoint_utils.load_checkpoint_to_cpu
    tokens = torch.tensor([[0, 9, 17, 2], [0, 4, 2, 1]])
    head = {"classification_head_name": "sentence_classification_head"}
    outputs = []
    for phase, kind in (("our models", LSRobertaModel), ("fairseq's models", RobertaModel)):
        with mock.patch.object(checkpoint_utils, "load_checkpoint_to_cpu", load):
            patching.apply(phase)
            (model,), _ = checkpoint_utils.load_model_ensemble([path])
        assert type(model) is kind
        with torch.no_grad():
            outputs.append(model.eval()(tokens, **head)[0])
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)


def test_heads_come_with_a_file(data: Path, tmp_path: Path) -> None:
    train(data / "classes", tmp_path, max_update=3)
    state = torch.load(tmp_path / "checkpoint_last.pt", weights_only=False)
    task = parity.build(parity.parse(parity.command_line(data / "text", **parity.MASKED)))[0]
    state["cfg"]["model"].load_checkpoint_heads = True
    state["cfg"]["model"].arch = "ls_roberta_base"
    model = LSRobertaModel.build_model(state["cfg"]["model"], task)
    assert not model.classification_heads
    model.load_state_dict(state["model"], strict=True)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state["model"][name]), name
    assert "classification_heads.sentence_classification_head.dense.weight" in model.state_dict()


def test_files_of_the_first_roberta(data: Path) -> None:
    """RoBERTa, XLM-R and CamemBERT were published with the names of fairseq 0.8."""
    argv = parity.command_line(data / "text", **parity.MASKED)
    _, model, _ = parity.build(parity.parse(argv))
    expected = {name: torch.rand_like(value) for name, value in model.named_parameters()}
    expected["encoder.lm_head.weight"] = expected["encoder.sentence_encoder.embed_tokens.weight"]
    old: dict[str, torch.Tensor] = {}
    for name, value in expected.items():
        *layer, projection, kind = name.split(".")
        if projection == "q_proj":
            parts = [expected[".".join([*layer, f"{x}_proj", kind])] for x in "qkv"]
            name, value = ".".join([*layer, f"in_proj_{kind}"]), torch.cat(parts)
        elif projection in ("k_proj", "v_proj"):
            continue
        name = name.replace("layernorm_embedding", "emb_layer_norm")
        old["decoder" + name.removeprefix("encoder")] = value
    model.load_state_dict(old, strict=True)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name]), name
