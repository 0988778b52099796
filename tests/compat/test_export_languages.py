"""A model of --task translation_multi_simple_epoch is exported with the rows of its languages."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import helpers.languages as languages
import pytest
import torch
from helpers.cli_runs import run, succeed

TASK = ["--task", "translation_multi_simple_epoch"]
TRAIN = shlex.split(
    "--arch ls_transformer --lang-pairs aa-bb,bb-aa,aa-cc --langs cc,aa,bb --encoder-layers 1 "
    "--decoder-layers 1 --encoder-embed-dim 32 --encoder-ffn-embed-dim 32 --max-epoch 12 --cpu "
    "--encoder-normalize-before --decoder-normalize-before --share-all-embeddings --lr 0.01 "
    "--encoder-attention-heads 4 --decoder-attention-heads 4 "
    "--no-epoch-checkpoints --disable-validation --num-workers 0 --dropout 0 --max-tokens 200"
)
SEARCH = shlex.split("-s aa -t cc --beam 1 --cpu --num-workers 0 --max-len-a 0 --max-len-b 12")


class Model:
    def __init__(self, folder: Path) -> None:
        self.data = languages.write(folder / "data")
        succeed("train", self.data, *TASK, *TRAIN, "--save-dir", folder / "run")
        self.path = folder / "run" / "checkpoint_last.pt"
        self.found = self.generate(self.path)

    def generate(self, path: Path, *words: str) -> dict[str, str]:
        """The translation of each line of the test set."""
        output = succeed("generate", self.data, *TASK, "--path", path, *SEARCH, *words)
        by_kind: dict[str, dict[str, str]] = {"S": {}, "H": {}}
        for line in output.splitlines():
            name, *_, text = line.split("\t") if "\t" in line else ("", "")
            if name[:2] in ("S-", "H-"):
                by_kind[name[0]][name[2:]] = text
        return {by_kind["S"][n]: by_kind["H"][n] for n in by_kind["S"]}

    def export(self, kind: str, folder: Path, *words: str | Path) -> Path:
        succeed("export", self.path, "--to", kind, "--output", folder / kind, *words)
        return folder / kind


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("model"))


def test_fairseqs_file_translates_the_same(model: Model, tmp_path: Path) -> None:
    assert len(set(model.found.values())) > 5
    assert model.generate(model.export("fairseq", tmp_path), "--native") == model.found


def test_safetensors_name_the_languages(model: Model, tmp_path: Path) -> None:
    load_file = pytest.importorskip("safetensors.torch").load_file
    folder = model.export("safetensors", tmp_path)
    weights = torch.load(model.path, weights_only=False)["model"]
    name = "decoder.embed_tokens.weight"  # tied tensors are stored once
    found = load_file(folder / "model.safetensors")
    stored = next(value for key, value in found.items() if value.shape == weights[name].shape)
    assert torch.equal(stored, weights[name])
    options = json.loads((folder / "config.json").read_text())["options"]
    assert options["langs"] == ["cc", "aa", "bb"] and options["lang_tok_style"] == "multilingual"


def test_ctranslate2_translates_the_same(model: Model, tmp_path: Path) -> None:
    """The caller writes the tokens of languages, and CTranslate2 the ends of sentences."""
    ctranslate2: Any = pytest.importorskip("ctranslate2")
    translator = ctranslate2.Translator(str(model.export("ctranslate2", tmp_path)), "cpu")
    for source, expected in model.found.items():
        assert source.startswith("__aa__ ")
        (result,) = translator.translate_batch(
            [source.split()], target_prefix=[["__cc__"]], beam_size=1, max_decoding_length=12
        )
        assert result.hypotheses[0] == ["__cc__", *expected.split()]


def test_hugging_face_computes_the_same(model: Model, tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    folder = model.export("huggingface", tmp_path)
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    words = ["<s>", "<pad>", "</s>", "<unk>", *languages.words(model.data)]
    words += [f"__{language}__" for language in ("cc", "aa", "bb")]
    assert len(words) == theirs.config.vocab_size
    for source, expected in model.found.items():
        row = torch.tensor([[*map(words.index, source.split()), 2]])
        found = theirs.generate(
            row, forced_bos_token_id=words.index("__cc__"), num_beams=1, max_new_tokens=14,
            do_sample=False, bad_words_ids=[[0], [1]],
        )  # fmt: skip
        said = [words[n] for n in found[0].tolist() if n > 2][1:]
        assert said[: len(expected.split())] == expected.split()  # the limits of length differ


def test_a_dictionary_of_another_model_is_refused(model: Model, tmp_path: Path) -> None:
    (tmp_path / "dict.aa.txt").write_text("a 1\nb 1\n")
    (tmp_path / "dict.bb.txt").write_text("a 1\nb 1\n")
    words = ["--to", "safetensors", "--output", tmp_path / "out", "--data", tmp_path]
    result = run("export", model.path, *words)
    assert result.exit_code == 2 and not (tmp_path / "out").exists()
    assert "dict.aa.txt has 9 words, but the model has 100" in result.stderr
