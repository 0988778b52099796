from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import helpers.training_runs as runs
import pytest
import torch

from lightseq_fairseq.training.host_copies import HostCopies

pytestmark = pytest.mark.gpu


def test_copies_wait_for_the_gpu_and_the_host_does_not() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    state = {
        "model": [torch.zeros(1 << 24, device=device) for _ in range(4)],
        "half": torch.zeros(7, 3, dtype=torch.bfloat16, device=device).t(),
        "cpu": torch.arange(3),
    }
    copies = HostCopies()
    copies.reserve(1 << 29, device)
    assert copies._unlock is not None, "the memory is not page-locked"
    copies.of(state, device)[1]()  # loads the kernels, which may wait for the GPU
    for value in (1, 2):
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000_000)  # takes about a second
        for x in [*state["model"], state["half"]]:
            x.fill_(value)
        began = time.perf_counter()
        copied, wait = copies.of(state, device)
        assert time.perf_counter() - began < 0.3
        for x in [*state["model"], state["half"]]:
            x.fill_(-1)  # as the next update does
        wait()
        assert all(x.eq(value).all() and not x.is_cuda for x in copied["model"])
        assert copied["half"].eq(value).all() and copied["half"].dtype == torch.float32
        assert copied["half"].shape == (3, 7) and copied["cpu"].tolist() == [0, 1, 2]
    copies.release()


@pytest.mark.parametrize("precision", [{}, {"bf16": True}, {"fp16": True}])
def test_saves_change_nothing_and_each_goes_on(tmp_path: Path, precision: dict[str, Any]) -> None:
    data = runs.corpus(tmp_path / "corpus")
    flags = {**runs.LS, **precision, "cpu": None, "max_update": 20, "max_tokens": 128}
    plain = runs.run(data, tmp_path / "plain", **flags)
    saves = {**flags, "save_interval_updates": 1, "keep_interval_updates": 3}
    assert runs.run(data, tmp_path / "saves", **saves) == plain
    ends = [runs.trained(tmp_path / name) for name in ("plain", "saves")]
    assert runs.differing(*ends) == []
    (file,) = (tmp_path / "saves").glob("checkpoint_*_19.pt")
    runs.run(data, tmp_path / "rest", **flags, restore_file=str(file))
    assert runs.differing(runs.trained(tmp_path / "rest"), ends[0]) == []
