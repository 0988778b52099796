"""A new family is one module and one record in ``families``; nothing else names it."""

from __future__ import annotations

import subprocess
from argparse import Namespace
from pathlib import Path

import helpers.cli_runs as cli_runs
import pytest
import torch
from helpers.interpreters import run_code

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
"""
RECORD = """
from lightseq_fairseq.base import families
families.FAMILIES += (families.Family(
    "poets", "poet:Poet", "poet:LSPoet", "verses", "--task verses",
    (families.Task(
        "verses", "poet:VersesTask", "verses", ("setup_task", "load_dataset"),
        families.Recipe(
            "--optimizer ls_adam", "--criterion ls_cross_entropy", "--lr 0.01",
            max_tokens=96, update_freq=1, updates=3,
        ),
        criteria=("ls_cross_entropy", "cross_entropy"), unread=("--shorten-method",),
        adds_losses=True,
    ),),
    ("poet:PackingVerses",),
    supports=("--encoder-layers-to-keep",),
),)
"""
SIZES = [word for word in cli_runs.SMALL_TEXT if word not in ("--max-tokens", "128")]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verses")
    (folder / "poet.py").write_text(MODULE)
    return cli_runs.binarise_text(folder)


def run(data: Path, command: str, *words: object) -> subprocess.CompletedProcess[str]:
    """lightseq-<command> with the record of the poets."""
    place, program = f"lightseq_fairseq.cli.{command}", f"lightseq-{command}"
    words = (data, *words)
    code = f"from {place} import main\nmain({[*map(str, words)]!r}, prog_name={program!r})"
    folder = next(path for path in (data, *data.parents) if (path / "poet.py").is_file())
    done: subprocess.CompletedProcess[str] = run_code(RECORD + code, path=(folder,))
    return done


def test_a_new_family_trains_and_is_evaluated(data: Path, tmp_path: Path) -> None:
    words = ["--arch", "ls_poet", *SIZES, "--task", "verses", "--save-dir", tmp_path]
    done = run(data, "train", *words, "--shorten-method", "truncate")
    log = done.stdout + done.stderr
    assert done.returncode == 0, log
    assert "--max-tokens 96" in log and "--max-update 3" in log  # the recipe
    assert "step: eager, packed tokens" in log
    assert "note: --shorten-method has no effect" in log
    last = tmp_path / "checkpoint_last.pt"
    saved = torch.load(last, weights_only=False)["cfg"]["model"]
    assert saved["_name"] == "poet"

    done = run(data, "validate", "--task", "verses", "--path", last, "--valid-subset", "valid")
    assert done.returncode == 0 and "our poet" in done.stdout, done.stdout + done.stderr
    assert "| valid | " in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--task verses --criterion ls_masked_lm", "use --criterion ls_cross_entropy."),
        ("--task translation", "--arch ls_poet trains on verses, but --task translation provides"),
    ],
)
def test_a_new_family_refuses_what_does_not_fit(
    data: Path, tmp_path: Path, words: str, sentence: str
) -> None:
    line = ["--arch", "ls_poet", *SIZES, *words.split(), "--save-dir", tmp_path]
    done = run(data, "train", *line)
    assert done.returncode == 2 and sentence in done.stderr, done.stderr


def test_the_records_name_classes_that_exist() -> None:
    for family in FAMILIES:
        assert issubclass(named(family.ours), named(family.native)), family.name
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
