"""Messages for exceptions of fairseq and torch."""

from __future__ import annotations

import argparse
import errno
import os
import signal
import time
import traceback
from collections.abc import Callable

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
MISSING_KEYS = """Error(s) in loading state_dict for TransformerModel:
\tMissing key(s) in state_dict: "encoder.layers.1.fc1.weight". """


def own() -> None:
    raise UserError("--magic is not supported: drop it.")


def dictionary() -> None:
    raise RuntimeError(EMBEDDING_MISMATCH)


def resume() -> None:
    try:
        dictionary()
    except Exception:
        raise Exception(  # noqa: B904  (fairseq hides the reason like this)
            "Cannot load model parameters from checkpoint ck/checkpoint_last.pt; "
            "please ensure that the architectures match."
        )


def width() -> None:
    raise RuntimeError(WIDTH_MISMATCH)


def layers() -> None:
    raise RuntimeError(MISSING_KEYS)


def positions() -> None:
    both = (f"{side}.embed_positions.weight: copying a param with shape torch.Size([{rows}, 64]) "
            "from checkpoint, the shape in current model is torch.Size([1026, 64])."
            for side, rows in (("encoder", 514), ("decoder", 258)))  # fmt: skip
    mismatches = "".join(f"\n\tsize mismatch for {each}" for each in both)
    raise RuntimeError(f"Error(s) in loading state_dict for TransformerModel:{mismatches}")


def too_long() -> None:
    raise Exception(
        "Size of sample #7 is invalid (=(np.int32(1501), np.int32(2))) since max_positions="
        "(1024, 1024), skip this example with --skip-invalid-size-inputs-valid-test"
    )


def no_split() -> None:
    raise FileNotFoundError("Dataset not found: valid (bin)")


def no_checkpoint() -> None:
    raise OSError("Model file not found: a.pt")


def other_optimizer() -> None:
    raise AssertionError(
        "Optimizer does not match; please reset the optimizer (--reset-optimizer). "
        "FP16Optimizer vs FairseqAdam"
    )


def fewer_batches() -> None:
    raise RuntimeError(
        "Cannot resume training due to dataloader mismatch, please report this to the fairseq "
        "developers. You can relaunch training with `--reset-dataloader` and it should work."
    )


def epoch_without_update() -> None:
    raise UnboundLocalError(
        "cannot access local variable 'valid_losses' where it is not associated"
    )


def own_flag_check() -> None:
    raise AssertionError("--sampling requires --nbest to be equal to --beam")


def no_optimizer() -> None:
    raise ValueError("optimizer is required!")


def too_many_ranks() -> None:
    raise AssertionError("world size is 4 but have 1 available devices")


def loss_scale() -> None:
    raise FloatingPointError(
        "Minimum loss scale reached (0.0001). Your loss is probably exploding. Try lowering the "
        "learning rate, using gradient clipping or increasing the batch size."
    )


def killed_worker() -> None:
    raise RuntimeError("DataLoader worker (pid 12) is killed by signal: Segmentation fault. ")


def worker_with_status() -> None:
    raise RuntimeError(
        "DataLoader worker (pid 12) exited unexpectedly with exit code 1. Details are lost due to "
        "multiprocessing. Rerunning with num_workers=0 may give better error trace."
    )


def ended_workers() -> None:
    raise RuntimeError("DataLoader worker (pid(s) 12, 13) exited unexpectedly")


def no_requests() -> None:
    raise ModuleNotFoundError("No module named 'requests'")


def no_network() -> None:
    raise OSError(  # as the class of requests is
        "HTTPSConnectionPool(host='files.com', port=443): Max retries exceeded with url: "
        "/gpt2_bpe/encoder.json (Caused by NameResolutionError(\"Failed to resolve 'files.com'\"))"
    )


class OutOfMemoryError(RuntimeError):
    """Has the name of torch.cuda's class."""


def memory() -> None:
    raise OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


def memory_of_a_kernel() -> None:
    raise RuntimeError("CUDA out of memory: lightseq cannot allocate 1.5e+09 more elements")


def gloo_has_lost_a_rank() -> None:
    raise RuntimeError(
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:4517: "
        "Connection reset by peer. This is typically caused by a remote worker hanging or bugs in "
        "the application. Check the logs of the remote worker."
    )


class DistBackendError(RuntimeError):
    """Has the name of torch.distributed's class."""


def nccl_has_lost_a_rank() -> None:
    raise DistBackendError(
        "NCCL error in: ProcessGroupNCCL.cpp:77, remote process exited or there was a network "
        "error, NCCL version 2.28\nncclRemoteError: A call failed possibly due to a network error "
        "or a remote process exiting prematurely."
    )


class DistStoreError(RuntimeError):
    """Has the name of torch.distributed's class."""


def ranks_have_not_come() -> None:
    raise DistStoreError("Timed out after 601 seconds waiting for clients. 1/2 clients joined.")


def named_file() -> None:
    raise FileNotFoundError(errno.ENOENT, "No such file or directory", "codes.bpe")


def read_only() -> None:
    raise PermissionError(errno.EACCES, "Permission denied", "ck/dummy")


def full_disk() -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "ck/checkpoint1.pt.tmp")


KNOWN: list[tuple[Callable[[], None], Request, list[str]]] = [
    (own, TRAIN, ["--magic is not supported: drop it."]),
    (dictionary, GENERATE, ["dictionary", "a.pt", "source", "24", "16", "--srcdict"]),
    (resume, TRAIN, ["dictionary", "ck/checkpoint_last.pt", "24", "16", "bin"]),
    (width, TRAIN, ["model", "[24, 64]", "[24, 32]", "arch", "--save-dir"]),
    (layers, TRAIN, ["model", "encoder.layers.1.fc1.weight", "arch"]),
    (positions, TRAIN, [": set --max-source-positions 512 --max-target-positions 256, or start"]),
    (too_long, GENERATE, ["Sentence 7", "(1501, 2)", "(1024, 1024)", "--skip-invalid-size-inputs"]),
    (no_split, TRAIN, ["valid", "bin", "lightseq-preprocess"]),
    (no_checkpoint, GENERATE, ["a.pt", "--path"]),
    (other_optimizer, TRAIN, ["FP16Optimizer", "FairseqAdam", "--reset-optimizer"]),
    (fewer_batches, TRAIN, ["ck/checkpoint_last.pt", "--pack-tokens", "--reset-dataloader"]),
    (epoch_without_update, TRAIN, ["ck/checkpoint_last.pt", "--update-freq", "--reset-dataloader"]),
    (own_flag_check, GENERATE, ["--sampling requires --nbest to be equal to --beam."]),
    (no_optimizer, TRAIN, ["--optimizer"]),
    (too_many_ranks, TRAIN, ["--distributed-world-size is 4", "1 GPU"]),
    (loss_scale, TRAIN, ["Minimum loss scale", "learning rate"]),
    (killed_worker, Request(), ["(pid 12) was killed (Segmentation fault), often"]),
    (worker_with_status, Request(), ["(pid 12) ended with status 1, often"]),
    (ended_workers, Request(), ["(pid 12, 13) ended, often"]),
    (no_requests, GENERATE, ["URL", "pip install requests"]),
    (no_network, TRAIN, ["files.com/gpt2_bpe/encoder.json", "--gpt2-encoder-json"]),
    (memory, TRAIN, ["out of memory", "--max-tokens"]),
    (memory_of_a_kernel, TRAIN, ["out of memory", "--max-tokens"]),
    (gloo_has_lost_a_rank, TRAIN, ["Another rank has ended", "its own log", "the same command"]),
    (nccl_has_lost_a_rank, GENERATE, ["Another rank has ended: its own log says why."]),
    (ranks_have_not_come, TRAIN, ["1 of 2 ranks", "601 seconds", "--distributed-init-method"]),
    (named_file, GENERATE, ["codes.bpe", "does not exist"]),
    (read_only, TRAIN, ["ck", "--save-dir"]),
    (full_disk, TRAIN, ["ck", "--save-dir", "space"]),
]
IDS = [failure.__name__ for failure, _, _ in KNOWN]


def caught(failure: Callable[[], None]) -> Exception:
    try:
        failure()
    except Exception as error:
        return error
    raise AssertionError


@pytest.mark.parametrize(("failure", "request_", "parts"), KNOWN, ids=IDS)
def test_a_known_failure_is_one_sentence(
    failure: Callable[[], None], request_: Request, parts: list[str]
) -> None:
    sentence = explain(caught(failure), request_) or ""
    assert [part for part in parts if part not in sentence] == []
    assert "\n" not in sentence
    assert len(sentence) < 400


@pytest.mark.parametrize(("failure", "request_", "parts"), KNOWN, ids=IDS)
def test_and_the_same_one_from_another_process(
    failure: Callable[[], None], request_: Request, parts: list[str]
) -> None:
    error = caught(failure)
    text = "".join(traceback.format_exception(error))
    raised = ProcessRaisedException(
        f"\n\n-- Process 1 terminated with the following error:\n{text}", 1, 1234
    )
    assert explain(raised, request_) == explain(error, request_)
    worker = f"Caught {type(error).__name__} in DataLoader worker process 0.\nOriginal {text}"
    assert explain(type(error)(worker), request_) == explain(error, request_)


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        (
            TRAIN,
            "Process 1 of this command ended with SIGKILL, often because the machine is out of "
            "memory; run the same command again to resume from the last checkpoint.",
        ),
        (
            GENERATE,
            "Process 1 of this command ended with SIGKILL, often because the machine is out of "
            "memory.",
        ),
    ],
)
def test_a_process_that_was_killed(
    request_: Request, sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    logs.set_up()
    with pytest.raises(ProcessExitedException) as error:
        torch.multiprocessing.start_processes(_kill, nprocs=2, start_method="fork")
    assert explain(error.value, request_) == sentence
    assert caplog.text == ""  # torch says which processes it ends


def _kill(number: int) -> None:
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def mistake() -> None:
    _ = {}["best"]


def own_assertion() -> None:
    assert [] == [1]


def foreign_file() -> None:
    raise FileNotFoundError(errno.ENOENT, "No such file or directory", "/usr/lib/fairseq/x.so")


def bug_while_handling() -> None:
    try:
        too_long()
    except Exception:
        raise TypeError("unsupported operand") from None


def read_error() -> None:
    raise RuntimeError("Read error: Broken pipe")  # not about other ranks


def shapes() -> None:
    raise RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)")


@pytest.mark.parametrize(
    "failure", [mistake, own_assertion, foreign_file, bug_while_handling, read_error, shapes]
)
@pytest.mark.parametrize(
    "request_", [TRAIN, GENERATE, Request()], ids=["train", "generate", "none"]
)
def test_a_bug_is_not_explained_away(failure: Callable[[], None], request_: Request) -> None:
    error = caught(failure)
    assert explain(error, request_) is None
    text = "".join(traceback.format_exception(error))
    assert explain(ProcessRaisedException(f"\n\n-- Process 0:\n{text}", 0, 1), request_) is None
