"""Bad input ends in one sentence on stderr that says what to do, and exit status 2; no file
changes."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import Result
from helpers.cli_runs import SMALL, SPLITS, binarise, digests, run, succeed

LS = "--arch ls_transformer_tiny"
NATIVE = "--arch transformer_tiny --optimizer adam"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with good data, bad data, checkpoints of both kinds and a truncated one."""
    place = tmp_path_factory.mktemp("place")
    binarise(place).rename(place / "bin")
    binarise(place / "other", words=5).rename(place / "other_words")
    for name, pattern in (
        ("no_dictionary", "dict.*"),
        ("no_train", "train.*"),
        ("no_valid", "valid.*"),
        ("one_side", "*.en.[bi]*"),
    ):
        shutil.copytree(place / "bin", place / name, ignore=shutil.ignore_patterns(pattern))
    for name, form in (("pieces", "\u2581{}"), ("subwords", "{}@@")):
        shutil.copytree(place / "bin", place / name)
        dictionary = place / name / "dict.en.txt"
        words = [line.split() for line in dictionary.read_text().splitlines()]
        dictionary.write_text("".join(f"{form.format(word)} {count}\n" for word, count in words))
    shutil.copytree(place / "bin", place / "two_valid")
    for path in (place / "bin").glob("valid.*"):
        shutil.copy(path, place / "two_valid" / path.name.replace("valid", "valid1"))
    shutil.copytree(place / "bin", place / "swapped_words")
    dictionary = place / "swapped_words" / "dict.de.txt"
    first, second, *others = dictionary.read_text().splitlines()
    dictionary.write_text("\n".join([second, first, *others]) + "\n")
    texts = [(f"--{split}pref", place / "text" / split) for split in SPLITS]
    succeed(
        "preprocess", "-s", "de", "-t", "en", "--destdir", place / "joined", "--joined-dictionary",
        *(word for pair in texts for word in pair),
    )  # fmt: skip
    shutil.copytree(place / "bin", place / "renamed_dictionaries")
    for language, name in (("de", "from"), ("en", "to")):
        dictionary = place / "renamed_dictionaries" / f"dict.{language}.txt"
        dictionary.rename(dictionary.with_name(f"{name}.txt"))
    (place / "latin1.de").write_bytes(b"caf\xe9\n" + b"un mot\n" * 20_000)
    (place / "latin1_later.de").write_bytes(b"un mot\n" * 20_000 + b"caf\xe9\n")
    for name in ("latin1", "latin1_later"):
        (place / f"{name}.en").write_text("a word\n" * 20_001)
    (place / "dotted.tasks").mkdir()
    (place / "dotted.tasks" / "__init__.py").write_text("")
    (place / "tasks").mkdir()
    (place / "tasks" / "__init__.py").write_text(TASKS)
    (place / "empty").mkdir()
    (place / "a_file").write_text("text\n")
    (place / "half_lexicon").write_text("w1 v1\nw2\n")

    # 20 words, far more than the positions of the checkpoints below; an empty line; a single word.
    (place / "long.de").write_text(" ".join(["w1"] * 20) + "\n\nw2\n")
    (place / "long.en").write_text("v1\n\nv2\n")
    (place / "short.de").write_text("\nw2\n\n")
    (place / "short.en").write_text("\nv2\n\n")
    for name in ("long", "short"):
        succeed(
            "preprocess", "-s", "de", "-t", "en", "--destdir", place / name,
            "--srcdict", place / "bin/dict.de.txt", "--tgtdict", place / "bin/dict.en.txt",
            *(word for split in SPLITS for word in (f"--{split}pref", place / name)),
        )  # fmt: skip

    positions = ["--max-source-positions", "15", "--max-target-positions", "15"]
    for name, data, kind in (
        ("ours", "bin", LS),
        ("native", "bin", NATIVE),
        ("shared", "joined", f"{LS} --share-all-embeddings"),
    ):
        succeed(
            "train", place / data, *kind.split(), *SMALL, *positions, "--save-dir", place / name
        )
    state = torch.load(place / "ours" / "checkpoint_last.pt", weights_only=False)
    torch.save({"model": state["model"]}, place / "weights.pt")
    state["model"]["decoder.layers.0.fc1.weight"].fill_(torch.nan)
    torch.save(state, place / "diverged.pt")
    (place / "damaged").mkdir()
    whole = (place / "ours" / "checkpoint_last.pt").read_bytes()
    (place / "damaged" / "checkpoint_last.pt").write_bytes(whole[: len(whole) // 2])
    return place


@pytest.fixture
def launch(place: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Result]:
    """Runs a line such as "train bin --lr 1" in `place`."""
    monkeypatch.chdir(place)

    def launch(line: str) -> Result:
        command, *words = shlex.split(line)
        return run(command, *words)

    return launch


TASKS = """
from fairseq.tasks import TASK_REGISTRY, register_task
from fairseq.tasks.translation import TranslationConfig, TranslationTask


class OwnDictionaries(TranslationTask):
    @classmethod
    def setup_task(cls, cfg, **kwargs):
        source, target = (cls.load_dictionary(f"{cfg.data}/{name}.txt") for name in ("from", "to"))
        cfg.source_lang, cfg.target_lang = "de", "en"
        return cls(cfg, source, target)


class NoSourceDictionary(TranslationTask):
    is_building = False

    def build_model(self, *args, **kwargs):
        self.is_building = True
        try:
            return super().build_model(*args, **kwargs)
        finally:
            self.is_building = False

    @property
    def source_dictionary(self):
        if not self.is_building:
            raise NotImplementedError
        return self.src_dict


if "own_dictionaries" not in TASK_REGISTRY:
    register_task("own_dictionaries", dataclass=TranslationConfig)(OwnDictionaries)
    register_task("no_source_dictionary", dataclass=TranslationConfig)(NoSourceDictionary)
"""
SIZE = " ".join(SMALL)
POSITIONS = "--max-source-positions 15 --max-target-positions 15"
TRAIN = f"train bin {LS} {SIZE} {POSITIONS}"
TRAIN_NATIVE = f"train bin {NATIVE} {SIZE} {POSITIONS}"
OURS = "--path ours/checkpoint_last.pt"
THEIRS = "--path native/checkpoint_last.pt --native"
OVERFLOW = "--memory-efficient-fp16 --fp16 --fp16-init-scale 1073741824 --min-loss-scale 536870912"
DRAWN = "--input text/test.de --sampling --nbest 5"
SHORT = "--max-len-b 3"
TRAIN_TEXT = "train bin --task language_modeling --arch ls_transformer_lm"
SKIP = "--skip-invalid-size-inputs-valid-test"

BAD = [
    # data
    (f"train nowhere {LS}", ["nowhere", "does not exist", "lightseq-preprocess"]),
    (f"train nowhere {NATIVE} --max-tokens 9", ["nowhere", "does not exist"]),
    (f"train a_file {LS}", ["a_file", "lightseq-preprocess"]),
    (f"train empty {LS}", ["empty", "sentence pairs", "lightseq-preprocess"]),
    (f"train no_dictionary {LS}", ["dict.de.txt", "lightseq-preprocess"]),
    (f"train no_train {LS}", ["no_train", "train", "--trainpref"]),
    (f"train no_valid {LS}", ["no_valid", "valid", "--validpref"]),
    (f"train bin {LS} -s de -t fr", ["dict.fr.txt", "-t"]),
    (f"train bin {LS} --valid-subset valid,nothing", ["nothing", "--valid-subset"]),
    (f"train two_valid {LS} {SIZE}", ["valid1", "--combine-val", "--ignore-unused-valid-subsets"]),
    (f"train two_valid {NATIVE} {SIZE}", ["valid1", "--combine-val"]),
    (f"generate nowhere {OURS}", ["nowhere", "does not exist"]),
    (f"generate bin {OURS} --gen-subset no", ["no split", "--gen-subset"]),
    (f"validate bin {OURS} --valid-subset no --max-tokens 99", ["no split"]),
    (f"train one_side {LS}", ["without its en side", "lightseq-train reads"]),
    (f"validate one_side {OURS}", ["without its en side", "lightseq-validate reads"]),
    (f"generate one_side {OURS} --prefix-size 1", ["without its en side", "--prefix-size"]),
    (f"generate one_side {OURS} --score-reference", ["without its en side", "--score-reference"]),
    (f"interactive no_dictionary {OURS}", ["dict.de.txt"]),
    (f"interactive bin {OURS} --input gone.de", ["gone.de", "not exist"]),
    ("preprocess -s de -t en --trainpref gone --destdir out", ["gone.de", "does not exist"]),
    ("preprocess --trainpref text/train -s de -t en --destdir bin", ["bin/dict.de.txt", "exists"]),
    ("preprocess -s de -t en --trainpref latin1 --destdir out", ["not UTF-8", "iconv"]),
    ("preprocess -s de -t en --trainpref latin1_later --destdir out", ["not UTF-8", "0xe9"]),
    # names
    ("train bin --arch ls_transformer_tiyn", ["ls_transformer_tiyn", "ls_transformer_tiny"]),
    ("train bin --arch transformer_tiyn", ["transformer_tiyn", "transformer_tiny"]),
    (f"train bin {LS} --optimizer ls_adma", ["ls_adma", "ls_adam"]),
    (f"train bin {LS} --criterion=ls_smoothed_cross_entropy", ["ls_label_smoothed_cross_entropy"]),
    (f"train bin {LS} --lr-scheduler inverse_root", ["inverse_root", "inverse_sqrt"]),
    (f"train bin {LS} --task tranlation", ["tranlation", "translation"]),
    (f"train bin {LS} --task denoising", ["--task denoising", "--task translation"]),
    (f"train bin {LS} --task language_modeling", ["trains on sentence pairs", "language_modeling"]),
    (f"train bin {LS} --task masked_lm", ["trains on sentence pairs", "masked_lm"]),
    ("train bin --arch ls_transformer_lm", ["running text", "--task translation", "language_mod"]),
    (f"{TRAIN_TEXT} --pack-tokens", ["sentence pairs", "remove --pack-tokens"]),
    (TRAIN_TEXT, ["sentence pairs (dict.de.txt, dict.en.txt)", "--only-source"]),
    (f"{TRAIN_TEXT} --scale-fc", ["--scale-fc", "LayerNorm within a sublayer", "--native"]),
    (f"train bin {LS} --optimizer qqqq", ["qqqq", "--optimizer"]),
    (f"train bin {LS} --user-dir gone", ["gone", "does not exist"]),
    # sizes
    (f"{TRAIN} --max-tokens 7", ["10 tokens", "--max-tokens", "is 7", "raise it to 10"]),
    (f"{TRAIN} --max-tokens 3", ["too long", "4 tokens", "raise --max-tokens"]),
    (f"{TRAIN_NATIVE} --max-tokens 7", ["10 tokens", "--max-tokens", "raise it to 10"]),
    (f"{TRAIN} --max-tokens-valid 5", ["--max-tokens-valid) is 5", "raise it to"]),
    (f"generate bin {OURS} --max-tokens 7", ["--max-tokens", "is 7", "raise it to"]),
    (f"generate long {OURS}", ["Sentence 0", "21", "15", "--skip-invalid"]),
    ("generate long --path native/checkpoint_last.pt --native", ["Sentence 0", "--skip-invalid"]),
    (f"validate long {OURS} --max-tokens 99", ["Sentence 0", "--skip-invalid"]),
    (f"generate bin {OURS} --max-source-positions 2 {SKIP}", ["too long"]),
    # fails in validation
    (f"train long {LS} {SIZE} {POSITIONS}", ["Sentence 0", "--skip-invalid"]),
    (f"interactive bin {OURS} --input long.de", ["Sentence 0", "21", "15"]),
    # flags
    (f"{TRAIN} --fp16", ["--fp16", "GPU", "--bf16"]),
    (f"{TRAIN} --offload-activations", ["--offload-activations", "use --checkpoint-activations"]),
    (f"{TRAIN} --adaptive-softmax-cutoff 5,9", ["--adaptive-softmax-cutoff", "--native"]),
    (f"{TRAIN} --quant-noise-pq 0.1", ["--quant-noise-pq", "--native"]),
    (f"train bin --arch transformer_tiny {SIZE}", ["--optimizer is missing"]),
    (f"train bin {NATIVE}", ["--max-tokens or --batch-size"]),
    (f"{TRAIN_NATIVE} {OVERFLOW}", ["Minimum loss scale reached"]),
    (f"{TRAIN} --update-epoch-batch-itr yes", ["--update-epoch-batch-itr", "True nor False"]),
    (f"{TRAIN} --eval-bleu --eval-bleu-args '{{\"lenpen\": 99}}'", ["lenpen in --eval-bleu-args"]),
    (f"generate bin {OURS} --lenpen 1000", ["--lenpen is 1000", "from -50 to 50"]),
    (f"generate bin {THEIRS} --lenpen nan", ["--lenpen is nan", "use a number"]),
    (f"generate bin {THEIRS} --constraints", ["--constraints", "lightseq-interactive"]),
    (f"interactive bin {OURS} {DRAWN} --constraints", ["use only one of them"]),
    (f"interactive bin {THEIRS} {DRAWN} --constraints", ["use only one of them"]),
    (f"interactive bin {OURS} {DRAWN} --sampling-topk 99", ["--sampling-topk", "lower it"]),
    (f"interactive bin {THEIRS} {DRAWN} --sampling-topk 99", ["--sampling-topk", "lower it"]),
    (f"interactive bin {THEIRS} {DRAWN} --temperature 1e-30", ["no token", "--temperature"]),
    (f"{TRAIN} --share-all-embeddings", ["--share-all-embeddings", "--joined-dictionary"]),
    (f"{TRAIN} --distributed-world-size 3", ["--distributed-world-size is 3"]),
    (f"{TRAIN} --save-dir a_file/below", ["a_file/below", "--save-dir"]),
    (f"{TRAIN} --save-dir a_file", ["a_file", "--save-dir"]),
    ("train bin", ["--arch is missing"]),
    (f"{TRAIN} --update-freq 0", ["--update-freq is 0: it must be at least 1"]),
    (f"{TRAIN} --save-interval 0", ["--save-interval is 0: it must be at least 1"]),
    (f"{TRAIN} --log-interval 0", ["--log-interval is 0: it must be at least 1"]),
    (f"{TRAIN} --num-workers -1", ["--num-workers is -1: it must be at least 0"]),
    (f"{TRAIN} --save-dir . --encoder-embed-path gone.vec", ["gone.vec", "does not exist"]),
    (f"{TRAIN} --adam-betas '(0.9)'", ["--adam-betas (0.9)", "(0.9, 0.98)"]),
    (f"{TRAIN} --beam 4",
     ["no flag --beam", "flag of lightseq-generate and lightseq-interactive."]),
    (f"{TRAIN} --output x",
     ["no flag --output", "lightseq-generate, lightseq-average and lightseq-"]),
    (f"{TRAIN} --max-token 4",
     ["lightseq-train has no flag --max-token: did you mean --max-tokens?"]),
    (f"{TRAIN} --criterion ls_label", ["named ls_label: did you mean ls_label_smoothed_cross_e"]),
    (f"{TRAIN} --frobnicate", ["lightseq-train has no flag --frobnicate: --fairseq-help"]),
    (f"{TRAIN} --optimizer sgd --adam-eps 1", ["of --optimizer adam, which", "remove --adam-eps"]),
    (f"{TRAIN} --encoder-hidden-size 1", ["a flag of --arch lstm, which"]),
    (f"{TRAIN} --max-update x", ["--max-update cannot be x: it must be a whole number."]),
    (f"{TRAIN} --clip-norm x", ["--clip-norm cannot be x: it must be a number."]),
    (f"{TRAIN} --ddp-backend x", ["--ddp-backend cannot be x: choose one of ", "legacy_ddp"]),
    (f"{TRAIN} --cpu=3", ["--cpu takes no value:"]),
    (f"{TRAIN} more", ["lightseq-train does not expect the argument more"]),
    (f"{TRAIN} --seed", ["--seed has no value: write one"]),
    (f"train {LS}", ["The data folder is missing", "lightseq-train --help"]),
    (f"generate bin {OURS} --pack-tokens", ["no flag --pack-tokens", "of lightseq-train."]),
    ("preprocess --max-epoch 4", ["no flag --max-epoch: it is a flag of lightseq-train."]),
    (f"{TRAIN} --distributed-backend nccl --distributed-world-size 2",
     ["nccl needs a GPU", "gloo"]),
    (f"{TRAIN} --eval-bleu --eval-bleu-args '{{\"beam\": 0}}'", ["beam in --eval-bleu-args is 0"]),
    (f"{TRAIN} --eval-bleu --eval-bleu-args '{{\"sampling_topk\": 99}}'", ["is 99", "24 words"]),
    (f"generate bin {OURS} --sampling --sampling-topk 99", ["--sampling-topk is 99", "24 words"]),
    (f"generate bin {OURS} --sampling --sampling-topp 1.5", ["topp is 1.5", "at most 1"]),
    (f"generate bin {OURS} --unkpen nan", ["--unkpen is nan: use a number"]),
    (f"generate bin {OURS} --remove-bpe=@@", ["--remove-bpe @@ removes", "without a value"]),
    (f"generate bin {OURS} --remove-bpe letter", ["--remove-bpe letter would join all words"]),
    (f"{TRAIN} --task denoising --native", ["--task denoising", "both define --max-source-"]),
    (f"{TRAIN} --restore-file ours", ["--restore-file ours is a folder"]),
    (f"train a_file {LS} {SIZE}", ["The data folder a_file is not a folder"]),
    (f"generate bin {OURS} --constraints --sampling --beam 1 --native",
     ["--constraints", "remove"]),
    (f"{TRAIN} --valid-subset valid2", ["lightseq-preprocess (--validpref)"]),
    (f"{TRAIN} --adam-betas foo", ["--adam-betas foo", "(0.9, 0.98)"]),
    (f"{TRAIN} --optimizer-overrides '{{x'", ["--optimizer-overrides", "weight_decay"]),
    (f"{TRAIN} --eval-bleu --eval-bleu-args '{{beam:4}}'", ["--eval-bleu-args", "beam"]),
    (f"{TRAIN} --eval-bleu --eval-bleu-args '{{\"bem\": 4}}'", ["setting bem: did you mean beam?"]),
    (f"{TRAIN} --eval-bleu --eval-bleu-args '{{\"beam\": \"4\"}}'", ['is "4"', "whole number"]),
    (f"{TRAIN} --eval-bleu --eval-bleu-args '{{\"beam\": 4.5}}'", ["is 4.5", "a whole number"]),
    (f"{TRAIN} --eval-bleu --eval-bleu-args '{{\"sampling\": 1}}'", ["is 1", "true or false"]),
    (f"{TRAIN} --lr-scheduler manual --update2lr '{{5:1}}'", ["--update2lr {5:1}", "'100': 0.001"]),
    (f"{TRAIN} --lr-scheduler manual --update2lr '{{\"5-\":1}}'", ["--update2lr", "'100': 0.001"]),
    (f"{TRAIN} --lr-scheduler manual --epoch2lr '{{\"1\":\"x\"}}'", ["--epoch2lr", "'1-2': 0.001"]),
    (f"{TRAIN} --lr-scheduler manual --epoch2lr '[1]'", ["--epoch2lr [1]"]),
    (f"{TRAIN} --skip-remainder-batch --update-freq 99", ["--skip-remainder-batch", "lower"]),
    (f"{TRAIN} --eval-bleu --eval-bleu-detok mose", ["mose", "--eval-bleu-detok", "moses"]),
    (f"{TRAIN} --best-checkpoint-metric bleu", ["--best-checkpoint-metric bleu", "--eval-bleu"]),
    (f"{TRAIN} --best-checkpoint-metric accuracy", ["metric accuracy", "--report-accuracy"]),
    (f"{TRAIN} --best-checkpoint-metric blue", ["--best-checkpoint-metric blue", "nll_loss or"]),
    (f"{TRAIN_NATIVE} --best-checkpoint-metric nll_loss", ["metric nll_loss", "loss or ppl;"]),
    (f"{TRAIN} --sentence-avg --criterion cross_entropy --best-checkpoint-metric bleu", ["ppl or"]),
    (f"{TRAIN} --restore-file gone.pt", ["--restore-file gone.pt does not exist", "remove"]),
    (f"{TRAIN_NATIVE} --restore-file gone.pt", ["--restore-file gone.pt does not exist"]),
    (f"{TRAIN} --save-dir ours --restore-file checkpoint_best.pt",
     ["you mean ours/checkpoint_best"]),
    (f"{TRAIN} --restore-file ours", ["--restore-file ours is a folder"]),
    (f"{TRAIN} --restore-file ''", ["--restore-file '' does not exist"]),
    (f"{TRAIN} --restore-file ours/checkpoint_last.pt --checkpoint-suffix 7", ["last7.pt does"]),
    (f"{TRAIN} --continue-once gone.pt", ["--continue-once gone.pt does not exist"]),
    (f"{TRAIN} --finetune-from-model gone.pt", ["--finetune-from-model gone.pt does not exist"]),
    (f"{TRAIN} --finetune-from-model ours", ["--finetune-from-model ours is a folder"]),
    (f"{TRAIN} --finetune-from-model weights.pt --restore-file weights.pt",
     ["used together: remove one"]),
    (f"{TRAIN} --encoder-attention-heads 5", ["--encoder-attention-heads", "multiple"]),
    (f"{TRAIN_NATIVE} --encoder-attention-heads 5", ["--encoder-attention-heads", "multiple"]),
    (f"{TRAIN} --dropout 2", ["--dropout is 2"]),
    (f"{TRAIN} --tokenizer moses", ["--source-lang is missing", "--tokenizer"]),
    (f"{TRAIN} --lr abc", ["--lr", "abc", "0.1,0.05"]),
    (f"{TRAIN} --lr-scheduler tri_stage", ["tri_stage", "specify steps or phase_ratio"]),
    (f"{TRAIN} --lr-scheduler tri_stage --warmup-steps 1", ["--lr-scheduler tri_stage"]),
    (f"{TRAIN} --lr-scheduler cosine --lr 1,2", ["--lr-scheduler cosine", "fixed"]),
    (f"{TRAIN} --lr-scheduler step --min-lr 8", ["--lr-scheduler step"]),
    (f"{TRAIN} --lr-scheduler triangular", ["needs --max-lr: add it"]),
    (f"{TRAIN} --user-dir a_file", ["--user-dir a_file", "folder"]),
    (f"{TRAIN} --user-dir dotted.tasks", ["--user-dir dotted.tasks", "without a dot"]),
    (f"{TRAIN} --required-seq-len-multiple 0", ["--required-seq-len-multiple is 0"]),
    (f"generate bin {OURS} --required-batch-size-multiple 0",
     ["multiple is 0: it must be at least 1"]),
    (f"{TRAIN} --eval-bleu --eval-bleu-remove-bpe @", ["--eval-bleu-remove-bpe @ is", "@@"]),
    (f"generate bin {OURS} --remove-bpe bpe", ["--remove-bpe bpe is unknown", "sentencepiece"]),
    (f"generate pieces {OURS} --remove-bpe", ["--remove-bpe is @@", "--remove-bpe sentencepiece."]),
    (f"interactive subwords {OURS} --remove-bpe sentencepiece",
     ["20 of its", "--remove-bpe without a value."]),
    (f"generate subwords {THEIRS} --remove-bpe _EOW", ["no word in subwords/dict.en.txt"]),
    (f"train pieces {LS} {SIZE} --eval-bleu --eval-bleu-remove-bpe", ["bpe sentencepiece."]),
    (f"generate bin {OURS} --replace-unk half_lexicon", ["Line 2 of half_lexicon"]),
    (f"interactive bin {THEIRS} --replace-unk half_lexicon", ["Line 2 of half_lexicon"]),
    (f"generate bin {OURS} --replace-unk gone", ["gone", "does not exist"]),
    (f"interactive bin {OURS} --native --remove-bpe --replace-unk",
     ["--replace-unk", "remove --remove-bpe"]),
    (f"generate bin {OURS} --tokenizer space --replace-unk",
     ["--replace-unk", "remove --tokenizer"]),
    (f"generate bin {OURS} --beam 0", ["--beam is 0: it must be at least 1"]),
    (f"generate bin {OURS} --beam 4 --diverse-beam-groups 3", ["--beam", "divisible"]),
    (f"generate bin {OURS} --model-overrides '{{x'", ["--model-overrides"]),
    (f"generate bin {OURS} --model-overrides '[1]'", ["--model-overrides [1]"]),
    (f"generate bin {OURS} --match-source-len --diversity-rate 1", ["use only one of them"]),
    (f"interactive bin {OURS} --bpe subword_nmt --bpe-codes gone", ["gone", "does not exist"]),
    (f"generate bin {OURS} --distributed-rank 5", ["--distributed-rank is 5"]),
    (f"generate bin {OURS} --bpe sentencepiece --sentencepiece-model a_file", ["pip install"]),
    (f"generate bin {OURS} --bpe bytes", ["--bpe bytes", "choose another"]),
    (f"generate bin {OURS} --bpe fastbpe", ["--bpe-codes is missing"]),
    (f"generate bin {OURS} --scoring wer", ["install editdistance"]),
    (f"generate bin {OURS} --lm-path ours/checkpoint_last.pt",
     ["--lm-path", "not a language model"]),
    (f"generate bin {OURS} --score-reference --print-alignment soft", ["--print-alignment hard"]),
    (f"interactive bin {OURS} --print-alignment soft", ["--print-alignment", "hard"]),
    (f"generate bin {OURS} --lr-scheduler step --lr abc", ["--lr", "abc", "0.1,0.05"]),
    (f"interactive bin {OURS} --lr-scheduler triangular", ["needs --max-lr: add it"]),
    (f"generate bin {OURS} --min-len 300", ["--min-len", "raise --max-len-a or --max-len-b"]),
    (f"generate bin {THEIRS} --min-len 300", ["--min-len"]),
    (f"interactive bin {OURS} --input short.de --min-len 300", ["--min-len", "--max-len-b"]),
    (f"{TRAIN} --eval-bleu --eval-bleu-args '{{\"min_len\": 300}}'", ["in --eval-bleu-args"]),
    # checkpoints
    ("generate bin", ["--path"]),
    ("validate bin --max-tokens 99", ["--path"]),
    ("generate bin --path gone.pt", ["gone.pt", "does not exist"]),
    ("validate bin --path gone.pt --max-tokens 99", ["gone.pt", "does not exist"]),
    ("generate bin --path ours/checkpoint_last.pt:", ["--path contains an empty file name"]),
    (f"generate bin {OURS} --lm-path gone.pt --lm-weight 1", ["gone.pt", "check --lm-path"]),
    ("generate bin --path weights.pt", ["weights.pt", "no options of a model"]),
    (f"{TRAIN} --save-dir . --restore-file weights.pt", ["weights.pt", "no options of a model"]),
    ("generate bin --path diverged.pt --print-alignment", ["finite score", "diverged"]),
    ("generate bin --path diverged.pt --native", ["finite score", "diverged"]),
    ("generate bin --path empty", ["The folder empty has no checkpoint_best.pt or"]),
    ("interactive bin --path .", ["The folder . has no", "use a checkpoint file"]),
    ("generate bin --path a_file", ["a_file is a text file, not a checkpoint"]),
    ("generate bin --path damaged/checkpoint_last.pt", ["damaged/checkpoint_last.pt", "truncated"]),
    ("generate bin --path damaged/checkpoint_last.pt --native", ["damaged/checkpoint_last.pt"]),
    (f"{TRAIN} --save-dir damaged", ["damaged/checkpoint_last.pt", "truncated"]),
    (f"{TRAIN_NATIVE} --save-dir damaged", ["damaged/checkpoint_last.pt", "truncated"]),
    (f"generate other_words {OURS}", ["dictionar", "24", "ours/", "--srcdict"]),
    ("generate other_words --path native/checkpoint_last.pt --native", ["dictionar", "24"]),
    (f"interactive other_words {OURS}", ["dictionar", "24"]),
    (f"validate other_words {OURS} --max-tokens 99", ["dictionar", "24"]),
    (f"train other_words {LS} {SIZE} {POSITIONS} --save-dir ours", ["dictionar", "24", "ours/"]),
    (f"train other_words {NATIVE} {SIZE} {POSITIONS} --save-dir native", ["dictionar", "native/"]),
    ("generate bin --path shared/checkpoint_last.pt", ["in bin differ", "shared/", "--tgtdict"]),
    (f"generate swapped_words {OURS}", ["source dictionary", "same size", "--srcdict"]),
    (f"interactive swapped_words {OURS}", ["source dictionary", "--srcdict"]),
    (f"validate swapped_words {OURS} --max-tokens 99", ["source dictionary"]),
    (f"train swapped_words {LS} {SIZE} {POSITIONS} --save-dir ours", ["source dictionary"]),
    (f"{TRAIN} --save-dir ours --encoder-layers 2", ["ours/", "encoder.layers.1"]),
    (f"{TRAIN_NATIVE} --save-dir native --encoder-layers 2", ["native/", "encoder.layers.1"]),
    (f"{TRAIN_NATIVE} --save-dir native --optimizer sgd", ["FairseqAdam", "--reset-optimizer"]),
    (f"{TRAIN_NATIVE} --save-dir native --lr-scheduler inverse_sqrt", ["--reset-lr-scheduler"]),
]  # fmt: skip


@pytest.mark.parametrize(("line", "parts"), BAD, ids=[line.replace(SIZE, "") for line, _ in BAD])
def test_bad_input_is_answered_with_one_sentence(
    place: Path, launch: Callable[[str], Result], line: str, parts: list[str]
) -> None:
    if line.startswith("train") and "--save-dir" not in line:
        line += " --save-dir not_yet_there"
    before = digests(place)
    result = launch(line)
    after = digests(place)
    assert result.exit_code == 2, (result.output, result.exception)
    command = line.split()[0]
    complaint = result.stderr.splitlines()[-1]
    assert complaint.startswith(f"lightseq-{command}: error: ")
    assert [part for part in parts if part not in complaint] == [], complaint
    assert "Traceback" not in result.output
    assert {path: after.get(path) for path in before} == before
    shutil.rmtree(place / "not_yet_there", ignore_errors=True)
    shutil.rmtree(place / "out", ignore_errors=True)


GOOD = [
    # Input that looks bad but works: sentences that training or --skip-... leaves out, empty lines,
    # batches of one token, 16-bit precision on a CPU, a schedule where nothing is trained.
    f"train short {LS} {SIZE} --batch-size 1",
    f"train short {NATIVE} {SIZE} --batch-size 1",
    f"train long {LS} {SIZE} {POSITIONS} {SKIP}",
    f"train bin {LS} {SIZE} --bf16",
    # fairseq's default, given explicitly
    f"train bin {LS} {SIZE} --restore-file checkpoint_last.pt",
    f"train bin {LS} {SIZE} --report-accuracy --best-checkpoint-metric accuracy",
    f"train bin {LS} {SIZE} --update-epoch-batch-itr true",
    f"train two_valid {LS} {SIZE} --valid-subset valid,valid1",
    f"train swapped_words {LS} {SIZE} {POSITIONS} --finetune-from-model ours/checkpoint_last.pt",
    f"train renamed_dictionaries {LS} {SIZE} --user-dir tasks --task own_dictionaries",
    f"train bin --arch transformer_tiny --optimizer ls_adam --criterion cross_entropy {SIZE} "
    "--user-dir tasks --task no_source_dictionary",
    f"train bin {LS} {SIZE} --lr-scheduler manual --update2lr '{{\"1-2\":1,\"3\":0.1}}'",
    f"generate short {OURS} {SHORT}",
    f"generate short {OURS} {SHORT} --remove-bpe sentencepiece",
    f"generate long {OURS} {SHORT} {SKIP}",
    f"generate one_side {OURS} {SHORT}",
    f"interactive bin {OURS} {SHORT} --input short.de",
    f"interactive bin {OURS} {SHORT} --input long.de {SKIP}",
    f"validate short {OURS} --batch-size 1",
    f"validate short {OURS}",
    f"generate short {OURS} {SHORT} --lr-scheduler cosine --lr 7",
    f"interactive bin {OURS} {SHORT} --input short.de --lr-scheduler step --lr 7,8",
    f"validate short {OURS} --batch-size 1 --lr-scheduler step",
]  # fmt: skip


@pytest.mark.parametrize("line", GOOD, ids=[line.replace(SIZE, "") for line in GOOD])
def test_unusual_input_works(
    launch: Callable[[str], Result], tmp_path: Path, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    result = launch(line + (f" --save-dir {tmp_path}" if line.startswith("train") else " --cpu"))
    assert result.exit_code == 0, (result.output, result.exception)
    if "swapped_words" in line:
        assert "The source dictionary is not the one" in caplog.text
    sentences = {"generate short": 3, "generate long": 2, "interactive": 2}
    for start, count in sentences.items():
        if line.startswith(start):
            translated = [text for text in result.stdout.splitlines() if text.startswith("H-")]
            assert len(translated) == (3 if "short" in line else count)
