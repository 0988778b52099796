"""``lightseq-import``: converts a model of Hugging Face or of the original LightSeq to fairseq."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import click

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.base.families import PREFIX
from lightseq_fairseq.cli.start.commands import own
from lightseq_fairseq.cli.words.argv import flag_of


@own("lightseq-import")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("output", type=click.Path(path_type=Path))
def main(source: Path, output: Path) -> None:
    """Convert SOURCE to a fairseq checkpoint, which fairseq and this package can use.

    SOURCE is a folder of Hugging Face transformers: config.json, the weights (safetensors or
    pytorch_model.bin, in one file or several) and the tokenizer. OUTPUT becomes a folder with
    model.pt, dict.txt and, if the model knows languages, languages.txt:

    \b
        lightseq-import roberta-base roberta
        lightseq-train DATA --arch ls_roberta --finetune-from-model roberta/model.pt

    Or SOURCE is a checkpoint of the original LightSeq 2 or 3. OUTPUT becomes a checkpoint with the
    same weights and no optimizer state:

    \b
        lightseq-import lightseq/checkpoint_best.pt model.pt
        lightseq-generate data-bin/wmt14_en_de --path model.pt --beam 4 --remove-bpe
    """
    if output.exists():
        raise UserError(f"{output} exists already: choose another OUTPUT.")
    if source.is_dir():
        _hugging_face(source, output)
    else:
        _original_lightseq(source, output)


def _hugging_face(source: Path, output: Path) -> None:
    from lightseq_fairseq.base import files
    from lightseq_fairseq.checkpoints import from_huggingface, saving

    state, vocabularies = from_huggingface.to_native(source)
    args = state["args"]
    args.data = str(output.resolve())
    names = {side: f"dict.{getattr(args, f'{side}_lang', None)}.txt" for side in vocabularies}
    if len(names) == 1:
        names = {"source": "dict.txt"}
    with files.placed(output) as place:
        place.mkdir()
        saving.save(saving.own_storage(state), str(place / "model.pt"))
        for side, known in vocabularies.items():
            known.dictionary().save(str(place / names[side]))
            if known.languages:
                text = "".join(f"{language}\n" for language in known.languages)
                (place / "languages.txt").write_text(text, encoding="utf-8")
    dictionary = " ".join(
        f"--{flag}dict {output / name}" for flag, name in zip(("src", "tgt"), names.values())
    )
    joined = " --joined-dictionary" if args.task == "translation" and len(names) == 1 else ""
    click.echo(
        f"wrote {output}; to train it further:\n"
        f"lightseq-preprocess ... {dictionary}{joined}\n"
        f"lightseq-train DATA --arch ls_{args.arch.removeprefix(PREFIX)} --finetune-from-model "
        f"{output / 'model.pt'}"
    )


def _original_lightseq(checkpoint: Path, output: Path) -> None:
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
