"""The example of several languages: a short run of its command, from a random model of Hugging Face
to translations in all directions and back."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest
import torch
from helpers.cli_runs import succeed
from helpers.example_runs import CODE, assert_refused, start

pytest.importorskip("transformers")

from examples.multilingual import model

NOUNS = {
    "en": ("dog", "man", "ball", "tree", "cow"),
    "de": ("Hund", "Mann", "Ball", "Baum", "Kuh"),
    "fr": ("chien", "homme", "ballon", "arbre", "vache"),
}
LANGUAGES = ("eng_Latn", "deu_Latn", "fra_Latn")
UPDATES = 5


def write_captions(folder: Path, languages: tuple[str, ...] = tuple(NOUNS)) -> Path:
    """Write raw files as those of Multi30k, a few nouns in each caption."""
    folder.mkdir()
    draw = random.Random(1)
    for split, count in (("train", 150), ("val", 10), ("test_2016_flickr", 10)):
        captions = [draw.choices(range(5), k=draw.randint(2, 4)) for _ in range(count)]
        for language in languages:
            lines = [" ".join(NOUNS[language][n] for n in caption) + "." for caption in captions]
            text = "".join(f"{line}\n" for line in lines)
            (folder / f"{split}.{language}.gz").write_bytes(gzip.compress(text.encode()))
    return folder


@pytest.mark.parametrize("words", [("--update", "3"), ("--size", "tpu"), ("--updates", CODE)])
def test_a_wrong_argument_is_refused(words: tuple[str, ...]) -> None:
    assert_refused("multilingual", *words)


def test_missing_languages_are_explained(tmp_path: Path) -> None:
    raw = write_captions(tmp_path / "raw", ("en",))
    with pytest.raises(SystemExit, match="has the files of 1 languages: it needs those of two"):
        model.main([str(raw), str(tmp_path / "model"), str(tmp_path / "text")])
    assert not (tmp_path / "model").exists()


def test_from_hugging_face_and_back(tmp_path: Path) -> None:
    raw = write_captions(tmp_path / "raw")
    out = tmp_path / "out"
    short = ["--size", "cpu", "--updates", str(UPDATES), "--raw", raw, "--out", out]
    process = start("multilingual", *short, "--", "--cpu")
    output, errors = process.communicate(timeout=280)
    assert process.returncode == 0, output[-3000:] + errors[-3000:]
    run = out / "cpu-lightseq-seed1"

    log = (run / "train.log").read_text()
    assert "| step: without CUDA graphs" in log and "| model: ls_transformer, " in log
    assert " sentence pairs, " in log
    losses = [float(x.split('"')[0]) for x in log.split('"valid_loss": "')[1:]]
    assert losses[-1] < losses[0] - 0.3
    rows = json.loads((out / "bleu.json").read_text())
    directions = {f"{a}-{b}" for a in LANGUAGES for b in LANGUAGES if a != b}
    assert {row["case"].split()[1] for row in rows} == directions
    assert all(row["updates"] == UPDATES and row["bleu"] >= 0 for row in rows)

    # The data folder and the checkpoint have all that a search of raw text needs.
    best = run / "checkpoints" / "checkpoint_best.pt"
    words = ["--path", best, "--input", run / "text" / "test.fra_Latn", "--cpu", "--beam", "4"]
    words += ["-s", "fra_Latn", "-t", "deu_Latn", "--max-len-a", "1.5", "--max-len-b", "10"]
    lines = succeed("interactive", run / "bin", *words).splitlines()
    found = [line.split("\t")[2] for line in lines if line.startswith("D-")]
    assert found == (run / "fra_Latn-deu_Latn.out").read_text().splitlines() and len(found) == 10

    import transformers

    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(run / "exported")
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "exported")
    trained = torch.load(best, weights_only=False)["model"]["decoder.embed_tokens.weight"]
    words = [line.split()[0] for line in (run / "imported/dict.txt").read_text().splitlines()]
    for language in LANGUAGES:
        row = trained[4 + words.index(f"__{language}__")]
        number = tokenizer.convert_tokens_to_ids(language)
        assert torch.equal(theirs.get_input_embeddings().weight[number], row)
