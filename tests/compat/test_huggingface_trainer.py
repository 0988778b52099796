"""lightseq-train and the Trainer of `transformers` have the same losses in float32: 200 updates of
BART, 60 of NLLB.

Both begin with the same folder of `transformers`, and read the same batches of real text. They
differ where `Adam` and `Settings` say; a test of each difference shows that it would be found.
"""

from __future__ import annotations

import itertools
import math
import shlex
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import helpers.cli_runs as cli_runs
import helpers.hugging_face as hugging_face
import helpers.parity as parity
import pytest
import torch
from fairseq import tasks, trainer
from helpers.hugging_face import KINDS, SPECIAL
from torch.utils.data import DataLoader

pytest.importorskip("accelerate", reason="accelerate, which the Trainer needs, is not installed")
transformers = hugging_face.transformers

# A line of the text, and the next one.
_LICENSE = Path(__file__).parents[2] / "LICENSE"
LINES = [" ".join(line.split()) for line in _LICENSE.read_text().splitlines() if line.strip()]
WORDS = sorted({word for line in LINES for word in line.split()})
UPDATES, WARMUP, BETAS, EPS, SMOOTHING = 200, 10, (0.9, 0.98), 1e-4, 0.1
RUN = (
    f"--optimizer ls_adam --adam-betas '{BETAS}' --adam-eps {EPS} --weight-decay 0.1 "
    "--clip-norm 0.5 "
    f"--lr-scheduler polynomial_decay --lr 3e-3 --warmup-updates {WARMUP} --batch-size 8 "
    f"--total-num-update {UPDATES} --dropout 0 --attention-dropout 0 --activation-dropout 0 --cpu "
    "--criterion ls_label_smoothed_cross_entropy --no-save --disable-validation --num-workers 0"
)


class Loss(NamedTuple):
    """Of an update: the mean loss of a token, and the norm of the gradient before it is clipped."""

    loss: float
    norm: float


class Settings(NamedTuple):
    """Of the Trainer, as they agree with `RUN`.

    Attributes:
        smoothing: transformers spreads it over all words, fairseq over all but the right one.
        clip: transformers' default is 1, fairseq's is not to clip.
        warmup: of the linear schedule. Both take the first update with a learning rate of 0.
        undecayed: ends of the names of parameters without weight decay; transformers' default is
            biases and LayerNorms.
        eps_is_fairseqs: see `Adam`.
        dropout: transformers takes it from the folder.
    """

    smoothing: float = SMOOTHING
    clip: float = 0.5
    warmup: int = WARMUP
    undecayed: tuple[str, ...] = ()
    eps_is_fairseqs: bool = True
    dropout: float = 0.0


class Adam(torch.optim.AdamW):
    """torch corrects the bias of the second moment before it adds eps, fairseq afterwards."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            updates = [int(self.state[p]["step"]) for p in group["params"] if p in self.state]
            group["eps"] = EPS / math.sqrt(1 - BETAS[1] ** (max(updates, default=0) + 1))
        return super().step(closure)


class Made(NamedTuple):
    """A folder of `transformers`, the rows of its words, a model's run with lightseq-train, and the
    sentences of each of its batches."""

    folder: Path
    rows: dict[str, int]
    losses: list[Loss]
    batches: list[list[int]]


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make("bart", tmp_path_factory.mktemp("bart"), SMOOTHING)


def make(name: str, folder: Path, smoothing: float, updates: int = UPDATES) -> Made:
    kind = KINDS[name]
    more = kind.words[kind.words.index(hugging_face.WORDS[-1]) + 1 :]
    config = {**kind.config, "encoder_layers": 1, "max_position_embeddings": 32}
    kind = kind._replace(words=[*SPECIAL, *WORDS, *more], config=config)
    hugging_face.make(kind, folder / "theirs")
    cli_runs.succeed("import_", folder / "theirs", folder / "imported")
    for side, lines in (("a", LINES[:-1]), ("b", LINES[1:])):
        (folder / f"text.{side}").write_text("".join(f"{line}\n" for line in lines))
    cli_runs.succeed(
        "preprocess", *kind.pairs.format(folder / "imported").split(), "--workers", "1",
        "--trainpref", folder / "text", "--validpref", folder / "text", "--destdir", folder / "bin",
    )  # fmt: skip
    vocabulary = len(kind.words)
    command = shlex.split(
        f"{folder}/bin {kind.flags} --finetune-from-model {folder}/imported/model.pt {RUN} "
        f"--label-smoothing {smoothing * (vocabulary - 1) / vocabulary} --max-update {updates}"
    )
    losses: list[Loss] = []
    log = trainer.Trainer._reduce_and_log_stats

    def noting(self: Any, outputs: Any, size: Any, norm: Any = None) -> Any:
        if norm is not None:
            losses.append(Loss(float(sum(x["loss"] for x in outputs)) / float(size), float(norm)))
        return log(self, outputs, size, norm)

    with mock.patch.object(trainer.Trainer, "_reduce_and_log_stats", noting):
        cli_runs.succeed("train", *command)
    task = tasks.setup_task(parity.parse(command).task)
    assert len(task.target_dictionary) == vocabulary
    rows = {word: row for row, word in enumerate(kind.words)}
    return Made(folder / "theirs", rows, losses, batches(task))


def batches(task: Any) -> list[list[int]]:
    """fairseq's, in its order."""
    task.load_dataset("train")
    epochs = task.get_batch_iterator(
        task.dataset("train"), max_sentences=8, required_batch_size_multiple=8, seed=1
    )
    samples = (x for _ in itertools.count() for x in epochs.next_epoch_itr(shuffle=True))
    return [sample["id"].tolist() for sample in itertools.islice(samples, UPDATES)]


def theirs(made: Made, settings: Settings, updates: int = UPDATES) -> list[Loss]:
    """The first updates of the Trainer, of a run of 200."""
    rates = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), settings.dropout)
    rates |= dict.fromkeys(("encoder_layerdrop", "decoder_layerdrop"), 0.0)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(made.folder, **rates)
    ids = [[made.rows[word] for word in [*line.split(), "</s>"]] for line in LINES]
    pairs = [{"input_ids": a, "labels": b} for a, b in itertools.pairwise(ids)]

    class InOrder(transformers.Seq2SeqTrainer):  # type: ignore[misc, name-defined]
        def get_train_dataloader(self) -> Any:
            return DataLoader(pairs, batch_sampler=made.batches, collate_fn=self.data_collator)

    groups: dict[bool, list[Any]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        groups[not name.endswith(settings.undecayed or ("-",))].append(parameter)
    optimizer = (Adam if settings.eps_is_fairseqs else torch.optim.AdamW)(
        [{"params": x, "weight_decay": 0.1 * is_decayed} for is_decayed, x in groups.items()],
        lr=3e-3, betas=BETAS, eps=EPS,
    )  # fmt: skip
    arguments = transformers.Seq2SeqTrainingArguments(
        made.folder / "trainer", max_steps=UPDATES, lr_scheduler_type="linear", logging_steps=1,
        warmup_steps=settings.warmup, label_smoothing_factor=settings.smoothing,
        max_grad_norm=settings.clip, save_strategy="no", report_to="none", use_cpu=True,
        disable_tqdm=True,
    )  # fmt: skip

    class Stop(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, _: Any, state: Any, control: Any, **more: Any) -> None:
            control.should_training_stop |= state.global_step == updates

    found = InOrder(
        model, arguments, train_dataset=pairs, optimizers=(optimizer, None), callbacks=[Stop()],
        data_collator=transformers.DataCollatorForSeq2Seq(
            transformers.AutoTokenizer.from_pretrained(made.folder), model
        ),
    )  # fmt: skip
    found.train()
    history = found.state.log_history
    return [Loss(log["loss"], log["grad_norm"]) for log in history if "grad_norm" in log]


def largest_difference(ours: list[Loss], theirs: list[Loss]) -> float:
    return max(abs(a.loss - b.loss) for a, b in zip(ours, theirs, strict=True))


def assert_same(made: Made, found: list[Loss]) -> None:
    assert largest_difference(made.losses, found) < 1e-5
    ours, other = (torch.tensor([x.norm for x in losses]) for losses in (made.losses, found))
    torch.testing.assert_close(ours, other, rtol=1e-4, atol=0)
    assert found[-1].loss < found[0].loss - 1


def test_bart(bart: Made) -> None:
    assert_same(bart, theirs(bart, Settings()))


def test_nllb(tmp_path: Path) -> None:
    """Without label smoothing, with which the Trainer lacks the decoder's input of M2M-100."""
    made = make("nllb", tmp_path, 0.0, 60)
    assert_same(made, theirs(made, Settings(smoothing=0.0), 60))


@pytest.mark.parametrize(
    "wrong",
    [
        {"smoothing": SMOOTHING * 1.01},
        {"clip": 1.0},
        {"warmup": WARMUP + 1},
        {"undecayed": ("bias", "norm.weight", "layernorm_embedding.weight")},
        {"eps_is_fairseqs": False},
        {"dropout": 0.001},
    ],
    ids=lambda wrong: "".join(wrong),
)
def test_a_difference_is_found(bart: Made, wrong: dict[str, Any]) -> None:
    found = theirs(bart, Settings(**wrong), updates=6)
    assert largest_difference(bart.losses[:6], found) > 5e-5
