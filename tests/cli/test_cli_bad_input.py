"""Bad input ends in one sentence on stderr that says what to do, and exit status 2; no file
changes."""

from __future__ import annotations

import shlex
import shutil
import string
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import Result
from helpers.cli_runs import SMALL, SPLITS, binarise, digests, run, succeed
from helpers.golden import matches, titled

LS = "--arch ls_transformer_tiny"
NATIVE = "--arch transformer_tiny --optimizer adam"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with good data, bad data, checkpoints of both kinds and a truncated one."""
    place = tmp_path_factory.mktemp("place")
    binarise(place).rename(place / "bin")
    binarise(place / "other", words=5).rename(place / "other_words")
    for name, pattern in (
        ("no_dictionary", "dict.*"),
        ("no_train", "train.*"),
        ("no_valid", "valid.*"),
        ("one_side", "*.en.[bi]*"),
    ):
        shutil.copytree(place / "bin", place / name, ignore=shutil.ignore_patterns(pattern))
    for name, form in (("pieces", "\u2581{}"), ("subwords", "{}@@")):
        shutil.copytree(place / "bin", place / name)
        dictionary = place / name / "dict.en.txt"
        words = [line.split() for line in dictionary.read_text().splitlines()]
        dictionary.write_text("".join(f"{form.format(word)} {count}\n" for word, count in words))
    shutil.copytree(place / "bin", place / "two_valid")
    for path in (place / "bin").glob("valid.*"):
        shutil.copy(path, place / "two_valid" / path.name.replace("valid", "valid1"))
    shutil.copytree(place / "bin", place / "swapped_words")
    dictionary = place / "swapped_words" / "dict.de.txt"
    first, second, *others = dictionary.read_text().splitlines()
    dictionary.write_text("\n".join([second, first, *others]) + "\n")
    texts = [(f"--{split}pref", place / "text" / split) for split in SPLITS]
    succeed(
        "preprocess", "-s", "de", "-t", "en", "--destdir", place / "joined", "--joined-dictionary",
        *(word for pair in texts for word in pair),
    )  # fmt: skip
    shutil.copytree(place / "bin", place / "renamed_dictionaries")
    for language, name in (("de", "from"), ("en", "to")):
        dictionary = place / "renamed_dictionaries" / f"dict.{language}.txt"
        dictionary.rename(dictionary.with_name(f"{name}.txt"))
    (place / "latin1.de").write_bytes(b"caf\xe9\n" + b"un mot\n" * 20_000)
    (place / "latin1_later.de").write_bytes(b"un mot\n" * 20_000 + b"caf\xe9\n")
    (place / "text" / "train.latin1").write_bytes(b"0-0\n\xe9\n" + b"0-0\n" * 38)
    shutil.copytree(place / "bin", place / "raw", ignore=shutil.ignore_patterns("*.idx", "*.bin"))
    for split in SPLITS:
        (place / "raw" / f"{split}.de-en.de").write_bytes(b"w1\nw\xe9\n")
        (place / "raw" / f"{split}.de-en.en").write_bytes(b"v1\nv2\n")
    for name in ("latin1", "latin1_later"):
        (place / f"{name}.en").write_text("a word\n" * 20_001)
    (place / "dotted.tasks").mkdir()
    (place / "dotted.tasks" / "__init__.py").write_text("")
    (place / "tasks").mkdir()
    (place / "tasks" / "__init__.py").write_text(TASKS)
    (place / "empty").mkdir()
    (place / "labels" / "label").mkdir(parents=True)
    (place / "labels" / "label" / "dict.txt").write_text("yes 1\nno 1\n")
    (place / "a_file").write_text("text\n")
    (place / "twice").write_text("w1 3\nw1 2\n")
    (place / "half_lexicon").write_text("w1 v1\nw2\n")

    # 20 words, far more than the positions of the checkpoints below; an empty line; a single word.
    (place / "long.de").write_text(" ".join(["w1"] * 20) + "\n\nw2\n")
    (place / "long.en").write_text("v1\n\nv2\n")
    (place / "short.de").write_text("\nw2\n\n")
    (place / "short.en").write_text("\nv2\n\n")
    for name in ("long", "short"):
        succeed(
            "preprocess", "-s", "de", "-t", "en", "--destdir", place / name,
            "--srcdict", place / "bin/dict.de.txt", "--tgtdict", place / "bin/dict.en.txt",
            *(word for split in SPLITS for word in (f"--{split}pref", place / name)),
        )  # fmt: skip

    succeed(
        "preprocess", "--only-source", "--destdir", place / "running",
        *(word for x in ("train", "valid") for word in (f"--{x}pref", place / "text/train.de")),
    )  # fmt: skip

    positions = ["--max-source-positions", "15", "--max-target-positions", "15"]
    for name, data, kind in (
        ("ours", "bin", LS),
        ("native", "bin", NATIVE),
        ("shared", "joined", f"{LS} --share-all-embeddings"),
    ):
        succeed(
            "train", place / data, *kind.split(), *SMALL, *positions, "--save-dir", place / name
        )
    state = torch.load(place / "ours" / "checkpoint_last.pt", weights_only=False)
    torch.save({"model": state["model"]}, place / "weights.pt")
    state["model"]["decoder.layers.0.fc1.weight"].fill_(torch.nan)
    torch.save(state, place / "diverged.pt")
    (place / "damaged").mkdir()
    whole = (place / "ours" / "checkpoint_last.pt").read_bytes()
    (place / "damaged" / "checkpoint_last.pt").write_bytes(whole[: len(whole) // 2])
    return place


@pytest.fixture
def launch(place: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Result]:
    """Runs a line such as "train bin --lr 1" in `place`."""
    monkeypatch.chdir(place)

    def launch(line: str) -> Result:
        command, *words = shlex.split(line)
        return run(command, *words)

    return launch


TASKS = """
from fairseq.tasks import TASK_REGISTRY, register_task
from fairseq.tasks.translation import TranslationConfig, TranslationTask


class OwnDictionaries(TranslationTask):
    @classmethod
    def setup_task(cls, cfg, **kwargs):
        source, target = (cls.load_dictionary(f"{cfg.data}/{name}.txt") for name in ("from", "to"))
        cfg.source_lang, cfg.target_lang = "de", "en"
        return cls(cfg, source, target)


class NoSourceDictionary(TranslationTask):
    is_building = False

    def build_model(self, *args, **kwargs):
        self.is_building = True
        try:
            return super().build_model(*args, **kwargs)
        finally:
            self.is_building = False

    @property
    def source_dictionary(self):
        if not self.is_building:
            raise NotImplementedError
        return self.src_dict


if "own_dictionaries" not in TASK_REGISTRY:
    register_task("own_dictionaries", dataclass=TranslationConfig)(OwnDictionaries)
    register_task("no_source_dictionary", dataclass=TranslationConfig)(NoSourceDictionary)
"""
SIZE = " ".join(SMALL)
POSITIONS = "--max-source-positions 15 --max-target-positions 15"
TRAIN = f"train bin {LS} {SIZE} {POSITIONS}"
TRAIN_NATIVE = f"train bin {NATIVE} {SIZE} {POSITIONS}"
OURS = "--path ours/checkpoint_last.pt"
THEIRS = "--path native/checkpoint_last.pt --native"
OVERFLOW = "--memory-efficient-fp16 --fp16 --fp16-init-scale 1073741824 --min-loss-scale 536870912"
DRAWN = "--input text/test.de --sampling --nbest 5"
SHORT = "--max-len-b 3"
TRAIN_RUNNING = (
    "train running --task language_modeling --arch ls_transformer_lm --decoder-layers 1 "
    "--tokens-per-sample 16 --max-tokens 99 --max-update 1 --cpu"
)
TRAIN_TEXT = "train bin --task language_modeling --arch ls_transformer_lm"
SKIP = "--skip-invalid-size-inputs-valid-test"

BAD = [
    case for cases in titled(Path(__file__).with_name("bad_input.txt")).values() for case in cases
]


@pytest.mark.parametrize(("line", "sentence"), BAD, ids=[line for line, _ in BAD])
def test_bad_input_is_answered_with_one_sentence(
    place: Path, launch: Callable[[str], Result], line: str, sentence: str
) -> None:
    line = string.Template(line).substitute(globals())
    if line.startswith("train") and "--save-dir" not in line:
        line += " --save-dir not_yet_there"
    before = digests(place)
    result = launch(line)
    after = digests(place)
    assert result.exit_code == 2, (result.output, result.exception)
    command = line.split()[0]
    assert matches(result.stderr.splitlines()[-1], f"lightseq-{command}: error: {sentence}")
    assert "Traceback" not in result.output
    assert {path: after.get(path) for path in before} == before
    assert not (place / "out").exists()
    shutil.rmtree(place / "not_yet_there", ignore_errors=True)
    shutil.rmtree(place / "out", ignore_errors=True)


GOOD = [
    # Input that looks bad but works: sentences that training or --skip-... leaves out, empty lines,
    # batches of one token, 16-bit precision on a CPU, a schedule where nothing is trained.
    f"train short {LS} {SIZE} --batch-size 1",
    f"train short {NATIVE} {SIZE} --batch-size 1",
    f"train long {LS} {SIZE} {POSITIONS} {SKIP}",
    f"train bin {LS} {SIZE} --bf16",
    # off, as fairseq defines
    f"train bin {LS} {SIZE} --patience -3 --keep-best-checkpoints -2 --keep-last-epochs -1",
    # fairseq's default, given explicitly
    f"train bin {LS} {SIZE} --restore-file checkpoint_last.pt",
    f"train bin {LS} {SIZE} --report-accuracy --best-checkpoint-metric accuracy",
    f"train bin {LS} {SIZE} --update-epoch-batch-itr true",
    f"train two_valid {LS} {SIZE} --valid-subset valid,valid1",
    f"train swapped_words {LS} {SIZE} {POSITIONS} --finetune-from-model ours/checkpoint_last.pt",
    f"train renamed_dictionaries {LS} {SIZE} --user-dir tasks --task own_dictionaries",
    f"train bin --arch transformer_tiny --optimizer ls_adam --criterion cross_entropy {SIZE} "
    "--user-dir tasks --task no_source_dictionary",
    f"train bin {LS} {SIZE} --lr-scheduler manual --update2lr '{{\"1-2\":1,\"3\":0.1}}'",
    f"generate short {OURS} {SHORT}",
    f"generate short {OURS} {SHORT} --remove-bpe sentencepiece",
    f"generate long {OURS} {SHORT} {SKIP}",
    f"generate one_side {OURS} {SHORT}",
    f"interactive bin {OURS} {SHORT} --input short.de",
    f"interactive bin {OURS} {SHORT} --input long.de {SKIP}",
    f"validate short {OURS} --batch-size 1",
    f"validate short {OURS}",
    f"generate short {OURS} {SHORT} --lr-scheduler cosine --lr 7",
    f"interactive bin {OURS} {SHORT} --input short.de --lr-scheduler step --lr 7,8",
    f"validate short {OURS} --batch-size 1 --lr-scheduler step",
]  # fmt: skip


@pytest.mark.parametrize("line", GOOD, ids=[line.replace(SIZE, "") for line in GOOD])
def test_unusual_input_works(
    launch: Callable[[str], Result], tmp_path: Path, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    result = launch(line + (f" --save-dir {tmp_path}" if line.startswith("train") else " --cpu"))
    assert result.exit_code == 0, (result.output, result.exception)
    if "swapped_words" in line:
        assert "The source dictionary is not the one" in caplog.text
    sentences = {"generate short": 3, "generate long": 2, "interactive": 2}
    for start, count in sentences.items():
        if line.startswith(start):
            translated = [text for text in result.stdout.splitlines() if text.startswith("H-")]
            assert len(translated) == (3 if "short" in line else count)


@pytest.mark.parametrize(
    ("line", "noted"),
    [
        (f"generate subwords {OURS} {SHORT}", "use --remove-bpe without a value."),
        (f"generate pieces {OURS} {SHORT}", "use --remove-bpe sentencepiece."),
        (f"generate pieces {OURS} {SHORT} --remove-bpe sentencepiece", None),
        (f"generate bin {OURS} {SHORT}", None),
        (f"interactive subwords {OURS} {SHORT} --input short.de", None),
    ],
)
def test_bleu_of_subwords_is_noted(
    launch: Callable[[str], Result], line: str, noted: str | None
) -> None:
    said = [each for each in launch(f"{line} --cpu").stderr.splitlines() if "BLEU counts" in each]
    assert len(said) == (noted is not None)
    assert noted is None or (said[0].startswith("lightseq-generate: note:") and noted in said[0])
