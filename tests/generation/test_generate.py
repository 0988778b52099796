"""lightseq-generate and -interactive: where their lines go, the score, several processes, bad
input."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from helpers.cli_runs import SMALL, SPLITS, binarise, run, succeed
from helpers.searches import difference_of_lines
from sacrebleu.metrics import BLEU

# isort: split
import fairseq_cli.generate
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import OmegaConf

from lightseq_fairseq.cli.start import logs
from lightseq_fairseq.cli.translate import ahead
from lightseq_fairseq.cli.words.argv import one_process
from lightseq_fairseq.plugins import generator

COUNT = SPLITS["test"]
FLAGS = shlex.split("--cpu --beam 2 --batch-size 1 --max-len-b 5 --num-workers 0")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, a checkpoint, references, and a test set with unknown words."""
    place = tmp_path_factory.mktemp("place")
    binarise(place)
    limits = ["--max-source-positions", "15", "--max-target-positions", "15"]
    succeed("train", place / "data", "--arch", "ls_transformer_tiny", *SMALL, *limits,
            "--save-dir", place)  # fmt: skip
    (place / "new.de").write_text("w1 unheard w2\nof w3\n")
    (place / "new.en").write_text("v1 v2\nv3\n")
    succeed(
        "preprocess", "-s", "de", "-t", "en", "--destdir", place / "new", "--testpref",
        place / "new", "--srcdict", place / "data/dict.de.txt", "--tgtdict",
        place / "data/dict.en.txt",
    )  # fmt: skip
    return place


def generate(place: Path, *words: str | Path, data: str = "data") -> Result:
    checkpoint = place / "checkpoint_last.pt"
    return run("generate", place / data, "--path", checkpoint, *FLAGS, *words)


def sentences(text: str) -> list[str]:
    return [line for line in text.splitlines() if re.match(r"[A-Z]-\d+\t", line)]


def of_kind(text: str, kind: str) -> list[str]:
    """The first line of this kind for each sentence, in the order of the test set."""
    found: dict[int, str] = {}
    for label, *fields in (line.split("\t") for line in sentences(text)):
        if label.startswith(kind):
            found.setdefault(int(label[2:]), fields[-1])
    return [found[number] for number in sorted(found)]


def score_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("Generate ")]


def bleu(translations: list[str], references: list[str]) -> str:
    """sacrebleu's score, with two words that differ in place of the unknown ones."""
    metric = BLEU()
    translations = [text.replace("<unk>", "unknown") for text in translations]
    references = [text.replace("<<unk>>", "unseen") for text in references]
    score = metric.corpus_score(translations, [references])
    return str(score.format(width=2, signature=str(metric.get_signature())))


@pytest.fixture(scope="module")
def plain(place: Path) -> str:
    """Its output without options of ours."""
    result = generate(place, "--nbest", "2")
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def test_score_against_the_targets_of_the_data(plain: str) -> None:
    expected = bleu(of_kind(plain, "D"), of_kind(plain, "T"))
    said = "(references: the binarised targets)"
    assert score_lines(plain) == [f"Generate test with beam=2: {expected} {said}"]
    assert plain.endswith(f"{said}\n") and len(of_kind(plain, "D")) == COUNT
    assert len(sentences(plain)) == COUNT * (2 + 2 * 3)  # S and T; H, D and P of two hypotheses


@pytest.mark.parametrize("flags", ["", "--prefix-size 1"])
def test_windows_of_batches_as_on_a_gpu(
    place: Path, plain: str, monkeypatch: pytest.MonkeyPatch, flags: str
) -> None:
    """Batches that are searched together print what they print one by one."""
    if flags:
        plain = generate(place, "--nbest", "2", *flags.split()).stdout
    asked: list[int] = []
    search = generator.LSSequenceGenerator._search

    def counted(self: Any, batches: Any) -> None:
        asked.append(len(batches))
        search(self, batches)

    monkeypatch.setattr(generator.LSSequenceGenerator, "_search", counted)
    monkeypatch.setattr(generator, "TOGETHER", ("cpu",))
    monkeypatch.setattr(ahead, "WINDOW", 3)
    printed = generate(place, "--nbest", "2", *flags.split()).stdout
    assert not difference_of_lines(
        *([line.split("\t") for line in sentences(text)] for text in (printed, plain)), 1e-4
    )
    assert score_lines(printed) == score_lines(plain)
    assert sum(asked) == COUNT and max(asked) == 3


def test_score_against_a_file(place: Path, plain: str, tmp_path: Path) -> None:
    reference = tmp_path / "reference"
    reference.write_text("".join(f"{line}\n" for line in reversed(of_kind(plain, "D"))))
    printed = generate(place, "--reference", reference).stdout
    (line,) = score_lines(printed)
    (tmp_path / "out").write_text(printed)
    ours = succeed("score", "--sys", tmp_path / "out", "--reference", reference)
    assert line == f"Generate test with beam=2: {ours.strip()} (references: {reference})"


def test_output(place: Path, plain: str, tmp_path: Path) -> None:
    result = generate(place, "--nbest", "2", "--output", tmp_path / "out")
    assert result.exit_code == 0
    written = (tmp_path / "out").read_text()
    assert written.splitlines() == [*sentences(plain), *score_lines(plain)]
    assert sentences(result.stdout) == [] and score_lines(result.stdout) == score_lines(plain)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_output_through_a_link_or_a_pipe(place: Path, plain: str, tmp_path: Path) -> None:
    target, link, pipe = (tmp_path / name for name in ("target", "link", "pipe"))
    target.write_text("old")
    link.symlink_to(target)
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE, text=True) as reader:
        for path in (link, pipe):
            assert generate(place, "--nbest", "2", "--output", path).exit_code == 0
        read = reader.communicate(timeout=60)[0]
    assert link.is_symlink() and pipe.is_fifo()
    assert target.read_text() == read
    assert read.splitlines() == [*sentences(plain), *score_lines(plain)]


def test_results_path_is_fairseq_s(place: Path, plain: str, tmp_path: Path) -> None:
    generate(place, "--nbest", "2", "--results-path", tmp_path / "new")
    written = (tmp_path / "new" / "generate-test.txt").read_text()
    assert sentences(written) == sentences(plain)
    result = generate(place, "--results-path", tmp_path, "--output", tmp_path / "out")
    assert result.exit_code == 2 and "--output and --results-path cannot" in result.stderr
    assert not (tmp_path / "out").exists()


def test_quiet(place: Path, plain: str) -> None:
    printed = generate(place, "--quiet").stdout
    assert sentences(printed) == [] and score_lines(printed) == score_lines(plain)


def test_fairseq_s_score_where_it_is_asked_for(place: Path, plain: str, tmp_path: Path) -> None:
    printed = generate(place, "--scoring", "bleu", "--output", tmp_path / "out").stdout
    assert score_lines((tmp_path / "out").read_text()) == score_lines(printed)
    native, ours = score_lines(printed)
    assert native.startswith("Generate test with beam=2: BLEU4 = ")
    assert [ours] == score_lines(plain)


def test_two_processes_print_what_one_prints(place: Path) -> None:
    batches = ("--batch-size", "2", "--required-batch-size-multiple", "1")  # three of them
    one = generate(place, *batches)
    two = generate(place, *batches, "--distributed-world-size", "2")
    assert two.exit_code == 0, (two.output, two.exception)
    assert sentences(two.stdout) == sentences(one.stdout)
    assert score_lines(two.stdout) == score_lines(one.stdout)
    assert f"Translated {COUNT} sentences" in two.stdout


def test_more_processes_than_batches(place: Path, plain: str) -> None:
    """Each process also has a data loading worker; nothing is left to clean up at the end."""
    command = [sys.executable, "-m", "lightseq_fairseq.cli.generate", str(place / "data")]
    command += ["--path", str(place / "checkpoint_last.pt"), "--distributed-world-size", "2"]
    done = subprocess.run(
        [*command, *shlex.split("--cpu --beam 2 --max-len-b 5")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert sorted(of_kind(done.stdout, "D")) == sorted(of_kind(plain, "D"))
    assert "leaked" not in done.stderr


def test_a_failure_of_one_of_them(place: Path, tmp_path: Path) -> None:
    result = generate(
        place, "--distributed-world-size", "2", "--path", "gone.pt", "--output", tmp_path / "out"
    )
    assert result.exit_code == 2 and "gone.pt does not exist" in result.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_one_shard_as_in_fairseq(place: Path, plain: str) -> None:
    shards = [
        sentences(generate(place, *shlex.split(f"--nbest 2 --distributed-world-size 2 "
                                               f"--distributed-rank {rank}")).stdout)
        for rank in range(2)
    ]  # fmt: skip
    assert len(shards[0]) == len(shards[1])
    assert sorted(itertools.chain(*shards)) == sorted(sentences(plain))


@pytest.mark.parametrize("flags", ["", "--native", "--distributed-world-size 2"])
def test_unknown_words_are_told(place: Path, flags: str) -> None:
    """Also if the printed words are joined from several tokens."""
    result = generate(place, "--remove-bpe", "sentencepiece", *flags.split(), data="new")
    note = (
        "2 of the 5 source tokens are not in the dictionary and were read as <unk>: a few rare "
        "ones are usual. If there are many, prepare the text as the training data were prepared."
    )
    assert result.exit_code == 0 and note in result.stderr
    assert "S-0\tw1<unk>w2\n" in result.stdout
    assert "not in the dictionary" not in generate(place).stderr


@pytest.mark.parametrize("flags", ["", "--remove-bpe"])
def test_no_warning_about_the_score_of_fairseq(
    place: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, flags: str
) -> None:
    """fairseq warns that its score is not sacrebleu's; ours is."""
    (tmp_path / "codes").write_text("#version: 0.2\nw 1\n")
    words = ["--bpe", "subword_nmt", "--bpe-codes", tmp_path / "codes", *flags.split()]
    result = generate(place, *words)
    assert result.exit_code == 0, result.stderr[-3000:]
    (false,) = (line for line in caplog.records if "--sacrebleu" in line.getMessage())
    assert not logs.is_shown(false)


def test_references_of_another_test_set(place: Path, tmp_path: Path) -> None:
    """They are counted before the translation."""
    (tmp_path / "short").write_text("v1\n")
    result = generate(place, "--reference", tmp_path / "short", "--output", tmp_path / "out")
    assert result.exit_code == 2 and not (tmp_path / "out").exists()
    assert f"short has 1 lines, but the split test of {place}" in result.stderr
    assert f"has {COUNT} sentences: use the references of this split.\n" in result.stderr


def test_what_is_refused_leaves_the_file_alone(place: Path, tmp_path: Path) -> None:
    out, latin = tmp_path / "out", tmp_path / "latin"
    out.write_text("of yesterday\n")
    latin.write_bytes("Straße\n".encode("latin-1"))
    for words, sentence in (
        ([], "the checkpoint does not exist"),
        (["--reference", latin], f"Line 1 of {latin} is not UTF-8 (byte 0xdf)"),
        (["--distributed-world-size", "2", "--scoring", "chrf"], "add --distributed-world-size 1"),
    ):
        path = [] if words else ["--path", tmp_path / "the checkpoint"]
        result = generate(place, *path, *words, "--output", out)
        assert result.exit_code == 2 and sentence in result.stderr.splitlines()[-1]
    result = generate(place, "--output", tmp_path / "no" / "out")
    assert result.exit_code == 2 and f"Cannot write {tmp_path}/no/out" in result.stderr
    result = generate(place, "--output", tmp_path)
    assert result.exit_code == 2 and f"Cannot write {tmp_path} (Is a dir" in result.stderr
    assert score_lines(result.stdout) == []  # refused before translating
    assert out.read_text() == "of yesterday\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latin", "out"]


def test_sigterm_leaves_no_file(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def terminated(cfg: Any) -> None:
        (path,) = tmp_path.iterdir()
        assert path.name.startswith("out.")
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(fairseq_cli.generate, "main", terminated)
    before = signal.getsignal(signal.SIGTERM)
    result = generate(place, "--output", tmp_path / "out")
    assert result.exit_code == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == [] and signal.getsignal(signal.SIGTERM) is before


def test_a_language_model_is_refused(place: Path, tmp_path: Path) -> None:
    dictionary = place / "data" / "dict.de.txt"
    (tmp_path / "dict.txt").write_text(dictionary.read_text())
    words = f"{tmp_path} --task language_modeling --arch transformer_lm --decoder-layers 1"
    args = options.parse_args_and_arch(
        options.get_training_parser(), shlex.split(f"{words} --decoder-embed-dim 16")
    )
    cfg = convert_namespace_to_omegaconf(args)
    model: Any = tasks.setup_task(cfg.task).build_model(cfg.model)
    state = {"args": None, "cfg": OmegaConf.to_container(cfg), "model": model.state_dict()}
    history = [{"optimizer_name": "adam", "lr_scheduler_state": {}}]
    torch.save({**state, "optimizer_history": history, "extra_state": {}}, tmp_path / "lm.pt")
    for command in ("generate", "interactive"):
        words = [place / "data", "--path", tmp_path / "lm.pt", "--cpu"]
        result = run(command, *words)
        assert result.exit_code == 2
        last = result.stderr.splitlines()[-1]
        assert "data contains sentence pairs (dict.de.txt, dict.en.txt), but" in last
        assert "lm.pt is a model of --task language_modeling, which reads running text" in last
        last = run(command, *words, "--task", "translation").stderr.splitlines()[-1]
        assert "--task translation cannot use" in last and "lm.pt" in last
        assert "no translation model but LSTransformerLanguageModel: " in last


# --- interactive


def interactive(place: Path, *words: str | Path, input: bytes | None = None) -> Result:
    flags = shlex.split("--cpu --beam 2 --max-len-b 5")
    return run(
        "interactive", place / "data", "--path", place / "checkpoint_last.pt", *flags, *words,
        input=input,
    )  # fmt: skip


def test_a_line_is_answered_at_once(place: Path) -> None:
    """The test talks to it through pipes, as another program would."""
    command = [sys.executable, "-m", "lightseq_fairseq.cli.interactive", str(place / "data")]
    command += ["--path", str(place / "checkpoint_last.pt"), "--cpu", "--beam", "2"]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        env=environment,
    ) as process:  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        for number, line in enumerate(("w1 w2", "", "w3")):
            process.stdin.write(f"{line}\n")
            answer = iter(process.stdout.readline, "")
            assert next(text for text in answer if text.startswith("S-")) == f"S-{number}\t{line}\n"
            assert any(text.startswith(f"P-{number}\t") for text in answer)
        process.stdin.close()
        assert process.wait() == 0


def test_lines_that_are_searched_together(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = tmp_path / "lines"
    lines.write_text("w1 w2 w3\nw4\nw2 w5 w1 w3 w6\nw3 w3\n")
    words = "--input", lines, "--buffer-size", "4", "--batch-size", "1"
    apart = interactive(place, *words).stdout
    monkeypatch.setattr(generator, "TOGETHER", ("cpu",))
    found = interactive(place, *words).stdout
    fields = ([line.split("\t") for line in sentences(text)] for text in (found, apart))
    fields = ([line for line in each if line[0][:2] != "W-"] for each in fields)
    assert not difference_of_lines(*fields, 1e-4) and len(of_kind(found, "D")) == 4


def test_a_folder_with_the_dictionaries_alone(place: Path, tmp_path: Path) -> None:
    """As somebody gets it who gets a model: the languages are those of the checkpoint."""
    arch = "--arch", "ls_transformer_tiny", "-s", "de", "-t", "en"
    succeed("train", place / "data", *arch, *SMALL, "--save-dir", tmp_path)
    for name in ("dict.de.txt", "dict.en.txt"):
        (tmp_path / name).write_bytes((place / "data" / name).read_bytes())
    (tmp_path / "lines").write_text("w1 w2\n")
    words = "--path", tmp_path / "checkpoint_last.pt", "--input", tmp_path / "lines", "--cpu"
    found = [succeed("interactive", data, *words) for data in (tmp_path, place / "data")]
    assert of_kind(found[0], "D") == of_kind(found[1], "D") != []


def test_bad_lines(place: Path, tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    lines.write_text("w1 unheard\nw2\n" + "w3 " * 30 + "\n")
    result = interactive(place, "--input", lines)
    assert result.exit_code == 2 and len(of_kind(result.stdout, "H")) == 2
    note, error = result.stderr.splitlines()[-2:]
    assert "1 of the 3 source tokens is not in the dictionary and was read" in note
    assert note.endswith("add --bpe subword_nmt --bpe-codes FILE --remove-bpe.")
    assert "Sentence 2 (counted from 0) has 31 tokens, but the model takes at most 15" in error
    lines.write_bytes("w1\nStraße\n".encode("latin-1"))
    for source, name in ((lines, lines), ("-", "standard input")):
        for native in ([], ["--native"]):
            words = ["--input", source, *native]
            result = interactive(place, *words, input=lines.read_bytes())
            assert result.exit_code == 2 and of_kind(result.stdout, "S") == ["w1"]
            assert f"Line 2 of {name} is not UTF-8 (byte 0xdf)" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize("flags", ["", "--native", "--buffer-size 2 --batch-size 2"])
def test_unknown_words_of_lines(place: Path, tmp_path: Path, flags: str) -> None:
    (tmp_path / "lines").write_text("w1 unheard w2\nof w3\n")
    words = ["--input", tmp_path / "lines", "--remove-bpe", "sentencepiece", *flags.split()]
    result = interactive(place, *words)
    note = "2 of the 5 source tokens are not in the dictionary"
    assert result.exit_code == 0 and note in result.stderr
    assert of_kind(result.stdout, "S") == ["w1<unk>w2", "<unk>w3"]


def test_one_process_reads_the_input() -> None:
    assert one_process(["a", "--", "b"]) == ["a", "--distributed-world-size", "1", "--", "b"]
    given = ["a", "--distributed-world-size=2"]
    assert one_process(given) == given
