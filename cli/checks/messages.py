"""Messages for known failures: the only module that interprets exceptions of fairseq and torch.

`explain` returns a sentence for a failure that the user can correct. For any other failure it
returns None, and the traceback is shown. A rule recognises a failure by the words of its message
or the file that raised it, never by a general type alone: a bug must not look like bad input.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable

from lightseq_fairseq.base import families
from lightseq_fairseq.base.errors import GPUHangs, UserError
from lightseq_fairseq.cli.checks import Request
from lightseq_fairseq.cli.checks.causes import Cause
from lightseq_fairseq.cli.words.command_lines import ended
from lightseq_fairseq.cli.words.defaults import is_given, value


def nothing_to_batch(sentences: int, shortest: int) -> str:
    """The message for a split of ``sentences`` sentences, none of which fits in a batch."""
    if sentences == 0:
        return "The split contains no sentences: binarise it again with lightseq-preprocess."
    return (
        f"Every sentence of the split is too long, and the shortest has {shortest} tokens: raise "
        f"--max-tokens, and --max-source-positions and --max-target-positions if they are lower."
    )


def over_max_tokens(longest: int, max_tokens: int | None) -> str:
    """The message for a sentence of ``longest`` tokens, more than ``max_tokens`` of a batch."""
    return (
        f"The longest sentence has {longest} tokens, but --max-tokens (in validation "
        f"--max-tokens-valid) is {max_tokens}: raise it to {longest} or more, or remove such "
        f"sentences from the data."
    )


def explain(error: BaseException, request: Request) -> str | None:
    """The message for ``error``, or None if it is not a known failure."""
    failure = Cause.of(error)
    if failure.kind in (UserError.__name__, GPUHangs.__name__):
        return failure.text
    for rule in _RULES:
        sentence = rule(failure, request)
        if sentence is not None:
            return sentence
    return None


# Flags for the start of a run; do not repeat them when the run is resumed.
BEGINNING = (
    *("--restore-file", "--finetune-from-model", "--reset-optimizer", "--reset-lr-scheduler"),
    *("--reset-dataloader", "--reset-meters"),
)

_MISMATCH = re.compile(
    r"size mismatch for (\S+): copying a param with shape torch\.Size\(\[([\d, ]*)\]\) from "
    r"checkpoint, the shape in current model is torch\.Size\(\[([\d, ]*)\]\)"
)
_VOCABULARY = ("embed_tokens.weight", "output_projection.weight")
_ITS_DICTIONARIES = (
    "use the data folder that it was trained on, or binarise the data with its dictionaries "
    "(lightseq-preprocess --srcdict, --tgtdict)."
)


def _checkpoint(request: Request) -> str:
    """The name for messages of the checkpoint that the command reads."""
    path = getattr(request.args, "path", None)
    if path is None:
        path = getattr(request.args, "restore_file", None)
        if path == "checkpoint_last.pt":
            path = os.path.join(getattr(request.args, "save_dir", ""), path)
            if not os.path.exists(path):  # a new run
                path = getattr(request.args, "finetune_from_model", None) or path
    return f"checkpoint {path}" if path else "the checkpoint"


def _data_folder(request: Request) -> str:
    return getattr(request.args, "data", None) or "the data folder"


def _joined_dictionary(failure: Cause, request: Request) -> str | None:
    """fairseq's error about --share-all-embeddings, which may come from the checkpoint."""
    found = re.match(r"(--share-\S+) requires a joined dictionary", failure.text)
    if found is None:
        return None
    if getattr(request.args, "path", None) is None:
        return (
            f"{found[1]} needs a joined dictionary, but {_data_folder(request)} has two: binarise "
            f"the data with lightseq-preprocess --joined-dictionary, or remove {found[1]}."
        )
    return (
        f"The source and the target dictionary in {_data_folder(request)} differ, but "
        f"{_checkpoint(request)} was trained with one joined dictionary: {_ITS_DICTIONARIES}"
    )


def _state_dict(failure: Cause, request: Request) -> str | None:
    if not failure.text.startswith("Error(s) in loading state_dict"):
        return None
    checkpoint = _checkpoint(request)
    mismatches = _MISMATCH.findall(failure.text)
    for name, saved, built in mismatches:
        saved_words, *saved_width = saved.split(", ")
        built_words, *built_width = built.split(", ")
        if name.endswith(_VOCABULARY) and saved_width == built_width:
            side = "source " if name.startswith("encoder") else "target "
            side = "" if families.has_prompts(getattr(request.args, "task", None)) else side
            return (
                f"The dictionary does not match {checkpoint}: the {side}dictionary in "
                f"{_data_folder(request)} has {built_words} words, but the checkpoint was trained "
                f"with {saved_words}; {_ITS_DICTIONARIES}"
            )
    if mismatches:
        name, saved, built = mismatches[0]
        difference = f"{name} is [{saved}] in the checkpoint and [{built}] in this model"
    else:
        difference = " ".join(failure.text.split("\n", 1)[-1].split())[:200]
    flags = [_positions(name, saved, request) for name, saved, _ in mismatches]
    if flags and None not in flags:
        remedy = "set " + " ".join(flag for flag in dict.fromkeys(flags) if flag)
    else:
        remedy = "use the --arch and the sizes that it was trained with"
    return (
        f"The model does not match {checkpoint} ({difference}): {remedy}, or start a new run in "
        "another --save-dir."
    )


def _positions(name: str, saved: str, request: Request) -> str | None:
    """The flag that gives a model the positions of the checkpoint; None for another parameter.

    fairseq takes their number from the length of a block unless the flag of the model is given.
    """
    found = re.search(r"(encoder|decoder|sentence_encoder)\.embed_positions\.weight$", name)
    if found is None:
        return None
    flag = {
        "encoder": "--max-source-positions",
        "decoder": "--max-target-positions",
        "sentence_encoder": "--max-positions",
    }[found[1]]
    if hasattr(request.args, "tokens_per_sample") and not is_given(request.argv, (flag,)):
        flag = "--tokens-per-sample"
    rows = int(saved.partition(",")[0])
    return f"{flag} {rows - 2}"  # the table has two more rows: for numbers up to the pad's, 1


_TOO_LONG = re.compile(
    r"Size of sample #(\d+) is invalid \(=(.+?)\) since max_positions=(.+?), skip this example"
)


def _too_long(failure: Cause, request: Request) -> str | None:
    found = _TOO_LONG.match(failure.text)
    if found is None:
        return None
    if found[2].startswith("{"):  # a size of each language pair; fairseq always names sentence 0
        pairs = re.findall(r"'(\S+?)': \((\d+), (\d+)\)", found[3])
        most = ", ".join(f"{source} and {target} in {pair}" for pair, source, target in pairs)
        return (
            "Sentences have more tokens than the model takes (source and target: "
            f"{most or found[3]}); the warnings above number them: shorten them, or skip such "
            "sentences with --skip-invalid-size-inputs-valid-test."
        )
    index = found[1]
    size, limit = (re.sub(r"np\.\w+\((\d+)\)", r"\1", text) for text in found.group(2, 3))
    sides = " (source, target)" if "," in size else ""
    return (
        f"Sentence {index} (counted from 0) has {size} tokens{sides}, but the model takes at most "
        f"{limit}: shorten it, or skip such sentences with --skip-invalid-size-inputs-valid-test."
    )


def _data(failure: Cause, request: Request) -> str | None:
    found = re.match(r"Dataset not found: (\S+) \((.*)\)", failure.text)
    if found:
        return (
            f"{found[2]} contains no split named {found[1]}: binarise it with lightseq-preprocess, "
            f"choose another split with --train-subset, --valid-subset or --gen-subset, or set "
            f"--dataset-impl: raw if the split is plain text, mmap if it is binarised."
        )
    if failure.text.startswith("The dataset is empty"):
        return (
            "There is no sentence to train on, because all are empty or too long: raise "
            "--max-tokens, and --max-source-positions and --max-target-positions if they are lower."
        )
    if failure.text.startswith("Could not infer language pair"):
        return "The names of the data files do not show the languages: set them with -s and -t."
    if failure.text.startswith(
        (
            "Incorrect dictionary format",
            "Duplicate word found when loading Dictionary",
            "Incorrect encoding detected in",
        )
    ):
        return f"A dictionary cannot be read: {ended(failure.text)}"
    return None


def _encoding(failure: Cause, request: Request) -> str | None:
    found = re.match(r"'utf-8' codec can't decode (.*?): ", failure.text)
    if failure.kind == "UnicodeDecodeError" and found is not None:
        what = found[1]
    elif failure.text.startswith("negative seek") and "file_chunker" in failure.source:
        what = "the beginning of a file"  # fairseq seeks the start of a character before it
    else:
        return None
    return f"The text is not UTF-8 ({what}): convert it to UTF-8, for example with iconv."


def _checkpoint_missing(failure: Cause, request: Request) -> str | None:
    found = re.match(r"Model file not found: (.*)", failure.text)
    if found is None:
        return None
    if not found[1]:
        return "--path contains an empty file name: remove the colon before or after it."
    flag = "--lm-path" if found[1] == getattr(request.args, "lm_path", None) else "--path"
    return f"The checkpoint {found[1]} does not exist: check {flag}."


def _resume(failure: Cause, request: Request) -> str | None:
    if failure.kind == "KeyError" and "lr_scheduler" in failure.source:
        return (
            f"This run cannot resume from {_checkpoint(request)}, which was saved with another "
            f"learning-rate schedule: use its --lr-scheduler, or begin a new schedule with "
            f"--reset-lr-scheduler."
        )
    if failure.text.startswith("Cannot resume training due to dataloader mismatch"):
        return (
            f"This run cannot resume from {_checkpoint(request)}, because an epoch has fewer "
            f"batches now than the checkpoint has already trained on: use its data, --max-tokens, "
            f"--batch-size and --pack-tokens, or begin again at the first epoch with "
            f"--reset-dataloader."
        )
    if failure.kind == "UnboundLocalError" and "'valid_losses'" in failure.text:
        # fairseq's loop over the updates of an epoch had no iteration.
        if getattr(request.args, "skip_remainder_batch", False):
            return (
                "The epoch has no update left, because fewer batches than --update-freq remain "
                "and --skip-remainder-batch skips them: lower --update-freq, or remove "
                "--skip-remainder-batch."
            )
        return (
            f"The epoch in which {_checkpoint(request)} was saved has no update left with this "
            f"--update-freq: use the previous --update-freq until the epoch ends, or begin again "
            f"at the first epoch with --reset-dataloader."
        )
    found = re.match(
        r"(Criterion|Optimizer) does not match; please reset the optimizer "
        r"\(--reset-optimizer\)\.\s+(\S+) vs (\S+)",
        failure.text,
    )
    if found is None:
        return None
    what, saved, asked = found.groups()
    return (
        f"This run uses {asked}, but {_checkpoint(request)} was saved with {saved}: use its "
        f"{what.lower()} and precision, or reset the optimizer with --reset-optimizer."
    )


def _min_len(failure: Cause, request: Request) -> str | None:
    """min_len exceeds the maximum length: an error of our search and of fairseq's."""
    if not failure.text.startswith("min_len cannot be larger than max_len"):
        return None
    return (
        "--min-len (or min_len in --eval-bleu-args) is larger than the maximum length of a "
        "translation: lower it, or raise --max-len-a or --max-len-b, at most to the model's number "
        "of positions."
    )


def _no_text(failure: Cause, request: Request) -> str | None:
    """--task language_modeling with a model that is no language model."""
    found = re.match(r"'(\w+)' object has no attribute 'supported_targets'", failure.text)
    if found is None:
        return None
    return (
        f"--task language_modeling cannot use {_checkpoint(request)}, which contains no language "
        f"model but {found[1]}: choose another checkpoint, or set --task to the task that this "
        "model was trained with."
    )


def _no_end(failure: Cause, request: Request) -> str | None:
    """fairseq's search has reached the maximum length, and no hypothesis has ended."""
    counted = re.match(r"(\d+) < \1$", failure.text)
    if counted is None or "sequence_generator.py" not in failure.source:
        return None
    return (
        "A sentence has no translation with a finite score: either training has diverged (use an "
        "earlier checkpoint), or --prefix-size meets an empty target sentence (remove that "
        "sentence)."
    )


def _search(failure: Cause, request: Request) -> str | None:
    if not failure.text.startswith(
        ("Provided Search parameters are mutually exclusive", "Target-side constraints were")
    ):
        return None
    return (
        "--sampling, --diverse-beam-groups, --diversity-rate, --match-source-len and --constraints "
        "each select another search: use only one of them."
    )


def _sampling(failure: Cause, request: Request) -> str | None:
    if failure.text.startswith("invalid multinomial distribution"):
        return (
            "--sampling finds no token to draw: raise --temperature, --sampling-topk or "
            "--sampling-topp, or lower --min-len."
        )
    if failure.text.startswith("selected index k out of range") and "search.py" in failure.source:
        return "--sampling-topk is larger than the target dictionary: lower it."
    return None


_PLAIN = re.compile(
    r"--[a-z]|Must specify|Please specify|Cannot combine|cannot use both --|"
    r"preprocessing\.py doesn't support|Minimum loss scale reached|"
    r"gradients are Nan/Inf in update|DiverseBeamSearch requires"
)


def _fairseq_says_it(failure: Cause, request: Request) -> str | None:
    """fairseq's own checks of flags whose message already says what is wrong."""
    if failure.kind in ("AssertionError", "ValueError", "FloatingPointError"):
        if _PLAIN.match(failure.text):
            return ended(failure.text)
        required = re.fullmatch(r"(\w+) is required!", failure.text)
        if required:
            flag = "--" + required[1].replace("_", "-")
            return f"{flag} is missing: add it (lightseq-train --fairseq-help lists its choices)."
        devices = re.fullmatch(
            r"world size is (\d+) but have (\d+) available devices", failure.text
        )
        if devices:
            visible = "1 GPU is" if devices[2] == "1" else f"{devices[2]} GPUs are"
            return (
                f"--distributed-world-size is {devices[1]}, but {visible} visible: lower it, or "
                f"start one process per rank with torchrun."
            )
    return None


def _unnamed_sets(failure: Cause, request: Request) -> str | None:
    """fairseq reports that validation sets are ignored, and stops."""
    found = re.match(r"Valid paths \[(.*)\] will be ignored", failure.text)
    if found is None:
        return None
    sets = found[1].replace("'", "")
    return (
        f"The data folder has validation sets that --valid-subset does not name ({sets}): name "
        "them too, use all with --combine-valid-subsets, or ignore them with "
        "--ignore-unused-valid-subsets."
    )


def _conflict(failure: Cause, request: Request) -> str | None:
    """An arch and a task define the same flag."""
    found = re.search(r"conflicting option strings?: (.*)", failure.text)
    if failure.kind != "ArgumentError" or found is None:
        return None
    arch, task = (getattr(request.args, name, None) for name in ("arch", "task"))
    arch, task = (
        arch or value(request.argv, ("--arch", "-a")),
        task or value(request.argv, ("--task",)),
    )
    return (
        f"--arch {arch} and --task {task} cannot be used together, because both define {found[1]} "
        "in this version of fairseq: change one of them."
    )


def _schedule(failure: Cause, request: Request) -> str | None:
    """fairseq's lr schedulers check their settings with assertions, often without a message."""
    inside = os.path.join("fairseq", "optim", "lr_scheduler") in failure.source
    if not inside or failure.kind not in ("AssertionError", "ValueError", "ZeroDivisionError"):
        return None
    says = failure.kind != "ZeroDivisionError" and " ".join(failure.text.split()).rstrip(".")
    reason = f" ({says})" if says else ""
    return (
        f"The settings of --lr-scheduler {getattr(request.args, 'lr_scheduler', '')} do not fit "
        f"together{reason}: change one of them (--fairseq-help explains each)."
    )


def _arch(failure: Cause, request: Request) -> str | None:
    if (
        failure.kind == "RuntimeError"
        and not failure.text
        and failure.source.endswith("options.py")
    ):
        return "--arch is missing: add it, for example --arch ls_transformer_wmt_en_de."
    return None


def _metric(failure: Cause, request: Request) -> str | None:
    metric = getattr(request.args, "best_checkpoint_metric", None)
    if failure.kind == "KeyError" and failure.text == repr(metric) and "train.py" in failure.source:
        return (
            f"--best-checkpoint-metric {metric} is not measured in validation: use loss, nll_loss "
            f"or ppl, or bleu with --eval-bleu."
        )
    return None


def _heads(failure: Cause, request: Request) -> str | None:
    """The model width is not a multiple of the heads: an error of our layers and of fairseq's."""
    if re.match(
        r"embed_dim (\d+ is not a multiple of|must be divisible by) num_heads", failure.text
    ):
        return (
            "The width of a layer is not a multiple of its number of attention heads: change "
            "--encoder-attention-heads or --encoder-embed-dim, or --decoder-attention-heads or "
            "--decoder-embed-dim."
        )
    return None


def _user_dir(failure: Cause, request: Request) -> str | None:
    path = getattr(request.args, "user_dir", None) or value(request.argv, ("--user-dir",))
    if path is None or failure.kind != "ModuleNotFoundError":
        return None
    package = os.path.basename(os.path.abspath(path)).partition(".")[0]
    if failure.text != f"No module named '{package}'":
        return None
    return (
        f"--user-dir {path} is not a Python package: use a folder that Python can import, without "
        f"a dot in its name."
    )


def _download(failure: Cause, request: Request) -> str | None:
    """fairseq downloads a file, and there is no network."""
    found = re.search(r"Pool\(host='([^']+)'.* with url: (\S+)", failure.text)
    if found is None:
        return None
    return (
        f"{found[1]}{found[2]} cannot be downloaded: check the network, or use local files (for "
        "--bpe gpt2 with --gpt2-encoder-json and --gpt2-vocab-bpe)."
    )


def _package(failure: Cause, request: Request) -> str | None:
    """fairseq's own message about a missing package."""
    if failure.kind not in ("ImportError", "ModuleNotFoundError"):
        return None
    if failure.text == "No module named 'requests'":
        return (
            "A file given by its URL (by default those of --bpe gpt2) is downloaded with the "
            "package requests, which is not installed: run pip install requests, or use local "
            "files."
        )
    found = re.search(r"Please install .*", " ".join(failure.text.split()))
    return ended(found[0]) if found else None


def _configuration(failure: Cause, request: Request) -> str | None:
    """A value that a component's configuration rejects."""
    found = re.match(r"In 'config': Could not find '(\w+)/(\w+)'", failure.text)
    if found is not None:  # fairseq registers the component without a configuration
        flag = "--" + found[1].replace("_", "-")
        return (
            f"{flag} {found[2]} cannot be used, because this version of fairseq has no "
            f"configuration for it: choose another {flag}."
        )
    found = re.match(r"Missing mandatory value: (?:\w+\.)*(\w+)\n", failure.text)
    if found is not None:  # of a tokenizer or a BPE that the command builds
        return f"--{found[1].replace('_', '-')} is missing, but this command needs it: add it."
    found = re.match(r"Error merging override (\w+)\.(\w+)=(.*)", failure.text)
    if found is None:
        return None
    component, name, value = found[1], found[2].replace("_", "-"), found[3].strip("'")
    if value == "null":
        return f"--{name} is missing, but this --{component.replace('_', '-')} needs it: add it."
    return f"--{name} cannot be {value}: use a value that --fairseq-help allows."


_WORKER = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) "
    r"(?:is killed by signal: ([^.]+)|exited unexpectedly(?: with exit code (\d+))?)"
)


def _worker(failure: Cause, request: Request) -> str | None:
    found = _WORKER.match(failure.text)
    if found is None:
        return None
    pid, signal, status = found.groups()
    how = (
        f"was killed ({signal})" if signal else f"ended with status {status}" if status else "ended"
    )
    return (
        f"A process that loads data (pid {pid}) {how}, often because the machine is out of memory: "
        f"lower --num-workers or --data-buffer-size{_resumes(request)}."
    )


# Messages of gloo, NCCL and the rendezvous store if another rank is gone.
_GONE = re.compile(
    r"Connection (closed|reset) by peer|Connection was likely closed|Broken pipe|Socket Timeout|"
    r"Read(ing)? error|Write error|ncclRemoteError|ncclSystemError|remote process exited|"
    r"NCCL communicator was aborted|Timed out waiting \d+ ?ms for (send|recv)|"
    r"failed to (recv|send), got|connectFullMesh failed"
)
_NOT_COME = re.compile(r"Timed out after (\d+) seconds waiting for clients\. (\d+)/(\d+)")


def _rank(failure: Cause, request: Request) -> str | None:
    """Errors of a rank if other ranks have ended or have never connected."""
    if failure.kind == "ProcessExitedException":  # of processes that this one has started
        found = re.match(r"process (\d+) terminated with (?:signal |exit code )(\w+)", failure.text)
        if found is None:
            return None
        how = f"with {found[2]}" if found[2].startswith("SIG") else f"with status {found[2]}"
        why = ", often because the machine is out of memory" if found[2] == "SIGKILL" else ""
        return f"Process {found[1]} of this command ended {how}{why}{_resumes(request)}."
    by_gloo = failure.kind == "RuntimeError" and "gloo" in failure.text.lower()
    if not by_gloo and failure.kind not in (
        "DistBackendError",
        "DistNetworkError",
        "DistStoreError",
    ):
        return None
    if found := _NOT_COME.search(failure.text):
        return (
            f"Only {found[2]} of {found[3]} ranks connected within {found[1]} seconds: give all "
            "ranks the same --distributed-init-method, or the same MASTER_ADDR and MASTER_PORT; "
            "the logs of the missing ranks say why they did not connect."
        )
    if _GONE.search(failure.text):
        return f"Another rank has ended: its own log says why{_resumes(request)}."
    return None


def _resumes(request: Request) -> str:
    """The end of a sentence that tells a user of lightseq-train how to continue."""
    if not hasattr(request.args, "max_update"):
        return ""
    return "; run the same command again to resume from the last checkpoint"


def _memory(failure: Cause, request: Request) -> str | None:
    # Allocations of our kernels raise a RuntimeError with only this message.
    if failure.kind == "OutOfMemoryError" or failure.text.startswith("CUDA out of memory"):
        return (
            "The GPU is out of memory: lower --max-tokens (in training, raise --update-freq by the "
            "same factor to keep the batch size, or add --checkpoint-activations instead), or "
            "choose a smaller model."
        )
    return None


_REASONS = {
    errno.ENOENT: "does not exist",
    errno.EACCES: "cannot be opened (permission denied)",
    errno.EPERM: "cannot be opened (not permitted)",
    errno.EISDIR: "is a folder, not a file",
    errno.ENOTDIR: "has a file in place of a folder in its path",
    errno.EEXIST: "exists already",
    errno.EROFS: "is on a read-only file system",
    errno.ENOSPC: "is on a full disk",
}


def _files(failure: Cause, request: Request) -> str | None:
    """A file that the user named, or a file in the checkpoint folder of training."""
    if failure.kind == "FileExistsError" and failure.errno is None:  # lightseq-preprocess
        return (
            f"{failure.text} exists already: choose another --destdir, or use that dictionary with "
            f"--srcdict or --tgtdict."
        )
    if failure.kind == "FileNotFoundError" and failure.filename is None and failure.errno is None:
        name, number = failure.text, errno.ENOENT  # --user-dir, raised with the path alone
    elif found := re.fullmatch(r"file (.*) not found", failure.text):  # a model of --bpe
        name, number = found[1], errno.ENOENT
    else:
        name, number = failure.filename or "", failure.errno or 0
    if number not in _REASONS or not name:
        return None
    read = getattr(request.args, "path", None)  # None in training
    save_dir = getattr(request.args, "save_dir", None)
    is_read = number == errno.ENOENT and any(
        _lies_in(name, path) for path in _named_paths(request) if path != save_dir
    )
    in_save_dir = save_dir and (_lies_in(name, save_dir) or _lies_in(save_dir, name))
    if read is None and in_save_dir and not is_read:
        reason = os.strerror(number).lower()
        return f"Checkpoints cannot be written to {save_dir} ({reason}): choose another --save-dir."
    if name in (read or "").split(os.pathsep):
        return f"The checkpoint {name} {_REASONS[number]}: check --path."
    if any(_lies_in(name, path) for path in _named_paths(request)):
        return f"{name} {_REASONS[number]}: check the path on the command line."
    return None


def _lies_in(name: str, path: str) -> bool:
    """Whether ``name`` is ``path``, is below it, or is ``path`` followed by a dot and more."""
    name, path = os.path.abspath(name), os.path.abspath(path)
    return name == path or name.startswith((path + os.sep, path + "."))


def _named_paths(request: Request) -> list[str]:
    words = [word.partition("=")[2] if word.startswith("-") else word for word in request.argv]
    return [part for word in words for part in re.split("[:,]", word) if part]


_RULES: tuple[Callable[[Cause, Request], str | None], ...] = (
    _state_dict,
    _joined_dictionary,
    _too_long,
    _data,
    _encoding,
    _checkpoint_missing,
    _resume,
    _min_len,
    _no_text,
    _no_end,
    _search,
    _sampling,
    _unnamed_sets,
    _fairseq_says_it,
    _conflict,
    _schedule,
    _arch,
    _metric,
    _heads,
    _user_dir,
    _download,
    _package,
    _configuration,
    _worker,
    _rank,
    _memory,
    _files,
)
