"""Data that are missing, damaged or too long."""

from __future__ import annotations

import re

from lightseq_fairseq.base import utf8
from lightseq_fairseq.cli.checks import Request
from lightseq_fairseq.cli.checks.checkpoints import initial, saved
from lightseq_fairseq.cli.checks.failures.known import Known, Rule


def over_max_tokens(longest: int, max_tokens: int | None) -> str:
    """The message for a sentence of ``longest`` tokens, more than ``max_tokens`` of a batch."""
    return (
        f"The longest sentence has {longest} tokens, but --max-tokens (in validation "
        f"--max-tokens-valid) is {max_tokens}: raise it to {longest} or more, or remove such "
        f"sentences from the data."
    )


def _over_max_tokens(found: re.Match[str], request: Request) -> str:
    longest, most = map(int, found.groups())
    return _blocks(longest, request) or over_max_tokens(longest, most)


def _nothing_to_batch(found: re.Match[str], request: Request) -> str:
    sentences, shortest = map(int, found.groups())
    if sentences == 0:
        return "The split contains no sentences: binarise it again with lightseq-preprocess."
    return _blocks(shortest, request) or (
        f"Every sentence of the split is too long, and the shortest has {shortest} tokens: raise "
        "--max-tokens, and --max-source-positions and --max-target-positions if they are lower."
    )


def _blocks(size: int, request: Request) -> str | None:
    """The sentence for a block of running text with ``size`` tokens, more than --max-tokens.

    None: the data are no blocks, the command takes their length from a checkpoint, or --max-tokens
    is not why the block is too long.
    """
    args = request.args
    block, most = getattr(args, "tokens_per_sample", None), getattr(args, "max_tokens", None)
    is_sentence = getattr(args, "sample_break_mode", None) == "eos"
    if not block or is_sentence or request.command == "validate" or not most or size <= most:
        return None
    instead = f"{most} or less"
    if request.command == "train" and (path := initial(args)[1]) is not None:
        from lightseq_fairseq.fairseq_compat.checkpoints import settings_of

        trained = settings_of(saved(path), "task").get("tokens_per_sample")
        if trained and trained <= most:
            instead = f"{trained}, as in {path}"
    return (
        f"The text is read in blocks of --tokens-per-sample {block} tokens, but a batch has at "
        f"most --max-tokens {most}: set --tokens-per-sample {instead}, or raise --max-tokens to "
        f"{max(block, size)} or more."
    )


def _too_long(found: re.Match[str], request: Request) -> str:
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
    if size.isdigit() and (sentence := _blocks(int(size), request)) is not None:
        return sentence
    sides = " (source, target)" if "," in size else ""
    if alone := re.fullmatch(r"\((\d+), 0\)", size):  # a source without a target
        size, limit, sides = alone[1], re.sub(r"\((\d+), \d+\)", r"\1", limit), ""
    return (
        f"Sentence {index} (counted from 0) has {size} tokens{sides}, but the model takes at most "
        f"{limit}: shorten it, or skip such sentences with --skip-invalid-size-inputs-valid-test."
    )


def _unnamed_sets(found: re.Match[str], request: Request) -> str:
    """fairseq reports that validation sets are ignored, and stops."""
    sets = found[1].replace("'", "")
    return (
        f"The data folder has validation sets that --valid-subset does not name ({sets}): name "
        "them too, use all with --combine-valid-subsets, or ignore them with "
        "--ignore-unused-valid-subsets."
    )


RULES: tuple[Rule, ...] = (
    Known(r"Too long for a batch: (\d+) tokens, not (\d+)", _over_max_tokens),
    Known(r"No batch: (\d+) sentences, the shortest of (\d+) tokens", _nothing_to_batch),
    Known(
        r"Size of sample #(\d+) is invalid \(=(.+?)\) since max_positions=(.+?), skip this example",
        _too_long,
    ),
    Known(
        r"Dataset not found: (\S+) \((.*)\)",
        "{2} contains no split named {1}: binarise it with lightseq-preprocess, choose another "
        "split with --train-subset, --valid-subset or --gen-subset, or set --dataset-impl: raw if "
        "the split is plain text, mmap if it is binarised.",
    ),
    Known(
        "The dataset is empty",
        "There is no sentence to train on, because all are empty or too long: raise --max-tokens, "
        "and --max-source-positions and --max-target-positions if they are lower.",
    ),
    Known(
        "Could not infer language pair",
        "The names of the data files do not show the languages: set them with -s and -t.",
    ),
    Known(  # of another file than the texts, such as the codes of --bpe
        r"'utf-8' codec can't decode (.*?): ",
        utf8.failure("A file that the command reads", "{1}"),
        kind="UnicodeDecodeError",
    ),
    Known(r"Valid paths \[(.*)\] will be ignored", _unnamed_sets),
)
