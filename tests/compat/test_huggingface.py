"""lightseq-import of folders of `transformers`, and lightseq-export --to huggingface."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import helpers.hugging_face as hugging_face
import pytest
import torch
from helpers.cli_runs import SMALL, SMALL_TEXT, binarise, binarise_text, run, succeed
from helpers.golden import matches, refusals
from helpers.hugging_face import KINDS, Kind
from safetensors.torch import load_file
from transformers import AutoTokenizer

from lightseq_fairseq import Translator


class Made(NamedTuple):
    """A folder of `transformers`, its import, a data folder, and the model that was trained on."""

    kind: Kind
    theirs: Path
    imported: Path
    data: Path
    trained: Path


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    kind, folder = KINDS[request.param], tmp_path_factory.mktemp(request.param)
    hugging_face.make(kind, folder / "theirs")
    printed = succeed("import_", folder / "theirs", folder / "imported")
    assert printed.startswith(f"wrote {folder}/imported; to train it further:\nlightseq-preprocess")
    data = hugging_face.data(kind, folder / "imported", folder / "text")
    succeed(
        "train", data, *kind.flags.split(), "--finetune-from-model", folder / "imported/model.pt",
        "--save-dir", folder / "run", "--lr", "1e-3", "--max-update", "2", "--max-tokens", "64",
        "--no-epoch-checkpoints", "--num-workers", "0", "--cpu",
    )  # fmt: skip
    trained = folder / "run/checkpoint_last.pt"
    return Made(kind, folder / "theirs", folder / "imported", data, trained)


def home(path: Path, made: Made, output: Path) -> Path:
    flags = ("--data", made.data, "--tokenizer", made.theirs)
    told = succeed("export", path, "--to", "huggingface", "--output", output, *flags)
    assert told and "no tokenizer" not in told
    return output


@pytest.mark.parametrize("native", [False, True])
def test_import_computes_what_transformers_computes(made: Made, native: bool) -> None:
    model, task = hugging_face.ours(made.imported / "model.pt", made.data, native)
    assert_same(made.kind, hugging_face.load(made.theirs), model, task)


def assert_same(kind: Kind, theirs: Any, model: Any, task: Any) -> None:
    for left in (False, True)[: 1 + kind.counts]:
        for batch in hugging_face.batches(kind):
            expected = hugging_face.logits(kind, theirs, None, batch, left)
            found = hugging_face.logits(kind, model, task, batch, left)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("made", ["marian"], indirect=True)
def test_a_word_that_only_fairseq_has_is_never_chosen_and_hides_no_loss(made: Made) -> None:
    """Label smoothing adds the logarithms of all probabilities to the loss."""
    model, task = hugging_face.ours(made.imported / "model.pt", made.data)
    words = task.target_dictionary
    tokens = torch.tensor([[words.index("w1"), words.eos()]])
    with torch.no_grad():
        found = model(tokens, torch.tensor([2]), tokens)[0].log_softmax(-1)
    assert found.exp()[..., words.bos()].max() == 0
    assert found.mean() > -10


def test_import_of_an_export_is_bitwise(made: Made, tmp_path: Path) -> None:
    folds = made.kind.model.startswith("Camembert")
    exported = home(made.imported / "model.pt", made, tmp_path / "exported")
    found, expected = (load_file(path / "model.safetensors") for path in (exported, made.theirs))
    assert found.keys() == expected.keys()
    differs = {name.split(".")[-2] for name in found if not found[name].equal(expected[name])}
    # The token types are added to the positions, which is the same function.
    assert differs <= ({"token_type_embeddings", "position_embeddings"} if folds else set())
    succeed("import_", exported, tmp_path / "again")
    first, second = (
        torch.load(path / "model.pt", weights_only=False)["model"]
        for path in (made.imported, tmp_path / "again")
    )
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    for name in ("dict.txt", "languages.txt"):
        if (made.imported / name).exists():
            assert (made.imported / name).read_text() == (tmp_path / "again" / name).read_text()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_import_goes_home_without_flags(made: Made, tmp_path: Path) -> None:
    """Its folder has the dictionaries and the tokenizer."""
    whole = contents(home(made.imported / "model.pt", made, tmp_path / "whole"))
    for source in (made.imported, made.imported / "model.pt"):
        told = succeed(
            "export", source, "--to", "huggingface", "--output", tmp_path / "home", "--force"
        )
        assert "no tokenizer" not in told
        assert contents(tmp_path / "home") == whole


def test_a_trained_model_goes_home(made: Made, tmp_path: Path) -> None:
    model, task = hugging_face.ours(made.trained, made.data)
    theirs = hugging_face.load(home(made.trained, made, tmp_path / "exported"))
    assert_same(made.kind, theirs, model, task)
    start, _ = hugging_face.ours(made.imported / "model.pt", made.data)
    pairs = zip(start.parameters(), model.parameters(), strict=True)
    assert not any(torch.equal(*pair) for pair in pairs if pair[0].dim() > 1)


def go_home(folder: Path) -> None:
    """Import "theirs" in the folder as "imported", and export this as "home"."""
    imported = folder / "imported"
    succeed("import_", folder / "theirs", imported)
    succeed(
        "export", imported / "model.pt", "--to", "huggingface", "--data", imported,
        "--tokenizer", folder / "theirs", "--output", folder / "home",
    )  # fmt: skip


@pytest.mark.parametrize(
    "name", ["roberta", "camembert", "gpt2", "nllb", "mbart", "bart", "pegasus", "xglm"]
)
def test_the_tokenizer_goes_home(name: str, tmp_path: Path) -> None:
    made = KINDS[name]
    hugging_face.make(made, tmp_path / "theirs")
    go_home(tmp_path)
    tokenizers = (AutoTokenizer.from_pretrained(tmp_path / each) for each in ("theirs", "home"))
    first, second = (each(f"w1 {made.words[-1]} w2")["input_ids"] for each in tokenizers)
    assert first == second and first


def test_marians_tokenizer_goes_home(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("".join(f"{a} {b}\n" for a in hugging_face.WORDS for b in hugging_face.WORDS))
    hugging_face.marian(tmp_path / "theirs", text)
    go_home(tmp_path)
    first, second = (AutoTokenizer.from_pretrained(tmp_path / each) for each in ("theirs", "home"))
    ids = second("w1 w22 w3")["input_ids"]
    assert ids == first("w1 w22 w3")["input_ids"] and ids[-1] == 0 and 1 not in ids
    assert second.decode(ids, skip_special_tokens=True) == "w1 w22 w3"
    configs = [json.loads((tmp_path / x / "config.json").read_text()) for x in ("theirs", "home")]
    for config in configs:
        config.pop("_name_or_path", None)
    assert configs[0] == configs[1]
    # The folder of the import translates at once, by the same tokenizer.
    model = Translator.from_pretrained(tmp_path / "imported", device="cpu")
    found = model.translate("w1 w22 w3", max_len_a=0, max_len_b=8)
    assert "<unk>" not in found.source and "w" in found.source
    (best,) = found.hypotheses
    words = second.decode([second.convert_tokens_to_ids(word) for word in best.tokens[:-1]])
    assert best.text == words and "\u2581" not in best.text


@pytest.mark.parametrize("name", ["nllb", "xglm"])
def test_layerdrop_is_the_files(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It comes home; a run takes its own, so it trains in our step."""
    kind = KINDS[name]
    names = {"nllb": ("encoder_layerdrop", "decoder_layerdrop"), "xglm": ("layerdrop",)}[name]
    kind = kind._replace(config={**kind.config, **dict.fromkeys(names, 0.25)})
    hugging_face.make(kind, tmp_path / "theirs")
    go_home(tmp_path)
    args = torch.load(tmp_path / "imported/model.pt", weights_only=False)["args"]
    assert args.decoder_layerdrop == 0.25
    config = json.loads((tmp_path / "home/config.json").read_text())
    assert [config[each] for each in names] == [0.25] * len(names)
    data = hugging_face.data(kind, tmp_path / "imported", tmp_path / "text")
    caplog.set_level(logging.INFO)
    succeed(
        "train", data, *kind.flags.split(), "--finetune-from-model", tmp_path / "imported/model.pt",
        "--save-dir", tmp_path / "run", "--lr", "1e-3", "--max-update", "1", "--max-tokens", "64",
        "--num-workers", "0", "--cpu",
    )  # fmt: skip
    assert "step: without CUDA graphs, without padding" in caplog.text


def test_a_classification_head(tmp_path: Path) -> None:
    kind = KINDS["roberta"]._replace(model="RobertaForSequenceClassification")
    kind = kind._replace(config={**kind.config, "num_labels": 3})
    theirs = hugging_face.make(kind, tmp_path / "theirs")
    go_home(tmp_path)
    tokens = torch.tensor([[0, 7, 9, 40, 2]])
    again = hugging_face.load(tmp_path / "home")
    assert torch.equal(again(tokens).logits, theirs(tokens).logits)
    state = torch.load(tmp_path / "imported/model.pt", weights_only=False)
    assert "classification_heads.sentence_classification_head.out_proj.weight" in state["model"]


def test_a_tokenizer_that_does_not_fit_stays_behind(tmp_path: Path) -> None:
    """The message names it, and the words that the dictionary lacks."""
    kind = KINDS["roberta"]
    hugging_face.make(kind, tmp_path / "theirs")
    imported = tmp_path / "imported"
    succeed("import_", tmp_path / "theirs", imported)
    export = ("export", imported, "--to", "huggingface", "--output", tmp_path / "home")
    kind.tokenizer(imported, [*kind.words[:-3], "other", "words", "<mask>"])
    told = succeed(*export)
    assert f"has no tokenizer, because The tokenizer in {imported} has 2 words that" in told
    assert not list((tmp_path / "home").glob("tokenizer*"))
    result = run(*export, "--force", "--tokenizer", imported)
    assert result.exit_code == 2 and "has 2 words that the dictionary" in result.output
    kind.tokenizer(imported, kind.words)
    # A copy of the file alone: the checkpoint names the folder of the import.
    shutil.copy(imported / "model.pt", tmp_path / "alone.pt")
    assert "no tokenizer" not in succeed("export", tmp_path / "alone.pt", *export[2:], "--force")
    # The folder of a run is searched for the tokenizer of its checkpoint, too.
    data = tmp_path / "data"
    data.mkdir()
    shutil.move(imported / "dict.txt", data)
    assert "no tokenizer" not in succeed(*export, "--force", "--data", data)
    shutil.move(imported / "tokenizer.json", data)
    assert "its text was split before" in succeed(*export, "--force", "--data", data)


PRINTED = {
    "words": KINDS["camembert"],
    "running text": KINDS["xglm"],
    "classes": KINDS["camembert"]._replace(model="CamembertForSequenceClassification"),
    "numbers": KINDS["camembert"]._replace(model="CamembertForSequenceClassification"),
}


@pytest.mark.parametrize("name", PRINTED)
def test_the_printed_commands_run(name: str, tmp_path: Path) -> None:
    """As typed, with the files and folders of the user; and the result finds its tokenizer."""
    kind = PRINTED[name]
    label2id = {"classes": {"no": 0, "yes": 1, "perhaps": 2}, "numbers": {"how much": 0}}
    labels = label2id.get(name, {})
    config = {**kind.config, "max_position_embeddings": 100}
    if labels:
        config |= {"label2id": labels, "id2label": {n: word for word, n in labels.items()}}
    hugging_face.make(kind._replace(config=config), tmp_path / "theirs")
    imported, data, home = (tmp_path / each for each in ("imported", "data", "home"))
    _, *preprocess, train = succeed("import_", tmp_path / "theirs", imported).splitlines()
    lines = [" ".join(hugging_face.WORDS[n : n + 4]) for n in range(12)]
    (tmp_path / "text").write_text("\n".join(lines) + "\n")
    (tmp_path / "label").write_text("yes\nno\nperhaps\n" * 4)
    for line in preprocess:
        place = line.partition(" --destdir DATA/")[2]
        text = tmp_path / ("label" if place == "label" else "text")
        words = line.replace("...", f"--trainpref {text} --validpref {text} --workers 1")
        words = words.replace("DATA", str(data)) if place else f"{words} --destdir {data}"
        command, *flags = words.split()
        assert command == "lightseq-preprocess"
        succeed("preprocess", *flags)
    if name == "numbers":
        (data / "label").mkdir()
        for split in ("train", "valid"):
            (data / f"label/{split}.label").write_text("0.5\n" * 12)
    command, *flags = train.replace("DATA", str(data)).split()
    assert command == "lightseq-train"
    more = "--max-update 2 --max-tokens 256 --lr 1e-3 --no-epoch-checkpoints --num-workers 0 --cpu"
    succeed("train", *flags, *more.split(), "--save-dir", tmp_path / "run")
    export = ("--to", "huggingface", "--output", home, "--force")
    for source in (tmp_path / "run", imported):
        assert "no tokenizer" not in succeed("export", source, *export)
        first, second = (AutoTokenizer.from_pretrained(x) for x in (tmp_path / "theirs", home))
        assert type(first) is type(second)
        assert first(lines)["input_ids"] == second(lines)["input_ids"]
        found = json.loads((home / "config.json").read_text()).get("label2id", {})
        assert set(found) == set(labels) or (name == "numbers" and len(found) == 1)
    assert found == labels


def test_several_languages(tmp_path: Path) -> None:
    """The task adds languages to the dictionary; those of the import are there already."""
    kind = KINDS["nllb"]
    hugging_face.make(kind, tmp_path / "theirs")
    succeed("import_", tmp_path / "theirs", tmp_path / "imported")
    names = (tmp_path / "imported/languages.txt").read_text().split()
    assert names == ["eng_Latn", "zul_Latn"]
    kind = kind._replace(pairs=kind.pairs.replace("-s a -t b", "-s eng_Latn -t zul_Latn"))
    data = hugging_face.data(kind, tmp_path / "imported", tmp_path / "text", names)
    flags = "--task translation_multi_simple_epoch --arch ls_transformer --encoder-langtok src"
    flags += " --decoder-langtok --lang-pairs eng_Latn-zul_Latn --max-update 2 --max-tokens 64"
    succeed(
        "train", data, *flags.split(), "--lang-dict", tmp_path / "imported/languages.txt",
        "--finetune-from-model", tmp_path / "imported/model.pt", "--save-dir", tmp_path / "run",
        "--no-epoch-checkpoints", "--num-workers", "0", "--cpu", "--lr", "1e-3",
    )  # fmt: skip
    made = Made(kind, tmp_path / "theirs", tmp_path, data, tmp_path / "run/checkpoint_last.pt")
    theirs = hugging_face.load(home(made.trained, made, tmp_path / "home"))
    weights = torch.load(made.trained, weights_only=False)["model"]
    assert torch.equal(weights["encoder.embed_tokens.weight"], theirs.model.shared.weight)


def test_an_imported_model_of_several_languages_translates(tmp_path: Path) -> None:
    """A search needs only -s and -t, and finds the words of transformers."""
    kind = KINDS["nllb"]
    theirs = hugging_face.make(kind, tmp_path / "theirs")
    succeed("import_", tmp_path / "theirs", tmp_path / "imported")
    lines = [" ".join(line) for line in hugging_face.batches(kind)[0]]
    (tmp_path / "text").write_text("".join(f"{line}\n" for line in lines))
    words = ["--path", tmp_path / "imported/model.pt", "--input", tmp_path / "text", "--cpu"]
    words += ["-s", "zul_Latn", "-t", "eng_Latn", "--beam", "1", "--max-len-b", "11"]
    task = ["--task", "translation_multi_simple_epoch", "--max-len-a", "0"]
    task += ["--tokenizer", "space"]  # the lines are the words of the dictionary
    output = succeed("interactive", tmp_path / "imported", *task, *words).splitlines()
    found = [line.split("\t")[2] for line in output if line.startswith("H-")]
    index = {word: number for number, word in enumerate(kind.words)}
    for line, said in zip(lines, found, strict=True):
        tokens = [index["zul_Latn"], *(index[word] for word in line.split()), index["</s>"]]
        generated = theirs.generate(
            torch.tensor([tokens]), forced_bos_token_id=index["eng_Latn"], num_beams=1,
            do_sample=False, max_new_tokens=12, bad_words_ids=[[index["<pad>"]]],
        )[0].tolist()  # fmt: skip
        # The language's token is left out of our text, wherever it is.
        left_out = ("</s>", "eng_Latn")
        expected = [kind.words[n] for n in generated[2:] if kind.words[n] not in left_out]
        named = [word.replace("zul_Latn", "__zul_Latn__") for word in expected]
        assert said.split() == named[: len(said.split())] and said
    model = Translator.from_pretrained(
        tmp_path / "imported/model.pt", task=task[1], tokenizer="space", source_lang="zul_Latn",
        target_lang="eng_Latn", beam=1, max_len_a=0, max_len_b=11, device="cpu",
    )  # fmt: skip
    assert [each.text for each in model.translate(lines)] == found


@pytest.mark.parametrize("name", ["nllb", "mbart"])
def test_new_words_go_home(name: str, tmp_path: Path) -> None:
    """A new language and a new character get the last rows, and the tokenizer knows them."""
    kind = KINDS[name]
    kind = kind._replace(config={**kind.config, "vocab_size": 72})  # more rows than words
    hugging_face.make(kind, tmp_path / "theirs")
    succeed("import_", tmp_path / "theirs", tmp_path / "imported")
    code = {"nllb": "xho_Latn", "mbart": "qq_QQ"}[name]
    with open(tmp_path / "imported/dict.txt", "a") as file:
        file.write(f"{kind.named.format(code)} 1\n@ 1\n")
    path = tmp_path / "imported/model.pt"
    state = torch.load(path, weights_only=False)
    table = state["model"]["encoder.embed_tokens.weight"]
    table = torch.cat([table, torch.randn(2, table.shape[1])])
    for each in ("encoder.embed_tokens", "decoder.embed_tokens", "decoder.output_projection"):
        state["model"][f"{each}.weight"] = table
    state["extra_state"].pop("dictionaries")
    torch.save(state, path)
    made = Made(kind, tmp_path / "theirs", tmp_path, tmp_path / "imported", path)
    exported = home(path, made, tmp_path / "home")
    model, tokenizer = hugging_face.load(exported), AutoTokenizer.from_pretrained(exported)
    assert tokenizer.convert_tokens_to_ids(["w3", code, "@"]) == [7, 72, 73]
    assert torch.equal(model.model.shared.weight, table)


@pytest.mark.parametrize("layout", ["nllb parts", "nllb bin", "nllb half", "gpt2 base"])
def test_other_files(layout: str, tmp_path: Path) -> None:
    """Parts; pytorch_model.bin with each name of a tied table; 16 bits; the class without head.

    GPT-2's published config.json names no pad.
    """
    name, kind = layout.split()
    model = hugging_face.make(KINDS[name], tmp_path / "theirs")
    succeed("import_", tmp_path / "theirs", tmp_path / "first")
    (tmp_path / "theirs/model.safetensors").unlink()
    if kind == "bin":
        torch.save(model.state_dict(), tmp_path / "theirs/pytorch_model.bin")
    else:
        saved = model.base_model if kind == "base" else model.half() if kind == "half" else model
        size = "20KB" if kind == "parts" else "1GB"
        saved.save_pretrained(tmp_path / "theirs", max_shard_size=size)
    if name == "gpt2":
        config = json.loads((tmp_path / "theirs/config.json").read_text())
        assert config.pop("pad_token_id") is None
        (tmp_path / "theirs/config.json").write_text(json.dumps(config))
    succeed("import_", tmp_path / "theirs", tmp_path / "second")
    assert len({(tmp_path / each / "dict.txt").read_text() for each in ("first", "second")}) == 1
    first, second = (
        torch.load(tmp_path / folder / "model.pt", weights_only=False)["model"]
        for folder in ("first", "second")
    )
    assert first.keys() == second.keys()
    for each, value in first.items():
        is_weight = not each.endswith(("version", "_float_tensor"))
        expected = value.half() if kind == "half" and is_weight else value
        assert torch.equal(second[each], expected) and second[each].dtype == expected.dtype, each


SCRATCH = {
    "GPT2LMHeadModel": f"{' '.join(SMALL_TEXT)} --arch ls_transformer_lm "
    "--decoder-normalize-before",
    "GPT2LMHeadModel, one table": f"{' '.join(SMALL_TEXT)} --arch ls_transformer_lm_gpt "
    "--decoder-learned-pos --share-decoder-input-output-embed",
    "FSMTForConditionalGeneration": f"{' '.join(SMALL)} --arch ls_transformer",
}


@pytest.mark.parametrize("name", SCRATCH)
def test_models_trained_here_from_scratch(name: str, tmp_path: Path) -> None:
    """Without --tokenizer, rows are fairseq's."""
    is_text = name.startswith("GPT2")
    data = (binarise_text if is_text else binarise)(tmp_path)
    succeed("train", data, *SCRATCH[name].split(), "--lr", "1e-2", "--save-dir", tmp_path / "run")
    told = succeed("export", tmp_path / "run", "--to", "huggingface", "--output", tmp_path / "home")
    assert "It has no tokenizer, because " in told
    assert "Token ids are the rows of the run's dictionary" in told
    theirs = hugging_face.load(tmp_path / "home")
    assert type(theirs).__name__ == name.split(",")[0]
    best = tmp_path / "run/checkpoint_best.pt"
    model, task = hugging_face.ours(best, data, source="de", target="en")
    tokens = torch.randint(4, len(task.source_dictionary), (2, 8))
    with torch.no_grad():
        if is_text:
            assert theirs.config.bos_token_id == task.source_dictionary.eos()  # begins a text
            found, expected = model(tokens)[0], theirs(tokens).logits
        else:
            found = model(tokens, torch.tensor([8, 8]), tokens)[0]
            expected = theirs(tokens, decoder_input_ids=tokens, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_refused_language_model_is_told_all_flags(tmp_path: Path) -> None:
    """With them, `test_models_trained_here_from_scratch` exports one."""
    words = f"{' '.join(SMALL_TEXT)} --arch ls_transformer_lm --decoder-input-dim 24 --lr 1e-2"
    succeed("train", binarise_text(tmp_path), *words.split(), "--save-dir", tmp_path / "run")
    result = run("export", tmp_path / "run", "--to", "huggingface")
    assert result.exit_code == 2 and result.output.strip() == (
        "lightseq-export: error: Hugging Face has no model that computes the same "
        "(decoder_normalize_before is False, but True in its GPT2; decoder_input_dim is 24, but "
        "decoder_embed_dim is 16): export this one with --to safetensors, or train a model with "
        "--decoder-normalize-before --decoder-input-dim 16."
    )


@pytest.mark.parametrize(("flags", "sentence"), refusals(__file__, "test_huggingface export"))
def test_export_refuses(flags: str, sentence: str, tmp_path: Path) -> None:
    data = binarise(tmp_path)
    words, _, options = flags.partition(" export")
    train = [*SMALL, "--arch", "ls_transformer", "--lr", "1e-2", *words.split()]
    succeed("train", data, *train, "--save-dir", tmp_path / "run")
    hugging_face.make(KINDS["fsmt"], tmp_path / "theirs")
    options = options.format(tmp_path)
    result = run(
        "export", tmp_path / "run", "--to", "huggingface", "--output", tmp_path / "home",
        *options.split(),
    )  # fmt: skip
    assert matches(result.output.strip(), f"lightseq-export: error: {sentence}"), result.output
    assert result.exit_code == 2 and not (tmp_path / "home").exists()


def changed(case: str, folder: Path) -> Path:
    """A folder of `transformers` with a fault."""
    others = {"bias": "bart", "start": "marian", "untied": "marian", "positions": "pegasus"}
    kind = KINDS[others.get(case, "roberta")]
    model = hugging_face.make(kind, folder)
    config = json.loads((folder / "config.json").read_text())
    fields: dict[str, Any] = {
        "kind": {"model_type": "bert"},
        "class": {"architectures": ["RobertaForQuestionAnswering"]},
        "epsilon": {"layer_norm_eps": 1e-12},
        "defaults": {"layer_norm_eps": 1e-12, "type_vocab_size": 2},  # of RobertaConfig()
        "activation": {"hidden_act": "silu"},
        "width": {"intermediate_size": 40},
        "start": {"decoder_start_token_id": 0},
        "untied": {"tie_word_embeddings": False},
    }
    (folder / "config.json").write_text(json.dumps(config | fields.get(case, {})))
    if case == "parts":
        (folder / "model.safetensors").unlink()
        model.save_pretrained(folder, max_shard_size="30KB")
        next(folder.glob("model-00002-of-*")).unlink()
    elif case == "bias":
        model.final_logits_bias += 1
        model.save_pretrained(folder)
    elif case == "positions":
        model.model.decoder.embed_positions.weight.data += 1
        model.save_pretrained(folder)
    elif case == "words":
        kind.tokenizer(folder, [*kind.words, "more", "words"])
    elif case == "truncated":
        whole = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(whole[:-5])
    for name in {"config": ["config"], "tokenizer": ["tokenizer"], "json": []}.get(case, ()):
        (folder / f"{name}.json").unlink()
    if case == "json":
        (folder / "config.json").write_text("{")
    if case == "weights":
        (folder / "model.safetensors").unlink()
    return folder


@pytest.mark.parametrize(("case", "sentence"), refusals(__file__, "test_huggingface"))
def test_import_refuses(case: str, sentence: str, tmp_path: Path) -> None:
    result = run("import_", changed(case, tmp_path / "theirs"), tmp_path / "imported")
    assert result.exit_code == 2
    assert matches(result.output.strip(), f"lightseq-import: error: {sentence}"), result.output
    assert not (tmp_path / "imported").exists()
