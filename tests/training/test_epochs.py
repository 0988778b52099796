"""Each epoch has its own masks, random crops and order of batches, with any number of workers, and
also after a run is resumed; with our models and with fairseq's own."""

from __future__ import annotations

import json
import logging
import shlex
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from helpers import cli_runs, languages
from helpers import roberta_runs as roberta
from helpers.training_runs import LS, differing, run_ranks, trained

SIZE = [word for word in roberta.SIZE if word != "--no-epoch-checkpoints"]
SYSTEMS = pytest.mark.parametrize("system", [[], ["--native"]], ids=["ours", "native"])
LANGUAGES = (
    "--arch ls_transformer --max-tokens 120 --task translation_multi_simple_epoch "
    "--lang-pairs aa-bb,bb-aa,aa-cc --sampling-method temperature --encoder-langtok src "
    "--decoder-langtok"
)
EPOCHS = "--max-update 0 --max-epoch 3 --log-format json --log-interval 1 --disable-validation"


class Case(NamedTuple):
    data: Path
    words: list[str]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    folder = tmp_path_factory.mktemp("data")
    data = roberta.binarise(folder / "one")
    several = folder / "several"
    for language in ("aa", "bb"):
        shutil.copytree(data.text, several / language)
    shutil.copy(data.text / "dict.txt", several)
    crop = ["--shorten-method", "random_crop"]
    masked = [*roberta.MASKED, *SIZE, "--required-batch-size-multiple", "1"]
    masked += ["--max-tokens", "192"]
    tuned = [*roberta.TUNED, *SIZE, "--num-classes", "2", "--max-positions", "6"]
    for name in ("optimizer", "dataloader", "meters"):
        tuned.remove(f"--reset-{name}")
    # In a narrow model without training, what the encoder reads hardly changes the loss.
    noised = shlex.split(
        "--task denoising --arch ls_bart_base --tokens-per-sample 24 --max-tokens 192 --lr 5e-3 "
        "--warmup-updates 1 --required-batch-size-multiple 1 --encoder-layers 1 --decoder-layers 1 "
        "--encoder-embed-dim 128 --encoder-ffn-embed-dim 24 --encoder-attention-heads 2 "
        "--decoder-attention-heads 2 --dropout 0 --attention-dropout 0 --rotate 0.3 --cpu"
    )
    pairs = [word for word in cli_runs.SMALL if word != "--no-epoch-checkpoints"]
    first, second = (languages.write(folder / name, seed) for seed, name in enumerate("ab"))
    several_pairs = [*pairs, *shlex.split(LANGUAGES)]
    more = ["--max-tokens", "384", "--task"]
    return {
        "masked text": Case(data.text, masked),
        "masked crops": Case(data.text, [*masked, *crop, "--tokens-per-sample", "6"]),
        "several languages": Case(several, [*masked, *more, "multilingual_masked_lm"]),
        "noised text": Case(data.text, noised),
        "noised languages": Case(several, [*noised, *more, "multilingual_denoising"]),
        "cropped sentences": Case(data.classes, [*tuned, *crop]),
        "curriculum": Case(
            cli_runs.binarise(folder / "pairs"),
            [*pairs, "--arch", "ls_transformer", "--max-tokens", "40", "--curriculum", "1"],
        ),
        "virtual epochs": Case(first, [*several_pairs, "--virtual-epoch-size", "50"]),
        "several folders": Case(Path(f"{first}:{second}"), several_pairs),
        "virtual folders": Case(
            Path(f"{first}:{second}"), [*several_pairs, "--virtual-epoch-size", "500"]
        ),
        "other seeds": Case(data.text, [*masked, "--update-ordered-indices-seed"]),
        "no remainder": Case(data.text, [*masked, "--skip-remainder-batch"]),
    }  # fmt: skip


CASES = ["masked text", "masked crops", "several languages", "noised text", "noised languages",
         "cropped sentences", "curriculum", "virtual epochs", "several folders", "virtual folders",
         "other seeds", "no remainder"]  # fmt: skip


@pytest.fixture
def train(cases: dict[str, Case], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Any:
    """Trains for three epochs; returns the logged values of all updates, by epoch."""
    caplog.set_level(logging.INFO)

    def run(folder: str, case: str, *words: str | Path) -> list[list[dict[str, str]]]:
        caplog.clear()
        data, flags = cases[case]
        saves = ["--save-dir", tmp_path / folder]
        cli_runs.succeed("train", data, *flags, *shlex.split(EPOCHS), *saves, *words)
        found: dict[int, list[dict[str, str]]] = {}
        for record in caplog.records:
            if record.name == "train_inner":
                values = json.loads(record.getMessage())
                found.setdefault(values["epoch"], []).append(
                    {name: values[name] for name in ("loss", "gnorm", "wpb")}
                )
        return list(found.values())

    return run


@SYSTEMS
@pytest.mark.parametrize(
    "case",
    [
        "masked text",
        "several languages",
        "noised text",
        "cropped sentences",
        "virtual epochs",
    ],
)
def test_each_epoch_reads_other_data(train: Any, case: str, system: list[str]) -> None:
    still = ["--lr", "0", "--dropout", "0", "--no-save", *system]
    found = [train("x", case, *still, "--num-workers", str(count)) for count in (0, 1, 2)]
    assert found[0] == found[1] == found[2]
    epochs = {tuple(sorted(tuple(update.values()) for update in epoch)) for epoch in found[0]}
    assert len(epochs) == 3  # not the same updates in another order


@SYSTEMS
def test_a_curriculum_ends(train: Any, system: list[str]) -> None:
    """After --curriculum epochs, batches are shuffled as without it."""
    for count in ("0", "1"):
        words = ["--no-save", "--num-workers", count, *system]
        orders, shuffled = (
            [[update["wpb"] for update in epoch] for epoch in train("x", "curriculum", *words, *no)]
            for no in ([], ["--curriculum", "0"])
        )
        assert orders[0] != shuffled[0] and orders[1:] == shuffled[1:] and orders[1] != orders[2]


@pytest.mark.parametrize(
    ("case", "system"),
    [
        *((case, []) for case in CASES),
        *((case, ["--native"]) for case in ("masked text", "noised languages", "virtual folders")),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one(
    train: Any, tmp_path: Path, case: str, system: list[str]
) -> None:
    """To the last bit, whether an epoch had ended or not, and with any number of workers."""
    words = ["--save-interval-updates", "2", "--dropout", "0.1", *system]
    train("whole", case, *words, "--num-workers", "1")
    middle = next((tmp_path / "whole").glob("checkpoint_2_*.pt"))
    for count, file in (("1", middle), ("2", middle.with_name("checkpoint1.pt"))):
        (tmp_path / count).mkdir()
        shutil.copy(file, tmp_path / count / "checkpoint_last.pt")
        only_the_last = ["--save-interval-updates", "0", "--save-interval", "3"]
        train(count, case, *words, *only_the_last, "--num-workers", count)
        assert differing(trained(tmp_path / count), trained(tmp_path / "whole")) == []


def test_ranks_keep_their_batches_in_a_resumed_epoch(tmp_path: Path) -> None:
    """With --fix-batches-to-gpus."""
    cli_runs.write_text(tmp_path / "text")
    prefixes = [f"--{split}pref {tmp_path}/text/{split}" for split in ("train", "valid")]
    line = f"-s de -t en --dataset-impl cached --destdir {tmp_path}/data {' '.join(prefixes)}"
    cli_runs.succeed("preprocess", *line.split())
    flags: dict[str, Any] = {
        **LS, "source_lang": "de", "target_lang": "en", "dataset_impl": "cached", "max_tokens": 40,
        "fix_batches_to_gpus": True, "max_update": None, "max_epoch": 2, "save_interval_updates": 1,
    }  # fmt: skip
    whole = run_ranks(tmp_path / "data", tmp_path / "whole", 2, **flags)
    first = sorted((tmp_path / "whole").glob("checkpoint_2_*.pt"))[0]
    rest = run_ranks(tmp_path / "data", tmp_path / "rest", 2, **flags, restore_file=str(first))
    left = len(rest[0])
    assert 1 < left < len(whole[0]) and rest == [losses[-left:] for losses in whole]
