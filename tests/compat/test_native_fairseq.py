"""fairseq's own commands and checkpoints after prepare(): runs of all commands, and files that load
safely, without the dead parameters of 0.12.2."""

from __future__ import annotations

import argparse
import os
import pickle
import random
import re
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.interpreters import run_code

from lightseq_fairseq import fairseq_compat
from lightseq_fairseq.base.errors import UserError

fairseq_compat.prepare()

from fairseq import checkpoint_utils, tasks  # noqa: E402
from fairseq.logging import meters  # noqa: E402
from fairseq.modules.transformer_layer import TransformerEncoderLayerBase  # noqa: E402
from fairseq.nan_detector import NanDetector  # noqa: E402

from lightseq_fairseq.fairseq_compat import layers  # noqa: E402

SPLITS = {"train": 50, "valid": 21, "test": 19}
MODEL = """--encoder-layers 2 --decoder-layers 1 --encoder-embed-dim 16 --decoder-embed-dim 16
    --encoder-ffn-embed-dim 32 --decoder-ffn-embed-dim 32 --encoder-attention-heads 2
    --decoder-attention-heads 2 --share-all-embeddings"""
LEARNING = """--optimizer adam --criterion label_smoothed_cross_entropy --lr 0.01 --max-tokens 100
    --num-batch-buckets 3 --num-workers 0 --cpu --eval-bleu --eval-bleu-args {"max_len_b":9}"""
GERMAN = "ein zwei drei vier haus baum katze hund"


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
    run = run_code(
        "import contextlib, gc, importlib, sys\n"
        "gc.disable()\n"  # for each worker that a command leaves it would wait 5 s
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


# Files


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


# Dead parameters of 0.12.2


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
