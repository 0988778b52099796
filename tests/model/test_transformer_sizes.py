"""Archs with the sizes of published models."""

from __future__ import annotations

from pathlib import Path

import helpers.cli_runs as cli_runs
import helpers.parity as parity
import pytest
from fairseq import checkpoint_utils
from fairseq.models.transformer import TransformerConfig, TransformerModel

from lightseq_fairseq.plugins.sizes import SIZES
from lightseq_fairseq.plugins.unsupported import settings_of, unsupported_width

# Words of the published dictionary, and millions of parameters of the published file.
PUBLISHED = {
    "ls_transformer_m2m_100_418m": (128_112, 484),
    "ls_transformer_m2m_100_1_2b": (128_112, 1239),
    "ls_transformer_nllb_600m": (256_206, 615),
    "ls_transformer_nllb_1_3b": (256_206, 1371),
    "ls_transformer_nllb_3_3b": (256_206, 3345),
}


@pytest.mark.parametrize("arch", SIZES)
def test_the_sizes_are_those_of_the_files(arch: str) -> None:
    cfg = TransformerConfig.from_namespace(settings_of(arch))
    assert cfg.share_all_embeddings and not cfg.no_scale_embedding and cfg.activation_fn == "relu"
    assert unsupported_width(cfg) is None
    words, millions = PUBLISHED[arch]
    total = words * cfg.encoder.embed_dim
    for side, attentions in ((cfg.encoder, 1), (cfg.decoder, 2)):
        width, inner = side.embed_dim, side.ffn_embed_dim
        assert side.attention_heads == 16 and side.normalize_before and not side.learned_pos
        attention = 4 * width * width + 4 * width
        norms = 2 * width * (attentions + 1)
        feed_forward = 2 * width * inner + inner + width
        total += side.layers * (attentions * attention + feed_forward + norms) + 2 * width
    assert round(total / 1e6) == millions


def test_a_flag_takes_precedence_and_the_file_is_fairseqs(tmp_path: Path) -> None:
    raw = parity.write_corpus(tmp_path / "raw")
    texts = ["--trainpref", raw / "train.src-tgt", "--validpref", raw / "valid.src-tgt"]
    words = [
        "-s",
        "src",
        "-t",
        "tgt",
        "--joined-dictionary",
        *texts,
        "--destdir",
        tmp_path / "data",
    ]
    cli_runs.succeed("preprocess", *words)
    heads = ["--encoder-attention-heads", "2", "--decoder-attention-heads", "2"]
    words = [*cli_runs.SMALL, "--arch", "ls_transformer_nllb_600m", *heads]
    cli_runs.succeed("train", tmp_path / "data", *words, "--save-dir", tmp_path / "run")
    path = tmp_path / "run" / "checkpoint_last.pt"
    assert b"ls_" not in path.read_bytes() and b"nllb" not in path.read_bytes()
    (model,), cfg = checkpoint_utils.load_model_ensemble([str(path)])
    assert type(model) is TransformerModel and cfg.model.arch == "transformer"
    assert len(model.encoder.layers) == 1 and model.encoder.layer_norm is not None
