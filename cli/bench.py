"""``lightseq-bench``: measures whole runs of this package and of alternative systems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from lightseq_fairseq.cli.benchmark import runs
from lightseq_fairseq.cli.benchmark.generate import cases as generation
from lightseq_fairseq.cli.benchmark.generate import rows as generation_rows
from lightseq_fairseq.cli.benchmark.generate import test_set
from lightseq_fairseq.cli.benchmark.huggingface import cases as hugging_face
from lightseq_fairseq.cli.benchmark.huggingface import rows as hugging_face_rows
from lightseq_fairseq.cli.benchmark.runs import Bench, Unable
from lightseq_fairseq.cli.benchmark.train import cases as training
from lightseq_fairseq.cli.benchmark.train import commands
from lightseq_fairseq.cli.benchmark.train import corpus as corpora
from lightseq_fairseq.cli.benchmark.train import rows as training_rows
from lightseq_fairseq.cli.benchmark.train.shapes import SHAPES
from lightseq_fairseq.cli.start.commands import group


@group("lightseq-bench")
def main() -> None:
    """Measure the speed of training, of translation and of encoding on this machine."""


def _shared(name: str, rounds: int, vocabulary: bool = True) -> Callable[[Any], Any]:
    """Decorator: the options that benchmarks share; ``name`` is that of the benchmark.

    vocabulary: the corpus has a dictionary of any size.
    """
    by_corpus = f"{corpora.VOCABULARY} for translation, {corpora.TEXT_VOCABULARY} for text, "
    by_corpus += f"{corpora.MASKED_VOCABULARY} for RoBERTa and BART, without <mask>, "
    by_corpus += (
        f"{SHAPES['nllb_600m'].vocabulary} for NLLB, {SHAPES['marian_base'].vocabulary} for Marian"
    )
    size = click.option(
        "--vocabulary", type=click.IntRange(100, 300_000),
        help="Size of the dictionary, including fairseq's special words.",
        show_default=by_corpus,
    )  # fmt: skip
    options = (
        click.option(
            "--rounds", type=click.IntRange(1), default=rounds, show_default=True,
            help="Number of runs of each system; the systems take turns.",
        ),
        *([size] if vocabulary else []),
        click.option(
            "--output", type=click.Path(path_type=Path),
            help="JSON file for the result rows. Rows of the same case and system are replaced, "
            "others are kept.  [default: none]",
        ),
        click.option(
            "--logs", type=click.Path(path_type=Path), default=Path(f"build/bench-{name}"),
            help="Folder for the log and the report of each run.", show_default=True,
        ),
    )  # fmt: skip

    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


@main.command()
@click.option(
    "--case", "cases", multiple=True, default=["t2t_big/4096/bf16"], show_default=True,
    metavar="CASE,...",
    help="What to train. Translation: <model>/<max-tokens>/<precision>, with the models t2t_big, "
    "12e12d and 24e24d (t2t_big with 12 and 24 layers per side), base, iwslt, and tiny, which a "
    "CPU can run. Language models: <model>/<block>x<batch>/<precision>, with <batch> blocks of "
    "<block> tokens, as in gpt2_124m/1024x32/bf16, and the models gpt2_124m "
    "(transformer_lm_gpt3_small with dropout 0.1), lm_base (transformer_lm), gpt2_small "
    "(transformer_lm_gpt2_small: 24 layers), and lm_tiny for a CPU. Pre-training of RoBERTa: the "
    "same with roberta_base, roberta_large, and roberta_tiny for a CPU, as in "
    "roberta_base/512x64/bf16; or <model>/bertmix<tokens>/<precision>, with samples of 20 to 512 "
    "tokens and batches of up to <tokens> tokens (bertmix alone: 16384). "
    "Fine-tuning: <model>/sentences<batch>/<precision>, with batches of <batch> sentences of 10 to "
    "128 tokens in random order. BART: <model>/summaries<tokens>/<precision>, texts of 100 to 1024 "
    "tokens and their summaries in batches of up to <tokens> tokens (summaries alone: 16384), or "
    "<model>/denoising<block>x<batch>/<precision>, noised blocks of text (without x<batch>: 32), "
    "with bart_large and bart_tiny. NLLB: <model>/verses<batch>/<precision>, batches of <batch> "
    "pairs (verses alone: 64), or <model>/<max-tokens>/<precision>, with nllb_600m, nllb_1.3b, "
    "nllb_3.3b and nllb_tiny. Marian: as for translation, with marian_base, marian_big and "
    "marian_tiny. "
    "Precisions: bf16, fp16, and for ours fp8 (--bf16 --fp8). Add /x<n> for n GPUs, each with its "
    "own batch. You can repeat the flag.",
)  # fmt: skip
@click.option(
    "--systems",
    metavar="SYSTEM,...",
    help="Some of: ours, ours_packed (with --pack-tokens), fairseq_no_cudnn (cuDNN attention off), "
    "fairseq_no_cudnn_apex, fairseq, torch_compile, torch_compile_padded (bertmix with samples "
    "padded to 512), transformers (models of Hugging Face, compiled; bertmix padded to 512), "
    "transformers_graphs (with CUDA graphs, too).  "
    "[default: all that this machine can run]",
)
@click.option(
    "--updates", type=click.IntRange(1), default=300, show_default=True,
    help="Updates that are measured in a run, after the warm-up; rounded up to a multiple of 50.",
)  # fmt: skip
@click.option(
    "--warm-up", type=click.IntRange(0),
    help="Updates before the measured ones.  [default: for translation 4000 for ours, 500 for "
    "torch_compile, 150 for others; for language models and RoBERTa 150, but 1000 for ours with "
    "bertmix, sentences, summaries and verses]",
)  # fmt: skip
@click.option(
    "--corpus", type=click.Path(path_type=Path), default=Path("build/bench-corpus"),
    help="Folder of the sentence pairs; created if it does not exist.", show_default=True,
)  # fmt: skip
@click.option(
    "--pairs", type=click.IntRange(1), default=corpora.PAIRS, show_default=True,
    help="Number of sentence pairs in the corpus.",
)  # fmt: skip
@click.option(
    "--text", type=click.Path(path_type=Path), default=Path("build/bench-text"),
    help="Folder of the running text for language models, created if it does not exist.",
    show_default=True,
)  # fmt: skip
@click.option(
    "--masked", type=click.Path(path_type=Path), default=Path("build/bench-masked"),
    help="Folder of the texts for RoBERTa, created if it does not exist.", show_default=True,
)  # fmt: skip
@click.option(
    "--seq2seq", type=click.Path(path_type=Path), default=Path("build/bench-seq2seq"),
    help="Folder of the corpora for BART, NLLB and Marian, created if it does not exist.",
    show_default=True,
)  # fmt: skip
@click.option(
    "--tokens", type=click.IntRange(1), default=corpora.TOKENS, show_default=True,
    help="Number of tokens in each of these texts.",
)  # fmt: skip
@click.option(
    "--workers", type=click.IntRange(0), default=4, show_default=True,
    help="Data loading processes of each system.",
)  # fmt: skip
@_shared("train", rounds=3)
def train(
    cases: Sequence[str], systems: str | None, output: Path | None, corpus: Path, pairs: int,
    text: Path, masked: Path, seq2seq: Path, tokens: int, vocabulary: int | None, logs: Path,
    rounds: int, updates: int, warm_up: int | None, workers: int,
) -> None:  # fmt: skip
    """Train on a generated corpus with several systems, and compare them.

    \b
        lightseq-bench train --case t2t_big/4096/bf16 --systems ours,fairseq_no_cudnn

    Every run is a real training in its own process. The table shows target tokens per second,
    milliseconds per step (median, 20th and 80th percentile), the share of time in which the GPU is
    busy, the theoretical minimum time of a step divided by its measured time (floor), peak memory,
    the time of the first 100 updates, and the step's time by part.
    """
    able, gpu, about = runs.plan(training, cases, systems, "tiny/256/bf16", output)

    def ensured(case: training.Case) -> corpora.Corpus:
        kind, words = case.data, vocabulary or case.shape.vocabulary
        if kind is training.Data.PAIRS:
            folder = seq2seq / "pairs" if case.shape.is_marian else corpus
            return corpora.ensure(folder, pairs, words)
        if kind is training.Data.SUMMARIES:  # each is as long as about ten pairs
            folder, fewer = seq2seq / "summaries", max(pairs // 8, 1)
            return corpora.ensure(folder, fewer, words, corpora.SUMMARIES, "seq2seq")
        if kind is training.Data.VERSES:
            return corpora.ensure(seq2seq / "verses", pairs, words, corpora.VERSES, "seq2seq")
        if kind is training.Data.TEXT:
            return corpora.ensure_text(text, tokens, words)
        if kind is training.Data.NOISED:
            return corpora.ensure_text(
                seq2seq / "text", tokens, words, corpora.PARAGRAPHS, "seq2seq"
            )
        name, lines = {
            training.Data.MASKED: ("text", corpora.PARAGRAPHS),
            training.Data.MIX: (training.MIX, corpora.MIX),
            training.Data.CLASSES: ("sentences", corpora.SENTENCES),
        }[kind]
        return corpora.ensure_text(
            masked / name, tokens, words, lines, "masked",
            has_classes=kind is training.Data.CLASSES,
        )  # fmt: skip

    data = {case: ensured(case) for case, its_systems in able.items() if its_systems}

    def measure(case: training.Case, system: str, stem: Path) -> training_rows.Run:
        before = training.warm_up(system, case) if warm_up is None else warm_up
        before, measured = map(training.in_intervals, (before, updates))
        folder = data[case].folder.resolve()
        words = commands.command(
            case, system, folder, stem.with_suffix(".json"), before + measured, gpu, workers
        )
        log, report = runs.process(words, commands.environment(system), stem)
        steady = training_rows.intervals(log, before, before + measured)
        return training_rows.Run(before, steady, report)

    def row(case: training.Case, system: str, runs: list[training_rows.Run]) -> runs.Row:
        return training_rows.row(case, system, data[case], runs, about)

    runs.take_turns(Bench(measure, row, training_rows.table), able, rounds, logs, output)


@main.command()
@click.option(
    "--case", "cases", multiple=True,
    default=["t2t_big/btokens/beam5/bf16", "t2t_big/b1/beam4/bf16"], show_default=True,
    metavar="CASE,...",
    help="What to run. Translation: <model>/<batch>/beam<n>/<precision>. Models: those of "
    "lightseq-bench train. Batches: b<sentences>, or btokens<source tokens>, pads included "
    f"(btokens alone: {generation.MAX_TOKENS}). Precisions: bf16, fp16, fp32. Language models: "
    "<model>/b<prompts>/<prompt>+<new>/<precision>, with the tokens of each prompt and the tokens "
    "to generate greedily, as in gpt2_124m/b32/128+256/bf16. RoBERTa: "
    "<model>/<batch>/features/<precision>, for the features of the sentences, as in "
    "roberta_base/b32/features/bf16. BART: <model>/cnn<texts>/beam<n>/<precision>, with batches of "
    "<texts> texts to summarise as in CNN/DailyMail (cnn alone: 32), as in "
    "bart_large/cnn/beam4/bf16; or <model>/b<texts>/<shortest>-<longest>+<new>/<precision>, with "
    "the tokens of the texts, and those to generate greedily, as in "
    "bart_large/b32/260-440+128/bf16. Your own translation model: trained/<batch>/beam<n>/"
    "<precision>, with the folder trained in --data, which has checkpoint.pt and a test set by "
    "lightseq-preprocess from en to de. You can repeat the flag.",
)  # fmt: skip
@click.option(
    "--systems", metavar="SYSTEM,...",
    help="Some of: ours, fairseq_no_cudnn (cuDNN attention off), ctranslate2, transformers (GPT-2 "
    "and BART, greedily with a static cache, or RoBERTa, compiled; beam search of BART or NLLB).  "
    "[default: all that this machine can run]",
)  # fmt: skip
@click.option(
    "--sentences", type=click.IntRange(1, test_set.SENTENCES),
    help=f"Number of sentences, prompts or texts, at most {test_set.SENTENCES}.  [default: 200 "
    "sentences or 16 prompts at batch 1, else all sentences, or prompts of four batches]",
)  # fmt: skip
@click.option(
    "--passes", type=click.IntRange(1), default=3, show_default=True,
    help="Timed passes over the sentences in a run, after the warm-up.",
)  # fmt: skip
@click.option(
    "--data", type=click.Path(path_type=Path), default=Path("build/bench-generate-data"),
    help="Folder of the sentences and a checkpoint for each model; created if it does not exist.",
    show_default=True,
)  # fmt: skip
@_shared("generate", rounds=2)
def generate(
    cases: Sequence[str], systems: str | None, output: Path | None, data: Path,
    vocabulary: int | None, logs: Path, rounds: int, sentences: int | None, passes: int,
) -> None:  # fmt: skip
    """Translate a newstest-like test set, compute its features, or continue prompts, with several
    systems, and compare them.

    \b
        lightseq-bench generate --case t2t_big/b32/beam4/bf16 --systems ours,fairseq_no_cudnn

    The model has random weights, and hypotheses are as long as the longest source of their batch,
    so that all systems do the same work. Only the hypotheses of the case trained end by themselves.
    The table shows sentences and tokens per second (without those of prompts), the time to decode
    or encode all sentences (without loading the model or reading text), the time per batch, and
    peak memory.
    """
    able, gpu, about = runs.plan(generation, cases, systems, "tiny/b32/beam4/fp32", output)
    files = {}
    for model in dict.fromkeys(case.model for case in able):
        if model == generation.TRAINED:
            files[model] = test_set.trained(data / model)
            continue
        shape = generation.SHAPES[model]
        files[model] = test_set.ensure(data / model, shape, vocabulary or shape.vocabulary)

    def measure(case: generation.Case, system: str, stem: Path) -> runs.Row:
        count = sentences or _usual_count(case)
        words = generation.command(
            case, system, files[case.model].folder.resolve(), stem.with_suffix(".json"), count,
            passes, gpu,
        )  # fmt: skip
        _, report = runs.process(words, generation.environment(system, logs), stem)
        if "unable" in report:
            raise Unable(f"cannot run here: {report['unable']}")
        return report

    def row(case: generation.Case, system: str, runs: list[runs.Row]) -> runs.Row:
        by_tokens = {"max_tokens": case.max_tokens} if case.batch is None else {}
        return generation_rows.row(case, system, runs, {**about, **by_tokens})

    runs.take_turns(Bench(measure, row, generation_rows.table), able, rounds, logs, output)


@main.command()
@click.option(
    "--case", "cases", multiple=True, default=["roberta_base/sentences32"], show_default=True,
    metavar="CASE,...",
    help="What to run. BERT, RoBERTa and ModernBERT: <model>/sentences<batch>, classes of <batch> "
    "sentences of 10 to 128 tokens in random order; <model>/pairs<batch>, the same with 10 to 70 "
    "tokens, as in MNLI; <model>/tokens<batch>, a class for each token; <model>/mlm<block>x<batch>,"
    " masked blocks, as in bert_base/mlm512x64; <model>/b<batch>, features without training, as in "
    "roberta_base/b256. GPT-2: <model>/<block>x<batch>, as in gpt2/1024x32. BART: "
    "<model>/summaries<batch>, texts of 700 tokens on average and their summaries, as in "
    "bart_large/summaries16. Marian and NLLB: <model>/<batch>, sentence pairs and verses, as in "
    "marian_big/128 and nllb_600m/64. ViT: <model>/<batch>, images with 1000 classes, as in "
    "vit_b/256. Add /p0 to train without dropout, so that losses can be compared. Models: "
    f"{', '.join(hugging_face.MODELS)}; those with _tiny are for a CPU. "
    "You can repeat the flag.",
)  # fmt: skip
@click.option(
    "--systems", metavar="SYSTEM,...",
    help="Some of: ours (accelerate and the Trainer of transformers), ours_trainer (with "
    "lightseq_fairseq.huggingface.Trainer), transformers, transformers_compiled, "
    "transformers_graphs (compiled with CUDA graphs), and the last three with _grouped "
    "(sentences of similar length in a batch).  [default: all that this machine can run]",
)  # fmt: skip
@click.option(
    "--updates", type=click.IntRange(1), default=200, show_default=True,
    help="Updates, or batches of features, that are measured in a run; updates are rounded up to a "
    f"multiple of {hugging_face.BLOCK}.",
)  # fmt: skip
@click.option(
    "--warm-up", type=click.IntRange(0), default=200, show_default=True,
    help="Updates before the measured ones.",
)  # fmt: skip
@click.option(
    "--workers", type=click.IntRange(0), default=4, show_default=True,
    help="Data loading processes of each system.",
)  # fmt: skip
@_shared("huggingface", rounds=2, vocabulary=False)
def huggingface(
    cases: Sequence[str], systems: str | None, output: Path | None, logs: Path, rounds: int,
    updates: int, warm_up: int, workers: int,
) -> None:  # fmt: skip
    """Train models of Hugging Face, or compute features, with several systems, and compare them.

    \b
        lightseq-bench huggingface --case roberta_base/sentences32 --systems ours,transformers

    Every run is a process of its own, with random weights, sentences of random tokens or random
    images, and bfloat16. The table shows tokens per second without pads (of pairs, those of both
    sides) and sentences per second, or images per second, milliseconds per update or batch
    (median, 20th and 80th percentile of blocks), peak memory, the time from train() and from the
    start of the process to the end of the first update, the time of the whole run, and the losses
    of the first updates.
    """
    able, gpu, about = runs.plan(hugging_face, cases, systems, "roberta_tiny/sentences4", output)

    def measure(case: hugging_face.Case, system: str, stem: Path) -> runs.Row:
        measured = hugging_face.in_blocks(updates) if case.trains else updates
        report = stem.with_suffix(".json")
        words = hugging_face.command(case, system, report, warm_up, measured, workers, gpu)
        return runs.process(words, hugging_face.environment(), stem)[1]

    def row(case: hugging_face.Case, system: str, runs: list[runs.Row]) -> runs.Row:
        before = {"warm_up": warm_up} if case.trains else {}
        return {**hugging_face_rows.row(case, system, runs, about), **before}

    runs.take_turns(Bench(measure, row, hugging_face_rows.table), able, rounds, logs, output)


def _usual_count(case: generation.Case) -> int:
    """Default number of sentences or prompts in a run."""
    if case.new:
        return 16 if case.batch == 1 else 4 * (case.batch or 1)
    if case.shape.is_bart:
        return 8 * (case.batch or 1)
    return 200 if case.batch == 1 else test_set.SENTENCES


if __name__ == "__main__":
    main()
