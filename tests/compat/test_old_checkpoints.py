"""Checkpoints of other fairseq versions, made by rearranging files of fairseq's own Trainer."""

from __future__ import annotations

import re
import shlex
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.cli_runs import run, succeed
from helpers.loaded import logits
from helpers.searches import difference_of_lines
from torch import Tensor

import helpers.training_runs as runs  # isort: skip  (fairseq has to be prepared before)

from fairseq.modules.transformer_layer import TransformerEncoderLayerBase

from lightseq_fairseq.base.errors import UserError

State = dict[str, Any]

# No dropout, because the masks of ours and of fairseq differ.
FLAGS: dict[str, Any] = {"dropout": 0, "attention_dropout": 0, "activation_dropout": 0}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp16": {"fp16": True, "fp16_init_scale": 64, "fp16_scale_window": 3},
}
# fairseq's files hold 16-bit weights, which are rounded, so the losses cannot agree more closely.
TOLERANCE = {"fp32": 1e-5, "fp16": 1e-2}
ARCHS: dict[str, dict[str, Any]] = {
    "post-norm, tied target": {},
    "pre-norm, nothing tied": {
        "encoder_normalize_before": True,
        "decoder_normalize_before": True,
        "share_decoder_input_output_embed": None,
    },
}


@pytest.fixture(autouse=True)
def flat_fp16_on_cpu() -> Any:
    """fairseq asks CUDA for the device of its flat vector; None stands for the CPU."""
    with mock.patch.object(torch.cuda, "current_device", lambda: None):
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.corpus(tmp_path_factory.mktemp("corpus"))


class NativeRun:
    """Eight updates by fairseq; ``path`` is the checkpoint after the fourth."""

    def __init__(self, data: Path, folder: Path, flags: dict[str, Any]) -> None:
        self.data, self.flags = data, {**FLAGS, **flags}
        everything = {**runs.NATIVE, **self.flags, "save_interval_updates": 4}
        with mock.patch.object(torch.cuda, "current_device", lambda: None):
            self.losses = runs.run(data, folder, native=True, **everything, max_update=8)
        self.path, self.end = folder / "checkpoint_1_4.pt", folder / "checkpoint_last.pt"

    def state(self) -> State:
        state: State = torch.load(self.path, weights_only=False)
        return state

    def continued(self, path: Path, **flags: Any) -> list[float]:
        """The losses of our run that resumes from ``path``."""
        everything = {**runs.LS, **self.flags, "restore_file": path, "max_update": 8, **flags}
        return runs.run(self.data, path.with_suffix(""), **everything)


@pytest.fixture(scope="module")
def native(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., NativeRun]:
    made: dict[tuple[str, ...], NativeRun] = {}

    def get(precision: str, arch: str) -> NativeRun:
        if (precision, arch) not in made:
            folder = tmp_path_factory.mktemp("native")
            flags = {**PRECISIONS[precision], **ARCHS[arch]}
            made[precision, arch] = NativeRun(data, folder, flags)
        return made[precision, arch]

    return get


def saved(state: State, path: Path) -> Path:
    torch.save(state, path)
    return path


# The names of fairseq 0.6, layer by layer, in the order in which it registered them.

NORMS = {
    "encoder": ("self_attn_layer_norm", "final_layer_norm"),
    "decoder": ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"),
}


def old_layout(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """The values of parameters under the names of fairseq 0.6, and in its order."""
    old: dict[str, Tensor] = {}
    for side in ("encoder", "decoder"):
        projection = values.get("decoder.output_projection.weight")
        table = values.get("decoder.embed_tokens.weight")
        if side == "decoder" and projection is not None and not torch.equal(projection, table):
            old["decoder.embed_out"] = projection  # it belongs to the decoder, so it comes first
        old[f"{side}.embed_tokens.weight"] = values[f"{side}.embed_tokens.weight"]
        layers = {m[0] for m in (re.match(rf"{side}\.layers\.\d+", n) for n in values) if m}
        for layer in sorted(layers):
            for block in ("self_attn", "encoder_attn")[: len(NORMS[side]) - 1]:
                for kind in ("weight", "bias"):
                    old[f"{layer}.{block}.in_proj_{kind}"] = torch.cat(
                        [values[f"{layer}.{block}.{p}_proj.{kind}"] for p in "qkv"]
                    )
                for kind in ("weight", "bias"):
                    name = f"{layer}.{block}.out_proj.{kind}"
                    old[name] = values[name]
            for part in ("fc1", "fc2"):
                for kind in ("weight", "bias"):
                    old[f"{layer}.{part}.{kind}"] = values[f"{layer}.{part}.{kind}"]
            for place, norm in enumerate(NORMS[side]):
                for kind in ("weight", "bias"):
                    old[f"{layer}.layer_norms.{place}.{kind}"] = values[f"{layer}.{norm}.{kind}"]
        for kind in ("weight", "bias"):
            if f"{side}.layer_norm.{kind}" in values:
                old[f"{side}.layer_norm.{kind}"] = values[f"{side}.layer_norm.{kind}"]
    return old


def parameters(state: State) -> dict[str, Tensor]:
    return {n: v for n, v in state["model"].items() if not n.endswith(("version", "_float_tensor"))}


def before_0_10(state: State) -> State:
    """The same training state as fairseq 0.6 would have saved it."""
    values = parameters(state)
    tied = torch.equal(
        values["decoder.output_projection.weight"], values["decoder.embed_tokens.weight"]
    )
    counted = [n for n in values if not (tied and n == "decoder.output_projection.weight")]
    optimizer = state["last_optimizer_state"]
    entries = optimizer["state"]
    moments = {}
    for kind in ("exp_avg", "exp_avg_sq"):
        if len(entries) == 1:
            pieces = entries[0][kind].split([values[n].numel() for n in counted])
        else:
            pieces = [entries[i][kind] for i in range(len(counted))]
        shaped = {n: p.view_as(values[n]) for n, p in zip(counted, pieces, strict=True)}
        if tied:
            shaped["decoder.output_projection.weight"] = shaped["decoder.embed_tokens.weight"]
        moments[kind] = list(old_layout(shaped).values())
    step = entries[0]["step"]
    if len(entries) == 1:
        vectors = {kind: torch.cat([p.flatten() for p in m]) for kind, m in moments.items()}
        new = {0: {"step": step, **vectors}}
    else:
        new = {
            i: {"step": step, "exp_avg": a, "exp_avg_sq": b}
            for i, (a, b) in enumerate(zip(*moments.values(), strict=True))
        }
    (group,) = optimizer["param_groups"]
    model = old_layout(values)
    for side in ("encoder", "decoder"):
        model[f"{side}.version"] = torch.tensor([3.0])
    model["encoder.embed_positions.weights"] = torch.zeros(8, 16)
    model["decoder.embed_positions._float_tensor"] = torch.zeros(1)
    return {
        **state,
        "args": old_args(state["cfg"]["model"]),
        "cfg": None,
        "model": model,
        "last_optimizer_state": {
            **optimizer,
            "state": new,
            "param_groups": [{**group, "params": list(range(len(new)))}],
        },
    }


# The options of a published WMT model of 2018, when many of today's options did not exist.
OPTIONS_OF_2018 = """
    adam_betas adam_eps arch attention_dropout bucket_cap_mb clip_norm criterion data ddp_backend
    decoder_attention_heads decoder_embed_dim decoder_embed_path decoder_ffn_embed_dim
    decoder_layers decoder_learned_pos decoder_normalize_before device_id distributed_backend
    distributed_init_method distributed_port distributed_rank distributed_world_size dropout
    encoder_attention_heads encoder_embed_dim encoder_embed_path encoder_ffn_embed_dim
    encoder_layers encoder_learned_pos encoder_normalize_before fix_batches_to_gpus fp16
    fp16_init_scale keep_interval_updates label_smoothing left_pad_source left_pad_target
    log_format log_interval lr lr_scheduler max_epoch max_source_positions max_target_positions
    max_tokens max_update min_loss_scale no_epoch_checkpoints no_save optimizer restore_file
    save_dir save_interval seed sentence_avg share_all_embeddings
    share_decoder_input_output_embed source_lang target_lang task train_subset update_freq
    upsample_primary valid_subset validate_interval warmup_init_lr warmup_updates weight_decay
"""


def old_args(args: Namespace) -> Namespace:
    """The options as a command line of 2018 set them."""
    kept = {name: getattr(args, name) for name in OPTIONS_OF_2018.split()}
    return Namespace(
        **{
            **kept,
            "data": [args.data],
            "left_pad_source": "True",
            "left_pad_target": "False",
            "lr": [args.lr[0] if isinstance(args.lr, list) else args.lr],
            "lr_shrink": 0.1,
            "max_sentences": None,
            "min_lr": 1e-9,
            "momentum": 0.99,
            "optimizer_overrides": "{}",
            "raw_text": True,
            "relu_dropout": 0.0,
            "adaptive_softmax_cutoff": None,
            "no_token_positional_embeddings": False,
        }
    )


both_precisions = pytest.mark.parametrize("precision", PRECISIONS)
all_archs = pytest.mark.parametrize("arch", ARCHS)


class TestBefore010:
    @all_archs
    @both_precisions
    def test_the_run_goes_on(
        self, precision: str, arch: str, native: Callable[..., NativeRun], tmp_path: Path
    ) -> None:
        """The optimizer state is restored too, although its order was another."""
        run = native(precision, arch)
        old = before_0_10(run.state())
        assert any(name.endswith("in_proj_weight") for name in old["model"])
        losses = run.continued(saved(old, tmp_path / "old.pt"))
        assert losses == run.continued(saved(run.state(), tmp_path / "new.pt"))
        torch.testing.assert_close(losses, run.losses[4:], rtol=TOLERANCE[precision], atol=0)

    @both_precisions
    def test_optimizer_state_of_another_model_is_refused(
        self, precision: str, native: Callable[..., NativeRun], tmp_path: Path
    ) -> None:
        run = native(precision, "post-norm, tied target")
        old = before_0_10(run.state())
        state = old["last_optimizer_state"]["state"]
        state[0] = {**state[0], "exp_avg": state[0]["exp_avg"].flatten()[1:]}
        path = saved(old, tmp_path / "old.pt")
        with pytest.raises(UserError, match=r"optimizer state .* does not match .* --reset-opt"):
            run.continued(path)
        assert run.continued(path, reset_optimizer=True, max_update=2)

    @pytest.mark.parametrize("version", [None, 2])
    def test_pre_norm_stacks_that_did_not_end_in_a_norm(
        self, version: int | None, native: Callable[..., NativeRun], tmp_path: Path
    ) -> None:
        """fairseq reads encoders before version 2 and decoders before version 3 without a final
        LayerNorm."""
        run = native("fp32", "pre-norm, nothing tied")
        old = before_0_10(run.state())
        dropped = ["decoder"] if version == 2 else ["encoder", "decoder"]
        for side in ("encoder", "decoder"):
            old["model"].pop(f"{side}.version")
            if version is not None:
                old["model"][f"{side}.version"] = torch.tensor([float(version)])
        for side in dropped:
            for kind in ("weight", "bias"):
                del old["model"][f"{side}.layer_norm.{kind}"]
        path = saved(old, tmp_path / "old.pt")
        resets = {"reset_optimizer": True, "reset_lr_scheduler": True}
        expected = runs.run(
            run.data, tmp_path / "native", native=True, **runs.NATIVE, **run.flags, **resets,
            restore_file=path, max_update=8,
        )  # fmt: skip
        losses = run.continued(path, **resets)
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
        ours, theirs = logits(path, ls=True), logits(path, ls=False)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)

    @all_archs
    def test_translates(self, arch: str, native: Callable[..., NativeRun], tmp_path: Path) -> None:
        run = native("fp32", arch)
        path = saved(before_0_10(run.state()), tmp_path / "old.pt")
        expected = logits(run.path, ls=False)
        torch.testing.assert_close(logits(path, ls=True), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(logits(path, ls=False), expected, rtol=1e-6, atol=1e-6)


# Encoder layers of 0.12.2 with their dead parameters


@both_precisions
def test_dead_parameters(
    precision: str, data: Path, native: Callable[..., NativeRun], tmp_path: Path
) -> None:
    """A run of an unrepaired 0.12.2 resumes with the same losses as one without dead parameters."""
    arch = "pre-norm, nothing tied"
    init = TransformerEncoderLayerBase.__init__.__wrapped__
    with mock.patch.object(TransformerEncoderLayerBase, "__init__", init):
        run = NativeRun(data, tmp_path / "native", {**PRECISIONS[precision], **ARCHS[arch]})
    clean = native(precision, arch)
    assert any(name.endswith("fc1_weight") for name in run.state()["model"])
    assert run.losses == clean.losses
    losses = run.continued(run.path)
    assert losses == clean.continued(saved(clean.state(), tmp_path / "clean.pt"))
    torch.testing.assert_close(losses, run.losses[4:], rtol=TOLERANCE[precision], atol=0)


def test_loss_scale(native: Callable[..., NativeRun], tmp_path: Path) -> None:
    """The loss scale starts from the value in the file, and grows at the same update as in
    fairseq."""
    run = native("fp16", "post-norm, tied target")
    assert run.state()["last_optimizer_state"]["loss_scale"] == 128
    run.continued(saved(run.state(), tmp_path / "old.pt"), max_update=5)
    ended = torch.load(tmp_path / "old" / "checkpoint_last.pt", weights_only=False)
    assert ended["last_optimizer_state"]["loss_scale"] == 128


# Published models

BIG = {
    "arch": "transformer_vaswani_wmt_en_de_big",
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_embed_dim": 32,
    "decoder_embed_dim": 32,
    "share_decoder_input_output_embed": None,
    "share_all_embeddings": True,
}
COMMON = shlex.split("-s src -t tgt --dataset-impl raw --cpu --num-workers 0 --max-tokens 100")


@pytest.fixture(scope="module")
def published(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small version of wmt16.en-de.joined-dict.transformer: options and weights, but no training
    state."""
    folder = tmp_path_factory.mktemp("published")
    runs.run(data, folder, native=True, **{**runs.NATIVE, **FLAGS, **BIG}, max_update=4)
    state = torch.load(folder / "checkpoint_last.pt", weights_only=False)
    model = dict(state["model"])
    del model["decoder.output_projection.weight"]
    for side in ("encoder", "decoder"):
        model[f"{side}.version"] = torch.tensor([2.0 if side == "encoder" else 3.0])
    iterator = {"epoch": 57, "iterations_in_epoch": 0, "shuffle": True}
    old = {
        "args": old_args(state["cfg"]["model"]),
        "model": {n: v if n.endswith("version") else v.half() for n, v in model.items()},
        "optimizer_history": [{**state["optimizer_history"][-1], "best_loss": 3.9}],
        "extra_state": {"train_iterator": iterator, "val_loss": 3.9},
        "last_optimizer_state": None,
    }
    # Published models have the file format of older torch versions, which is not a zip archive.
    torch.save(old, folder / "model.pt", _use_new_zipfile_serialization=False)
    return folder / "model.pt"


def validation_loss(path: Path, data: Path, *words: str) -> str:
    result = run("validate", data, *COMMON, "--path", path, "--valid-subset", "train", *words)
    assert result.exit_code == 0, (result.output, result.exception)
    (loss,) = re.findall(r"\| loss (\S+)", result.output)
    return loss


class TestPublished:
    def test_translates(self, published: Path, data: Path) -> None:
        torch.testing.assert_close(
            logits(published, ls=True), logits(published, ls=False), rtol=1e-4, atol=1e-5
        )
        hypotheses = []
        for own in ([], ["--native"]):
            output = succeed("generate", data, *COMMON, "--gen-subset", "train", *own,
                             "--path", published, "--max-len-b", 9, "--beam", 2)  # fmt: skip
            lines = re.findall(r"^[HP]-.*", output, re.MULTILINE)
            hypotheses.append([line.split("\t") for line in lines])
        assert len(hypotheses[0]) == 2 * 64
        assert not difference_of_lines(*hypotheses, 1e-3)

    def test_validates(self, published: Path, data: Path) -> None:
        assert validation_loss(published, data) == validation_loss(published, data, "--native")

    @pytest.mark.parametrize("how", ["finetune_from_model", "restore_file"])
    def test_is_trained_further(
        self, how: str, published: Path, data: Path, tmp_path: Path
    ) -> None:
        flags = {**FLAGS, **BIG, how: published, "max_update": 3, "reset_dataloader": True}
        if how == "finetune_from_model":
            del flags["reset_dataloader"]
        expected = runs.run(data, tmp_path / "a", native=True, **{**runs.NATIVE, **flags})
        names = {**runs.LS, **flags, "arch": f"ls_{BIG['arch']}"}
        losses = runs.run(data, tmp_path / "b", **names)
        assert len(losses) == 3
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)


# Newer files

# Settings that fairseq's main branch (2024 and 2025) writes and 0.12.2 does not know, by section.
# Its sinusoidal positions have no buffer.
OF_THE_MAIN_BRANCH: dict[str, dict[str, Any]] = {
    "generation": {"beam_mt": 0, "max_len_a_mt": 0.0, "max_len_b_mt": 200, "lenpen_mt": 1.0},
    "optimization": {"debug_param_names": False},
    "model": {"debug_param_names": False, "merge_src_tgt_embed": False},
}


def from_the_main_branch(state: State) -> State:
    for section, settings in OF_THE_MAIN_BRANCH.items():
        node = state["cfg"][section]
        (vars(node) if isinstance(node, Namespace) else node).update(settings)
    model = {n: v for n, v in state["model"].items() if not n.endswith("_float_tensor")}
    assert len(model) == len(state["model"]) - 2
    return {**state, "model": model}


def from_the_future(state: State) -> State:
    """Unknown settings in every section, and an unknown entry of the trainer's state."""
    for section in state["cfg"].values():
        if isinstance(section, dict):
            section["of_the_future"] = None
        elif isinstance(section, Namespace):
            section.of_the_future = None
    state["extra_state"]["of_the_future"] = {"seen": 1}
    return {**state, "of_the_future": [1.0]}


@pytest.mark.parametrize(
    ("written", "precision"),
    [(from_the_main_branch, "fp32"), (from_the_main_branch, "fp16"), (from_the_future, "fp32")],
)
def test_files_of_newer_versions(
    written: Callable[[State], State], precision: str, native: Callable[..., NativeRun],
    data: Path, tmp_path: Path,
) -> None:  # fmt: skip
    run = native(precision, "post-norm, tied target")
    path = saved(written(run.state()), tmp_path / "new.pt")
    for ls in (True, False):
        assert torch.equal(logits(path, ls=ls), logits(run.path, ls=ls))
    assert validation_loss(path, data) == validation_loss(run.path, data)
    assert run.continued(path) == run.continued(saved(run.state(), tmp_path / "old.pt"))
    tuned = [
        run.continued(tmp_path / f"tuned_{x.stem}", restore_file=None, finetune_from_model=x)
        for x in (path, tmp_path / "old.pt")
    ]
    assert tuned[0] == tuned[1]
