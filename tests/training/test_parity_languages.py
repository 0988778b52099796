"""Every update of --task translation_multi_simple_epoch equals fairseq's: the same pairs, the same
language tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helpers.languages as languages
import helpers.parity as parity
import helpers.training_runs as runs
import pytest
from helpers.parity import LS, NATIVE, command_line, compare, train

from lightseq_fairseq.training.batch import reading
from lightseq_fairseq.training.batch.pairs import PackingPairs, PackingSampled

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "virtual epochs": {"virtual_epoch_size": 50, "sampling_temperature": 5},
    "every pair": {"sampling_method": "concat", "truncate_source": True},
    "one iterator": {"sampling_method": "RoundRobin", "num_workers": 1},
    "replaced ends": {"lang_tok_replacing_bos_eos": True, "sampling_method": "uniform"},
    "target only": {"encoder_langtok": "tgt", "decoder_langtok": None},
    "mbart": {"arch": "mbart_base", "lang_tok_style": "mbart", **parity.PRE_NORM},
    "bart": {
        "arch": "bart_base",
        "sampling_weights": "{'main:aa-bb':1,'main:bb-aa':2,'main:aa-cc':3}",
    },
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return languages.write(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize("case", CASES)
def test_updates(data: Path, case: str) -> None:
    flags = {**languages.TASK, "lr": 3e-3, **CASES[case]}
    count = 50 if case in ("plain", "mbart", "bart") else 20  # as many as each needs to learn
    native = train(command_line(data, NATIVE, **flags), count)
    ours = train(command_line(data, LS, **flags), count)
    compare(ours, native)
    assert all(len(update.sample_sizes) == 1 for update in ours)  # the captured step
    assert any(len(set(update.sample_sizes)) == 2 for update in native)
    assert native[-1].logged["loss"] < 0.95 * native[0].logged["loss"]


REPLACED = {"lang_tok_replacing_bos_eos": True}
MUTATIONS: dict[str, tuple[dict[str, Any], Any]] = {}


def mutation(**flags: Any) -> Any:
    """Adds the decorated function, which makes a mistake, to MUTATIONS under its name."""

    def add(make: Any) -> Any:
        MUTATIONS[make.__name__.replace("_", " ")] = (flags, make)
        return make

    return add


def change_init(patch: pytest.MonkeyPatch, **values: Any) -> None:
    init = PackingPairs.__init__

    def changed(self: Any, *arguments: Any) -> None:
        init(self, *arguments)
        vars(self).update(values)

    patch.setattr(PackingPairs, "__init__", changed)


@mutation(**REPLACED)
def the_decoder_begins_with_the_end(patch: pytest.MonkeyPatch) -> None:
    change_init(patch, _first=2)


@mutation(**REPLACED)
def the_source_keeps_its_end(patch: pytest.MonkeyPatch) -> None:
    change_init(patch, _new_end=None)


@mutation()
def sentences_have_no_language(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reading, "_prepended", lambda token, read, indices: read(indices))


@mutation()
def a_batch_has_one_language_pair(patch: pytest.MonkeyPatch) -> None:
    joined = PackingSampled._joined
    patch.setattr(PackingSampled, "_joined", lambda self, x, order: joined(self, x[:1], order[:1]))


@mutation()
def all_pairs_are_of_the_first_languages(patch: pytest.MonkeyPatch) -> None:
    places = PackingSampled._places

    def changed(self: Any, indices: Any) -> Any:
        return places(self, indices)[0] * 0, places(self, indices)[1] % languages.SIZES["aa-bb"]

    patch.setattr(PackingSampled, "_places", changed)


@mutation(virtual_epoch_size=50)
def a_virtual_epoch_reads_from_the_first_pair(patch: pytest.MonkeyPatch) -> None:
    def changed(self: Any, indices: Any) -> Any:
        which = self.dataset.cumulated_sizes.searchsorted(indices, side="right")
        return which, self.dataset._cur_indices[indices]

    patch.setattr(PackingSampled, "_places", changed)


@pytest.mark.parametrize("name", MUTATIONS)
def test_mistakes_are_found(data: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    flags, make = MUTATIONS[name]
    flags = {**languages.TASK, **flags}
    native = train(command_line(data, NATIVE, **flags), 2)
    compare(train(command_line(data, LS, **flags), 2), native)
    make(monkeypatch)
    with pytest.raises(parity.ParityError):
        train(command_line(data, LS, **flags), 2, like=native)


def test_two_ranks_train_as_fairseqs_and_resume(data: Path, tmp_path: Path) -> None:
    """In the middle of a pass of virtual epochs, to the last bit."""
    flags = {
        **languages.TASK, "virtual_epoch_size": 50, "max_tokens": 48, "dropout": 0,
        "attention_dropout": 0, "activation_dropout": 0, "share_decoder_input_output_embed": None,
    }  # fmt: skip
    native = runs.run_ranks(data, tmp_path / "native", 2, **runs.NATIVE, **flags)
    ours = runs.run_ranks(data, tmp_path / "ours", 2, **runs.LS, **flags)
    for rank in (0, 1):
        assert ours[rank] == pytest.approx(native[rank], rel=1e-5) and len(ours[rank]) == 12
    runs.run_ranks(data, tmp_path / "part", 2, **runs.LS, **flags, max_update=5)
    part = str(tmp_path / "part" / "checkpoint_last.pt")
    runs.run_ranks(data, tmp_path / "rest", 2, **runs.LS, **flags, restore_file=part)
    assert runs.differing(*(runs.trained(tmp_path / name) for name in ("ours", "rest"))) == []
