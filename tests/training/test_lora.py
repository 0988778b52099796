"""``--lora-rank``: adapters train as plain torch's, resume, and are added to the weights."""

from __future__ import annotations

import json
import logging
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import helpers.cli_runs as cli_runs
import helpers.parity as parity
import helpers.training_runs as runs
import pytest
import safetensors.torch
import torch
from fairseq import checkpoint_utils
from helpers.parity import LS, NATIVE, PRE_NORM, SHARED, command_line, train
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lightseq_fairseq import ops
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.checkpoints import models
from lightseq_fairseq.layers.adapter import FIRST_SITE, Adapter, adapters_of, merged
from lightseq_fairseq.layers.linear import _Linear
from lightseq_fairseq.layers.node import Input, apply
from lightseq_fairseq.layers.weight import Weight
from lightseq_fairseq.training import lora

RANK, ALPHA = 3, 5.0


class PlainLora(nn.Module):
    """W + alpha / rank * B A, for torch's parametrization of a weight."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.A, self.B = nn.Parameter(a), nn.Parameter(b)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + ALPHA / RANK * self.B @ self.A


def first_values(name: str, layer: nn.Linear) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    shapes = (RANK, layer.in_features), (layer.out_features, RANK)
    a, b = (0.1 * torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return a, b


@pytest.mark.parametrize(
    ("names", "flags"),
    [
        ("q,v", {}),
        ("q,k,v,out,fc1,fc2", {**PRE_NORM, **SHARED, "activation_fn": "gelu"}),
        ("decoder.layers.1,encoder.*.0.fc2", {"checkpoint_activations": True}),
    ],
)
def test_updates_are_those_of_plain_torch(
    data: Path, names: str, flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, from fairseq's model with torch's parametrization of the same weights."""
    build, chosen = parity.build, []

    def ours(cfg: Any) -> Any:
        task, model, criterion = build(cfg)
        model.double()
        common = Namespace(lora_rank=RANK, lora_alpha=ALPHA, lora_on=names)
        lora.add(model, common)
        for name in adapters_of(model):
            layer = model.get_submodule(name.removesuffix(".lora"))
            with torch.no_grad():
                for own, value in zip((layer.lora.A, layer.lora.B), first_values(name, layer)):
                    own.copy_(value)
            chosen.append(name)
        return task, model, criterion

    def theirs(cfg: Any) -> Any:
        task, model, criterion = build(cfg)
        model.double().requires_grad_(False)
        for name in chosen:
            layer = model.get_submodule(name.removesuffix(".lora"))
            parametrize.register_parametrization(
                layer, "weight", PlainLora(*first_values(name, layer))
            )
        return task, model, criterion

    monkeypatch.setattr(parity, "build", ours)
    found = train(command_line(data, LS, **flags), 5)
    monkeypatch.setattr(parity, "build", theirs)
    plain = train(command_line(data, NATIVE, **{**flags, "checkpoint_activations": None}), 5)
    assert chosen
    for mine, other in zip(found, plain, strict=True):
        assert mine.loss == pytest.approx(other.loss, rel=1e-9)
        assert mine.norm == pytest.approx(other.norm, rel=1e-9)
        for name in chosen:
            prefix = f"{name.removesuffix('.lora')}.parametrizations.weight.0"
            for part in "AB":
                pair = mine.parameters[f"{name}.{part}"], other.parameters[f"{prefix}.{part}"]
                torch.testing.assert_close(*pair, rtol=0, atol=1e-9)
    first, last = found[0].parameters, found[-1].parameters
    moved = {name for name in first if not torch.equal(first[name], last[name])}
    assert moved == {f"{name}.{part}" for name in chosen for part in "AB"}


def test_dropout_and_its_gradient() -> None:
    """Of the product of two layers, one of which has an adapter."""
    torch.manual_seed(1)
    plain, layer = nn.Linear(6, 5).double(), nn.Linear(6, 4).double()
    layer.lora = Adapter(layer, 2, 3.0, 0.5, FIRST_SITE)
    nn.init.normal_(layer.lora.B)
    x = torch.randn(7, 6, dtype=torch.float64, requires_grad=True)
    rng = torch.tensor([3, 4])
    weight = Weight.of(plain, layer, rng=rng)
    (result,) = apply(_Linear(weight), Input(x))
    kept = ops.dropout_mask(rng, FIRST_SITE, 7, 6, 0.5)
    assert 0 < kept.sum() < kept.numel()
    added = 1.5 * (2.0 * kept * x) @ layer.lora.A.t() @ layer.lora.B.t()
    expected = torch.cat([plain(x), layer(x) + added], 1)
    torch.testing.assert_close(result.x, expected)
    leaves = [x, *plain.parameters(), *layer.parameters()]
    dy = torch.randn_like(expected)
    mine, theirs = (torch.autograd.grad(y, leaves, dy) for y in (result.x, expected))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)
    layer.eval()
    (result,) = apply(_Linear(Weight.of(layer)), Input(x))
    torch.testing.assert_close(result.x, layer(x) + layer.lora(x))


@pytest.mark.parametrize("precision", runs.PRECISIONS)
def test_runs_resume_exactly(data: Path, tmp_path: Path, precision: str) -> None:
    flags = {**runs.LS, **runs.PRECISIONS[precision], "lora_rank": 8, "lora_dropout": 0.2}
    flags |= {"lora_on": "q,v,fc1", "share_all_embeddings": True}
    whole = runs.run(data, tmp_path / "whole", **flags)
    first = runs.run(data, tmp_path / "parts", **flags, max_update=5)
    assert first + runs.run(data, tmp_path / "parts", **flags) == whole
    trained = [runs.trained(tmp_path / name) for name in ("whole", "parts")]
    assert runs.differing(*trained) == []
    state = torch.load(tmp_path / "parts/checkpoint_last.pt", weights_only=False)
    names = {name for name in state["model"] if ".lora." in name}
    moments = [x["exp_avg"] for x in state["last_optimizer_state"]["state"].values()]
    sizes = [x.numel() for n, x in state["model"].items() if n in names and x.dim() == 2]
    assert sum(moment.numel() for moment in moments) == sum(sizes) > 0
    assert not [name for name in state["cfg"]["common"] if "lora" in name]


OTHERS: dict[str, dict[str, Any]] = {
    "rank": {"lora_rank": 8, "lora_alpha": 8},
    "alpha": {"lora_rank": 4, "lora_alpha": 100},
    "more layers": {"lora_rank": 4, "lora_alpha": 8, "lora_on": "q,v,fc1"},
    "fewer layers": {"lora_rank": 4, "lora_alpha": 8, "lora_on": "v"},
    "none": {},
}
_TOLD = {
    "rank": "rank 8, alpha 8, 6 layers: v_proj, q_proj",
    "alpha": "rank 4, alpha 100, 6 layers: v_proj, q_proj",
    "more layers": "rank 4, alpha 8, 8 layers: v_proj, q_proj, fc1",
    "fewer layers": "rank 4, alpha 8, 3 layers: v_proj",
    "none": "none",
}


@pytest.fixture(scope="module")
def of_rank_4(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rank4")
    runs.run(data, folder, **runs.LS, lora_rank=4, max_update=6, lr=0.05)
    return folder


@pytest.mark.parametrize("case", OTHERS)
def test_a_run_resumes_only_its_own_adapters(
    case: str, data: Path, tmp_path: Path, of_rank_4: Path
) -> None:
    shutil.copytree(of_rank_4, tmp_path / "run")
    with pytest.raises(UserError) as caught:
        runs.run(data, tmp_path / "run", **runs.LS, **OTHERS[case], max_update=8)
    assert str(caught.value).startswith(
        "The adapters of the checkpoint (rank 4, alpha 8, 6 layers: v_proj, q_proj) are not those "
        f"of this run ({_TOLD[case]}): to resume, set --lora-rank, "
    )


def test_adapters_do_not_resume_from_a_plain_run(data: Path, tmp_path: Path) -> None:
    runs.run(data, tmp_path, **runs.LS, max_update=2)
    with pytest.raises(UserError, match=r"^The adapters of the checkpoint \(none\) are not those "):
        runs.run(data, tmp_path, **runs.LS, lora_rank=4, max_update=4)


@pytest.mark.parametrize(
    ("case", "precision"),
    [("rank", "bf16"), ("more layers", "fp32"), ("fewer layers", "fp32"), ("none", "bf16")],
)
def test_a_run_with_other_adapters_begins_with_the_sums(
    case: str, precision: str, data: Path, tmp_path: Path, of_rank_4: Path
) -> None:
    """Of the weights and the adapters of the checkpoint; frozen ones are in 16 bits with --bf16."""
    file = of_rank_4 / "checkpoint_last.pt"
    sums = merged(torch.load(file, weights_only=False)["model"])
    flags = {**runs.LS, **runs.PRECISIONS[precision], "finetune_from_model": str(file)}
    flags |= {"max_update": 1, "lr": 1e-9, "weight_decay": 0}
    runs.run(data, tmp_path, **flags, **OTHERS[case])
    found = torch.load(tmp_path / "checkpoint_last.pt", weights_only=False)["model"]
    assert {name for name in found if ".lora." not in name} == set(sums)
    adapters = {name: value for name, value in found.items() if ".lora." in name}
    stored = torch.bfloat16 if adapters and precision == "bf16" else torch.float32
    for name, value in sums.items():
        torch.testing.assert_close(found[name], value.to(stored).float(), rtol=0, atol=1e-6)
    assert lora._told(adapters) == _TOLD[case]
    for name, value in adapters.items():
        if name.endswith("B"):
            assert value.abs().max() < 1e-6


def test_adapters_train_further_from_a_checkpoint(
    data: Path, tmp_path: Path, of_rank_4: Path
) -> None:
    """Those of the same layers, rank and alpha; the weights stay."""
    file = of_rank_4 / "checkpoint_last.pt"
    runs.run(
        data, tmp_path, **runs.LS, lora_rank=4, max_update=1, lr=1e-9, finetune_from_model=str(file)
    )
    before, after = (
        torch.load(x, weights_only=False)["model"] for x in (file, tmp_path / "checkpoint_last.pt")
    )
    assert before.keys() == after.keys()
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, rtol=0, atol=1e-6)


def test_adapters_are_added_when_a_file_is_read(
    binarised: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With workers: fine-tuning a model, then translating, validating, averaging and exporting."""
    caplog.set_level(logging.INFO)
    small = ("--arch", "ls_transformer_tiny", *cli_runs.SMALL)
    cli_runs.succeed("train", binarised, *small, "--save-dir", tmp_path / "base")
    base = tmp_path / "base/checkpoint_last.pt"
    words = ("--finetune-from-model", base, "--lora-rank", 4, "--lora-on", "q,k,v,out,fc1,fc2")
    words += ("--lora-alpha", 400, "--max-update", 8, "--num-workers", 2, "--lr", 0.05)
    words += "--optimizer", "ls_adam", "--criterion", "ls_cross_entropy"
    caplog.clear()
    cli_runs.succeed("train", binarised, *small, *words, "--save-dir", tmp_path / "run")
    assert "step: without CUDA graphs, without padding" in caplog.text
    file = tmp_path / "run/checkpoint_last.pt"
    state = torch.load(file, weights_only=False)
    before = torch.load(base, weights_only=False)["model"]
    plain = merged(state["model"])
    assert plain.keys() == before.keys()
    for name, value in before.items():
        assert torch.equal(state["model"][name], value)
        is_changed = name.endswith(("_proj.weight", "fc1.weight", "fc2.weight"))
        assert torch.equal(plain[name], value) != (is_changed and "output" not in name)
    # The loss of validation within the run is that of the merged weights.
    wanted = [line for line in caplog.text.splitlines() if "valid on" in line and "loss" in line]
    found = cli_runs.validated(
        binarised, "--path", file, "--valid-subset", "valid", "--cpu",
        "--max-tokens", 200, "--num-workers", 0, "--task", "translation",
    )  # fmt: skip
    losses = [float(line.split(" loss ")[1].split()[0]) for line in (wanted[-1], found)]
    assert losses[0] == pytest.approx(losses[1], abs=2e-3)

    def translated(path: Path, *more: str) -> list[str]:
        arguments = (binarised, "--path", path, "--cpu", "--num-workers", 0, *more)
        lines = cli_runs.succeed("generate", *arguments).splitlines()
        return sorted(line for line in lines if line.startswith("D-"))

    expected = translated(file)
    assert expected != translated(base)
    exported, average = tmp_path / "plain.pt", tmp_path / "average.pt"
    cli_runs.succeed("export", file, "--to", "fairseq", "--output", exported)
    cli_runs.succeed("average", "--inputs", file, file, "--output", average)
    texts = [[line.split("\t")[2] for line in translated(path)] for path in (exported, average)]
    assert texts[0] == texts[1] == [line.split("\t")[2] for line in expected]
    assert [line.split("\t")[2] for line in translated(file, "--native")] == texts[0]
    # Training goes on from merged weights without the flag.
    again = ("--finetune-from-model", file, "--save-dir", tmp_path / "next")
    cli_runs.succeed("train", binarised, *small, *again)


def test_outputs_are_equal_before_and_after_merging(data: Path, tmp_path: Path) -> None:
    cfg = runs.configure(data, tmp_path, runs.LS)
    task, model, _ = parity.build(cfg)
    model.eval()
    lora.add(model, Namespace(lora_rank=4, lora_on="q,k,v,out,fc1,fc2"))
    for adapter in adapters_of(model).values():
        nn.init.normal_(adapter.B, std=0.3)
    _, plain, _ = parity.build(cfg)
    plain.load_state_dict(merged(model.state_dict()))
    sample = task.dataset("train").collater([task.dataset("train")[i] for i in range(8)])
    with torch.no_grad():
        outputs = [m.eval()(**sample["net_input"])[0] for m in (model, plain, parity.build(cfg)[1])]
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=1e-6 * outputs[1].abs().max())
    assert (outputs[0] - outputs[2]).abs().max() > 0.1


@pytest.mark.parametrize(
    ("names", "norm", "others"),
    [
        ("q,v", {}, {"fc1"}),
        ("decoder.layers.*.encoder_attn.q,fc1", PRE_NORM, {"self_attn.q_proj"}),
    ],
)
def test_other_products_are_in_fp8(
    data: Path, tmp_path: Path, names: str, norm: dict[str, Any], others: set[str]
) -> None:
    """Those with adapters are in bf16, and so is cross attention if one of its products is."""
    run = {**runs.LS, **norm, "encoder_embed_dim": 32, "encoder_ffn_embed_dim": 64, "bf16": True}
    run |= {"encoder_attention_heads": 2, "no_epoch_checkpoints": True, "max_update": 21}
    base, tuned = tmp_path / "base/checkpoint_last.pt", tmp_path / "fp8/checkpoint_last.pt"
    runs.run(data, base.parent, **{**run, "max_update": 2})
    run |= {"lora_rank": 16, "lora_on": names, "lr": 0.02}
    near = runs.run(data, tmp_path / "bf16", **run, finetune_from_model=str(base))
    losses = runs.run(data, tuned.parent, **run, finetune_from_model=str(base), fp8=True)
    assert losses != near
    torch.testing.assert_close(losses, near, rtol=0.03, atol=0)
    assert sum(losses[-7:]) < 0.95 * sum(losses[:7])
    scales = torch.load(tuned, weights_only=False)["extra_state"]["lightseq_fp8"]
    others |= {"self_attn.out_proj", "encoder_attn.out_proj", "fc2"}
    assert {x.split("layers.0.")[1] for x in scales} == {f"{other}.weight" for other in others}
    run |= {"restore_file": str(tuned), "max_update": 24, "no_save": True, "fp8": True}
    assert len(runs.run(data, tmp_path / "next", **run)) == 3


@pytest.mark.parametrize("family", ["bart", "classes"])
def test_the_file_for_peft(tmp_path: Path, family: str) -> None:
    """Its keys and shapes are those of layers of the exported base model; base + adapters is the
    exported merged model; `peft` agrees."""
    is_classes = family == "classes"
    data = (parity.write_classes if is_classes else parity.write_corpus)(tmp_path / "raw")
    flags = {**(runs.CLASSES if is_classes else runs.BART), "max_update": 6}
    flags |= {} if is_classes else {"share_all_embeddings": True}
    base, run = tmp_path / "base", tmp_path / "run"
    runs.run(data, base, **flags)
    more = {"lora_rank": 4, "lora_alpha": 12, "lora_on": "q,v,decoder.*.*.fc1"}
    more |= {"lora_on": "q,fc2"} if is_classes else {}
    more |= {"finetune_from_model": str(base / "checkpoint_last.pt")}
    runs.run(data, run, **flags, **more)

    def exported(folder: Path, to: str, name: str) -> dict[str, Tensor]:
        words = (folder / "checkpoint_last.pt", "--to", to, "--output", folder / to)
        cli_runs.succeed("export", *words, *(("--data", data) if to == "huggingface" else ()))
        return safetensors.torch.load_file(folder / to / name)

    before, after = (exported(x, "huggingface", "model.safetensors") for x in (base, run))
    adapters = exported(run, "peft", "adapter_model.safetensors")
    config = json.loads((run / "peft/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 12.0, "LORA")
    assert config["task_type"] == ("SEQ_CLS" if is_classes else "SEQ_2_SEQ_LM")
    sums = dict(before)
    for name in config["target_modules"]:
        a, b = (adapters.pop(f"base_model.model.{name}.lora_{part}.weight") for part in "AB")
        assert len(a) == 4 and b.shape[1] == 4
        sums[f"{name}.weight"] = sums[f"{name}.weight"] + 12 / 4 * b @ a
    for name, value in adapters.items():
        words = name.removeprefix("base_model.model.")
        assert words.split(".")[0] in (config["modules_to_save"] or ())
        sums[words] = value
    assert bool(adapters) == is_classes
    assert sums.keys() == after.keys()
    changed = [name for name in after if not torch.equal(before[name], after[name])]
    assert changed
    for name, value in after.items():
        torch.testing.assert_close(sums[name], value, rtol=0, atol=1e-6)
    words = (base / "checkpoint_last.pt", "--to", "peft", "--output", tmp_path / "none")
    result = cli_runs.run("export", *words)
    assert result.exit_code == 2 and "The checkpoint has no adapters, which --" in result.stderr
    # peft reads it, and computes what our model computes.
    peft = pytest.importorskip("peft", reason="peft is not installed")
    kind = "SequenceClassification" if is_classes else "Seq2SeqLM"
    auto = getattr(pytest.importorskip("transformers"), f"AutoModelFor{kind}")
    plain, whole = (auto.from_pretrained(folder / "huggingface") for folder in (base, run))
    with models.building(native=False):
        (ours,), _ = checkpoint_utils.load_model_ensemble([str(run / "checkpoint_last.pt")])
    tokens = torch.tensor([[0, 9, 30, 41, 7, 2], [0, 12, 2, 1, 1, 1]])
    real = tokens.ne(1)
    inputs = {"input_ids": tokens, "attention_mask": real}
    ours.eval()
    with torch.no_grad():
        if is_classes:
            name = "sentence_classification_head"
            wanted = ours(tokens, features_only=True, classification_head_name=name)[0]
            real = torch.tensor([True, True])
        else:
            wanted = ours(tokens, real.sum(1), tokens)[0]
            inputs["decoder_input_ids"] = tokens
        unadapted, sum_of_both = (model(**inputs).logits for model in (plain, whole))
        found = peft.PeftModel.from_pretrained(plain, run / "peft").eval()(**inputs).logits
    for expected in (wanted, sum_of_both):
        torch.testing.assert_close(found[real], expected[real], rtol=0, atol=1e-5)
    assert (found - unadapted)[real].abs().max() > 1e-3


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--lora-rank 0", "--lora-rank is 0, but must be at least 1: change it."),
        ("--lora-rank 4 --lora-alpha 0", "--lora-alpha is 0.0, but must be above 0: change it."),
        (
            "--lora-rank 4 --lora-dropout 1",
            "--lora-dropout is 1.0, but must be at least 0 and below 1: change it.",
        ),
        ("--lora-on q", "--lora-on needs --lora-rank, as in --lora-rank 16: add it, or remove "),
        ("--lora-rank 4 --native", "--lora-rank needs our layers: use an --arch that begins wi"),
        ("--lora-rank 4 --lora-on query", "--lora-on query matches no linear layer of the model"),
        (
            "--lora-rank 4 --lora-on q,out,fc1,fc2 --bf16 --fp8",
            "--fp8 has no product to compute, because --lora-on has adapters on all of them",
        ),
    ],
)
def test_bad_flags(binarised: Path, tmp_path: Path, words: str, sentence: str) -> None:
    arguments = ("--arch", "ls_transformer_tiny", *cli_runs.SMALL, *words.split())
    result = cli_runs.run("train", binarised, *arguments, "--save-dir", tmp_path / "run")
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stderr.splitlines()[-1].startswith(f"lightseq-train: error: {sentence}")
    assert "Traceback" not in result.output
