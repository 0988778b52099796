"""Marian on a GPU: logits with the bias, and the search."""

from __future__ import annotations

import copy
from argparse import Namespace
from pathlib import Path
from typing import Any

import helpers.cli_runs as cli_runs
import helpers.hugging_face as hugging_face
import pytest
import torch
from fairseq import utils
from helpers.hugging_face import KINDS

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=["marian", "pegasus"])
def imported(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Any, Any]:
    """A model on the CPU, its copy on the GPU, and the task."""
    kind, folder = KINDS[request.param], tmp_path_factory.mktemp(request.param)
    hugging_face.make(kind, folder / "theirs")
    cli_runs.succeed("import_", folder / "theirs", folder / "imported")
    data: Path = hugging_face.data(kind, folder / "imported", folder / "text")
    model, task = hugging_face.ours(folder / "imported/model.pt", data)
    model.decoder.logits_bias[1] = 20.0  # of the pad, which no search may choose
    task.load_dataset("train")
    return model, copy.deepcopy(model).cuda(), task


def batch(task: Any) -> dict[str, Any]:
    dataset = task.dataset("train")
    found: dict[str, Any] = dataset.collater([dataset[i] for i in range(8)])
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_logits_are_those_of_the_cpu(imported: tuple[Any, Any, Any], dtype: torch.dtype) -> None:
    on_cpu, on_gpu, task = imported
    inputs = batch(task)["net_input"]
    with torch.no_grad():
        expected = on_cpu(**inputs)[0]
        found = copy.deepcopy(on_gpu).to(dtype)(**utils.move_to_cuda(inputs))[0].float().cpu()
    error = (found - expected).abs().max() / expected.abs().max()
    assert error < {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]


@pytest.mark.parametrize("beam", [1, 4])
def test_the_search_is_that_of_the_cpu(imported: tuple[Any, Any, Any], beam: int) -> None:
    """Twice, because the second search replays graphs."""
    *models, task = imported
    results = []
    for model in (*models, models[1]):
        generator = task.build_generator([model], Namespace(beam=beam, max_len_b=10))
        sample = batch(task)
        if next(model.parameters()).is_cuda:
            sample = utils.move_to_cuda(sample)
        hypotheses = generator.generate([model], sample)
        results.append([each[0]["tokens"].tolist() for each in hypotheses])
    assert results[0] == results[1] == results[2]
    assert not any(1 in tokens for tokens in results[0])
