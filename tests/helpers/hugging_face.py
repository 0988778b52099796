"""Small models of `transformers` with random weights, with their tokenizers, and their logits."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from helpers import cli_runs
from torch import Tensor

from lightseq_fairseq.checkpoints import models

# isort: split
from fairseq import checkpoint_utils
from fairseq.data.data_utils import collate_tokens

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
UNUSED_PEGASUS = [f"<unk_{n}>" for n in range(2, 103)]
UNUSED = ("<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<unk>NOTUSED")
WORDS = [f"w{n}" for n in range(40)]
LONGEST = 16


class Kind(NamedTuple):
    """A model of `transformers` and a run that trains it.

    Attributes:
        model, config: class and settings.
        tokenizer: writes the files of the tokenizer for these words into a folder.
        words: of the vocabulary, in order.
        flags: of lightseq-train.
        pairs: whether the data are sentence pairs; and the flags of lightseq-preprocess then.
        counts: whether its positions count tokens, not columns, so that pads may come first.
        named: how fairseq writes a language.
    """

    model: str
    config: dict[str, Any]
    tokenizer: Callable[[Path, list[str]], Any]
    words: list[str]
    flags: str
    pairs: str = ""
    counts: bool = True
    named: str = "{}"


def fast(name: str, unigram: bool = False, **more: Any) -> Callable[[Path, list[str]], None]:
    """Files of a tokenizer of `transformers` that needs only words."""

    def write(folder: Path, words: list[str]) -> None:
        cls = getattr(transformers, name)
        if unigram:
            made = cls(vocab=[(word, 0.0) for word in words])
        else:
            made = cls(vocab={word: number for number, word in enumerate(words)}, merges=[], **more)
        made.save_pretrained(folder)

    return write


def slow(files: dict[str, int | None]) -> Callable[[Path, list[str]], None]:
    """Files of a tokenizer without tokenizer.json: name -> end of its words; others are special."""

    def write(folder: Path, words: list[str]) -> None:
        for name, end in files.items():
            rows = {word: number for number, word in enumerate(words[:end])}
            (folder / name).write_text(json.dumps(rows))
        special = words[end:] if end else []
        text = json.dumps({"unk_token": "<unk>", "additional_special_tokens": special})
        (folder / "tokenizer_config.json").write_text(text)

    return write


_STACK = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_BERT = {
    **_STACK,
    "intermediate_size": 48,
    "max_position_embeddings": LONGEST + 2,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
}
_MASKED = "--arch ls_roberta --task masked_lm --tokens-per-sample 16"

_PAIR = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 40,
    "max_position_embeddings": LONGEST,
}
_PAIRS = "-s a -t b --srcdict {0}/dict.txt --joined-dictionary"
_TRANSLATING = "--arch ls_transformer -s a -t b"

# </s> comes first, <pad> last.
_MARIAN = {
    **_PAIR, "activation_function": "swish", "scale_embedding": True, "eos_token_id": 0,
    "forced_eos_token_id": 0, "pad_token_id": 2 + len(WORDS),
    "decoder_start_token_id": 2 + len(WORDS),
}  # fmt: skip
KINDS = {
    "roberta": Kind(
        "RobertaForMaskedLM", _BERT, fast("RobertaTokenizer"), [*SPECIAL, *WORDS, "<mask>"], _MASKED
    ),
    # Its file has its own <s>, </s> and <unk> behind rows that are not used.
    "camembert": Kind(
        "CamembertForMaskedLM",
        {**_BERT, "bos_token_id": 5, "eos_token_id": 6, "num_attention_heads": 2},
        fast("CamembertTokenizer", unigram=True),
        [*UNUSED, "<s>", "</s>", *WORDS, "<mask>"],
        _MASKED,
    ),
    "gpt2": Kind(
        "GPT2LMHeadModel",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LONGEST}
        | {"bos_token_id": 41, "eos_token_id": 41},
        fast("GPT2Tokenizer"),
        [*WORDS, "\u00c0", "<|endoftext|>"],
        "--arch ls_transformer_lm --task language_modeling --tokens-per-sample 16",
    ),
    "nllb": Kind(
        "M2M100ForConditionalGeneration",
        _PAIR,
        fast("NllbTokenizer", extra_special_tokens=["eng_Latn", "zul_Latn"]),
        [*SPECIAL, *WORDS, "eng_Latn", "zul_Latn", "<mask>"],
        _TRANSLATING,
        _PAIRS,
        named="__{}__",
    ),
    "m2m": Kind(
        "M2M100ForConditionalGeneration",
        {**_PAIR, "vocab_size": 4 + len(WORDS) + 2 + 5},
        slow({"vocab.json": -2}),
        [*SPECIAL, *WORDS, "__en__", "__zu__"],
        _TRANSLATING,
        _PAIRS,
    ),
    "mbart": Kind(
        "MBartForConditionalGeneration",
        # Its tokenizer adds 23 more languages.
        {**_PAIR, "scale_embedding": True, "vocab_size": 4 + len(WORDS) + 25 + 1},
        fast("MBartTokenizer", unigram=True),
        [*SPECIAL, *WORDS, "en_XX", "ro_RO", "<mask>"],
        _TRANSLATING.replace("transformer", "mbart_large"),
        _PAIRS,
        counts=False,
        named="[{}]",
    ),
    "bart": Kind(
        "BartForConditionalGeneration",
        _PAIR,
        fast("RobertaTokenizer"),
        [*SPECIAL, *WORDS],  # its tokenizer adds <mask>, for which it has no row
        _TRANSLATING.replace("transformer", "bart_large"),
        _PAIRS,
        counts=False,
    ),
    # No <s>.
    "marian": Kind(
        "MarianMTModel",
        _MARIAN,
        slow({"vocab.json": None, "source.spm": None, "target.spm": None}),
        ["</s>", "<unk>", *WORDS, "<pad>"],
        _TRANSLATING.replace("transformer", "marian_base"),
        _PAIRS,
        counts=False,
    ),
    "marian-of-two": Kind(
        "MarianMTModel",
        {**_MARIAN, "share_encoder_decoder_embeddings": False, "langs": ["a", "b"]}
        | {"vocab_size": 3 + len(WORDS)},
        slow({"vocab.json": None, "target_vocab.json": None, "source.spm": None}),
        ["</s>", "<unk>", *WORDS, "<pad>"],
        "--arch ls_marian -s a -t b",
        "-s a -t b --srcdict {0}/dict.a.txt --tgtdict {0}/dict.b.txt",
        counts=False,
    ),
    "pegasus": Kind(
        "PegasusForConditionalGeneration",
        {**_PAIR, "activation_function": "relu", "scale_embedding": True},
        fast("PegasusTokenizer", unigram=True),
        ["<pad>", "</s>", "<mask_1>", "<mask_2>", *UNUSED_PEGASUS, "<unk>", *WORDS],
        _TRANSLATING.replace("transformer", "pegasus_large"),
        _PAIRS,
        counts=False,
    ),
    "xglm": Kind(
        "XGLMForCausalLM",
        {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48}
        | {"max_position_embeddings": LONGEST},
        fast("XGLMTokenizer", unigram=True),
        [*SPECIAL, *WORDS, *(f"<madeupword{n}>" for n in range(7))],
        "--arch ls_transformer_lm --task language_modeling --tokens-per-sample 16",
    ),
    "fsmt": Kind(
        "FSMTForConditionalGeneration",
        {**_PAIR, "langs": ["a", "b"]} | dict.fromkeys(("src_vocab_size", "tgt_vocab_size"), 44),
        slow({"vocab-src.json": None, "vocab-tgt.json": None}),
        [*SPECIAL, *WORDS],
        _TRANSLATING,
        "-s a -t b --srcdict {0}/dict.a.txt --tgtdict {0}/dict.b.txt",
    ),
}

MBART50 = KINDS["mbart"]._replace(
    # It adds <pad>, 52 languages and <mask> to the words of sentencepiece.
    tokenizer=lambda folder, words: fast("MBart50Tokenizer", unigram=True)(
        folder, ["<unk>", "<s>", "</s>", *words[4:]]
    ),
    words=[*SPECIAL, *WORDS],
    config={**KINDS["mbart"].config, "vocab_size": 4 + len(WORDS) + 52 + 1}
    | {"decoder_start_token_id": 2},
)


def make(kind: Kind, folder: Path) -> Any:
    """Writes the folder of a model whose numbers all differ, and returns the model."""
    torch.manual_seed(3)
    cls = getattr(transformers, kind.model)
    sizes = ({} if "langs" in kind.config else {"vocab_size": len(kind.words)}) | kind.config
    model = cls(cls.config_class(**sizes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_positions" not in name or kind.model.startswith(("Bart", "MBart")):
                parameter += 0.1 * torch.randn_like(parameter)
        if kind.model.startswith("Marian"):
            model.final_logits_bias.normal_()
        if kind.model.startswith("Roberta"):  # as in the files that were made from fairseq's
            model.roberta.embeddings.token_type_embeddings.weight.zero_()
    model.tie_weights()
    model.save_pretrained(folder)
    kind.tokenizer(folder, kind.words)
    return model


def marian(folder: Path, text: Path) -> Any:
    """The folder of a Marian with a tokenizer of the text: vocab.json and two models of
    sentencepiece, and no tokenizer.json."""
    sentencepiece = pytest.importorskip("sentencepiece")
    folder.mkdir()
    source, target = folder / "source.spm", folder / "target.spm"
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(folder / "pieces"), vocab_size=40, minloglevel=2
    )
    (folder / "pieces.vocab").unlink()
    (folder / "pieces.model").rename(source)
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(source))
    made = [pieces.id_to_piece(n) for n in range(3, pieces.get_piece_size())]
    kind = KINDS["marian"]._replace(words=["</s>", "<unk>", *made, "<pad>"])
    pad = dict.fromkeys(("pad_token_id", "decoder_start_token_id"), len(kind.words) - 1)
    whole = source.read_bytes()
    model = make(kind._replace(config={**kind.config, **pad}), folder)
    for path in (source, target):
        path.write_bytes(whole)
    return model


def stir(model: Any, noise: float, of_eos: float) -> None:
    """Adds noise to the weights, and makes </s> likelier: so texts differ and end."""
    eos, generator = model.config.eos_token_id, torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_positions" not in name:
                parameter += noise * torch.randn(parameter.shape, generator=generator)
        if type(model).__name__.startswith("Marian"):
            model.final_logits_bias[0, eos] = of_eos
        else:
            model.model.shared.weight[eos] *= of_eos


def load(folder: Path) -> Any:
    """The model in a folder; all its parameters are in the file, and no others."""
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    model, found = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"], found
    return model.eval()


def data(kind: Kind, imported: Path, folder: Path, sides: Sequence[str] = ("a", "b")) -> Path:
    """A data folder of lightseq-preprocess with the dictionary of the import."""
    source = random.Random(1)
    folder.mkdir()
    for split in ("train", "valid"):
        for side in sides if kind.pairs else ("",):
            lines = [source.choices(WORDS, k=source.randint(2, 9)) for _ in range(12)]
            path = folder / (f"{split}.{side}" if kind.pairs else split)
            path.write_text("".join(" ".join(line) + "\n" for line in lines))
    flags = (
        kind.pairs.format(imported)
        if kind.pairs
        else f"--only-source --srcdict {imported}/dict.txt"
    )
    cli_runs.succeed(
        "preprocess", *flags.split(), "--destdir", folder / "bin", "--workers", "1",
        "--trainpref", folder / "train", "--validpref", folder / "valid",
    )  # fmt: skip
    return folder / "bin"


def ours(
    path: Path, data: Path, native: bool = False, source: str = "a", target: str = "b"
) -> tuple[Any, Any]:
    """Our model, or fairseq's, of a checkpoint, and the task."""
    with models.building(native):
        (model,), _, task = checkpoint_utils.load_model_ensemble_and_task(
            [str(path)], {"data": str(data), "source_lang": source, "target_lang": target}
        )
    return model.eval(), task


def row(kind: Kind, task: Any, word: str) -> int:
    """fairseq's row of a word of the tokenizer."""
    word = {"<|endoftext|>": "</s>"}.get(word, kind.named.format(word) if "_" in word else word)
    index: int = task.source_dictionary.indices[word]
    return index


Batch = list[list[str]]


def batches(kind: Kind) -> list[Batch]:
    """Sentences of different lengths, of one word, and of the longest."""
    source = random.Random(2)
    return [
        [source.choices(WORDS, k=length) for length in lengths]
        for lengths in ((3, 7, 1), (1,), (LONGEST, 4))
    ]


def padded(batch: Batch, index: Callable[[str], int], pad: int, left: bool) -> Tensor:
    rows = [torch.tensor([index(word) for word in sentence]) for sentence in batch]
    found: Tensor = collate_tokens(rows, pad, left_pad=left)
    return found


def logits(kind: Kind, model: Any, task: Any, batch: Batch, left: bool = False) -> Tensor:
    """Logits of all words of the tokenizer, in its order, at all tokens that are not pads.

    Args:
        task: of our model or fairseq's; None: the model is of `transformers`.
        left: whether pads come first.
    """
    if task is None:
        pad = kind.words.index("<pad>") if "<pad>" in kind.words else len(kind.words) - 1
        tokens, columns = padded(batch, kind.words.index, pad, left), torch.arange(len(kind.words))
    else:
        pad = task.source_dictionary.pad()
        tokens = padded(batch, lambda word: row(kind, task, word), pad, left)
        columns = torch.tensor([row(kind, task, word) for word in kind.words])
    real = padded([["1"] * len(sentence) for sentence in batch], int, 0, left).bool()
    with torch.no_grad():
        if task is None:
            more = {"decoder_input_ids": tokens, "decoder_attention_mask": real.long()}
            more = {**more, "use_cache": False} if kind.pairs else {}
            if kind.model.startswith(("GPT2", "XGLM")):  # as `generate` does
                more = {"position_ids": (real.long().cumsum(1) - 1).clamp(0)}
            result = model(input_ids=tokens, attention_mask=real.long(), **more).logits
        elif kind.pairs:
            result = model(tokens, real.sum(1), tokens)[0]
        else:
            result = model(tokens)[0]
    found: Tensor = result[real][:, columns]
    return found
