"""lightseq-export of language models: the exports compute what fairseq computes."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import helpers.cli_runs as cli_runs
import pytest
import torch
from torch import Tensor

# isort: split
from fairseq import checkpoint_utils
from fairseq.models.transformer_lm import TransformerLanguageModel, TransformerLanguageModelConfig

VARIANTS = {
    "ours": "--arch ls_transformer_lm --optimizer ls_adam --criterion ls_cross_entropy",
    "fairseq": "--arch transformer_lm --optimizer adam",
    "gpt": "--arch ls_transformer_lm_gpt2_tiny --share-decoder-input-output-embed "
    "--decoder-learned-pos --add-bos-token --sample-break-mode complete",
    "widths": "--arch ls_transformer_lm_gbw --decoder-input-dim 12 --decoder-output-dim 12",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cli_runs.binarise_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module", params=VARIANTS)
def trained(
    data: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return train(data, tmp_path_factory.mktemp("run"), VARIANTS[request.param])


def train(data: Path, folder: Path, line: str) -> Path:
    words = [*cli_runs.SMALL_TEXT, *line.split(), "--lr", "1e-2", "--max-update", "6"]
    cli_runs.succeed("train", data, *words, "--save-dir", folder)
    return folder / "checkpoint_last.pt"


def native(path: Path) -> tuple[Any, Any]:
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(path)])
    assert type(model) is TransformerLanguageModel
    return model.eval(), task


def sentences(task: Any) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    first = task.dictionary.bos() if task.args.add_bos_token else task.dictionary.eos()
    words = torch.randint(4, len(task.dictionary), (5, 9), generator=generator)
    return [[first, *row[: 9 - n].tolist()] for n, row in enumerate(words)]


def scores(model: Any, tokens: list[int]) -> Tensor:
    """Log-probabilities of all tokens but the first."""
    line = torch.tensor([tokens])
    with torch.no_grad():
        found: Tensor = model(line[:, :-1])[0].log_softmax(-1)[0]
    return found.gather(1, line[0, 1:, None])[:, 0]


def export(path: Path, to: str, output: Path, *more: str | Path) -> Path:
    assert cli_runs.succeed("export", path, "--to", to, "--output", output, *more)
    return output


def test_to_fairseq(trained: Path, tmp_path: Path) -> None:
    model, task = native(trained)
    again, _ = native(export(trained, "fairseq", tmp_path / "model.pt"))
    for tokens in sentences(task):
        assert torch.equal(scores(model, tokens), scores(again, tokens))
    state = torch.load(tmp_path / "model.pt", weights_only=False)
    assert state["last_optimizer_state"] is None and "ls_" not in str(state["cfg"])


def test_to_ctranslate2(trained: Path, tmp_path: Path) -> None:
    from ctranslate2 import Generator

    model, task = native(trained)
    folder = export(trained, "ctranslate2", tmp_path / "ct2")
    lines = sentences(task)
    words = [[task.dictionary[token] for token in line] for line in lines]
    results = Generator(str(folder), inter_threads=1, intra_threads=1).score_batch(words)
    for line, result in zip(lines, results, strict=True):
        found = torch.tensor(result.log_probs)
        torch.testing.assert_close(found, scores(model, line), rtol=0, atol=1e-4)
    first = json.loads((folder / "config.json").read_text())["bos_token"]
    assert first == words[0][0]


def test_to_safetensors(data: Path, trained: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model, task = native(trained)
    folder = export(trained, "safetensors", tmp_path / "weights")
    assert (folder / "dict.txt").read_bytes() == (data / "dict.txt").read_bytes()
    config = json.loads((folder / "config.json").read_text())
    assert config["dictionaries"] == {"source": "dict.txt"}
    options = TransformerLanguageModelConfig.from_namespace(Namespace(**config["options"]))
    again = TransformerLanguageModel.build_model(options, task).eval()
    # fairseq adds the tied parameters
    again.load_state_dict(load_file(folder / "model.safetensors"))
    for tokens in sentences(task):
        assert torch.equal(scores(model, tokens), scores(again, tokens))


def test_few_outputs(data: Path, tmp_path: Path) -> None:
    path = train(data, tmp_path / "run", f"{VARIANTS['ours']} --output-dictionary-size 12")
    for to in ("fairseq", "safetensors"):
        export(path, to, tmp_path / to)
    result = cli_runs.run("export", path, "--to", "ctranslate2", "--output", tmp_path / "ct2")
    assert result.exit_code == 2 and "was trained with --output-dictionary-size" in result.stderr
    assert not (tmp_path / "ct2").exists()


def test_another_dictionary(data: Path, trained: Path, tmp_path: Path) -> None:
    words = (data / "dict.txt").read_text().splitlines()
    (tmp_path / "dict.txt").write_text("\n".join([*words[1:], ""]))
    line = ["export", trained, "--to", "safetensors", "--data", tmp_path]
    result = cli_runs.run(*line, "--output", tmp_path / "out")  # type: ignore[arg-type]
    assert result.exit_code == 2 and "words, but the model has 24" in result.stderr
    assert not (tmp_path / "out").exists()
