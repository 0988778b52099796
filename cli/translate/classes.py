"""Classes of texts: what ``lightseq-interactive`` prints of a classifier, and what ``classify`` of
`lightseq_fairseq.RobertaModel` returns.

fairseq and torch are imported when a model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.translate.unknown_words import UnknownWords
from lightseq_fairseq.generation.texts import Predicted, Prediction

if TYPE_CHECKING:
    from torch import Tensor

_BATCH = 32  # texts


class Classifier:
    """Models of ``--task sentence_prediction``, which read texts as the lines of their data.

    Args:
        task: fairseq's, with the dictionaries.
        models: one model, or those of an ensemble, whose results are averaged.
        encode: from plain text to words of the dictionary.

    Attributes:
        inputs: the number of texts that the models read together, 2 for pairs; None if the data
            folder has only dictionaries, which do not tell.
    """

    def __init__(self, task: Any, models: Sequence[Any], encode: Callable[[str], str]) -> None:
        from fairseq import utils

        self._task, self._models, self._encode = task, models, encode
        limit: Any = utils.resolve_max_positions(
            task.max_positions(), *[model.max_positions() for model in models]
        )
        self._limit: int = min(limit) if isinstance(limit, tuple) else limit
        folder = Path(utils.split_paths(task.cfg.data)[0])
        self.inputs = 2 if (folder / "input1").is_dir() else None
        if self.inputs is None and any((folder / "input0").glob("*.idx")):
            self.inputs = 1

    def classify(
        self, texts: Mapping[int, Sequence[str]], unknown: UnknownWords,
        max_tokens: int | None = None, batch_size: int | None = None,
    ) -> list[Predicted]:  # fmt: skip
        """The predictions for ``texts``, in their order.

        Args:
            texts: the number of each one, for messages, and the text or the two of a pair.
            unknown: counts their tokens.
            max_tokens, batch_size: of a batch, with pads; without both, 32 texts.

        Returns:
            Of a model with --regression-target a number, or --num-classes numbers.

        Raises:
            UserError: a text is empty, or has too many tokens.
        """
        import numpy as np
        from fairseq.data import data_utils

        tokens = [self.tokens(number, each) for number, each in texts.items()]
        for each in tokens:
            unknown.count(each, self._task.source_dictionary)
        lengths = np.array([len(each) for each in tokens], np.int64)
        if max_tokens is None and batch_size is None:
            batch_size = _BATCH
        batches = data_utils.batch_by_size(
            lengths.argsort(kind="stable"), lengths.__getitem__, lengths, max_tokens, batch_size
        )
        found: dict[int, Any] = {}
        for batch in batches:
            outputs = self.outputs([tokens[place] for place in batch])
            found |= zip(batch, self.predictions(outputs))
        return [found[place] for place in range(len(tokens))]

    def tokens(self, number: int, texts: Sequence[str]) -> Tensor:
        """The tokens [T] of a text or a pair, as the task makes them of binarised lines.

        number: of the text, for messages.
        """
        import torch

        settings, parts = self._task.cfg, []
        for text, mark in zip(texts, (settings.init_token, settings.separator_token)):
            if not text.strip():
                raise UserError(f"Sentence {number} (counted from 0) is empty: remove it.")
            words = self._task.source_dictionary.encode_line(
                self._encode(text.strip()), append_eos=True, add_if_not_exist=False
            ).long()
            parts += [words] if mark is None else [words.new_tensor([mark]), words]
        tokens = torch.cat(parts)
        if settings.shorten_method != "none":
            tokens = tokens[: self._limit]
        if len(tokens) > self._limit:
            raise UserError(
                f"Sentence {number} (counted from 0) has {len(tokens)} tokens, but the model reads "
                f"at most {self._limit}: shorten it, or set --shorten-method to truncate, which "
                "reads the first ones."
            )
        return tokens

    def predictions(self, outputs: Tensor) -> Iterator[Predicted]:
        """The predictions for the texts of a batch; outputs: as those of `outputs`."""
        if self._task.cfg.regression_target:
            yield from (row[0] if len(row) == 1 else tuple(row) for row in outputs.tolist())
            return
        labels = self._task.label_dictionary
        for probability, number in zip(*(each.tolist() for each in outputs.max(-1))):
            yield Prediction(labels[number + labels.nspecial], probability)

    def outputs(self, tokens: Sequence[Tensor]) -> Tensor:
        """The probabilities or numbers of each text, float32 [B, classes]."""
        import torch
        from fairseq import utils
        from fairseq.data.data_utils import collate_tokens

        pad, settings = self._task.source_dictionary.pad(), self._task.cfg
        batch = {
            "src_tokens": collate_tokens(tokens, pad),
            "src_lengths": torch.tensor([len(each) for each in tokens]),
        }
        if settings.add_prev_output_tokens:
            batch["prev_output_tokens"] = collate_tokens([each.roll(1) for each in tokens], pad)
        found = []
        for model in self._models:
            device = next(model.parameters()).device
            with utils.model_eval(model), torch.no_grad():
                outputs, _ = model(
                    **{name: each.to(device) for name, each in batch.items()},
                    features_only=True, classification_head_name=settings.classification_head_name,
                )  # fmt: skip
            outputs = outputs.float()
            found.append(outputs if settings.regression_target else outputs.softmax(-1))
        return torch.stack(found).mean(0)


def parted(line: str, number: int, inputs: int | None) -> list[str]:
    """The texts of an input line, which a tab separates.

    Raises:
        UserError: they are not as many as ``inputs``, see `Classifier`.
    """
    texts = line.split("\t")
    tabs = len(texts) - 1
    if len(texts) != inputs if inputs else tabs > 1:
        reads = {1: "one text", 2: "two texts with one tab between them"}.get(inputs or 0)
        reads = reads or "one text, or two with one tab between them"
        raise UserError(
            f"Sentence {number} (counted from 0) has {tabs or 'no'} tab{'s' * (tabs > 1)}, but the "
            f"model reads {reads}: correct the line."
        )
    return texts


def shown(found: Predicted) -> str:
    """A prediction as a line shows it."""
    if isinstance(found, Prediction):
        return f"{found.probability:.6g}\t{found.label}"
    numbers = found if isinstance(found, tuple) else (found,)
    return " ".join(f"{number:.6g}" for number in numbers)
