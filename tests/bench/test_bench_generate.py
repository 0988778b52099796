"""``lightseq-bench generate``: its test set, its rows, and a complete run."""

from __future__ import annotations

import json
import subprocess
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest import mock

import helpers.digits as digits
import helpers.forked_commands as forked_commands
import pytest
import torch
from click.testing import CliRunner, Result
from helpers.bench_runs import bench_forked
from helpers.golden import matches, refusals

from lightseq_fairseq import fairseq_compat
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli import bench
from lightseq_fairseq.cli.benchmark.generate import cases, encode, rows, stopwatch, test_set
from lightseq_fairseq.cli.benchmark.generate.cases import SHAPES, Case, command, environment
from lightseq_fairseq.cli.benchmark.train import corpus

fairseq_compat.prepare()
from fairseq import checkpoint_utils  # noqa: E402
from fairseq.data import Dictionary  # noqa: E402
from fairseq.data.indexed_dataset import MMapIndexedDataset  # noqa: E402
from fairseq.models.roberta import RobertaHubInterface  # noqa: E402

VOCABULARY = 500


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all models' test sets, with that of tiny in it."""
    folder = tmp_path_factory.mktemp("bench")
    test_set.ensure(folder / "tiny", SHAPES["tiny"], VOCABULARY)
    return folder


def bench_generate(*words: object) -> Result:
    return CliRunner().invoke(bench.main, ["generate", *map(str, words)])


def bench_once(folder: Path, *words: object) -> tuple[Result, list[dict[str, Any]]]:
    """The result of the command with one pass in one round, and its rows. Only a GPU needs more
    passes before it."""
    once = ("--vocabulary", VOCABULARY, "--passes", 1, "--rounds", 1, "--logs", folder / "logs")
    short = {name: how._replace(warm_up=1) for name, how in cases.SYSTEMS.items()}
    with mock.patch.dict(cases.SYSTEMS, short):
        done = bench_forked("generate", *words, *once, "--output", folder / "rows.json")
    return done, json.loads((folder / "rows.json").read_text())


# --- test set


def test_sentences(data: Path) -> None:
    sources = MMapIndexedDataset(str(data / "tiny" / "test.en-de.en"))
    assert len(sources) == test_set.SENTENCES == 3003
    assert 27.5 < sources.sizes.mean() < 28.5
    assert all(2 <= len(sources[i]) <= 200 and sources[i][-1] == corpus.EOS for i in range(300))


def test_the_model_ends_no_sentence(data: Path) -> None:
    path = str(data / "tiny" / "checkpoint.pt")
    (model,), cfg = checkpoint_utils.load_model_ensemble([path])
    assert cfg.model.arch == "transformer_tiny"
    assert model.encoder.embed_tokens.weight is model.decoder.output_projection.weight
    tokens = torch.randint(4, VOCABULARY, (20, 9))
    with torch.no_grad():
        logits = model.eval()(tokens, torch.full((20,), 9), tokens)[0]
    above = (logits > logits[..., corpus.EOS, None]).sum(-1)
    assert above.min() > VOCABULARY / 4  # words; beam 5 considers the ten best


def test_the_test_set_is_pinned_and_kept(data: Path, tmp_path: Path) -> None:
    again = test_set.ensure(tmp_path / "again", SHAPES["tiny"], VOCABULARY)
    for name in ("dict.de.txt", "test.en-de.en.bin", "test.en-de.en.idx", "test.en-de.de.bin"):
        assert (again.folder / name).read_bytes() == (data / "tiny" / name).read_bytes()
    one, other = (torch.load(p, weights_only=False)["model"] for p in (
        again.checkpoint, data / "tiny" / "checkpoint.pt"))  # fmt: skip
    weights = [name for name in one if not name.endswith("_float_tensor")]  # an invalid file
    assert all(torch.equal(one[name], other[name]) for name in weights) and len(weights) > 50
    before = again.checkpoint.stat().st_mtime_ns
    assert test_set.ensure(again.folder, SHAPES["tiny"], VOCABULARY) == again
    assert again.checkpoint.stat().st_mtime_ns == before
    with pytest.raises(UserError, match="does not contain the test set of this run"):
        test_set.ensure(again.folder, SHAPES["tiny"], 600)
    with pytest.raises(UserError, match="does not contain the test set"):
        test_set.ensure(Path(__file__).parent, SHAPES["tiny"], VOCABULARY)


# --- rows


def report(**more: Any) -> dict[str, Any]:
    passes = [[0.1] * 98 + [0.2, 5.0], [0.1] * 100]
    return {"load_s": 1.0, "first_s": 30.0, "batch_s": passes, "sentences": 100, "tokens": 3000,
            "peak_gib": 2.5, **more}  # fmt: skip


def test_row() -> None:
    case = Case.parse("t2t_big/b1/beam4/bf16")
    slower = report(batch_s=[[0.2] * 100], load_s=3.0, first_s=40.0, peak_gib=2.753)
    row = rows.row(case, "ours", [report(), slower], {"commit": "abc"})
    assert row == {
        "commit": "abc", "case": "t2t_big/b1/beam4/bf16", "system": "ours", "sentences_per_s": 6.67,
        "tokens_per_s": 200, "decode_s": 15.0, "decode_s_p20": 10.0, "decode_s_p80": 20.0,
        "p50_ms": 100.0, "p99_ms": 200.0, "load_s": 2.0, "first_s": 35.0, "peak_gib": 2.75,
        "sentences": 100, "tokens": 3000, "rounds": 2,
    }  # fmt: skip
    native = {**row, "system": "fairseq_no_cudnn", "decode_s": 60.0}
    lines = rows.table([native, row])
    assert [line.split()[:4] for line in lines[2:]] == [
        ["ours", "6.7", "200", "4.00"],
        ["fairseq_no_cudnn", "6.7", "200", "1.00"],
    ]


# --- the command


def test_commands_differ_in_nothing_but_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case.parse("base/b32/beam5/fp16")
    assert str(case) == "base/b32/beam5/fp16" and case.batch == 32
    for name, tokens in (("btokens", 18500), ("btokens4096", 4096)):
        by_tokens = Case.parse(f"base/{name}/beam5/fp16")
        assert (by_tokens.batch, by_tokens.max_tokens) == (None, tokens)
        assert str(by_tokens) == f"base/{name}/beam5/fp16"
    words = {
        system: command(case, system, tmp_path, tmp_path / "r.json", 90, 3, True)
        for system in cases.SYSTEMS
    }
    ours, native = words["ours"], words["fairseq_no_cudnn"]
    warm = ours.index("--warm-up") + 1
    assert [*ours[:warm], "1", *ours[warm + 1 :], "--native"] == native
    assert [w.replace(".ctranslate", ".decode") for w in words["ctranslate2"]] == native[:-1]
    assert "--cpu" in command(case, "ours", tmp_path, tmp_path / "r.json", 90, 3, False)
    assert environment("fairseq_no_cudnn", tmp_path)["LIGHTSEQ_CUDNN_ATTENTION"] == "0"


def test_ctranslate2_finds_cublas_under_the_name_it_wants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "torch" / "libcublas.so.13"
    library.parent.mkdir()
    library.write_text("code")
    monkeypatch.setattr(cases, "_cublas", lambda: [library])
    monkeypatch.setenv("LD_LIBRARY_PATH", "/before")
    for _ in range(2):
        path = environment("ctranslate2", tmp_path)["LD_LIBRARY_PATH"].split(":")
        assert (Path(path[0]) / "libcublas.so.12").read_text() == "code"
        assert path[1:] == [str(library.parent), "/before"]
    assert "LD_LIBRARY_PATH" not in environment("ours", tmp_path)


@pytest.mark.parametrize(("words", "sentence"), refusals(__file__, "test_bench_generate"))
def test_refusals(words: str, sentence: str) -> None:
    done = bench_generate(*words.split())
    assert done.exit_code == 2
    assert matches(done.stderr.splitlines()[-1], f"lightseq-bench: error: {sentence}")


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = bench_generate()
    assert done.exit_code == 2 and "t2t_big/btokens/beam5/bf16 needs a GPU" in done.stderr


def test_everything_once(data: Path, tmp_path: Path) -> None:
    names = "tiny/b8/beam2/fp32,tiny/btokens300/beam2/bf16"
    done, rows = bench_once(tmp_path, "--case", names, "--data", data, "--sentences", 12)
    found = {(row["case"], row["system"]): row for row in rows}
    systems = [system for system in cases.SYSTEMS if system != "transformers"]
    all_three = {("tiny/b8/beam2/fp32", system) for system in systems}
    # CTranslate2 either says that it has no bfloat16 on this CPU, or it works.
    refused = (
        "tiny/btokens300/beam2/bf16 ctranslate2: cannot run here: Requested bfloat16" in done.stderr
    )
    in_bf16 = {("tiny/btokens300/beam2/bf16", s) for s in systems if s != "ctranslate2"}
    assert set(found) == all_three | in_bf16 | (
        set() if refused else {("tiny/btokens300/beam2/bf16", "ctranslate2")}
    )
    for (case, system), row in found.items():
        assert f"\n{system} " in done.stdout or done.stdout.startswith(system)
        assert row["gpu"] == "none" and len(row["commit"]) == 40 and row["sentences"] == 12
        # A pass may be one search; both numbers are rounded.
        assert 0 < row["p50_ms"] <= row["p99_ms"] < 1e3 * row["decode_s"] + 0.1
        assert row["peak_gib"] > 0.1 and row["first_s"] > 0 and row["load_s"] > 0
        assert row.get("max_tokens") == (300 if "btokens" in case else None)
    # All systems do the same work: hypotheses of the same lengths.
    for case in {case for case, _ in found}:
        assert len({row["tokens"] for (c, _), row in found.items() if c == case}) == 1


# --- BART and NLLB


def test_cases_of_large_models() -> None:
    for name, batch in (
        ("bart_large/cnn/beam4/bf16", 32), ("bart_large/cnn8/beam4/fp16", 8),
        ("bart_large/b64/260-440+128/bf16", 64), ("nllb_600m/b1/beam4/bf16", 1),
        ("nllb_600m/b32/beam4/bf16", 32), ("nllb_600m/btokens/beam4/bf16", None),
    ):  # fmt: skip
        case = Case.parse(name)
        assert str(case) == name and case.batch == batch
        assert all(cases.why_not(system, case) is None for system in ("ours", "fairseq_no_cudnn"))
    sample = {"net_input": {"src_tokens": torch.zeros(2, 9)}}
    names = "bart_large/cnn/beam4", "bart_large/b8/9-20+30", "nllb_600m/b32/beam4"
    wanted = [stopwatch.wanted(Case.parse(f"{name}/bf16"), sample) for name in names]
    assert wanted == [141, 30, 9]


def test_drawn_texts() -> None:
    case = Case.parse("bart_large/b32/260-440+128/bf16")
    assert (case.source, case.prompt, case.new, case.beam) == ((260, 440), 0, 128, 1)
    batches = stopwatch.prompts(case, 100, 500)
    assert [len(batch) for batch in batches] == [32, 32, 32]
    lengths = [len(text) for batch in batches for text in batch]
    assert 260 <= min(lengths) < 270 and 430 < max(lengths) <= 440
    assert all(text.min() >= corpus.SPECIALS for batch in batches for text in batch)
    again = stopwatch.prompts(case, 100, 500)
    assert all(torch.equal(a, b) for a, b in zip(batches[2], again[2], strict=True))


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("bart_tiny/cnn2/beam2/fp32", 2 * 141),
        ("bart_tiny/b2/9-20+12/fp32", 4 * 12),
        ("nllb_tiny/b4/beam2/fp32", None),
    ],
)
def test_large_models_once(name: str, tokens: int | None, tmp_path: Path) -> None:
    """All systems make hypotheses of the same lengths, or the run fails."""
    count = 4 if "+" in name else 2
    _, rows = bench_once(
        tmp_path, "--case", name, "--data", tmp_path / "data", "--sentences", count
    )
    assert {row["system"] for row in rows} == {*cases.SYSTEMS}
    assert {row["tokens"] for row in rows} == {tokens or rows[0]["tokens"]}


# --- a trained model


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a trained model and its test set, in the folder of all models."""
    return digits.trained_folder(tmp_path_factory.mktemp("own"))


def test_sentences_of_a_trained_model_end(trained: Path, tmp_path: Path) -> None:
    case = "trained/btokens200/beam2/fp32"
    done, rows = bench_once(tmp_path, "--case", case, "--data", trained.parent, "--sentences", 40)
    assert f"{case} without transformers: transformers has no such" in done.stderr
    found = {row["system"]: row for row in rows}
    assert found.keys() == {"ours", "fairseq_no_cudnn", "ctranslate2"}
    assert {row["sentences"] for row in rows} == {40}
    targets = MMapIndexedDataset(str(trained / "test.en-de.de"))
    assert {row["tokens"] for row in rows} == {rows[0]["tokens"]}
    assert rows[0]["tokens"] == pytest.approx(targets.sizes[:40].sum(), rel=0.05)
    row = found["ours"]
    assert row["same_words"] == 1 and row["steps"] == row["steps_one_by_one"]  # on a CPU
    assert sum("steps" in row for row in rows) == 1


def test_steps_that_one_search_saves(trained: Path, tmp_path: Path) -> None:
    case, report = Case.parse("trained/btokens200/beam2/fp32"), tmp_path / "r.json"
    as_on_a_gpu = (
        "from lightseq_fairseq.cli.benchmark.generate import decode\n"
        "from lightseq_fairseq.plugins import generator\n"
        'generator.TOGETHER = ("cpu",)\n'
        "decode.main()\n"
    )
    words = command(case, "ours", trained, report, 40, 1, False)
    python = [str(forked_commands.python()), "-c", as_on_a_gpu]
    subprocess.run([*python, *words[3:]], check=True)
    found = json.loads(report.read_text())
    assert found["same_words"] == 1 and found["one_by_one_s"] > 0
    assert 10 < found["steps"] < 0.8 * found["steps_one_by_one"]


def test_what_a_trained_model_lacks(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no checkpoint.pt and no test.en-de.en.bin: copy"):
        test_set.trained(tmp_path)


# --- RoBERTa


def test_cases_of_features() -> None:
    case = Case.parse("roberta_large/btokens/features/bf16")
    assert (case.batch, case.max_tokens, case.beam, case.precision) == (None, 18500, 0, "bf16")
    for name in ("roberta_large/btokens/features/bf16", "roberta_base/b32/features/fp16"):
        assert str(Case.parse(name)) == name
    assert cases.why_not("ours", case) is None
    assert "CTranslate2 cannot load" in (cases.why_not("ctranslate2", case) or "")


def test_sources_for_roberta(data: Path) -> None:
    """The same sentences in fairseq-generate's order, with <s>, and pads on the right."""
    made = test_set.ensure(data / "roberta_tiny", SHAPES["roberta_tiny"], VOCABULARY)
    words = Dictionary.load(str(made.folder / "dict.txt"))
    given = Namespace(data=made, sentences=50, case=Case.parse("roberta_tiny/b8/features/fp32"))
    batches = stopwatch.sentence_batches(given, words)
    found: list[list[int]] = []
    for batch in batches:
        tokens = batch["net_input"]["src_tokens"]
        real = [row[row.ne(words.pad())].tolist() for row in tokens]
        assert all(row.tolist()[: len(it)] == it for row, it in zip(tokens, real, strict=True))
        assert batch["ntokens"] == sum(map(len, real))
        found += sorted(real, key=len)
    sources = MMapIndexedDataset(str(data / "tiny" / "test.en-de.en"))
    expected = [[words.bos(), *sources[i].tolist()] for i in range(50)]
    assert sorted(found) == sorted(expected)
    assert list(map(len, found)) == sorted(map(len, expected))
    assert [batch["nsentences"] for batch in batches] == [8] * 6 + [2]
    by_tokens = given.case._replace(batch=None, max_tokens=300)
    for batch in stopwatch.sentence_batches(Namespace(**{**vars(given), "case": by_tokens}), words):
        assert batch["net_input"]["src_tokens"].numel() <= 300


def test_features_are_computed(data: Path, tmp_path: Path) -> None:
    case, systems = "roberta_tiny/btokens300/features/bf16", ("ours", "fairseq_no_cudnn")
    done, found = bench_once(
        tmp_path, "--case", case, "--data", data, "--sentences", 24,
        "--systems", f"{','.join(systems)},ctranslate2",
    )  # fmt: skip
    assert "CTranslate2 cannot load" in done.stderr
    assert [(row["case"], row["system"]) for row in found] == [(case, name) for name in systems]
    sources = MMapIndexedDataset(str(data / "roberta_tiny" / "test.en-de.en"))
    for row in found:
        assert (row["sentences"], row["tokens"]) == (24, int(sources.sizes[:24].sum()) + 24)
        assert row["sentences_per_s"] == pytest.approx(24 / row["decode_s"], rel=0.02)
        assert row["max_tokens"] == 300


@pytest.mark.parametrize(
    ("system", "arch"), [("ours", "LSRobertaModel"), ("fairseq_no_cudnn", "RobertaModel")]
)
def test_systems_differ_in_the_model(
    system: str, arch: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both go through fairseq's interface, in evaluation mode and without gradients."""
    made = test_set.ensure(data / "roberta_tiny", SHAPES["roberta_tiny"], VOCABULARY)
    case = Case.parse("roberta_tiny/b8/features/bf16")
    words = command(case, system, made.folder, tmp_path / "r.json", 16, 1, False)
    assert words[2].endswith(".generate.encode")
    seen = set()
    original = RobertaHubInterface.extract_features

    def watched(self: Any, tokens: Any, return_all_hiddens: bool = False) -> Any:
        found = original(self, tokens, return_all_hiddens)
        assert not self.model.training and not torch.is_grad_enabled()
        seen.add((type(self.model).__name__, tokens.device.type, found.dtype))
        return found

    monkeypatch.setattr(RobertaHubInterface, "extract_features", watched)
    monkeypatch.setattr("sys.argv", words[2:])
    encode.main()
    assert seen == {(arch, "cpu", torch.bfloat16)}
    assert json.loads((tmp_path / "r.json").read_text())["sentences"] == 16


# --- language models


def test_cases_of_language_models() -> None:
    case = Case.parse("gpt2_124m/b32/128+256/bf16")
    assert (case.batch, case.prompt, case.new, case.precision) == (32, 128, 256, "bf16")
    assert str(case) == "gpt2_124m/b32/128+256/bf16"
    assert Case.parse("gpt2_124m/b256/128+256/bf16") == case._replace(batch=256)
    assert cases.why_not("ours", case) is None
    reasons = {
        model: cases.why_not("transformers", Case.parse(f"{model}/b1/8+8/fp32")) or ""
        for model in ("gpt2_124m", "gpt2_small", "lm_base")
    }
    assert "runs only GPT-2 here" in reasons["lm_base"]
    assert all("only GPT-2" not in reasons[model] for model in ("gpt2_124m", "gpt2_small"))
    assert "no such translation model" in (
        cases.why_not("transformers", Case.parse("base/b1/beam4/fp32")) or ""
    )


@pytest.mark.parametrize("model", ["lm_tiny", "gpt2_124m"])
def test_a_language_model_ends_no_text(model: str, tmp_path: Path) -> None:
    """The row of </s> in the output projection is 0, also if that is the embedding."""
    shape = SHAPES[model]._replace(decoder_layers=1)
    made = test_set.ensure(tmp_path / "data", shape, 300)
    (built,), _ = checkpoint_utils.load_model_ensemble([str(made.checkpoint)])
    weight = built.decoder.output_projection.weight
    assert not weight[corpus.EOS].any() and weight[corpus.EOS + 1].any()
    assert made.vocabulary == 300 and not (made.folder / "test.en-de.en.bin").exists()


def test_prompts_are_continued(tmp_path: Path) -> None:
    systems = "ours,fairseq_no_cudnn"
    _, rows = bench_once(
        tmp_path, "--case", "lm_tiny/b4/9+7/fp32,lm_tiny/b1/3+20/fp32", "--data", tmp_path / "data",
        "--sentences", 4, "--systems", systems,
    )  # fmt: skip
    found = {(row["case"], row["system"]): row for row in rows}
    for case, tokens in (("lm_tiny/b4/9+7/fp32", 28), ("lm_tiny/b1/3+20/fp32", 80)):
        for system in systems.split(","):
            row = found[case, system]
            assert (row["sentences"], row["tokens"]) == (4, tokens)
            assert row["tokens_per_s"] == pytest.approx(tokens / row["decode_s"], rel=0.02)
