"""fairseq settings that we do not support (errors), or that have no effect (notes).

For each setting of train, generate, validate and interactive (task translation), and for those that
language models and RoBERTa add to their commands, there are four cases. It is supported, in
training by the captured step. It is supported by fairseq's own step (``fast_path.FALLBACK``). It
raises an error that names it. Or it has no effect in fairseq either, and a note says so.
docs/flags.md lists all settings; ``scripts/flags.py`` generates it.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import click

from lightseq_fairseq import families
from lightseq_fairseq.cli.checks import Request
from lightseq_fairseq.cli.words import defaults, registries
from lightseq_fairseq.errors import UserError
from lightseq_fairseq.families import Task, named


class Refusal(NamedTuple):
    """A setting that a command does not support.

    Attributes:
        flag: its name.
        asked: function of fairseq's namespace: is the setting used?
        reason, way_out: parts of the message, see `refusal`; {args.<name>} in the reason is
            replaced by that value.
        always: whether it is an error on every machine.
    """

    flag: str
    asked: Callable[[argparse.Namespace], bool]
    reason: str
    way_out: str = "remove it"
    always: bool = True


def _is_set(flag: str) -> Callable[[argparse.Namespace], bool]:
    name = flag.removeprefix("--").replace("-", "_")
    return lambda args: bool(getattr(args, name, None))


def _has_adaptive_softmax(args: argparse.Namespace) -> bool:
    """Whether the model is one of ours that supports adaptive softmax, and uses it."""
    is_set = bool(getattr(args, "adaptive_softmax_cutoff", None))
    return is_set and _supports("--adaptive-softmax-cutoff", args)


def _supports(flag: str, args: argparse.Namespace) -> bool:
    """Whether the model is one of ours that supports a flag, unlike other families."""
    family = registries.family(args.arch)
    return family is not None and flag in family.supports


def _is_criterion_of_others(args: argparse.Namespace, task: Task) -> bool:
    """Whether our model trains on the data of ``task``, with a criterion of fairseq's or ours that
    needs other data."""
    from fairseq.criterions import CRITERION_REGISTRY
    from fairseq.tasks import TASK_REGISTRY

    module = getattr(CRITERION_REGISTRY.get(args.criterion), "__module__", "")
    family = registries.family(args.arch)
    return (
        family is not None
        and task in family.tasks
        and issubclass(TASK_REGISTRY[args.task], named(task.place))
        and module.startswith(("fairseq.", "lightseq_fairseq."))
        and args.criterion not in task.criteria
    )


def _is_criterion_of_other_families(args: argparse.Namespace) -> bool:
    """Whether the model is one of ours whose tasks name no criteria, and the criterion is for other
    models or data."""
    family = registries.family(args.arch)
    if family is None or any(task.criteria for task in family.tasks):
        return False
    theirs = (name for task in families.tasks().values() for name in task.criteria)
    return args.criterion in {*theirs, *_OF_OTHER_TASKS.split()}


def _lacks_gpu(args: argparse.Namespace) -> bool:
    import torch

    return args.cpu or not torch.cuda.is_available()


# The advice names both sides: if one side is not set, fairseq removes all layers of that side.
_PRUNE_LATER = (
    "remove it, train all layers with --encoder-layerdrop and --decoder-layerdrop, and select "
    "layers when you translate: lightseq-generate --model-overrides \"{'encoder_layers_to_keep': "
    "'0,2', 'decoder_layers_to_keep': '0,2'}\""
)
_PIPELINE = ("all layers are on one device", "remove it, or add --native")
_REFINEMENT = "beam search has no refinement steps"
_PADS_WITHIN = Refusal(
    "--left-pad-target",
    lambda args: bool(
        getattr(args, "left_pad_target", 0) and getattr(args, "num_batch_buckets", 0)
    ),
    "with --num-batch-buckets the pads would come between the first token of a sentence and its "
    "words",
    "remove one of the two",
    always=False,
)

_OTHER_TARGETS = tuple(
    Refusal(flag, _is_set(flag), "a Transformer language model predicts the next token alone")
    for flag in ("--self-target", "--past-target")
)

# Criteria that need another kind of model or data than those of the families.
_OF_OTHER_TASKS = """
ctc fastspeech2 hubert label_smoothed_cross_entropy_with_ctc
latency_augmented_label_smoothed_cross_entropy legacy_masked_lm_loss model nat_loss
sentence_prediction_adapters speech_to_spectrogram
speech_to_unit speech_unit_lm_criterion tacotron2 vocab_parallel_cross_entropy wav2vec
"""

# Not listed here: settings that the arch or the optimizer rejects, see
# ``plugins.unsupported.UNSUPPORTED`` and ``plugins.optimizer.UNSUPPORTED``.
REFUSED: dict[str, tuple[Refusal, ...]] = {
    "train": (
        Refusal("--tpu", _is_set("--tpu"), "it trains on CUDA GPUs and on CPUs only",
                "remove it, or train with fairseq-train"),
        Refusal("--model-parallel-size", lambda args: args.model_parallel_size != 1,
                "each layer is on one device", "remove it, or add --native"),
        Refusal("--use-plasma-view", _is_set("--use-plasma-view"),
                "pyarrow no longer has the plasma store, and translation does not use it"),
        # RoBERTa can train with it: there it sets the number of layers.
        Refusal("--encoder-layers-to-keep",
                lambda args: bool(getattr(args, "encoder_layers_to_keep", None))
                and not _supports("--encoder-layers-to-keep", args),
                "fairseq 0.12.2 cannot train with it", _PRUNE_LATER),
        # Language models can train with it: there it sets the number of layers.
        Refusal("--decoder-layers-to-keep",
                lambda args: bool(getattr(args, "decoder_layers_to_keep", None))
                and hasattr(args, "encoder_layers_to_keep"),
                "fairseq 0.12.2 cannot train with it", _PRUNE_LATER),
        *_OTHER_TARGETS,
        Refusal("--cpu-offload", _is_set("--cpu-offload"),
                "it needs --ddp-backend fully_sharded, which cannot shard the one flat buffer of "
                "all parameters", "remove it, or add --native and use that backend"),
        Refusal("--profile", lambda args: args.profile and _lacks_gpu(args),
                "it marks ranges for a GPU profiler, but this run uses no GPU", always=False),
        Refusal("--write-checkpoints-asynchronously",
                lambda args: args.write_checkpoints_asynchronously
                and importlib.util.find_spec("iopath") is None,
                "the package iopath is not installed", "run pip install iopath, or remove it",
                always=False),
        _PADS_WITHIN,
        *(Refusal("--criterion", functools.partial(_is_criterion_of_others, task=task),
                  "{args.criterion} is for other models or data than those of --task {args.task}",
                  f"use --criterion {task.criteria[0]}", always=False)
          for task in families.tasks().values() if task.criteria),
        Refusal("--criterion", _is_criterion_of_other_families,
                "{args.criterion} is for other models or data than those of translation",
                "use --criterion ls_label_smoothed_cross_entropy or ls_cross_entropy",
                always=False),
        Refusal("--criterion",
                lambda args: registries.is_fused(args.arch) and args.criterion == "adaptive_loss"
                and not getattr(args, "adaptive_softmax_cutoff", None),
                "adaptive_loss is for models with adaptive softmax",
                "use --criterion ls_cross_entropy, or, for a language model, add "
                "--adaptive-softmax-cutoff", always=False),
        Refusal("--criterion",
                lambda args: _has_adaptive_softmax(args) and args.criterion != "adaptive_loss",
                "{args.criterion} needs every logit, but adaptive softmax does not compute all",
                "use --criterion adaptive_loss, or a model without --adaptive-softmax-cutoff",
                always=False),
        Refusal("--ddp-backend",
                lambda args: _has_adaptive_softmax(args)
                and args.ddp_backend in ("c10d", "pytorch_ddp"),
                "{args.ddp_backend} needs a gradient of every parameter, but with adaptive softmax "
                "those of rare words have none in an update without them",
                "use --ddp-backend legacy_ddp", always=False),
        Refusal("--optimizer",
                lambda args: args.optimizer == "composite" and registries.is_fused(args.arch),
                "composite needs parameters that name their groups, and those of an ls_ arch do "
                "not", "use --optimizer ls_adam or another optimizer", always=False),
    ),
    "generate": (
        Refusal("--pipeline-model-parallel", _is_set("--pipeline-model-parallel"),
                *_PIPELINE),
        Refusal("--print-step", lambda args: args.print_step and args.task == "translation",
                _REFINEMENT),
        Refusal("--retain-iter-history",
                lambda args: args.retain_iter_history and args.task == "translation", _REFINEMENT),
        # For a language model, search.of_translation says that its search has none at all.
        Refusal("--constraints",
                lambda args: args.constraints and args.task != "language_modeling",
                "a binarised test set contains no constraints", "remove it, or use "
                "lightseq-interactive, which reads the constraints from its input lines"),
        Refusal("--print-alignment",
                lambda args: args.print_alignment == "soft" and args.score_reference,
                "with --score-reference there are only hard alignments",
                "use --print-alignment hard",
                always=False),
        Refusal("--left-pad-target",
                lambda args: args.score_reference and getattr(args, "left_pad_target", False),
                "--score-reference reads scores from the left, where the pads would be",
                "remove one of the two", always=False),
        _PADS_WITHIN,
    ),
    "interactive": (
        Refusal("--pipeline-model-parallel", _is_set("--pipeline-model-parallel"),
                *_PIPELINE),
        Refusal("--score-reference", _is_set("--score-reference"), "input lines have no reference",
                "remove it, or score with lightseq-generate"),
        Refusal("--print-alignment", lambda args: args.print_alignment == "soft",
                "fairseq-interactive prints only hard alignments", "use --print-alignment hard, "
                "or lightseq-generate", always=False),
    ),
    "validate": (
        Refusal("--pipeline-model-parallel", _is_set("--pipeline-model-parallel"),
                *_PIPELINE),
        _PADS_WITHIN,
    ),
    "eval-lm": (
        *_OTHER_TARGETS,
        Refusal("--pad-to-fixed-bsz", _is_set("--pad-to-fixed-bsz"),
                "fairseq-eval-lm fails on a batch that is filled up"),
        Refusal("--pipeline-model-parallel", _is_set("--pipeline-model-parallel"),
                *_PIPELINE),
    ),
}  # fmt: skip

# setting -> the setting without which it has no effect
PART_OF = {
    part: whole
    for whole, parts in {
        "--amp": "--amp-batch-retries --amp-init-scale --amp-scale-window",
        "--fp16": "--fp16-no-flatten-grads --fp16-init-scale --fp16-scale-window "
        "--fp16-scale-tolerance --threshold-loss-scale",
        "--store-ema": "--ema-decay --ema-start-update --ema-seed-model --ema-update-freq "
        "--ema-fp32",
        "--adaptive-softmax-cutoff": "--adaptive-softmax-dropout --adaptive-softmax-factor "
        "--tie-adaptive-proj",
        "--adaptive-input": "--adaptive-input-cutoff --adaptive-input-factor",
        "--character-embeddings": "--character-filters --character-embedding-dim "
        "--char-embedder-highway-layers",
        "--shorten-method": "--shorten-data-split-list",
        "--quant-noise-pq": "--quant-noise-pq-block-size",
        "--base-layers": "--base-sublayers --base-shuffle",
        "--pipeline-model-parallel": "--pipeline-balance --pipeline-devices --pipeline-chunks "
        "--pipeline-encoder-balance --pipeline-encoder-devices --pipeline-decoder-balance "
        "--pipeline-decoder-devices --pipeline-checkpoint",
        "--ddp-backend fully_sharded": "--min-params-to-wrap --no-reshard-after-forward "
        "--use-sharded-state --not-fsdp-flatten-parameters",
        "--ddp-backend slowmo": "--slowmo-momentum --slowmo-base-algorithm --localsgd-frequency "
        "--nprocs-per-node",
        "--use-plasma-view": "--plasma-path",
        "--aim-repo": "--aim-run-hash",
        "--eval-bleu": "--eval-bleu-args --eval-bleu-detok --eval-bleu-detok-args "
        "--eval-tokenized-bleu --eval-bleu-remove-bpe --eval-bleu-print-samples",
        "--save-interval-updates": "--keep-interval-updates --keep-interval-updates-pattern",
        "--sampling": "--sampling-topk --sampling-topp",
        "--diverse-beam-groups": "--diverse-beam-strength",
        "--lm-path": "--lm-weight",
        "--retain-dropout": "--retain-dropout-modules",
    }.items()
    for part in parts.split()
}

# Training settings that have no effect with one rank.
_SEVERAL_RANKS = """
--all-gather-list-size --ddp-backend --ddp-comm-hook --bucket-cap-mb --fix-batches-to-gpus
--find-unused-parameters --gradient-as-bucket-view --heartbeat-timeout --broadcast-buffers
--load-checkpoint-on-all-dp-ranks --use-bmuf --zero-sharding --fp32-reduce-scatter
"""
SEVERAL_RANKS = frozenset(_SEVERAL_RANKS.split())

# Settings that all parsers have but only training reads.
_TRAINING = """
--log-file --aim-repo --aim-run-hash --tensorboard-logdir --wandb-project --azureml-logging
--tpu --fp16-no-flatten-grads --fp16-init-scale --fp16-scale-window
--fp16-scale-tolerance --on-cpu-convert-precision --min-loss-scale --threshold-loss-scale
--amp --amp-batch-retries --amp-init-scale --amp-scale-window --empty-cache-freq
--model-parallel-size --quantization-config-path --profile --reset-logging --suppress-crashes
--use-plasma-view --plasma-path --optimizer --lr-scheduler
--combine-valid-subsets --ignore-unused-valid-subsets --validate-interval
--validate-interval-updates --validate-after-updates --fixed-validation-seed --disable-validation
--max-tokens-valid --batch-size-valid --max-valid-steps --curriculum --num-shards --shard-id
--grouped-shuffling --update-epoch-batch-itr --update-ordered-indices-seed
--ddp-backend --ddp-comm-hook --bucket-cap-mb --fix-batches-to-gpus --find-unused-parameters
--gradient-as-bucket-view --fast-stat-sync --heartbeat-timeout --broadcast-buffers
--slowmo-momentum --slowmo-base-algorithm --localsgd-frequency --nprocs-per-node
--pipeline-balance --pipeline-devices --pipeline-chunks --pipeline-encoder-balance
--pipeline-encoder-devices --pipeline-decoder-balance --pipeline-decoder-devices
--pipeline-checkpoint --zero-sharding --no-reshard-after-forward --fp32-reduce-scatter
--cpu-offload --use-sharded-state --not-fsdp-flatten-parameters
--save-dir --restore-file --continue-once --finetune-from-model --reset-dataloader
--reset-lr-scheduler --reset-meters --reset-optimizer --optimizer-overrides --save-interval
--save-interval-updates --keep-interval-updates --keep-interval-updates-pattern
--keep-last-epochs --keep-best-checkpoints --no-save --no-epoch-checkpoints
--no-last-checkpoints --no-save-optimizer-state --best-checkpoint-metric
--maximize-best-checkpoint-metric --patience --load-checkpoint-on-all-dp-ranks
--write-checkpoints-asynchronously --upsample-primary --pad --eos --unk
--lr --force-anneal --lr-shrink --warmup-updates --warmup-init-lr --min-lr --max-lr --shrink-min
--lr-period-updates --t-mult --power --total-num-update --end-learning-rate --warmup-steps
--hold-steps --decay-steps --phase-ratio --init-lr-scale --final-lr-scale --lr-patience
--lr-threshold --lr-deacy-period --lr-decay --epoch2lr --update2lr
"""
# Settings of --tokenizer and --bpe that are used only to encode input text.
ENCODING = """
--moses-no-dash-splits --moses-no-escape --sentencepiece-enable-sampling --sentencepiece-alpha
"""
_BPE = """
--bpe --bpe-codes --bpe-separator --bpe-vocab --bpe-merges --bpe-add-prefix-space
--bpe-vocab-file --bpe-cased --gpt2-encoder-json --gpt2-vocab-bpe --sentencepiece-model
--sentencepiece-model-path
"""
_SCORING = """
--scoring --sacrebleu-tokenizer --sacrebleu-lowercase --sacrebleu-char-level --wer-tokenizer
--wer-remove-punct --wer-char-level --wer-lowercase --bert-score-lang
"""
_EVAL_BLEU = """
--eval-bleu --eval-bleu-args --eval-bleu-detok --eval-bleu-detok-args --eval-tokenized-bleu
--eval-bleu-remove-bpe --eval-bleu-print-samples
"""
# Settings of generation that only iterative refinement reads, or that nothing reads any more.
_GENERATION = """
--no-early-stop --no-beamable-mm --iter-decode-eos-penalty --iter-decode-max-iter
--iter-decode-force-max-iter --iter-decode-with-beam --iter-decode-with-external-reranker
--decoding-format --no-seed-provided --eos-token
"""
# command -> settings that its parser accepts but that have no effect, also in fairseq
UNREAD = {
    command: frozenset(flags.split())
    for command, flags in {
        "train": "--reset-logging --suppress-crashes --fast-stat-sync --on-cpu-convert-precision "
        "--checkpoint-shard-count --gen-subset --num-shards --shard-id --pad --eos --unk "
        "--distributed-num-procs --future-target",
        "generate": _TRAINING + _EVAL_BLEU + _GENERATION + ENCODING + "--criterion --valid-subset "
        "--train-subset --all-gather-list-size --distributed-num-procs --distributed-backend "
        "--distributed-init-method --distributed-port --device-id --distributed-no-spawn",
        "validate": _TRAINING + ENCODING + _BPE + _SCORING + "--tokenizer --bf16 "
        "--memory-efficient-bf16 --post-process --quiet "
        "--results-path --gen-subset --train-subset --criterion --distributed-num-procs",
        "interactive": _TRAINING + _EVAL_BLEU + _GENERATION + _SCORING + "--criterion "
        "--all-gather-list-size --distributed-num-procs --no-progress-bar --log-interval "
        "--log-format --num-workers --required-batch-size-multiple --required-seq-len-multiple "
        "--dataset-impl --data-buffer-size --train-subset --valid-subset --gen-subset "
        "--load-alignments --left-pad-source --left-pad-target --truncate-source "
        "--num-batch-buckets --quiet --results-path --sacrebleu --prefix-size --lm-path "
        "--lm-weight --print-step --retain-iter-history --max-target-positions",
        "eval-lm": _TRAINING.replace("--num-shards --shard-id", "") + "--criterion --valid-subset "
        "--train-subset --all-gather-list-size --distributed-num-procs --quiet --results-path "
        "--required-batch-size-multiple --required-seq-len-multiple --max-target-positions "
        "--skip-invalid-size-inputs-valid-test --future-target --bpe --tokenizer --scoring",
    }.items()
}


def unread(command: str, task: str) -> frozenset[str]:
    """The settings that the command accepts for a task but that have no effect there."""
    found = UNREAD[command]
    known = families.tasks().get(task)
    if known is None:
        return found
    return (found | set(known.unread if command in ("train", "validate") else ())) - {*known.read}


def name(action: argparse.Action) -> str:
    """The name used here for a setting: if it has several names, the one in fairseq's code."""
    read = "--" + action.dest.replace("_", "-")
    return read if read in action.option_strings else [*action.option_strings, action.dest][0]


def supported(request: Request) -> None:
    """Checks the settings of a command, and prints a note for each one without effect.

    With --native, the program is fairseq's, and all settings are supported.

    Raises:
        UserError: an unsupported setting; the message names it, the reason and what to do.
    """
    command, args = request.command, request.args
    if not os.path.basename(sys.argv[0]).startswith("lightseq-"):
        return
    sentence = refusal(command, args)
    if sentence is not None:
        raise UserError(sentence)
    # With torchrun, rank 0 prints the notes for all ranks.
    known = families.tasks().get(args.task)
    if known is not None and known.loaders and os.environ.get("RANK", "0") == "0":
        for note in notes(command, request.argv, request.parser, args):
            click.echo(f"lightseq-{command}: note: {note}", err=True)


def refusal(command: str, args: argparse.Namespace) -> str | None:
    """A sentence that names a setting that the command does not support, or None."""
    for refused in REFUSED[command]:
        if refused.asked(args):
            reason = refused.reason.format(args=args)
            return (
                f"lightseq-{command} does not support {refused.flag} ({reason}): {refused.way_out}."
            )
    family = registries.family(args.arch) if command == "train" else None
    if family is not None:
        # The model would report it too, but only after the data are loaded.
        from lightseq_fairseq.plugins.unsupported import unsupported_option

        unsupported = unsupported_option(args, family.supports)
        return None if unsupported is None else unsupported.sentence(args.arch)
    return None


def notes(
    command: str, argv: Sequence[str], parser: argparse.ArgumentParser, args: argparse.Namespace
) -> Iterator[str]:
    """Yields a sentence for each setting of ``argv`` that has no effect."""
    given = {name(a) for a in parser._actions if defaults.is_given(argv, a.option_strings)}
    for flag in sorted(given):
        if flag in unread(command, args.task):
            yield f"{flag} has no effect: fairseq-{command} does not use it."
        elif flag == "--post-process" and command == "eval-lm" and args.post_process != "@@ ":
            yield (
                "--remove-bpe has no effect: fairseq-eval-lm scores whole words with "
                "--remove-bpe '@@ '."
            )
        # Not for validate, which reads the rest of the configuration from the checkpoint.
        elif flag in PART_OF and command != "validate" and not _whole_is_set(flag, parser, args):
            yield f"{flag} has no effect without {PART_OF[flag]}."
        elif flag == "--ddp-backend" and _has_adaptive_softmax(args):
            pass  # adaptive_loss reads it
        elif flag in SEVERAL_RANKS and command == "train" and has_one_rank(args):
            yield f"{flag} has no effect with one rank."
        elif flag == "--fp32-reduce-scatter" and command == "train" and not _in_16_bits(args):
            yield f"{flag} has no effect without --fp16 or --bf16: gradients are float32 already."


def _whole_is_set(flag: str, parser: argparse.ArgumentParser, args: argparse.Namespace) -> bool:
    whole, _, choice = PART_OF[flag].partition(" ")
    dest = whole.removeprefix("--").replace("-", "_")
    value = getattr(args, dest, None)
    return value == choice if choice else bool(value) and value != parser.get_default(dest)


def _in_16_bits(args: argparse.Namespace) -> bool:
    return bool(args.fp16 or args.bf16)


def has_one_rank(args: argparse.Namespace) -> bool:
    """Whether the command runs as one process: neither one of several ranks nor their parent."""
    started = os.environ.get("WORLD_SIZE", "1") != "1" or args.distributed_port > 0
    return args.distributed_world_size == 1 and not started
