"""lightseq-import of files that this test lays out as LightSeq did."""

from __future__ import annotations

import re
import shlex
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cli_runs import run, succeed
from helpers.loaded import logits
from torch import Tensor

import helpers.training_runs as runs  # isort: skip  (fairseq has to be prepared before)

from fairseq.modules import SinusoidalPositionalEmbedding

State = dict[str, Any]
COMMON = shlex.split("-s src -t tgt --dataset-impl raw --cpu --num-workers 0 --max-tokens 100")

POST_NORM = {"share_decoder_input_output_embed": True}
PRE_NORM = {
    "share_decoder_input_output_embed": None,
    "share_all_embeddings": True,
    "encoder_normalize_before": True,
    "decoder_normalize_before": True,
}
LEARNED = {**POST_NORM, "encoder_learned_pos": True, "decoder_learned_pos": True}
MODELS: dict[str, dict[str, Any]] = {
    "post-norm": POST_NORM,
    "pre-norm, one table": PRE_NORM,
    "gelu": {**POST_NORM, "activation_fn": "gelu_accurate"},
    "learned positions": {**LEARNED, "max_source_positions": 30, "max_target_positions": 20},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def native(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A native model of two encoder and three decoder layers; all its numbers differ."""
    made: dict[str, Path] = {}

    def get(model: str) -> Path:
        if model not in made:
            folder = tmp_path_factory.mktemp("native")
            flags = {**runs.NATIVE, **MODELS[model], "encoder_layers": 2, "decoder_layers": 3}
            runs.run(data, folder, native=True, **flags, decoder_ffn_embed_dim=40, max_update=1)
            state = torch.load(folder / "checkpoint_last.pt", weights_only=False)
            torch.manual_seed(5)
            tied: dict[int, Tensor] = {}
            for name, value in state["model"].items():
                if not name.endswith("version"):
                    changed = value + 0.1 * torch.randn(value.shape)
                    state["model"][name] = tied.setdefault(value.data_ptr(), changed)
            made[model] = folder / "native.pt"
            torch.save(state, made[model])
        return made[model]

    return get


def original(path: Path, layout: int, **options: Any) -> State:
    """The weights of a native checkpoint, in the layout of LightSeq 2 or 3."""
    state: State = torch.load(path, weights_only=False)
    values = state["model"]

    def vector(prefix: str, *parts: str) -> list[Tensor]:
        return [values[f"{prefix}.{part}"].flatten() for part in parts]

    def norm(name: str) -> tuple[str, str]:
        return f"{name}.weight", f"{name}.bias"

    def attention(block: str, projections: str) -> list[str]:
        weights = [f"{block}.{p}_proj.weight" for p in projections]
        biases = [f"{block}.{p}_proj.bias" for p in projections]
        out = [f"{block}.out_proj.weight", f"{block}.out_proj.bias"]
        return [*weights, *biases, *out, *norm(f"{block}_layer_norm")]

    ffn = ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias", *norm("final_layer_norm")]
    bounds = {"encoder": torch.full((12,), 16.0), "decoder": torch.full((24,), 16.0)}
    args = state["cfg"]["model"]
    model: dict[str, Tensor] = {}
    for side in ("encoder", "decoder"):
        table = values[f"{side}.embed_tokens.weight"]
        if layout == 2:
            model[f"{side}.embed_tokens.embeddings"] = table
        else:
            pieces = [table.flatten(), torch.ones(1)]
            if args.encoder_learned_pos:
                pieces.insert(1, values[f"{side}.embed_positions.weight"][2:].flatten())
            model[f"{side}.embed_tokens.para"] = torch.cat(pieces)
        for n in range(getattr(args, f"{side}_layers")):
            parts = attention("self_attn", "qkv")
            if side == "decoder":
                parts += attention("encoder_attn", "q")
            pieces = vector(f"{side}.layers.{n}", *parts, *ffn)
            if layout == 3:
                pieces.append(bounds[side])
            if (side, n) == ("decoder", 0):
                for kind in ("weight", "bias"):
                    for layer in range(args.decoder_layers):
                        block = f"decoder.layers.{layer}.encoder_attn"
                        pieces += vector(block, f"k_proj.{kind}", f"v_proj.{kind}")
            model[f"{side}.layers.{n}.para"] = torch.cat(pieces)
        for kind in ("weight", "bias"):
            if f"{side}.layer_norm.{kind}" in values:
                model[f"{side}.layer_norm.{kind}"] = values[f"{side}.layer_norm.{kind}"]
    if layout == 2:
        model["decoder.output_projection.weight"] = values["decoder.embed_tokens.weight"]
    else:
        model["decoder.output_projection.clip_max"] = torch.tensor([16.0, 1.0, 16.0])
    old = Namespace(
        **{
            **vars(args),
            "arch": "ls_transformer_tiny",
            "criterion": "ls_label_smoothed_cross_entropy",
            "optimizer": "ls_adam",
            "adam_betas": (0.9, 0.98),
            "task": "ls_translation",
            "use_torch_layer": False,
            "adaptive_softmax_cutoff": "10,20",  # LightSeq accepted and ignored it
            "share_decoder_input_output_embed": False,
            "activation_fn": "gelu" if "gelu" in args.activation_fn else args.activation_fn,
            **options,
        }
    )
    if not args.encoder_learned_pos:
        old.max_source_positions = old.max_target_positions = 300
    history = [{"criterion_name": "X", "optimizer_name": "Y", "num_updates": 9, "best_loss": 4.0}]
    return {
        "args": old,
        "model": model,
        "optimizer_history": history,
        "extra_state": {"train_iterator": {"epoch": 3}, "val_loss": 4.0},
        "last_optimizer_state": {"state": {}, "param_groups": [{"params": [0]}]},
    }


def imported(state: State, folder: Path) -> tuple[Path, str]:
    """The file that lightseq-import writes, and the command that it prints."""
    torch.save(state, folder / "lightseq.pt")
    output = succeed("import_", folder / "lightseq.pt", folder / "model.pt")
    return folder / "model.pt", output.splitlines()[-1]


def positions_from_zero(model: Any) -> None:
    """Moves fairseq's sinusoidal positions to LightSeq's places: the first token is in row 0 of the
    table."""
    for side in (model.encoder, model.decoder):
        width = side.embed_positions.embedding_dim
        table = SinusoidalPositionalEmbedding.get_embedding(40, width)
        side.embed_positions.weights = torch.cat([torch.zeros(2, width), table])


CASES = [
    (m, layout) for m in MODELS for layout in (2, 3) if (m, layout) != ("learned positions", 2)
]


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_computes_the_same(
    model: str, layout: int, native: Callable[[str], Path], tmp_path: Path
) -> None:
    learned = model == "learned positions"
    expected = logits(native(model), False, lambda m: None if learned else positions_from_zero(m))
    path, _ = imported(original(native(model), layout), tmp_path)
    torch.testing.assert_close(logits(path, ls=False), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits(path, ls=True), expected, rtol=1e-4, atol=1e-4)
    state = torch.load(path, weights_only=False)
    assert b"ls_" not in path.read_bytes()
    assert state["model"]["encoder.version"].item() == state["model"]["decoder.version"].item() == 3
    assert state["args"].share_all_embeddings == (model == "pre-norm, one table")
    for value in state["model"].values():  # no larger storage is kept alive
        assert value.untyped_storage().nbytes() == value.numel() * value.element_size()


def test_quantisation_is_left_out_and_a_note_says_so(
    native: Callable[[str], Path], tmp_path: Path
) -> None:
    source, path = tmp_path / "lightseq.pt", tmp_path / "model.pt"
    torch.save(original(native("post-norm"), 3, enable_quant=True), source)
    assert "the quantisation is dropped" in run("import_", source, path).stderr
    assert not hasattr(torch.load(path, weights_only=False)["args"], "enable_quant")


def test_translates_validates_and_trains(
    native: Callable[[str], Path], data: Path, tmp_path: Path
) -> None:
    path, command = imported(original(native("pre-norm, one table"), 3), tmp_path)
    options = [*COMMON, "--path", path]
    output = succeed("generate", data, *options, "--gen-subset", "train", "--max-len-b", 9)
    assert len(re.findall(r"^H-\d+", output, re.MULTILINE)) == 64
    result = run("validate", data, *options, "--valid-subset", "train")
    (loss,) = re.findall(r"\| loss (\S+)", result.output)
    words = shlex.split(command)
    assert words[:2] == ["lightseq-train", "DATA"]
    # The learning rate is almost zero, so the trained model is still the imported one.
    succeed(
        "train", data, *words[2:], *COMMON, "--max-update", "1", "--lr", "1e-20", "--dropout", "0",
        "--valid-subset", "train", "--save-dir", tmp_path / "further",
    )  # fmt: skip
    state = torch.load(tmp_path / "further" / "checkpoint_last.pt", weights_only=False)
    assert float(loss) == pytest.approx(state["extra_state"]["val_loss"], abs=1e-3)
    losses = runs.run(
        data, tmp_path / "resumed", native=True, **runs.NATIVE, **PRE_NORM, restore_file=path,
        encoder_layers=2, decoder_layers=3, decoder_ffn_embed_dim=40, encoder_learned_pos=True,
        decoder_learned_pos=True, max_source_positions=1024, max_target_positions=1024,
        max_update=2,
    )  # fmt: skip
    assert len(losses) == 2


class TestRefusals:
    @pytest.fixture
    def refused(self, tmp_path: Path) -> Callable[..., str]:
        def get(state: State | None, *words: str | Path) -> str:
            if state is not None:
                torch.save(state, tmp_path / "lightseq.pt")
            result = run("import_", *(words or (tmp_path / "lightseq.pt", tmp_path / "model.pt")))
            assert result.exit_code == 2, result.output
            assert not (tmp_path / "model.pt").exists()
            (sentence,) = result.stderr.splitlines()
            assert sentence.startswith("lightseq-import: error: ")
            return sentence

        return get

    def test_what_is_none(
        self, refused: Callable[..., str], native: Callable[[str], Path], tmp_path: Path
    ) -> None:
        assert "not a checkpoint of the original LightSeq" in refused(
            None, native("post-norm"), tmp_path / "model.pt"
        )
        (tmp_path / "torn.pt").write_bytes(b"PK")
        for name, words in (("missing.pt", "cannot be read"), ("torn.pt", "truncated or corrupt")):
            sentence = refused(None, tmp_path / name, tmp_path / "model.pt")
            assert name in sentence
            assert words in sentence

    def test_an_existing_output(
        self, refused: Callable[..., str], native: Callable[[str], Path], tmp_path: Path
    ) -> None:
        path = native("post-norm")
        before = path.read_bytes()
        assert "exists already" in refused(None, path, path)
        assert path.read_bytes() == before

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (
                {"encoder_ffn_embed_dim": 33},
                "options require 2,257 or, with quantisation bounds, 2,2",
            ),
            ({"decoder_layers": 2}, "options require 4,152 or, with quantisation bounds, 4,176"),
            ({"encoder_layers": 3}, "has no encoder.layers.2.para"),
            ({"encoder_embed_dim": 32}, "differ in width"),
            ({"encoder_normalize_before": False}, "the post-norm encoder ends with a LayerNorm"),
            ({"encoder_normalize_before": True}, None),
        ],
    )
    def test_weights_that_do_not_belong_to_the_options(
        self, options: State, words: str | None, refused: Callable[..., str],
        native: Callable[[str], Path],
    ) -> None:  # fmt: skip
        if words is None:
            state = original(native("post-norm"), 3, **options)
            assert "has no encoder.layer_norm.weight" in refused(state)
        else:
            assert words in refused(original(native("pre-norm, one table"), 3, **options))

    def test_without_options(
        self, refused: Callable[..., str], native: Callable[[str], Path]
    ) -> None:
        state = original(native("post-norm"), 3)
        state["args"] = None
        assert "has no options" in refused(state)

    @pytest.mark.parametrize("command", ["generate", "train"])
    def test_other_commands_name_the_import(
        self, command: str, native: Callable[[str], Path], data: Path, tmp_path: Path
    ) -> None:
        torch.save(original(native("post-norm"), 2), tmp_path / "lightseq.pt")
        option = "--path" if command == "generate" else "--finetune-from-model"
        words = ["--arch", "ls_transformer", "--save-dir", tmp_path / "saved"]
        result = run(
            command, data, *COMMON, option, tmp_path / "lightseq.pt",
            *(words if command == "train" else ["--gen-subset", "train"]),
        )  # fmt: skip
        assert result.exit_code == 2, result.output
        assert "lightseq.pt is a checkpoint of the original LightSeq" in result.stderr
        assert "lightseq-import" in result.stderr
