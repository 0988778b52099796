"""The list of all names that this package replaces in fairseq, and the functions that replace them.

``PATCHES`` is the list, in the order in which names are replaced; `lightseq-doctor --verbose`
prints it. The list includes names of Python, torch, hydra and sacrebleu that are replaced for
fairseq. Each replacement is defined in the module that it belongs to; `fairseq_compat.patching`
applies them.
"""

from __future__ import annotations

from lightseq_fairseq.fairseq_compat.patching import Patch

_NUMPY = "fairseq uses np.int, np.float, np.compat and percentile(interpolation=), gone in numpy 2"
_AUTOCAST = "the first update prints a FutureWarning about torch.cuda.amp.autocast"
_DEAD = "0.12.2 adds eight unused parameters to each layer, and fails on post-norm encoders"
_BUFFER = "an uninitialised buffer makes the checkpoints of two equal runs differ"
_UNKNOWN = "--replace-unk of 0.12.2 needs alignments that it does not compute, or cannot read"
_EPOCH = "each epoch has the masks of the first one; --curriculum never ends; resumed runs differ"
_MATCHED = "unknown words count as right, because <unk> and <<unk>> are split into tokens"
_CR = "a carriage return within a line ends it, so lines of the two sides no longer match"
_LAZY = "--dataset-impl lazy: workers share one file position; --dataset-impl cached: KeyError"

PATCHES = (
    Patch(
        "import", "dataclasses:dataclass", "fairseq_compat.importing:dataclass",
        "Python 3.11 rejects fairseq's defaults: mutable default <class 'CommonConfig'>",
    ),
    Patch(
        "repair", "hydra.core.plugins:pkgutil", "fairseq_compat.importing:PKGUTIL",
        "hydra before 1.3 uses FileFinder.find_module, which Python 3.12 has removed",
        instead=True, when="fairseq_compat.importing:hydra_wants_find_module",
    ),
    Patch(
        "repair", "fairseq.options:parse_args_and_arch",
        "fairseq_compat.command_line:parse_args_and_arch",
        "--bf16 also sets --tpu; an unknown --arch prints 300 names; --lr may stay a string",
    ),
    Patch(
        "repair", "fairseq.models:build_model", "fairseq_compat.command_line:build_model",
        "a checkpoint of an unknown arch fails with IndexError: Replacement index 1 out of range",
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
        "hydra prints six warnings at the start of each command", everywhere=True,
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
        "lightseq-preprocess --workers writes negative offsets beyond 2 GiB",
        when="fairseq_compat.batches:addresses_overflow",
    ),
    Patch(
        "repair", "fairseq.tasks.translation:load_langpair_dataset",
        "fairseq_compat.batches:load_langpair_dataset",
        "a corpus in several parts needs --upsample-primary: negative dimensions",
    ),
    Patch(
        "repair", "fairseq.utils:resolve_max_positions",
        "fairseq_compat.batches:resolve_max_positions",
        "--task multilingual_translation keeps sentences beyond --max-target-positions",
        when="fairseq_compat.batches:forgets_positions",
    ),
    Patch(
        "repair", "fairseq.data.data_utils:_find_extra_valid_paths",
        "fairseq_compat.batches:_find_extra_valid_paths",
        "--valid-subset valid,valid1 fails, as if valid1 were not named",
    ),
    Patch(
        "repair", "fairseq.tasks.masked_lm:MaskedLMTask.load_dataset",
        "fairseq_compat.batches:load_masked_text",
        "--mask-whole-words fails: 'MaskedLMTask' object has no attribute 'args'",
        when="fairseq_compat.batches:task_lacks_args",
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
        "the development head and fairseq-fixed drop the last sentences",
        when="fairseq_compat.batches:drops_sentences",
    ),
    *(
        Patch(
            "repair", f"fairseq.data.iterators:EpochBatchIterator.{name}",
            f"fairseq_compat.epochs:{name}", _EPOCH,
        )
        for name in ("next_epoch_itr", "ordered_batches", "_get_iterator_for_epoch")
    ),
    Patch(
        "repair", "fairseq.data:LRUCacheDataset.set_epoch", "fairseq_compat.epochs:set_epoch",
        "the first masks of an epoch can be those of the epoch before",
    ),
    *(
        Patch(
            "repair", f"fairseq.tasks.multilingual_{task}.load_dataset",
            "fairseq_compat.epochs:load_dataset", "a resumed run has other batches",
        )
        for task in (
            "masked_lm:MultiLingualMaskedLMTask",
            "language_modeling:MultilingualLanguageModelingTask",
            "denoising:MultilingualDenoisingTask",
        )
    ),
    Patch(
        "repair", "fairseq.trainer:Trainer.get_train_iterator",
        "fairseq_compat.epochs:get_train_iterator",
        "--update-ordered-indices-seed: a resumed run has other batches",
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
        "StopIteration hides the name of the module in which NaN first occurs",
        when="fairseq_compat.layers:fails_on_dicts",
    ),
    Patch(
        "repair", "fairseq.checkpoint_utils:torch", "fairseq_compat.checkpoints:TORCH",
        "torch.load fails (Weights only load failed); files contain unused parameters",
        instead=True,
    ),
    Patch(
        "repair", "fairseq.distributed.utils:torch", "fairseq_compat.checkpoints:TORCH_OF_RANKS",
        "torch.load of the checkpoint that rank 0 sends fails (Weights only load failed)",
        instead=True,
    ),
    Patch(
        "repair", "fairseq.checkpoint_utils:torch_persistent_save",
        "fairseq_compat.checkpoints:torch_persistent_save",
        "fairseq writes to <name>.tmp, which two runs would share, and follows symbolic links",
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
        "--replace-unk without a file fails with FileNotFoundError: '@@ '",
    ),
    Patch(
        "repair", "fairseq.utils:post_process_prediction",
        "fairseq_compat.generation:post_process_prediction",
        "--remove-bpe joins the subwords before --replace-unk counts them",
    ),
    Patch(
        "repair", "fairseq.ngram_repeat_block:NGramRepeatBlock.forward",
        "fairseq_compat.generation:block_repeats", "--no-repeat-ngram-size has no effect",
        instead=True, when="fairseq_compat.generation:repeats_ngrams",
    ),
    *(
        Patch(
            "repair", f"fairseq.scoring.{scorer}.add_string",
            "fairseq_compat.scoring:add_string", _MATCHED,
        )
        for scorer in ("bleu:SacrebleuScorer", "chrf:ChrFScorer", "wer:WerScorer")
    ),
    Patch(
        "repair", "fairseq.tasks.translation:TranslationTask._inference_with_bleu",
        "fairseq_compat.scoring:_inference_with_bleu",
        "--eval-bleu is 0 for Chinese, Japanese and Korean: 13a does not split them into words",
    ),
    Patch(
        "repair", "fairseq.file_chunker_utils:find_offsets", "fairseq_compat.lines:find_offsets",
        _CR, instead=True, everywhere=True,
    ),
    Patch(
        "repair", "fairseq.file_chunker_utils:Chunker.__enter__", "fairseq_compat.lines:enter",
        _CR,
    ),
    Patch(
        "repair", "fairseq.data.indexed_dataset:IndexedRawTextDataset.read_data",
        "fairseq_compat.lines:read_data", _CR, instead=True,
    ),
    Patch(
        "repair", "fairseq.tasks:FairseqTask.valid_step", "fairseq_compat.ranks:valid_step",
        "fairseq-validate fails on a rank without a batch: KeyError: 'net_input'", everywhere=True,
    ),
    Patch(
        "repair", "fairseq.tasks:FairseqTask.__init_subclass__",
        "fairseq_compat.ranks:INIT_SUBCLASS",
        "as for FairseqTask.valid_step, in tasks of --user-dir",
        instead=True,
    ),
    Patch(
        "repair", "fairseq.distributed.utils:all_gather_list",
        "fairseq_compat.ranks:all_gather_list",
        "ranks without GPUs fail: type torch.cuda.ByteTensor not available",
    ),
    Patch(
        "repair", "fairseq.models.distributed_fairseq_model:DistributedDataParallel",
        "fairseq_compat.ranks:wrap_model",
        "fairseq passes a device to pytorch_ddp on a CPU, which torch rejects",
    ),
    Patch(
        "model", "fairseq.tasks:FairseqTask.build_generator", "plugins.generator:build_generator",
        "uses our beam search for our model",
    ),
    Patch(
        "model", "fairseq.data:Dictionary.string", "plugins.generator:string",
        "makes the same text faster",
    ),
    Patch(
        "model", "fairseq.tasks.translation:TranslationTask._inference_with_bleu",
        "plugins.generator:_inference_with_bleu",
        "--eval-bleu waits for the GPU once per reference, and makes the same text every time",
    ),
    Patch(
        "model", "fairseq.trainer:Trainer.train_step", "plugins.dropout:train_step",
        "our masks would change what torch's generator draws: which layers layer drop leaves out",
    ),
    Patch(
        "launcher", "fairseq.data.data_utils:batch_by_size",
        "cli.checks.inside_fairseq:batch_by_size",
        "reports the length of a sentence that exceeds --max-tokens",
    ),
    Patch(
        "whole split", "fairseq.data.data_utils:batch_by_size",
        "cli.checks.inside_fairseq:some_to_batch",
        "without any sentence fairseq trains on nothing, or divides by zero",
    ),
    Patch(
        "launcher", "fairseq.checkpoint_utils:load_model_ensemble",
        "cli.checks.inside_fairseq:load_model_ensemble",
        "fairseq translates with a model that is not for translation, and prints nonsense",
    ),
    Patch(
        "launcher", "fairseq.data.indexed_dataset:make_dataset",
        "cli.checks.inside_fairseq:make_dataset",
        "reports damaged files, and token ids that are not in the dictionary",
    ),
    Patch(
        "launcher", "fairseq.tasks.language_modeling:LanguageModelingTask.eval_lm_dataloader",
        "cli.checks.inside_fairseq:eval_lm_dataloader",
        "blocks longer than the model's positions: fairseq leaves them out",
    ),
    Patch(
        "our trainer", "fairseq_cli.train:Trainer", "training.trainer:Trainer",
        "adds the captured step and checkpoints that resume with identical results", instead=True,
    ),
    Patch(
        "fairseq's trainer", "fairseq_cli.train:Trainer", "training.resuming:ResumableTrainer",
        "makes the ranks stop together after a signal, and saves the state of --patience",
        instead=True,
    ),
    Patch(
        "training", "fairseq_cli.train:main", "training.process:main",
        "locks the checkpoint folder, handles signals and waits for the last checkpoint",
    ),
    Patch(
        "training", "fairseq.checkpoint_utils:load_checkpoint",
        "cli.checks.inside_fairseq:load_checkpoint",
        "a validation sentence that is too long ends the run only after the first epoch",
    ),
    Patch(
        "training", "fairseq.trainer:Trainer.get_train_iterator",
        "fairseq_compat.batches:get_train_iterator",
        "with several data folders an epoch begins with a wait of 5 s for each old worker process",
    ),
    Patch(
        "training", "fairseq.trainer:Trainer.get_valid_iterator",
        "fairseq_compat.batches:get_valid_iterator",
        "as for get_train_iterator, after each validation on sentences with labels",
    ),
    Patch(
        "training", "fairseq.distributed.utils:distributed_init",
        "training.process:distributed_init", "fairseq waits for other ranks without a message",
    ),
    Patch(
        "our models", "fairseq.checkpoint_utils:load_checkpoint_to_cpu",
        "checkpoints.models:load_for_ls_models",
        "builds our model for a checkpoint of fairseq's Transformer",
    ),
    Patch(
        "our models", "fairseq.sequence_scorer:SequenceScorer.generate", "plugins.scorer:generate",
        "lightseq-eval-lm: our language model computes only the logits that are scored",
    ),
    Patch(
        "fairseq's models", "fairseq.checkpoint_utils:load_checkpoint_to_cpu",
        "checkpoints.models:load_for_native_models",
        "builds fairseq's model for a checkpoint that names ours",
    ),
    Patch(
        "saving", "fairseq.checkpoint_utils:PathManager", "training.background:Folder",
        "copies and deletes checkpoints after the background thread has written them", instead=True,
    ),
    Patch(
        "saving", "fairseq.checkpoint_utils:os", "training.background:OS",
        "as for PathManager, for os.remove", instead=True,
    ),
    Patch(
        "scoped", "fairseq_cli.generate:main", "cli.start.launch:run_fairseq",
        "lightseq-generate: adds --output, sacrebleu's score and several GPUs",
    ),
    Patch(
        "scoped", "fairseq_cli.interactive:main", "cli.start.launch:run_fairseq",
        "lightseq-interactive: prints each line at once, by the code of Translator",
    ),
    Patch(
        "scoped", "fairseq_cli.preprocess:main", "cli.start.launch:run_fairseq",
        "lightseq-preprocess: refuses sides of different lengths before it writes",
    ),
    Patch(
        "scoped", "fairseq_cli.interactive:buffered_read", "cli.interactive:_translate", _CR,
        instead=True,
    ),
    Patch(
        "scoped", "sacrebleu:corpus_bleu", "fairseq_compat.scoring:_inference_with_bleu",
        "as for TranslationTask._inference_with_bleu, which calls it",
    ),
    Patch(
        "scoped", "argparse:ArgumentParser.error", "cli.words.command_lines:refused_in_a_sentence",
        "argparse prints all flags after an error",
    ),
    Patch(
        "scoped", "fairseq.options:parse_args_and_arch", "cli.checks.parsing:checked",
        "checks the input before anything is loaded, and adds --pack-tokens and --fp8",
    ),
    Patch(
        "scoped", "fairseq_cli.train:convert_namespace_to_omegaconf", "cli.checks.parsing:checked",
        "adds --fp8 to the configuration",
    ),
    Patch(
        "scoped", "torch.multiprocessing:spawn", "cli.start.ranks:forked",
        "each rank imports torch and fairseq again: training on several GPUs starts late",
    ),
    Patch(
        "scoped", "fairseq_cli.train:main", "cli.start.ranks:forked",
        "a process that computes with several threads cannot be forked",
    ),
    Patch(
        "scoped", "torch.distributed:init_process_group", "training.process:distributed_init",
        "each collective of another group guesses the GPU: warnings, and slow first collectives",
    ),
    Patch(
        "scoped", "fairseq.utils:move_to_cuda", "cli.translate.cpu_samples:left_on_cpu",
        "fairseq-generate waits for the GPU once per sentence that it prints",
    ),
    Patch(
        "scoped", "fairseq.tasks:FairseqTask.build_generator",
        "cli.translate.cpu_samples:left_on_cpu",
        "finds out whether our search is used",
    ),
    Patch(
        "scoped", "fairseq.logging.progress_bar:progress_bar",
        "cli.translate.several_gpus:translate",
        "several GPUs: splits the output after each batch",
    ),
    Patch(
        "scoped", "fairseq.checkpoint_utils:verify_checkpoint_directory", "training.process:main",
        "refuses a second run in the same checkpoint folder",
    ),
    Patch(
        "scoped", "fairseq_cli.train:should_stop_early", "training.process:main",
        "ends training after the update in which a signal arrived",
    ),
    Patch(
        "scoped", "fairseq_cli.train:train", "training.process:main",
        "logs model, data, precision and step before the first update",
    ),
    Patch(
        "scoped", "fairseq_cli.train:validate_and_save", "training.process:main",
        "measures tokens/s without validation and saving",
    ),
    Patch(
        "scoped", "fairseq.logging.progress_bar:progress_bar", "training.process:main",
        "writes the line of a log interval when the results of its updates have arrived",
    ),
    Patch(
        "scoped", "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter.__init__",
        "fairseq_compat.workers:no_loading_left",
        "Python's exit waits without a limit for data loading workers that do not react to SIGTERM",
    ),
    Patch(
        "scoped", "fairseq.data.iterators:BackgroundConsumer.__init__",
        "fairseq_compat.workers:no_loading_left",
        "Python's exit aborts if fairseq's thread is loading a batch",
    ),
    Patch(
        "scoped", "torch.utils.data._utils.worker:_worker_loop", "training.stopping:load_batches",
        "data loading workers ignore signals, because training needs batches until it ends",
        instead=True,
    ),
    *(
        Patch(
            "scoped", f"multiprocessing.{module}:Popen._launch", "training.stopping:launch",
            "a thread of a new worker could receive a signal before the worker blocks it",
        )
        for module in ("popen_fork", "popen_spawn_posix")
    ),
    Patch(
        "scoped", "fairseq.models.transformer_lm:TransformerDecoder",
        "plugins.language_model:LSTransformerLanguageModel",
        "fairseq's build_model has a fixed decoder class; ours is another",
    ),
    Patch(
        "scoped", "fairseq.models.roberta.model:RobertaEncoder", "plugins.roberta:LSRobertaModel",
        "fairseq's build_model has a fixed encoder class; ours is another", instead=True,
    ),
    Patch(
        "scoped", "fairseq.modules.transformer_sentence_encoder:MultiheadAttention",
        "plugins.roberta:LSRobertaModel",
        "BERT's initial values are only for fairseq's class of attention; ours is another",
        instead=True,
    ),
    Patch(
        "scoped", "fairseq.optim:FP16Optimizer", "training.trainer:Trainer",
        "gives the float32 parameters the same memory layout as the 16-bit ones", instead=True,
    ),
    Patch(
        "scoped", "fairseq.checkpoint_utils:load_checkpoint_to_cpu", "training.trainer:Trainer",
        "fairseq frees the float32 parameters of a checkpoint before they are used",
    ),
    Patch(
        "scoped", "fairseq.checkpoint_utils:load_checkpoint_to_cpu",
        "checkpoints.models:building",
        "Translator: builds our model, or fairseq's own, for its checkpoints",
    ),
    Patch(
        "scoped", "fairseq_cli.hydra_train:hydra_init", "cli.hydra_train:main",
        "lightseq-hydra-train: distinguishes what a configuration sets from fairseq's defaults",
    ),
    Patch(
        "scoped", "fairseq_cli.hydra_train:_hydra_main", "cli.hydra_train:main",
        "lightseq-hydra-train: trains by the command line of lightseq-train",
    ),
    Patch(
        "scoped", "fairseq_cli.train:convert_namespace_to_omegaconf", "cli.hydra_train:main",
        "lightseq-hydra-train: refuses settings that no flag can set",
    ),
    Patch(
        "scoped", "fairseq_cli.train:main", "cli.benchmark.train.measured_trainer:attached",
        "lightseq-bench train: measures the Trainer that the command selects",
    ),
    Patch(
        "scoped", "fairseq_cli.train:Trainer", "cli.benchmark.train.measured_trainer:attached",
        "lightseq-bench train: reports the steps of the Trainer", instead=True,
    ),
)  # fmt: skip
