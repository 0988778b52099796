"""The test set and the model's weights, both from a seeded random generator.

3003 sentences, as in newstest2014, with WMT-like lengths (mean 28 with ``</s>``); BART summarises
texts of 700 tokens on average. The model has
random weights; they take the same time as trained ones. The row of ``</s>`` in the embedding, which
is shared with the output projection, is zero. Thousands of words are then always more likely than
``</s>``, so each hypothesis ends at its maximum length, in every system and every precision.

For a language model there are no sentences: `stopwatch` draws the prompts. Its output projection
may be a table of its own; then the row of ``</s>`` is zero there. RoBERTa reads the sources only,
and its weights are as they were drawn.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightseq_fairseq import fairseq_compat
from lightseq_fairseq.base import files
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.benchmark.generate.cases import positions
from lightseq_fairseq.cli.benchmark.train import corpus
from lightseq_fairseq.cli.benchmark.train.commands import norm_flags, roberta_flags, width_flags
from lightseq_fairseq.cli.benchmark.train.corpus import EOS, SOURCE, TARGET
from lightseq_fairseq.cli.benchmark.train.shapes import Shape

SENTENCES, SEED = 3003, 2014
SPLIT = "test"


class TestSet(NamedTuple):
    """A folder of binarised sentences, dictionaries and a checkpoint of fairseq's own model."""

    folder: Path

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint.pt"

    @property
    def sources(self) -> Path:
        """The source sentences, without the ending of a file."""
        return self.folder / f"{SPLIT}.{SOURCE}-{TARGET}.{SOURCE}"

    @property
    def ctranslate2(self) -> Path:
        """The folder of the model for CTranslate2; `ctranslate` creates it."""
        return self.folder / "ctranslate2"

    @property
    def manifest(self) -> Path:
        return self.folder / "test_set.json"

    @property
    def vocabulary(self) -> int:
        """Words of the dictionary."""
        return int(json.loads(self.manifest.read_text(encoding="utf-8"))["vocabulary"])


def ensure(folder: Path, shape: Shape, vocabulary: int) -> TestSet:
    """The sentences and the model in ``folder``; writes them if they do not exist.

    They are written beside ``folder``, and moved when complete.

    Raises:
        UserError: the folder holds something else, or cannot be written.
    """
    sentences = 0 if shape.is_language_model else SENTENCES
    wanted = {"shape": list(shape), "vocabulary": vocabulary, "sentences": sentences}
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with files.placed(folder) as part:
            part.mkdir()
            if shape.is_language_model or shape.is_masked:
                corpus.write_dictionary(part / "dict.txt", vocabulary)
            else:
                corpus.write_dictionaries(part, vocabulary)
            if sentences:
                sides = corpus.SUMMARIES if shape.is_bart else corpus.SENTENCE_PAIRS
                corpus.write_split(part, SPLIT, sentences, vocabulary, SEED, sides)
            _write_checkpoint(TestSet(part), shape, folder)
            TestSet(part).manifest.write_text(json.dumps(wanted) + "\n", encoding="utf-8")
    try:
        found = json.loads(TestSet(folder).manifest.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if found != wanted:
        raise UserError(
            f"{folder} does not contain the test set of this run: choose another folder with "
            "--data, or one that does not exist yet."
        )
    return TestSet(folder)


def trained(folder: Path) -> TestSet:
    """The user's model and sentences in ``folder``.

    Raises:
        UserError: files are missing.
    """
    found = TestSet(folder)
    needed = [found.checkpoint, found.sources.with_name(f"{found.sources.name}.bin")]
    if missing := [path.name for path in needed if not path.exists()]:
        raise UserError(
            f"{folder} has no {' and no '.join(missing)}: copy a checkpoint there, beside what "
            f"lightseq-preprocess has written of a test set from {SOURCE} to {TARGET}."
        )
    return found


def _write_checkpoint(test_set: TestSet, shape: Shape, home: Path) -> None:
    """Writes the checkpoint, which names ``home`` as the folder of the dictionaries."""
    fairseq_compat.prepare()
    from fairseq import options, tasks
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from omegaconf import OmegaConf

    words = [str(test_set.folder), "--arch", shape.arch, "--optimizer", "adam"]
    if shape.is_masked:
        words += ["--task", "masked_lm"]
        words += [str(word) for pair in roberta_flags(shape).items() for word in pair]
    else:
        words += ["--decoder-layers", str(shape.decoder_layers)]
    if shape.is_language_model:
        words += ["--task", "language_modeling", "--max-target-positions", str(positions(shape))]
    elif not shape.is_masked:
        words += ["-s", SOURCE, "-t", TARGET, "--share-all-embeddings"]
        words += ["--encoder-layers", str(shape.encoder_layers), *norm_flags(shape)]
        if shape.hugging_face:
            words += [str(word) for pair in width_flags(shape).items() for word in pair]
    args = options.parse_args_and_arch(options.get_training_parser(), words)
    cfg = convert_namespace_to_omegaconf(args)
    torch.manual_seed(SEED)
    model: Any = tasks.setup_task(cfg.task).build_model(cfg.model)
    if not shape.is_masked:
        with torch.no_grad():
            model.decoder.output_projection.weight[EOS] = 0
    saved: Any = OmegaConf.to_container(cfg)
    saved["task"]["data"] = str(home.resolve())
    if not shape.is_language_model:  # the other models have a Namespace with all settings
        saved["model"].data = saved["task"]["data"]
    state = {
        "args": None,
        "cfg": saved,
        "model": model.state_dict(),
        # fairseq reads this entry of each checkpoint, also for translation.
        "optimizer_history": [{"optimizer_name": "FairseqAdam", "lr_scheduler_state": {}}],
        "last_optimizer_state": None,
        "extra_state": {},
    }
    torch.save(state, test_set.checkpoint)
