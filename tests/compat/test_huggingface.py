"""lightseq-import of folders of `transformers`, and lightseq-export --to huggingface."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import helpers.hugging_face as hugging_face
import pytest
import torch
from helpers.cli_runs import succeed
from helpers.hugging_face import KINDS, Kind
from safetensors.torch import load_file


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
    assert succeed("export", path, "--to", "huggingface", "--output", output, *flags)
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


def test_a_trained_model_goes_home(made: Made, tmp_path: Path) -> None:
    model, task = hugging_face.ours(made.trained, made.data)
    theirs = hugging_face.load(home(made.trained, made, tmp_path / "exported"))
    assert_same(made.kind, theirs, model, task)
    start, _ = hugging_face.ours(made.imported / "model.pt", made.data)
    pairs = zip(start.parameters(), model.parameters(), strict=True)
    assert not any(torch.equal(*pair) for pair in pairs if pair[0].dim() > 1)
