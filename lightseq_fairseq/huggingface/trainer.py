"""``transformers.Trainer`` with the captured step: the same loop, arguments, logs and checkpoints.

What the step does not cover, the Trainer's own step computes; one line in the log says why.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Iterable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.huggingface.accelerated import Accelerated, accelerate
from lightseq_fairseq.huggingface.adamw import LightseqAdamW
from lightseq_fairseq.huggingface.batch import Host, packed
from lightseq_fairseq.huggingface.captured import CapturedStep
from lightseq_fairseq.huggingface.covered import NotCovered, Reads

logger = logging.getLogger(__name__)

_ADAMW = ("adamw_torch", "adamw_torch_fused")


class _Captured:
    """Mixin of the Trainers; it comes before the class of transformers."""

    optimizer: Any
    _step: CapturedStep | None = None
    _why_plain: str | None = None  # why the Trainer's own step runs, once that is known

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        accelerate(self.model)
        self._micro_batch = 0  # of the update

    def create_optimizer(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, but AdamW is `LightseqAdamW`."""
        if self.optimizer is None and self._reason() is None:
            decayed = set(self.get_decay_parameter_names(self.model))
            groups: list[dict[str, Any]] = [
                {"params": [], "weight_decay": self.args.weight_decay},
                {"params": [], "weight_decay": 0.0},
            ]
            for name, parameter in self.model.named_parameters():
                if parameter.requires_grad:
                    groups[name not in decayed]["params"].append(parameter)
            _, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            options.pop("fused", None)
            self.optimizer = LightseqAdamW(groups, **options)
            return self.optimizer
        return super().create_optimizer(*args, **kwargs)  # type: ignore[misc]

    def _reason(self: Any) -> str | None:
        """Why the captured step does not cover this run, in a clause; None if it does."""
        args, theirs = self.args, transformers.Trainer
        parts = _accelerated(self.model)
        pair = [type(part).__name__[-7:] for part in parts] == ["Encoder", "Decoder"]
        drops = any(getattr(part, "layerdrop", 0.0) > 0 for part in parts)
        name = str(getattr(args.optim, "value", args.optim))
        events = ("on_pre_optimizer_step", "on_optimizer_step")
        callbacks = [
            type(c).__name__
            for c in self.callback_handler.callbacks
            if any(
                getattr(type(c), e) is not getattr(transformers.TrainerCallback, e) for e in events
            )
        ]
        reasons = {
            f"transformers {transformers.__version__} is too old for it": not hasattr(
                theirs, "_clip_grad_norm"
            ),
            "one process has several GPUs (start it with torchrun)": args.n_gpu > 1,
            "processes share a model (parallelism_config)": getattr(
                self.accelerator, "parallelism_config", None
            )
            is not None,
            "it runs under FSDP or DeepSpeed": self.is_fsdp_enabled or self.is_deepspeed_enabled,
            "fp16 needs a loss scale": args.fp16,
            f"the optimizer is {name}, not AdamW": name not in _ADAMW,
            "torch_compile is set": args.torch_compile,
            "NEFTune adds noise to the embedding": args.neftune_noise_alpha is not None,
            "torch_empty_cache_steps is set": args.torch_empty_cache_steps is not None,
            "the model has several accelerated parts": len(parts) > 1 and not pair,
            "sparse_prediction chooses rows on the host (set it to False, the step does as much)": (
                getattr(self.model, "sparse_prediction", False)
            ),
            "layer drop chooses layers on the host (set the model's layerdrop to 0)": drops,
            "compute_loss is another one": type(self).compute_loss is not theirs.compute_loss,
            "compute_loss_func is given": getattr(self, "compute_loss_func", None) is not None,
            f"the callback {', '.join(callbacks)} looks at gradients": bool(callbacks),
            "the parameters have several dtypes": len({p.dtype for p in self.model.parameters()})
            > 1,
            "the optimizer was given": not isinstance(
                getattr(self.optimizer, "optimizer", self.optimizer), (LightseqAdamW, type(None))
            ),
        }
        return next((why for why, is_so in reasons.items() if is_so), None)

    def get_train_dataloader(self: Any) -> Any:
        """As in transformers, but batches stay on the host, which packs them."""
        loader = super().get_train_dataloader()  # type: ignore[misc]
        if hasattr(loader, "device"):
            loader.device = None
        return loader

    def _get_num_items_in_batch(self: Any, batch_samples: Any, device: Any) -> Any:
        """As in transformers, but a captured step gets the number on the host: a copy to the device
        would wait for all work before it."""
        device = "cpu" if self.model.training and self._captured_step() else device
        return super()._get_num_items_in_batch(batch_samples, device)  # type: ignore[misc]

    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As in transformers."""
        filters = self.args.logging_nan_inf_filter
        self._step, self._why_plain, self._micro_batch = None, None, 0
        try:
            return super().train(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.args.logging_nan_inf_filter = filters
            self._step = None

    def training_step(
        self: Any, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """The loss of a micro-batch, whose gradient is added; see ``transformers.Trainer``."""
        step = self._captured_step()
        if step is None:
            return super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
        first = self._micro_batch == 0
        count = self.args.gradient_accumulation_steps
        # A function of the update, so that a resumed run draws the masks of an uninterrupted one;
        # another one in each process.
        seed = self.args.seed + (self.args.process_index << 32)
        rng = seed, self.state.global_step * count + self._micro_batch
        self._micro_batch += 1
        if not model.training:
            model.train()
        items = None if num_items_in_batch is None else float(num_items_in_batch)

        def function(tensors: Any, items: Any) -> Tensor:
            # Not by DistributedDataParallel, which would wait for gradients of its parameters.
            step = super(_Captured, self).training_step  # type: ignore[misc]
            loss: Tensor = step(self.model, tensors, items)
            return loss

        try:
            batch = packed(inputs, self._host, rng)
            key = self.current_gradient_accumulation_steps, _rates(self._dropouts)
            loss = step.gradient(batch, first, key, items, function)
        except NotCovered as reason:
            self._note(f"some batches run without a CUDA graph, because {reason}")
            loss = step.gradient(None, first, None, items, function, inputs)
        return self._filtered(loss)

    def _host_of(self: Any, parts: list[Any]) -> Host:
        """What the host must know of the model, whose accelerated parts these are."""
        pad = getattr(self.model.config, "pad_token_id", None) or 0
        families = ((part._lightseq.family, part) for part in parts)
        most = min(family.most(part) for family, part in families)
        reads = parts[0]._lightseq.reads
        name = type(self.model).__name__
        if not type(self.model).__module__.startswith("transformers.models."):
            name = ""  # nobody knows what its head computes
        config = self.model.config
        pads = getattr(config, "pad_token_id", None), getattr(config, "eos_token_id", None)
        known: dict[str, Any] = {"needs_mask": pads[0] is not None and pads[0] != pads[1]}
        if name.endswith(("ForSequenceClassification", "ForTokenClassification")):
            known["classes"] = config.num_labels if config.num_labels > 1 else 0
        elif name.endswith(("ForMaskedLM", "LMHeadModel", "ForConditionalGeneration", "MTModel")):
            known["classes"] = self.model.get_output_embeddings().weight.shape[0]
        if len(parts) > 1:
            has_known_head = name.endswith(("ForConditionalGeneration", "MTModel"))
            return Host(
                pad, Reads(pads=False, first=False), most, has_target=True,
                shifted=functools.partial(_shifted, self.model) if has_known_head else None,
                **known,
            )  # fmt: skip
        is_masked = name.endswith("ForMaskedLM") and getattr(parts[0], "pooler", None) is None
        return Host(pad, reads, most, is_masked=is_masked, **known)

    def _captured_step(self: Any) -> CapturedStep | None:
        """Made at the first batch, when all else is in its place."""
        if self._step is None and self._why_plain is None:
            optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
            self._why_plain = self._reason()
            if self._why_plain is None and not isinstance(optimizer, LightseqAdamW):
                self._why_plain = "the optimizer is not LightseqAdamW"
            fp8 = any(part._lightseq.fp8 for part in _accelerated(self.model))
            if self._why_plain is not None and fp8:
                raise UserError(
                    f"fp8 needs the captured step, which does not run, because {self._why_plain}: "
                    "call lightseq.accelerate without fp8."
                )
            if self._why_plain is not None:
                self._note(f"the step is not captured, because {self._why_plain}")
                return None
            dtype = next(self.model.parameters()).dtype
            low = torch.bfloat16 if self.args.bf16 and dtype == torch.float32 else None
            self._step = CapturedStep(self.model, optimizer, low, fp8)
            # Walks through all modules would take longer than the step of a small batch.
            self._host = self._host_of(_accelerated(self.model))
            self._dropouts = [m for m in self.model.modules() if _rates([m])]
            self._operations = None
            if hasattr(self, "_tr_loss"):  # else transformers waits for each loss
                self._filters = self.args.logging_nan_inf_filter
                self.args.logging_nan_inf_filter = False
            else:
                self._filters = False
        return self._step

    def floating_point_ops(self: Any, inputs: dict[str, Any]) -> int:
        """As in transformers, which counts the model's parameters again at each batch."""
        main = inputs.get(self.model.main_input_name)
        if self._step is None or not isinstance(main, Tensor) or main.numel() == 0:
            return super().floating_point_ops(inputs)  # type: ignore[misc]
        if self._operations is None:  # of an element
            self._operations = super().floating_point_ops(inputs) / main.numel()  # type: ignore[misc]
        return int(self._operations * main.numel())

    def _note(self: Any, text: str) -> None:
        if text not in getattr(self, "_noted", ()):
            self._noted = (*getattr(self, "_noted", ()), text)
            logger.warning("lightseq: %s", text)

    def _filtered(self: Any, loss: Tensor) -> Tensor:
        """Without the host: a loss that is not finite is logged as the mean of the ones before."""
        if not self._filters:
            return loss
        mean = self._tr_loss / (1 + self.state.global_step - self._globalstep_last_logged)
        return torch.where(loss.isfinite(), loss, mean.to(loss.dtype))

    def _clip_grad_norm(self: Any, model: nn.Module) -> Any:
        if self._step is None:
            return super()._clip_grad_norm(model)  # type: ignore[misc]
        return self._ended(self.args.max_grad_norm)

    def _get_grad_norm(self: Any, model: nn.Module, grad_norm: Any = None) -> Any:
        if self._step is None or grad_norm is not None:
            return super()._get_grad_norm(model, grad_norm=grad_norm)  # type: ignore[misc]
        return self._ended(0.0)

    def _ended(self: Any, max_norm: float) -> Tensor:
        self._micro_batch = 0
        return self._step.clip(max_norm)


def _shifted(model: Any, labels: Tensor) -> Tensor:
    """The decoder's input that the model makes of labels int64 [B, L]."""
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):
        shifted: Tensor = model.prepare_decoder_input_ids_from_labels(labels)
        return shifted
    own = sys.modules[type(model).__module__].shift_tokens_right  # as M2M-100
    shifted = own(labels, model.config.pad_token_id, model.config.decoder_start_token_id)
    return shifted


def _accelerated(model: nn.Module) -> list[Any]:
    """The parts of a model that our layers compute."""
    return [m for m in model.modules() if isinstance(m, Accelerated)]


def _rates(modules: Iterable[nn.Module]) -> tuple[float, ...]:
    """The dropout rates, which a graph has as constants."""
    named = ("dropout", "attention_dropout", "activation_dropout")
    return tuple(
        rate
        for module in modules
        for rate in ([module.p] if type(module) is nn.Dropout else map(vars(module).get, named))
        if isinstance(rate, float)
    )


class Trainer(_Captured, transformers.Trainer):
    """``transformers.Trainer`` with the captured step.

    Raises:
        UserError: `accelerate` does not support the model.
    """


class Seq2SeqTrainer(_Captured, transformers.Seq2SeqTrainer):
    """``transformers.Seq2SeqTrainer`` with the captured step."""
