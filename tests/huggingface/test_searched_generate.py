"""``generate`` of accelerated models: the sequences and scores of plain ones, by our search."""

from __future__ import annotations

import copy
import pickle
import random
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.accelerated import one_warning, transformers
from test_seq2seq import WORDS
from torch import Tensor

import lightseq_fairseq.huggingface as lightseq
from scripts import random_models as models
from scripts.random_models import EOS, PAD, PAIRS

FEW_RESULTS = "a sentence has fewer results than num_return_sequences"
# Layers that have a cache call the accelerated decoder, too.
USUAL = {"it has a cache, as in generation", "it makes a cache, as for generation"}


def build(name: str, source: random.Random, **config: Any) -> Any:
    """A model in evaluation, whose results end at many lengths."""
    return models.with_ends(models.build(name, **config), source)


def sources(source: random.Random, model: Any) -> dict[str, Tensor]:
    batch = models.random_batch(source, model)
    return {name: x for name, x in batch.items() if name != "labels"}


def assert_same(found: Any, expected: Any) -> Tensor:
    """The sequences are equal, and so are the scores; returns the sequences."""
    if not isinstance(expected, Tensor):
        assert type(found) is type(expected)
        if expected.sequences_scores is None:
            assert found.sequences_scores is None
        else:
            torch.testing.assert_close(
                found.sequences_scores, expected.sequences_scores, rtol=1e-4, atol=1e-4
            )
        found, expected = found.sequences, expected.sequences
    assert found.dtype == expected.dtype
    assert found.tolist() == expected.tolist()
    return found


@pytest.mark.parametrize("family", PAIRS)
@pytest.mark.filterwarnings("ignore:Unfeasible length", "ignore:lightseq")
def test_random_options(family: str) -> None:
    source, lengths, calls, few = random.Random(f"{family}"), set(), 0, 0
    torch.manual_seed(1)
    transformers.logging.set_verbosity_error()
    for _ in range(5):
        config = {"pad_token_id": 0} if source.random() < 0.2 else {}
        plain = build(family, source, **config, **models.random_config(source, family))
        ours = lightseq.accelerate(copy.deepcopy(plain))
        for _ in range(3):
            batch, options = sources(source, plain), models.random_options(source, plain.config)
            expected, found = (model.generate(**batch, **options) for model in (plain, ours))
            lengths.add(assert_same(found, expected).shape[1])
        coverage = lightseq.report(ours)
        assert set(coverage.fallbacks) <= {FEW_RESULTS, *USUAL}
        few += coverage.fallbacks[FEW_RESULTS]
        calls += 3
    assert len(lengths) > 5 and few < calls / 5


def test_words_of_now_and_copies(tmp_path: Path) -> None:
    """The weights are read at each call; a copy, a saved model and a restored one have them."""
    source = random.Random(2)
    torch.manual_seed(2)
    plain = build("Bart", source)
    ours = lightseq.accelerate(copy.deepcopy(plain))
    batch = sources(source, plain)
    options = {"num_beams": 2, "max_new_tokens": 9, "min_new_tokens": 5}
    assert type(ours) is not type(plain) and type(ours).__name__ == type(plain).__name__
    before = ours.generate(**batch, **options).tolist()
    with torch.no_grad():
        for model in (plain, ours):
            generator = torch.Generator().manual_seed(3)
            for parameter in model.parameters():
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
            model.final_logits_bias += torch.randn(1, WORDS, generator=generator)
    expected = plain.generate(**batch, **options)
    assert expected.tolist() != before
    ours.save_pretrained(tmp_path)
    models = [ours, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))]
    models += [type(plain).from_pretrained(tmp_path).eval()]
    assert type(models[1]) is type(ours) and type(models[2]) is type(plain)
    assert lightseq.report(models[1]).calls == 0
    for model in models:
        assert_same(model.generate(**batch, **options), expected)
    assert lightseq.report(models[1]).calls == 2  # the encoder and the search
    restored = lightseq.restore(ours)
    assert type(restored) is type(plain)
    assert_same(restored.generate(**batch, **options), expected)
    # The embedding and the projection grow.
    for model in (plain, lightseq.accelerate(restored)):
        torch.manual_seed(4)
        model.resize_token_embeddings(WORDS + 5)
    expected, found = (model.generate(**batch, **options) for model in (plain, restored))
    assert_same(found, expected)


@contextmanager
def reasons() -> Iterator[list[str]]:
    """The warnings of ``generate`` within it."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    texts = [str(each.message) for each in caught]
    found += [text for text in texts if "own generate runs, because" in text]


class Halved(transformers.LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores / 2


class AtOnce(transformers.StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **given: Any) -> Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] > 3)


class Streamer(transformers.generation.streamers.BaseStreamer):
    def put(self, value: Tensor) -> None: ...
    def end(self) -> None: ...


def own_loop(model: Any, input_ids: Tensor, **given: Any) -> Tensor:
    return input_ids


FALLBACKS: list[tuple[str, dict[str, Any]]] = [
    ("generate samples among beams", {"do_sample": True}),
    ("generate has a streamer", {"num_beams": 1, "streamer": Streamer()}),
    ("generate has a Halved", {"logits_processor": transformers.LogitsProcessorList([Halved()])}),
    ("generate has a AtOnce", {"stopping_criteria": transformers.StoppingCriteriaList([AtOnce()])}),
    ("generate has a PrefixConstrainedLogitsProcessor", {
        "prefix_allowed_tokens_fn": lambda sentence, tokens: [5, 6, EOS]
    }),
    ("generate has a RepetitionPenaltyLogitsProcessor", {"repetition_penalty": 1.3}),
    ("generate has a MaxTimeCriteria", {"max_time": 100.0}),
    ("generate has a ExponentialDecayLengthPenalty", {
        "exponential_decay_length_penalty": (2, 1.5)
    }),
    ("generate has a SuppressTokensAtBeginLogitsProcessor", {"begin_suppress_tokens": [5]}),
    ("one of several tokens is forced", {"forced_bos_token_id": [5, 6]}),
    ("generate has 2 eos tokens", {"eos_token_id": [EOS, 5]}),
    ("another token than eos is forced at the end", {"forced_eos_token_id": 7}),
    ("bad_words_ids have several tokens", {"bad_words_ids": [[5, 6]]}),
    ("no_repeat_ngram_size is 1", {"no_repeat_ngram_size": 1}),
    ("a forced token is eos or blocked", {"forced_bos_token_id": 5, "bad_words_ids": [[5]]}),
    ("num_beams is 20", {"num_beams": 20}),
    ("generate begins with several decoder_input_ids", {
        "decoder_input_ids": torch.tensor([[EOS, 5]] * 3)
    }),
    ("the sentences begin with different tokens", {"decoder_start_token_id": [5, 6, 5]}),
    ("generate returns numbers of each step", {
        "return_dict_in_generate": True, "output_logits": True
    }),
    ("generate returns numbers of each step", {
        "return_dict_in_generate": True, "output_scores": True, "num_beams": 1
    }),
    ("generate has an assistant or looks up candidates", {
        "num_beams": 1, "prompt_lookup_num_tokens": 2
    }),
    ("generate has a custom_generate", {"custom_generate": own_loop}),
    ("generate has a cache", {"past_key_values": "new"}),
]  # fmt: skip


@pytest.fixture(scope="module")
def bart() -> tuple[Any, Any]:
    """A plain model and an accelerated copy."""
    torch.manual_seed(5)
    transformers.logging.set_verbosity_error()
    plain = build("Bart", random.Random(5), max_position_embeddings=12)
    return plain, lightseq.accelerate(copy.deepcopy(plain))


def batch_of_three() -> dict[str, Tensor]:
    mask = models.mask_of((4, 7, 2))
    return {"input_ids": torch.arange(21).view(3, 7) % 30 + 5, "attention_mask": mask}


@pytest.mark.parametrize("reason, given", FALLBACKS)
def test_fallbacks(bart: tuple[Any, Any], reason: str, given: dict[str, Any]) -> None:
    plain, ours = bart[0], copy.deepcopy(bart[1])
    found, times = [], 2
    with reasons() as texts:
        for model in (plain, *[ours] * times):
            options = {"max_new_tokens": 7, "num_beams": 2, **given}
            if "past_key_values" in options:
                cache = transformers.DynamicCache(config=model.config)
                options["past_key_values"] = transformers.EncoderDecoderCache(
                    cache, transformers.DynamicCache(config=model.config)
                )
            batch = batch_of_three()
            if options.get("prompt_lookup_num_tokens") or "streamer" in options:
                batch = {name: x[1:2] for name, x in batch.items()}
            torch.manual_seed(6)
            found.append(model.generate(**batch, **options))
    assert texts == [f"lightseq: Hugging Face's own generate runs, because {reason}."]
    for each in found[1:]:
        mine, theirs = (x if isinstance(x, Tensor) else x.sequences for x in (each, found[0]))
        assert mine.tolist() == theirs.tolist()
    assert lightseq.report(ours).fallbacks[reason] == times


def changed_dropout(model: Any) -> None:
    model.train()
    model.model.decoder.layers[0].dropout = 0.1


def hooked(model: Any) -> None:
    model.model.decoder.register_forward_hook(lambda *given: None)


def another_forward(model: Any) -> None:
    model.forward = model.forward


def another_forward_inside(model: Any) -> None:
    theirs = model.forward
    model.forward = lambda *args, **given: theirs(*args, **given)


def another_linear(model: Any) -> None:
    class Scaled(torch.nn.Linear):
        pass

    model.model.decoder.layers[1].fc1.__class__ = Scaled


def biased(model: Any) -> None:
    model.lm_head.bias = torch.nn.Parameter(torch.arange(float(WORDS)))


def diverged(model: Any) -> None:
    model.final_logits_bias.fill_(torch.nan)


@pytest.mark.parametrize(
    "change, reason",
    [
        (changed_dropout, "dropout is on: call model.eval() before generate"),
        (hooked, "a BartDecoder has hooks"),
        (another_forward, ""),
        (another_forward_inside, "the model has another forward"),
        (another_linear, "in place of Linear"),
        (diverged, "a sentence has no result with a finite score"),
        (biased, "the vocabulary projection has a bias or is elsewhere"),
    ],
)
def test_changed_models(bart: tuple[Any, Any], change: Any, reason: str) -> None:
    plain, ours = (copy.deepcopy(model) for model in bart)
    batch, found = batch_of_three(), []
    with reasons() as texts:
        for model in (plain, ours):
            change(model)
            torch.manual_seed(7)
            found.append(model.generate(**batch, num_beams=2, max_new_tokens=7).tolist())
    assert found[0] == found[1]
    assert [reason in text for text in texts] == [True] * bool(reason)


def test_positions_and_pads(bart: tuple[Any, Any]) -> None:
    plain, ours = (copy.deepcopy(model) for model in bart)
    for model in (plain, ours):
        model.final_logits_bias[0, EOS] += 5.0  # transformers fails if a hypothesis is as long
    batch, options = batch_of_three(), {"num_beams": 2, "max_length": 40}
    with pytest.warns(UserWarning, match="a sentence has more tokens than there are positions"):
        assert_same(ours.generate(**batch, **options), plain.generate(**batch, **options))
    batch["attention_mask"][1] = 0
    with pytest.warns(UserWarning, match="generate runs, because a sentence has only pads"):
        ours.generate(**batch, num_beams=2, max_length=9)


def test_given_parts_of_the_encoder(bart: tuple[Any, Any]) -> None:
    plain, ours = bart[0], copy.deepcopy(bart[1])
    batch, options = batch_of_three(), {"num_beams": 2, "max_new_tokens": 7}
    expected = plain.generate(**batch, **options)
    outputs = plain.get_encoder()(**batch)
    mask = batch["attention_mask"]
    assert_same(ours.generate(encoder_outputs=outputs, attention_mask=mask, **options), expected)
    with torch.inference_mode():
        assert_same(ours.generate(**batch, **options), expected)
    assert_same(ours.generate(**batch, **options), expected)
    assert not lightseq.report(ours).fallbacks
    words = ours.get_input_embeddings()(batch["input_ids"])
    with one_warning("Hugging Face's own forward runs"):  # that of the encoder
        found = ours.generate(inputs_embeds=words, attention_mask=mask, **options)
    assert_same(found, expected)


def test_what_a_result_lacks(bart: tuple[Any, Any]) -> None:
    ours = copy.deepcopy(bart[1])
    options = {"num_beams": 2, "max_new_tokens": 7, "return_dict_in_generate": True}
    with one_warning("no scores of each step, beam_indices and cache"):
        for _ in range(2):
            found = ours.generate(**batch_of_three(), **options, output_scores=True)
    assert found.scores is None and found.sequences_scores.shape == (3,)


def test_several_threads(bart: tuple[Any, Any]) -> None:
    plain, ours = bart[0], copy.deepcopy(bart[1])
    generator = torch.Generator().manual_seed(8)
    batches = [torch.randint(5, WORDS, (2, 6), generator=generator) for _ in range(4)]
    found: dict[int, Any] = {}

    def run(number: int) -> None:
        found[number] = ours.generate(batches[number], num_beams=2, max_new_tokens=7)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, ids in enumerate(batches):
        assert_same(found[number], plain.generate(ids, num_beams=2, max_new_tokens=7))


def read(model: Any) -> tuple[Any, list[int]]:
    """The graphs of the search, and the addresses that they read."""
    found = model._lightseq.decoder
    parts = [part for layer in found.layers for part in layer.parts]
    tensors = [x for part in parts for x in (part.weight, part.bias)]
    tensors += [found._matrix, found._bias, found._positions, found.source._rows]
    tensors += [found._words["weight"], found.steps.memory.tokens]
    return found.steps._graphs, [x.data_ptr() for x in tensors]


def test_addresses_stay(bart: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs stay valid from call to call; if an address changes, there are new graphs."""
    monkeypatch.setattr("lightseq_fairseq.generation.decoder._most_kept", lambda device: 1e9)
    plain, ours = (copy.deepcopy(model) for model in bart)
    batch = batch_of_three()

    def generate(**options: Any) -> tuple[Any, list[int]]:
        options = {"num_beams": 2, "max_new_tokens": 7, **options}
        assert_same(ours.generate(**batch, **options), plain.generate(**batch, **options))
        return read(ours)

    graphs, addresses = generate()
    for options in ({}, {"forced_eos_token_id": None}, {"bad_words_ids": [[5]]}, {"num_beams": 1}):
        with torch.no_grad():
            for model in (plain, ours):
                model.model.decoder.layers[0].fc1.weight.mul_(1.1)
                model.lm_head.weight.mul_(0.9)
        assert generate(**options) == (graphs, addresses)
    ours.model.decoder.layers[1].fc1.weight.data = plain.model.decoder.layers[1].fc1.weight.clone()
    assert generate()[0] is not graphs
    graphs = read(ours)[0]
    with torch.autocast("cpu", torch.bfloat16):
        ours.generate(**batch, num_beams=2, max_new_tokens=7)
    assert read(ours)[0] is not graphs
    graphs = read(ours)[0]
    assert generate()[0] is not graphs


@pytest.mark.parametrize("kind", ["bfloat16", "autocast"])
def test_bfloat16(kind: str) -> None:
    """Scores are near those of float32, and the search computes in bfloat16."""
    source = random.Random(9)
    torch.manual_seed(9)
    exact = build("M2M100", source)
    batch, options = batch_of_three(), {"num_beams": 4, "max_new_tokens": 5}
    options |= {"return_dict_in_generate": True, "output_scores": True}
    expected = exact.generate(**batch, **options)
    model = copy.deepcopy(exact).to(torch.bfloat16 if kind == "bfloat16" else torch.float32)
    ours = lightseq.accelerate(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            found = ours.generate(**batch, **options)
    torch.testing.assert_close(
        found.sequences_scores, expected.sequences_scores, rtol=0.05, atol=0.05
    )
    assert next(ours._lightseq.decoder.parameters()).dtype == torch.bfloat16
    assert not lightseq.report(ours).fallbacks


@pytest.mark.parametrize("bf16", [False, True])
def test_trainer_predicts(tmp_path: Path, bf16: bool) -> None:
    """Between updates; under accelerate's autocast the search computes in bfloat16."""
    torch.manual_seed(10)
    model = build("Marian", random.Random(10))
    data = [
        {k: v[0] for k, v in models.batch_of(model, models.mask_of([n + 2])).items()}
        for n in range(8)
    ]
    settings = {
        "max_steps": 4, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4,
        "learning_rate": 1e-2, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "no",
        "use_cpu": True, "bf16": bf16, "report_to": [], "disable_tqdm": True,
        "predict_with_generate": True, "generation_num_beams": 2, "generation_max_length": 9,
    }  # fmt: skip
    words: dict[str, list[Any]] = {}
    for name, cls in (("plain", transformers.Seq2SeqTrainer), ("ours", lightseq.Seq2SeqTrainer)):
        words[name] = seen = []
        args = transformers.Seq2SeqTrainingArguments(str(tmp_path / name), **settings)
        trainer = cls(
            copy.deepcopy(model), args, train_dataset=data, eval_dataset=data,
            data_collator=lambda items: models.collated(items, PAD),
            compute_metrics=lambda p, seen=seen: seen.append(p.predictions.tolist()) or {},
        )  # fmt: skip
        trainer.remove_callback(transformers.PrinterCallback)
        torch.manual_seed(11)
        trainer.train()
        seen.append(trainer.predict(data).predictions.tolist())
    assert len(words["ours"]) == 4
    if not bf16:
        assert words["ours"] == words["plain"]
    state = trainer.model._lightseq
    assert state.report.calls == 6 and not state.report.fallbacks
    dtype = torch.bfloat16 if bf16 else torch.float32
    assert next(state.decoder.parameters()).dtype == dtype
