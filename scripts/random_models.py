"""Small random models of `transformers`, their batches and options, and what they compute.

Shared by ``scripts.fuzz_huggingface`` and the tests. Names are those of classes, such as
"BertForMaskedLM"; of sequence-to-sequence models also the family's, such as "Bart".

Shapes: B = sentences, L = longest sentence.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import transformers
from torch import Tensor

from lightseq_fairseq.huggingface import reader

BERTS = ("Bert", "Roberta", "XLMRoberta", "Camembert")
PAIRS = ("Bart", "MBart", "M2M100", "Pegasus", "Marian")
FAMILIES = (*BERTS, "ModernBert", *PAIRS, "ViT", "GPT2")

# Heads that read only the rows of real tokens.
TOKEN_HEADS = ("ForMaskedLM", "ForTokenClassification")
HEADS = (
    "Model",
    *TOKEN_HEADS,
    "ForSequenceClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
)
BERT_HEADS = (*HEADS, "ForNextSentencePrediction", "ForPreTraining")
BART_HEADS = (
    "Model",
    "ForConditionalGeneration",
    "ForSequenceClassification",
    "ForQuestionAnswering",
)
VIT_HEADS = ("Model", "ForImageClassification", "ForMaskedImageModeling")
GPT2_HEADS = (
    "LMHeadModel",
    "Model",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
)

LONGEST = 12  # tokens of a sentence
POSITIONS = LONGEST + 4  # of the BERT family
WINDOWS = LOCAL, GLOBAL = "sliding_attention", "full_attention"  # of ModernBERT's layers
BIASES = ("attention", "mlp", "norm", "classifier", "decoder")
PAD, EOS = 1, 2  # of sequence-to-sequence models
_BERT = {
    "vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": POSITIONS, "type_vocab_size": 2,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
_MODERN = {
    "vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2,
    "intermediate_size": 24, "local_attention": 4, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2, "reference_compile": False,
    "initializer_range": 0.2,
}  # fmt: skip
_PAIR = {
    "vocab_size": 40, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 32, "max_position_embeddings": 24, "pad_token_id": PAD,
    "eos_token_id": EOS, "bos_token_id": 0, "decoder_start_token_id": EOS,
    "forced_eos_token_id": EOS, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
    "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
}  # fmt: skip
_VIT = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24, "image_size": 12, "patch_size": 4, "encoder_stride": 4,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 3,
}  # fmt: skip
_GPT2 = {
    "vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_inner": 24, "n_positions": 40,
    "resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "classifier_dropout": 0.0,
    "bos_token_id": 1, "eos_token_id": EOS, "pad_token_id": 0, "num_labels": 3,
}  # fmt: skip
_SIZES = {
    **dict.fromkeys(BERTS, _BERT), "ModernBert": _MODERN, **dict.fromkeys(PAIRS, _PAIR),
    "Marian": {**_PAIR, "decoder_vocab_size": 40}, "ViT": _VIT, "GPT2": _GPT2,
}  # fmt: skip


def family_of(name: str) -> str:
    return next(family for family in FAMILIES if name.startswith(family))


def heads_of(family: str) -> tuple[str, ...]:
    """The classes of a family, without its name, of which it has all heads that ours know."""
    own = {
        "Bert": BERT_HEADS, "ViT": VIT_HEADS, "GPT2": GPT2_HEADS, "Bart": BART_HEADS,
        "MBart": BART_HEADS, "Marian": ("Model", "MTModel"),
    }  # fmt: skip
    return own.get(family, BART_HEADS[:2] if family in PAIRS else HEADS)


def build(name: str, dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    """A model in training mode, whose trained parameters are all random."""
    if name in PAIRS:
        name += "MTModel" if name == "Marian" else "ForConditionalGeneration"
    cls = getattr(transformers, name)
    model = cls(cls.config_class(**{**_SIZES[family_of(name)], **config})).to(dtype).train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    return model


def with_ends(model: Any, source: random.Random) -> Any:
    """The model in evaluation, changed so that results of ``generate`` end at many lengths."""
    with torch.no_grad():
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_()
            model.final_logits_bias[0, EOS] += source.uniform(0, 2.5)
        else:
            model.lm_head.weight[EOS] *= source.uniform(1, 2)
    return model.eval()


def random_config(source: random.Random, name: str) -> dict[str, Any]:
    """A random small configuration."""
    family, heads, layers = family_of(name), source.randint(1, 3), source.randint(1, 3)
    width, inner = heads * source.choice((8, 16, 24)), 8 * source.randint(1, 6)
    activation = source.choice(("gelu", "gelu_new", "relu", "silu", "gelu_pytorch_tanh"))
    config: dict[str, Any] = {"attn_implementation": source.choice(("sdpa", "eager"))}
    if family in PAIRS:
        config |= {
            "d_model": width, "encoder_attention_heads": heads, "decoder_attention_heads": heads,
            "encoder_layers": layers, "decoder_layers": source.randint(1, 3),
            "encoder_ffn_dim": inner, "decoder_ffn_dim": 8 * source.randint(1, 4),
            "scale_embedding": source.random() < 0.5, "activation_function": activation,
        }  # fmt: skip
    elif family == "GPT2":
        config |= {
            "n_embd": width, "n_head": heads, "n_layer": layers,
            "n_inner": source.choice((None, inner)), "activation_function": activation,
        }  # fmt: skip
    else:
        config |= {
            "num_attention_heads": heads, "hidden_size": width, "num_hidden_layers": layers,
            "intermediate_size": inner,
            "hidden_activation" if family == "ModernBert" else "hidden_act": activation,
        }  # fmt: skip
    if family == "ViT":
        config["qkv_bias"] = source.random() < 0.7
    if family == "ModernBert":
        config |= {
            "layer_types": [source.choice(WINDOWS) for _ in range(layers)],
            "local_attention": source.choice((2, 4, 7, 40)),
            "classifier_pooling": source.choice(("cls", "mean")),
            **{f"{bias}_bias": source.random() < 0.3 for bias in BIASES},
        }  # fmt: skip
    if family in BERTS:
        config["type_vocab_size"] = source.randint(1, 3)
        config["layer_norm_eps"] = source.choice((1e-12, 1e-5))
    if family in BERTS and name.endswith("ForSequenceClassification"):
        config["num_labels"] = source.randint(1, 3)
        config["problem_type"] = source.choice((None, "regression"))
    elif name.endswith("ForTokenClassification"):
        config["num_labels"] = source.randint(2, 4)
    if family != "ViT":  # also numbers that are no multiple of 8
        words = config["vocab_size"] = _SIZES[family]["vocab_size"] + source.randint(0, 4)
        if family == "Marian":
            config["decoder_vocab_size"] = words
    return config


def mask_of(lengths: Sequence[int], left: bool = False) -> Tensor:
    """int64 [B, L], 1 at real tokens."""
    steps = torch.arange(max(lengths))
    real = (steps < torch.tensor(lengths)[:, None]).long()
    return real.flip(1) if left else real


def covered_masks(name: str) -> tuple[str, ...]:
    """Kinds of masks for which ours compute the whole call, see `random_mask`."""
    full = ("full", "none", "one token")
    if name.endswith("ForQuestionAnswering"):
        return full
    if family_of(name) == "GPT2":
        return (*full, "ragged", "one sentence")
    reads_all = name.endswith(TOKEN_HEADS) or family_of(name) in PAIRS
    return (*full, "ragged", "one sentence", "holes", *["left", "left holes"] * reads_all)


def random_mask(
    source: random.Random, name: str, kinds: Sequence[str] | None = None
) -> tuple[Tensor, bool]:
    """A mask of one of these kinds, otherwise of a covered one; and whether it is an argument."""
    kind = source.choice(covered_masks(name) if kinds is None else kinds)
    sentences = 1 if kind == "one sentence" else source.randint(1, 4)
    sentences *= 2 if name.endswith("ForMultipleChoice") else 1
    longest = 1 if kind == "one token" else source.randint(2, LONGEST)
    lengths = [source.randint(1, longest) for _ in range(sentences)]
    if kind in ("full", "none", "one token"):
        lengths = [longest] * sentences
    on_left = kind.startswith("left")
    mask = mask_of(lengths, on_left)
    if kind.endswith("holes"):
        holes = torch.rand(mask.shape) < 0.3
        holes[:, -1 if on_left else 0] = False
        mask = mask * ~holes
    return mask, kind != "none"


def batch_of(model: Any, mask: Tensor, given: bool = True, types: bool = True) -> dict[str, Any]:
    """Random inputs of a model for these real tokens, and labels that its head reads.

    given: the mask is an argument. types: so are token types. Of images only the number is read
    from the mask.
    """
    config, name, shape = model.config, type(model).__name__, tuple(mask.shape)
    family = family_of(name)
    if family == "ViT":
        return _images(config, name, len(mask))
    low = 3 if family in PAIRS or family == "GPT2" else 0
    ids = torch.randint(low, config.vocab_size, shape)
    if family in PAIRS or family == "GPT2" or torch.rand(()) < 0.7:
        ids = ids.masked_fill(mask == 0, config.pad_token_id)
    if family in PAIRS and name.endswith("ForSequenceClassification"):  # which reads the eos
        ids[torch.arange(len(mask)), mask.shape[1] - 1 - mask.flip(1).argmax(1)] = EOS
    batch: dict[str, Any] = {"input_ids": ids}
    if given or getattr(config, "classifier_pooling", "cls") == "mean":  # whose head reads it
        batch["attention_mask"] = mask
    if types and family in BERTS:
        batch["token_type_ids"] = torch.randint(config.type_vocab_size, shape)
    if name.endswith("ForMultipleChoice"):
        batch = {name: value.unflatten(0, (-1, 2)) for name, value in batch.items()}
        batch["labels"] = torch.randint(2, (len(mask) // 2,))
    elif name.endswith(("ForMaskedLM", "ForPreTraining")):
        batch["labels"] = torch.randint(config.vocab_size, shape).masked_fill(mask == 0, -100)
    elif name.endswith("LMHeadModel"):
        batch["labels"] = ids.masked_fill(mask == 0, -100)
    elif name.endswith(("ForConditionalGeneration", "MTModel")):
        real = mask_of(torch.randint(1, 10, (len(mask),)).tolist())
        words = torch.randint(3, config.vocab_size, real.shape)
        batch["labels"] = words.masked_fill(real == 0, -100)
    elif name.endswith("ForTokenClassification"):
        batch["labels"] = torch.randint(config.num_labels, shape).masked_fill(mask == 0, -100)
    elif name.endswith("ForSequenceClassification"):
        is_numbers = config.problem_type == "regression" or config.num_labels == 1
        several = (len(mask), config.num_labels) if config.num_labels > 1 else (len(mask),)
        batch["labels"] = (
            torch.randn(several) if is_numbers else torch.randint(config.num_labels, (len(mask),))
        )
    elif name.endswith("ForQuestionAnswering"):
        batch["start_positions"] = torch.randint(shape[1], (len(mask),))
        batch["end_positions"] = torch.randint(shape[1], (len(mask),))
    elif name.endswith("ForNextSentencePrediction"):
        batch["labels"] = torch.randint(2, (len(mask),))
    elif family in PAIRS:  # without a head
        batch["decoder_input_ids"] = torch.randint(3, config.vocab_size, (len(mask), 5))
    if name.endswith("ForPreTraining"):
        batch["next_sentence_label"] = torch.randint(2, (len(mask),))
    return batch


def _images(config: Any, name: str, count: int) -> dict[str, Any]:
    side = config.image_size
    batch = {"pixel_values": torch.randn(count, config.num_channels, side, side)}
    if name.endswith("Classification"):
        batch["labels"] = torch.randint(config.num_labels, (count,))
    elif name.endswith("Modeling"):
        batch["bool_masked_pos"] = torch.rand(count, (side // config.patch_size) ** 2) < 0.4
        batch["bool_masked_pos"][:, 0] = True
    return batch


def random_batch(
    source: random.Random, model: Any, kinds: Sequence[str] | None = None
) -> dict[str, Any]:
    """See `random_mask` and `batch_of`."""
    mask, given = random_mask(source, type(model).__name__, kinds)
    return batch_of(model, mask, given, types=source.random() < 0.7)


def collated(items: Sequence[dict[str, Tensor]], pad: int, left: bool = False) -> dict[str, Tensor]:
    """A batch of examples without the dimension B, padded on the right or on the left."""
    fill = {"input_ids": pad, "attention_mask": 0, "token_type_ids": 0, "labels": -100}
    batch = {}
    for name in items[0]:
        rows = [item[name] for item in items]
        if name in fill and rows[0].dim() > 0:
            sizes = [row.shape[-1] for row in rows]
            pads = [(max(sizes) - size, 0) for size in sizes]
            rows = [
                torch.nn.functional.pad(row, both if left else both[::-1], value=fill[name])
                for row, both in zip(rows, pads)
            ]
        batch[name] = torch.stack(rows)
    return batch


def random_options(source: random.Random, config: Any) -> dict[str, Any]:
    """Options of ``generate`` that our search covers, each left out at times."""
    words, eos = config.vocab_size, config.eos_token_id
    forced = source.randint(5, words - 1)
    others = [word for word in range(3, words) if word != forced]
    drawn = {
        "forced_eos_token_id": source.choice((None, eos)),
        "forced_bos_token_id": forced,
        "no_repeat_ngram_size": source.choice((2, 3)),
        "min_length": source.randint(0, 9),
        "min_new_tokens": source.randint(0, 6),
        "bad_words_ids": [[1]],
        "suppress_tokens": source.sample(others, source.randint(1, 3)),
        "pad_token_id": source.choice((0, 4)),
        "renormalize_logits": True,
        "use_cache": False,
        "eos_token_id": None,
    }
    if config.is_encoder_decoder:
        drawn["decoder_start_token_id"] = source.randint(0, words - 1)
    options = {name: value for name, value in drawn.items() if source.random() < 0.25}
    if "eos_token_id" in options:
        options["forced_eos_token_id"] = None
    beam = options["num_beams"] = source.choice((1, 2, 4))
    options["max_new_tokens"] = source.randint(1, 14)
    if beam > 1:
        options |= {
            "early_stopping": source.choice((True, False, "never")),
            "length_penalty": source.choice((0.0, 1.0, -0.5, 2.0)),
            "num_return_sequences": source.randint(1, beam),
            "return_dict_in_generate": source.random() < 0.5,
            "output_scores": source.random() < 0.7,
        }
    return options


class Result(NamedTuple):
    """What a call has computed; rows of pads are zero."""

    loss: Tensor
    outputs: dict[str, Tensor]
    states: list[Tensor]
    gradients: dict[str, Tensor]


def computed(model: Any, batch: dict[str, Any], **options: Any) -> Result:
    """The results at real tokens and all gradients; those of before are deleted."""
    model.zero_grad()
    found = model(**batch, **options)
    real = batch.get("attention_mask")
    flat = None if real is None or real.dim() > 3 else real.flatten(0, -2).bool()

    def at_tokens(x: Tensor) -> Tensor:
        if flat is None or x.dim() < 2 or x.shape[:2] != flat.shape:
            return x
        return x.masked_fill(~flat.reshape(*flat.shape, *(1,) * (x.dim() - 2)), 0.0)

    is_pair = "encoder_last_hidden_state" in found
    outputs = {
        name: at_tokens(x) if name.startswith("encoder") or not is_pair else x
        for name, x in found.items()
        if isinstance(x, Tensor) and name != "loss"
    }
    loss = found.get("loss")
    if loss is None:  # a model without a head
        generator = torch.Generator().manual_seed(1)
        loss = sum(
            (x * torch.randn(x.shape, generator=generator).to(x)).mean() for x in outputs.values()
        )
    if loss.requires_grad:
        loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    states = [at_tokens(x) for x in found.get("hidden_states") or ()]
    return Result(loss, outputs, states, gradients)


@contextmanager
def by_graphs(is_so: bool = True) -> Iterator[None]:
    """Within it calls take the path of CUDA graphs; on a CPU nothing is captured, so each call runs
    what would be."""
    with mock.patch.object(reader, "captures", (lambda device: True) if is_so else reader.captures):
        yield
