"""``lightseq-import``: converts a checkpoint of the original LightSeq to fairseq's format."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import click

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.cli.start.commands import own
from lightseq_fairseq.cli.words.argv import flag_of


@own("lightseq-import")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("output", type=click.Path(path_type=Path))
def main(checkpoint: Path, output: Path) -> None:
    """Convert CHECKPOINT, of the original LightSeq 2 or 3, to a fairseq checkpoint OUTPUT.

    OUTPUT has the same weights and no optimizer state. fairseq and this package can use it:

    \b
        lightseq-import lightseq/checkpoint_best.pt model.pt
        lightseq-generate data-bin/wmt14_en_de --path model.pt --beam 4 --remove-bpe
    """
    if output.exists():
        raise UserError(f"{output} exists already: choose another OUTPUT.")
    from lightseq_fairseq.checkpoints import original_lightseq, saving

    # isort: split
    from lightseq_fairseq.fairseq_compat.checkpoints import read_checkpoint

    try:
        with open(checkpoint, "rb") as file:
            original = read_checkpoint(file, "cpu")
    except OSError as error:
        raise UserError(
            f"{checkpoint} cannot be read ({error.strerror or error}): check its path."
        ) from error
    try:
        native = original_lightseq.to_native(original)
    except UserError as error:
        raise UserError(f"{checkpoint}: {error}") from error
    saving.save(saving.own_storage(native), str(output))
    if getattr(original.get("args"), "enable_quant", False):
        click.echo(
            "lightseq-import: note: the quantisation is dropped, because fairseq's model has none.",
            err=True,
        )
    flags = " ".join(_flags(native["args"]))
    click.echo(
        f"wrote {output}; to train it further:\n"
        f"lightseq-train DATA {flags} --finetune-from-model {output}"
    )


def _flags(args: Namespace) -> Iterator[str]:
    """Options for lightseq-train to build the same model: those that differ from the arch's."""
    from fairseq.models import ARCH_CONFIG_REGISTRY

    yield f"--arch ls_{args.arch}"
    usual = Namespace(max_source_positions=None, max_target_positions=None)
    ARCH_CONFIG_REGISTRY[args.arch](usual)
    for name, default in vars(usual).items():
        value = getattr(args, name, default)
        if value != default and name not in ("decoder_input_dim", "decoder_output_dim"):
            flag = flag_of(name)
            yield flag if value is True else f"{flag} {value}"


if __name__ == "__main__":
    main()
