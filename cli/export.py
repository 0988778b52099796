"""``lightseq-export``: a trained model for fairseq, CTranslate2, Hugging Face or safetensors."""

from __future__ import annotations

import importlib
from pathlib import Path

import click

from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.base.run_folder import checkpoint_in
from lightseq_fairseq.cli.start.commands import own

# ctranslate2.specs.model_spec.ACCEPTED_MODEL_TYPES, known here without the package.
QUANTIZATIONS = (
    "int8", "int8_float32", "int8_float16", "int8_bfloat16", "int16", "float16", "bfloat16",
    "float32",
)  # fmt: skip


@own("lightseq-export")
@click.argument("source", metavar="CHECKPOINT", type=click.Path(path_type=Path))
@click.option(
    "--to", required=True,
    type=click.Choice(["fairseq", "ctranslate2", "huggingface", "safetensors", "peft"]),
    help="fairseq: a checkpoint for stock fairseq. ctranslate2: a model folder for CTranslate2. "
    "huggingface: a folder that AutoModel.from_pretrained of transformers loads. "
    "safetensors: a folder with model.safetensors, config.json (the options) and the dictionaries. "
    "peft: a folder with the adapters of --lora-rank alone, for peft; the others add them to the "
    "weights.",
)  # fmt: skip
@click.option(
    "--output", metavar="PATH", type=click.Path(path_type=Path),
    help="File or folder to write  [default: beside CHECKPOINT, named after it and --to]",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Replace --output if it exists.")
@click.option(
    "--data", metavar="FOLDER",
    help="Folder with the dictionaries of the run  [default: the folder used in training]",
)  # fmt: skip
@click.option(
    "--quantization", type=click.Choice(QUANTIZATIONS),
    help="Number format of the weights, with --to ctranslate2  [default: float32]",
)  # fmt: skip
@click.option(
    "--tokenizer", metavar="FOLDER", type=click.Path(path_type=Path),
    help="Folder of transformers whose tokenizer the model uses, with --to huggingface: its files "
    "are copied  [default: the one that lightseq-preprocess or lightseq-import has put beside the "
    "dictionaries]",
)  # fmt: skip
def main(
    source: Path, to: str, output: Path | None, force: bool, data: str | None,
    quantization: str | None, tokenizer: Path | None,
) -> None:  # fmt: skip
    """Export the model of a checkpoint that lightseq-train or fairseq-train wrote.

    CHECKPOINT is a file, or the folder of a run with its checkpoint_best.pt.

    \b
        lightseq-export checkpoint_best.pt --to fairseq --output model.pt
        lightseq-export checkpoint_best.pt --to ctranslate2 --quantization int8 --output ct2
    """
    source = Path(checkpoint_in(str(source)))
    suffix = ".pt" if to == "fairseq" else ""
    output = output or source.with_name(f"{source.stem}-{to}{suffix}")
    if output.exists() and not force:
        raise UserError(
            f"{output} exists already: choose another --output, or replace it with --force."
        )
    if quantization and to != "ctranslate2":
        raise UserError("--quantization needs --to ctranslate2: add it, or remove --quantization.")
    if tokenizer and to != "huggingface":
        raise UserError("--tokenizer needs --to huggingface: add it, or remove --tokenizer.")
    if to != "fairseq":
        _require(to, "ctranslate2" if to == "ctranslate2" else "safetensors")
    from lightseq_fairseq.checkpoints import export, to_huggingface, to_peft
    from lightseq_fairseq.checkpoints.trained import read

    trained, why = read(source), None
    if to == "fairseq":
        if data is not None:
            export.find_dictionaries(trained, data)
        export.to_fairseq(trained, output)
    elif to == "huggingface":
        why = to_huggingface.write(trained, output, data, tokenizer, source.parent)
    elif to == "peft":
        to_peft.write(trained, output)
    else:
        found = export.find_dictionaries(trained, data)
        if to == "ctranslate2":
            export.to_ctranslate2(trained, found, output, quantization)
        else:
            export.to_safetensors(trained, found, output)
    click.echo(f"wrote {output}")
    if why:
        click.echo(
            f"It has no tokenizer, because {why.rstrip('.')}. Token ids are the rows of the run's "
            "dictionary (<s> 0, <pad> 1, </s> 2, <unk> 3, then its lines). --tokenizer FOLDER "
            "copies one of transformers, with its config.json."
        )


def _require(to: str, package: str) -> None:
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise UserError(
            f"--to {to} needs a package that is not installed ({error}): run pip install {package}."
        ) from error


if __name__ == "__main__":
    main()
