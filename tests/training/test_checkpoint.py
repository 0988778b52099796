from __future__ import annotations

import io
import logging
import os
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from lightseq_fairseq.base import files
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.checkpoints import models, names, saving
from lightseq_fairseq.fairseq_compat import patching
from lightseq_fairseq.fairseq_compat.checkpoints import read_checkpoint
from lightseq_fairseq.plugins.language_model import LSTransformerLanguageModel
from lightseq_fairseq.plugins.transformer import LSTransformerModel

import helpers.parity as parity  # isort: skip
import helpers.training_runs as runs  # isort: skip  (fairseq has to be prepared before)

from fairseq import checkpoint_utils
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq.models.transformer import TransformerModel
from fairseq.models.transformer_lm import TransformerLanguageModel


@pytest.fixture(scope="module")
def ls_run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ls")
    runs.run(data, folder, **runs.LS, max_update=2)
    return folder / "checkpoint_last.pt"


@pytest.fixture(scope="module")
def native_run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("native")
    runs.run(data, folder, native=True, **runs.NATIVE, max_update=2)
    return folder / "checkpoint_last.pt"


def test_what_the_caller_has_allowed_stays_allowed(native_run: Path) -> None:
    with torch.serialization.safe_globals([Namespace]), native_run.open("rb") as file:
        read_checkpoint(file)
        assert Namespace in torch.serialization.get_safe_globals()
    assert Namespace not in torch.serialization.get_safe_globals()


class TestNames:
    @pytest.mark.parametrize(
        ("kind", "name", "native"),
        [
            ("arch", "ls_transformer", "transformer"),
            ("arch", "ls_transformer_wmt_en_de_big_t2t", "transformer_wmt_en_de_big_t2t"),
            ("arch", "transformer_iwslt_de_en", "transformer_iwslt_de_en"),
            ("arch", "lstm", "lstm"),
            ("criterion", "ls_label_smoothed_cross_entropy", "label_smoothed_cross_entropy"),
            ("arch", "ls_transformer_lm", "transformer_lm"),
            ("arch", "ls_transformer_lm_gpt2_small", "transformer_lm_gpt2_small"),
            ("criterion", "ls_cross_entropy", "cross_entropy"),
            ("criterion", "ls_of_somebody_else", "ls_of_somebody_else"),
            ("optimizer", "ls_adam", "adam"),
            ("optimizer", "sgd", "sgd"),
        ],
    )
    def test_native_name(self, kind: str, name: str, native: str) -> None:
        assert names.native_name(kind, name) == native

    @pytest.mark.parametrize("base", ["transformer", "multilingual_transformer", "transformer_lm"])
    def test_architecture_of_the_users_own(self, base: str) -> None:
        ours = ARCH_MODEL_REGISTRY[f"ls_{base}"]
        with mock.patch.dict(ARCH_MODEL_REGISTRY, mine=type("Mine", (ours,), {})):
            assert names.native_name("arch", "mine") == base

    def test_everywhere_in_a_configuration(self) -> None:
        def cfg(arch: str, criterion: str, optimizer: str) -> dict[str, Any]:
            return {
                "common": {"seed": 1, "user_dir": "ls_adam"},
                "model": Namespace(
                    _name=arch, arch=arch, criterion=criterion, optimizer=optimizer, dropout=0.1
                ),
                "criterion": {"_name": criterion, "label_smoothing": 0.1},
                "optimizer": {"_name": optimizer, "lr": [1.0]},
                "task": {"_name": "translation", "data": "ls_transformer"},
            }

        ours = cfg("ls_transformer_tiny", "ls_label_smoothed_cross_entropy", "ls_adam")
        native = cfg("transformer_tiny", "label_smoothed_cross_entropy", "adam")
        assert names.native_cfg(ours) == native
        assert ours["model"].arch == "ls_transformer_tiny"  # a copy
        assert names.native_cfg(native) == native
        assert names.uses_ls(Namespace(**ours, ema=None))
        assert not names.uses_ls(Namespace(**native))


class TestFiles:
    """The files of ``lightseq-train``, as a user sees them who has only fairseq."""

    def test_nothing_in_it_is_ours(self, ls_run: Path, native_run: Path) -> None:
        assert b"ls_" not in ls_run.read_bytes()
        assert b"lightseq" not in ls_run.read_bytes()
        ours, native = (
            checkpoint_utils.load_checkpoint_to_cpu(str(p)) for p in (ls_run, native_run)
        )
        assert ours.keys() == native.keys()
        assert list(ours["model"]) == list(native["model"])
        for name, value in native["model"].items():
            assert ours["model"][name].shape == value.shape, name
            assert ours["model"][name].dtype == value.dtype, name
        for side in ("encoder", "decoder"):
            assert ours["model"][f"{side}.version"].item() == 3
        for entry in ("criterion_name", "optimizer_name"):
            assert ours["optimizer_history"][-1][entry] == native["optimizer_history"][-1][entry]
        assert vars(ours["cfg"].model).keys() == vars(native["cfg"].model).keys()
        states = [file["last_optimizer_state"] for file in (ours, native)]
        assert states[0]["param_groups"] == states[1]["param_groups"]
        assert states[0]["state"].keys() == states[1]["state"].keys()
        for key, state in states[1]["state"].items():
            assert {k: getattr(v, "shape", v) for k, v in states[0]["state"][key].items()} == {
                k: getattr(v, "shape", v) for k, v in state.items()
            }

    def test_tensors_stand_alone(self, ls_run: Path) -> None:
        state = checkpoint_utils.load_checkpoint_to_cpu(str(ls_run))
        moments = [s["exp_avg"] for s in state["last_optimizer_state"]["state"].values()]
        for tensor in [*state["model"].values(), *moments]:
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()

    def test_stock_fairseq_loads_it(self, ls_run: Path, data: Path) -> None:
        script = (
            "import sys; from lightseq_fairseq import fairseq_compat; fairseq_compat.prepare()\n"
            "from fairseq import checkpoint_utils, models\n"
            "(model,), cfg = checkpoint_utils.load_model_ensemble([sys.argv[1]])\n"
            "print(type(model).__module__, cfg.optimizer._name, cfg.criterion._name)\n"
            "assert not [name for name in models.ARCH_MODEL_REGISTRY if name.startswith('ls_')]\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", script, str(ls_run)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.split("\n")[-2] == (
            "fairseq.models.transformer.transformer_legacy adam label_smoothed_cross_entropy"
        )


class TestText:
    """The same for language models, whose configuration in fairseq is a dataclass."""

    VARIANTS: dict[str, dict[str, Any]] = {
        "complete": {},
        "none": {"sample_break_mode": "none"},
        "eos": {"sample_break_mode": "eos", "add_bos_token": True},
        "shards": {"shards": 2},
        "cropped": {
            "sample_break_mode": "eos", "shorten_method": "random_crop", "tokens_per_sample": 5
        },
        "few-outputs": {"output_dictionary_size": 40, "pad_to_fixed_length": True},
        "fixed-bsz": {"pad_to_fixed_bsz": True, "batch_size": 4, "max_tokens": None},
        "adaptive": {
            "arch": "ls_transformer_lm_wiki103", "criterion": "adaptive_loss", "dropout": None,
            "adaptive_input_cutoff": "20,50", "adaptive_softmax_cutoff": "20,50",
            "ddp_backend": "legacy_ddp", "decoder_layers": 2,
            "share_decoder_input_output_embed": None,
        },
    }  # fmt: skip

    def run(
        self, folder: Path, ours: bool = True, shards: int = 1, **flags: Any
    ) -> list[float]:  # fmt: skip
        parts = ("arch", "optimizer", "criterion")
        native = {name: runs.TEXT[name].removeprefix("ls_") for name in parts}
        places = [
            parity.write_text(folder.parent / f"text{shard}", seed=shard) for shard in range(shards)
        ]
        flags = {**runs.TEXT, **({} if ours else native), **flags}
        data = Path(os.pathsep.join(map(str, places)))
        return runs.run(data, folder, native=not ours, **flags)

    def test_files_go_out_and_in(self, tmp_path: Path) -> None:
        dropout = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
        whole = self.run(tmp_path / "whole", ours=False, max_update=10, **dropout)
        for first in (True, False):
            folder = tmp_path / f"ls{first}"
            losses = self.run(folder, ours=first, max_update=5, **dropout)
            losses += self.run(folder, ours=not first, max_update=10, **dropout)
            assert losses == pytest.approx(whole, rel=1e-5)
            assert b"ls_" not in (folder / "checkpoint_last.pt").read_bytes()

    @pytest.mark.parametrize("flags", VARIANTS.values(), ids=VARIANTS)
    @pytest.mark.parametrize("stop", [4, 12])
    def test_goes_on_in_mid_epoch(self, tmp_path: Path, flags: dict[str, Any], stop: int) -> None:
        """Stops in the first epoch (seven or more updates), and in the second or third."""
        whole = self.run(tmp_path / "whole", max_update=20, **flags)
        parts = self.run(tmp_path / "parts", max_update=stop, **flags)
        parts += self.run(tmp_path / "parts", max_update=20, **flags)
        assert parts == whole and len(set(whole)) == len(whole) == 20
        both = [runs.trained(tmp_path / name) for name in ("whole", "parts")]
        assert runs.differing(*both) == []

    def test_epochs_read_one_shard_after_the_other(self, tmp_path: Path) -> None:
        """Without dropout the losses are fairseq's."""
        flags: dict[str, Any] = dict.fromkeys(
            ("dropout", "attention_dropout", "activation_dropout"), 0.0
        )
        flags |= {"max_update": 24, "shards": 2}
        ours, native = (self.run(tmp_path / f"{x}", ours=x, **flags) for x in (True, False))
        assert ours == pytest.approx(native, rel=1e-5)
        single = self.run(tmp_path / "single", **{**flags, "shards": 1})
        assert single[:5] == ours[:5] and single != ours


class TestUseLsModels:
    @pytest.fixture(autouse=True)
    def installed(self) -> Any:
        load = checkpoint_utils.load_checkpoint_to_cpu
        with mock.patch.object(checkpoint_utils, "load_checkpoint_to_cpu", load):
            patching.apply("our models")
            patching.apply("our models")
            yield load

    def load(self, path: Path, **options: Any) -> nn.Module:
        (model,), _ = checkpoint_utils.load_model_ensemble([str(path)], **options)
        return model.eval()

    def test_both_kinds_of_files(self, ls_run: Path, native_run: Path, installed: Any) -> None:
        tokens = torch.tensor([[5, 9, 17, 2], [8, 4, 2, 1]])
        for path in (ls_run, native_run):
            ours = self.load(path)
            with mock.patch.object(checkpoint_utils, "load_checkpoint_to_cpu", installed):
                native = self.load(path)
            assert type(ours) is LSTransformerModel
            assert type(native) is TransformerModel
            with torch.no_grad():
                a, b = (m(tokens, torch.tensor([4, 3]), tokens)[0] for m in (ours, native))
            real = tokens.ne(1)
            torch.testing.assert_close(a[real], b[real], rtol=1e-4, atol=1e-5)

    def test_a_file_that_names_ours_becomes_native(
        self, ls_run: Path, tmp_path: Path, installed: Any
    ) -> None:
        state = torch.load(ls_run, weights_only=False)
        state["cfg"]["model"]._name = state["cfg"]["model"].arch = "ls_transformer_tiny"
        torch.save(state, tmp_path / "ls.pt")
        assert type(self.load(tmp_path / "ls.pt")) is LSTransformerModel
        with mock.patch.object(checkpoint_utils, "load_checkpoint_to_cpu", installed):
            assert type(self.load(tmp_path / "ls.pt")) is LSTransformerModel
            patching.apply("fairseq's models")
            assert type(self.load(tmp_path / "ls.pt")) is TransformerModel

    @pytest.mark.parametrize("arch", ["transformer_lm", "transformer_lm_gpt2_tiny"])
    @pytest.mark.parametrize("ours", [True, False])
    def test_models_configured_by_a_dataclass(
        self, tmp_path: Path, ours: bool, arch: str, caplog: pytest.LogCaptureFixture,
        installed: Any,
    ) -> None:  # fmt: skip
        data, prefix = parity.write_text(tmp_path / "text"), "ls_" if ours else ""
        parts = {name: runs.TEXT[name] for name in ("optimizer", "criterion")}
        parts = {name: prefix + value.removeprefix("ls_") for name, value in parts.items()}
        flags = {**runs.TEXT, **parts, "arch": prefix + arch, "max_update": 1}
        runs.run(data, tmp_path / "run", native=not ours, **flags)
        path = tmp_path / "run" / "checkpoint_last.pt"
        assert type(self.load(path)) is LSTransformerLanguageModel
        assert type(self.load(path, arg_overrides={"arch": arch})) is TransformerLanguageModel
        state = torch.load(path, weights_only=False)
        with mock.patch.object(checkpoint_utils, "load_checkpoint_to_cpu", installed):
            patching.apply("fairseq's models")
            assert type(self.load(path)) is TransformerLanguageModel
            state["cfg"]["model"]["_name"] = f"ls_{arch}"
            torch.save(state, tmp_path / "ls.pt")
            assert type(self.load(tmp_path / "ls.pt")) is TransformerLanguageModel
        assert type(self.load(tmp_path / "ls.pt")) is LSTransformerLanguageModel

        state["cfg"]["model"].update(_name=arch, activation_fn="tanh")
        torch.save(state, tmp_path / "tanh.pt")
        with caplog.at_level(logging.INFO, logger=models.__name__):
            assert type(self.load(tmp_path / "tanh.pt")) is TransformerLanguageModel
        assert "runs with fairseq's own layers" in caplog.text and "tanh" in caplog.text

        # A dictionary of the same size with two words exchanged: only our files can tell the
        # difference.
        words = (data / "dict.txt").read_text().splitlines()
        (data / "dict.txt").write_text("\n".join([words[1], words[0], *words[2:], ""]))
        if ours:
            with pytest.raises(UserError, match="dictionary is not the one that the checkpoint"):
                self.load(path)
        else:
            self.load(path)

    def test_an_explicit_architecture_is_respected(self, native_run: Path) -> None:
        model = self.load(native_run, arg_overrides={"arch": "transformer"})
        assert type(model) is TransformerModel

    def test_unsupported_options_stay_native(
        self, native_run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        state = torch.load(native_run, weights_only=False)
        state["cfg"]["model"].activation_fn = "tanh"
        path = tmp_path / "tanh.pt"
        torch.save(state, path)
        with caplog.at_level(logging.INFO, logger=models.__name__):
            assert type(self.load(path)) is TransformerModel
        (record,) = (r for r in caplog.records if r.name == models.__name__)
        assert "tanh" in record.getMessage()
        assert str(path) in record.getMessage()

    def test_architectures_without_a_counterpart(self) -> None:
        assert names.ls_arch(Namespace(arch="lstm")) == (None, None)
        assert names.ls_arch(Namespace(arch="transformer_align")) == (None, None)
        args = Namespace(arch="transformer_iwslt_de_en")
        ARCH_CONFIG_REGISTRY[args.arch](args)
        assert names.ls_arch(args) == ("ls_transformer_iwslt_de_en", None)


class TestAtomicWrites:
    OLD = {"a": torch.arange(3)}
    NEW = {"a": torch.arange(50_000), "b": torch.arange(50_000)}

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        saving.save(self.OLD, str(tmp_path / "checkpoint_last.pt"))
        saving.save(self.NEW, str(tmp_path / "checkpoint1.pt"))
        return tmp_path / "checkpoint_last.pt"

    def write(self, how: str, path: Path) -> None:
        if how == "save":
            saving.save(self.NEW, str(path))
        else:
            saving.copy(str(path.with_name("checkpoint1.pt")), str(path), overwrite=True)

    def is_(self, path: Path, state: dict[str, torch.Tensor]) -> bool:
        found = torch.load(path)
        return found.keys() == state.keys() and all(torch.equal(found[k], state[k]) for k in state)

    def nothing_else(self, path: Path) -> None:
        assert sorted(os.listdir(path.parent)) == ["checkpoint1.pt", "checkpoint_last.pt"]

    @pytest.mark.parametrize("how", ["save", "copy"])
    def test_replaces(self, how: str, path: Path) -> None:
        self.write(how, path)
        assert self.is_(path, self.NEW)
        self.nothing_else(path)

    @pytest.mark.parametrize("how", ["save", "copy"])
    @pytest.mark.parametrize("moment", ["write", "fsync", "replace", "replaced"])
    def test_killed(self, how: str, moment: str, path: Path) -> None:
        replace = os.replace

        def work() -> None:
            if moment == "write":
                runs.limit_files(100_000, killed=True)
            elif moment == "replaced":
                with mock.patch.object(os, "replace", lambda *a: (replace(*a), runs.die())):
                    self.write(how, path)
            else:
                with mock.patch.object(os, moment, runs.die):
                    self.write(how, path)
            self.write(how, path)

        assert runs.in_a_fork(work) == -(signal.SIGXFSZ if moment == "write" else signal.SIGKILL)
        assert self.is_(path, self.NEW if moment == "replaced" else self.OLD)
        self.write(how, path)
        assert self.is_(path, self.NEW)
        self.nothing_else(path)

    @pytest.mark.parametrize("how", ["save", "copy"])
    def test_full_disk(self, how: str, path: Path) -> None:
        def work() -> None:
            runs.limit_files(100_000, killed=False)
            with pytest.raises(UserError, match=r"checkpoint_last\.pt \(File too large\)") as error:
                self.write(how, path)
            assert str(error.value).endswith(
                {"save": "large): choose another path.", "copy": f"{saving.RESUME}."}[how]
            )

        assert runs.in_a_fork(work) == 0
        assert self.is_(path, self.OLD)
        self.nothing_else(path)

    def test_a_link_and_a_pipe_stay(self, path: Path) -> None:
        link, pipe = path.with_name("link.pt"), path.with_name("pipe.pt")
        link.symlink_to(path)
        saving.save(self.NEW, str(link))
        assert link.is_symlink() and self.is_(path, self.NEW)
        os.mkfifo(pipe)
        with pytest.raises(UserError, match=r"pipe\.pt \(it is not a regular file\)"):
            saving.save(self.NEW, str(pipe))
        assert pipe.is_fifo()

    def test_no_permission(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="Cannot write"):
            saving.save(self.OLD, str(tmp_path / "missing" / "x.pt"))

    def test_other_errors_are_not_explained_away(self, path: Path) -> None:
        with pytest.raises(AttributeError):
            saving.save({"a": lambda: 0}, str(path))
        assert self.is_(path, self.OLD)
        self.nothing_else(path)

    def test_interrupted(self, path: Path) -> None:
        """torch still closes its archive, which raises another error."""

        def interrupted(file: io.FileIO, data: bytes) -> int:
            if file.tell() > 100_000:
                raise KeyboardInterrupt
            return io.FileIO.write(file, data)

        with mock.patch.object(files._File, "write", interrupted), pytest.raises(KeyboardInterrupt):
            self.write("save", path)
        assert self.is_(path, self.OLD)
        self.nothing_else(path)

    def test_a_copy_is_a_file_of_its_own(self, path: Path) -> None:
        """fairseq overwrites checkpoint_last.pt in place, which must not change checkpoint1.pt."""
        self.write("copy", path)
        path.write_bytes(b"overwritten in place")
        assert self.is_(path.with_name("checkpoint1.pt"), self.NEW)


class TestOwnStorage:
    def test_views_are_copied_and_ties_kept(self) -> None:
        flat = torch.arange(10.0)
        tied, alone = flat[2:6].view(2, 2), torch.zeros(3)
        state = saving.own_storage({"a": tied, "b": [flat[2:6].view(2, 2)], "c": alone, "d": 1})
        assert state["c"] is alone
        assert state["d"] == 1
        assert torch.equal(state["a"], tied)
        assert state["a"].untyped_storage().nbytes() == 16
        assert state["a"].data_ptr() == state["b"][0].data_ptr() != tied.data_ptr()
