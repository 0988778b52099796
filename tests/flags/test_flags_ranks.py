"""The settings of several ranks: in every command they do what they do in fairseq.

Two processes run a command, with our parts and with fairseq's own. Their requests to
torch.distributed and to the wrapper around the model agree, and so do each rank's batches, the
files it reads and the losses. Only the captured step has no wrapper. Each setting changes what it
is meant to change.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import helpers.cli_runs as cli_runs
import pytest
import torch
from fairseq import checkpoint_utils, optim, trainer
from fairseq.distributed import LegacyDistributedDataParallel
from fairseq.distributed import utils as distributed_utils
from fairseq.models import distributed_fairseq_model as wrappers
from fairseq.tasks import FairseqTask
from helpers.flag_runs import Proofs, launch, names, rows, table
from helpers.training_runs import exit_status, fork
from torch.distributed.algorithms import ddp_comm_hooks

from lightseq_fairseq.memory.packing import PackedBatch
from lightseq_fairseq.step.adam_state import AdamState
from lightseq_fairseq.step.training_step import TrainingStep

Trace = dict[str, Any]

TWO = (
    "--distributed-world-size 2 --distributed-rank {rank} --distributed-backend gloo "
    "--distributed-init-method file://{store} --distributed-no-spawn --dropout 0 "
)
TRAIN = "--max-tokens 60 --max-update 4 --lr 0.02 --lr-scheduler fixed "
# Settings under test -> settings that the run without them has too
TRAINING = {
    "--bucket-cap-mb 1 --find-unused-parameters --gradient-as-bucket-view --broadcast-buffers "
    "--device-id 1": "--heartbeat-timeout 60",  # with which fairseq's own step runs
    "--ddp-comm-hook fp16": "",
    "--heartbeat-timeout 60": "",
    "--ddp-backend legacy_ddp": "",
    # Only for datasets that are prefetched.
    "--fix-batches-to-gpus": "--dataset-impl cached",
    "--grouped-shuffling": "",
    "--slowmo-momentum 0.3 --slowmo-base-algorithm sgp --localsgd-frequency 5 "
    "--nprocs-per-node 2": "--ddp-backend slowmo",
    "--load-checkpoint-on-all-dp-ranks": "--restore-file {checkpoint} --reset-optimizer",
    "--all-gather-list-size 5000": "",
    "--zero-sharding os": "",
}
WIDE = "--fp32-reduce-scatter"  # which fairseq reads only with --ddp-backend fully_sharded
BMUF = (
    "--use-bmuf --average-sync --block-lr 0.5 --block-momentum 0.5 --global-sync-iter 2 "
    "--warmup-iterations 1 --use-nbm"
)
IN_FP8 = [
    *TRAINING, WIDE, f"--zero-sharding os {WIDE}", f"--update-freq 2 {WIDE}", "--update-freq 3",
    "--zero-sharding os --update-freq 2", "--memory-efficient-bf16", BMUF,
]  # fmt: skip
INIT = names(TWO) - {"--dropout"}
STARTED = "--distributed-port --distributed-no-spawn"
PROVEN: Proofs = {
    **{
        ("train", kind): (names(BMUF, STARTED, WIDE, *TRAINING) | INIT) & rows("train", kind)
        for kind in (table.FALLBACK, table.WORKS)
    },
    ("validate", table.WORKS): names(STARTED, "--all-gather-list-size --device-id") | INIT,
    ("interactive", table.WORKS): names(STARTED, "--device-id") | INIT,
}
# What a setting changes, if that has another name than the setting.
CHANGED = {
    "ddp_backend": "wrapper",
    "fix_batches_to_gpus": "batches",
    "grouped_shuffling": "batches",
    "load_checkpoint_on_all_dp_ranks": "reads",
}


@pytest.fixture(scope="module")
def cached(data: Path) -> Path:
    """The same data in the format of --dataset-impl cached."""
    text, folder = data.parent / "text", data.parent / "cached"
    prefixes = (f"--{split}pref {text}/{split}" for split in cli_runs.SPLITS)
    line = f"-s de -t en --dataset-impl cached --destdir {folder} {' '.join(prefixes)}"
    cli_runs.succeed("preprocess", *line.split())
    return folder


def sentences(batch: Any) -> list[list[int]]:
    """The source sentences of a packed or a fairseq batch, sorted."""
    if isinstance(batch, PackedBatch):
        source = batch.open()["source"]
        ends = source.segments.cu_seqlens[1 : batch.nsentences]
        return sorted(s.tolist() for s in source["tokens"].tensor_split(ends.tolist()))
    source = batch["net_input"]
    return sorted(
        tokens[-length:].tolist()  # pads are on the left
        for tokens, length in zip(source["src_tokens"], source["src_lengths"], strict=True)
    )


@contextmanager
def watched() -> Iterator[Trace]:
    """Records what fairseq requests in this process, under the names of the settings."""
    seen: Trace = {"losses": [], "batches": [], "reads": 0, "init": None, "wrapper": None}
    seen.update(is_captured=False, types=[], of_wrapper=[])
    step, reduce = trainer.Trainer.train_step, trainer.Trainer._reduce_and_log_stats
    start = TrainingStep.update
    init, load = torch.distributed.init_process_group, checkpoint_utils.load_checkpoint_to_cpu
    gather, hook = distributed_utils.all_gather_list, ddp_comm_hooks.register_ddp_comm_hook

    def initialise(**asked: Any) -> Any:
        seen["init"] = asked
        return init(**asked)

    def wrap(module: Any, device_ids: Any, output_device: Any, **asked: Any) -> Any:
        settings = {
            **asked,
            "process_group": None,
            "wrapper": "torch",
            "device_id": [device_ids, output_device],
        }
        seen.update(settings, of_wrapper=list(settings))
        return parallel(module, device_ids, output_device, **asked)

    def wrap_for_slowmo(module: Any, **asked: Any) -> Any:
        seen.update(asked, wrapper="slowmo")
        wrapped = LegacyDistributedDataParallel(module, distributed_utils.get_data_parallel_group())
        wrapped.perform_slowmo = lambda optimizer, masters: None
        return wrapped

    def wrap_in_heartbeat(module: Any, timeout: int) -> Any:
        seen["heartbeat_timeout"] = timeout
        return module

    def compress(kind: Any, model: Any) -> Any:
        seen["ddp_comm_hook"] = str(kind)
        return hook(kind, model)

    def train_step(self: Any, samples: Any, raise_oom: bool = False) -> Any:
        seen["batches"].append([sentences(sample) for sample in samples if len(sample)])
        return step(self, samples, raise_oom)

    def start_step(self: Any, batches: Any, *arguments: Any) -> Any:
        seen["batches"].append([sentences(batch) for batch in batches])
        seen["is_captured"] = True
        return start(self, batches, *arguments)

    def reduced(self: Any, outputs: Any, *arguments: Any) -> Any:
        seen["losses"].append(float(sum(output["loss"] for output in outputs)))
        return reduce(self, outputs, *arguments)

    def load_checkpoint(*arguments: Any, **keywords: Any) -> Any:
        seen["reads"] += 1
        return load(*arguments, **keywords)

    def all_gather_list(data: Any, max_size: int = 16384, **keywords: Any) -> Any:
        seen["all_gather_list_size"] = max_size
        return gather(data, max_size=max_size, **keywords)

    def shard(self: AdamState, *arguments: Any) -> None:
        seen["zero_sharding"] = "os"
        shards(self, *arguments)

    def shard_by_fairscale(optimizer: Any, group: Any) -> None:
        seen["zero_sharding"] = "os"

    def all_reduce(x: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        seen["types"] = sorted({str(x.dtype), *seen["types"]})
        return reduces(x, *arguments, **keywords)

    shards, reduces = AdamState.shard, torch.distributed.all_reduce
    parallel = wrappers.DistributedDataParallel
    algorithm = {"LOCALSGD": "localsgd", "SGP": "sgp"}
    with (
        mock.patch.object(torch.distributed, "init_process_group", initialise),
        mock.patch.object(wrappers, "DistributedDataParallel", wrap),
        mock.patch.object(wrappers, "DistributedTimeoutWrapper", wrap_in_heartbeat),
        mock.patch.object(wrappers, "_SLOWMO_DDP_DISABLED", False),
        mock.patch.object(wrappers, "SlowMoBaseAlgorithm", algorithm, create=True),
        mock.patch.object(wrappers, "SlowMoDistributedDataParallel", wrap_for_slowmo, create=True),
        mock.patch.object(ddp_comm_hooks, "register_ddp_comm_hook", compress),
        mock.patch.object(AdamState, "shard", shard),
        mock.patch.object(optim, "shard_", shard_by_fairscale),
        mock.patch.object(torch.distributed, "all_reduce", all_reduce),
        mock.patch.object(trainer.Trainer, "train_step", train_step),
        mock.patch.object(TrainingStep, "update", start_step),
        mock.patch.object(trainer.Trainer, "_reduce_and_log_stats", reduced),
        mock.patch.object(checkpoint_utils, "load_checkpoint_to_cpu", load_checkpoint),
        mock.patch.object(distributed_utils, "all_gather_list", all_gather_list),
    ):
        yield seen


def run(command: str, data: Path, place: Path, line: str, folder: Path) -> list[Trace]:
    """What each of two ranks recorded; ``place`` as for `launch`."""
    folder.mkdir(parents=True)

    def of_rank(rank: int) -> None:
        words = line.replace("{rank}", str(rank)).replace("{store}", str(folder / "store"))
        with watched() as seen:
            result = launch(command, data, place, words)
        seen.update(told=result.stdout, noted=result.stderr)
        (folder / f"rank{rank}").write_text(json.dumps(seen, default=str))
        assert result.exit_code == 0, (result.output, result.exception)

    children = [fork(functools.partial(of_rank, rank)) for rank in range(2)]
    assert [exit_status(child) for child in children] == [0, 0]
    return [json.loads((folder / f"rank{rank}").read_text()) for rank in range(2)]


def agree(ours: list[Trace], theirs: list[Trace], but: tuple[str, ...] = ()) -> bool:
    different = {"told", "noted", "init", "is_captured", "types", "of_wrapper", "losses", *but}

    def same(a: Trace, b: Trace) -> bool:
        rest = {*a, *b} - different - set(b["of_wrapper"] if a["is_captured"] else ())
        return a["losses"] == pytest.approx(b["losses"], rel=1e-4) and all(
            a.get(key) == b.get(key) for key in rest
        )

    return all(same(a, b) for a, b in zip(ours, theirs, strict=True))


class TestTraining:
    @pytest.fixture(scope="class")
    def train(
        self, data: Path, cached: Path, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> Any:
        @functools.cache
        def of(line: str, own: str = "--native") -> list[Trace]:
            folder = tmp_path_factory.mktemp("run")
            words = f"{TWO}{TRAIN}{line} {own}".replace("{checkpoint}", str(checkpoint))
            source = cached if "cached" in line else data
            return run("train", source, folder / "save", words, folder / "ranks")

        return of

    @pytest.mark.parametrize("line", TRAINING)
    def test_each_setting_does_what_it_does_in_fairseq(self, train: Any, line: str) -> None:
        base = TRAINING[line]
        apart = "gather" in line  # fairseq gathers only logs that cannot be summed
        with mock.patch.object(FairseqTask, "logging_outputs_can_be_summed", lambda *_: not apart):
            ours, theirs = train(f"{base} {line}", ""), train(f"{base} {line}")
            without = train(f"{base} " if apart else base)
        assert agree(ours, theirs), (ours, theirs)
        falls_back = names(f"{base} {line}") & rows("train", table.FALLBACK)
        assert ours[0]["is_captured"] == ("legacy" in line or not falls_back)
        assert not ours[0]["is_captured"] or ours[0]["wrapper"] is None
        for setting in names(line):
            key = setting.removeprefix("--").replace("-", "_")
            key = CHANGED.get(key, key)
            assert [t.get(key) for t in ours] != [t.get(key) for t in without], setting

    def test_ranks_are_what_the_settings_say(self, train: Any) -> None:
        ours, theirs = train("", ""), train("")
        assert agree(ours, theirs)
        for rank, trace in enumerate(ours):
            assert trace["init"].pop("init_method").startswith("file://")
            assert trace["init"] == {"backend": "gloo", "world_size": 2, "rank": rank}
        assert ours[0]["batches"][0] != ours[1]["batches"][0]

    def test_gradients_are_sent_as_float32(self, train: Any) -> None:
        narrow, wide = train("--bf16", ""), train(f"--bf16 {WIDE}", "")
        for ours in (wide, narrow):
            assert ours[0]["losses"] == pytest.approx(train("--bf16")[0]["losses"], rel=1e-2)
        types = {"torch.float32", "torch.float64"}  # float64: sums and counts
        assert set(wide[0]["types"]) == types
        assert set(narrow[0]["types"]) == types - {"torch.float32"} | {"torch.bfloat16"}
        assert "has no effect" not in wide[0]["noted"]
        assert f"{WIDE} has no effect without --fp16 or --bf16" in train(WIDE, "")[0]["noted"]

    @pytest.mark.parametrize("line", IN_FP8)
    def test_products_in_fp8(
        self, train: Any, line: str, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """With each other setting, the losses are near those in bf16, or one sentence refuses."""
        words = f"--bf16 {TRAINING.get(line, '')} {line}"
        near = train(words, "")
        if near[0]["is_captured"]:
            for mine, theirs in zip(train(words, "--fp8"), near, strict=True):
                assert mine["is_captured"] and mine["batches"] == theirs["batches"]
                assert mine["losses"] == pytest.approx(theirs["losses"], rel=2e-2)
                assert mine["losses"] != theirs["losses"]
            return
        with pytest.raises(AssertionError):
            train(words, "--fp8")
        said = capfd.readouterr().err
        assert "needs our step, but this run uses fairseq's own step (" in said
        assert said.count(": remove --fp8.") == 2  # by each rank

    def test_sharding_needs_the_captured_step(
        self, data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        line = f"{TWO}{TRAIN}--zero-sharding os --heartbeat-timeout 9"
        with pytest.raises(AssertionError):
            run("train", data, tmp_path / "save", line, tmp_path / "ranks")
        assert (
            "error: --zero-sharding os with ls_adam needs our step, but this run uses "
            "fairseq's own step (--heartbeat-timeout): remove --zero-sharding."
        ) in capfd.readouterr().err

    def test_block_momentum(self, train: Any) -> None:
        ours, theirs = train(BMUF, ""), train(BMUF)
        assert agree(ours, theirs), (ours, theirs)
        for part in re.findall(r"--\S+(?: \d\S*)?", BMUF):
            rest = "" if part == "--use-bmuf" else BMUF.replace(part, "")
            assert not agree(theirs, train(rest)), part


@pytest.mark.parametrize("settings", ["--all-gather-list-size 5000", ""])
def test_validation(data: Path, checkpoint: Path, tmp_path: Path, settings: str) -> None:
    two = TWO.replace("--dropout 0", f"--batch-size 2 {settings} ")
    ours, theirs = (
        run("validate", data, checkpoint, two + own, tmp_path / f"ranks{own}")
        for own in ("", "--native")
    )
    assert agree(ours, theirs)
    shown = [re.findall(r"loss ([\d.]+)", trace[0]["told"]) for trace in (ours, theirs)]
    assert shown[0] == shown[1] != []
    assert {trace["all_gather_list_size"] for trace in ours} == {5000 if settings else 16384}
    alone = launch("validate", data, checkpoint, "", ok=True).stdout
    assert re.findall(r"loss ([\d.]+)", alone)[-1] == shown[0][-1]


class TestStart:
    """Which processes a command starts, and what it does with its own process."""

    @pytest.fixture(params=["train", "validate", "interactive"])
    def start(
        self, request: pytest.FixtureRequest, data: Path, checkpoint: Path, tmp_path: Path
    ) -> Any:
        command = request.param

        def with_settings(line: str, own: str = "") -> list[Any]:
            place = tmp_path if command == "train" else checkpoint
            with (
                mock.patch.object(torch.multiprocessing, "spawn") as spawn,
                mock.patch.object(torch.multiprocessing, "start_processes") as fork,
                mock.patch.object(distributed_utils, "distributed_main") as main,
            ):
                launch(command, data, place, f"{line} {own}", ok=True)
            found: list[Any] = []
            for call in fork.call_args_list + spawn.call_args_list:
                _, cfg, more = call.kwargs["args"]
                found.append(("ranks", more["start_rank"], _ranks(cfg)))
            for call in main.call_args_list:
                device, _, cfg, _ = call.args
                found.append(("this", device, _ranks(cfg)))
            return found

        return with_settings

    def test_settings(self, start: Any) -> None:
        line = (
            "--distributed-world-size 4 --distributed-rank 2 --distributed-backend gloo "
            "--distributed-init-method tcp://there:1 --device-id 3"
        )
        for more in ("", " --distributed-no-spawn"):
            assert start(line + more) == start(line + more, "--native")
        ranks = {"world_size": 4, "backend": "gloo", "init_method": "tcp://there:1"}
        assert start(line) == [("ranks", 2, {**ranks, "rank": None})]
        assert start(line + " --distributed-no-spawn") == [("this", 3, {**ranks, "rank": 2})]
        assert start("") == []

    def test_port(self, start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The port is read under Slurm only."""
        scontrol = tmp_path / "scontrol"
        scontrol.write_text("#!/bin/sh\necho node7\n")
        scontrol.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        for name, value in (
            ("STEP_NODELIST", "node[7-8]"), ("NNODES", "2"), ("NTASKS_PER_NODE", "2"),
            ("PROCID", "3"), ("LOCALID", "1"),
        ):  # fmt: skip
            monkeypatch.setenv(f"SLURM_{name}", value)
        line = "--distributed-world-size 4 --distributed-port 1234 --distributed-backend gloo"
        (found,) = start(line)
        assert found == ("this", 1, {
            "world_size": 4, "rank": 3, "backend": "gloo", "init_method": "tcp://node7:1234",
        })  # fmt: skip
        assert [found] == start(line, "--native")


def _ranks(cfg: Any) -> dict[str, Any]:
    names = ("world_size", "rank", "backend", "init_method")
    return {name: cfg.distributed_training[f"distributed_{name}"] for name in names}
