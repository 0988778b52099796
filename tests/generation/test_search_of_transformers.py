"""Our search finds the words that ``generate`` of transformers finds, in float32, where both
libraries define scores equally."""

from __future__ import annotations

from typing import Any

import helpers.parity as parity
import pytest
import torch
from fairseq.dataclass.configs import GenerationConfig
from helpers.parity import LS, PAD, command_line
from helpers.searches import counted_searches  # noqa: F401
from torch import Tensor

from lightseq_fairseq.cli.benchmark.train import corpus
from lightseq_fairseq.cli.benchmark.train.corpus import EOS

transformers = pytest.importorskip("transformers")

SENTENCES, WORDS, MOST, LANGUAGE = 60, 97, 30, 41
SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {"beam": 1},
    "beam-5": {"beam": 5},
    "lenpen-2": {"beam": 4, "lenpen": 2.0, "min_len": 6},
    "trigrams": {"beam": 4, "no_repeat_ngram_size": 3},
    # transformers adds no score for a forced token: the order is the same if length has no part.
    "language": {"beam": 4, "lenpen": 0.0},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Any]:
    """The task, our BART and transformers', with the same random weights."""
    data = parity.write_corpus(tmp_path_factory.mktemp("corpus"))
    words = "".join(f"w{number} 1\n" for number in range(WORDS - corpus.SPECIALS))
    for path in data.glob("dict.*.txt"):
        path.write_text(words)
    cfg = parity.parse(command_line(data, LS, arch="bart_base", max_source_positions=64,
                                    max_target_positions=64))  # fmt: skip
    task, ours, _ = parity.build(cfg)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter += 0.25 * torch.randn(parameter.shape, generator=generator)
        ours.encoder.embed_tokens.weight[EOS] *= 1.7  # so that many hypotheses end
    layer, side = ours.encoder.layers[0], ours.decoder
    heads = layer.self_attn.num_heads
    theirs = transformers.BartForConditionalGeneration(transformers.BartConfig(
        vocab_size=WORDS, d_model=layer.fc1.in_features, encoder_ffn_dim=layer.fc1.out_features,
        decoder_ffn_dim=side.layers[0].fc1.out_features, encoder_layers=len(ours.encoder.layers),
        decoder_layers=len(side.layers), encoder_attention_heads=heads,
        decoder_attention_heads=heads, max_position_embeddings=64, activation_function="gelu",
    ))  # fmt: skip
    named = {f"model.{name}": value for name, value in ours.state_dict().items()}
    shared = named["model.encoder.embed_tokens.weight"]
    found = theirs.load_state_dict(
        {**named, "model.shared.weight": shared, "lm_head.weight": shared}, strict=False
    )
    assert set(found.missing_keys) <= {"final_logits_bias"}
    return task, ours.eval(), theirs.eval()


def batch() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(6)
    lengths = torch.randint(2, 60, (SENTENCES,), generator=generator)
    tokens = torch.full((SENTENCES, int(lengths.max())), PAD)
    for row, length in zip(tokens, lengths.tolist(), strict=True):
        row[:length] = torch.randint(corpus.SPECIALS, WORDS, (length,), generator=generator)
        row[length - 1] = EOS
    inputs = {"src_tokens": tokens, "src_lengths": lengths}
    return {"net_input": inputs, "id": torch.arange(SENTENCES)}


@pytest.mark.parametrize("name", SEARCHES)
def test_words(models: tuple[Any, Any, Any], name: str, searches: list[Any]) -> None:
    task, ours, theirs = models
    options, sample = SEARCHES[name], batch()
    forced = torch.full((SENTENCES, 1), LANGUAGE) if name == "language" else None
    search = GenerationConfig(max_len_b=MOST, **options)
    found = task.build_generator([ours], search).generate([ours], sample, prefix_tokens=forced)
    tokens = sample["net_input"]["src_tokens"]
    theirs_found = theirs.generate(
        tokens, attention_mask=tokens.ne(PAD).long(), num_beams=options["beam"], do_sample=False,
        num_return_sequences=options["beam"],
        generation_config=transformers.GenerationConfig(
            max_new_tokens=MOST + 1, early_stopping=options["beam"] > 1, pad_token_id=PAD,
            eos_token_id=EOS, decoder_start_token_id=EOS,
            length_penalty=options.get("lenpen", 1.0),
            min_new_tokens=options.get("min_len", 1),
            no_repeat_ngram_size=options.get("no_repeat_ngram_size", 0),
            forced_bos_token_id=LANGUAGE if name == "language" else None,
        ),
    )  # fmt: skip
    assert len(searches) == 1
    beam, compared = options["beam"], []
    for mine, others in zip(found, theirs_found[:, 1:].split(beam), strict=True):
        lists = [[each["tokens"].tolist() for each in mine], [_until_eos(x) for x in others]]
        # At the maximum length fairseq ends hypotheses with </s>, and transformers without it, so
        # searches that reach it may find others.
        if max(len(words) for each in lists for words in each) <= MOST:
            compared.append(lists[0][0])
            # If more hypotheses end at the last step than are needed, fairseq adds those with the
            # best sums, and transformers keeps the best scores of all: the others may differ.
            assert lists[0][0] == lists[1][0]
    assert len(compared) > 8 and len({tuple(words) for words in compared}) > 3


def _until_eos(tokens: Tensor) -> list[int]:
    ends = (tokens == EOS).nonzero()
    return tokens.tolist()[: int(ends[0]) + 1] if len(ends) else tokens.tolist() + [EOS] * MOST
