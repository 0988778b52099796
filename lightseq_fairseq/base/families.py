"""The families of models: what other modules must know of a family stands in its record.

A new family is a module with its model, and a record in `FAMILIES`; `cli.checks` checks its data.
Classes are named by "module:class", so that this module imports nothing and --help stays fast.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

PREFIX = "ls_"  # of the names of our archs, optimizers and criteria


def named(place: str) -> Any:
    """The class that a record names by its module and its name."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


class Recipe(NamedTuple):
    """The flags that lightseq-train adds to a command that names neither optimizer nor criterion.

    Sizes and dropout come from the arch; the length of a block from the task.

    Attributes:
        optimizer, criterion, schedule: flags with their values, such as "--lr 1.0".
        sentences: sentences of a batch; max_tokens limits the batch as well.
        decays: whether the learning rate falls to zero at the last update (--max-update).
        data: flags that say how the task makes its samples, and dropout where it is not the arch's.
        languages: flags of language tokens; none is added if the user sets one of them.
    """

    optimizer: str
    criterion: str
    schedule: str
    max_tokens: int
    update_freq: int
    updates: int
    sentences: int | None = None
    decays: bool = False
    data: str = ""
    languages: str = ""


class Task(NamedTuple):
    """A task of fairseq that provides the data of a family.

    Attributes:
        name: the value of --task.
        place: its class; subclasses count as well.
        data: the kind of data that it reads, see `cli.checks.CHECKS`.
        recipe: of lightseq-train.
        loaders: its methods that load dictionaries and data. A task with the same methods reads the
            same data. Empty: `cli.checks` does not know how the task loads them.
        criteria: the only ones that fit, the best one first; empty: all but those for other data,
            see ``plugins.conditions``.
        unread, read: settings of train and validate that this task and its models do not use,
            unlike most others; and those that they use, unlike most others.
        adds_losses: its training step adds the losses of several batches, and is not that of most
            tasks; the captured step does the same.
        prompts: generation continues its samples; they have no source.
        classifies: lightseq-interactive predicts the labels of its samples.
        dictionaries: the files of "source", "target" and "label" in the data folder, in which
            {...} are settings of the task; None: `checkpoints.export` does not know them.
        of_checkpoint: settings that generation and classification take from the checkpoint, with
            the task itself.
        symbols: those that it adds to the words of a dictionary file; one with {langs} for each
            language of --langs.
        tuning: the recipe of runs that begin with a model (--finetune-from-model), if it is another
            one.
    """

    name: str
    place: str
    data: str
    recipe: Recipe
    loaders: tuple[str, ...] = ()
    criteria: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    adds_losses: bool = False
    prompts: bool = False
    classifies: bool = False
    dictionaries: dict[str, str] | None = None
    of_checkpoint: tuple[str, ...] = ()
    symbols: tuple[str, ...] = ()
    tuning: Recipe | None = None


class Family(NamedTuple):
    """A family of models.

    Attributes:
        name: in words.
        native, ours: fairseq's class, and the class that replaces it. Empty: fairseq has no such
            model, so checkpoints name our archs, and stock fairseq cannot read them.
        data, instead: for the message about a wrong task: its data in words, and the flag of a
            right task.
        tasks: those that provide its data.
        batches: the classes that pack batches of these data, see `training.batch`.
        supports: settings that other families refuse.
        needs: settings of its tasks without which its models cannot train.
        recipes: by the names of tasks, where it is not the task's.
        adaptive: the recipe of models with adaptive softmax.
        generates: whether our search runs its models.
        packs_pairs: whether --pack-tokens fills its batches.
        exports: whether lightseq-export knows its models.
        not_ctranslate2: why CTranslate2 cannot read its models, and what to do, for a message.
    """

    name: str
    native: str
    ours: str
    data: str
    instead: str
    tasks: tuple[Task, ...]
    batches: tuple[str, ...]
    supports: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    recipes: dict[str, Recipe] = {}
    adaptive: Recipe | None = None
    generates: bool = False
    packs_pairs: bool = False
    exports: bool = False
    not_ctranslate2: str = ""

    def has_task(self, task: type) -> bool:
        """Whether a class of tasks provides the data of this family."""
        return any(issubclass(task, named(each.place)) for each in self.tasks)


# Vaswani et al. (2017), section 5, with the learning rate, weight decay and warm-up of fairseq's
# examples/scaling_nmt for big Transformers.
_TRANSLATING = Recipe(
    "--optimizer ls_adam --adam-betas '(0.9, 0.98)' --clip-norm 0 --weight-decay 1e-4",
    "--criterion ls_label_smoothed_cross_entropy --label-smoothing 0.1",
    "--lr 5e-4 --lr-scheduler inverse_sqrt --warmup-updates 4000",
    max_tokens=4096,
    update_freq=1,
    updates=300_000,
)
# fairseq's examples/mbart/README.md. The file has mBART's sizes, such as its order of the norms.
_FROM_MBART = Recipe(
    "--optimizer ls_adam --adam-betas '(0.9, 0.98)' --adam-eps 1e-6 --clip-norm 0",
    "--criterion ls_label_smoothed_cross_entropy --label-smoothing 0.2",
    "--lr 3e-5 --lr-scheduler polynomial_decay --warmup-updates 2500",
    max_tokens=1024,
    update_freq=2,
    updates=40_000,
    decays=True,
    data="--dropout 0.3 --attention-dropout 0.1",
)
# fairseq's examples/multilingual/finetune_multilingual_model.sh, of mBART50.
_SAMPLED, _TOKENS = "--sampling-method temperature", "--encoder-langtok src --decoder-langtok"
_OF_HEADS = ("--pooler-activation-fn", "--pooler-dropout")  # BART's flags, of sentences with labels
_OF_PAIRS = (
    Task(
        "translation",
        "fairseq.tasks.translation:TranslationTask",
        "sentence pairs",
        _TRANSLATING,
        ("setup_task", "load_dictionary", "load_dataset"),
        unread=_OF_HEADS,
        dictionaries={"source": "dict.{source_lang}.txt", "target": "dict.{target_lang}.txt"},
    ),
    Task(
        "translation_from_pretrained_bart",
        "fairseq.tasks.translation_from_pretrained_bart:TranslationFromPretrainedBARTTask",
        "sentence pairs",
        _FROM_MBART,
        ("setup_task", "load_dictionary", "load_dataset"),
        unread=(
            *("--truncate-source", "--num-batch-buckets", "--required-seq-len-multiple"),
            *_OF_HEADS,
        ),
        dictionaries={"source": "dict.{source_lang}.txt", "target": "dict.{target_lang}.txt"},
        of_checkpoint=("source_lang", "target_lang", "langs", "prepend_bos"),
        symbols=("[{langs}]", "<mask>"),
    ),
    Task(
        "translation_multi_simple_epoch",
        "fairseq.tasks.translation_multi_simple_epoch:TranslationMultiSimpleEpochTask",
        "sentence pairs sampled from several languages",
        _TRANSLATING._replace(data=_SAMPLED, languages=_TOKENS),
        ("setup_task", "load_dataset"),
        unread=("--keep-inference-langtok", "--enable-lang-ids", *_OF_HEADS),
        dictionaries={"source": "dict.{source_lang}.txt", "target": "dict.{target_lang}.txt"},
        of_checkpoint=("lang_pairs",),
        tuning=_FROM_MBART._replace(
            schedule="--lr 3e-5 --lr-scheduler inverse_sqrt --warmup-updates 2500",
            decays=False,
            data=f"{_FROM_MBART.data} {_SAMPLED}",
            languages=_TOKENS,
        ),
    ),
    Task(
        "multilingual_translation",
        "fairseq.tasks.multilingual_translation:MultilingualTranslationTask",
        "sentence pairs of several languages",
        _TRANSLATING,
        adds_losses=True,
    ),
)
TRANSLATION = Family(
    "translation",
    native="fairseq.models.transformer:TransformerModel",
    ours="lightseq_fairseq.plugins.transformer:LSTransformerModel",
    data="sentence pairs",
    instead="--task translation or another translation task",
    tasks=_OF_PAIRS,
    batches=(
        "lightseq_fairseq.training.batch.pairs:PackingPairs",
        "lightseq_fairseq.training.batch.pairs:PackingSampled",
    ),
    generates=True,
    packs_pairs=True,
    exports=True,
)
MULTILINGUAL = Family(
    "multilingual translation",
    native="fairseq.models.multilingual_transformer:MultilingualTransformerModel",
    ours="lightseq_fairseq.plugins.multilingual:LSMultilingualTransformerModel",
    data=TRANSLATION.data,
    instead=TRANSLATION.instead,
    tasks=_OF_PAIRS,
    batches=("lightseq_fairseq.training.batch.pairs:PackingParts",),
)
LANGUAGE_MODEL = Family(
    "language models",
    native="fairseq.models.transformer_lm:TransformerLanguageModel",
    ours="lightseq_fairseq.plugins.language_model:LSTransformerLanguageModel",
    data="running text",
    instead="--task language_modeling",
    tasks=(
        Task(
            "language_modeling",
            "fairseq.tasks.language_modeling:LanguageModelingTask",
            "running text",
            # fairseq's examples/language_model/README.md, of transformer_lm on WikiText-103.
            Recipe(
                "--optimizer ls_adam --adam-betas '(0.9, 0.98)' --clip-norm 0 --weight-decay 0.01",
                "--criterion ls_cross_entropy",
                "--lr 5e-4 --lr-scheduler inverse_sqrt --warmup-updates 4000 --warmup-init-lr 1e-7",
                max_tokens=2048,
                update_freq=16,
                updates=50_000,
            ),
            ("setup_task", "setup_dictionary", "load_dataset"),
            prompts=True,
            dictionaries={"source": "dict.txt"},
        ),
    ),
    batches=("lightseq_fairseq.training.batch.text:PackingText",),
    supports=(
        *("--adaptive-softmax-cutoff", "--adaptive-input", "--tie-adaptive-weights"),
        "--decoder-layers-to-keep",
    ),
    # fairseq's examples/language_model/README.adaptive_inputs.md, of transformer_lm_wiki103.
    adaptive=Recipe(
        "--optimizer nag --clip-norm 0.1",
        "--criterion adaptive_loss --ddp-backend legacy_ddp",
        "--lr 1.0 --lr-scheduler cosine --min-lr 1e-4 --stop-min-lr 1e-9 --t-mult 2 "
        "--lr-period-updates 270000 --lr-shrink 0.75 --warmup-updates 16000 --warmup-init-lr 1e-7",
        max_tokens=3072,
        update_freq=3,
        updates=286_000,
    ),
    generates=True,
    exports=True,
)

_OF_SUBWORDS = (
    *("--bpe", "--bpe-codes", "--bpe-separator", "--bpe-vocab", "--bpe-merges"),
    *("--bpe-add-prefix-space", "--bpe-vocab-file", "--bpe-cased"),
    *("--gpt2-encoder-json", "--gpt2-vocab-bpe"),
    *("--sentencepiece-model", "--sentencepiece-model-path"),
)
# fairseq's examples/roberta/README.pretraining.md, of roberta_base.
_PRETRAINING = Recipe(
    "--optimizer ls_adam --adam-betas '(0.9, 0.98)' --adam-eps 1e-6 --clip-norm 0 "
    "--weight-decay 0.01",
    "--criterion ls_masked_lm",
    "--lr 5e-4 --lr-scheduler polynomial_decay --warmup-updates 10000",
    max_tokens=8192,
    update_freq=16,
    updates=125_000,
    decays=True,
    data="--sample-break-mode complete --tokens-per-sample 512",
)
# fairseq's examples/roberta/README.glue.md, of RTE, which has 2,490 sentence pairs: set
# --max-update for other data. The tokens are RoBERTa's: <s> before a sample, </s> between its
# two sentences.
_FINE_TUNING = Recipe(
    "--optimizer ls_adam --adam-betas '(0.9, 0.98)' --adam-eps 1e-6 --clip-norm 0 "
    "--weight-decay 0.1",
    "--criterion ls_sentence_prediction",
    "--lr 2e-5 --lr-scheduler polynomial_decay --warmup-updates 122",
    max_tokens=4400,
    update_freq=1,
    updates=2036,
    sentences=16,
    decays=True,
    data="--init-token 0 --separator-token 2",
)
_SENTENCE_PREDICTION = Task(
    "sentence_prediction",
    "fairseq.tasks.sentence_prediction:SentencePredictionTask",
    "sentences with labels",
    _FINE_TUNING,
    ("setup_task", "load_dataset"),
    criteria=("ls_sentence_prediction", "sentence_prediction"),
    unread=("--dataset-impl", "--add-prev-output-tokens"),
    read=("--criterion",),  # the task takes settings from it
    classifies=True,
    dictionaries={"source": "input0/dict.txt", "label": "label/dict.txt"},
    of_checkpoint=(
        *("num_classes", "regression_target", "classification_head_name", "max_positions"),
        *("init_token", "separator_token", "shorten_method", "add_prev_output_tokens"),
    ),
    symbols=("<mask>",),
)
ROBERTA = Family(
    "RoBERTa",
    native="fairseq.models.roberta:RobertaModel",
    ours="lightseq_fairseq.plugins.roberta:LSRobertaModel",
    data="text with masked tokens or sentences with labels",
    instead="--task masked_lm or sentence_prediction",
    tasks=(
        Task(
            "masked_lm",
            "fairseq.tasks.masked_lm:MaskedLMTask",
            "text to mask",
            _PRETRAINING,
            ("setup_task", "load_dataset"),
            criteria=("ls_masked_lm", "masked_lm"),
            unread=(
                *("--dataset-impl", "--include-target-tokens"),
                *("--pooler-activation-fn", "--pooler-dropout"),
            ),
            read=_OF_SUBWORDS,  # for --mask-whole-words
            dictionaries={"source": "dict.txt"},
            symbols=("<mask>",),
        ),
        Task(
            "multilingual_masked_lm",
            "fairseq.tasks.multilingual_masked_lm:MultiLingualMaskedLMTask",
            "text to mask",
            _PRETRAINING,
            criteria=("ls_masked_lm", "masked_lm"),
            dictionaries={"source": "dict.txt"},
            symbols=("<mask>",),
        ),
        _SENTENCE_PREDICTION,
        Task(
            "sentence_ranking",
            "fairseq.tasks.sentence_ranking:SentenceRankingTask",
            "sentences with labels",
            _FINE_TUNING._replace(criterion="--criterion sentence_ranking"),
            criteria=("sentence_ranking",),
            dictionaries={"source": "input0/dict.txt"},
            symbols=("<mask>",),
        ),
    ),
    batches=(
        "lightseq_fairseq.training.batch.masked:PackingMasked",
        "lightseq_fairseq.training.batch.classes:PackingClasses",
    ),
    supports=("--encoder-layers-to-keep",),
    exports=True,
    not_ctranslate2="CTranslate2 reads RoBERTa in the format of Hugging Face transformers alone, "
    "not fairseq's: export this model with --to fairseq or --to safetensors.",
)
# fairseq's examples/bart/README.summarization.md, of CNN/DailyMail.
_SUMMARISING = Recipe(
    "--optimizer ls_adam --adam-betas '(0.9, 0.999)' --adam-eps 1e-8 --clip-norm 0.1 "
    "--weight-decay 0.01",
    "--criterion ls_label_smoothed_cross_entropy --label-smoothing 0.1",
    "--lr 3e-5 --lr-scheduler polynomial_decay --warmup-updates 500",
    max_tokens=2048,
    update_freq=4,
    updates=20_000,
    decays=True,
    data="--attention-dropout 0.1 --truncate-source",
)
# The noise, the optimizer and the loss of BART; batches and schedule of RoBERTa (_PRETRAINING).
_DENOISING = Recipe(
    "--optimizer ls_adam --adam-betas '(0.9, 0.999)' --adam-eps 1e-6 --clip-norm 0.1 "
    "--weight-decay 0.01",
    "--criterion ls_cross_entropy",
    "--lr 4e-4 --lr-scheduler polynomial_decay --warmup-updates 10000",
    max_tokens=8192,
    update_freq=16,
    updates=125_000,
    decays=True,
    data="--mask 0.3 --mask-length span-poisson --poisson-lambda 3.5 --replace-length 1 "
    "--mask-random 0.1 --permute-sentences 1 --rotate 0",
)
# Liu et al. (2020), Multilingual Denoising Pre-training for Neural Machine Translation, 2.2.
_DENOISING_LANGUAGES = _DENOISING._replace(
    optimizer="--optimizer ls_adam --adam-betas '(0.9, 0.98)' --adam-eps 1e-6 --clip-norm 0.1 "
    "--weight-decay 0.01",
    data=_DENOISING.data.replace("--mask 0.3", "--mask 0.35")
    + " --add-lang-token --multilang-sampling-alpha 0.7",
)
_OF_DENOISING = (
    Task(
        "denoising",
        "fairseq.tasks.denoising:DenoisingTask",
        "text to noise",
        _DENOISING,
        ("setup_task", "load_dataset"),
        unread=("--permute", *_OF_HEADS),
        read=_OF_SUBWORDS,  # by them, words and sentences are found
        dictionaries={"source": "dict.txt", "target": "dict.txt"},
        symbols=("<mask>",),
    ),
    Task(
        "multilingual_denoising",
        "fairseq.tasks.multilingual_denoising:MultilingualDenoisingTask",
        "texts to noise of several languages",
        _DENOISING_LANGUAGES,
        ("setup_task", "load_dataset"),
        unread=("--permute", "--shorten-method", "--shorten-data-split-list", *_OF_HEADS),
        read=_OF_SUBWORDS,
        dictionaries={"source": "dict.txt", "target": "dict.txt"},
        symbols=("[{langs}]", "<mask>"),  # the languages with --add-lang-token
    ),
)
# fairseq's examples/bart/README.glue.md, of RTE. The tokens are those of BART's hub interface.
_CLASSIFYING = _FINE_TUNING._replace(
    optimizer="--optimizer ls_adam --adam-betas '(0.9, 0.98)' --adam-eps 1e-8 --clip-norm 0 "
    "--weight-decay 0.01",
    schedule="--lr 1e-5 --lr-scheduler polynomial_decay --warmup-updates 61",
    data=f"{_FINE_TUNING.data} --add-prev-output-tokens --attention-dropout 0.1",
)
BART = Family(
    "BART",
    native="fairseq.models.bart:BARTModel",
    ours="lightseq_fairseq.plugins.bart:LSBARTModel",
    data="sentence pairs, text to noise or sentences with labels",
    instead="--task translation or another translation task, denoising or sentence_prediction",
    tasks=(*_OF_PAIRS, _SENTENCE_PREDICTION, *_OF_DENOISING),
    batches=(
        *TRANSLATION.batches,
        "lightseq_fairseq.training.batch.classes:PackingClasses",
        "lightseq_fairseq.training.batch.noised:PackingNoised",
    ),
    needs=("--add-prev-output-tokens",),
    recipes={"translation": _SUMMARISING, "sentence_prediction": _CLASSIFYING},
    generates=True,
    packs_pairs=True,
    exports=True,
)
MARIAN = TRANSLATION._replace(
    name="Marian and Pegasus",
    native="",
    ours="lightseq_fairseq.plugins.marian:LSMarianModel",
    not_ctranslate2="CTranslate2 reads Marian and Pegasus in the format of Hugging Face "
    "transformers alone, not fairseq's: export this model with --to huggingface.",
)

# The first task of the first family is the default of --task.
FAMILIES = (TRANSLATION, MULTILINGUAL, LANGUAGE_MODEL, ROBERTA, BART, MARIAN)


def tasks() -> dict[str, Task]:
    """The tasks of all families by their names."""
    return {task.name: task for family in FAMILIES for task in family.tasks}


def has_prompts(task: str | None) -> bool:
    """Whether generation with a task continues its samples, which have no source."""
    known = tasks().get(task or "")
    return known is not None and known.prompts


def classifies(task: str | None) -> bool:
    """Whether lightseq-interactive predicts labels with a task."""
    known = tasks().get(task or "")
    return known is not None and known.classifies


def of_saved(model: Any) -> Family | None:
    """The family of a model that checkpoints name, fairseq's or one that only we have; None for
    subclasses, which may compute something else."""
    return next((each for each in FAMILIES if named(each.native or each.ours) is model), None)
