"""fairseq's Trainer with the captured step, and lossless, crash-safe checkpoints in its format."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from fairseq import optim
from fairseq.file_io import PathManager
from fairseq.logging.progress_bar import NoopProgressBar
from torch import Tensor, nn

from lightseq_fairseq.base import dictionaries, library, optimizer_order
from lightseq_fairseq.base.errors import UserError, is_out_of_memory
from lightseq_fairseq.checkpoints import names, word_rows
from lightseq_fairseq.fairseq_compat import batches, patching
from lightseq_fairseq.memory import graphs
from lightseq_fairseq.plugins.optimizer import FP16Optimizer, accept_other_precision
from lightseq_fairseq.step.adafactor import Adafactor
from lightseq_fairseq.step.flat_adam import FlatAdam
from lightseq_fairseq.training import background, batch, captured, full_batches, lora
from lightseq_fairseq.training.background import WRITER
from lightseq_fairseq.training.captured import CapturedTraining
from lightseq_fairseq.training.progress import EpochProgress
from lightseq_fairseq.training.resuming import ResumableTrainer

logger = logging.getLogger(__name__)

# A key of extra_state during load_checkpoint, never in a file. It is in extra_state because fairseq
# broadcasts extra_state from rank 0 to the other ranks, and returns it.
_MASTERS = "lightseq_masters"
_LOSS_SCALER = "loss_scaler"
_FP8 = "lightseq_fp8"  # the key of the scales in extra_state
_FLOATS = 3  # floats per parameter in a checkpoint: its value and two moments
_SCALER_COUNTERS = (
    "_iter",
    "_last_overflow_iter",
    "_last_rescale_iter",
    "_overflows_since_rescale",
)


class Trainer(ResumableTrainer):
    """``fairseq.trainer.Trainer`` with the captured step and lossless checkpoints.

    A run without any ``ls_`` component behaves as in fairseq.

    Checkpoints have fairseq's format, but with ``--fp16`` or ``--bf16``, "model" holds the fp32
    master weights, where fairseq writes their 16-bit rounding. ``extra_state`` also holds the
    counters of the loss scale, the scales of ``--fp8`` and the digests of the dictionaries. So a
    resumed run continues as if it had not been interrupted. Stock fairseq can read these files, and
    this class can continue from files of stock fairseq.
    """

    def __init__(
        self, cfg: Any, task: Any, model: Any, criterion: Any, quantizer: Any = None
    ) -> None:
        self._captured: CapturedTraining | None = None
        self._scales: dict[str, Tensor] = {}  # of fp8, before the first step
        self._fallback_reason: str | None = None  # why fairseq's own step runs
        self._fairseqs: Any = None  # fairseq's iterator of the training set
        self._iterator: Any = None  # a copy of it whose batches are fuller, packed, or both
        self.progress = EpochProgress(NoopProgressBar([]), self)  # until an epoch begins
        super().__init__(cfg, task, model, criterion, quantizer)
        self._has_ls = names.uses_ls(self.cfg)
        if self._has_ls:
            background.take_over()

    @property
    def model(self) -> Any:
        """The model that fairseq's loop calls: if our step runs, without the wrapper of ranks.

        DistributedDataParallel would keep a second gradient, and autograd nodes of the default
        stream, with which backward cannot be captured.
        """
        return self._model if self._fallback_reason is None else super().model

    def _build_optimizer(self) -> None:
        self._captured = None
        self._fallback_reason = captured.fallback_reason(self)
        captured.refuse_flags(self.cfg, self._fallback_reason)
        captured.refuse_fp8(self)
        if self._fallback_reason is None and self.use_distributed_wrapper:
            self._model.to(self.device)  # fairseq leaves this to its wrapper
        with contextlib.ExitStack() as stack:
            stack.enter_context(captured.unsharded(self.cfg))
            if self._fallback_reason is None:
                stack.enter_context(patching.within("fairseq.optim:FP16Optimizer", FP16Optimizer))
                stack.enter_context(patching.within("fairseq.optim.adafactor:Adafactor", Adafactor))
            super()._build_optimizer()

    def get_train_iterator(self, *arguments: Any, **keywords: Any) -> Any:
        """An epoch's batches: fuller ones with --pack-tokens; packed if the captured step runs."""
        iterator = super().get_train_iterator(*arguments, **keywords)
        assert self.optimizer is not None  # builds the optimizer, which sets _fallback_reason
        self._fallback_reason = self._fallback_reason or batch.covers(iterator.dataset)
        captured.refuse_flags(self.cfg, self._fallback_reason)
        if self._fallback_reason is not None and self._captured is not None:
            # The data of this shard cannot be packed, those of an earlier one could.
            self._captured.leave()
            self._captured = None
        fills = getattr(self.cfg.model, "pack_tokens", False)
        if (fills or self._fallback_reason is None) and iterator is not self._fairseqs:
            # fairseq caches the iterator of a dataset and uses it for other purposes too, such as
            # validation on the training set. So change only a copy.
            batches.end_workers(self._iterator)
            self._fairseqs, self._iterator = iterator, copy.copy(iterator)
            if fills:
                limits = self.cfg.dataset
                full_batches.refill(self._iterator, limits.max_tokens, limits.batch_size)
            if self._fallback_reason is None:
                dataset = batch.packing(iterator.dataset, captured.granularity(self))
                self._iterator.dataset, self._iterator.collate_fn = dataset, dataset.collater
        return self._iterator if fills or self._fallback_reason is None else iterator

    def step_taken(self) -> str:
        """The kind of step that training runs, with the reason in brackets."""
        if self._fallback_reason is not None:
            return f"fairseq's own ({self._fallback_reason})"
        ops = "PyTorch code" if self.cuda else "PyTorch code on the CPU"
        if self.cuda and library.load().kernels:
            ops = "CUDA kernels"
        reason = graphs.why_not_captured(self.device)
        if reason is None:
            return f"captured as CUDA graphs, without padding, {ops} (all parts are ls_)"
        return f"without CUDA graphs, without padding, {ops} ({reason})"

    def train_step(self, samples: Any, raise_oom: bool = False) -> Any:
        """One update; see ``fairseq.trainer.Trainer.train_step``.

        The captured step returns None, so that fairseq's loop logs nothing: see ``captured``.

        Raises:
            UserError: a checkpoint could not be written.
        """
        WRITER.check()
        if self._fallback_reason is not None:
            return super().train_step(samples, raise_oom)
        if self._captured is None:
            self._captured = CapturedTraining(self, self._scales)
        self._captured.train_step(samples, self._iterator.end_of_epoch())
        return None

    def settle(self) -> None:
        """Wait for all launched steps, and log them."""
        if self._captured is not None:
            self._captured.settle()

    def begin_valid_epoch(self, epoch: int) -> None:
        """Called before validation."""
        self.settle()
        super().begin_valid_epoch(epoch)

    def valid_step(self, sample: Any, raise_oom: bool = False) -> Any:
        """One batch of validation; see ``fairseq.trainer.Trainer.valid_step``.

        If memory runs out, the graphs of training are freed and the batch is repeated.
        """
        if self._captured is None:
            return super().valid_step(sample, raise_oom)
        try:
            return super().valid_step(sample, raise_oom=True)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        # Outside the except block, where the error no longer holds device memory.
        logger.info("out of memory: all CUDA graphs are freed, and the batch starts again")
        self._captured.forget_graphs()
        return super().valid_step(sample, raise_oom=True)

    def consolidate_optimizer(self) -> None:
        """Called on all ranks before rank 0 saves: gather the state of the optimizer."""
        super().consolidate_optimizer()
        if self._captured is not None:
            self._captured.gather()

    def state_dict(self) -> dict[str, Any]:
        """fairseq's training state under fairseq's names, with the fp32 master weights.

        If the optimizer is sharded, only rank 0 can call this, after `consolidate_optimizer`.
        """
        self.settle()
        state: dict[str, Any] = super().state_dict()
        if not self._has_ls:
            return state
        state["cfg"] = names.native_cfg(state["cfg"])
        state["extra_state"]["dictionaries"] = dictionaries.digests(self.task)
        for key, module in (("model", self.get_model()), ("criterion", self.get_criterion())):
            for name, master in self._masters(module).items():
                if name in state[key]:
                    state[key][name] = master
        if self.cfg.common.fp16:
            counters = {name: getattr(self.optimizer.scaler, name) for name in _SCALER_COUNTERS}
            state["extra_state"][_LOSS_SCALER] = counters
        scales = self._scales if self._captured is None else self._captured.scales()
        if scales:
            state["extra_state"][_FP8] = scales
        if self._captured is not None:
            self._captured.release()
        return state

    def _masters(self, module: nn.Module) -> dict[str, Tensor]:
        """Name of a 16-bit parameter -> its fp32 master weight, a view of FP16Optimizer's."""
        optimizer = self.optimizer
        if not isinstance(optimizer, optim.FP16Optimizer):
            return {}
        adam = optimizer.fp32_optimizer.optimizer
        if isinstance(adam, FlatAdam):
            adam.join()
        masters: dict[int, Tensor] = {}
        if optimizer.has_flat_params:
            for device, flat in optimizer.fp32_params.items():
                # fairseq has one vector per device if the model spans devices, else one in total.
                members = [
                    p
                    for p in optimizer.fp16_params
                    if len(optimizer.fp32_params) == 1 or p.device.index == device
                ]
                pieces = flat.detach().split([p.numel() for p in members])
                for parameter, piece in zip(members, pieces, strict=True):
                    masters[id(parameter)] = piece.view(parameter.shape)
        else:
            for parameter, master in zip(optimizer.fp16_params, optimizer.fp32_params, strict=True):
                masters[id(parameter)] = master.detach()
        return {
            name: masters[id(parameter)]
            for name, parameter in module.named_parameters(remove_duplicate=False)
            if id(parameter) in masters
        }

    def save_checkpoint(self, filename: str, extra_state: dict[str, Any]) -> None:
        """Copy all training state; ``WRITER`` then writes it while training continues.

        ``filename`` is replaced atomically.

        Raises:
            UserError: the previous checkpoint could not be written.
        """
        asynchronous = self.cfg.checkpoint.write_checkpoints_asynchronously
        if not self._has_ls or asynchronous or not PathManager.supports_rename(filename):
            super().save_checkpoint(filename, extra_state)
            return
        if self._captured is not None and not self.should_save_checkpoint_on_current_rank:
            return
        # Without the captured step, all ranks call state_dict, which may run collectives.
        state = self.state_dict()
        state["extra_state"].update(extra_state)
        if self.should_save_checkpoint_on_current_rank:
            WRITER.save(state, filename, self.device)

    def _make_room(self) -> None:
        """Allocate host memory for checkpoints while data are loaded, since allocation is slow."""
        saves = self.should_save_checkpoint_on_current_rank and not self.cfg.checkpoint.no_save
        if self._has_ls and saves:
            sizes = [parameter.numel() for parameter in self.get_model().parameters()]
            WRITER.reserve(_FLOATS * 4 * (sum(sizes) + 16 * len(sizes)) + (1 << 16), self.device)

    def load_checkpoint(
        self, filename: str, reset_optimizer: bool = False, *resets: Any, **options: Any
    ) -> Any:
        """Load all training state; see ``fairseq.trainer.Trainer.load_checkpoint``.

        Raises:
            UserError: the file is damaged, or belongs to another model, criterion or optimizer.
        """
        self._captured, self._scales = None, {}
        self._make_room()
        load = super().load_checkpoint
        if not self._has_ls:
            return load(filename, reset_optimizer, *resets, **options)
        with self._on_loading(reset_optimizer), captured.unsharded(self.cfg):
            extra_state = load(filename, reset_optimizer, *resets, **options)
        if extra_state is not None:
            self._restore_masters(extra_state.pop(_MASTERS, {}))
            counters = extra_state.pop(_LOSS_SCALER, {})
            scales = extra_state.pop(_FP8, {})
            if captured.uses_fp8(self.cfg) and not reset_optimizer:
                self._scales = scales
            if self.cfg.common.fp16 and not reset_optimizer:
                for name, value in counters.items():
                    setattr(self.optimizer.scaler, name, value)
        return extra_state

    @contextlib.contextmanager
    def _on_loading(self, reset_optimizer: bool) -> Iterator[None]:
        # fairseq rounds the file's parameters to the model's 16 bits, makes the fp32 master weights
        # from these and drops the file. Keep the file's parameters until the master weights exist.
        def load_and_keep(load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            state = load(*args, **kwargs)
            trained_with = state["extra_state"].get("dictionaries")
            # Fine-tuning may change the dictionary, and train a head for other labels.
            may_differ = args[0] == self.cfg.checkpoint.finetune_from_model
            begins = may_differ or reset_optimizer
            follows = begins and word_rows.follow(state, self.task)
            for differs, is_new in (
                (lambda *both: None if follows else dictionaries.difference(*both), may_differ),
                (dictionaries.other_labels, begins),
            ):
                if (sentence := differs(self.task, trained_with)) is not None and not is_new:
                    raise UserError(sentence)
                if sentence is not None:
                    logger.warning(sentence)
            state["model"] = lora.fit(state["model"], self.get_model(), begins)
            if not reset_optimizer:
                optimizer_order.follow_model(state, self.get_model())
                accept_other_precision(state, self.cfg)
            if self.cfg.ema.store_ema and "ema" not in state["extra_state"]:
                # fairseq would start the EMA from the file's model, which it has dropped by then.
                state["extra_state"]["ema"] = dict(state["model"])
            if self.cfg.common.fp16 or self.cfg.common.bf16:
                kept = {key: state.get(key) or {} for key in ("model", "criterion")}
                state["extra_state"][_MASTERS] = kept
            return state

        target = "fairseq.checkpoint_utils:load_checkpoint_to_cpu"
        with patching.within(target, load_and_keep, by="training.trainer"):
            yield

    @torch.no_grad()
    def _restore_masters(self, kept: dict[str, dict[str, Tensor]]) -> None:
        for key, module in (("model", self.get_model()), ("criterion", self.get_criterion())):
            tensors = kept.get(key)
            if tensors:
                for name, master in self._masters(module).items():
                    # If the names here are those of an old fairseq, the rounded values stay.
                    if name in tensors and tensors[name].shape == master.shape:
                        master.copy_(tensors[name])
