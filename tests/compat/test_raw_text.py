"""From a folder of `transformers` and raw text to a folder of `transformers`: all commands."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import helpers.forked_commands as forked_commands
import helpers.hugging_face as hugging_face
import helpers.raw_text as raw_text
import pytest
import torch
from helpers.cli_runs import SMALL, run, succeed
from helpers.golden import matches, refusals
from helpers.pages import blocks
from helpers.raw_text import tokenizers, transformers

# isort: split
from fairseq.data import Dictionary, data_utils

from lightseq_fairseq import Translator
from lightseq_fairseq.cli.checks.trained_task import with_task
from lightseq_fairseq.cli.start import logs

SEARCH = {"beam": 1, "max_len_a": 0, "max_len_b": 12}
FLAGS = ("--beam", "1", "--max-len-a", "0", "--max-len-b", "12", "--cpu")
NEW = "--add-languages", "xho_Latn=zul_Latn"


class Chain(NamedTuple):
    """A run: the folder of `transformers`, its import, text, data folder, run, and the end."""

    folder: Path
    model: Any  # of `transformers`, at the beginning

    def __getattr__(self, name: str) -> Path:
        return self.folder / name


def made(folder: Path, *flags: str) -> Chain:
    chain = Chain(folder, raw_text.nllb(folder / "nllb"))
    text = raw_text.write(chain.text, "eng_Latn", "xho_Latn")
    words = [flag.format(text) for flag in flags]
    printed = succeed("import_", chain.nllb, chain.imported, *NEW, *words)
    assert f"--hf-tokenizer {chain.imported}\n" in printed
    succeed(
        "preprocess", "--hf-tokenizer", chain.imported, "-s", "eng_Latn", "-t", "xho_Latn",
        "--destdir", chain.data, "--workers", "2",
        *(word for split in raw_text.SPLITS for word in (f"--{split}pref", text / split)),
    )  # fmt: skip
    # The flags that the import printed.
    train = printed.splitlines()[2].replace("SOURCE-TARGET", "eng_Latn-xho_Latn").split()
    succeed(
        "train", chain.data, *train[2:], "--save-dir", chain.run, "--max-update", "3", "--lr",
        "1e-3", "--max-tokens", "200", "--cpu", "--no-epoch-checkpoints",
    )  # fmt: skip
    succeed("export", chain.run, "--to", "huggingface", "--output", chain.home)
    return chain


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return made(tmp_path_factory.mktemp("chain"))


@pytest.fixture(scope="module")
def trimmed(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    texts = [word for side in ("eng", "xho") for word in ("--only-words-of", side)]
    texts = [f"{{0}}/train.{word}_Latn" if len(word) == 3 else word for word in texts]
    return made(tmp_path_factory.mktemp("trimmed"), *texts)


def both(chain: Chain, split: str) -> list[tuple[str, list[str]]]:
    """The languages, and the lines of a split in each."""
    return [
        (name, (chain.text / f"{split}.{name}").read_text().splitlines())
        for name in ("eng_Latn", "xho_Latn")
    ]


def theirs(folder: Path) -> tuple[Any, Any]:
    """The model and the tokenizer of a folder, by the classes that users name."""
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(folder, src_lang="eng_Latn")


def generated(folder: Path, lines: list[str], target: str = "xho_Latn") -> list[str]:
    model, tokenizer = theirs(folder)
    found = model.generate(
        **tokenizer(lines, return_tensors="pt", padding=True), num_beams=1, max_new_tokens=12,
        forced_bos_token_id=tokenizer.convert_tokens_to_ids(target),
    )  # fmt: skip
    texts: list[str] = tokenizer.batch_decode(found, skip_special_tokens=True)
    return texts


@pytest.mark.parametrize("which", ["chain", "trimmed"])
def test_words_are_those_of_transformers(which: str, request: pytest.FixtureRequest) -> None:
    """The words of the data are those of the first folder's tokenizer, and </s> is there once."""
    chain = request.getfixturevalue(which)
    tokenizer = transformers.AutoTokenizer.from_pretrained(chain.nllb)
    for split in ("train", "valid"):
        for language, lines in both(chain, split):
            dictionary = Dictionary.load(str(chain.data / f"dict.{language}.txt"))
            path = chain.data / f"{split}.eng_Latn-xho_Latn.{language}"
            found = data_utils.load_indexed_dataset(str(path), dictionary)
            for line, row in zip(lines, found, strict=True):
                words = [dictionary[number] for number in row]
                if which == "chain" or split == "train":  # other texts have words that were cut
                    assert words == [*tokenizer.tokenize(line), "</s>"]
                else:
                    assert words[-1] == "</s>" and "<unk>" not in words


@pytest.mark.parametrize("which", ["chain", "trimmed"])
def test_a_new_language_has_a_row(which: str, request: pytest.FixtureRequest) -> None:
    chain = request.getfixturevalue(which)
    dictionary = Dictionary.load(str(chain.imported / "dict.txt"))
    table = torch.load(chain.imported / "model.pt", weights_only=False)["model"][
        "encoder.embed_tokens.weight"
    ]
    assert len(table) == len(dictionary) and len(table) % 8 == 0
    new, like = (dictionary.index(f"__{code}__") for code in ("xho_Latn", "zul_Latn"))
    assert dictionary.unk() not in (new, like) and torch.equal(table[new], table[like])
    first = chain.model.model.shared.weight
    ids = transformers.AutoTokenizer.from_pretrained(chain.nllb).get_vocab()
    for word, number in ids.items():
        word = f"__{word}__" if word in raw_text.LANGUAGES else word
        if word in dictionary:
            assert torch.equal(table[dictionary.index(word)], first[number])
    names = (chain.imported / "languages.txt").read_text().split()
    assert names == [*raw_text.LANGUAGES, "xho_Latn"]


@pytest.mark.parametrize("which", ["chain", "trimmed"])
def test_raw_text_in_and_out(
    which: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a flag of task, language or tokenizer; the words are those of the exported folder."""
    chain = request.getfixturevalue(which)
    (_, lines), (_, answers) = both(chain, "test")
    texts = [each.text for each in Translator.from_pretrained(chain.run, device="cpu").translate(
        lines, **SEARCH
    )]  # fmt: skip
    assert len(set(texts)) > 1 and not any("\u2581" in text or "__" in text for text in texts)
    assert texts == generated(chain.home, lines)
    for native in ((), ("--native",)):
        output = chain.folder / f"interactive{len(native)}"
        succeed(
            "interactive", chain.data, "--path", chain.run, *FLAGS, *native, "--output-text",
            output, "--input", chain.text / "test.eng_Latn", "--buffer-size", "8",
        )  # fmt: skip
        assert output.read_text().splitlines() == texts
    output = chain.folder / "generated"
    caplog.clear()
    printed = succeed("generate", chain.data, "--path", chain.run, *FLAGS, "--output-text", output)
    assert output.read_text().splitlines() == texts
    targets = dict(line[2:].split("\t") for line in printed.splitlines() if line.startswith("T-"))
    assert [targets[str(number)] for number in range(len(answers))] == answers
    # fairseq says that the score of these words is that of BPE tokens.
    (false,) = (line for line in caplog.records if "BPE tokens" in line.getMessage())
    assert not logs.is_shown(false)


def test_an_import_translates_at_once(chain: Chain) -> None:
    """Before any training, from the folder of the import."""
    (_, lines), _ = both(chain, "test")
    output = chain.folder / "at_once"
    succeed(
        "interactive", chain.imported, "--path", chain.imported / "model.pt", *FLAGS, "--task",
        "translation_multi_simple_epoch", "-s", "eng_Latn", "-t", "spa_Latn", "--output-text",
        output, "--input", chain.text / "test.eng_Latn",
    )  # fmt: skip
    assert output.read_text().splitlines() == generated(chain.nllb, lines, "spa_Latn")


def test_less_words_and_a_way_back(trimmed: Chain) -> None:
    """The trimmed folder is whole; the first folder has the rows of the other words."""
    succeed(
        "export", trimmed.run, "--to", "huggingface", "--output", trimmed.whole, "--tokenizer",
        trimmed.nllb,
    )  # fmt: skip
    (small, of_small), (whole, of_whole) = theirs(trimmed.home), theirs(trimmed.whole)
    first = transformers.AutoTokenizer.from_pretrained(trimmed.nllb).get_vocab()
    few, all_words = of_small.get_vocab(), of_whole.get_vocab()
    assert all_words.keys() == first.keys() | {"xho_Latn"} and len(few) < len(first) - 10
    rows = {name: model.model.shared.weight for name, model in (("s", small), ("w", whole))}
    for word, number in all_words.items():
        expected = (
            rows["s"][few[word]] if word in few else trimmed.model.model.shared.weight[first[word]]
        )
        assert torch.equal(rows["w"][number], expected), word
        assert word == "xho_Latn" or number == first[word]
    start = torch.load(trimmed.imported / "model.pt", weights_only=False)["model"]
    trained = torch.load(trimmed.run / "checkpoint_last.pt", weights_only=False)["model"]
    assert not any(
        torch.equal(start[name], trained[name]) for name in start if name.endswith("fc1.weight")
    )
    assert len(rows["s"]) == len(start["encoder.embed_tokens.weight"]) < len(rows["w"])


@pytest.mark.parametrize("name", ["mbart", "roberta", "camembert"])
def test_other_tokenizers_are_trimmed(name: str, tmp_path: Path) -> None:
    """Of words with scores, and of those that name special words in other ways."""
    kind = hugging_face.KINDS[name]
    hugging_face.make(kind, tmp_path / "theirs")
    # No text has this word, but generation must not choose it.
    tokens = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    bad = tokens.convert_tokens_to_ids(hugging_face.WORDS[-1])
    path = tmp_path / "theirs/generation_config.json"
    settings = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**settings, "bad_words_ids": [[bad]]}))
    (tmp_path / "text").write_text("".join(f"{word}\n" for word in hugging_face.WORDS[:20]))
    succeed("import_", tmp_path / "theirs", tmp_path / "ours", "--only-words-of", tmp_path / "text")
    first, second = (
        transformers.AutoTokenizer.from_pretrained(tmp_path / each) for each in ("theirs", "ours")
    )
    words = Dictionary.load(str(tmp_path / "ours/dict.txt"))
    assert len(second) < len(first) and len(words) % 8 <= 4  # fairseq may add its special words
    for text in ("w3", "w19", "w1 w4"):
        found = [each.convert_ids_to_tokens(each(text)["input_ids"]) for each in (first, second)]
        assert found[0] == found[1] and found[0], text
    config = json.loads((tmp_path / "ours/config.json").read_text())
    assert second.eos_token_id == config["eos_token_id"]
    settings = json.loads((tmp_path / "ours/generation_config.json").read_text())
    ((number,),) = settings["bad_words_ids"]
    assert second.convert_ids_to_tokens(number) == hugging_face.WORDS[-1]


@pytest.mark.parametrize("files", [1, 2])
def test_sentencepiece(files: int, tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    text = raw_text.write(tmp_path / "text", "de", "en")
    models = [tmp_path / f"{name}.model" for name in ("first", "second")[:files]]
    for size, path in zip((60, 50), models):
        sentencepiece.SentencePieceTrainer.train(
            input=[str(text / f"train.{side}") for side in ("de", "en")], vocab_size=size,
            model_prefix=str(path.with_suffix("")), num_threads=1, minloglevel=2,
        )  # fmt: skip
    succeed(
        "preprocess", "--sentencepiece", ",".join(map(str, models)), "-s", "de", "-t", "en",
        "--trainpref", text / "train", "--validpref", text / "valid", "--testpref", text / "test",
        "--destdir", tmp_path / "data", "--workers", "1",
        *(("--joined-dictionary",) if files == 1 else ()),
    )  # fmt: skip
    for side, path in zip(("de", "en"), (models[0], models[-1])):
        processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
        words = Dictionary.load(str(tmp_path / f"data/dict.{side}.txt"))
        found = data_utils.load_indexed_dataset(str(tmp_path / f"data/train.de-en.{side}"), words)
        lines = (text / f"train.{side}").read_text().splitlines()
        for line, row in zip(lines, found, strict=True):
            # As in mBART: a row is sentencepiece's id and one, because of <pad>.
            assert row.tolist() == [number + 1 for number in processor.encode(line)] + [2]
    run_folder = tmp_path / "run"
    succeed("train", tmp_path / "data", *SMALL, "--arch", "ls_transformer", "--lr", "1e-2",
            "--save-dir", run_folder)  # fmt: skip
    lines = (text / "test.de").read_text().splitlines()
    found = Translator.from_pretrained(run_folder, device="cpu").translate(lines, **SEARCH)
    decoder = sentencepiece.SentencePieceProcessor(model_file=str(models[-1]))
    for each in found:
        assert each.text == decoder.decode(each.hypotheses[0].words.split()).strip()
    printed = succeed("generate", tmp_path / "data", "--path", run_folder, *FLAGS)
    targets = [line.split("\t")[1] for line in printed.splitlines() if line.startswith("T-")]
    assert sorted(targets) == sorted((text / "test.en").read_text().splitlines())


def test_sources_of_bart_begin_as_its_tokenizer_writes_them(tmp_path: Path) -> None:
    """In the data, in a search, and in the exported folder: else its words would be others."""
    text = tmp_path / "text"

    def save_tokenizer(folder: Path, words: list[str]) -> None:
        ids = {word: number for number, word in enumerate(words)}
        whole = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="<unk>"))
        whole.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        whole.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
        )
        names = dict(zip(("bos_token", "pad_token", "eos_token", "unk_token"), words))
        transformers.PreTrainedTokenizerFast(tokenizer_object=whole, **names).save_pretrained(
            folder
        )

    kind = hugging_face.KINDS["bart"]._replace(tokenizer=save_tokenizer)
    hugging_face.make(kind, tmp_path / "theirs")
    draw = random.Random(3)
    for split, count in raw_text.SPLITS.items():
        lines = [" ".join(draw.choices(hugging_face.WORDS[:8], k=3)) for _ in range(count)]
        for side in ("en", "de"):
            text.mkdir(exist_ok=True)
            (text / f"{split}.{side}").write_text("".join(f"{line}\n" for line in lines))
    succeed("import_", tmp_path / "theirs", tmp_path / "imported")
    succeed(
        "preprocess", "--hf-tokenizer", tmp_path / "imported", "-s", "en", "-t", "de",
        "--destdir", tmp_path / "data", "--workers", "2",
        *(word for split in raw_text.SPLITS for word in (f"--{split}pref", text / split)),
    )  # fmt: skip
    for side, begins in (("en", True), ("de", False)):
        words = Dictionary.load(str(tmp_path / f"data/dict.{side}.txt"))
        rows = data_utils.load_indexed_dataset(str(tmp_path / f"data/train.en-de.{side}"), words)
        assert all(row[0] == words.bos() for row in rows) == begins and len(rows[0]) == 4 + begins
    succeed(
        "train", tmp_path / "data", "--arch", "ls_bart_large", "--finetune-from-model",
        tmp_path / "imported/model.pt", "--save-dir", tmp_path / "run", "--max-update", "60",
        "--lr", "1e-2", "--max-tokens", "400", "--cpu", "--no-epoch-checkpoints",
    )  # fmt: skip
    succeed("export", tmp_path / "run", "--to", "huggingface", "--output", tmp_path / "home")
    lines = (text / "test.en").read_text().splitlines()
    model, tokenizer = theirs(tmp_path / "home")
    found = model.generate(
        **tokenizer(lines, return_tensors="pt", padding=True), num_beams=1, max_new_tokens=12
    )
    expected = tokenizer.batch_decode(found, skip_special_tokens=True)
    translator = Translator.from_pretrained(tmp_path / "run", device="cpu")
    texts = [each.text for each in translator.translate(lines, **SEARCH)]
    assert texts == expected and len(set(texts)) > 1
    printed = succeed("generate", tmp_path / "data", "--path", tmp_path / "run", *FLAGS)
    of_data = dict(line[2:].split("\t")[::2] for line in printed.splitlines() if line[:2] == "D-")
    assert [of_data[str(number)] for number in range(len(lines))] == texts


def test_the_commands_of_the_page_without_languages(tmp_path: Path) -> None:
    """Those of docs/from-hugging-face.md for a Marian."""
    (block,) = (b for b in blocks("docs/from-hugging-face.md") if "ls_marian" in b.text)
    raw_text.write(tmp_path, "en", "de")
    hugging_face.marian(tmp_path / "opus-mt-en-de", tmp_path / "train.en")
    train = 'lightseq-train() { command lightseq-train "$@" --max-update 2 --cpu --num-workers 0; }'
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f"{train}\n{block.text}"], cwd=tmp_path,
        env={**os.environ, "PATH": forked_commands.path()},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and "\nD-0\t" in done.stdout, done.stdout
    model, tokenizer = theirs(tmp_path / "home")
    assert type(model).__name__ == "MarianMTModel" and tokenizer("Bako mi.")["input_ids"][-1] == 0


def test_marks_in_a_text_are_text(chain: Chain, tmp_path: Path) -> None:
    """A text cannot end a sentence or change the language."""
    (tmp_path / "in").write_text("ko </s> eng_Latn <pad> mi\n")
    printed = succeed(
        "interactive", chain.data, "--path", chain.run, *FLAGS, "--input", tmp_path / "in"
    )
    source = next(line for line in printed.splitlines() if line.startswith("S-")).split("\t")[1]
    language, *words = source.split()
    assert language == "__eng_Latn__" and {"s", "L", "\u2581mi"} < set(words)
    assert not {"</s>", "eng_Latn", "__eng_Latn__", "<pad>"} & set(words)


def test_another_tokenizer_may_be_chosen(chain: Chain, tmp_path: Path) -> None:
    """--tokenizer space reads words that are split already."""
    (tmp_path / "in").write_text("\u2581ko \u2581mi\n")
    printed = succeed(
        "interactive", chain.data, "--path", chain.run, *FLAGS, "--tokenizer", "space", "--input",
        tmp_path / "in",
    )  # fmt: skip
    assert "S-0\t__eng_Latn__ \u2581ko \u2581mi\n" in printed


@pytest.mark.parametrize(
    ("file", "package"), [("a.json", "tokenizers"), ("a.model", "sentencepiece")]
)
def test_a_package_is_missing(
    file: str, package: str, chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / file).write_bytes((chain.nllb / "tokenizer.json").read_bytes())
    result = run(
        "preprocess", "--hf-tokenizer", tmp_path / file, "-s", "eng_Latn", "-t", "xho_Latn",
        "--trainpref", chain.text / "train", "--destdir", tmp_path / "out",
    )  # fmt: skip
    sentence = f"{file} needs a package that is not installed: run pip install {package}."
    assert result.exit_code == 2 and result.output.strip().endswith(sentence)
    assert not (tmp_path / "out").exists()


def test_a_source_longer_than_the_positions(chain: Chain, tmp_path: Path) -> None:
    (tmp_path / "in").write_text(f"{'ko ' * 1100}\n")
    result = run("interactive", chain.data, "--path", chain.run, *FLAGS, "--input", tmp_path / "in")
    assert result.exit_code == 2 and "Traceback" not in result.output
    (sentence,) = (line for line in result.output.splitlines() if ": error: " in line)
    assert "1024" in sentence


def test_the_task_of_a_checkpoint(chain: Chain, tmp_path: Path) -> None:
    """mBART's task needs its languages, too; flags of the command stay."""
    settings = {"_name": "translation_from_pretrained_bart", "langs": "en_XX,ro_RO"}
    settings |= {"source_lang": "en_XX", "target_lang": "ro_RO", "prepend_bos": False}
    torch.save({"cfg": {"task": settings}, "model": {}}, tmp_path / "mbart.pt")
    words = ["data", "--path", str(tmp_path / "mbart.pt"), "-s", "ro_RO"]
    task = ["--task", "translation_from_pretrained_bart"]
    assert with_task(words) == [*words, *task, "--target-lang", "ro_RO", "--langs", "en_XX,ro_RO"]
    assert with_task([*words, "--task", "translation"]) == [*words, "--task", "translation"]
    words = ["data", "--path", str(chain.run)]
    task = ["--task", "translation_multi_simple_epoch", "--lang-pairs", "eng_Latn-xho_Latn"]
    task += ["--source-lang", "eng_Latn", "--target-lang", "xho_Latn"]
    assert with_task(words) == [*words, *task]


@pytest.mark.parametrize(("words", "sentence"), refusals(__file__, "test_raw_text"))
def test_refuses(words: str, sentence: str, chain: Chain, tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "latin").write_bytes(b"the\ncaf\xe9\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "larger").mkdir()
    for path in chain.nllb.iterdir():
        (tmp_path / "larger" / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "larger/config.json").read_text())
    config["vocab_size"] -= 20
    (tmp_path / "larger/config.json").write_text(json.dumps(config))
    command, *flags = words.format(chain=chain, tmp=tmp_path).split()
    if command == "preprocess":
        flags = ["--trainpref", str(chain.text / "train"), "--workers", "1", *flags]
        if "--destdir" not in flags:
            flags += ["--destdir", str(tmp_path / "out")]
    result = run(command, *flags)
    program = f"lightseq-{command.rstrip('_')}"
    assert matches(result.output.strip(), f"{program}: error: {sentence}"), result.output
    assert result.exit_code == 2 and not (tmp_path / "out").exists()
