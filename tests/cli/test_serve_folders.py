"""lightseq-serve of folders of transformers: requests choose among the languages of a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import helpers.hugging_face as hugging_face
import pytest
from helpers.cli_runs import succeed
from helpers.hugging_face import KINDS
from helpers.serving import Server

from lightseq_fairseq import LanguageModel, Translator

FOLDERS = {
    **{name: KINDS[name] for name in ("nllb", "marian", "gpt2", "roberta")},
    "mbart50": hugging_face.MBART50,
}
LINE = "w1 w7 w3 w12"


@pytest.fixture(scope="module", name="folders")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("folders")
    for name, kind in FOLDERS.items():
        model = hugging_face.make(kind, folder / name)
        for side in ("source", "target"):  # no tokenizers; those of the others are used
            (folder / name / f"{side}.spm").unlink(missing_ok=True)
        if name not in ("gpt2", "roberta"):
            hugging_face.stir(model, 0.3, 3.0)
            model.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module", name="server")
def running(folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    models = [str(folders / name) for name in FOLDERS]
    log = tmp_path_factory.mktemp("serve") / "log"
    server = Server(log, *models, "--tokenizer", "space", "--beam", "4")
    try:
        yield server
    finally:
        server.kill()


@pytest.mark.parametrize(
    ("name", "source", "target"),
    [
        ("nllb", "eng_Latn", "zul_Latn"),
        ("nllb", "zul_Latn", "eng_Latn"),
        ("mbart50", "en_XX", "ro_RO"),
        ("mbart50", "ro_RO", "en_XX"),
        ("marian", None, None),
    ],
)
def test_translations(
    name: str, source: str | None, target: str | None, server: Server, folders: Path, tmp_path: Path
) -> None:
    succeed("import_", folders / name, tmp_path / "imported")
    options = {"device": "cpu", "beam": 4}
    if source is not None:
        options |= {"source_lang": source, "target_lang": target}
    else:
        options |= {"tokenizer": "space"}
    expected = Translator.from_pretrained(tmp_path / "imported", **options).translate(LINE).text
    body = {"q": LINE, "source": source, "target": target}
    assert server.post("/translate", model=name, **body) == {"translatedText": expected}
    if source is not None:  # the languages choose the model
        assert server.post("/translate", **body) == {"translatedText": expected}
    else:  # nobody knows its languages
        body |= {"source": "x", "target": "y"}
        assert server.post("/translate", model=name, **body) == {"translatedText": expected}
        assert server.client.post("/translate", json=body).status_code == 400


def test_languages(server: Server) -> None:
    found = {each["code"]: each["targets"] for each in server.client.get("/languages").json()}
    assert "zul_Latn" in found["eng_Latn"] and "ro_RO" in found["en_XX"]
    assert "ro_RO" not in found["eng_Latn"]
    for body, sentence in (
        ({"model": "nllb"}, "The model has several languages: send source and target."),
        ({"source": "eng_Latn", "target": "xx"}, "There is no model for eng_Latn to xx: "),
    ):
        answer = server.client.post("/translate", json={"q": LINE, **body})
        assert answer.status_code == 400
        assert sentence in answer.json()["error"]


def test_texts(server: Server, folders: Path, tmp_path: Path) -> None:
    body = {"prompt": LINE, "max_tokens": 5, "temperature": 0}
    (choice,) = server.post("/v1/completions", model="gpt2", **body)["choices"]
    succeed("import_", folders / "gpt2", tmp_path / "imported")
    model = LanguageModel.from_pretrained(tmp_path / "imported", device="cpu")
    expected = model.generate(LINE, beam=1, max_len_a=1, max_len_b=4)[0].text
    assert choice["text"] and model.decode(model.encode(LINE)) + choice["text"] == expected
    (found,) = server.post("/v1/embeddings", model="roberta", input=LINE)["data"]
    assert len(found["embedding"]) == 32


def test_a_model_without_languages_is_asked_by_name(server: Server) -> None:
    """With several models: nobody knows whether it is the right one."""
    answer = server.client.post("/translate", json={"q": LINE})
    assert answer.status_code == 400 and "send source and target" in answer.json()["error"]
    named = server.post("/translate", q=LINE, model="marian")["translatedText"]
    assert server.post("/summarize", text=LINE) == {"summary": named}  # the only one of its kind


def test_the_page_of_the_api_warns_of_nothing(server: Server) -> None:
    assert server.client.get("/openapi.json").status_code == 200
    assert server.client.head("/ready").status_code == 200
    assert "Duplicate Operation" not in server.log.read_text()
