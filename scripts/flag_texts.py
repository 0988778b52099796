"""The texts of docs/flags.md, which `scripts.flags` writes: notes on single settings, and the text
around the tables."""

from __future__ import annotations

ROBERTA_NOTES = {
    "data": "in masked_lm `data:data2` for an epoch each",
    "--activation-fn": "relu, gelu, gelu_accurate; others are refused",
    "--bpe": "in validate, for `--mask-whole-words`",
    "--layernorm-embedding": "the arch has it, except `ls_roberta_prenorm`",
    "--mask-whole-words": "with `--bpe`; training refuses it without",
    "--max-positions": "in sentence_prediction also the longest sample",
    "--num-classes": "in validate another number than in training is a new head",
}
BART_NOTES = {
    "--add-prev-output-tokens": "needed: the decoder reads the source; the recipe sets it",
    "--bpe": "finds words for `--mask-length word` and `span-poisson`; `gpt2` also finds sentences",
    "--langs": "all languages of the pre-training, in its order; needed except in "
    "multilingual_denoising, which finds them in the data folder",
    "--mask-length": "with fairseq's default, `subword`, `--replace-length` must be 0 or 1",
    "--permute-sentences": "in denoising only `--bpe gpt2` finds sentences",
    "--rotate": "fairseq's default is 0.5; the recipe sets 0",
}
LANGUAGES_NOTES = {
    "--enable-lang-ids": "fairseq fails with it: no model of translation reads the ids",
    "--keep-inference-langtok": "in generate and interactive, the output has the language's token",
    "--langs": "the order of the rows; by default sorted names",
    "--lang-dict": "as `--langs`, a language on each line; the checkpoint has the list",
    "--sampling-method": "the recipe sets `temperature`; `RoundRobin` samples nothing",
    "--virtual-epoch-size": "also resumes within a pass, where fairseq reads other pairs",
}
TEXT_NOTES = {
    "data": "of `lightseq-preprocess --only-source`; `data:data2` for an epoch each",
    "--activation-fn": "relu, gelu, gelu_accurate; others are refused",
    "--adaptive-softmax-cutoff": "with `--criterion adaptive_loss`, and not without it",
    "--decoder-layers-to-keep": "the number of layers, as in fairseq",
    "--pad-to-fixed-length": "in validation and eval-lm; training packs blocks: there are no pads",
    "--post-process": "`'@@ '`, for scores of whole words; `--remove-bpe` alone has no effect, and "
    "a note says so; others are refused",
    "--tokens-per-sample": "more than the model's positions are refused",
}
_BEGINS = (
    "the model has the sizes of the file; a file that does not exist is refused, where fairseq "
    "trains from scratch"
)
NOTES = {
    **dict.fromkeys(("--restore-file", "--continue-once", "--finetune-from-model"), _BEGINS),
    "--sampling": "on a GPU it draws from fairseq's distributions, with other random numbers",
    "--arch": "one of the `ls_` archs; with another one: fallback",
    "--optimizer": "`ls_adam` and `adafactor`; with another one: fallback; `composite` is refused",
    "--criterion": "`ls_label_smoothed_cross_entropy`, `ls_cross_entropy`; with another one: "
    "fallback; those of other tasks are refused",
    "--activation-fn": "relu, gelu, gelu_accurate, silu; others are refused",
    "--ddp-backend": "fallback with `slowmo`; `fully_sharded` is refused: parameters live in one "
    "flat buffer; the others make no difference to the captured step",
    "--zero-sharding": "`os` with `--optimizer ls_adam` in the captured step; refused with "
    "`ls_adam` in fairseq's own step",
    "--fp32-reduce-scatter": "16-bit gradients are sent and summed as float32, in fairseq only "
    "with `--ddp-backend fully_sharded`; no effect in fairseq's own step",
    "--distributed-backend": "without GPUs it is gloo, and nccl is refused",
    "--sacrebleu": "with `--bpe` it avoids a warning",
    "--fp16": "refused on a CPU, except with `--fp16-no-flatten-grads`",
    "--fp16-no-flatten-grads": "sets the format of the optimizer state in checkpoints",
    "--profile": "refused without a GPU",
    "--write-checkpoints-asynchronously": "refused if the package iopath is missing",
    "--retain-dropout": "fairseq's own layers",
    "--fix-batches-to-gpus": "for `--dataset-impl cached`, which loads sentences in advance",
    "--all-gather-list-size": "for logs that cannot be summed",
    **dict.fromkeys(
        (
            "--bucket-cap-mb",
            "--broadcast-buffers",
            "--find-unused-parameters",
            "--gradient-as-bucket-view",
        ),
        "for the wrapper around the model, which the captured step does without",
    ),
    "--aim-repo": "refused if the package aim is missing",
    "--azureml-logging": "refused if the package azureml-core is missing",
    "--tensorboard-logdir": "refused if the package tensorboard is missing",
    "--wandb-project": "refused if the package wandb is missing",
    "--required-seq-len-multiple": "in validation; training packs sentences: nothing to round up",
    "--left-pad-source": "in validation; training packs sentences, without pads",
    "--left-pad-target": "in validation; training packs sentences, without pads; refused with "
    "`--num-batch-buckets` or `--score-reference`",
    "--ignore-prefix-size": "with `--left-pad-target` it counts the pads of short sentences, as in "
    "fairseq, and training uses fairseq's own step",
    "--max-tokens": "at least 1; in fairseq a smaller value means no limit",
    "--batch-size": "at least 1; in fairseq a smaller value means no limit",
    "--replace-unk": "in generate only with `--dataset-impl raw`, because binarised data do not "
    "contain unknown words, and refused with `--bpe` or `--tokenizer`; in interactive fairseq "
    "copies `<unk>` itself",
    **dict.fromkeys(
        ("--sacrebleu-tokenizer", "--sacrebleu-lowercase", "--sacrebleu-char-level"),
        "in generate also for the last line",
    ),
    "--eval-bleu": "sacrebleu's tokenizer is that of the target language; in fairseq it is 13a",
    "--export": "no change in our layers; fairseq's own layers are built for TorchScript",
    "--tokenizer": "kept in the checkpoint for `torch.hub`",
    "--bpe": "kept in the checkpoint for `torch.hub`",
    "--scoring": "kept in the checkpoint; in generate, sacrebleu, chrf and wer count an unknown "
    "word as one word, which is never right",
    "--num-shards": "`--distributed-world-size` shards, with `--distributed-rank`",
    "--shard-id": "`--distributed-world-size` shards, with `--distributed-rank`",
    "--help": "shows the launcher's help; `--fairseq-help` shows fairseq's",
}
INTRODUCTION = """\
# Flags

<!-- Made by scripts/flags.py; do not edit. -->

Search this page for a flag. [Train](train.md#flags-that-most-runs-set) says what the common flags
mean, and `lightseq-train --fairseq-help` lists all. The tables say what `lightseq-train`,
`-generate`, `-validate` and `-interactive` do with each flag of fairseq 0.12.2, for
`--task translation`. A dash means that fairseq's command has no such flag.

* **works**: the flag has the same effect as in fairseq. Training uses the *captured step*: on a
  GPU, CUDA graphs, which are the reason of the speed
  ([Train](train.md#the-captured-step-and-fairseqs-step)).
* **fallback**: the flag has the same effect as in fairseq. Training uses fairseq's own step with
  the same layers. One line before the first update says "step: fairseq's own" and the reason.
* **refused**: the command ends with a message: the flag, the reason, and what to do.
* **no effect**: fairseq's command accepts the flag but does not use it. A note at start-up says
  so.

Rules for flags that are not in the table, and for special cases:

* Runs with another optimizer or criterion are fallbacks. The table does not list their flags.
* A run of another task is a fallback if its data or its training step are different. It is refused
  if its data do not fit the arch.
* A flag that is "part of" another flag has the same answer as the other one. Without the
  other one it has no effect, and a note says so. In a run with one rank, this is also true for
  flags of several ranks. Without `--sampling`, `--sampling-topk` and `--sampling-topp` are refused.
* A command without any `ls_` part, or with `--native`, runs fairseq's own code. It refuses no
  flag of the tables for that reason, but it also refuses [wrong input](#wrong-input).
* With `--task language_modeling`, the flags of the search in generate and interactive have the
  same answers (`tests/flags/test_flags_prompts.py`). Three need a source and are refused:
  `--constraints`, `--print-alignment`, `--replace-unk`.

A test runs the command of each row. If the answer is *works* or *fallback*, the test compares the
result with fairseq's own command, and checks that the flag changes the result there.
`tests/flags/test_flags_proofs.py` fails if a row has no such test.
"""
TEXT_INTRODUCTION = """\
## Language models

This table has the flags of `--task language_modeling` and of the archs of `ls_transformer_lm` in
training, and the flags of `lightseq-eval-lm` for data and output. All other flags are in the
table above, and have the same answers in training. For precision, logs, ranks and plugins,
`lightseq-eval-lm` has the answers of `lightseq-generate`. Settings of training have no effect in
`lightseq-eval-lm`.

A test runs each row, as above (`tests/flags/test_flags_language_models.py`).
"""
ROBERTA_INTRODUCTION = """\
## RoBERTa

This table has the flags of the archs of `ls_roberta`, of `--task masked_lm`, and of `--task
sentence_prediction` with its criterion, in `lightseq-train` and `lightseq-validate`. All other
flags are in the first table, and have the same answers. `lightseq-validate --task
sentence_prediction` adds `--criterion sentence_prediction`: fairseq takes flags from it.
`lightseq-interactive` takes this task and its flags from the checkpoint, and classifies each line;
flags of the search have no effect there, and a note says so.

A test runs each row, as above (`tests/flags/test_flags_of_roberta.py`).
"""
BART_INTRODUCTION = """\
## BART and mBART

This table has the flags of `lightseq-train` that only BART or its tasks have, and those that have
another answer here. The other flags are in the first table and, for `--task sentence_prediction`,
in that of RoBERTa, with the same answers.

A test runs each row, as above (`tests/flags/test_flags_of_bart.py`).
"""
LANGUAGES_INTRODUCTION = """\
## Several languages

This table has the flags of `--task translation_multi_simple_epoch` in `lightseq-train`. The other
flags are in the first table, with the same answers, except `--source-lang` and `--target-lang`,
which are for searches and refused in training, and `--dataset-impl raw`, which the task cannot
read. Searches take the languages and their tokens from the checkpoint.

A test runs each row, as above (`tests/flags/test_flags_of_languages.py`).
"""
OWN_INTRODUCTION = """\
## Flags that fairseq does not have

`lightseq-train` has these flags besides those of all commands ([Commands](commands.md)). With
`--fp8`, every flag is refused that is a fallback in the tables above: only the captured step
computes in fp8.
"""
WRONG_INPUT = """\
## Wrong input

Every command checks its input before it begins, also with `--native` and without any `ls_` part. It
refuses input that fairseq reports late or misleadingly, and input with which fairseq runs, but not
as the command says:

* **Checkpoints:** a `--restore-file`, `--continue-once` or `--finetune-from-model` that does not
  exist (fairseq trains from scratch), `--restore-file` together with `--finetune-from-model`, a
  classification head that is missing or has another number of classes (fairseq takes a new head),
  a best score of another metric than the run's when it resumes (fairseq compares the two),
  and a model that is no translation model for `--task translation`.
* **Data:** folders, dictionaries, splits or labels that are missing, damaged or of another task,
  labels in another order than in training, sides of different lengths, tokens that are not in the
  dictionary, and a split of which no sentence is left.
* **Lengths:** a sentence that exceeds `--max-tokens` or `--max-tokens-valid`, and blocks of text
  that are longer than the language model (`fairseq-eval-lm` leaves them out).
* **Values:** unknown names of a task, arch, optimizer and so on, text that fairseq cannot evaluate,
  NaN, counts below 0 or 1 (but -1 may turn a flag off, as in `--patience -1`), rates below 0,
  dropout, layer drop, label smoothing and Adam's betas of 1 or more (with a layer drop of 1 no
  layer would be trained), a `--lenpen` beyond 50, more `--sampling-topk` than words, settings of
  masks or of adaptive softmax that contradict each other, and a `--best-checkpoint-metric` that
  validation does not measure.
* **Text:** a `--remove-bpe` that is unknown or does not fit the dictionary, `--replace-unk` with
  joined subwords, `--constraints` in `lightseq-generate`, and options of translation for a language
  model.
* **Machine:** `--fp16` or the backend nccl without a GPU, a rank outside the number of ranks, and a
  `--save-dir` that another run uses.
* **Our own flags:** `--pack-tokens` and `--fp8`, which need our layers; a name in `--freeze` that
  no parameter has, or in `--lora-on` that no linear layer has; a rank below 1.

`tests/cli/test_native_refusals.py` runs examples of each kind with `--native`.
"""
