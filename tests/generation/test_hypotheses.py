"""A trained model translates as fairseq's own with the same weights, token for token."""

from __future__ import annotations

from typing import Any

import helpers.parity as parity
import pytest
import torch
from fairseq.dataclass.configs import GenerationConfig
from fairseq.logging import metrics
from helpers.digits import SENTENCES, TOY, Toy, held_out, translate
from helpers.parity import LS, NATIVE, command_line
from helpers.searches import assert_close


@pytest.mark.parametrize("left_pad", [True, False], ids=["left-pad", "right-pad"])
@pytest.mark.parametrize("beam", [1, 5], ids=["greedy", "beam-5"])
def test_hypotheses(toy: Toy, beam: int, left_pad: bool) -> None:
    native = translate(toy, [toy.native], left_pad, beam=beam)
    assert_close(translate(toy, [toy.ls], left_pad, beam=beam), native)
    lengths = [len(hypotheses[0]["tokens"]) - 1 for hypotheses in native.values()]
    assert sum(lengths) / len(lengths) > 8
    assert all(len(hypotheses) == beam for hypotheses in native.values())


def test_other_ways_to_search(toy: Toy) -> None:
    options: dict[str, Any] = {
        "beam": 3,
        "lenpen": 0.6,
        "no_repeat_ngram_size": 2,
        "min_len": 4,
        "unkpen": 1.0,
    }
    assert_close(translate(toy, [toy.ls], **options), translate(toy, [toy.native], **options))


def test_ensembles_of_ours_and_fairseqs(toy: Toy) -> None:
    assert_close(
        translate(toy, [toy.ls, toy.native], beam=2), translate(toy, [toy.native] * 2, beam=2)
    )


def test_attention_for_alignments(toy: Toy) -> None:
    options: dict[str, Any] = {"beam": 2, "print_alignment": "hard"}
    ours, native = (translate(toy, [model], **options) for model in (toy.ls, toy.native))
    for sentence, expected in native.items():
        for a, b in zip(ours[sentence], expected, strict=True):
            assert b["attention"].shape[1] == len(b["tokens"])
            torch.testing.assert_close(a["attention"], b["attention"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("layer, heads", [(0, None), (1, 2), (None, 3)])
def test_attention_of_a_layer(toy: Toy, layer: int | None, heads: int | None) -> None:
    sample = next(iter(held_out(toy.task)))
    inputs, wanted = sample["net_input"], {"alignment_layer": layer, "alignment_heads": heads}
    real = inputs["prev_output_tokens"].ne(parity.PAD)
    found = []
    for model in (toy.ls, toy.native):
        with torch.no_grad():
            encoded = model.encoder(inputs["src_tokens"], src_lengths=inputs["src_lengths"])
            _, step = model.decoder.extract_features(
                inputs["prev_output_tokens"][:, :1], encoded, {}, **wanted
            )
            _, sentences = model.decoder.extract_features(
                inputs["prev_output_tokens"], encoded, **wanted
            )
            _, whole = model(**inputs, **wanted)
        found.append((step["attn"][0], sentences["attn"][0][real], whole["attn"][0][real]))
    for ours, native in zip(*found, strict=True):
        torch.testing.assert_close(ours, native, rtol=0, atol=1e-5)


def test_evaluation_draws_no_random_number(toy: Toy) -> None:
    sample = next(iter(held_out(toy.task)))
    generator = toy.task.build_generator([toy.ls], GenerationConfig(beam=2))
    before = torch.get_rng_state()
    with torch.no_grad():
        toy.ls(**sample["net_input"])
    toy.task.inference_step(generator, [toy.ls], sample)
    assert torch.equal(torch.get_rng_state(), before)


def test_one_token_at_a_time_is_the_whole_sentence_at_once(toy: Toy) -> None:
    greedy = translate(toy, [toy.ls], beam=1)
    end = toy.task.target_dictionary.eos()
    for sample in held_out(toy.task):
        outputs = [greedy[sentence][0]["tokens"] for sentence in sample["id"].tolist()]
        target = torch.nn.utils.rnn.pad_sequence(outputs, batch_first=True, padding_value=1)
        previous = torch.cat([target.new_full((len(target), 1), end), target[:, :-1]], dim=1)
        previous = previous.masked_fill(target.eq(parity.PAD), parity.PAD)
        with torch.no_grad():
            logits, _ = toy.ls(**{**sample["net_input"], "prev_output_tokens": previous})
        logits[..., parity.PAD] = -torch.inf  # the generator never outputs a pad
        real = target.ne(parity.PAD)
        real[:, GenerationConfig().max_len_b :] = False  # there the generator ends the sentence
        chosen = logits.gather(-1, target[..., None])[..., 0]
        # Two words may have equal logits up to rounding; then either is greedy.
        assert (logits.amax(-1) - chosen)[real].max() <= 1e-4


def test_eval_bleu(toy: Toy) -> None:
    scores = []
    for systems, model in ((LS, toy.ls), (NATIVE, toy.native)):
        flags = {"eval_bleu": True, "eval_bleu_args": '{"beam": 4}', "eval_tokenized_bleu": True}
        cfg = parity.parse(command_line(toy.folder, systems, **TOY, **flags))
        task, evaluated, criterion = parity.build(cfg)
        evaluated.load_state_dict(model.state_dict())
        evaluated.eval()
        outputs = [task.valid_step(s, evaluated, criterion)[2] for s in held_out(task)]
        with metrics.aggregate(new_root=True) as found:
            task.reduce_metrics(outputs, criterion)
        values = found.get_smoothed_values()
        assert sum(output["_bleu_ref_len"] for output in outputs) > 8 * SENTENCES
        scores.append((values["bleu"], values["loss"], values["nll_loss"]))
    ours, native = scores
    assert ours == native
    assert ours[0] > 60
