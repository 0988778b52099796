"""lightseq-hydra-train: configurations of fairseq-hydra-train as runs of lightseq-train."""

from __future__ import annotations

import logging
import re
import shlex
from pathlib import Path

import helpers.cli_runs as cli_runs
import pytest
import yaml
from click.testing import Result

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


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cli_runs.binarise(tmp_path_factory.mktemp("pairs"))


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
    assert sentence in error


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


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["generation.beam=3"], "generation.beam is no setting of training: remove it."),
        (
            ["+model.foo=3"],
            "model.foo is no setting of training with model transformer_iwslt_de_en: remove it.",
        ),
        (["model.foo=3"], "Could not override 'model.foo'. To append"),
        (["model._name=ls_transformr"], "There is no arch named ls_transformr: did you mean"),
        (["task.data=???", OURS], "The data folder is missing: add it"),
        (["dataset.max_tokens=many"], "--max-tokens cannot be many: it must be a whole number."),
        (["model.encoder_embed_dim=15", OURS], "The width of a layer is not a multiple"),
        # true by the arch, and without a flag that makes it false
        (
            ["+model.encoder_normalize_before=false", f"{ARCH}=ls_transformer_wmt_en_de_big_t2t"],
            "model.encoder_normalize_before cannot be false, because lightseq-train has no flag",
        ),
        (["--config-name"], "-cn has no value"),
        (["--foo"], "lightseq-hydra-train has no flag --foo"),
    ],
)
def test_bad_recipes(recipe: Path, overrides: list[str], sentence: str) -> None:
    result = run(recipe, *overrides)
    refused(result, sentence)
    assert "WARNING" not in result.output
    assert not list(recipe.glob("outputs/**/*.pt"))


def test_no_recipe_of_this_name(recipe: Path) -> None:
    refused(run(recipe, name="smal"), "The configuration sets no model._name: set it, or check")
