"""A checkpoint that does not fit the command."""

from __future__ import annotations

import re
from typing import Any

from lightseq_fairseq.base import families
from lightseq_fairseq.base.families import PREFIX
from lightseq_fairseq.cli.checks import Request, checkpoints, sizes
from lightseq_fairseq.cli.checks.failures.cause import Cause
from lightseq_fairseq.cli.checks.failures.known import Known, Rule, checkpoint, data_folder
from lightseq_fairseq.cli.words.argv import flag_of, is_given

_MISMATCH = re.compile(
    r"size mismatch for (\S+): copying a param with shape torch\.Size\(\[([\d, ]*)\]\) from "
    r"checkpoint, the shape in current model is torch\.Size\(\[([\d, ]*)\]\)"
)
_VOCABULARY = ("embed_tokens.weight", "output_projection.weight")
_ITS_DICTIONARIES = (
    "use the data folder that it was trained on, or binarise the data with its dictionaries "
    "(lightseq-preprocess --srcdict, --tgtdict)."
)


def _state_dict(failure: Cause, request: Request) -> str | None:
    if not failure.text.startswith("Error(s) in loading state_dict"):
        return None
    where = checkpoint(request)
    mismatches = _MISMATCH.findall(failure.text)
    for name, saved, built in mismatches:
        saved_words, *saved_width = saved.split(", ")
        built_words, *built_width = built.split(", ")
        if name.endswith(_VOCABULARY) and saved_width == built_width:
            side = "source " if name.startswith("encoder") else "target "
            side = "" if families.has_prompts(getattr(request.args, "task", None)) else side
            return (
                f"The dictionary does not match {where}: the {side}dictionary in "
                f"{data_folder(request)} has {built_words} words{_added(request)}, but the "
                f"checkpoint was trained with {saved_words}; {_ITS_DICTIONARIES}"
            )
    if (others := _other_family(request)) is not None:
        return f"{where[:1].upper()}{where[1:]} {others}"
    if mismatches:
        name, saved, built = mismatches[0]
        difference = f"{name} is [{saved}] in the checkpoint and [{built}] in this model"
    else:
        difference = " ".join(failure.text.split("\n", 1)[-1].split())[:200]
    arch = _other_arch(request)
    flags = [_positions(name, saved, request) for name, saved, _ in mismatches]
    if arch is not None:
        remedy = f"this folder has a run of --arch {arch}: use its --arch and sizes"
    elif flags and None not in flags:
        remedy = "set " + " ".join(flag for flag in dict.fromkeys(flags) if flag)
    else:
        remedy = "use the --arch and the sizes that it was trained with"
    return (
        f"The model does not match {where} ({difference}): {remedy}, or start a new run in "
        "another --save-dir."
    )


def _other_family(request: Request) -> str | None:
    """Says that the checkpoint with which training begins is of another family than --arch."""
    from lightseq_fairseq.fairseq_compat.checkpoints import settings_of
    from lightseq_fairseq.plugins.conditions import family_of

    if request.command != "train":
        return None
    flag, path = checkpoints.initial(request.args)
    trained = settings_of(checkpoints.saved(path), "model")
    saved = str(trained.get("arch") or trained.get("_name")).removeprefix(PREFIX)
    asked = request.args.arch.removeprefix(PREFIX)
    its, ours = (family_of(PREFIX + arch) for arch in (saved, asked))
    if its is None or ours is None or its == ours:
        return None
    start = "another --save-dir" if flag == "--save-dir" else f"another {flag}"
    return (
        f"is of the family {its.name} (--arch {saved}), but --arch {request.args.arch} is of the "
        f"family {ours.name}: use an arch of its family, or {start}."
    )


def _added(request: Request) -> str:
    """Says which words the task adds to the dictionary file."""
    name = getattr(request.args, "task", None)
    task = families.tasks().get(name or "")
    adds = task is not None and "<mask>" in task.symbols
    return f" with those that --task {name} adds, such as <mask>" if adds else ""


def _other_arch(request: Request) -> str | None:
    """The arch of the run in --save-dir, if this run would resume it with another one."""
    from lightseq_fairseq.fairseq_compat.checkpoints import settings_of

    if request.command != "train":
        return None
    start, path = checkpoints.initial(request.args)
    trained = settings_of(checkpoints.saved(path), "model")
    arch = str(trained.get("arch") or trained.get("_name") or "").removeprefix(PREFIX)
    if start != "--save-dir" or arch in ("", request.args.arch.removeprefix(PREFIX)):
        return None
    return PREFIX * request.args.arch.startswith(PREFIX) + arch


def _positions(name: str, saved: str, request: Request) -> str | None:
    """The flag that gives a model the positions of the checkpoint; None for another parameter.

    fairseq takes their number from the length of a block unless the flag of the model is given.
    """
    if (setting := sizes.of_positions(name)) is None:
        return None
    flag = flag_of(setting)
    if hasattr(request.args, "tokens_per_sample") and not is_given(request.argv, (flag,)):
        flag = "--tokens-per-sample"
    return f"{flag} {sizes.number_of_positions(int(saved.partition(',')[0]))}"


def _fewer_batches(found: re.Match[str], request: Request) -> str:
    """fairseq's error about a position in the epoch that the data do not have."""
    from lightseq_fairseq.fairseq_compat.checkpoints import settings_of

    of_blocks, block = "", getattr(request.args, "tokens_per_sample", None)
    if block is not None:
        path = checkpoints.initial(request.args)[1]
        trained = settings_of(checkpoints.saved(path), "task").get("tokens_per_sample")
        if trained not in (None, block):
            of_blocks = f"--tokens-per-sample {trained} (not {block}), "
    return (
        f"This run cannot resume from {checkpoint(request)}, because an epoch has fewer batches "
        f"now than the checkpoint has already trained on: use its data, {of_blocks}--max-tokens, "
        "--batch-size and --pack-tokens, or begin again at the first epoch with --reset-dataloader."
    )


def _joined_dictionary(found: re.Match[str], request: Request) -> str:
    """fairseq's error about --share-all-embeddings, which may come from the checkpoint."""
    if getattr(request.args, "path", None) is None:
        return (
            f"{found[1]} needs a joined dictionary, but {data_folder(request)} has two: binarise "
            f"the data with lightseq-preprocess --joined-dictionary, or remove {found[1]}."
        )
    return (
        f"The source and the target dictionary in {data_folder(request)} differ, but "
        f"{checkpoint(request)} was trained with one joined dictionary: {_ITS_DICTIONARIES}"
    )


def _missing(found: re.Match[str], request: Request) -> str:
    flag = "--lm-path" if found[1] == getattr(request.args, "lm_path", None) else "--path"
    return f"The checkpoint {found[1]} does not exist: check {flag}."


def _no_update(found: re.Match[str], request: Request) -> str:
    """fairseq's loop over the updates of an epoch has had no iteration."""
    if getattr(request.args, "skip_remainder_batch", False):
        return (
            "The epoch has no update left, because fewer batches than --update-freq remain "
            "and --skip-remainder-batch skips them: lower --update-freq, or remove "
            "--skip-remainder-batch."
        )
    return (
        f"The epoch in which {checkpoint(request)} was saved has no update left with this "
        f"--update-freq: use the previous --update-freq until the epoch ends, or begin again "
        f"at the first epoch with --reset-dataloader."
    )


def _other_part(found: re.Match[str], request: Request) -> str:
    """fairseq compares the classes; that of an optimizer depends on the precision, too."""
    from lightseq_fairseq.fairseq_compat.checkpoints import settings_of

    part = found[1].lower()
    is_optimizer = part == "optimizer"
    file = checkpoints.saved(checkpoints.initial(request.args)[1])

    def named(settings: dict[str, Any], common: dict[str, Any]) -> str:
        name = settings.get("_name") or settings.get(part)
        precision = next((kind for kind in ("bf16", "fp16", "amp") if common.get(kind)), "fp32")
        return f"--{part} {name}" + f" in {precision}" * is_optimizer

    args = {name: value for name, value in vars(request.args).items() if name != "_name"}
    asked, saved = named(args, args), named(settings_of(file, part), settings_of(file, "common"))
    of_adam = "ls_adam resumes from adam in any precision. " * saved.startswith("--optimizer adam ")
    return (
        f"This run uses {asked}, but {checkpoint(request)} was saved with {saved}: use its "
        f"{part}{' and precision' * is_optimizer}, or begin a new run in another --save-dir. "
        f"{of_adam}With --reset-optimizer, the state of "
        "the optimizer, the number of updates and the warm-up begin again."
    )


RULES: tuple[Rule, ...] = (
    _state_dict,
    Known(r"(--share-\S+) requires a joined dictionary", _joined_dictionary),
    Known(
        "Model file not found: $",
        "--path contains an empty file name: remove the colon before or after it.",
    ),
    Known("Model file not found: (.*)", _missing),
    Known(
        "",
        "This run cannot resume from {checkpoint}, which was saved with another learning-rate "
        "schedule: use its --lr-scheduler, or begin a new schedule with --reset-lr-scheduler.",
        kind="KeyError",
        source="lr_scheduler",
    ),
    Known("Cannot resume training due to dataloader mismatch", _fewer_batches),
    Known(".*'valid_losses'", _no_update, kind="UnboundLocalError"),
    Known(
        r"(Criterion|Optimizer) does not match; please reset the optimizer "
        r"\(--reset-optimizer\)\.\s+(\S+) vs (\S+)",
        _other_part,
    ),
)
