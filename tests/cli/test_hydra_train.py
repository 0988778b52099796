"""lightseq-hydra-train: configurations of fairseq-hydra-train as runs of lightseq-train."""

from __future__ import annotations

import logging
import re
import shlex
import string
from collections.abc import Iterator
from pathlib import Path

import helpers.cli_runs as cli_runs
import pytest
import yaml
from click.testing import Result
from fairseq import registry
from helpers.golden import matches, refusals

ARCH = "model._name"
OURS = f"{ARCH}=ls_transformer_iwslt_de_en"
RECIPE = """
common: {cpu: true, seed: 7, log_format: simple, log_interval: 1}
checkpoint: {no_save: true}
task: {_name: translation, data: "???", source_lang: de, target_lang: en}
criterion: {_name: label_smoothed_cross_entropy, label_smoothing: 0.2}
dataset: {max_tokens: 200, num_workers: 0}
optimizer: {_name: adam, adam_betas: [0.9, 0.98], weight_decay: 0.0}
lr_scheduler: {_name: polynomial_decay, warmup_updates: 2,
               total_num_update: "${optimization.max_update}"}
optimization: {lr: [0.001], max_update: 3, clip_norm: 0}
model: {_name: transformer_iwslt_de_en, encoder_layers: 1, decoder_layers: 1,
        encoder_embed_dim: 16, encoder_ffn_embed_dim: 16, share_decoder_input_output_embed: true}
"""


# A folder for common.user_dir: a component of each kind, most of them with a setting of its own.
USER = """
from dataclasses import dataclass

from fairseq.criterions import register_criterion
from fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterion, LabelSmoothedCrossEntropyCriterionConfig,
)
from fairseq.models import ARCH_CONFIG_REGISTRY, register_model_architecture
from fairseq.optim import register_optimizer
from fairseq.optim.adam import FairseqAdam, FairseqAdamConfig
from fairseq.optim.lr_scheduler import register_lr_scheduler
from fairseq.optim.lr_scheduler.fixed_schedule import FixedLRSchedule, FixedLRScheduleConfig
from fairseq.tasks import register_task
from fairseq.tasks.translation import TranslationConfig, TranslationTask

@register_model_architecture("ls_transformer", "ls_transformer_hydra")
def _(args):
    args.encoder_layers = getattr(args, "encoder_layers", 2)
    ARCH_CONFIG_REGISTRY["ls_transformer_iwslt_de_en"](args)

def settings(parent):
    @dataclass
    class Settings(parent):
        volume: int = 0

    return Settings

register_task("hydra_task", dataclass=settings(TranslationConfig))(
    type("HydraTask", (TranslationTask,), {}))
register_criterion(
    "hydra_criterion", dataclass=settings(LabelSmoothedCrossEntropyCriterionConfig)
)(type("HydraCriterion", (LabelSmoothedCrossEntropyCriterion,), {}))
register_optimizer("hydra_optimizer", dataclass=settings(FairseqAdamConfig))(
    type("HydraOptimizer", (FairseqAdam,), {}))
register_lr_scheduler("hydra_scheduler", dataclass=settings(FixedLRScheduleConfig))(
    type("HydraScheduler", (FixedLRSchedule,), {}))
"""


@pytest.fixture(scope="module")
def user_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Afterwards other tests see fairseq's components again: the table of settings lists them."""
    folder = tmp_path_factory.mktemp("users") / "hydra_user"
    folder.mkdir()
    (folder / "__init__.py").write_text(USER)
    kinds = registry.REGISTRIES.values()
    tables = [kind[name] for kind in kinds for name in ("registry", "dataclass_registry")]
    before = [dict(table) for table in tables]
    yield f"common.user_dir={folder}"
    for table, components in zip(tables, before, strict=True):
        table.clear()
        table.update(components)


@pytest.fixture
def recipe(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with small.yaml, in which the command runs."""
    monkeypatch.chdir(tmp_path)
    settings = yaml.safe_load(RECIPE)
    settings["task"]["data"] = str(data)
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(settings))
    return tmp_path


def run(folder: Path, *overrides: str, name: str = "small") -> Result:
    return cli_runs.run("hydra-train", "--config-dir", folder, "--config-name", name, *overrides)


def commands(result: Result) -> list[list[str]]:
    assert result.exit_code == 0, (result.output, result.exception)
    lines = result.stdout.splitlines()
    return [shlex.split(line) for line in lines if line.startswith("lightseq-train ")]


def refused(result: Result, sentence: str) -> None:
    assert result.exit_code == 2, (result.output, result.exception)
    (error,) = (line for line in result.stderr.splitlines() if "error:" in line)
    assert matches(error, f"...error: {sentence}...")


def losses(log: str) -> list[str]:
    return re.findall(r"epoch \d+:.* (loss=\S+)", log)


def test_a_recipe_is_a_run_of_lightseq_train(
    recipe: Path, data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result = run(recipe, OURS)
    (command,) = commands(result)
    assert set(command) >= {
        *("--arch=ls_transformer_iwslt_de_en", "--optimizer=ls_adam", "--adam-betas=0.9,0.98"),
        *("--criterion=ls_label_smoothed_cross_entropy", "--label-smoothing=0.2", str(data)),
        *("--total-num-update=3", "--clip-norm=0", "--share-decoder-input-output-embed"),
    }
    with caplog.at_level(logging.INFO):
        cli_runs.succeed("train", *command[1:])
    assert losses(caplog.text) == losses(result.stdout)
    assert len(losses(caplog.text)) == 3
    # Hydra's folder of the run, as with fairseq-hydra-train
    assert list(recipe.glob("outputs/*/*/.hydra/config.yaml"))


def test_native_parts(recipe: Path) -> None:
    for overrides in (["--native", OURS], []):
        (command,) = commands(run(recipe, *overrides)) or ([],)
        assert not [word for word in command if "ls_" in word]
    (command,) = commands(run(recipe, OURS, "optimizer._name=adam"))
    assert {"--optimizer=adam", "--criterion=ls_label_smoothed_cross_entropy"} <= {*command}


def test_an_arch_of_the_users_folder(recipe: Path, user_dir: str) -> None:
    result = run(recipe, user_dir, f"{ARCH}=ls_transformer_hydra", "model.encoder_layers=3")
    (command,) = commands(result)
    assert {"--encoder-layers=3", "--decoder-layers=1"} <= {*command}
    assert {"--optimizer=ls_adam", "--criterion=ls_label_smoothed_cross_entropy"} <= {*command}
    assert "step: fairseq's own" not in result.output


@pytest.mark.parametrize(
    ("group", "name", "others"),
    [
        ("task", "hydra_task", []),
        ("criterion", "hydra_criterion", []),
        ("optimizer", "hydra_optimizer", []),
        ("lr_scheduler", "hydra_scheduler", ["~lr_scheduler.total_num_update"]),
    ],
)
def test_other_components_of_the_users_folder(
    recipe: Path, user_dir: str, group: str, name: str, others: list[str]
) -> None:
    result = run(recipe, user_dir, OURS, f"{group}._name={name}", f"+{group}.volume=-5", *others)
    (command,) = commands(result)
    assert {f"--{group.replace('_', '-')}={name}", "--volume=-5"} <= {*command}
    refused(run(recipe, user_dir, OURS, f"{group}._name={name}", f"+{group}.loud=5", *others),
            f"{group}.loud is no setting of training with {group} {name}: remove it.")  # fmt: skip


def test_a_sweep(recipe: Path) -> None:
    ran = commands(run(recipe, "--multirun", OURS, "common.seed=1,2"))
    seeds = [next(word for word in words if word.startswith("--seed")) for words in ran]
    assert seeds == ["--seed=1", "--seed=2"]


def test_the_next_run_has_fairseqs_defaults(recipe: Path, data: Path) -> None:
    folder = str(recipe)
    words = ["task=translation", "lr_scheduler=fixed", f"task.data={data}", "common.cpu=true"]
    result = cli_runs.run("hydra-train", "--config-dir", folder, *words)
    refused(result, "The configuration sets no model._name")  # fairseq's own recipe, config
    (command,) = commands(run(recipe, OURS))
    assert not [word for word in command if word.startswith("--log-interval=100")]


@pytest.mark.parametrize(("words", "sentence"), refusals(__file__, "test_hydra_train"))
def test_bad_recipes(recipe: Path, words: str, sentence: str) -> None:
    result = run(recipe, *string.Template(words).substitute(OURS=OURS).split())
    refused(result, sentence)
    assert "WARNING" not in result.output
    assert not list(recipe.glob("outputs/**/*.pt"))


def test_a_path_in_the_file(recipe: Path) -> None:
    file = recipe / "small.yaml"
    settings = yaml.safe_load(file.read_text())
    settings["common"]["user_dir"] = "/does/not/exist"
    file.write_text(yaml.safe_dump(settings))
    refused(run(recipe), "/does/not/exist does not exist: check the path.")


def test_no_recipe_of_this_name(recipe: Path) -> None:
    refused(run(recipe, name="smal"), "The configuration sets no model._name: set it, or check")
