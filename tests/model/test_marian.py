"""``ls_marian`` computes what Marian and Pegasus of `transformers` compute: logits, gradients,
translations; and it trains by the commands."""

from __future__ import annotations

import copy
import logging
from argparse import Namespace
from pathlib import Path
from typing import Any, NamedTuple

import helpers.cli_runs as cli_runs
import helpers.hugging_face as hugging_face
import pytest
import torch
from fairseq.models.transformer import TransformerConfig
from helpers.hugging_face import KINDS
from helpers.parity import PAD
from helpers.searches import counted_searches  # noqa: F401  (a fixture)
from torch import Tensor, nn

from lightseq_fairseq import ops
from lightseq_fairseq.checkpoints import counterparts
from lightseq_fairseq.layers import draw_rng
from lightseq_fairseq.memory.packing import Granularity
from lightseq_fairseq.memory.parameters import with_spare_rows
from lightseq_fairseq.plugins.marian import SIZES
from lightseq_fairseq.plugins.unsupported import settings_of, unsupported_width
from lightseq_fairseq.training.batch import packing

EOS = 2
EXACT = {"rtol": 1e-9, "atol": 1e-9}
# Millions of parameters of the published file with so many words; and those of other sizes.
PUBLISHED = {
    "ls_marian_base": (58_101, 74),
    "ls_marian_big": (54_669, 232),
    "ls_pegasus_large": (96_103, 569),
}


class Both(NamedTuple):
    """A model of `transformers`, our import of it, and what its data are.

    rows: our rows of the words of `transformers`, in their order.
    """

    record: Any
    theirs: Any
    ours: Any
    task: Any
    rows: list[int]
    imported: Path
    data: Path


@pytest.fixture(scope="module", params=["marian", "pegasus"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    kind, folder = KINDS[request.param], tmp_path_factory.mktemp(request.param)
    theirs = hugging_face.make(kind, folder / "theirs").double()
    cli_runs.succeed("import_", folder / "theirs", folder / "imported")
    data = hugging_face.data(kind, folder / "imported", folder / "text")
    ours, task = hugging_face.ours(folder / "imported/model.pt", data)
    task.load_dataset("train")
    rows = [hugging_face.row(kind, task, word) for word in kind.words]
    record = {"marian": counterparts.MARIAN, "pegasus": counterparts.PEGASUS}[request.param]
    return Both(record, theirs, ours.double(), task, rows, folder / "imported", data)


def their_words(both: Both, tokens: Tensor) -> Tensor:
    """The same words under the numbers of `transformers`."""
    number_of = {row: number for number, row in enumerate(both.rows)}
    return torch.tensor([[number_of[token] for token in line] for line in tokens.tolist()])


def right_padded(tokens: Tensor) -> Tensor:
    """Marian and Pegasus of `transformers` count columns, so pads come last."""
    rows = [line[line.ne(PAD)] for line in tokens]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)


@pytest.mark.parametrize("packed", [False, True])
def test_losses_and_gradients_are_those_of_transformers(both: Both, packed: bool) -> None:
    """In float64; the row of the pad gets a gradient from the logits alone, the bias gets none."""
    dataset = both.task.dataset("train")
    sample = dataset.collater([dataset[i] for i in range(8)])
    tokens = right_padded(sample["net_input"]["src_tokens"])
    labels = their_words(both, sample["target"]).masked_fill(sample["target"].eq(PAD), -100)
    both.theirs.zero_grad()
    result = both.theirs(
        their_words(both, tokens), attention_mask=tokens.ne(PAD).long(), labels=labels
    )
    expected = result.loss * sample["ntokens"]
    expected.backward()

    both.ours.zero_grad()
    if packed:
        batch = packing(dataset, Granularity(64)).__getitems__(range(8)).open()
        logits = both.ours.packed_logits(batch, draw_rng())
        target = batch["target"]["labels"]
    else:
        previous = sample["net_input"]["prev_output_tokens"]
        logits, target = both.ours(tokens, None, previous)[0].flatten(0, 1), sample["target"]
    loss = nn.functional.cross_entropy(logits, target.flatten(), ignore_index=PAD, reduction="sum")
    loss.backward()
    torch.testing.assert_close(loss, expected, **EXACT)
    theirs = dict(both.theirs.named_parameters())
    for name, parameter in both.ours.named_parameters():
        if name in both.record.tied[1:]:
            continue
        found = parameter.grad[both.rows] if name in both.record.tables else parameter.grad
        torch.testing.assert_close(found, theirs.pop(both.record.theirs(name)).grad, **EXACT)
    assert not [name for name, parameter in theirs.items() if parameter.grad is not None]
    assert "decoder.logits_bias" in dict(both.ours.named_buffers())


@pytest.mark.parametrize("beam", [1, 4])
def test_translations_are_those_of_transformers(both: Both, searches: list[Any], beam: int) -> None:
    """The pad begins each hypothesis, and is never in one, although its logit is the largest."""
    theirs, ours = copy.deepcopy(both.theirs), copy.deepcopy(both.ours)
    ours.generation = {}  # fairseq's rule ends a search
    pad, eos = theirs.config.pad_token_id, theirs.config.eos_token_id
    theirs.final_logits_bias[0, pad] = ours.decoder.logits_bias[PAD] = 20.0
    with torch.no_grad():  # let the source matter
        for model in (theirs, ours):
            for name, parameter in model.named_parameters():
                if "encoder_attn" in name:
                    parameter *= 4
    # At the longest length, transformers forces </s> without its score.
    theirs.final_logits_bias[0, eos] = ours.decoder.logits_bias[EOS] = 1.0
    dataset = both.task.dataset("train")
    sample = dataset.collater([dataset[i] for i in range(8)])
    tokens = right_padded(sample["net_input"]["src_tokens"])
    sample["net_input"]["src_tokens"] = tokens
    options = Namespace(beam=beam, max_len_a=0, max_len_b=14, min_len=0, no_repeat_ngram_size=2)
    generator = both.task.build_generator([ours], options)
    found = generator.generate([ours], sample)
    expected = theirs.generate(
        their_words(both, tokens), attention_mask=tokens.ne(PAD).long(), num_beams=beam,
        max_new_tokens=15, no_repeat_ngram_size=2, early_stopping=True, bad_words_ids=[[pad]],
        length_penalty=1.0,
    )  # fmt: skip
    assert len(searches) == 1  # ours, not fairseq's
    number_of = {row: number for number, row in enumerate(both.rows)}
    for hypotheses, line in zip(found, expected.tolist(), strict=True):
        words = [number_of[row] for row in hypotheses[0]["tokens"].tolist()]
        assert line[0] == pad and line[1 : 2 + line[1:].index(eos)] == words
        assert len(words) < 15
    assert len({tuple(hypotheses[0]["tokens"].tolist()) for hypotheses in found}) > 1


def test_the_layers_do_not_know_of_the_start(both: Both) -> None:
    """The decoder reads </s>, which begins fairseq's data, as the pad; other tokens are kept."""
    decoder = both.ours.decoder
    positions, rng = torch.zeros(3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    rows = decoder.embed_packed(torch.tensor([EOS, PAD, 7]), positions, 1, rng, 1).x
    assert torch.equal(rows[0], rows[1])
    weight = decoder.embed_tokens.weight[[PAD, 7]] * decoder.embed_scale
    first = torch.cat([torch.zeros(16), torch.ones(16)]).double()  # sines and cosines of 0
    torch.testing.assert_close(rows[1:], weight + first, **EXACT)


def test_an_odd_vocabulary_has_spare_rows_and_a_bias(both: Both) -> None:
    weight = both.ours.decoder.output_projection.weight
    assert len(weight) % 8
    whole = with_spare_rows(weight)
    assert whole is not None and len(whole) % 8 == 0
    x = torch.randn(5, weight.shape[1], dtype=weight.dtype)
    logits = both.ours.decoder.output_layer(x)
    assert logits.stride(0) == len(whole)
    expected = nn.functional.linear(x, weight, both.ours.decoder.logits_bias)
    torch.testing.assert_close(logits, expected, **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_that_only_fairseq_has_take_no_part(both: Both, dtype: torch.dtype) -> None:
    """Their bias is finite, but in no precision do they change a bit of the other scores."""
    decoder = copy.deepcopy(both.ours).to(dtype).decoder
    words = len(decoder.output_projection.weight)
    alone = sorted({*range(words)} - {*both.rows})
    assert both.task.target_dictionary.bos() in alone
    logits = decoder.output_layer(
        4 * torch.randn(64, decoder.output_projection.weight.shape[1], dtype=dtype)
    )
    assert logits.isfinite().all() and logits[:, alone].max() < -80
    without = logits.clone()
    without[:, alone] = -torch.inf
    scores, expected = (each.float().log_softmax(1) for each in (logits, without))
    assert torch.equal(scores[:, both.rows], expected[:, both.rows])
    assert scores[:, alone].exp().max() < torch.finfo(torch.float32).tiny
    # Every other word comes first, so a beam that leaves some words out never has them.
    steps, last_steps = torch.tensor([[3], [9]], dtype=torch.int32).expand(2, 64)
    count = len(both.rows) - 1
    _, found = ops.beam_candidates(
        logits, torch.zeros(64), steps, last_steps, count, PAD, EOS, 3, 0, 0, 0.0, 1.0
    )
    assert not torch.isin(found, torch.tensor(alone)).any()


@pytest.mark.parametrize("arch", SIZES)
def test_the_sizes_are_those_of_the_files(arch: str) -> None:
    cfg = TransformerConfig.from_namespace(settings_of(arch))
    assert cfg.share_all_embeddings and not cfg.no_scale_embedding
    assert unsupported_width(cfg) is None
    words, millions = PUBLISHED[arch]
    total = words * cfg.encoder.embed_dim
    for side, attentions in ((cfg.encoder, 1), (cfg.decoder, 2)):
        width, inner = side.embed_dim, side.ffn_embed_dim
        assert side.embed_dim // side.attention_heads == 64
        norms = 2 * width * (attentions + 1)
        feed_forward = 2 * width * inner + inner + width
        total += side.layers * (attentions * (4 * width * width + 4 * width) + norms + feed_forward)
        total += 2 * width * side.normalize_before
    assert round(total / 1e6) == millions


def test_a_new_model_trains_resumes_and_translates(
    both: Both, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By the commands; the checkpoint names our arch."""
    arch = {"marian": "ls_marian_base", "pegasus": "ls_pegasus_large"}[
        next(iter(both.record.types))
    ]

    def train(folder: str, updates: int) -> dict[str, Any]:
        save_dir = tmp_path / folder
        cli_runs.succeed(
            "train", both.data, *cli_runs.SMALL, "--arch", arch, "--encoder-attention-heads", "2",
            "--decoder-attention-heads", "2", "--lr", "1e-2", "--save-dir", save_dir,
            "--max-update", str(updates), "--num-workers", "2",
        )  # fmt: skip
        state: dict[str, Any] = torch.load(save_dir / "checkpoint_last.pt", weights_only=False)
        return state

    caplog.set_level(logging.INFO)
    whole = train("run", 6)
    assert "step: without CUDA graphs, without padding" in caplog.text
    args = whole["cfg"]["model"]
    assert args.arch == arch and args.activation_fn == SIZES[arch][4]
    assert not whole["model"]["decoder.logits_bias"].any()
    train("half", 3)
    resumed = train("half", 6)
    assert all(torch.equal(resumed["model"][x], value) for x, value in whole["model"].items())
    path = tmp_path / "run" / "checkpoint_last.pt"
    log = cli_runs.succeed("generate", both.data, "--path", path, "--gen-subset", "valid", "--cpu")
    assert "H-0" in log


@pytest.mark.parametrize("to", ["fairseq", "ctranslate2"])
def test_stock_fairseq_has_no_such_model(both: Both, to: str, tmp_path: Path) -> None:
    path, output = both.imported / "model.pt", tmp_path / "out"
    words = ["--to", to, "--output", output, "--data", both.data]
    result = cli_runs.run("export", path, *words)
    assert result.exit_code == 2 and not output.exists()
    assert "--to huggingface" in result.output
    result = cli_runs.run("train", both.data, "--native", "--arch", "ls_marian_base")
    assert "--native finds no arch of fairseq that corresponds to --arch ls_marian_base" in (
        result.output
    )
