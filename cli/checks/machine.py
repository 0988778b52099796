"""Checks of settings that depend on the machine: a run without a GPU."""

from __future__ import annotations

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.checks import Request, flags
from lightseq_fairseq.cli.words.argv import is_given


def backend(request: Request) -> None:
    """Selects the gloo backend for ranks without GPUs; fairseq's default, NCCL, needs GPUs."""
    import torch

    args, flag = request.args, "--distributed-backend"
    if flags.has_one_rank(args) or (torch.cuda.is_available() and not args.cpu):
        return
    if args.distributed_backend != "nccl":
        return
    if is_given(request.argv, (flag,)):
        raise UserError(
            f"{flag} nccl needs a GPU, but this run uses none: use {flag} gloo, or remove it."
        )
    args.distributed_backend = "gloo"


def precision(request: Request) -> None:
    """Raises UserError for fairseq's flat fp16 optimizer without a GPU: it uses a CUDA device."""
    import torch

    args = request.args
    flat = args.fp16 and not (args.memory_efficient_fp16 or args.fp16_no_flatten_grads)
    if flat and (args.cpu or not torch.cuda.is_available()):
        raise UserError(
            "--fp16 needs a GPU, but this run uses none: remove it, or use --bf16, which also "
            "works on a CPU."
        )
