"""Messages for exceptions of fairseq and torch."""

from __future__ import annotations

import argparse
import errno
import os
import signal
import time
import traceback

import pytest
import torch
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.checks import Request
from lightseq_fairseq.cli.checks.messages import explain
from lightseq_fairseq.cli.start import logs

TRAIN = Request(
    ["bin", "--arch", "x", "--save-dir", "ck"],
    argparse.Namespace(
        data="bin", save_dir="ck", restore_file="checkpoint_last.pt", path=None, max_update=9
    ),
)
GENERATE = Request(
    ["bin", "--path", "a.pt", "--bpe-codes=codes.bpe"],
    argparse.Namespace(data="bin", save_dir="checkpoints", path="a.pt"),
)

EMBEDDING_MISMATCH = """Error(s) in loading state_dict for TransformerModel:
\tsize mismatch for encoder.embed_tokens.weight: copying a param with shape torch.Size([24, 64]) \
from checkpoint, the shape in current model is torch.Size([16, 64]).
\tsize mismatch for decoder.embed_tokens.weight: copying a param with shape torch.Size([24, 64]) \
from checkpoint, the shape in current model is torch.Size([16, 64])."""
WIDTH_MISMATCH = EMBEDDING_MISMATCH.replace("[16, 64]", "[24, 32]")
POSITIONS_MISMATCH = """Error(s) in loading state_dict for TransformerModel:
\tsize mismatch for encoder.embed_positions.weight: copying a param with shape \
torch.Size([514, 64]) from checkpoint, the shape in current model is torch.Size([1026, 64]).
\tsize mismatch for decoder.embed_positions.weight: copying a param with shape \
torch.Size([258, 64]) from checkpoint, the shape in current model is torch.Size([1026, 64])."""
MISSING_KEYS = """Error(s) in loading state_dict for TransformerModel:
\tMissing key(s) in state_dict: "encoder.layers.1.fc1.weight". """


def caught(error: Exception) -> Exception:
    """The error as code that is not fairseq's raises it."""
    try:
        raise error.with_traceback(None)
    except Exception as raised:
        return raised


# fairseq hides the reason in this way.
NO_RESUME = Exception(
    "Cannot load model parameters from checkpoint ck/checkpoint_last.pt; "
    "please ensure that the architectures match."
)
NO_RESUME.__context__ = caught(RuntimeError(EMBEDDING_MISMATCH))
TOO_LONG = Exception(
    "Size of sample #7 is invalid (=(np.int32(1501), np.int32(2))) since max_positions="
    "(1024, 1024), skip this example with --skip-invalid-size-inputs-valid-test"
)


class OutOfMemoryError(RuntimeError):
    """Has the name of torch.cuda's class."""


class DistBackendError(RuntimeError):
    """Has the name of torch.distributed's class."""


class DistStoreError(RuntimeError):
    """Has the name of torch.distributed's class."""


KNOWN: dict[str, tuple[Exception, Request, list[str]]] = {
    "own": (
        UserError("--magic is not supported: drop it."),
        TRAIN, ["--magic is not supported: drop it."],
    ),
    "dictionary": (
        RuntimeError(EMBEDDING_MISMATCH),
        GENERATE, ["dictionary", "a.pt", "source", "24", "16", "--srcdict"],
    ),
    "resume": (NO_RESUME, TRAIN, ["dictionary", "ck/checkpoint_last.pt", "24", "16", "bin"]),
    "width": (
        RuntimeError(WIDTH_MISMATCH),
        TRAIN, ["model", "[24, 64]", "[24, 32]", "arch", "--save-dir"],
    ),
    "layers": (
        RuntimeError(MISSING_KEYS), TRAIN, ["model", "encoder.layers.1.fc1.weight", "arch"],
    ),
    "positions": (
        RuntimeError(POSITIONS_MISMATCH),
        TRAIN, [": set --max-source-positions 512 --max-target-positions 256, or start"],
    ),
    "too_long": (
        TOO_LONG,
        GENERATE, ["Sentence 7", "(1501, 2)", "(1024, 1024)", "--skip-invalid-size-inputs"],
    ),
    "no_split": (
        FileNotFoundError("Dataset not found: valid (bin)"),
        TRAIN, ["valid", "bin", "lightseq-preprocess"],
    ),
    "no_checkpoint": (OSError("Model file not found: a.pt"), GENERATE, ["a.pt", "--path"]),
    "fewer_batches": (
        RuntimeError(
            "Cannot resume training due to dataloader mismatch, please report this to the fairseq "
            "developers. You can relaunch training with `--reset-dataloader` and it should work."
        ),
        TRAIN, ["ck/checkpoint_last.pt", "--pack-tokens", "--reset-dataloader"],
    ),
    "epoch_without_update": (
        UnboundLocalError("cannot access local variable 'valid_losses' where it is not associated"),
        TRAIN, ["ck/checkpoint_last.pt", "--update-freq", "--reset-dataloader"],
    ),
    "own_flag_check": (
        AssertionError("--sampling requires --nbest to be equal to --beam"),
        GENERATE, ["--sampling requires --nbest to be equal to --beam."],
    ),
    "no_optimizer": (ValueError("optimizer is required!"), TRAIN, ["--optimizer"]),
    "too_many_ranks": (
        AssertionError("world size is 4 but have 1 available devices"),
        TRAIN, ["--distributed-world-size is 4", "1 GPU"],
    ),
    "loss_scale": (
        FloatingPointError(
            "Minimum loss scale reached (0.0001). Your loss is probably exploding. Try lowering "
            "the learning rate, using gradient clipping or increasing the batch size."
        ),
        TRAIN, ["Minimum loss scale", "learning rate"],
    ),
    "killed_worker": (
        RuntimeError("DataLoader worker (pid 12) is killed by signal: Segmentation fault. "),
        Request(), ["(pid 12) was killed (Segmentation fault), often"],
    ),
    "worker_with_status": (
        RuntimeError(
            "DataLoader worker (pid 12) exited unexpectedly with exit code 1. Details are lost due "
            "to multiprocessing. Rerunning with num_workers=0 may give better error trace."
        ),
        Request(), ["(pid 12) ended with status 1, often"],
    ),
    "ended_workers": (
        RuntimeError("DataLoader worker (pid(s) 12, 13) exited unexpectedly"),
        Request(), ["(pid 12, 13) ended, often"],
    ),
    "no_requests": (
        ModuleNotFoundError("No module named 'requests'"), GENERATE, ["URL", "pip install requests"]
    ),
    "no_network": (
        OSError(  # as the class of requests is
            "HTTPSConnectionPool(host='files.com', port=443): Max retries exceeded with url: "
            "/gpt2_bpe/encoder.json (Caused by NameResolutionError(\"Failed to resolve "
            "'files.com'\"))"
        ),
        TRAIN, ["files.com/gpt2_bpe/encoder.json", "--gpt2-encoder-json"],
    ),
    "memory": (
        OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
        TRAIN, ["out of memory", "--max-tokens"],
    ),
    "memory_of_a_kernel": (
        RuntimeError("CUDA out of memory: lightseq cannot allocate 1.5e+09 more elements"),
        TRAIN, ["out of memory", "--max-tokens"],
    ),
    "gloo_has_lost_a_rank": (
        RuntimeError(
            "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error "
            "[127.0.0.1]:4517: Connection reset by peer. This is typically caused by a remote "
            "worker hanging or bugs in the application. Check the logs of the remote worker."
        ),
        TRAIN, ["Another rank has ended", "its own log", "the same command"],
    ),
    "nccl_has_lost_a_rank": (
        DistBackendError(
            "NCCL error in: ProcessGroupNCCL.cpp:77, remote process exited or there was a network "
            "error, NCCL version 2.28\nncclRemoteError: A call failed possibly due to a network "
            "error or a remote process exiting prematurely."
        ),
        GENERATE, ["Another rank has ended: its own log says why."],
    ),
    "ranks_have_not_come": (
        DistStoreError("Timed out after 601 seconds waiting for clients. 1/2 clients joined."),
        TRAIN, ["1 of 2 ranks", "601 seconds", "--distributed-init-method"],
    ),
    "named_file": (
        FileNotFoundError(errno.ENOENT, "No such file or directory", "codes.bpe"),
        GENERATE, ["codes.bpe", "does not exist"],
    ),
    "read_only": (
        PermissionError(errno.EACCES, "Permission denied", "ck/dummy"), TRAIN, ["ck", "--save-dir"]
    ),
    "full_disk": (
        OSError(errno.ENOSPC, "No space left on device", "ck/checkpoint1.pt.tmp"),
        TRAIN, ["ck", "--save-dir", "space"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("error", "request_", "parts"), KNOWN.values(), ids=KNOWN)
def test_a_known_failure_is_one_sentence(
    error: Exception, request_: Request, parts: list[str]
) -> None:
    sentence = explain(caught(error), request_) or ""
    assert [part for part in parts if part not in sentence] == []
    assert "\n" not in sentence
    assert len(sentence) < 400


@pytest.mark.parametrize(("error", "request_", "parts"), KNOWN.values(), ids=KNOWN)
def test_and_the_same_one_from_another_process(
    error: Exception, request_: Request, parts: list[str]
) -> None:
    error = caught(error)
    text = "".join(traceback.format_exception(error))
    raised = ProcessRaisedException(
        f"\n\n-- Process 1 terminated with the following error:\n{text}", 1, 1234
    )
    assert explain(raised, request_) == explain(error, request_)
    worker = f"Caught {type(error).__name__} in DataLoader worker process 0.\nOriginal {text}"
    assert explain(type(error)(worker), request_) == explain(error, request_)


@pytest.mark.parametrize(
    ("request_", "next_step"),
    [(TRAIN, "; run the same command again to resume from the last checkpoint"), (GENERATE, "")],
)
def test_a_process_that_was_killed(
    request_: Request, next_step: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ProcessExitedException) as error:
        torch.multiprocessing.start_processes(_kill, nprocs=2, start_method="fork")
    assert explain(error.value, request_) == (
        "Process 1 of this command ended with SIGKILL, often because the machine is out of "
        f"memory{next_step}."
    )
    # torch says which processes it ends
    assert caplog.records != [] and not any(map(logs.is_shown, caplog.records))


def _kill(number: int) -> None:
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


TOO_LONG_IS_HANDLED = TypeError("unsupported operand")
TOO_LONG_IS_HANDLED.__context__, TOO_LONG_IS_HANDLED.__suppress_context__ = TOO_LONG, True
BUGS = [
    KeyError("best"),
    AssertionError("assert [] == [1]"),
    FileNotFoundError(errno.ENOENT, "No such file or directory", "/usr/lib/fairseq/x.so"),
    TOO_LONG_IS_HANDLED,
    RuntimeError("Read error: Broken pipe"),  # not about other ranks
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)"),
]


@pytest.mark.parametrize("error", BUGS, ids=str)
@pytest.mark.parametrize(
    "request_", [TRAIN, GENERATE, Request()], ids=["train", "generate", "none"]
)
def test_a_bug_is_not_explained_away(error: Exception, request_: Request) -> None:
    assert explain(caught(error), request_) is None
    text = "".join(traceback.format_exception(error))
    assert explain(ProcessRaisedException(f"\n\n-- Process 0:\n{text}", 0, 1), request_) is None
