"""The list of all names that this package replaces in fairseq, and the functions that replace them.

``PATCHES`` is the list, in the order in which names are replaced; `lightseq-doctor --verbose`
prints it. The replacement of an entry is defined in the module that it belongs to. Most often it is
a function that gets the original function, then the original's arguments. The list includes names
of Python, torch and hydra that are replaced for fairseq.

    apply("repair")                  replaces the names of a phase, permanently
    within("module:name", wrapper)   replaces one name in a with block

Calling either of them twice is safe. Nothing else in this package assigns to names of fairseq;
`test_patching` checks this.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import getattr_static
from typing import Any, NamedTuple

PACKAGE = "lightseq_fairseq"

# Phase -> when its names are replaced.
PHASES = {
    "import": "while fairseq is imported, and undone",
    "repair": "by fairseq_compat.prepare(): every launcher, --user-dir, startup's line",
    "model": "when a model of ours is built; by every launcher and --user-dir",
    "launcher": "by every launcher",
    "whole split": "by every launcher but lightseq-interactive",
    "training": "by lightseq-train",
    "our trainer": "by lightseq-train with an ls_ component",
    "fairseq's trainer": "by lightseq-train without one, or with --native",
    "our models": "by lightseq-generate, -validate, -interactive and -eval-lm",
    "fairseq's models": "by the same with --native",
    "saving": "when a training with an ls_ component begins",
    "scoped": "within a block of our code, and undone",
}


class Patch(NamedTuple):
    """One name that is replaced."""

    phase: str  #: when it is replaced: a key of PHASES
    target: str  #: the name: "module:name" or "module:Class.name"
    by: str  #: "module:name" of the replacement; for "scoped", of the code that replaces it
    why: str  #: what fails, or is missing, without the replacement
    instead: bool = False  #: the replacement is the new value, not a wrapper of the old one
    when: str = ""  #: "module:name" of a function: does this fairseq need it? "" means always
    everywhere: bool = False  #: also replace it in modules that imported it, and in subclasses


_NUMPY = "numpy 2 has no np.int, np.float, np.compat and percentile(interpolation=)"
_AUTOCAST = "a FutureWarning of torch.cuda.amp.autocast in the first update"
_DEAD = "0.12.2 keeps eight untrained parameters a layer, and fails on post-norm encoders"
_BUFFER = "a buffer that nobody writes makes files of equal runs differ"
_UNKNOWN = "0.12.2's --replace-unk wants alignments that it has not computed, or cannot read"
_LAZY = "--dataset-impl lazy: workers share the position in a file; cached: KeyError"

PATCHES = (
    Patch(
        "import", "dataclasses:dataclass", "fairseq_compat.importing:dataclass",
        "Python 3.11 refuses fairseq's defaults: mutable default <class 'CommonConfig'>",
    ),
    Patch(
        "repair", "hydra.core.plugins:pkgutil", "fairseq_compat.importing:PKGUTIL",
        "hydra before 1.3 uses FileFinder.find_module, which Python 3.12 lacks",
        instead=True, when="fairseq_compat.importing:hydra_wants_find_module",
    ),
    Patch(
        "repair", "fairseq.options:parse_args_and_arch",
        "fairseq_compat.command_line:parse_args_and_arch",
        "--bf16 switches the TPU on; an unknown --arch lists three hundred; --lr stays a text",
    ),
    Patch(
        "repair", "fairseq.models:build_model", "fairseq_compat.command_line:build_model",
        "a checkpoint of an unknown arch: IndexError: Replacement index 1 out of range",
    ),
    Patch(
        "repair", "fairseq.tasks.fairseq_task:torch", "fairseq_compat.deprecations:TORCH",
        _AUTOCAST, instead=True,
    ),
    Patch(
        "repair", "fairseq.optim.amp_optimizer:torch", "fairseq_compat.deprecations:TORCH",
        _AUTOCAST, instead=True,
    ),
    Patch(
        "repair", "fairseq.dataclass.utils:convert_namespace_to_omegaconf",
        "fairseq_compat.deprecations:convert_namespace_to_omegaconf",
        "six warnings of hydra at the start of each command", everywhere=True,
    ),
    *(
        Patch(
            "repair", f"fairseq.{module}:np", "fairseq_compat.batches:NUMPY", _NUMPY,
            instead=True, when="fairseq_compat.batches:numpy_lacks_names",
        )
        for module in (
            "data.data_utils", "data.language_pair_dataset", "data.token_block_dataset",
            "modules.dynamic_crf_layer",
        )
    ),
    Patch(
        "repair", "fairseq.data.indexed_dataset:MMapIndexedDatasetBuilder.finalize",
        "fairseq_compat.batches:finalize",
        "lightseq-preprocess --workers writes negative addresses past 2 GiB",
        when="fairseq_compat.batches:addresses_overflow",
    ),
    Patch(
        "repair", "fairseq.tasks.translation:load_langpair_dataset",
        "fairseq_compat.batches:load_langpair_dataset",
        "a corpus in several parts without --upsample-primary: negative dimensions",
    ),
    Patch(
        "repair", "fairseq.data.data_utils:_find_extra_valid_paths",
        "fairseq_compat.batches:_find_extra_valid_paths",
        "--valid-subset valid,valid1 ends in a complaint about valid1",
    ),
    Patch(
        "repair", "fairseq.data.indexed_dataset:IndexedDataset.read_data",
        "fairseq_compat.batches:read_data", _LAZY,
    ),
    Patch(
        "repair", "fairseq.data.indexed_dataset:IndexedCachedDataset.__getitem__",
        "fairseq_compat.batches:read_cached", _LAZY,
    ),
    Patch(
        "repair", "fairseq.data.indexed_dataset:IndexedDataset.__getitem__",
        "fairseq_compat.batches:read", _LAZY,
    ),
    Patch(
        "repair", "fairseq.data.data_utils:batch_by_size", "fairseq_compat.batches:batch_by_size",
        "the head and fairseq-fixed leave the last sentences out",
        when="fairseq_compat.batches:drops_sentences",
    ),
    Patch(
        "repair", "fairseq.modules.transformer_layer:TransformerEncoderLayerBase.__init__",
        "fairseq_compat.layers:without_dead_parameters", _DEAD,
        when="fairseq_compat.layers:has_dead_parameters",
    ),
    Patch(
        "repair",
        "fairseq.modules.transformer_layer:TransformerEncoderLayerBase._load_from_state_dict",
        "fairseq_compat.layers:_load_from_state_dict", _DEAD,
        when="fairseq_compat.layers:has_dead_parameters",
    ),
    Patch(
        "repair", "fairseq.nan_detector:NanDetector.add_hooks", "fairseq_compat.layers:add_hooks",
        "StopIteration in place of the module in which a number stops being one",
        when="fairseq_compat.layers:fails_on_dicts",
    ),
    Patch(
        "repair", "fairseq.checkpoint_utils:torch", "fairseq_compat.checkpoints:TORCH",
        "torch.load: Weights only load failed; dead parameters in the file", instead=True,
    ),
    Patch(
        "repair", "fairseq.distributed.utils:torch", "fairseq_compat.checkpoints:TORCH_OF_RANKS",
        "torch.load of what rank 0 sends: Weights only load failed", instead=True,
    ),
    Patch(
        "repair", "fairseq.checkpoint_utils:torch_persistent_save",
        "fairseq_compat.checkpoints:torch_persistent_save",
        "it writes to <name>.tmp, where two runs mix and a link is followed",
    ),
    *(
        Patch(
            "repair", f"fairseq.modules{module}.__init__",
            "fairseq_compat.checkpoints:with_new_buffer", _BUFFER,
        )
        for module in (
            ":SinusoidalPositionalEmbedding", ":AdaptiveInput", ":AdaptiveSoftmax",
            ".adaptive_softmax:TiedHeadModule",
        )
    ),
    *(
        Patch(
            "repair", f"fairseq.models.transformer:{stack}.upgrade_state_dict_named",
            "fairseq_compat.checkpoints:upgrade_state_dict_named", _BUFFER,
        )
        for stack in ("TransformerEncoderBase", "TransformerDecoderBase")
    ),
    Patch(
        "repair", "fairseq.utils:replace_unk", "fairseq_compat.generation:replace_unk", _UNKNOWN,
        when="fairseq_compat.generation:cannot_read_alignments",
    ),
    Patch(
        "repair", "fairseq.tasks:FairseqTask.build_generator",
        "fairseq_compat.generation:build_generator", _UNKNOWN,
        when="fairseq_compat.generation:cannot_read_alignments",
    ),
    Patch(
        "repair", "fairseq.utils:load_align_dict", "fairseq_compat.generation:load_align_dict",
        "--replace-unk without a file: FileNotFoundError: '@@ '",
    ),
    Patch(
        "repair", "fairseq.utils:post_process_prediction",
        "fairseq_compat.generation:post_process_prediction",
        "--remove-bpe joins subwords before --replace-unk counts them",
    ),
    Patch(
        "repair", "fairseq.ngram_repeat_block:NGramRepeatBlock._no_repeat_ngram",
        "fairseq_compat.generation:_no_repeat_ngram", "--no-repeat-ngram-size forbids nothing",
        when="fairseq_compat.generation:repeats_ngrams",
    ),
    Patch(
        "repair", "fairseq.tasks:FairseqTask.valid_step", "fairseq_compat.ranks:valid_step",
        "fairseq-validate of a rank without a batch: KeyError: 'net_input'", everywhere=True,
    ),
    Patch(
        "repair", "fairseq.tasks:FairseqTask.__init_subclass__",
        "fairseq_compat.ranks:INIT_SUBCLASS", "the same for tasks that --user-dir brings",
        instead=True,
    ),
    Patch(
        "repair", "fairseq.distributed.utils:all_gather_list",
        "fairseq_compat.ranks:all_gather_list",
        "ranks without GPUs: type torch.cuda.ByteTensor not available",
    ),
    Patch(
        "repair", "fairseq.models.distributed_fairseq_model:DistributedDataParallel",
        "fairseq_compat.ranks:wrap_model",
        "pytorch_ddp on a CPU names a device, which torch refuses",
    ),
    Patch(
        "model", "fairseq.tasks:FairseqTask.build_generator", "plugins.generator:build_generator",
        "our model is translated with by our search",
    ),
    Patch(
        "model", "fairseq.data:Dictionary.string", "plugins.generator:string",
        "the same text in less time",
    ),
    Patch(
        "model", "fairseq.tasks.translation:TranslationTask._inference_with_bleu",
        "plugins.generator:_inference_with_bleu",
        "--eval-bleu waits for the GPU at each reference, whose text is the same every time",
    ),
    Patch(
        "launcher", "fairseq.data.data_utils:batch_by_size", "cli.start.late_checks:batch_by_size",
        "a sentence over --max-tokens: how long it is",
    ),
    Patch(
        "whole split", "fairseq.data.data_utils:batch_by_size",
        "cli.start.late_checks:some_to_batch",
        "no sentence at all: fairseq trains on nothing or divides by zero",
    ),
    Patch(
        "launcher", "fairseq.checkpoint_utils:load_model_ensemble",
        "cli.start.late_checks:load_model_ensemble",
        "--task translation with a model of another kind",
    ),
    Patch(
        "launcher", "fairseq.data.indexed_dataset:make_dataset",
        "cli.start.late_checks:make_dataset",
        "broken files, and tokens that the dictionary does not know",
    ),
    Patch(
        "launcher", "fairseq.tasks.language_modeling:LanguageModelingTask.eval_lm_dataloader",
        "cli.start.late_checks:eval_lm_dataloader",
        "blocks longer than the model's positions: fairseq leaves them out",
    ),
    Patch(
        "our trainer", "fairseq_cli.train:Trainer", "training.trainer:Trainer",
        "the captured step, and lossless native checkpoints", instead=True,
    ),
    Patch(
        "fairseq's trainer", "fairseq_cli.train:Trainer", "training.stopping:StoppableTrainer",
        "ranks agree on signals", instead=True,
    ),
    Patch(
        "training", "fairseq_cli.train:main", "training.process:main",
        "a run that can go on however it ends: its folder, signals, the last checkpoint",
    ),
    Patch(
        "training", "fairseq.distributed.utils:distributed_init",
        "training.process:distributed_init", "it waits for other ranks and does not say so",
    ),
    Patch(
        "our models", "fairseq.checkpoint_utils:load_checkpoint_to_cpu",
        "checkpoints.models:load_for_ls_models",
        "our model for a checkpoint of fairseq's Transformer",
    ),
    Patch(
        "our models", "fairseq.sequence_scorer:SequenceScorer.generate", "plugins.scorer:generate",
        "lightseq-eval-lm: our language model computes logits of what is scored alone",
    ),
    Patch(
        "fairseq's models", "fairseq.checkpoint_utils:load_checkpoint_to_cpu",
        "checkpoints.models:load_for_native_models",
        "fairseq's model for a checkpoint that names ours",
    ),
    Patch(
        "saving", "fairseq.checkpoint_utils:PathManager", "training.background:Folder",
        "checkpoints are copied and deleted behind the thread that writes them", instead=True,
    ),
    Patch(
        "saving", "fairseq.checkpoint_utils:os", "training.background:OS",
        "the same of os.remove", instead=True,
    ),
    Patch(
        "scoped", "fairseq_cli.generate:main", "cli.start.launch:run_fairseq",
        "lightseq-generate: --output, sacrebleu's score, several GPUs",
    ),
    Patch(
        "scoped", "fairseq_cli.interactive:main", "cli.start.launch:run_fairseq",
        "lightseq-interactive: each line at once",
    ),
    Patch(
        "scoped", "argparse:ArgumentParser.error", "cli.start.command_lines:refused_in_a_sentence",
        "argparse prints all flags",
    ),
    Patch(
        "scoped", "fairseq.options:parse_args_and_arch", "cli.start.preflight:checks",
        "bad input is found before anything is loaded; --pack-tokens",
    ),
    Patch(
        "scoped", "fairseq.utils:move_to_cuda", "cli.translate.cpu_samples:left_on_cpu",
        "fairseq prints each sample, and would wait for the GPU at each",
    ),
    Patch(
        "scoped", "fairseq_cli.interactive:make_batches", "cli.translate.cpu_samples:left_on_cpu",
        "the same in lightseq-interactive",
    ),
    Patch(
        "scoped", "fairseq.tasks:FairseqTask.build_generator",
        "cli.translate.cpu_samples:left_on_cpu",
        "tells whether the search is ours",
    ),
    Patch(
        "scoped", "fairseq.logging.progress_bar:progress_bar",
        "cli.translate.several_gpus:translate",
        "several GPUs: the output is cut after every batch",
    ),
    Patch(
        "scoped", "fairseq.checkpoint_utils:verify_checkpoint_directory", "training.process:main",
        "a second run into the same folder",
    ),
    Patch(
        "scoped", "fairseq_cli.train:should_stop_early", "training.process:main",
        "training ends after the update in which a signal has come",
    ),
    Patch(
        "scoped", "torch.utils.data._utils.worker:_worker_loop", "training.stopping:load_batches",
        "workers leave signals to their parent, which needs batches to its end", instead=True,
    ),
    *(
        Patch(
            "scoped", f"multiprocessing.{module}:Popen._launch", "training.stopping:launch",
            "threads that a worker has before it blocks signals would be found by them",
        )
        for module in ("popen_fork", "popen_spawn_posix")
    ),
    Patch(
        "scoped", "fairseq.models.transformer_lm:TransformerDecoder",
        "plugins.language_model:LSTransformerLanguageModel",
        "its build_model names the class of the decoder, and ours is another",
    ),
    Patch(
        "scoped", "fairseq.optim:FP16Optimizer", "training.trainer:Trainer",
        "the float32 parameters lie like the 16-bit ones", instead=True,
    ),
    Patch(
        "scoped", "fairseq.checkpoint_utils:load_checkpoint_to_cpu", "training.trainer:Trainer",
        "fairseq drops the float32 parameters of a file before it has made room for them",
    ),
    Patch(
        "scoped", "fairseq_cli.train:main", "cli.benchmark.train.measured_trainer:attached",
        "lightseq-bench train: the Trainer that is there by then is measured",
    ),
    Patch(
        "scoped", "fairseq_cli.train:Trainer", "cli.benchmark.train.measured_trainer:attached",
        "lightseq-bench train: its steps", instead=True,
    ),
)  # fmt: skip

# State of this process; a reload of this module keeps it.
_replacements: dict[Patch, Any] = globals().get("_replacements", {})
_is_needed: dict[str, bool] = globals().get("_is_needed", {})  # results, by Patch.when
_undone: set[Patch] = globals().get("_undone", set())


def apply(phase: str) -> None:
    """Replaces the names of a phase, except those already replaced or not needed by this fairseq.

    Raises:
        ImportError, AttributeError: a name does not exist; then nothing has been replaced.
    """
    found = [(*_place(p.target), _ours(p.by), p) for p in PATCHES if p.phase == phase]
    for owner, name, ours, patch in found:
        if _is_in_place(patch, getattr_static(owner, name)) or not _needs(patch):
            continue
        for holder in _holders(owner, name) if patch.everywhere else [owner]:
            new = ours if patch.instead else around(getattr_static(holder, name), ours)
            setattr(holder, name, new)
            if holder is owner:
                _replacements[patch] = new


@contextmanager
def within(target: str, ours: Any) -> Iterator[None]:
    """Replaces a listed name within the block, by ``ours`` or by a wrapper that calls ``ours``.

    If other code replaces the same name within the block, the end of the block undoes that, too.
    """
    (patch,) = (p for p in PATCHES if p.target == target and p.phase in ("import", "scoped"))
    owner, name = _place(target)
    before, was_inherited = getattr_static(owner, name), name not in vars(owner)
    _replacements[patch] = ours if patch.instead else around(before, ours)
    setattr(owner, name, _replacements[patch])
    try:
        yield
    finally:
        if was_inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
        _undone.add(patch)


def around(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper of ``original`` that calls ``ours`` with ``original`` and the arguments."""

    @functools.wraps(original)
    def call(*args: Any, **keywords: Any) -> Any:
        return ours(original, *args, **keywords)

    return call


def state(patch: Patch) -> str:
    """The state of an entry in this process, as a short text."""
    module, _, path = patch.target.partition(":")
    value: Any = sys.modules.get(module)
    for name in path.split("."):
        value = getattr_static(value, name, None)
    if _is_in_place(patch, value):
        return "applied"
    if not _is_needed.get(patch.when, True):
        return "not needed"
    return "undone" if patch in _undone else "not applied here"


def report() -> Iterator[str]:
    """The lines of `lightseq-doctor --verbose`: each entry by phase, with its state and reason."""
    for phase, when in PHASES.items():
        yield f"{phase}: {when}"
        for patch in PATCHES:
            if patch.phase == phase:
                yield f"  {patch.target} ({state(patch)})"
                yield f"      {patch.why} [{patch.by}]"


def _ours(name: str) -> Any:
    module, _, path = name.partition(":")
    return getattr(importlib.import_module(f"{PACKAGE}.{module}"), path)


def _place(target: str) -> tuple[Any, str]:
    """(module or class, name in it) of a target.

    Raises:
        ImportError, AttributeError: it does not exist.
    """
    module, _, path = target.partition(":")
    *classes, name = path.split(".")
    owner = functools.reduce(getattr, classes, importlib.import_module(module))
    getattr_static(owner, name)
    return owner, name


def _needs(patch: Patch) -> bool:
    if patch.when and patch.when not in _is_needed:  # tested once: the repair removes the symptom
        _is_needed[patch.when] = _ours(patch.when)()
    return _is_needed.get(patch.when, True)


def _is_in_place(patch: Patch, value: Any) -> bool:
    """Whether a name's value is the entry's replacement, or a wrapper of it."""
    while value is not None and patch in _replacements:
        if value is _replacements[patch]:
            return True
        value = getattr(value, "__wrapped__", None)
    return False


def _holders(owner: Any, name: str) -> list[Any]:
    """Owners of the name: ``owner`` and the subclasses that define it, or, if ``owner`` is a
    module, all modules of fairseq that bind the name to the same value."""
    if isinstance(owner, type):
        heirs: list[Any] = [owner]
        for heir in heirs:  # the list grows: subclasses of subclasses
            heirs += [child for child in heir.__subclasses__() if child not in heirs]
        return [heir for heir in heirs if name in vars(heir)]
    modules = [module for key, module in sys.modules.items() if key.startswith("fairseq")]
    value = getattr_static(owner, name)
    return [module for module in modules if vars(module).get(name) is value]
