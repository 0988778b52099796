"""``--freeze``: frozen parameters keep their values, cost nothing, and the others train as in
fairseq."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import helpers.cli_runs as cli_runs
import helpers.parity as parity
import helpers.training_runs as runs
import pytest
import torch
from helpers.mutations import Arguments, change_op
from helpers.parity import LS, NATIVE, PRE_NORM, SHARED, command_line, compare, train

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.step.training_step import TrainingStep
from lightseq_fairseq.training import freezing

WIDE = {"encoder_embed_dim": 32, "encoder_ffn_embed_dim": 64, "encoder_attention_heads": 2}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize(
    ("patterns", "flags"),
    [
        ("encoder", {}),
        ("decoder.layers.0,encoder.layers.0", {"checkpoint_activations": True}),
        ("encoder,embed_tokens", {**PRE_NORM, **SHARED}),
        ("encoder.layers", {**PRE_NORM, **SHARED}),
        ("embed_tokens", {**SHARED, "layernorm_embedding": True, "encoder_learned_pos": True}),
        # One product reads the keys and values of all layers, and one q, k and v.
        ("decoder.layers.0,encoder.*.1.self_attn.[qk]_proj", {"activation_fn": "gelu"}),
        ("fc1.weight,out_proj.bias,layer_norm,*_layer_norm.weight", PRE_NORM),
        ("decoder.layers,decoder.embed_tokens", {"activation_fn": "gelu", **PRE_NORM}),
    ],
)
def test_updates_are_those_of_fairseq(
    corpus: Path, patterns: str, flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    build = parity.build

    def frozen(cfg: Any) -> Any:
        task, model, criterion = build(cfg)
        freezing.freeze(model, patterns)
        return task, model, criterion

    monkeypatch.setattr(parity, "build", frozen)
    steps: list[TrainingStep] = []
    begin = TrainingStep.set_state

    def noted(step: TrainingStep, *arguments: Any) -> None:
        steps.append(step)
        begin(step, *arguments)

    monkeypatch.setattr(TrainingStep, "set_state", noted)
    native = train(command_line(corpus, NATIVE, **flags), 4)
    ours = train(command_line(corpus, LS, **flags), 4)
    compare(ours, native)
    changed = {n for n, p in ours[-1].parameters.items() if (p != ours[0].parameters[n]).any()}
    assert 0 < len(changed) < len(ours[0].parameters)
    # Gradient and moments have room for the trained parameters alone.
    (step,) = steps
    count = sum(parameter.numel() for parameter in freezing.trained(step.model))
    vectors = len(freezing.trained(step.model))
    for state in (
        step.gradients.flat,
        step.optimizer.fused.exp_avg,
        step.optimizer.fused.exp_avg_sq,
    ):
        assert count <= len(state) <= count + 64 * vectors


def test_no_product_computes_the_gradient_of_a_frozen_weight(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing below the first trained layer is computed backward, or kept for it."""
    found: list[tuple[str, bool]] = []

    def noting(name: str, *gradients: str) -> None:
        def note(arguments: Arguments) -> None:
            found.append((name, any(arguments[each] is not None for each in gradients)))

        change_op(monkeypatch, name, note)

    noting("linear_bwd", "dweight", "dbias")
    noting("activation_linear_bwd", "dweight", "dbias")
    noting("embedding_bwd", "dweight", "dposition_weight")
    noting("dropout_residual_layer_norm_bwd", "dgamma", "dbeta", "dbias")
    noting("attention_bwd")
    names = "encoder,decoder.layers.0,decoder.embed_tokens"
    flags = {"decoder_layers": 2, "max_update": 1, "share_decoder_input_output_embed": None}
    runs.run(corpus, tmp_path, **runs.LS, **flags, freeze=names, no_save=True)
    # The output projection, and of layer 1: fc1 and fc2, two attentions, three ends. The product of
    # keys and values of both layers is trained, for layer 1, and has a gradient of its own.
    counted = {key: found.count(key) for key in set(found)}
    assert counted == {
        ("linear_bwd", True): 1 + 1 + 4 + 1,
        ("activation_linear_bwd", True): 1,
        ("dropout_residual_layer_norm_bwd", True): 3,
        ("attention_bwd", False): 2,
    }


@pytest.mark.parametrize("precision", [*runs.PRECISIONS, "fp8"])
def test_resumed_runs_are_equal(corpus: Path, tmp_path: Path, precision: str) -> None:
    """In mid-epoch, bit for bit; frozen parameters have the values of the first checkpoint."""
    flags = {**runs.LS, **WIDE, **runs.PRECISIONS.get(precision, {"bf16": True, "fp8": True})}
    flags |= {"freeze": "encoder,decoder.layers.0.fc1", "decoder_layers": 2}
    expected = runs.run(corpus, tmp_path / "whole", **flags, max_update=10)
    first = runs.run(corpus, tmp_path / "parts", **flags, max_update=4)
    before = runs.trained(tmp_path / "parts")
    rest = runs.run(corpus, tmp_path / "parts", **flags, max_update=10)
    assert first + rest == expected
    after = runs.trained(tmp_path / "parts")
    assert runs.differing(after, runs.trained(tmp_path / "whole")) == []
    names = [
        name for name in after if name.startswith("/model/") and name.endswith(("weight", "bias"))
    ]
    frozen = [n for n in names if "/encoder" in n or "decoder.layers.0.fc1" in n]
    assert {n for n in names if torch.equal(before[n], after[n])} == set(frozen) != set()
    with pytest.raises(UserError, match="reset the optimizer with --reset-optimizer"):
        runs.run(corpus, tmp_path / "parts", **{**flags, "freeze": None}, max_update=11)


def test_frozen_products_in_fp8_are_near_those_of_bf16(corpus: Path, tmp_path: Path) -> None:
    flags = {**runs.LS, **WIDE, **PRE_NORM, "bf16": True, "no_save": True, "max_update": 28}
    for place, names in enumerate(("encoder", "encoder.layers,decoder.layers")):
        near = runs.run(corpus, tmp_path / f"a{place}", **flags, freeze=names)
        losses = runs.run(corpus, tmp_path / f"b{place}", **flags, freeze=names, fp8=True)
        torch.testing.assert_close(losses, near, rtol=0.03, atol=0)
        assert losses != near


def test_fp8_refuses_a_part_of_a_product(corpus: Path, tmp_path: Path) -> None:
    flags = {**runs.LS, **WIDE, "bf16": True, "fp8": True, "freeze": "q_proj"}
    with pytest.raises(UserError, match=r"one product with .*q_proj.weight and .*v_proj.weight, b"):
        runs.run(corpus, tmp_path, **flags)


def test_the_command(binarised: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With workers: ours and fairseq's train the same parameters, and each fine-tunes the other's
    checkpoint without the flag."""
    caplog.set_level(logging.INFO)
    data = binarised
    small = [word for word in cli_runs.SMALL if word not in ("--num-workers", "0")]
    words = ("--arch", "ls_transformer_tiny", *small, "--dropout", 0, "--freeze", "encoder")
    words += "--attention-dropout", 0, "--activation-dropout", 0
    folders = [tmp_path / name for name in ("ours", "native")]
    for folder, more in zip(folders, ([], ["--native"]), strict=True):
        output = cli_runs.succeed("train", data, *words, *more, "--save-dir", folder)
        assert "--freeze encoder" in output.splitlines()[0]
    assert len(re.findall("parameters, .* trained", caplog.text)) == 2
    assert "step: without CUDA graphs, without padding" in caplog.text
    ours, native = (
        torch.load(folder / "checkpoint_last.pt", weights_only=False) for folder in folders
    )
    assert ours["model"].keys() == native["model"].keys()
    for name, value in native["model"].items():
        if name.endswith("k_proj.bias"):  # see `parity.Deviation`
            continue
        tolerance = 0 if name.startswith("encoder") else 1e-5
        torch.testing.assert_close(ours["model"][name], value, rtol=0, atol=tolerance)
    states = [x["last_optimizer_state"]["state"] for x in (ours, native)]
    assert len(states[0]) == len(states[1]) < len(ours["model"])
    for mine, theirs in (folders, folders[::-1]):
        tuning = ("--finetune-from-model", theirs / "checkpoint_last.pt")
        more = ["--native"] * (mine.name == "native")
        arguments = (*words[:-8], *words[-4:], *tuning, *more)
        cli_runs.succeed("train", data, *arguments, "--save-dir", tmp_path / f"next-{mine.name}")


@pytest.mark.parametrize("native", [[], ["--native"]])
@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (
            "encodr",
            "--freeze encodr matches no parameter of the model, whose names have these parts: "
            "bias, decoder, embed_tokens, encoder, encoder_attn, ",
        ),
        ("", "--freeze  matches no parameter of the model, whose names have these parts: bias"),
        ("encoder,decoder", "--freeze encoder,decoder leaves no parameter to train: name fewer."),
    ],
)
def test_bad_names(binarised: Path, tmp_path: Path, names: str, sentence: str, native: Any) -> None:
    words = ("--arch", "ls_transformer_tiny", *cli_runs.SMALL, "--freeze", names, *native)
    result = cli_runs.run("train", binarised, *words, "--save-dir", tmp_path / "run")
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stderr.splitlines()[-1].startswith(f"lightseq-train: error: {sentence}")
    assert "Traceback" not in result.output
    assert not list(tmp_path.glob("run/*.pt"))


@pytest.mark.parametrize("flags", [{"freeze": "encoder,fc1"}, {"lora_rank": 4}])
def test_sharded_ranks_train_the_same(corpus: Path, tmp_path: Path, flags: dict[str, Any]) -> None:
    flags = {**runs.LS, "bf16": True, "max_update": 5, **flags}
    whole = runs.run_ranks(corpus, tmp_path / "whole", 2, **flags)
    sharded = runs.run_ranks(corpus, tmp_path / "sharded", 2, **flags, zero_sharding="os")
    torch.testing.assert_close(sharded, whole, rtol=1e-5, atol=0)
    files = [runs.trained(tmp_path / name) for name in ("whole", "sharded")]
    assert files[0].keys() == files[1].keys()
    for name, value in files[0].items():
        torch.testing.assert_close(files[1][name], value, rtol=1e-3, atol=1e-5)
