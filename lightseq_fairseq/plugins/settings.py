"""The settings of fairseq that do not work as in fairseq, and what commands do with them.

A setting that the table does not name works as in fairseq, with two exceptions. --retain-dropout
runs fairseq's own layers (`cli.start.launch`). The criterion, the optimizer, the task, or two
settings together may need fairseq's own step (`training.captured`). docs/flags.md lists all
settings; ``scripts/flags.py`` writes it. `families` has what is true of one family or task.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from lightseq_fairseq.base import families
from lightseq_fairseq.base.families import Family
from lightseq_fairseq.ops.bias_activation_dropout import ACTIVATIONS
from lightseq_fairseq.plugins import conditions

# Answers: the setting has the same effect as in fairseq; the same effect, by fairseq's own step;
# the command ends with a message; fairseq's command does not use it either, and a note says so.
WORKS, FALLBACK, REFUSED, UNREAD = "works", "fallback", "refused", "no effect"

# In place of a command: where one of our models is built, and where ls_adam is.
MODEL, ADAM = "model", "ls_adam"
READERS = "generate validate interactive eval-lm"
ALL = f"train {READERS}"
SEVERAL_RANKS = "several ranks"


class Setting(NamedTuple):
    """An answer that some commands have for some settings.

    Attributes:
        commands, flags: names, with spaces between them.
        reason, way_out: parts of the message of a refusal; {args.<name>} in the reason is replaced
            by that value.
        used: whether a run uses the setting in the way that has this answer: a function of
            fairseq's namespace or, for FALLBACK, of its configuration. None: if it is set.
        by_data: only the data or the logs tell whether a run uses it, not its options.
        always: whether the answer holds on every machine and for every value.
        without: of a setting without effect: only if this one is not set, or `SEVERAL_RANKS`.
    """

    answer: str
    commands: str
    flags: str
    reason: str = ""
    way_out: str = "remove it"
    used: Callable[[Any], Any] | None = None
    by_data: bool = False
    always: bool = True
    without: str = ""


def option(flag: str) -> str:
    """The name of a setting in fairseq's namespace."""
    return flag.removeprefix("--").replace("-", "_")


def rows(command: str, answer: str) -> Iterator[tuple[str, Setting]]:
    """Yields (flag, its row) of a command for an answer, in the order of the table."""
    for row in SETTINGS:
        if row.answer == answer and command in row.commands.split():
            for flag in row.flags.split():
                yield flag, row


def is_used(flag: str, row: Setting, options: Any) -> bool:
    """Whether a run uses a setting; ``options``: fairseq's namespace or its configuration."""
    if row.by_data:
        return False
    if row.used is not None:
        return bool(row.used(options))
    sections = (getattr(options, name, None) for name in ("common", "ema", "optimization", "model"))
    owner = next((x for x in (options, *sections) if hasattr(x, option(flag))), None)
    return bool(getattr(owner, option(flag), None))


# The advice names both sides: if one side is not set, fairseq removes all layers of that side.
_PRUNE_LATER = (
    "remove it, train all layers with --encoder-layerdrop and --decoder-layerdrop, and select "
    "layers when you translate: lightseq-generate --model-overrides \"{'encoder_layers_to_keep': "
    "'0,2', 'decoder_layers_to_keep': '0,2'}\""
)
_BANDS = "--adaptive-softmax-cutoff"

# Settings of --tokenizer and --bpe that are used only to encode input text.
ENCODING = (
    "--moses-no-dash-splits --moses-no-escape --sentencepiece-enable-sampling --sentencepiece-alpha"
)
_EVAL_BLEU = (
    "--eval-bleu --eval-bleu-args --eval-bleu-detok --eval-bleu-detok-args --eval-tokenized-bleu "
    "--eval-bleu-remove-bpe --eval-bleu-print-samples"
)
_SCORING = (
    "--scoring --sacrebleu-tokenizer --sacrebleu-lowercase --sacrebleu-char-level --wer-tokenizer "
    "--wer-remove-punct --wer-char-level --wer-lowercase --bert-score-lang"
)
# Settings that all parsers have but only training reads.
_TRAINING = """
--log-file --aim-repo --aim-run-hash --tensorboard-logdir --wandb-project --azureml-logging --tpu
--fp16-no-flatten-grads --fp16-init-scale --fp16-scale-window --fp16-scale-tolerance
--min-loss-scale --threshold-loss-scale --amp --amp-batch-retries --amp-init-scale
--amp-scale-window --empty-cache-freq --model-parallel-size --quantization-config-path --profile
--use-plasma-view --plasma-path --optimizer --lr-scheduler --combine-valid-subsets
--ignore-unused-valid-subsets --validate-interval --validate-interval-updates
--validate-after-updates --fixed-validation-seed --disable-validation --max-tokens-valid
--batch-size-valid --max-valid-steps --curriculum --grouped-shuffling --update-epoch-batch-itr
--update-ordered-indices-seed --ddp-backend --ddp-comm-hook --bucket-cap-mb --fix-batches-to-gpus
--find-unused-parameters --gradient-as-bucket-view --heartbeat-timeout --broadcast-buffers
--slowmo-momentum --slowmo-base-algorithm --localsgd-frequency --nprocs-per-node
--pipeline-balance --pipeline-devices --pipeline-chunks --pipeline-encoder-balance
--pipeline-encoder-devices --pipeline-decoder-balance --pipeline-decoder-devices
--pipeline-checkpoint --zero-sharding --no-reshard-after-forward --fp32-reduce-scatter
--cpu-offload --use-sharded-state --not-fsdp-flatten-parameters --save-dir --restore-file
--continue-once --finetune-from-model --reset-dataloader --reset-lr-scheduler --reset-meters
--reset-optimizer --optimizer-overrides --save-interval --save-interval-updates
--keep-interval-updates --keep-interval-updates-pattern --keep-last-epochs --keep-best-checkpoints
--no-save --no-epoch-checkpoints --no-last-checkpoints --no-save-optimizer-state
--best-checkpoint-metric --maximize-best-checkpoint-metric --patience
--load-checkpoint-on-all-dp-ranks --write-checkpoints-asynchronously --upsample-primary --lr
--force-anneal --lr-shrink --warmup-updates --warmup-init-lr --min-lr --max-lr --shrink-min
--lr-period-updates --t-mult --power --total-num-update --end-learning-rate --warmup-steps
--hold-steps --decay-steps --phase-ratio --init-lr-scale --final-lr-scale --lr-patience
--lr-threshold --lr-deacy-period --lr-decay --epoch2lr --update2lr
"""

SETTINGS: tuple[Setting, ...] = (
    # --- Our models refuse ------------------------------------------------------------------
    Setting(REFUSED, MODEL, "--adaptive-softmax-cutoff", "the loss needs every logit"),
    Setting(REFUSED, MODEL, "--adaptive-input --tie-adaptive-weights",
            "the embedding must be one table"),
    Setting(REFUSED, MODEL, "--quant-noise-pq --quant-noise-scalar",
            "the fused layers have no quantisation noise"),
    Setting(REFUSED, MODEL, "--no-cross-attention", "every decoder layer attends to the source"),
    Setting(REFUSED, MODEL, "--cross-self-attention", "source and target are packed separately"),
    Setting(REFUSED, MODEL, "--offload-activations",
            "the fused layers keep their activations on the GPU; use --checkpoint-activations to "
            "save memory"),
    Setting(REFUSED, MODEL, "--base-layers", "the fused layers have no mixture of experts"),
    Setting(REFUSED, MODEL, "--character-embeddings --char-inputs",
            "the embedding must be one table of tokens"),
    Setting(REFUSED, MODEL, "--scale-fc --scale-attn",
            "the fused layers have no LayerNorm within a sublayer"),
    Setting(REFUSED, MODEL, "--scale-heads", "the fused layers do not scale single heads"),
    Setting(REFUSED, MODEL, "--scale-resids", "the fused layers do not scale the residual"),
    Setting(REFUSED, MODEL, "--spectral-norm-classification-head",
            "our step trains plain weights"),
    Setting(REFUSED, MODEL, "--mha-reg-scale-factor",
            "the loss has no regularisation of attention heads"),
    Setting(REFUSED, MODEL, "--ffn-reg-scale-factor",
            "the loss has no regularisation of feed-forward layers"),
    Setting(REFUSED, MODEL, "--mha-heads-to-keep", "the fused layers keep all heads"),
    Setting(REFUSED, MODEL, "--ffn-blocks-to-remove",
            "the fused layers keep the whole feed-forward layer"),
    Setting(REFUSED, MODEL, "--encoder-xformers-att-config --decoder-xformers-att-config",
            "the fused layers have their own attention"),
    Setting(REFUSED, MODEL, "--pipeline-model-parallel", "all parameters are in one flat buffer"),
    Setting(REFUSED, MODEL, "--quantization-config-path",
            "the fused layers do not quantise the weights"),
    Setting(REFUSED, MODEL, "--amp", "the fused layers run in one precision; use --fp16 or --bf16"),
    Setting(REFUSED, MODEL, "--activation-fn",
            f"the fused layers support only {', '.join(ACTIVATIONS)}",
            used=lambda args: getattr(args, "activation_fn", "relu") not in ACTIVATIONS,
            always=False),
    Setting(REFUSED, MODEL, "--ddp-backend", "all parameters are in one flat buffer",
            used=lambda args: getattr(args, "ddp_backend", None) == "fully_sharded",
            always=False),
    # --- ls_adam refuses --------------------------------------------------------------------
    Setting(REFUSED, ADAM, "--fp16-adam-stats", "its moments are float32"),
    Setting(REFUSED, ADAM, "--use-old-adam", "it has only one implementation"),
    Setting(REFUSED, ADAM, "--tpu", "it runs on GPUs and CPUs only"),
    # --- Commands refuse --------------------------------------------------------------------
    Setting(REFUSED, "train", "--tpu", "it trains on CUDA GPUs and on CPUs only",
            "remove it, or train with fairseq-train"),
    Setting(REFUSED, "train", "--model-parallel-size", "each layer is on one device",
            "remove it, or add --native", lambda args: args.model_parallel_size != 1),
    Setting(REFUSED, "train", "--use-plasma-view",
            "pyarrow no longer has the plasma store, and translation does not use it"),
    # RoBERTa can train with it: there it sets the number of layers.
    Setting(REFUSED, "train", "--encoder-layers-to-keep", "fairseq 0.12.2 cannot train with it",
            _PRUNE_LATER, lambda args: getattr(args, "encoder_layers_to_keep", None)
            and not conditions.supports("--encoder-layers-to-keep", args)),
    # Language models can train with it: there it sets the number of layers.
    Setting(REFUSED, "train", "--decoder-layers-to-keep", "fairseq 0.12.2 cannot train with it",
            _PRUNE_LATER, lambda args: getattr(args, "decoder_layers_to_keep", None)
            and hasattr(args, "encoder_layers_to_keep")),
    Setting(REFUSED, "train eval-lm", "--self-target --past-target",
            "a Transformer language model predicts the next token alone"),
    Setting(REFUSED, "eval-lm", "--pad-to-fixed-bsz",
            "fairseq-eval-lm fails on a batch that is filled up"),
    Setting(REFUSED, READERS, "--pipeline-model-parallel", "all layers are on one device",
            "remove it, or add --native"),
    Setting(REFUSED, "train", "--cpu-offload",
            "it needs --ddp-backend fully_sharded, which cannot shard the one flat buffer of "
            "all parameters", "remove it, or add --native and use that backend"),
    Setting(REFUSED, "train", "--profile",
            "it marks ranges for a GPU profiler, but this run uses no GPU",
            used=lambda args: args.profile and conditions.lacks_gpu(args), always=False),
    Setting(REFUSED, "train", "--write-checkpoints-asynchronously",
            "the package iopath is not installed", "run pip install iopath, or remove it",
            lambda args: args.write_checkpoints_asynchronously
            and importlib.util.find_spec("iopath") is None, always=False),
    *(Setting(REFUSED, "train", f"--{name.replace('_', '-')}",
              f"the package {package} is not installed", f"run pip install {package}, or remove it",
              functools.partial(conditions.lacks_writer, name), always=False)
      for name, (package, _) in conditions.WRITERS.items()),
    Setting(REFUSED, "generate", "--print-step", "beam search has no refinement steps",
            used=lambda args: args.print_step and args.task == "translation"),
    Setting(REFUSED, "generate", "--retain-iter-history", "beam search has no refinement steps",
            used=lambda args: args.retain_iter_history and args.task == "translation"),
    # For a language model, search.of_translation says that its search has none at all.
    Setting(REFUSED, "generate", "--constraints", "a binarised test set contains no constraints",
            "remove it, or use lightseq-interactive, which reads the constraints from its input "
            "lines", lambda args: args.constraints and not families.has_prompts(args.task)),
    Setting(REFUSED, "generate", "--print-alignment",
            "with --score-reference there are only hard alignments", "use --print-alignment hard",
            lambda args: args.print_alignment == "soft" and args.score_reference, always=False),
    Setting(REFUSED, "interactive", "--score-reference", "input lines have no reference",
            "remove it, or score with lightseq-generate"),
    Setting(REFUSED, "interactive", "--print-alignment",
            "fairseq-interactive prints only hard alignments",
            "use --print-alignment hard, or lightseq-generate",
            lambda args: args.print_alignment == "soft", always=False),
    Setting(REFUSED, "generate", "--left-pad-target",
            "--score-reference reads scores from the left, where the pads would be",
            "remove one of the two", lambda args: args.score_reference
            and conditions.pads_targets_left(args), always=False),
    Setting(REFUSED, "train generate validate", "--left-pad-target",
            "with --num-batch-buckets the pads would come between the first token of a sentence "
            "and its words", "remove one of the two",
            lambda args: getattr(args, "num_batch_buckets", 0)
            and conditions.pads_targets_left(args), always=False),
    *(Setting(REFUSED, "train", "--criterion",
              "{args.criterion} is for other models or data than those of --task {args.task}",
              f"use --criterion {task.criteria[0]}",
              functools.partial(conditions.is_criterion_of_others, task=task), always=False)
      for task in families.tasks().values() if task.criteria),
    Setting(REFUSED, "train", "--criterion",
            "{args.criterion} is for other models or data than those of translation",
            "use --criterion ls_label_smoothed_cross_entropy or ls_cross_entropy",
            conditions.is_criterion_of_other_families, always=False),
    Setting(REFUSED, "train", "--criterion", "adaptive_loss is for models with adaptive softmax",
            f"use --criterion ls_cross_entropy, or, for a language model, add {_BANDS}",
            lambda args: conditions.family_of(args.arch) is not None
            and args.criterion == "adaptive_loss"
            and not getattr(args, "adaptive_softmax_cutoff", None), always=False),
    Setting(REFUSED, "train", "--criterion",
            "{args.criterion} needs every logit, but adaptive softmax does not compute all",
            f"use --criterion adaptive_loss, or a model without {_BANDS}",
            lambda args: conditions.has_adaptive_softmax(args)
            and args.criterion != "adaptive_loss", always=False),
    Setting(REFUSED, "train", "--ddp-backend",
            "{args.ddp_backend} needs a gradient of every parameter, but with adaptive softmax "
            "those of rare words have none in an update without them",
            "use --ddp-backend legacy_ddp",
            lambda args: conditions.has_adaptive_softmax(args)
            and args.ddp_backend in ("c10d", "pytorch_ddp"), always=False),
    Setting(REFUSED, "train", "--optimizer",
            "composite needs parameters that name their groups, and those of an ls_ arch do not",
            "use --optimizer ls_adam or another optimizer",
            lambda args: args.optimizer == "composite"
            and conditions.family_of(args.arch) is not None, always=False),
    # --- Training falls back to fairseq's own step ------------------------------------------
    Setting(FALLBACK, "train",
            "--memory-efficient-fp16 --memory-efficient-bf16 --store-ema --use-bmuf"),
    # Emptying the cache does not free the memory of captured graphs.
    Setting(FALLBACK, "train", "--empty-cache-freq",
            used=lambda cfg: cfg.common.empty_cache_freq > 0),
    # In the replay of a graph the profiler sees no named operations.
    Setting(FALLBACK, "train", "--profile"),
    Setting(FALLBACK, "train", "--encoder-layerdrop --decoder-layerdrop"),
    # Shapes depend on how many tokens of the batch are in each band of the vocabulary.
    Setting(FALLBACK, "train", f"--adaptive-input {_BANDS} --tie-adaptive-weights"),
    # With several ranks: these change the exchange of gradients or parameters.
    Setting(FALLBACK, "train", "--ddp-backend",
            used=lambda cfg: conditions.of_ranks(cfg, "ddp_backend") == "slowmo"),
    Setting(FALLBACK, "train", "--ddp-comm-hook",
            used=lambda cfg: conditions.of_ranks(cfg, "ddp_comm_hook") not in (None, "none")),
    # The heartbeat counts calls of fairseq's wrapper around the model.
    Setting(FALLBACK, "train", "--heartbeat-timeout",
            used=lambda cfg: (conditions.of_ranks(cfg, "heartbeat_timeout") or 0) > 0),
    Setting(FALLBACK, "train", "--all-gather-list-size", by_data=True),
    Setting(FALLBACK, "train", "--load-alignments", "the data have alignments", by_data=True),
    Setting(FALLBACK, "train", "--num-batch-buckets", "sentences are padded to length buckets",
            by_data=True),
    Setting(FALLBACK, "train", "--pad-to-fixed-bsz",
            "batches are filled up with blocks (pad_to_bsz)", by_data=True),
    # --- No effect, also in fairseq ---------------------------------------------------------
    Setting(UNREAD, ALL,
            "--reset-logging --suppress-crashes --fast-stat-sync --on-cpu-convert-precision --pad "
            "--eos --unk --distributed-num-procs"),
    Setting(UNREAD, READERS, _TRAINING + "--criterion --train-subset"),
    Setting(UNREAD, "train generate validate interactive", "--num-shards --shard-id"),
    Setting(UNREAD, "train validate interactive", "--gen-subset"),
    Setting(UNREAD, "train", "--checkpoint-shard-count"),
    Setting(UNREAD, "train eval-lm", "--future-target"),
    Setting(UNREAD, "generate interactive eval-lm", "--valid-subset --all-gather-list-size"),
    Setting(UNREAD, "validate interactive eval-lm", "--quiet --results-path"),
    Setting(UNREAD, "interactive eval-lm",
            "--required-batch-size-multiple --required-seq-len-multiple --max-target-positions"),
    Setting(UNREAD, "generate interactive", _EVAL_BLEU),
    # Only iterative refinement reads them, or nothing any more.
    Setting(UNREAD, "generate interactive",
            "--no-early-stop --no-beamable-mm --iter-decode-eos-penalty --iter-decode-max-iter "
            "--iter-decode-force-max-iter --iter-decode-with-beam "
            "--iter-decode-with-external-reranker --decoding-format --no-seed-provided "
            "--eos-token"),
    Setting(UNREAD, "generate validate", ENCODING),
    Setting(UNREAD, "validate interactive", _SCORING),
    Setting(UNREAD, "validate eval-lm", "--bpe --tokenizer"),
    Setting(UNREAD, "generate",
            "--distributed-backend --distributed-init-method --distributed-port --device-id "
            "--distributed-no-spawn"),
    Setting(UNREAD, "validate",
            "--bpe-codes --bpe-separator --bpe-vocab --bpe-merges --bpe-add-prefix-space "
            "--bpe-vocab-file --bpe-cased --gpt2-encoder-json --gpt2-vocab-bpe "
            "--sentencepiece-model --sentencepiece-model-path --tokenizer-folder --bf16 "
            "--memory-efficient-bf16 --post-process"),
    Setting(UNREAD, "interactive",
            "--no-progress-bar --log-interval --log-format --num-workers --dataset-impl "
            "--data-buffer-size --load-alignments --left-pad-source --left-pad-target "
            "--truncate-source --num-batch-buckets --sacrebleu --prefix-size --lm-path "
            "--lm-weight --print-step --retain-iter-history"),
    Setting(UNREAD, "eval-lm", "--skip-invalid-size-inputs-valid-test --scoring"),
    # --- No effect without another setting --------------------------------------------------
    Setting(UNREAD, ALL, "--amp-batch-retries --amp-init-scale --amp-scale-window",
            without="--amp"),
    Setting(UNREAD, ALL,
            "--fp16-no-flatten-grads --fp16-init-scale --fp16-scale-window --fp16-scale-tolerance "
            "--threshold-loss-scale",
            without="--fp16"),
    Setting(UNREAD, ALL,
            "--ema-decay --ema-start-update --ema-seed-model --ema-update-freq --ema-fp32",
            without="--store-ema"),
    Setting(UNREAD, ALL,
            "--adaptive-softmax-dropout --adaptive-softmax-factor --tie-adaptive-proj",
            without="--adaptive-softmax-cutoff"),
    Setting(UNREAD, ALL, "--adaptive-input-cutoff --adaptive-input-factor",
            without="--adaptive-input"),
    Setting(UNREAD, ALL,
            "--character-filters --character-embedding-dim --char-embedder-highway-layers",
            without="--character-embeddings"),
    Setting(UNREAD, ALL, "--shorten-data-split-list", without="--shorten-method"),
    Setting(UNREAD, ALL, "--poisson-lambda", without="--mask-length span-poisson"),
    Setting(UNREAD, ALL, "--quant-noise-pq-block-size", without="--quant-noise-pq"),
    Setting(UNREAD, ALL, "--base-sublayers --base-shuffle", without="--base-layers"),
    Setting(UNREAD, ALL,
            "--pipeline-balance --pipeline-devices --pipeline-chunks --pipeline-encoder-balance "
            "--pipeline-encoder-devices --pipeline-decoder-balance --pipeline-decoder-devices "
            "--pipeline-checkpoint",
            without="--pipeline-model-parallel"),
    Setting(UNREAD, ALL,
            "--min-params-to-wrap --no-reshard-after-forward --use-sharded-state "
            "--not-fsdp-flatten-parameters",
            without="--ddp-backend fully_sharded"),
    Setting(UNREAD, ALL,
            "--slowmo-momentum --slowmo-base-algorithm --localsgd-frequency --nprocs-per-node",
            without="--ddp-backend slowmo"),
    Setting(UNREAD, ALL, "--plasma-path", without="--use-plasma-view"),
    Setting(UNREAD, ALL, "--aim-run-hash", without="--aim-repo"),
    Setting(UNREAD, ALL, _EVAL_BLEU.removeprefix("--eval-bleu "), without="--eval-bleu"),
    Setting(UNREAD, ALL, "--keep-interval-updates --keep-interval-updates-pattern",
            without="--save-interval-updates"),
    Setting(UNREAD, ALL, "--sampling-topk --sampling-topp", without="--sampling"),
    Setting(UNREAD, ALL, "--sampling-temperature", without="--sampling-method temperature"),
    Setting(UNREAD, ALL, "--diverse-beam-strength", without="--diverse-beam-groups"),
    Setting(UNREAD, ALL, "--lm-weight", without="--lm-path"),
    Setting(UNREAD, ALL, "--retain-dropout-modules", without="--retain-dropout"),
    Setting(UNREAD, "train",
            "--all-gather-list-size --ddp-backend --ddp-comm-hook --bucket-cap-mb "
            "--fix-batches-to-gpus --find-unused-parameters --gradient-as-bucket-view "
            "--heartbeat-timeout --broadcast-buffers --load-checkpoint-on-all-dp-ranks --use-bmuf "
            "--zero-sharding --fp32-reduce-scatter",
            without=SEVERAL_RANKS),
)  # fmt: skip

# setting -> the one without which it has no effect
WITHOUT = {flag: row.without for row in SETTINGS if row.without for flag in row.flags.split()}


def unread(command: str, task: str = "", family: Family | None = None) -> frozenset[str]:
    """The settings that the command accepts for a task but that have no effect there, with models
    of a family."""
    found = frozenset(flag for flag, row in rows(command, UNREAD) if not row.without)
    known = families.tasks().get(task)
    if known is None:
        return found
    unused = known.unread if command in ("train", "validate") else ()
    return (found | {*unused}) - {*known.read, *(family.needs if family else ())}


def refused(command: str) -> dict[str, str]:
    """The settings that the command refuses on every machine, and why."""
    found: dict[str, str] = {}
    for place in (command, *((MODEL, ADAM) if command == "train" else ())):
        for flag, row in rows(place, REFUSED):
            if row.always:
                found.setdefault(flag, row.reason)
    return found
