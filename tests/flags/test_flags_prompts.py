"""With every flag of generation, our language models give the same text as fairseq's own."""

from __future__ import annotations

import functools
import shlex
from pathlib import Path

import helpers.cli_runs as cli_runs
import helpers.counting as counting
import helpers.digits as digits
import pytest
from helpers.cli_runs import succeed
from helpers.golden import matches, refusals
from test_generation_flags import assert_same, sentences

PLAIN = "--beam 4"
# Flags, each of which changes the output of PLAIN.
SEARCHES = {
    "greedy": "--beam 1",
    "beam-5-nbest": "--beam 5 --nbest 5",
    "lenpen-0.6": "--beam 4 --lenpen 0.3",
    "lenpen-2": "--beam 4 --lenpen 2",
    "unnormalized": "--beam 4 --unnormalized",
    "min-len": "--beam 4 --min-len 18",
    "max-len": "--beam 4 --max-len-a 1.2 --max-len-b 1",
    "shorter-than-prompts": "--beam 4 --nbest 4 --max-len-b 4",
    "unkpen": "--beam 4 --unkpen -4",
    "no-repeat-ngram": "--beam 4 --no-repeat-ngram-size 2 --prefix-size 2",
    "temperature": "--beam 4 --temperature 2",
    "match-source-len": "--beam 4 --match-source-len",
    "diverse-siblings": "--beam 4 --diversity-rate 2 --nbest 4",
    "score-reference": "--score-reference",
    "sampling": "--beam 2 --nbest 2 --seed 4 --sampling",
    "sampling-topk": "--beam 2 --nbest 2 --seed 4 --sampling --sampling-topk 3",
    "sampling-topp": "--beam 2 --nbest 2 --seed 4 --sampling --sampling-topp 0.8",
    "prefix": "--beam 4 --prefix-size 2",
    "fairseqs-checkpoint": "--beam 4 --path {theirs}",
    "ensemble": "--beam 4 --path {ours}:{theirs}",
    "fused-model": "--beam 4 --lm-path {theirs} --lm-weight 0.5",
    # With a larger beam, fairseq fails an assertion if a prompt begins with </s>.
    "bos": "--beam 1 --add-bos-token",
    "bos-prefix": "--beam 4 --add-bos-token --prefix-size 2",
    "batches": "--beam 4 --prefix-size 3 --batch-size 7 --required-batch-size-multiple 4",
    "blocks": "--beam 1 --sample-break-mode none --tokens-per-sample 9",
    "complete": "--beam 3 --nbest 3 --sample-break-mode complete --tokens-per-sample 15",
}


@functools.cache
def theirs() -> Path:
    """A checkpoint that fairseq's own training wrote."""
    toy = counting.toy()
    flags = {**counting.FLAGS, "max_update": 40, "no_save": None, "disable_validation": True}
    words = counting.command_line(toy.folder, counting.NATIVE, **flags)
    place = toy.folder / "theirs"
    succeed("train", *words, "--native", "--save-dir", place, "--no-epoch-checkpoints")
    return place / "checkpoint_last.pt"


@functools.cache
def output(command: str, flags: str, native: bool) -> list[list[str]]:
    """The lines that a command prints for its prompts, split into fields; without times."""
    toy = counting.toy()
    words = ["--task", "language_modeling", "--path", toy.path, "--cpu"]
    if command == "generate":
        words += ["--dataset-impl", "raw", "--num-workers", "0", "--sample-break-mode", "eos"]
        if "--batch-size" not in flags:
            words += ["--max-tokens", "200"]
    if "--max-len-b" not in flags:
        words += ["--max-len-b", "30"]
    given = flags.format(ours=toy.path, theirs=theirs(), folder=toy.folder)
    text = succeed(command, toy.folder, *words, *shlex.split(given), *["--native"] * native)
    lines = [line.split("\t") for line in text.splitlines()]
    return [fields for fields in lines if fields[0][:2] in {f"{kind}-" for kind in "STHDP"}]


@pytest.mark.parametrize("flags", SEARCHES.values(), ids=SEARCHES)
def test_generate(flags: str) -> None:
    native = output("generate", flags, True)
    assert_same(output("generate", flags, False), native)
    assert len(set(sentences(native))) > 30
    assert native != output("generate", PLAIN, True)


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--nbest 3 --lenpen 0.3",
        "--beam 1 --no-repeat-ngram-size 2",
        "--buffer-size 64 --batch-size 16",
        "--buffer-size 500 --max-tokens 100 --min-len 5",
        "--buffer-size 500 --batch-size 30 --max-len-a 1 --max-len-b 3",
        "--path {theirs}",
    ],
)
def test_interactive(flags: str) -> None:
    """The prompts have all lengths, one is empty, and some words are not in the dictionary."""
    lines = (counting.toy().folder / "test").read_text().splitlines()[:35]
    assert "fivety" in " ".join(lines)
    cut = [" ".join(line.split()[: place % 7]) for place, line in enumerate(lines)]
    (counting.toy().folder / "prompts").write_text("".join(f"{line}\n" for line in cut))
    flags = f"--beam 3 --input {{folder}}/prompts {flags}"
    native = output("interactive", flags, True)
    assert_same(output("interactive", flags, False), native)
    assert set(sentences(native)) == set(range(len(cut)))
    for line, (_, _, words) in zip(cut, (f for f in native if f[0][0] == "D"), strict=False):
        known = [word if word in counting.WORDS else "<unk>" for word in line.split()]
        assert "--nbest" in flags or words.split()[: len(known)] == known


def test_two_processes_print_what_one_prints() -> None:
    two = output("generate", "--beam 4 --distributed-world-size 2", False)
    assert two == output("generate", PLAIN, False)


def test_scores_only_against_a_reference(tmp_path: Path) -> None:
    """Without --reference nothing is scored: the targets in the data are the prompts themselves."""
    toy = counting.toy()
    flags = "--task language_modeling --cpu --dataset-impl raw --num-workers 0 --batch-size 20"
    words = [toy.folder, "--path", toy.path, *flags.split(), "--sample-break-mode", "eos"]
    assert "Generate test" not in succeed("generate", *words)
    (tmp_path / "reference").write_text((toy.folder / "test").read_text())
    text = succeed("generate", *words, "--reference", tmp_path / "reference")
    assert "Generate test with beam=5: BLEU|" in text


@pytest.mark.parametrize("command", ["generate", "interactive"])
@pytest.mark.parametrize(("flags", "sentence"), refusals(__file__, "test_flags_prompts"))
def test_bad_input(command: str, flags: str, sentence: str) -> None:
    toy = counting.toy()
    words = f"--task language_modeling --path {toy.path} --cpu --dataset-impl raw "
    words += {
        "generate": "--sample-break-mode eos ",
        "interactive": f"--input {toy.folder}/valid ",
    }[command]
    words += flags.format(translation=digits.toy().paths[-1])
    result = cli_runs.run(command, toy.folder, *words.split())
    assert result.exit_code == 2, (result.output, result.exception)
    assert matches(result.stderr.splitlines()[-1], f"lightseq-{command}: error: {sentence}")
