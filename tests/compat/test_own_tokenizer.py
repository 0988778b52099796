"""lightseq-export writes a tokenizer for data of one file: sentencepiece's, or a tokenizer.json."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helpers.raw_text as raw_text
import pytest
import torch
from helpers.cli_runs import SMALL, SMALL_TEXT, succeed
from helpers.raw_text import tokenizers, transformers

# isort: split
from fairseq.data import Dictionary, data_utils

from lightseq_fairseq import LanguageModel, RobertaModel, Translator
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.serving import models

sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
pytest.importorskip("google.protobuf", reason="protobuf is not installed")

SMALL_ROBERTA = shlex.split(
    "--encoder-layers 1 --encoder-embed-dim 16 --encoder-ffn-embed-dim 16 --num-workers 0 "
    "--encoder-attention-heads 2 --max-update 3 --lr 1e-2 --cpu --no-epoch-checkpoints"
)
GREEDY = {"beam": 1, "max_len_a": 0, "max_len_b": 12}
# With [UNK], the dictionary has a row of its own for the unknown word of the tokenizer.
SENTENCEPIECE = {
    "unigram": {"model_type": "unigram"},
    "bpe": {"model_type": "bpe"},
    "unigram, options": {"model_type": "unigram", "unk_piece": "[UNK]", "byte_fallback": True},
    "bpe, options": {"model_type": "bpe", "unk_piece": "[UNK]", "pad_id": 3,
                     "normalization_rule_name": "nmt_nfkc_cf"},
}  # fmt: skip
SIZES = {"unigram": 60, "bpe": 60, "unigram, options": 330, "bpe, options": 60}


def spm(kind: str, text: Path, folder: Path) -> list[Any]:
    """Trains a model of sentencepiece; the flags of lightseq-preprocess that name it."""
    sentencepiece.SentencePieceTrainer.train(
        input=",".join(map(str, sorted(text.glob("train.*")))), vocab_size=SIZES[kind],
        model_prefix=str(folder / "sp"), num_threads=1, minloglevel=2, **SENTENCEPIECE[kind],
    )  # fmt: skip
    return ["--sentencepiece", folder / "sp.model"]


def byte_level(text: Path, folder: Path) -> list[Any]:
    """A tokenizer.json of bytes, as GPT-2's, without special words."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, show_progress=False, special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    return saved(made, trainer, text, folder)


def word_piece(text: Path, folder: Path) -> list[Any]:
    """A tokenizer.json with other special words, in another order, as BERT's."""
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    made.normalizer = tokenizers.normalizers.BertNormalizer()
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made.decoder = tokenizers.decoders.WordPiece()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=70, show_progress=False, special_tokens=["[UNK]", "[CLS]", "[SEP]"]
    )
    return saved(made, trainer, text, folder)


def unigram(text: Path, folder: Path) -> list[Any]:
    made = tokenizers.Tokenizer(tokenizers.models.Unigram())
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    made.decoder = tokenizers.decoders.Metaspace()
    trainer = tokenizers.trainers.UnigramTrainer(
        vocab_size=70, show_progress=False, special_tokens=["<pad>", "<unk>"], unk_token="<unk>"
    )
    return saved(made, trainer, text, folder)


def saved(made: Any, trainer: Any, text: Path, folder: Path) -> list[Any]:
    made.train([str(path) for path in sorted(text.glob("train.*"))], trainer)
    made.save(str(folder / "mine.json"))
    return ["--hf-tokenizer", folder / "mine.json"]


JSON = {"byte level": byte_level, "word piece": word_piece, "unigram.json": unigram}
FILES: dict[str, Callable[[Path, Path], list[Any]]] = {
    **{kind: lambda text, folder, kind=kind: spm(kind, text, folder) for kind in SENTENCEPIECE},
    **JSON,
}
# Characters that no training text has; spaces; words of the tokenizer itself.
ODD = ["Grüße  an Zoë!", "  ko漢字ko mi ", "½ ﬁ 1️⃣ “ru”", "madeupword0007", "ko\tmi", "."]


def texts(*names: Path) -> list[str]:
    return [line for path in names for line in path.read_text().splitlines()]


def rows(path: Path, dictionary: Path) -> list[list[int]]:
    """What lightseq-preprocess has written."""
    found = data_utils.load_indexed_dataset(str(path), Dictionary.load(str(dictionary)))
    return [row.tolist() for row in found]


def preprocess(flags: list[Any], text: Path, data: Path, *more: Any, of: str = "") -> None:
    words = [
        word for split in raw_text.SPLITS for word in (f"--{split}pref", text / f"{split}{of}")
    ]
    succeed("preprocess", *flags, *more, *words, "--destdir", data, "--workers", "1")


def export(run: Path, home: Path, *flags: Any) -> str:
    return succeed("export", run, "--to", "huggingface", "--output", home, *flags)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Texts whose test split has odd characters, too."""
    folder = raw_text.write(tmp_path / "text", "de", "en")
    for name in ("test.de", "test.en"):
        (folder / name).write_text("".join(f"{line}\n" for line in [*texts(folder / name), *ODD]))
    return folder


@pytest.mark.parametrize("kind", FILES)
def test_translation(kind: str, text: Path, tmp_path: Path) -> None:
    data, run, home = (tmp_path / name for name in ("data", "run", "home"))
    preprocess(FILES[kind](text, tmp_path), text, data, "-s", "de", "-t", "en")
    one = ("--encoder-normalize-before", "--decoder-normalize-before", "--share-all-embeddings")
    post_norm = kind == "bpe"  # FSMT, which has two tables
    succeed("train", data, *SMALL, "--arch", "ls_transformer", "--lr", "1e-2", "--save-dir", run,
            "--max-update", "40", *(() if post_norm else one))  # fmt: skip
    assert "tokenizer" not in export(run, home)
    theirs = transformers.AutoTokenizer.from_pretrained(home)
    for split in raw_text.SPLITS:
        for side in ("de", "en"):
            found = rows(data / f"{split}.de-en.{side}", data / f"dict.{side}.txt")
            assert theirs(texts(text / f"{split}.{side}"))["input_ids"] == found
    lines = texts(text / "test.de")[: raw_text.SPLITS["test"]]
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(home).eval()
    assert type(model).__name__ == ("FSMT" if post_norm else "M2M100") + "ForConditionalGeneration"
    found = model.generate(
        **theirs(lines, return_tensors="pt", padding=True),
        num_beams=1,
        max_new_tokens=12,
        min_new_tokens=1,  # fairseq's default
    )
    translated = Translator.from_pretrained(run, device="cpu").translate(lines, **GREEDY)
    found = [each.strip() for each in theirs.batch_decode(found, skip_special_tokens=True)]
    assert found == [each.text for each in translated]


@pytest.mark.parametrize("kind", FILES)
def test_language_model(kind: str, text: Path, tmp_path: Path) -> None:
    data, run, home = (tmp_path / name for name in ("data", "run", "home"))
    preprocess(FILES[kind](text, tmp_path), text, data, "--only-source", of=".de")
    succeed("train", data, *SMALL_TEXT, "--arch", "ls_transformer_lm_gpt", "--lr", "1e-2",
            "--max-update", "40", "--save-dir", run)  # fmt: skip
    assert "tokenizer" not in export(run, home)
    theirs = transformers.AutoTokenizer.from_pretrained(home)
    lines = texts(text / "test.de")
    if "unigram" not in kind:  # which finds these words in texts
        lines.append("</s> ko[UNK]mi <s>ru <unk>")
    ours = LanguageModel.from_pretrained(run, device="cpu")
    assert theirs(lines)["input_ids"] == [[2, *ours.encode(line)] for line in lines]
    prompt, length = "Ko mi", 12
    model = transformers.AutoModelForCausalLM.from_pretrained(home).eval()
    ids = theirs(prompt, return_tensors="pt")
    (found,) = model.generate(**ids, do_sample=False, max_new_tokens=length, min_new_tokens=1)
    (best,) = ours.generate(prompt, beam=1, max_len_a=1, max_len_b=length - 1)
    assert theirs.decode(found, skip_special_tokens=True).strip() == best.text
    if kind in SENTENCEPIECE or kind == "byte level":
        pipe = transformers.pipeline("text-generation", str(home), device="cpu")
        (said,) = pipe(prompt, do_sample=False, max_new_tokens=length, min_new_tokens=1)
        assert said["generated_text"].lower() == best.text.lower()


@pytest.mark.parametrize("kind", ["unigram", "byte level"])
def test_classifier(kind: str, text: Path, tmp_path: Path) -> None:
    data, run, home = (tmp_path / name for name in ("data", "run", "home"))
    preprocess(FILES[kind](text, tmp_path), text, data / "input0", "--only-source", of=".de")
    for split in raw_text.SPLITS:
        count = len(texts(text / f"{split}.de"))
        (text / f"{split}.label").write_text("yes\nno\n" * (count // 2))
    preprocess([], text, data / "label", "--only-source", of=".label")
    train = "--task sentence_prediction --arch ls_roberta --num-classes 2"
    succeed("train", data, *train.split(), *SMALL_ROBERTA, "--save-dir", run)
    assert "tokenizer" not in export(run, home)
    theirs = transformers.AutoTokenizer.from_pretrained(home)
    ours = RobertaModel.from_pretrained(run).eval()
    model = transformers.AutoModelForSequenceClassification.from_pretrained(home).eval()
    for line in texts(text / "test.de"):
        ids = theirs(line, return_tensors="pt")
        assert ids["input_ids"][0].tolist() == ours.encode(line).tolist()
        with torch.no_grad():
            expected = ours.predict("sentence_classification_head", ours.encode(line))
            assert torch.allclose(model(**ids).logits.log_softmax(-1), expected, atol=1e-5)
    new = [line for line in texts(text / "test.de") if "\t" not in line]
    found = ours.classify(new)
    pipe = transformers.pipeline("text-classification", str(home))
    for one, other in zip(found, pipe(new), strict=True):
        assert one.label == other["label"]
        assert one.probability == pytest.approx(other["score"], abs=1e-5)
    (tmp_path / "new").write_text("\n".join(new))
    said = succeed("interactive", data, "--path", run, "--input", tmp_path / "new", "--cpu")
    lines = [line.split("\t")[1:] for line in said.splitlines() if line.startswith("D-")]
    for (probability, label), each in zip(lines, found, strict=True):
        assert label == each.label  # the command has other batches, so it rounds otherwise
        assert float(probability) == pytest.approx(each.probability, abs=1e-5)
    pair = ours.encode("Ko mi.", "Ru te?").tolist()
    assert theirs("Ko mi.", "Ru te?")["input_ids"] == pair


def test_masked_words(text: Path, tmp_path: Path) -> None:
    """<mask> is no text, and the spaces beside it are none."""
    data, run, home = (tmp_path / name for name in ("data", "run", "home"))
    preprocess(FILES["unigram"](text, tmp_path), text, data, "--only-source", of=".de")
    train = "--task masked_lm --arch ls_roberta"
    succeed("train", data, *train.split(), *SMALL_ROBERTA, "--save-dir", run)
    assert "tokenizer" not in export(run, home)
    file = run / "checkpoint_best.pt"
    ours = RobertaModel.from_pretrained(file).eval()
    fill = transformers.pipeline("fill-mask", str(home), top_k=3)
    for line in ("Ko mi <mask> ru te.", "<mask> ko", "Ko <mask>"):
        found = [(each["score"], each["token"]) for each in fill(line)]
        expected = ours.fill_mask(line, topk=3)
        words = ours.task.source_dictionary
        for (score, token), (_, probability, _) in zip(found, expected, strict=True):
            assert score == pytest.approx(probability, rel=1e-4), (line, words[token])


def test_roberta_finds_the_tokenizer(text: Path, tmp_path: Path) -> None:
    """Its own arguments come first; data without a tokenizer need them."""
    data, run = tmp_path / "data", tmp_path / "run"
    preprocess(FILES["unigram"](text, tmp_path), text, data, "--only-source", of=".de")
    train = "--task masked_lm --arch ls_roberta"
    succeed("train", data, *train.split(), *SMALL_ROBERTA, "--save-dir", run)
    pieces = RobertaModel.from_pretrained(run).bpe.encode("Ko mi")
    assert "\u2581" in pieces
    letters = RobertaModel.from_pretrained(run, data, bpe="characters")
    assert letters.bpe.encode("Ko mi") == "K o \u2581 m i"
    sp = str(tmp_path / "sp.model")
    named = RobertaModel.from_pretrained(run, bpe="sentencepiece", sentencepiece_model=sp)
    assert type(named.bpe).__name__ == "SentencepieceBPE" and named.bpe.encode("Ko mi") == pieces
    # Of several models that are served, this one does not take the subwords of another.
    served = models.load("it", str(run), {"bpe": "characters", "beam": 4}, is_alone=False)
    assert served.shown.endswith("; its data have a tokenizer, so --bpe is not used")
    asked = [served.asked("Ko mi", {"classifies": False})]
    others = (
        models.load("it", str(run), {}, False),
        models.load("it", str(run), {"bpe": "characters"}, True),
    )
    asked += [each.asked("Ko mi", {"classifies": False}) for each in others]
    assert asked[0] == asked[1] != asked[2]
    without = RobertaModel.from_pretrained(run, bpe=None)
    with pytest.raises(UserError, match=r"nothing has no tokenizer that can be read"):
        RobertaModel.from_pretrained(run, tokenizer_folder=str(tmp_path / "nothing"))
    (data / "tokenizer").rename(tmp_path / "kept")
    moved = RobertaModel.from_pretrained(run, tokenizer_folder=tmp_path / "kept")
    assert moved.bpe.encode("Ko mi") == pieces
    for model in (without, RobertaModel.from_pretrained(run)):
        with pytest.raises(UserError, match=r"--sentencepiece or --hf-tokenizer .*gpt2"):
            model.encode("Ko mi")


def lacking(run: Path, home: Path) -> str:
    """Why an export has no tokenizer."""
    told = export(run, home)
    assert not list(home.glob("tokenizer*"))
    found = re.search(r"It has no tokenizer, because (.*)\. Token ids are the rows", told)
    assert found, told
    return found[1]


def test_no_tokenizer_is_written(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sentence says why, and what to do."""
    flags = FILES["bpe"](text, tmp_path)

    def trained(name: str, *words: Any) -> Path:
        preprocess([], text, tmp_path / f"data {name}", "-s", "de", "-t", "en", *words)
        succeed("train", tmp_path / f"data {name}", *SMALL, "--arch", "ls_transformer", "--lr",
                "1e-2", "--save-dir", tmp_path / name)  # fmt: skip
        return tmp_path / name

    why = lacking(trained("words"), tmp_path / "1")
    assert why.endswith("split raw text by lightseq-preprocess --sentencepiece MODEL")
    run = trained("other words", *flags, "--srcdict", tmp_path / "data words/dict.de.txt")
    assert "use one model of sentencepiece" in lacking(run, tmp_path / "2")
    dictionary = tmp_path / "data words/dict.de.txt"
    run = trained("their words", *flags, "--srcdict", dictionary, "--joined-dictionary")
    assert "remove --srcdict and --tgtdict" in lacking(run, tmp_path / "3")
    run = trained("right", *flags, "--joined-dictionary")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "transformers.convert_slow_tokenizer", None)
        assert "pip install 'transformers>=5.17' protobuf" in lacking(run, tmp_path / "4")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "tokenizers.normalizers", None)
        patch.delattr(tokenizers, "normalizers")
        assert "pip install tokenizers" in lacking(run, tmp_path / "6")
    export(run, tmp_path / "4", "--force")
    assert (tmp_path / "4/tokenizer.json").exists()
    spaces = {"model_type": "bpe", "treat_whitespace_as_suffix": True}
    monkeypatch.setitem(SENTENCEPIECE, "bpe", spaces)
    run = trained("suffix", *FILES["bpe"](text, tmp_path), "--joined-dictionary")
    assert "treat_whitespace_as_suffix" in lacking(run, tmp_path / "5")
