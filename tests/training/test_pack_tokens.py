"""``--pack-tokens``: its batches, training on them compared with native, and its refusals."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import helpers.cli_runs as cli_runs
import helpers.languages as languages
import helpers.training_runs as runs
import numpy as np
import pytest
import torch
from fairseq.data import LanguagePairDataset, SampledMultiDataset
from fairseq.tasks.translation import TranslationTask
from helpers.parity import write_corpus

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.checkpoints.names import native_cfg
from lightseq_fairseq.training import full_batches
from lightseq_fairseq.training.full_batches import cut, refill

SEED = 3  # of training_runs
# No dropout, because the masks differ from native's.
PLAIN = {"dropout": 0, "attention_dropout": 0, "activation_dropout": 0}


# --- batches


def fits(sizes: Sequence[np.ndarray], pairs: list[int], tokens: int, sentences: int | None) -> bool:
    within = all(sum(int(side[i]) for i in pairs) <= tokens for side in sizes)
    return within and (sentences is None or len(pairs) <= sentences)


@pytest.mark.parametrize("sentences", [None, 1, 7])
@pytest.mark.parametrize("tokens", [30, 100, 10_000])
@pytest.mark.parametrize("seed", range(3))
def test_each_batch_is_as_full_as_it_may_be(seed: int, tokens: int, sentences: int | None) -> None:
    rng = np.random.default_rng(seed)
    sizes = tuple(rng.integers(1, 31, 500, dtype=np.int32) for _ in range(2))
    order = rng.permutation(500)[:300]  # some pairs have been removed
    batches = cut(order, sizes, tokens, sentences)
    assert np.concatenate(batches).tolist() == order.tolist()
    for batch, following in zip(batches, [*batches[1:], None]):
        pairs = batch.tolist()
        assert pairs and fits(sizes, pairs, tokens, sentences)
        if following is not None:
            assert not fits(sizes, [*pairs, int(following[0])], tokens, sentences)


def test_exact_bounds_and_many_tokens() -> None:
    long = np.full(6, 2**30, dtype=np.int32)  # their sums do not fit into int32
    short = np.ones(6, dtype=np.int32)
    for sizes in ((long, short), (short, long)):
        batches = cut(np.arange(6), sizes, 2**31, None)
        assert [batch.tolist() for batch in batches] == [[0, 1], [2, 3], [4, 5]]
    assert cut(np.arange(0), (short, short), 9, None) == []


def test_other_data_are_refused() -> None:
    with pytest.raises(UserError, match="on a list: remove --pack-tokens, or use --task tr"):
        refill(SimpleNamespace(dataset=[]), 9, None)


# --- training


@contextmanager
def given_batches() -> Iterator[list[list[int]]]:
    """Within the block fairseq's datasets return the batches of --pack-tokens, made here one
    sentence at a time."""
    made: list[list[int]] = []

    def batch_by_size(
        self: Any, indices: Any, max_tokens: int, max_sentences: int | None = None, **_: Any
    ) -> list[list[int]]:
        sizes, batches = self.sizes.T, [[]]
        mixed = np.random.default_rng(SEED).permutation(indices).tolist()
        for index in sorted(mixed, key=lambda i: max(int(side[i]) for side in sizes)):
            if not fits(sizes, [*batches[-1], index], max_tokens, max_sentences):
                batches.append([])
            batches[-1].append(index)
        made[:] = batches
        return batches

    with (
        mock.patch.object(LanguagePairDataset, "batch_by_size", batch_by_size),
        mock.patch.object(SampledMultiDataset, "batch_by_size", batch_by_size),
    ):
        yield made


def natives(data: Path, folder: Path, **flags: Any) -> list[float]:
    """The losses of fairseq's own run on these batches."""
    with given_batches() as made:
        losses = runs.run(data, folder, native=True, **runs.NATIVE, **flags)
    assert made
    return losses


@pytest.mark.parametrize(
    ("flags", "refusal"),
    [
        ({}, None),
        ({"update_freq": 3, "max_update": 6}, None),
        ({"batch_size": 12}, None),
        ({"required_batch_size_multiple": 1, "skip_remainder_batch": True}, None),
        ({"bf16": True}, None),
        (
            {"criterion": "label_smoothed_cross_entropy"},
            "our step does not support the criterion",
        ),
        (
            {"optimizer": "adam", "update_freq": 2, "max_update": 6},
            "the optimizer is not ls_adam or adafactor",
        ),
        ({"required_seq_len_multiple": 4, "empty_cache_freq": 5}, "--empty-cache-freq"),
    ],
)
def test_losses_are_natives_on_the_same_batches(
    data: Path, tmp_path: Path, flags: dict[str, Any], refusal: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Over two epochs, with the captured step and with fairseq's own step."""
    flags = {**PLAIN, "no_save": True, "max_update": 14, **flags}
    caplog.set_level(logging.INFO)
    ours = runs.run(data, tmp_path / "a", pack_tokens=True, **{**runs.LS, **flags})
    told = re.findall(r"step: fairseq's own \((.*)\)", caplog.text)
    assert told == ([] if refusal is None else [refusal])
    native = {key: value for key, value in flags.items() if key not in runs.LS}
    expected = natives(data, tmp_path / "b", **native)
    torch.testing.assert_close(ours, expected, rtol=2e-2 if "bf16" in flags else 1e-5, atol=0)
    assert runs.run(data, tmp_path / "c", **{**runs.LS, **flags}) != pytest.approx(ours, rel=1e-3)


@pytest.mark.gpu
def test_captured_steps_are_natives_on_the_same_batches_and_go_on(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flags: dict[str, Any] = {
        **PLAIN, "cpu": None, "max_update": 24, "encoder_embed_dim": 64,
        "encoder_attention_heads": 2, "num_workers": 1,
    }  # fmt: skip
    ours = {**flags, **runs.LS, "pack_tokens": True}
    caplog.set_level(logging.INFO)
    whole = runs.run(data, tmp_path / "a", **ours, save_interval_updates=4)
    assert re.search(r"captured \d+ CUDA graphs", caplog.text)
    expected = natives(data, tmp_path / "b", **flags, no_save=True)
    torch.testing.assert_close(whole, expected, rtol=1e-2, atol=0)
    plain = runs.run(data, tmp_path / "c", **flags, **runs.LS, no_save=True)
    assert plain != pytest.approx(whole, rel=5e-2)
    saved = tmp_path / "a" / "checkpoint_1_4.pt"
    assert runs.run(data, tmp_path / "d", **ours, restore_file=saved) == whole[4:]


def test_two_ranks_share_the_batches(data: Path, tmp_path: Path) -> None:
    flags = {**PLAIN, "no_save": True, "max_update": 5}
    ours = runs.run_ranks(data, tmp_path / "a", 2, pack_tokens=True, **runs.LS, **flags)
    with given_batches():
        theirs = runs.run_ranks(data, tmp_path / "b", 2, native=True, **runs.NATIVE, **flags)
    assert len(ours[0]) == 5
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)


def test_data_that_are_loaded_anew_each_epoch(data: Path, tmp_path: Path) -> None:
    other = write_corpus(tmp_path / "other", pairs=50, seed=2)
    both = Path(f"{data}:{other}")
    flags = {**PLAIN, "no_save": True, "max_update": 16}
    ours = runs.run(both, tmp_path / "a", pack_tokens=True, **runs.LS, **flags)
    torch.testing.assert_close(ours, natives(both, tmp_path / "b", **flags), rtol=1e-5, atol=0)


def test_pairs_sampled_from_several_languages(tmp_path: Path) -> None:
    """Over several epochs with other pairs, also after a run is resumed."""
    data = languages.write(tmp_path / "data")
    flags: dict[str, Any] = {
        **languages.TASK, **PLAIN, "virtual_epoch_size": 60, "max_update": 12, "num_workers": 1,
        "share_decoder_input_output_embed": None,
    }  # fmt: skip
    ours = {**runs.LS, **flags, "pack_tokens": True}
    whole = runs.run(data, tmp_path / "a", **ours, save_interval_updates=5)
    torch.testing.assert_close(whole, natives(data, tmp_path / "b", **flags), rtol=1e-5, atol=0)
    saved = next((tmp_path / "a").glob("checkpoint_*_5.pt"))
    assert runs.run(data, tmp_path / "c", **ours, restore_file=str(saved)) == whole[5:]


@pytest.mark.parametrize("flags", [{}, {"update_freq": 2}, {"store_ema": True}])
def test_resuming_in_mid_epoch_repeats_the_losses(
    data: Path, tmp_path: Path, flags: dict[str, Any]
) -> None:
    flags = {**runs.LS, **flags, "pack_tokens": True, "max_update": 8}
    whole = runs.run(data, tmp_path / "a", **flags, save_interval_updates=2)
    saved = tmp_path / "a" / "checkpoint_1_2.pt"
    assert runs.run(data, tmp_path / "b", **flags, restore_file=saved) == whole[2:]
    # fairseq's file does not contain the flag, so fairseq continues with its own batches.
    assert b"pack_tokens" not in saved.read_bytes()
    native = {k: v for k, v in flags.items() if k not in runs.LS and k != "pack_tokens"}
    assert runs.run(
        data, tmp_path / "c", native=True, **runs.NATIVE, **native, restore_file=saved
    )  # fmt: skip


def test_configurations_lose_the_flag() -> None:
    cfg = {"model": SimpleNamespace(), "task": {"pack_tokens": True, "data": "bin"}}
    assert native_cfg(copy.copy(cfg))["task"] == {"data": "bin"}


@pytest.mark.parametrize("flags", [{}, {"store_ema": True}])
def test_validation_keeps_fairseqs_batches(
    data: Path, tmp_path: Path, flags: dict[str, Any]
) -> None:
    """Also if the training set is validated, whose iterator fairseq caches and uses for both."""

    def validated(**more: Any) -> list[list[int]]:
        seen: list[list[int]] = []
        step = TranslationTask.valid_step

        def valid_step(self: Any, sample: Any, *others: Any) -> Any:
            seen.append(sample["id"].tolist())
            return step(self, sample, *others)

        with mock.patch.object(TranslationTask, "valid_step", valid_step):
            runs.run(
                data, tmp_path, **runs.LS, **more, max_epoch=2, max_update=None,
                no_save=True, disable_validation=None, valid_subset="train,valid",
            )  # fmt: skip
        return seen

    found = validated(pack_tokens=True, **flags)
    assert found == validated()
    assert max(map(len, found)) % 8 == 0  # --required-batch-size-multiple


# --- the launcher


def test_the_launcher_takes_the_flag(binarised: Path, tmp_path: Path) -> None:
    with mock.patch.object(full_batches, "refill", side_effect=refill) as spy:
        words = (binarised, "--arch", "ls_transformer_tiny", *cli_runs.SMALL, "--save-dir")
        line = cli_runs.succeed("train", *words, tmp_path / "a", "--pack-tokens").splitlines()[0]
        assert [call.args[1:] for call in spy.call_args_list] == [(200, None)]
        cli_runs.succeed("train", *words, tmp_path / "b")
    assert spy.call_count == 1
    assert "--pack-tokens" in line.split()
    saved = tmp_path / "a" / "checkpoint_last.pt"
    assert b"pack_tokens" not in saved.read_bytes()
    translating = ("generate", binarised, "--path", saved, "--cpu", "--num-workers", 0)
    assert "H-0" in cli_runs.succeed(*translating, "--native")


LS, TINY = "--arch ls_transformer_tiny", "--arch transformer_tiny"


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (f"{LS} --native", "or BART that trains on packed tokens"),
        (TINY, "or BART that trains on packed tokens"),
        (f"{TINY} --optimizer ls_adam", "or BART that trains on packed tokens"),
        (f"{LS} --max-tokens 99 --num-batch-buckets 2", "remove one of the two"),
        (f"{LS} --batch-size 4", "fills batches up to --max-tokens, which is not set"),
        (f"{LS} --max-tokens 3", "Every sentence of the split is too long"),
    ],
)
def test_refusals(binarised: Path, tmp_path: Path, line: str, sentence: str) -> None:
    result = cli_runs.run(
        "train", binarised, *line.split(), "--pack-tokens", "--cpu", "--num-workers", 0,
        "--max-update", 1, "--save-dir", tmp_path / "none",
    )  # fmt: skip
    assert result.exit_code == 2, (result.output, result.exception)
    complaint = result.stderr.splitlines()[-1]
    assert complaint.startswith("lightseq-train: error: ") and sentence in complaint
    assert "Traceback" not in result.output


def test_without_the_launcher_there_is_no_such_flag(capsys: pytest.CaptureFixture[str]) -> None:
    """The flag is not known to fairseq's own Trainer."""
    with pytest.raises(SystemExit):
        runs.parse(["data", *LS.split(), "--pack-tokens"])
    assert "--pack-tokens" in capsys.readouterr().err
