"""fairseq after prepare(): it can be imported, reads command lines and drops no sentence."""

from __future__ import annotations

import argparse
import importlib.util
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.interpreters import run_code

from lightseq_fairseq import fairseq_compat
from lightseq_fairseq.base.errors import UserError

fairseq_compat.prepare()

from fairseq import models, options, utils  # noqa: E402
from fairseq.data import BucketPadLengthDataset, Dictionary, ListDataset, data_utils  # noqa: E402
from fairseq.dataclass.utils import convert_namespace_to_omegaconf  # noqa: E402

from lightseq_fairseq.fairseq_compat import batches, layers  # noqa: E402


def refusal(*, before: str = "", **options: Any) -> str:
    """The message with which prepare() refuses, in a new interpreter."""
    run = run_code(
        f"import sys\n{before}\n"
        "from lightseq_fairseq import fairseq_compat\nfrom lightseq_fairseq.base import errors\n"
        "try:\n    fairseq_compat.prepare()\n"
        "except errors.UserError as error:\n    print('refused:', error)\n",
        **options,
    )
    assert run.returncode == 0 and "refused: " in run.stdout, run.stdout + run.stderr
    sentence = run.stdout.split("refused: ")[1].strip()
    assert "\n" not in sentence
    return sentence


# Importing


def test_prepare_leaves_python_as_it_was_and_does_its_work_once() -> None:
    run = run_code(
        "import dataclasses, logging, sys, warnings\n"
        "before = dataclasses.dataclass, list(warnings.filters)\n"
        "from lightseq_fairseq import fairseq_compat\n"
        "assert 'torch' not in sys.modules and 'fairseq' not in sys.modules\n"
        "import torch\n"
        "script = torch.jit.script\n"
        "def newer(*arguments):\n"  # torch 2.14 warns in another category than 2.13
        "    warnings.warn('`torch.jit.script` is deprecated. Please ...', FutureWarning)\n"
        "    return script(*arguments)\n"
        "torch.jit.script = newer\n"
        "filters = list(warnings.filters)\n"
        "fairseq_compat.prepare()\n"
        "assert dataclasses.dataclass is before[0]\n"
        "assert warnings.filters == filters\n"
        "assert not logging.root.handlers and logging.root.level == logging.WARNING\n"
        "assert sys.modules.get('sklearn') is None or sys.modules['sklearn'].__spec__\n"
        "from fairseq import models, options\n"
        "from fairseq.data import data_utils\n"
        "from fairseq.modules.transformer_layer import TransformerEncoderLayerBase as Layer\n"
        "def repaired():\n"
        "    return (models.build_model, options.parse_args_and_arch, data_utils.np,\n"
        "            data_utils.batch_by_size, Layer.__init__)\n"
        "first = repaired()\n"
        "fairseq_compat.prepare()\n"
        "assert all(a is b for a, b in zip(first, repaired()))\n"
    )
    assert run.returncode == 0, run.stderr
    assert "Warning" not in run.stderr


@pytest.mark.parametrize("missing", ["fairseq", "torch"])
def test_missing_package_is_answered_with_the_install_command(missing: str) -> None:
    sentence = refusal(before=f"sys.modules[{missing!r}] = None")
    assert sentence.startswith(f"{missing} is not installed")
    torch_command, fairseq_command, needs = sentence.split("pip install ")[1:]
    assert torch_command.startswith("torch ") and "--no-deps fairseq==0.12.2" in fairseq_command
    for package in ("omegaconf", "hydra-core", "numpy", "cffi", "regex", "sacrebleu", "bitarray"):
        assert package in needs


def test_missing_dependency_of_fairseq_is_named() -> None:
    sentence = refusal(before="sys.modules['hydra'] = None")
    assert sentence.startswith("fairseq needs hydra-core, which is not installed")


def test_folder_called_fairseq_is_no_fairseq(tmp_path: Path) -> None:
    (tmp_path / "fairseq" / "examples").mkdir(parents=True)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    assert str(tmp_path / "fairseq") in refusal(path=(tmp_path,), flags="-S")


def test_unknown_fairseq_is_imported_with_a_sentence_about_its_version(tmp_path: Path) -> None:
    # An imaginary fairseq: it has the faults of import, and nothing else that we replace.
    (tmp_path / "fairseq").mkdir()
    (tmp_path / "fairseq" / "__init__.py").write_text(
        "import dataclasses, logging\n"
        "from sklearn import metrics\n"
        "from sklearn.metrics import f1_score\n"
        "from scipy.stats import pearsonr\n"
        "__version__ = '9.9'\n"
        "logging.basicConfig(level=logging.DEBUG)\n"
        "@dataclasses.dataclass\nclass Common:\n    seed: int = 1\n"
        "@dataclasses.dataclass\nclass Config:\n    common: Common = Common(2)\n"
        "assert Config().common.seed == 2 and Config.common == Common(2)\n"
        "try:\n    f1_score([1], [1], [1], [1], [1], [1])\n"
        "except Exception as error:\n    print(error)\n"
    )
    run = run_code(
        "from lightseq_fairseq import fairseq_compat\nfrom lightseq_fairseq.base import errors\n"
        "try:\n    fairseq_compat.prepare()\n"
        "except errors.UserError as error:\n    print('refused:', error)\n",
        path=(tmp_path,),
    )
    assert "refused: fairseq 9.9 is too different" in run.stdout, run.stderr
    assert "fairseq 9.9 was not tested with this package" in run.stderr
    complaint = "run pip install scikit-learn"
    assert complaint in run.stdout or importlib.util.find_spec("sklearn")


# The command line


def parse(*words: str) -> Any:
    return options.parse_args_and_arch(options.get_training_parser(), ["data", *words])


def test_bf16_is_no_request_for_a_tpu() -> None:
    args = parse("--arch", "transformer", "--bf16")
    assert args.bf16 and not args.tpu
    common = convert_namespace_to_omegaconf(args).common
    assert common.bf16 and not common.tpu
    assert not parse("--arch", "transformer", "--memory-efficient-bf16").tpu
    assert parse("--arch", "transformer", "--bf16", "--tpu").tpu


def test_fp16_and_bf16_together_are_refused() -> None:
    with pytest.raises(UserError, match="--fp16 and --bf16"):
        parse("--arch", "transformer", "--bf16", "--fp16")


@pytest.mark.parametrize("words", [["--arch", "transformer_iwslt_de_em"], ["-a", "transfromer"]])
def test_unknown_arch_on_the_command_line_names_its_neighbours(words: list[str]) -> None:
    neighbour = {"-a": "transformer", "--arch": "transformer_iwslt_de_en"}[words[0]]
    with pytest.raises(UserError) as refused:
        parse(*words)
    assert words[1] in str(refused.value) and neighbour in re.findall(r"\w+", str(refused.value))


def test_unknown_arch_in_a_checkpoint_is_named() -> None:
    with pytest.raises(UserError, match="no arch named my_transformer"):
        models.build_model(argparse.Namespace(arch="my_transformer"), None)


# Batches


@pytest.mark.parametrize("sentences", [0, 1, 7, 8, 50])
@pytest.mark.parametrize("vectorised", [True, False])
def test_every_sentence_is_in_one_batch(
    monkeypatch: pytest.MonkeyPatch, sentences: int, vectorised: bool
) -> None:
    original = data_utils.batch_by_size

    def dropping(indices: Any, *args: Any, **kwargs: Any) -> Any:
        # The development head of fairseq does this after its Cython call.
        made = original(indices, *args, **kwargs)
        multiple = kwargs["required_batch_size_multiple"]
        return made[:-1] if len(made[-1]) % multiple else made

    monkeypatch.setattr(data_utils, "batch_by_size", dropping)
    assert batches.drops_sentences()
    sizes = np.arange(3, 3 + sentences)
    made = batches.batch_by_size(
        dropping,
        range(sentences),
        num_tokens_fn=lambda index: sizes[index],
        num_tokens_vec=sizes if vectorised else None,
        max_tokens=400,
        required_batch_size_multiple=8,
    )
    assert [index for batch in made for index in batch] == list(range(sentences))
    assert all(sizes[batch].max() * len(batch) <= 400 for batch in made)


def test_buckets_of_lengths_on_numpy_2() -> None:
    sizes = np.array([2, 3, 5, 8, 13, 21])
    assert data_utils.get_buckets(sizes, 3).tolist() == [3, 8, 21]
    dataset = ListDataset([torch.zeros(size) for size in sizes], sizes)
    bucketed = BucketPadLengthDataset(dataset, sizes, 3, pad_idx=1, left_pad=False)
    assert [len(bucketed[index]) for index in range(6)] == [3, 3, 8, 8, 21, 21]


# Attention


@pytest.mark.parametrize("kept", ["1", None])
def test_cudnn_attention_is_off_unless_asked_for(
    monkeypatch: pytest.MonkeyPatch, kept: str | None
) -> None:
    if kept is None:
        monkeypatch.delenv("LIGHTSEQ_CUDNN_ATTENTION", raising=False)
    else:
        monkeypatch.setenv("LIGHTSEQ_CUDNN_ATTENTION", kept)
    torch.backends.cuda.enable_cudnn_sdp(True)
    layers.disable_cudnn_attention()
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    assert enabled == (kept == "1")


class TestReplacingUnknownWords:
    ALIGNMENT = [(0, 0), (1, 1), (2, 2), (3, 3)]

    def text(self, source: str) -> str:
        words = Dictionary()
        for word in ("new@@", "er", "car"):
            words.add_symbol(word)
        tokens = words.encode_line("new@@ <unk> car", add_if_not_exist=False)
        found = utils.post_process_prediction(tokens, source, self.ALIGNMENT, {}, words, "@@ ")
        assert words.string(found[0]) == found[1]
        return str(found[1])

    def test_before_subwords_are_joined(self) -> None:
        assert self.text("neu@@ 7 Auto") == "new7 car"

    def test_of_a_source_that_has_lost_its_subwords(self) -> None:
        with pytest.raises(UserError, match="--replace-unk found fewer source words"):
            self.text("neu7 Auto")


def test_no_task_fails_on_an_empty_batch_of_validation() -> None:
    from fairseq.tasks import TASK_REGISTRY, FairseqTask

    class FromUserDir(FairseqTask):
        def valid_step(self, sample: Any, model: Any, criterion: Any) -> Any:
            return sample["target"]

    for task in (*TASK_REGISTRY.values(), FromUserDir):
        assert task.valid_step(object.__new__(task), {}, None, None) == (0.0, 0, {}), task
    assert FromUserDir.valid_step(object.__new__(FromUserDir), {"target": 7}, None, None) == 7
