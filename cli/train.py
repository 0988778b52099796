"""``lightseq-train``: fairseq-train, with this package's components if the command names them."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from lightseq_fairseq.base.families import PREFIX
from lightseq_fairseq.cli.checks import Request
from lightseq_fairseq.cli.start import ranks
from lightseq_fairseq.cli.start.launch import launcher, run_fairseq
from lightseq_fairseq.cli.words import defaults, registries
from lightseq_fairseq.cli.words.argv import ARCH, is_given, value, with_options, without_prefixes


@launcher("train")
@click.option(
    "--native",
    is_flag=True,
    help="Run the same command, with the same defaults, with fairseq's own arch, optimizer and "
    "criterion.",
)
@click.option(
    "--pack-tokens",
    is_flag=True,
    help="Count only real tokens, not pads, when batches are filled up to --max-tokens, so that "
    "batches are larger than fairseq's. For translation models and BART, with an arch that "
    "begins with ls_. --batch-size still applies, --required-batch-size-multiple does not. "
    "Validation keeps fairseq's batches.",
)
@click.option(
    "--fp8",
    is_flag=True,
    help="Compute the matrix products of the layers, forward and backward, in 8 bits (E4M3), and "
    "everything else as with --bf16, which it needs. For archs that begin with ls_, on GPUs of "
    "compute capability 8.9 or later (slowly also on a CPU).",
)
@click.option(
    "--freeze",
    metavar="NAMES",
    help="Do not train the parameters with these names; they cost no gradient and no state of the "
    "optimizer. NAMES are parts of parameter names with commas between them, such as "
    "encoder,embed_tokens or decoder.layers.[0-5]. Also with --native.",
)
@click.option(
    "--lora-rank", type=int, metavar="R",
    help="Train low-rank adapters (LoRA) of rank R instead of the parameters. Generation and "
    "lightseq-export add them to the weights. For archs that begin with ls_.",
)  # fmt: skip
@click.option(
    "--lora-alpha", type=float, metavar="A",
    help="Adapters are multiplied by A / R  [default: 2 R]",
)  # fmt: skip
@click.option(
    "--lora-dropout", type=float, metavar="P",
    help="Dropout of what the adapters read  [default: 0]",
)  # fmt: skip
@click.option(
    "--lora-on", metavar="NAMES",
    help="The linear layers that get adapters: q, k, v, out, fc1, fc2, or parts of names, with "
    "commas between them  [default: q,v]",
)  # fmt: skip
def main(words: list[str], native: bool, pack_tokens: bool, fp8: bool, **own: Any) -> None:
    """Train a translation model, a language model or RoBERTa: fairseq-train, accelerated.

    Takes the flags of fairseq-train, and refuses by name the few that this package lacks. To use
    this package, add the prefix ls_ to the arch, the optimizer and the criterion. The arch is
    enough; this command is complete:

    \b
        lightseq-train data-bin/wmt14_en_de --arch ls_transformer_wmt_en_de_big_t2t

    \b
    The flags of fairseq-train that most runs set (--fairseq-help lists all of them):
        --save-dir FOLDER            of the checkpoints (default: checkpoints)
        --lr RATE                    the learning rate
        --max-tokens N               tokens of a batch, per GPU; or --batch-size N sentences
        --max-epoch N, --max-update N   when the run ends
        --update-freq N              batches whose gradients are added for one update
        --bf16, --fp16               16 bits; filled in on a GPU
        --keep-last-epochs N, --no-epoch-checkpoints   fewer files: by default each epoch is saved

    The options that you do not set get the values of the default recipe: optimizer, criterion,
    learning-rate schedule, batch size, number of updates, precision. The first line printed is the
    complete command. A command that sets the optimizer or the criterion keeps fairseq's defaults
    instead, so that a fairseq command with prefixes trains on the same data. A command without any
    ls_ runs fairseq-train unchanged.
    """
    # own_flags.add_to adds these flags to fairseq's parser
    given = {f"--{name.replace('_', '-')}": str(x) for name, x in own.items() if x is not None}
    words = ["--pack-tokens"] * pack_tokens + ["--fp8"] * fp8 + [*sum(given.items(), ())] + words

    def is_native() -> bool:
        return native or not registries.uses_lightseq(words)

    def complete(argv: list[str]) -> list[str]:
        if "--help" in argv:
            arch = [] if is_given(argv, ARCH) else ["--arch", "ls_transformer"]
            return defaults.complete([*arch, *argv], defaults.Machine())
        if not registries.uses_lightseq(argv):
            return argv
        completed.append(Completed(argv, native))
        return completed[0].words

    completed: list[Completed] = []

    def announce(request: Request) -> None:
        from lightseq_fairseq.cli.checks import pairs  # imports fairseq

        ours = f"{PREFIX}{request.args.arch}"
        is_forgotten = not native and is_native() and registries.trains(ours, request.args.task)
        if is_forgotten and _is_first_rank(words):
            click.echo(
                "lightseq-train: note: this run is fairseq's own, because no name begins with "
                f"ls_: for this package's layers, set --arch {ours}.",
                err=True,
            )
        for command in completed:
            command.fit(request)
            pairs.name_languages(request.args)
            if _is_first_rank(command.argv):
                command.announce()

    run_fairseq("train", words, native=is_native, complete=complete, announce=announce)


class Completed:
    """A command that names a part of ours, with the flags that complete it.

    Attributes:
        argv: what the user typed.
        words: the complete command that runs.
    """

    def __init__(self, argv: list[str], native: bool) -> None:
        from lightseq_fairseq.cli.checks import epoch  # imports numpy, which --help does not need

        self.argv, self._native = argv, native
        self._machine, self._recipe = _machine(argv), registries.recipe_of(argv)
        self._fill(epoch.of_command(argv))

    def _fill(self, data: defaults.Epoch | None) -> None:
        """Completes the command for these data."""
        argv, recipe = self.argv, self._recipe
        fused = registries.is_fused(value(argv, ARCH))
        self._data, added = data, defaults.missing(argv, self._machine, fused, recipe, data)
        argv = with_options(argv, added)
        self._why = defaults.reason(argv, added, recipe)
        self._notes = [defaults.note(argv), defaults.note_on_length(argv, added, data)]
        if self._native:
            argv, added = registries.native_twin(argv), without_prefixes(added)
        self._printed, self._added = argv, added
        self.words = with_options(argv, _log_format(argv))

    def fit(self, request: Request) -> None:
        """Fits the filled-in schedule to the run's updates, which parsing has made countable."""
        fitted = [flag for flag in defaults.FITTED if flag in self._added]
        if self._data is None or not fitted or not is_given(self.argv, ("--max-epoch",)):
            return
        from lightseq_fairseq.cli.checks import epoch

        self._fill(epoch.counted(self._data, request.args))
        sys.argv[1:] = request.argv = self.words
        for flag in fitted:
            name = flag.removeprefix("--").replace("-", "_")
            kind = type(getattr(request.args, name))
            setattr(request.args, name, kind(value(self._added, (flag,))))

    def announce(self) -> None:
        """Prints the command, and what a user should know about its flags."""
        print(defaults.command_line(self._printed), flush=True)
        if self._added:
            print(f"# filled in: the flags from {self._added[0]} to the end", flush=True)
        if self._why is not None:
            print(f"# {self._why}", flush=True)
        for note in filter(None, self._notes):
            click.echo(f"lightseq-train: note: {note}", err=True)


def _machine(argv: list[str]) -> defaults.Machine:
    import torch

    gpus = 0 if is_given(argv, ("--cpu",)) else torch.cuda.device_count()
    return defaults.Machine(
        ranks=int(os.environ["WORLD_SIZE"]) if ranks.from_torchrun() else max(gpus, 1),
        gpus=gpus,
        bf16=gpus > 0 and ranks.first_capability() >= (8, 0),
    )


def _is_first_rank(argv: list[str]) -> bool:
    """Whether this process is rank 0, or starts the ranks."""
    if ranks.from_torchrun():
        return os.environ["RANK"] == "0"
    if is_given(argv, ("--distributed-port",)):  # then fairseq takes the rank from Slurm
        return os.environ.get("SLURM_PROCID", "0") == "0"
    return (value(argv, ("--distributed-rank",)) or "0") == "0"


def _log_format(argv: list[str]) -> list[str]:
    """A progress bar on a terminal; plain lines if the output is redirected."""
    if is_given(argv, ("--log-format", "--no-progress-bar")):
        return []
    terminal = sys.stdout.isatty() and sys.stderr.isatty()
    return [] if terminal else ["--log-format", "simple"]


if __name__ == "__main__":
    main()
