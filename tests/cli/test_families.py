"""A new family whose data and criteria are known is one module and one record in ``families``."""

from __future__ import annotations

import subprocess
from argparse import Namespace
from pathlib import Path

import helpers.cli_runs as cli_runs
import pytest
import torch
from helpers import forked_commands

from lightseq_fairseq.base import families
from lightseq_fairseq.base.families import FAMILIES, named
from lightseq_fairseq.plugins import conditions

# fairseq's part (a task, a dataset and a model), then our model and our batches of the dataset.
MODULE = """
from fairseq.data import MonolingualDataset
from fairseq.models import register_model
from fairseq.models.transformer_lm import TransformerLanguageModel, TransformerLanguageModelConfig
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingConfig, LanguageModelingTask

from lightseq_fairseq.base import families
from lightseq_fairseq.plugins.language_model import LSTransformerLanguageModel
from lightseq_fairseq.training.batch.text import PackingText


class Verses(MonolingualDataset):
    pass


@register_task("verses", dataclass=LanguageModelingConfig)
class VersesTask(LanguageModelingTask):
    def load_dataset(self, split, **options):
        super().load_dataset(split, **options)
        self.datasets[split].__class__ = Verses

    @classmethod
    def setup_dictionary(cls, *arguments, **options):
        words, output = super().setup_dictionary(*arguments, **options)
        words.add_symbol("<verse>")
        return words, output

    def train_step(self, *arguments, **options):
        return super().train_step(*arguments, **options)


@register_model("poet", dataclass=TransformerLanguageModelConfig)
class Poet(TransformerLanguageModel):
    pass


class PackingVerses(PackingText):
    @staticmethod
    def packs(dataset):
        return type(dataset) is Verses


@register_model("ls_poet", dataclass=TransformerLanguageModelConfig)
class LSPoet(LSTransformerLanguageModel):
    family = families.FAMILIES[-1]
    packed_logits = LSTransformerLanguageModel.packed_logits

    def __init__(self, decoder):
        super().__init__(decoder)
        print("our poet")

    def forward(self, *arguments, **options):
        print("forward")
        return super().forward(*arguments, **options)
"""
RECORD = """
from lightseq_fairseq.base import families
families.FAMILIES += (families.Family(
    "poets", "poet:Poet", "poet:LSPoet", "verses", "--task verses",
    (families.Task(
        "verses", "poet:VersesTask", "verses",
        families.Recipe(
            "--optimizer ls_adam", "--criterion ls_cross_entropy", "--lr 0.01",
            max_tokens=96, update_freq=1, updates=3,
        ),
        ("setup_task", "load_dataset"),
        criteria=("ls_cross_entropy", "cross_entropy"), unread=("--shorten-method",),
        adds_losses=True, prompts=True, dictionaries={"source": "dict.txt"}, symbols=("<verse>",),
    ),),
    ("poet:PackingVerses",),
    supports=("--encoder-layers-to-keep",), generates=True,
    exports=True, not_ctranslate2="CTranslate2 reads no verses.",
),)
"""
SIZES = [word for word in cli_runs.SMALL_TEXT if word not in ("--max-tokens", "128")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verses")
    (folder / "poet.py").write_text(MODULE)
    return folder


@pytest.fixture(scope="module")
def data(folder: Path) -> Path:
    return cli_runs.binarise_text(folder)


def run(folder: Path, command: str, *words: object) -> subprocess.CompletedProcess[str]:
    """lightseq-<command> with the record of the poets, whose module is in ``folder``."""
    place, program = f"lightseq_fairseq.cli.{command}", f"lightseq-{command.replace('_', '-')}"
    code = f"from {place} import main\nmain({[*map(str, words)]!r}, prog_name={program!r})"
    return run_code(folder, code)


def run_code(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    python = forked_commands.python(f"import sys; sys.path.append({str(folder)!r})\n{RECORD}")
    return subprocess.run([python, "-c", code], capture_output=True, text=True)


def succeed(folder: Path, command: str, *words: object) -> str:
    """As ``run``; returns what the command prints."""
    done = run(folder, command, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def trained(folder: Path, data: Path) -> tuple[Path, str]:
    """A checkpoint of our poet, and the log of its training."""
    words = [data, "--arch", "ls_poet", *SIZES, "--task", "verses", "--save-dir", folder / "run"]
    log = succeed(folder, "train", *words, "--shorten-method", "truncate")
    return folder / "run" / "checkpoint_last.pt", log


def test_a_new_family_trains(trained: tuple[Path, str]) -> None:
    last, log = trained
    assert "--max-tokens 96" in log and "--max-update 3" in log  # the recipe
    assert "step: without CUDA graphs, without padding" in log
    assert "note: --shorten-method has no effect" in log
    assert torch.load(last, weights_only=False)["cfg"]["model"]["_name"] == "poet"


def test_a_new_family_is_evaluated(folder: Path, data: Path, trained: tuple[Path, str]) -> None:
    words = (data, "--task", "verses", "--path", trained[0])
    log = succeed(folder, "validate", *words, "--valid-subset", "valid")
    assert "our poet" in log and "| valid | " in log
    log = succeed(folder, "eval_lm", *words, "--gen-subset", "valid", "--tokens-per-sample", "16")
    assert "our poet" in log and "Perplexity" in log
    assert "forward" not in log  # the scores of our scorer, not fairseq's


def test_a_new_family_continues_prompts(
    folder: Path, data: Path, trained: tuple[Path, str]
) -> None:
    flags = "--gen-subset valid --batch-size 2 --prefix-size 1 --max-len-b 4"
    words = (data, "--task", "verses", "--path", trained[0], *flags.split())
    words = (*words, "--sample-break-mode", "eos")
    log = succeed(folder, "generate", *words)
    assert "our poet" in log and "H-0" in log
    assert "forward" not in log and "BLEU" not in log  # our search; the targets are the prompts
    done = run(folder, "generate", *words, "--replace-unk")
    sentence = "--replace-unk cannot be used with a language model"
    assert done.returncode == 2 and sentence in done.stderr, done.stderr


def test_a_new_family_is_exported(folder: Path, trained: tuple[Path, str]) -> None:
    succeed(folder, "export", trained[0], "--to", "safetensors", "--output", folder / "export")
    assert (folder / "export" / "dict.txt").is_file()
    done = run(folder, "export", trained[0], "--to", "ctranslate2")
    assert done.returncode and "CTranslate2 reads no verses." in done.stderr, done.stderr


def test_a_new_family_can_be_documented(folder: Path) -> None:
    code = """
from lightseq_fairseq.base import families
from scripts import flags
section = flags.Section(families.FAMILIES[-1], {"train": ("--dataset-impl",)}, "", {})
print(*flags.family_settings(section))
"""
    found = run_code(folder, code).stdout.split()
    assert {"--dataset-impl", "--tokens-per-sample", "--decoder-layers"} <= {*found}
    assert "--clip-norm" not in found


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--task verses --criterion ls_masked_lm", "use --criterion ls_cross_entropy."),
        ("--task translation", "--arch ls_poet trains on verses, but --task translation provides"),
        ("--task verses --pack-tokens", "but --arch ls_poet trains on other data"),
        ("--task verses --fp8", "--fp8 needs --bf16"),  # our layers, whatever the family
    ],
)
def test_a_new_family_refuses_what_does_not_fit(
    folder: Path, data: Path, tmp_path: Path, words: str, sentence: str
) -> None:
    line = [data, "--arch", "ls_poet", *SIZES, *words.split(), "--save-dir", tmp_path]
    done = run(folder, "train", *line)
    assert done.returncode == 2 and sentence in done.stderr, done.stderr


def test_the_records_name_classes_that_exist() -> None:
    for family in FAMILIES:
        assert issubclass(named(family.ours), named(family.native or family.ours)), family.name
        assert named(family.ours).family is family
        for place in family.batches:
            assert named(place).__name__.startswith("Packing")
    for name, task in families.tasks().items():
        assert all(hasattr(named(task.place), method) for method in task.loaders), name


def test_a_criterion_of_tokens_fits_several_families(monkeypatch: pytest.MonkeyPatch) -> None:
    criteria = ("ls_cross_entropy", "ls_of_verses")
    task = families.TRANSLATION.tasks[0]._replace(name="verses", criteria=criteria)
    new = families.TRANSLATION._replace(name="poets", tasks=(task,))
    monkeypatch.setattr(families, "FAMILIES", (*FAMILIES, new))
    refused = {
        name: conditions.is_criterion_of_other_families(
            Namespace(arch="ls_transformer", criterion=name)
        )
        for name in (*criteria, "ls_masked_lm", "ctc")
    }
    assert [name for name in refused if refused[name]] == ["ls_of_verses", "ls_masked_lm", "ctc"]


def test_a_task_has_one_record() -> None:
    """Commands know a task by its name alone."""
    named = [task for family in FAMILIES for task in family.tasks]
    assert all(families.tasks()[task.name] == task for task in named)
