"""fairseq after prepare(): it can be imported, loads checkpoints safely and drops no sentence."""

from __future__ import annotations

import argparse
import importlib.util
import os
import pickle
import random
import re
import subprocess
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lightseq_fairseq
from lightseq_fairseq import fairseq_compat
from lightseq_fairseq.errors import UserError

fairseq_compat.prepare()

from fairseq import checkpoint_utils, models, options, tasks, utils  # noqa: E402
from fairseq.data import BucketPadLengthDataset, Dictionary, ListDataset, data_utils  # noqa: E402
from fairseq.dataclass.utils import convert_namespace_to_omegaconf  # noqa: E402
from fairseq.logging import meters  # noqa: E402
from fairseq.modules.transformer_layer import TransformerEncoderLayerBase  # noqa: E402
from fairseq.nan_detector import NanDetector  # noqa: E402

from lightseq_fairseq.fairseq_compat import batches, layers  # noqa: E402

ROOT = Path(lightseq_fairseq.__file__).parents[1]
SPLITS = {"train": 50, "valid": 21, "test": 19}
MODEL = """--encoder-layers 2 --decoder-layers 1 --encoder-embed-dim 16 --decoder-embed-dim 16
    --encoder-ffn-embed-dim 32 --decoder-ffn-embed-dim 32 --encoder-attention-heads 2
    --decoder-attention-heads 2 --share-all-embeddings"""
LEARNING = """--optimizer adam --criterion label_smoothed_cross_entropy --lr 0.01 --max-tokens 100
    --num-batch-buckets 3 --num-workers 0 --cpu --eval-bleu --eval-bleu-args {"max_len_b":9}"""
GERMAN = "ein zwei drei vier haus baum katze hund"


def python(code: str, *, path: tuple[Path, ...] = (), flags: str = "-Wdefault") -> Any:
    """Runs ``code`` in a new interpreter that finds this package, with ``path`` before it on its
    path."""
    inherited = "" if "-S" in flags else os.environ.get("PYTHONPATH", "")
    search = os.pathsep.join([*map(str, (*path, ROOT)), inherited])
    environment = {**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *flags.split(), "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def refusal(*, before: str = "", **options: Any) -> str:
    """The message with which prepare() refuses, in a new interpreter."""
    run = python(
        f"import sys\n{before}\n"
        "from lightseq_fairseq import errors, fairseq_compat\n"
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
    run = python(
        "import dataclasses, logging, sys, warnings\n"
        "before = dataclasses.dataclass, list(warnings.filters)\n"
        "from lightseq_fairseq import fairseq_compat\n"
        "assert 'torch' not in sys.modules and 'fairseq' not in sys.modules\n"
        "import torch\n"
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
        "except Exception as error:\n    print(error)\n",
    )
    run = python(
        "from lightseq_fairseq import errors, fairseq_compat\n"
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


# A native run of every command


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the output of fairseq's own commands: data, checkpoints, <command>.out, stderr.

    The model is post-norm: without the repair, its encoder fails in generate and validate.
    """
    folder = tmp_path_factory.mktemp("native")
    rng = random.Random(1)
    for split, count in SPLITS.items():
        lines = [" ".join(rng.choices(GERMAN.split(), k=rng.randint(2, 9))) for _ in range(count)]
        (folder / f"{split}.de").write_text("".join(f"{line}\n" for line in lines))
        (folder / f"{split}.en").write_text("".join(f"{line.upper()}\n" for line in lines))
    data, saved = str(folder / "bin"), str(folder / "saved" / "checkpoint_last.pt")
    prefixes = [word for split in SPLITS for word in (f"--{split}pref", str(folder / split))]
    evaluation = ["--max-tokens", "200", "--cpu"]
    search = ["--beam", "2", "--max-len-b", "9"]
    train = ["train", data, "--arch", "transformer_iwslt_de_en", *MODEL.split()]
    train += [*LEARNING.split(), "--save-dir", str(folder / "saved")]
    interactive = ["interactive", data, "--path", saved, "--input", str(folder / "test.de")]
    commands = [
        ["preprocess", "-s", "de", "-t", "en", *prefixes, "--destdir", data, "--joined-dictionary"],
        [*train, "--max-update", "2"],
        [*train, "--max-update", "3"],
        ["generate", data, "--path", saved, *search, "--scoring", "sacrebleu", *evaluation],
        ["validate", data, "--path", saved, "--task", "translation", *evaluation],
        [*interactive, *search, "--source-lang", "de", "--target-lang", "en", "--cpu"],
    ]
    run = python(
        "import contextlib, importlib, sys\n"
        "from lightseq_fairseq import fairseq_compat\n"
        "fairseq_compat.prepare()\n"
        f"for command, *words in {commands!r}:\n"
        f"    with open(f'{folder}/{{command}}.out', 'a') as out:\n"
        "        with contextlib.redirect_stdout(out):\n"
        "            sys.argv = [command, *words]\n"
        "            importlib.import_module('fairseq_cli.' + command).cli_main()\n"
        "import logging\nlogging.shutdown()\n"
    )
    assert run.returncode == 0, run.stderr[-3000:]
    (folder / "stderr").write_text(run.stderr)
    return folder


def test_native_commands_work_on_every_sentence(native: Path) -> None:
    generated = (native / "generate.out").read_text()
    assert len(re.findall(r"^H-\d+\t", generated, re.M)) == SPLITS["test"]
    assert re.search(r"^Generate test with beam=2: BLEU = [\d.]+", generated, re.M)
    interactive = (native / "interactive.out").read_text()
    assert len(re.findall(r"^H-\d+\t", interactive, re.M)) == SPLITS["test"]


def test_native_commands_print_none_of_the_warnings_that_only_fairseq_could_act_on(
    native: Path,
) -> None:
    lines = (native / "stderr").read_text().splitlines()
    # Python 3.12 warns like this about every data loader with workers, but only with -Wdefault.
    printed = "\n".join(line for line in lines if "multi-threaded, use of fork()" not in line)
    for phrase in ("hydra", "torch.cuda.amp", "torch.jit", "invalid escape", "Deprecation"):
        assert phrase not in printed


# Checkpoints


@pytest.fixture(scope="module")
def checkpoint(native: Path) -> dict[str, Any]:
    return checkpoint_utils.load_checkpoint_to_cpu(str(native / "saved" / "checkpoint_last.pt"))


def resaved(native: Path, target: Path, **changes: Any) -> str:
    """The native checkpoint with some entries replaced, saved to a file."""
    content = checkpoint_utils.torch.load(native / "saved" / "checkpoint_last.pt")
    torch.save({**content, **changes}, target)
    return str(target)


def test_native_checkpoint_loads_with_its_optimizer_state(checkpoint: dict[str, Any]) -> None:
    assert checkpoint["optimizer_history"][-1]["num_updates"] == 3  # resumed from update 2
    assert len(checkpoint["last_optimizer_state"]["state"]) == len(
        {name for name in checkpoint["model"] if not name.endswith(("version", "_float_tensor"))}
        - {"decoder.embed_tokens.weight", "decoder.output_projection.weight"}
    )
    assert isinstance(checkpoint["cfg"]["model"], argparse.Namespace)


def test_checkpoint_of_the_years_before_hydra_loads(native: Path, tmp_path: Path) -> None:
    content = checkpoint_utils.torch.load(native / "saved" / "checkpoint_last.pt")
    extra_state = {
        **content["extra_state"],
        "best": np.float64(2.5),
        "losses": np.array([1.5, 2.5], dtype=np.float32),
        "train_meters": OrderedDict(loss=meters.AverageMeter(), wall=meters.TimeMeter()),
    }
    path = resaved(
        native, tmp_path / "old.pt", args=content["cfg"]["model"], cfg=None, extra_state=extra_state
    )
    # as in the files that we make of such a checkpoint
    checkpoint_utils.load_checkpoint_to_cpu(path)
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries.items():
            if name.endswith("/data.pkl"):  # the names in numpy 1 and fairseq 0.8
                assert b"cnumpy._core." in data and b"cfairseq.logging.meters" in data
                data = data.replace(b"cnumpy._core.", b"cnumpy.core.")
                data = data.replace(b"cfairseq.logging.meters", b"cfairseq.meters")
            archive.writestr(name, data)
    loaded = checkpoint_utils.load_checkpoint_to_cpu(path)
    assert loaded["cfg"]["task"]["_name"] == "translation"
    assert loaded["extra_state"]["best"] == 2.5
    assert loaded["extra_state"]["losses"].tolist() == [1.5, 2.5]
    assert isinstance(loaded["extra_state"]["train_meters"]["loss"], meters.AverageMeter)


class _Harmful:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trace),)


def test_checkpoint_that_runs_code_is_refused_and_nothing_runs(
    native: Path, tmp_path: Path
) -> None:
    path = resaved(native, tmp_path / "harmful.pt", extra=_Harmful(tmp_path / "trace"))
    with pytest.raises(UserError, match=r"harmful\.pt contains posix\.mkdir"):
        checkpoint_utils.load_checkpoint_to_cpu(path)
    assert not (tmp_path / "trace").exists()
    pickle.loads(pickle.dumps(_Harmful(tmp_path / "trace")))
    assert (tmp_path / "trace").exists()  # so the file was indeed harmful


class _Foreign:
    pass


def test_foreign_type_is_named_and_loads_once_the_user_allows_it(
    native: Path, tmp_path: Path
) -> None:
    path = resaved(native, tmp_path / "foreign.pt", extra=_Foreign())
    with pytest.raises(UserError, match=rf"foreign\.pt contains {__name__}\._Foreign"):
        checkpoint_utils.load_checkpoint_to_cpu(path)
    with torch.serialization.safe_globals([_Foreign]):
        assert isinstance(checkpoint_utils.load_checkpoint_to_cpu(path)["extra"], _Foreign)


@pytest.mark.parametrize("kept", [0.0, 0.01, 0.5, 0.99])
def test_truncated_checkpoint_is_named(native: Path, tmp_path: Path, kept: float) -> None:
    whole = (native / "saved" / "checkpoint_last.pt").read_bytes()
    path = tmp_path / "torn.pt"
    path.write_bytes(whole[: int(kept * len(whole))])
    with pytest.raises(UserError, match=r"torn\.pt is truncated or corrupt"):
        checkpoint_utils.load_checkpoint_to_cpu(str(path))


def test_corrupt_checkpoint_is_named(native: Path, tmp_path: Path) -> None:
    path = tmp_path / "corrupt.pt"
    path.write_bytes(random.Random(1).randbytes(5000))
    with pytest.raises(UserError, match=r"corrupt\.pt is truncated or corrupt"):
        checkpoint_utils.load_checkpoint_to_cpu(str(path))


def test_file_without_a_model_is_no_checkpoint(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(2)}, tmp_path / "weights.pt")
    with pytest.raises(UserError, match=r"weights\.pt is not a fairseq checkpoint"):
        checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "weights.pt"))


# 0.12.2's dead parameters

with_dead_parameters = pytest.mark.skipif(
    not hasattr(TransformerEncoderLayerBase.__init__, "__wrapped__"),
    reason="this fairseq has none",
)


def build(checkpoint: dict[str, Any], data: Path) -> torch.nn.Module:
    checkpoint["cfg"].task.data = str(data)
    task = tasks.setup_task(checkpoint["cfg"].task)
    torch.manual_seed(7)
    return task.build_model(checkpoint["cfg"].model)


@pytest.fixture
def unrepaired(
    monkeypatch: pytest.MonkeyPatch, checkpoint: dict[str, Any], native: Path
) -> torch.nn.Module:
    """The same model from the same seed, built by an unrepaired 0.12.2."""
    with monkeypatch.context() as patch:
        init = TransformerEncoderLayerBase.__init__.__wrapped__
        patch.setattr(TransformerEncoderLayerBase, "__init__", init)
        return build(checkpoint, native / "bin")


@with_dead_parameters
def test_dead_parameters_are_gone_and_the_others_begin_the_same(
    checkpoint: dict[str, Any], native: Path, unrepaired: torch.nn.Module
) -> None:
    before = dict(unrepaired.named_parameters())
    after = dict(build(checkpoint, native / "bin").named_parameters())
    dead = [name for name in before if name not in after]
    assert dead == [
        f"encoder.layers.{layer}.{name}" for layer in range(2) for name in layers.DEAD_PARAMETERS
    ]
    assert [name for name in before if name not in dead] == list(after)
    assert all(torch.equal(before[name], after[name]) for name in after)


@with_dead_parameters
def test_state_dict_with_dead_parameters_loads(
    checkpoint: dict[str, Any], native: Path, unrepaired: torch.nn.Module
) -> None:
    model = build(checkpoint, native / "bin")
    with torch.no_grad():
        for parameter in unrepaired.parameters():
            parameter.add_(1.0)
    model.load_state_dict(unrepaired.state_dict(), strict=True)
    expected = dict(unrepaired.named_parameters())
    assert all(torch.equal(value, expected[name]) for name, value in model.named_parameters())


@with_dead_parameters
@pytest.mark.parametrize("flat", [False, True], ids=["per parameter", "flat"])
def test_checkpoint_with_dead_parameters_continues(
    checkpoint: dict[str, Any],
    native: Path,
    tmp_path: Path,
    unrepaired: torch.nn.Module,
    flat: bool,
) -> None:
    # Adam's first moment of each parameter has a value that identifies the parameter.
    named = list(unrepaired.named_parameters())
    mark = {name: float(place) for place, (name, _) in enumerate(named)}
    moments = [torch.full(value.shape, mark[name]) for name, value in named]
    if flat:
        state = {0: {"step": 3, "exp_avg": torch.cat([moment.view(-1) for moment in moments])}}
        moments = moments[:1]
    else:  # dead parameters have no gradient, so Adam has no entry for them
        state = {
            place: {"step": 3, "exp_avg": moment}
            for place, moment in enumerate(moments)
            if not named[place][0].endswith(layers.DEAD_PARAMETERS)
        }
    group = {"lr": 0.01, "params": list(range(len(moments)))}
    optimizer = {"state": state, "param_groups": [group]}
    extra_state = {**checkpoint["extra_state"], "ema": unrepaired.state_dict()}
    path = resaved(
        native,
        tmp_path / "dead.pt",
        model=unrepaired.state_dict(),
        last_optimizer_state=optimizer,
        extra_state=extra_state,
    )
    loaded = checkpoint_utils.load_checkpoint_to_cpu(path)

    model = build(checkpoint, native / "bin")
    assert list(loaded["model"]) == list(model.state_dict())
    assert list(loaded["extra_state"]["ema"]) == list(model.state_dict())
    after = list(model.named_parameters())
    state = loaded["last_optimizer_state"]["state"]
    if flat:
        sizes = [value.numel() for _, value in after]
        assert loaded["last_optimizer_state"]["param_groups"][0]["params"] == [0]
        moments = list(state[0]["exp_avg"].split(sizes))
    else:
        adam = torch.optim.Adam(model.parameters())
        adam.load_state_dict({**adam.state_dict(), "state": state})
        moments = [adam.state[value]["exp_avg"] for _, value in after]
    assert len(moments) == len(after)
    for (name, value), moment in zip(after, moments, strict=True):
        assert moment.numel() == value.numel() and moment.unique().tolist() == [mark[name]]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_torchscript_takes_the_model(checkpoint: dict[str, Any], native: Path) -> None:
    model = build(checkpoint, native / "bin").eval()
    tokens, length = torch.tensor([[4, 5, 6, 2]]), torch.tensor([4])
    scores, _ = torch.jit.script(model)(tokens, length, tokens)
    torch.testing.assert_close(scores, model(tokens, length, tokens)[0])


def test_the_module_in_which_a_number_stops_being_one_is_named(
    checkpoint: dict[str, Any], native: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = build(checkpoint, native / "bin")
    tokens, length = torch.tensor([[4, 5, 6, 2]]), torch.tensor([4])
    with NanDetector(model):
        scores, _ = model(tokens, length, tokens)
        (scores * float("inf")).sum().backward()
    assert re.search(r"detected in output of decoder\S*, shape: .*, backward", caplog.text)
    assert not any(module._forward_hooks for module in model.modules())


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


def test_fairseqs_own_checkpoints_are_written_beside_their_name(tmp_path: Path) -> None:
    """fairseq would write to <name>.tmp, which may be a file of another run, or a link."""
    from fairseq.checkpoint_utils import torch_persistent_save

    (tmp_path / "precious").write_text("precious")
    path = tmp_path / "checkpoint1.pt"
    (tmp_path / "checkpoint1.pt.tmp").symlink_to("precious")
    torch_persistent_save({"model": torch.ones(3)}, str(path))
    assert (tmp_path / "precious").read_text() == "precious"
    assert not path.is_symlink() and torch.equal(torch.load(path)["model"], torch.ones(3))
    assert len(list(tmp_path.iterdir())) == 3
