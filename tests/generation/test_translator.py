"""Translation from Python gives what lightseq-interactive prints; bad input ends in one
sentence."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cli_runs import succeed
from helpers.digits import SENTENCES, Toy

# isort: split
from fairseq import checkpoint_utils
from fairseq.models.transformer import TransformerModel

import lightseq_fairseq
from lightseq_fairseq import Translator
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.plugins.transformer import LSTransformerModel
from lightseq_fairseq.python.translator import Translation

# The toy's data are text, from whose file names the languages are not inferred.
LANGUAGES = {"source_lang": "src", "target_lang": "tgt"}
LINES = [
    "eins zwei drei vier fünf sechs sieben",
    "fünf sechszig sieben acht neun null eins eins zwei",
    "null eins null eins null eins null",
    "neun acht eins drei drei vier",
]


def load(toy: Toy, path: Any = None, **options: Any) -> Translator:
    path = toy.paths[-1] if path is None else path
    return Translator.from_pretrained(path, toy.folder, cpu=True, **LANGUAGES, **options)


@pytest.fixture(scope="module")
def translator(toy: Toy) -> Translator:
    return load(toy)


def printed(number: int, translation: Translation) -> list[list[str]]:
    """The fields that the command prints for a sentence, without the time."""
    lines = [[f"S-{number}", translation.source]]
    lines += [[f"C-{number}", words] for words in translation.constraints]
    for each in translation.hypotheses:
        scores = " ".join(f"{score:.4f}" for score in each.token_scores)
        lines += [[f"H-{number}", str(each.score), each.words],
                  [f"D-{number}", str(each.score), each.text], [f"P-{number}", scores]]  # fmt: skip
        if each.alignment is not None:
            lines.append([f"A-{number}", " ".join(f"{a}-{b}" for a, b in each.alignment)])
    return lines


def all_printed(found: list[Translation]) -> list[list[str]]:
    return [line for number, each in enumerate(found) for line in printed(number, each)]


def of_command(toy: Toy, folder: Path, flags: str, lines: list[str]) -> list[list[str]]:
    """The same fields from lightseq-interactive, which gets all lines at once."""
    (folder / "lines").write_text("".join(f"{line}\n" for line in lines))
    words = ["--path", toy.paths[-1], "-s", "src", "-t", "tgt", "--cpu", "--input",
             folder / "lines", "--buffer-size", "100", *flags.split()]  # fmt: skip
    text = succeed("interactive", toy.folder, *map(str, words))
    fields = [line.split("\t") for line in text.splitlines()]
    return [each for each in fields if each[0][:2] in ("S-", "C-", "H-", "D-", "P-", "A-")]


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ("--beam 1", {"beam": 1}),
        ("--beam 3 --nbest 3 --lenpen 0.6", {"beam": 3, "nbest": 3, "lenpen": 0.6}),
        ("--unkpen -3 --max-len-a 0.5 --max-len-b 1", {"unkpen": -3, "max_len_a": 0.5,
                                                       "max_len_b": 1}),
        ("--diverse-beam-groups 2 --diverse-beam-strength 0.7 --beam 4 --nbest 4",
         {"diverse_beam_groups": 2, "diverse_beam_strength": 0.7, "beam": 4, "nbest": 4}),
        ("--print-alignment --beam 2", {"print_alignment": True, "beam": 2}),
        ("--replace-unk --unkpen -9 --beam 2", {"replace_unk": True, "unkpen": -9, "beam": 2}),
        ("--no-repeat-ngram-size 2", {"no_repeat_ngram_size": 2}),
        ("--batch-size 1 --unnormalized", {"batch_size": 1, "unnormalized": True}),
    ],
)  # fmt: skip
def test_the_same_as_the_command(
    toy: Toy, translator: Translator, tmp_path: Path, flags: str, options: dict[str, Any]
) -> None:
    expected = of_command(toy, tmp_path, f"--max-tokens 12000 {flags}", LINES)
    assert all_printed(translator.translate(LINES, **options)) == expected
    assert all_printed(translator.translate(LINES)) != expected


def test_options_of_loading_are_the_defaults_of_calls(toy: Toy, tmp_path: Path) -> None:
    constrained = [f"{line}\tone\tfive" for line in LINES]
    flags = "--max-tokens 100 --constraints ordered --beam 6 --bf16"
    translator = load(toy, max_tokens=100, constraints="ordered", beam=6, bf16=True)
    found = translator.translate(constrained)
    assert all_printed(found) == of_command(toy, tmp_path, flags, constrained)
    assert all("one" in each.tokens and "five" in each.tokens for each in found)
    assert found[0].constraints == ("one", "five")
    (model,) = translator._loaded.models
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    free = translator.translate(LINES, constraints=None, beam=2)
    assert free[0].constraints == () and len(free[0].hypotheses) == 1


def test_subwords_are_split_and_joined(toy: Toy, tmp_path: Path) -> None:
    codes = tmp_path / "codes"
    codes.write_text("#version: 0.2\n" + "".join(
        f"{a} {b}\n" for a, b in (("e", "i"), ("ei", "n"), ("ein", "s</w>"), ("z", "w"),
                                  ("zw", "e"), ("zwe", "i</w>"))
    ))  # fmt: skip
    pytest.importorskip("subword_nmt")
    flags = f"--bpe subword_nmt --bpe-codes {codes} --remove-bpe --max-tokens 12000"
    translator = load(toy, bpe="subword_nmt", bpe_codes=codes, remove_bpe=True)
    lines = ["\teins zwei", "zwei drei\xa0", " zwei\t"]
    found = translator.translate(lines)
    # "drei" is split into subwords
    assert found[0].source == "eins zwei" and "<unk>" in found[1].source
    assert all_printed(found) == of_command(toy, tmp_path, flags, lines)


UNKNOWN = ["Ursula Xaver@@ Yps", "eins Ursula drei"]


@pytest.mark.parametrize("joined", [False, True])
def test_unknown_words_are_copied_from_the_text(
    toy: Toy, tmp_path: Path, translator: Translator, joined: bool
) -> None:
    """The model writes only <unk>; so its translations consist of words of the source."""
    options = {"replace_unk": True, "unkpen": -99, "beam": 2, "remove_bpe": joined or None}
    found = translator.translate(UNKNOWN, **options)
    sources = ["<unk> <unk> <unk>", "eins <unk> drei"]
    assert [each.source for each in found] == sources
    end = "" if joined else "@@"
    assert re.fullmatch(f"((Ursula|Xaver{end}|Yps) ?)+", found[0].text)
    assert {*found[1].text.split()} <= {*UNKNOWN[1].split()}
    flags = "--replace-unk --unkpen -99 --beam 2 --max-tokens 12000" + " --remove-bpe" * joined
    assert all_printed(found) == of_command(toy, tmp_path, flags, UNKNOWN)


def test_one_sentence_and_many(translator: Translator) -> None:
    many = translator.translate(iter(LINES), beam=2)
    one = translator.translate(LINES[3], beam=2)
    assert translator.translate([]) == []
    assert isinstance(one, Translation) and isinstance(many, list)
    assert one.tokens == many[3].tokens and one.text == many[3].text
    assert one.text == " ".join(one.tokens[:-1])
    best = one.hypotheses[0]
    assert (one.text, one.score) == (best.text, best.score) and best.tokens[-1] == "</s>"
    assert len(best.token_scores) == len(best.tokens) == len(best.text.split()) + 1
    assert best.score == pytest.approx(sum(best.token_scores) / len(best.tokens))  # --lenpen 1
    assert one.seconds > 0


def test_most_texts_are_the_references(toy: Toy, translator: Translator) -> None:
    """Of the held-out sentences, whatever the last bits of the training were."""
    source, target = (
        (toy.folder / f"valid.src-tgt.{side}").read_text().splitlines() for side in ("src", "tgt")
    )
    found = [each.text for each in translator.translate(source, beam=2)]
    right = sum(text == reference for text, reference in zip(found, target, strict=True))
    assert right > SENTENCES / 4  # 140 of 200 on an x86 CPU


def test_a_sentence_that_is_left_out_keeps_its_place(toy: Toy, translator: Translator) -> None:
    long = "eins " * 2000
    found = translator.translate(
        [LINES[0], long, LINES[2]], skip_invalid_size_inputs_valid_test=True
    )
    assert [bool(each.hypotheses) for each in found] == [True, False, True]
    assert (found[1].text, found[1].tokens, found[1].score) == ("", (), -float("inf"))
    assert found[1].source == long.strip()


def test_dictionaries_do_not_grow(toy: Toy) -> None:
    """fairseq adds joined words to the dictionary; this must not change the size for the next
    search."""
    translator = load(toy, remove_bpe="sentencepiece")
    before = len(translator._loaded.task.target_dictionary)
    for beam in (2, 3):
        assert " " not in translator.translate(LINES, beam=beam)[0].text
    translator.translate(LINES, replace_unk=True, remove_bpe=None, unkpen=-9)
    assert len(translator._loaded.task.target_dictionary) == before


def test_samples(toy: Toy, translator: Translator, tmp_path: Path) -> None:
    drawn: dict[str, Any] = {"sampling": True, "beam": 2, "nbest": 2, "temperature": 2.0}
    flags = "--sampling --beam 2 --nbest 2 --temperature 2 --seed 7 --max-tokens 12000"
    found = load(toy, seed=7, **drawn).translate(LINES)
    assert all_printed(found) == of_command(toy, tmp_path, flags, LINES)
    first, second, third = (
        [each.tokens for each in translator.translate(LINES, seed=seed, **drawn)]
        for seed in (3, 3, 4)
    )
    assert first == second != third


def test_a_folder_and_an_ensemble(toy: Toy, tmp_path: Path, translator: Translator) -> None:
    halfway, last = toy.paths
    expected = [translator.translate(LINES), load(toy, halfway).translate(LINES)]
    assert [each.score for each in expected[0]] != [each.score for each in expected[1]]
    for name, wanted in (("checkpoint_last.pt", 1), ("checkpoint_best.pt", 0)):
        shutil.copy((last, halfway)[wanted], tmp_path / name)
        found = load(toy, tmp_path).translate(LINES)
        assert [e.score for e in found] == [e.score for e in expected[wanted]]
    both = load(toy, [halfway, last])
    assert len(both._loaded.models) == 2
    scores = [each.score for each in both.translate(LINES)]
    assert scores not in [[e.score for e in each] for each in expected]


def test_the_data_of_the_checkpoint(toy: Toy, translator: Translator, tmp_path: Path) -> None:
    found = Translator.from_pretrained(toy.paths[-1], cpu=True, max_tokens=None, batch_size=4)
    assert found.configuration.task.data == str(toy.folder)
    assert found.configuration.task.source_lang == "src"
    assert found.translate(LINES[0]).score == translator.translate(LINES[0]).score
    state = torch.load(toy.paths[-1], weights_only=False)
    gone = "the data folder gone, which does not exist here"
    for data, named in (("gone:there", gone), (None, "no data folder")):
        state["cfg"]["task"]["data"] = data
        torch.save(state, tmp_path / "moved.pt")
        with pytest.raises(UserError, match=f"names {named}: pass data"):
            Translator.from_pretrained(tmp_path / "moved.pt", cpu=True)


def test_fairseqs_own_model_and_fairseq_afterwards(toy: Toy, translator: Translator) -> None:
    """Afterwards, another part of the program still loads fairseq's own model."""
    before = checkpoint_utils.load_checkpoint_to_cpu, sys.argv
    native, ours = load(toy, native=True), load(toy)
    assert (checkpoint_utils.load_checkpoint_to_cpu, sys.argv) == before
    assert [type(x._loaded.models[0]) for x in (native, ours)] == [
        TransformerModel, LSTransformerModel,
    ]  # fmt: skip
    (plain,), _ = checkpoint_utils.load_model_ensemble([str(toy.paths[-1])], task=toy.task)
    assert type(plain) is TransformerModel
    assert type(load(toy, retain_dropout=True)._loaded.models[0]) is TransformerModel
    for a, b in zip(native.translate(LINES), translator.translate(LINES), strict=True):
        assert a.tokens == b.tokens and a.score == pytest.approx(b.score, abs=1e-4)


def test_notes_are_warnings(translator: Translator, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(UserWarning, match="^nbest 3 gives 2 hypotheses, as many as beam"):
        assert len(translator.translate("eins", beam=2, nbest=3).hypotheses) == 2
    assert not capfd.readouterr().err


def test_what_is_loaded(toy: Toy) -> None:
    with pytest.raises(UserError, match=r"call Translator\.from_pretrained\(\)"):
        Translator("checkpoints")  # type: ignore[arg-type]
    found = Translator.from_pretrained(toy.paths[-1], toy.folder, device=torch.device("cpu"))
    assert repr(found) == f"Translator({str(toy.paths[-1])!r}, src-tgt, cpu, fp32)"


def shown(error: Exception) -> str:
    """What Python prints if a program does not catch the error."""
    return "".join(traceback.format_exception(error))


def test_the_class_is_there_before_torch_is() -> None:
    code = "import sys; from lightseq_fairseq import Translator; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True)
    assert done.stdout == b"False\n" and "Translator" in dir(lightseq_fairseq)


@pytest.mark.parametrize(
    ("sentences", "options", "sentence"),
    [
        ("", {}, r"Sentence 0 \(counted from 0\) is empty"),
        (["eins", " \n"], {}, r"Sentence 1 \(counted from 0\) is empty"),
        (["eins", 3], {}, "Sentence 1 .* of type int: pass text"),
        (None, {}, "Sentence 0 .* of type NoneType"),
        (["eins", "eins " * 2000], {}, "Sentence 1 .*2001.*1024"),
        ("eins " * 30, {"max_tokens": 20}, "31 tokens.*max_tokens"),
        ("eins", {"beem": 2}, r"Translator has no option beem: did you mean beam\?"),
        ("eins", {"max_new_tokens": 2}, "no option max_new_tokens: did you mean max_len_b"),
        ("eins", {"device_map": "auto"}, r"device_map is not .*: pass device to from_pretrained"),
        ("eins", {"sampling_topp": 0.9}, r"^sampling_topp requires sampling\.$"),
        ("eins", {"beam": 0}, "^beam .*at least 1"),
        ("eins", {"beam": "four"}, "^beam cannot be four"),
        ("eins", {"sampling": True}, "^sampling requires nbest to be equal to beam"),
        ("eins", {"print_alignment": "soft"}, "print_alignment"),
        ("eins", {"min_len": 500}, r"^The shortest result \(min_len"),
        ("eins", {"fp16": True}, r"fp16 is an option of Translator.from_pretrained\(\)"),
        (
            "eins",
            {"native": True},
            r"native is not an option of Translator: pass it to from_pretrained\(\)",
        ),
        ("eins", {"input": "lines"}, r"input is not an option .*: pass .* translate\(\)"),
    ],
)
def test_bad_sentences_and_options(
    translator: Translator, sentences: Any, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence) as caught:
        translator.translate(sentences, **options)
    assert "\n" not in str(caught.value) and str(caught.value).endswith((".", "?"))
    assert shown(caught.value).count("Traceback") == 1
    assert translator.translate(LINES[0]).text.startswith("seven six")  # the translator still works


def language_model(toy: Toy, place: Path) -> Path:
    data = place / "text"
    data.mkdir()
    shutil.copy(toy.folder / "dict.tgt.txt", data / "dict.txt")
    for split in ("train", "valid"):
        shutil.copy(toy.folder / "valid.src-tgt.tgt", data / split)
    words = (
        "--task language_modeling --arch ls_transformer_lm --decoder-layers 1 --dataset-impl raw"
    )
    size = "--decoder-embed-dim 16 --decoder-ffn-embed-dim 16 --decoder-attention-heads 2"
    run_of = "--tokens-per-sample 20 --max-tokens 200 --max-update 1 --num-workers 0 --cpu"
    succeed("train", data, *f"{words} {size} {run_of}".split(), "--save-dir", place)
    return place / "checkpoint_last.pt"


def test_a_language_model(toy: Toy, tmp_path: Path) -> None:
    path = language_model(toy, tmp_path)
    with pytest.raises(UserError, match="contains a model of the task language_modeling: use the"):
        Translator.from_pretrained(path, toy.folder, **LANGUAGES)
    with pytest.raises(UserError, match=r"checkpoint_last\.pt, .*TransformerLanguageModel"):
        load(toy, path, task="translation")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda place: {"checkpoint": place / "gone.pt"}, "gone.pt cannot be read .No such file"),
        (lambda place: {"checkpoint": place / "empty"}, "no checkpoint_best.pt or checkpoint_last"),
        (lambda place: {"checkpoint": place / "text"}, "text is a text file, not a checkpoint"),
        (lambda place: {"checkpoint": place / "hf"}, "hf is a folder of transformers: convert it"),
        (lambda place: {"checkpoint": []}, "There is no checkpoint to load"),
        (lambda place: {"data": place / "gone"}, ".*gone does not exist"),
        (lambda place: {"data": place / "empty"}, "empty .*dict.src.txt"),
        (lambda place: {"data": place / "other"}, "dictionary"),
        (lambda place: {"source_lang": "fr"}, "dict.fr.txt.* with source_lang and target_lang"),
        (lambda place: {"data": place / "running"}, "running contains running text, but"),
        (lambda place: {"bpe": "subword_nmt", "bpe_codes": place / "gone"}, "gone .*not exist"),
        (
            lambda place: {"bpe": "subword_nmt", "bpe_codes": place / "text"},
            r"^bpe subword_nmt cannot read bpe_codes .*text \(invalid line 1 in BPE codes file",
        ),
        (lambda place: {"bpe": "subword_nmt"}, "^bpe_codes is missing: set it"),
        (lambda place: {"device": "cuda:7"}, "device is cuda:7, but torch finds no GPU"),
        (lambda place: {"device": "gpu"}, 'device is gpu: use "cpu" or "cuda"'),
        (lambda place: dict(zip(LANGUAGES, reversed(LANGUAGES.values()))), "to translate from src"),
        (lambda place: {"lenpen": "long"}, "^lenpen cannot be long"),
        (lambda place: {"lenpenalty": 1}, "no option lenpenalty: did you mean lenpen"),
        (lambda place: {"buffer_size": 5}, "buffer_size is not an option of Translator"),
    ],
)
def test_what_cannot_be_loaded(
    toy: Toy, tmp_path: Path, change: Callable[[Path], dict[str, Any]], sentence: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("text\n")
    (tmp_path / "other").mkdir()
    (tmp_path / "running").mkdir()
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    (tmp_path / "running" / "dict.txt").write_text("a 1\n")
    for side in ("src", "tgt"):
        (tmp_path / "other" / f"dict.{side}.txt").write_text("a 1\nb 1\n")
    given = {"checkpoint": toy.paths[-1], "data": toy.folder, **LANGUAGES, **change(tmp_path)}
    with pytest.raises(UserError, match=sentence) as caught:
        Translator.from_pretrained(**given, cpu=True)
    assert "\n" not in str(caught.value) and str(caught.value)[-1] in ".?e"
    assert shown(caught.value).count("Traceback") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("precision", [{}, {"fp16": True}, {"bf16": True}])
def test_on_a_gpu(toy: Toy, translator: Translator, precision: dict[str, Any]) -> None:
    options = {**LANGUAGES, **precision}
    there = Translator.from_pretrained(toy.paths[-1], toy.folder, **options)
    (model,) = there._loaded.models
    assert {p.device.type for p in model.parameters()} == {"cuda"}
    lines = [LINES[0], LINES[-1]]  # the model is sure of these
    for options in (*[{"beam": 3}] * 3, {"no_repeat_ngram_size": 3}, {"print_alignment": True}):
        # The first options run eager, captured and replayed; the last two use fairseq's search.
        found, expected = there.translate(lines, **options), translator.translate(lines, **options)
        for a, b in zip(found, expected, strict=True):
            assert a.text == b.text and a.score == pytest.approx(b.score, abs=0.1)


@pytest.mark.parametrize("options", [{}, {"remove_bpe": "sentencepiece"}])
def test_words_that_are_not_in_the_dictionary_are_a_warning(
    translator: Translator, options: dict[str, str]
) -> None:
    with pytest.warns(UserWarning, match="1 of the 2 source tokens is not.*, bpe_codes=FILE, "):
        translator.translate("eins unbekannt", **options)


def test_the_device_has_pythons_names() -> None:
    with pytest.raises(UserError, match='device is gpu: use "cpu" or "cuda"'):
        Translator.from_pretrained("checkpoints", device="gpu")
