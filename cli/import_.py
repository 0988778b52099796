"""``lightseq-import``: converts a model of Hugging Face or of the original LightSeq to fairseq."""

from __future__ import annotations

import contextlib
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
@click.option(
    "--add-languages", metavar="NEW=LIKE,...",
    help="Add languages to a model of Hugging Face: each gets a row, which begins as the row of a "
    "similar language. The number of rows becomes a multiple of 8.",
)  # fmt: skip
@click.option(
    "--only-words-of", metavar="FILE", multiple=True, type=click.Path(path_type=Path),
    help="Keep only the rows of words that these files of raw text use, of single characters and "
    "of special words; lightseq-export can restore the others. May be repeated.",
)  # fmt: skip
def main(
    source: Path, output: Path, add_languages: str | None, only_words_of: tuple[Path, ...]
) -> None:
    """Convert SOURCE to a fairseq checkpoint, which fairseq and this package can use.

    SOURCE is a folder of Hugging Face transformers: config.json, the weights (safetensors or
    pytorch_model.bin, in one file or several) and the tokenizer. OUTPUT becomes a folder with
    model.pt, dict.txt, the tokenizer and, if the model knows languages, languages.txt:

    \b
        lightseq-import nllb-200-distilled-600M nllb --add-languages xho_Latn=zul_Latn
        lightseq-preprocess --hf-tokenizer nllb -s eng_Latn -t xho_Latn ... --destdir DATA
        lightseq-train DATA --arch ls_transformer --finetune-from-model nllb/model.pt ...

    Or SOURCE is a checkpoint of the original LightSeq 2 or 3. OUTPUT becomes a checkpoint with the
    same weights and no optimizer state:

    \b
        lightseq-import lightseq/checkpoint_best.pt model.pt
        lightseq-generate data-bin/wmt14_en_de --path model.pt --beam 4 --remove-bpe
    """
    if output.exists():
        raise UserError(f"{output} exists already: choose another OUTPUT.")
    if source.is_dir():
        _hugging_face(source, output, _languages(add_languages or ""), only_words_of)
    elif add_languages or only_words_of:
        flag = "--add-languages" if add_languages else "--only-words-of"
        raise UserError(f"{flag} needs a folder of Hugging Face, and {source} is none: remove it.")
    else:
        _original_lightseq(source, output)


def _languages(text: str) -> dict[str, str]:
    """New languages, and those whose rows they begin with."""
    languages = dict(part.partition("=")[::2] for part in text.split(",") if part)
    for new, like in languages.items():
        if not new or not like:
            raise UserError(
                f"--add-languages {text} does not say which language each is like: write "
                f"{new or 'NEW'}=LIKE, with a similar language that the model knows."
            )
    return languages


def _hugging_face(
    source: Path, output: Path, languages: dict[str, str], texts: tuple[Path, ...]
) -> None:
    from lightseq_fairseq.base import files, tokenizer
    from lightseq_fairseq.checkpoints import from_huggingface

    with files.placed(output) as place:
        place.mkdir()
        imported, names = from_huggingface.write(source, place, output, languages, texts)
    args, vocabularies = imported.state["args"], imported.vocabularies
    words = " ".join(
        f"--{flag}dict {output / name}" for flag, name in zip(("src", "tgt"), names.values())
    )
    if args.task == "translation" and len(names) == 1:
        words += " --joined-dictionary"
    with contextlib.suppress(UserError):  # FSMT's folders have no tokenizer that we can read
        tokenizer.of_folder(output, "source")
        words = f"--hf-tokenizer {output}"
    languages_of = [known.languages for known in vocabularies.values()]
    task = imported.flags.format(folder=output, languages=",".join(languages_of[0]))
    preprocess = "lightseq-preprocess ..."
    if args.task in ("masked_lm", "language_modeling"):
        preprocess = "lightseq-preprocess --only-source ..."
    if imported.classes:
        words += " --destdir DATA/input0"
        if "--regression-target" not in task:
            words += f"\n{preprocess} --destdir DATA/label"
    click.echo(
        f"wrote {output}; to train it further:\n"
        f"{preprocess} {words}\n"
        f"lightseq-train DATA --arch ls_{args.arch.removeprefix(PREFIX)}{task} "
        f"--finetune-from-model {output / 'model.pt'}"
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
