"""A fairseq translation project that is moved to this package by three ls_ prefixes passes
fairseq's tests.

fairseq tests its commands by training small models on random words and translating with them
(``TestTranslation``). Here the same is done with ``lightseq-train`` and the other commands.
"""

from __future__ import annotations

import logging
import random
import shlex
from pathlib import Path

import pytest
import torch
from click.testing import Result
from helpers.cli_runs import run, succeed
from helpers.searches import difference_of_lines

# isort: split
import fairseq

LANGUAGES = ("in", "out")
SPLITS = {"train": 60, "valid": 20, "test": 20}
LONGEST = 10
LS = (
    "--optimizer ls_adam --criterion ls_label_smoothed_cross_entropy --label-smoothing 0.1 "
    "--lr 0.05 --clip-norm 1"
)
SMALL = (
    "--encoder-layers 2 --decoder-layers 2 --encoder-embed-dim 8 --decoder-embed-dim 8 "
    "--encoder-ffn-embed-dim 16 --decoder-ffn-embed-dim 16 --encoder-attention-heads 2 "
    "--decoder-attention-heads 2"
)
TRAINING = "--max-epoch 1 --max-tokens 500 --num-workers 0 --cpu --no-epoch-checkpoints"
GENERATION = "--beam 3 --max-tokens 500 --max-len-b 5 --no-progress-bar --num-workers 0 --cpu"
LANGUAGE_TOKENS = [
    f"{encoder} {decoder}".strip()
    for encoder in ("", "--encoder-langtok src", "--encoder-langtok tgt")
    for decoder in ("", "--decoder-langtok")
]
BOTH_WAYS = "--lang-pairs in-out,out-in"
EXPERTS = (
    f"--task translation_moe --user-dir {Path(fairseq.__file__).parent}/examples/translation_moe/"
    "translation_moe_src --method hMoElp --mean-pool-gating-network --num-experts 3"
)


class Project:
    """A folder with random words in two languages, and the files made from them."""

    def __init__(self, folder: Path, preprocess: str = "") -> None:
        self.folder = folder
        rng = random.Random(0)
        text = folder / "text"
        text.mkdir(parents=True)
        for split, count in SPLITS.items():
            lengths = [rng.randint(1, LONGEST) for _ in range(count)]
            for language in LANGUAGES:
                lines = (" ".join(rng.choices("abcdefghijklmnopqrst", k=n)) for n in lengths)
                (text / f"{split}.{language}").write_text("".join(f"{line}\n" for line in lines))
            pairs = (" ".join(f"{rng.randrange(n)}-{rng.randrange(n)}" for _ in range(n))
                     for n in lengths)  # fmt: skip
            (text / f"{split}.align").write_text("".join(f"{line}\n" for line in pairs))
        prefixes = [word for split in SPLITS for word in (f"--{split}pref", text / split)]
        languages = shlex.split("-s in -t out")
        succeed("preprocess", *languages, *prefixes, "--destdir", self.data, *preprocess.split())

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoints" / "checkpoint_last.pt"

    def command(self, name: str, flags: str) -> Result:
        if name == "train":
            where: list[str | Path] = ["--save-dir", self.checkpoint.parent]
        else:
            where = ["--path", self.checkpoint]
        return run(name, self.data, *where, *shlex.split(flags))

    def train(self, flags: str = "", arch: str = "ls_transformer_iwslt_de_en") -> None:
        result = self.command("train", f"--arch {arch} {LS} {SMALL} {TRAINING} {flags}")
        assert result.exit_code == 0, (result.output, result.exception)
        assert self.checkpoint.is_file()

    def generate(self, flags: str = "") -> list[str]:
        """The hypotheses; every sentence of the test set must have one."""
        result = self.command("generate", f"{GENERATION} {flags}")
        assert result.exit_code == 0, (result.output, result.exception)
        found = [line for line in result.stdout.splitlines() if line.startswith("H-")]
        assert {int(line[2:].split("\t")[0]) for line in found} == set(range(SPLITS["test"]))
        assert result.stdout.splitlines()[-1].startswith("Generate test")
        return found

    def validate(self, flags: str = "") -> None:
        result = self.command("validate", f"--max-tokens 500 --num-workers 0 --cpu {flags}")
        assert result.exit_code == 0, (result.output, result.exception)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = Project(tmp_path_factory.mktemp("project"))
    project.train()
    return project


def test_transformer(trained: Project) -> None:
    trained.validate()
    assert len(trained.generate()) == SPLITS["test"]


def test_raw_text(tmp_path: Path) -> None:
    project = Project(tmp_path, "--dataset-impl raw")
    project.train("--dataset-impl raw")
    project.generate("--dataset-impl raw")


def test_update_freq(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.train("--update-freq 3")
    project.generate()


def test_max_positions(tmp_path: Path) -> None:
    project = Project(tmp_path)
    result = project.command(
        "train",
        f"--arch ls_transformer_iwslt_de_en {LS} {SMALL} {TRAINING} --max-target-positions 5",
    )
    assert result.exit_code == 2
    assert "--skip-invalid-size-inputs-valid-test" in result.stderr.splitlines()[-1]
    skipping = "--skip-invalid-size-inputs-valid-test"
    project.train(f"--max-target-positions 5 {skipping}")
    result = project.command("generate", GENERATION)
    assert result.exit_code == 2 and skipping in result.stderr.splitlines()[-1]
    assert project.command("generate", f"{GENERATION} {skipping}").exit_code == 0


@pytest.mark.parametrize(
    "flags",
    [
        "--sampling --temperature 2 --beam 2 --nbest 2",
        "--sampling --sampling-topk 3 --beam 2 --nbest 2",
        "--sampling --sampling-topp 0.2 --beam 2 --nbest 2",
        "--diversity-rate 0.5 --beam 6",
        "--prefix-size 2",
        "--retain-dropout",
        "--score-reference --print-alignment",
    ],
)
def test_generation(trained: Project, flags: str) -> None:
    best = 2 if "--nbest 2" in flags else 1
    assert len(trained.generate(flags)) == best * SPLITS["test"]


def test_searches_that_exclude_each_other(trained: Project) -> None:
    flags = f"{GENERATION} --diverse-beam-groups 4 --match-source-len"
    assert trained.command("generate", flags).exit_code != 0


def test_eval_bleu(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    project = Project(tmp_path)
    project.train(
        "--eval-bleu --eval-bleu-print-samples --eval-bleu-remove-bpe --eval-bleu-detok space "
        """--eval-bleu-args '{"beam": 4, "min_len": 10}'"""
    )
    assert any(message.startswith("example hypothesis: ") for message in caplog.messages)
    assert any("| bleu " in message for message in caplog.messages if "valid" in message)


@pytest.mark.parametrize(
    ("tokens", "shared"),
    [
        ("--encoder-langtok tgt --decoder-langtok", ""),
        ("", "--share-all-embeddings --share-encoders"),
        ("", "--share-encoder-embeddings --share-decoders --share-decoder-embeddings"),
    ],
)
def test_multilingual_transformer(tmp_path: Path, tokens: str, shared: str) -> None:
    task = f"--task multilingual_translation {BOTH_WAYS} {tokens}"
    found = {}
    for native in ("", "--native"):
        project = Project(tmp_path / f"run{native}", "--joined-dictionary")
        flags = f"{task} {shared} --dropout 0 {native}"
        project.train(flags, arch="ls_multilingual_transformer")
        found[native] = torch.load(project.checkpoint, weights_only=False)["model"]
    assert found[""].keys() == found["--native"].keys()
    for name, value in found["--native"].items():
        # The gradient of the keys' biases is only rounding, which Adam scales up; the other buffer
        # is uninitialised.
        if not name.endswith(("k_proj.bias", "_float_tensor")):
            torch.testing.assert_close(found[""][name], value, rtol=1e-3, atol=1e-4, msg=name)
    project.validate(task)
    theirs = project.generate(f"{task} -s in -t out --native")
    lists = [[line.split("\t") for line in lines]
             for lines in (project.generate(f"{task} -s in -t out"), theirs)]  # fmt: skip
    assert not difference_of_lines(*lists, 1e-3)


@pytest.mark.parametrize("arch", ["ls_transformer", "ls_transformer_iwslt_de_en"])
def test_one_model_is_not_one_for_each_pair(tmp_path: Path, arch: str) -> None:
    project = Project(tmp_path)
    result = project.command(
        "train", f"--task multilingual_translation {BOTH_WAYS} --arch {arch} {LS} {TRAINING}"
    )
    assert result.exit_code == 2
    sentence = result.stderr.splitlines()[-1]
    assert "--task multilingual_translation" in sentence and "multilingual_transformer" in sentence


@pytest.mark.parametrize("tokens", LANGUAGE_TOKENS)
def test_translation_multi_simple_epoch(tmp_path: Path, tokens: str) -> None:
    project = Project(tmp_path, "--joined-dictionary")
    task = f"--task translation_multi_simple_epoch {BOTH_WAYS} {tokens}"
    sampling = "--sampling-method temperature --sampling-temperature 1.5 --virtual-epoch-size 100"
    project.train(f"{task} {sampling}", arch="ls_transformer")
    project.validate(task)
    project.generate(f"{task} -s in -t out")


def test_one_direction_of_a_multilingual_task(tmp_path: Path) -> None:
    project = Project(tmp_path, "--joined-dictionary")
    task = "--task translation_multi_simple_epoch --lang-pairs in-out"
    project.train(task, arch="ls_transformer")
    project.generate(f"{task} -s in -t out")


@pytest.mark.parametrize("flag", ["--no-cross-attention", "--cross-self-attention"])
def test_cross_self_attention_is_refused_by_name(tmp_path: Path, flag: str) -> None:
    project = Project(tmp_path)
    flags = f"--arch ls_transformer_iwslt_de_en {LS} {SMALL} {TRAINING} {flag}"
    result = project.command("train", flags)
    assert result.exit_code == 2 and flag in result.stderr.splitlines()[-1]
    assert not project.checkpoint.exists()


@pytest.mark.parametrize("arch", ["transformer_align", "ls_transformer_iwslt_de_en"])
def test_alignment(tmp_path: Path, arch: str) -> None:
    project = Project(tmp_path, "--align-suffix align")
    layer = "--alignment-layer 1" if arch == "transformer_align" else ""
    project.train(
        f"--load-alignments {layer} --criterion label_smoothed_cross_entropy_with_alignment", arch
    )
    project.validate()
    project.generate("--print-alignment")


def test_mixture_of_experts(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.train(EXPERTS)
    project.generate(f"{EXPERTS} --gen-expert 0")
