"""Every command and snippet of the pages runs, unless a comment above it says what a CPU lacks.

The `bash` and `console` blocks of a page run in one shell, its `python` blocks in one interpreter,
in their order. A line of these programs has the number that it has in the page.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import helpers.forked_commands as forked_commands
import pytest
from helpers.cli_runs import SPLITS, succeed, write_text
from helpers.pages import ROOT, Block, blocks, pages, text

ALL = [block for page in pages() for block in blocks(page)]
COMMANDS = [block for block in ALL if block.language in ("bash", "console") and not block.source]
PYTHON = [block for block in ALL if block.language == "python" and not block.source]
EXCERPTS = [block for block in ALL if block.source]

# Words of the comments `<!-- needs: ... -->`.
LACKING = (
    *(
        "a GPU",
        "the network",
        "nvcc",
        "Slurm",
        "Docker",
        "Triton",
        "several machines",
        "minutes",
        "hours",
        "days",
    ),
    *("the raw files", "a trained model", "a checkpoint of LightSeq", "a wheel"),
    "a model of Hugging Face",
    "without a GPU",
    "for the last line a GPU",
)
# Blocks with these words are run on less data by tests/examples/test_quickstart.py,
# test_language_model_example.py, test_roberta_example.py and so on.
RECIPES = tuple(
    f"examples/{name}/" for name in ("quickstart", "language_model", "roberta", "bart", "summaries")
)

# Every training is of a small model and two updates long, one epoch each; ten if a page needs the
# checkpoints of ten epochs.
SMALL_DECODER = (
    "--decoder-layers 1 --decoder-embed-dim 16 --decoder-ffn-embed-dim 16 "
    "--decoder-attention-heads 2 --num-workers 0 --cpu"
)
SMALL_ENCODER = (
    "--encoder-layers 1 --encoder-embed-dim 16 --encoder-ffn-embed-dim 16 "
    "--encoder-attention-heads 2"
)
SMALL = f"{SMALL_ENCODER} {SMALL_DECODER}"
SMALL_ROBERTA = f"{SMALL_ENCODER} --num-workers 0 --cpu"
SHELL = f"""
for name in lightseq-train fairseq-train torchrun; do
    eval "$name() {{
        case \\$* in
            *language_modeling*) set -- \\"\\$@\\" {SMALL_DECODER};;
            *roberta*) set -- \\"\\$@\\" {SMALL_ROBERTA};;
            *) set -- \\"\\$@\\" {SMALL};;
        esac
        command $name \\"\\$@\\" --max-update $UPDATES || return
    }}"
done
trap 'echo "line $LINENO of the page failed" >&2' ERR
"""


def is_run(block: Block) -> bool:
    return not block.needs and not any(recipe in block.text for recipe in RECIPES)


def program(page: str, languages: tuple[str, ...]) -> str:
    """The blocks of a page that run here, with empty lines between them."""
    lines = [""] * len(text(page).splitlines())
    for block in blocks(page):
        if block.language in languages and not block.source and is_run(block):
            code = block.text.splitlines()
            if block.language == "console":  # the output follows, up to the closing fence
                assert code[0].startswith("$ ") and len(code) > 1, "a console block is a command"
                code[0] = f"diff - <({{ {code[0][2:]}; }} 2>&1) <<'END'"
                code.append("END")
            lines[block.line - 1 : block.line - 1 + len(code)] = code
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that a reader has: texts, binarised data, checkpoints of a run, their
    average; binarised running text with a language model and a RoBERTa; and pairs of sentences with
    labels."""
    folder = tmp_path_factory.mktemp("world")
    write_text(folder)
    for split in SPLITS:
        for language in ("de", "en"):
            (folder / f"{split}.{language}").rename(folder / f"{split}.bpe.{language}")
    shutil.copy(folder / "test.bpe.de", folder / "reference.de")
    (folder / "codes").write_text("#version: 0.2\ne n\n")
    texts = [word for split in SPLITS for word in (f"--{split}pref", folder / f"{split}.bpe")]
    data = folder / "data-bin"
    succeed("preprocess", "-s", "en", "-t", "de", "--joined-dictionary", *texts, "--destdir", data)
    model = "--arch ls_transformer --share-all-embeddings"
    words = [*model.split(), "--save-dir", folder / "checkpoints", *SMALL.split()]
    succeed("train", data, *words, "--max-update", "10")
    for name in ("averaged.pt", "checkpoint_best.pt"):
        shutil.copy(folder / "checkpoints/checkpoint_last.pt", folder / name)
    texts = [word for split in SPLITS for word in (f"--{split}pref", folder / f"{split}.bpe.en")]
    succeed("preprocess", "--only-source", *texts, "--destdir", folder / "text-bin")
    model = "--task language_modeling --arch ls_transformer_lm --decoder-layers 1"
    sizes = "--decoder-embed-dim 16 --decoder-ffn-embed-dim 16 --decoder-attention-heads 2"
    words = f"{model} {sizes} --sample-break-mode eos --max-update 10 --num-workers 0 --cpu"
    succeed("train", folder / "text-bin", *words.split(), "--save-dir", folder / "text")
    (folder / "text/checkpoint_last.pt").rename(folder / "lm.pt")
    shutil.rmtree(folder / "text")
    words = f"--task masked_lm --arch ls_roberta_base {SMALL_ROBERTA} --max-update 10"
    succeed("train", folder / "text-bin", *words.split(), "--save-dir", folder / "roberta")
    (folder / "roberta/checkpoint_last.pt").unlink()  # a page trains one here
    (folder / "rte").mkdir()
    for split, text_of in (("train", "train"), ("dev", "valid")):
        sentences = (folder / f"{text_of}.bpe.en").read_text()
        labels = "".join(f"{i % 2}\n" for i, _ in enumerate(sentences.splitlines()))
        for part, lines in (("input0", sentences), ("input1", sentences), ("label", labels)):
            (folder / "rte" / f"{split}.{part}").write_text(lines)
    return folder


def run(command: list[str], world: Path, folder: Path, code: str, **variables: str) -> None:
    shutil.copytree(world, folder / "world")
    # A page may begin with the texts, and write these folders itself.
    for data, made in (("data-bin", ("data-bin", "checkpoints")), ("text-bin", ("text-bin",))):
        if f"--destdir {data}" in code:
            for name in made:
                shutil.rmtree(folder / "world" / name)
    (folder / "program").write_text(code)
    path = forked_commands.path()
    if "doctor" in code:  # which reports on the environment's own commands
        path = path.partition(os.pathsep)[2]
    done = subprocess.run(
        [*command, str(folder / "program")], cwd=folder / "world",
        # pages write to this folder
        env={**os.environ, "PATH": path, "HOME": str(folder), **variables},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]


def run_commands(code: str, world: Path, folder: Path) -> None:
    (folder / "shell").write_text(SHELL)
    updates = "10" if "--num-epoch-checkpoints" in code else "2"
    variables = {"BASH_ENV": str(folder / "shell"), "UPDATES": updates}
    run(["bash", "-euo", "pipefail"], world, folder, code, **variables)


@pytest.mark.parametrize("page", sorted({block.page for block in COMMANDS if is_run(block)}))
def test_commands(page: str, world: Path, tmp_path: Path) -> None:
    run_commands(program(page, ("bash", "console")), world, tmp_path)


def test_the_diff_of_the_readme(world: Path, tmp_path: Path) -> None:
    """Our command trains; fairseq's differs by three prefixes, the name and --bf16."""
    (diff,) = (block for block in blocks("README.md") if block.language == "diff")
    old, new = (
        "\n".join(line[1:] for line in diff.text.splitlines() if line[0] in f"{sign} ")
        for sign in "-+"
    )
    assert new.count("ls_") == 3
    bare = new.replace("lightseq-train", "fairseq-train").replace("ls_", "").replace(" --bf16", "")
    assert bare == old
    run_commands(f"{new} --save-dir new\n", world, tmp_path)
    assert (tmp_path / "world/new/checkpoint_last.pt").exists()


# Runs a file as ``python -W error -W ignore::UserWarning:__main__`` does: the words of the pages
# are not in the dictionary of the small corpus, which is a warning.
RUN_FILE = """
import runpy, sys, warnings
warnings.simplefilter("error")
warnings.filterwarnings("ignore", "", UserWarning, "__main__")
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@pytest.mark.parametrize("page", sorted({block.page for block in PYTHON if is_run(block)}))
def test_python(page: str, world: Path, tmp_path: Path) -> None:
    python = [str(forked_commands.python()), "-c", RUN_FILE]
    if page == "README.md":  # and so what it imports gives no warning
        python = [sys.executable, "-W", "error", "-W", "ignore::UserWarning:__main__"]
    run(python, world, tmp_path, program(page, ("python",)))


@pytest.mark.parametrize("block", EXCERPTS, ids=lambda block: f"{block.page}:{block.line}")
def test_an_excerpt_is_what_its_file_holds(block: Block) -> None:
    """In an excerpt, lines `# ...` or `// ...` stand for omitted lines."""
    rest = (ROOT / block.source).read_text(encoding="utf-8")
    for part in re.split(r"^(?:#|//) \.\.\.\n", block.text, flags=re.M):
        assert part in rest, part
        rest = rest.partition(part)[2]


def test_every_block_says_what_it_is() -> None:
    """Every block names its language, so that none is skipped or not found."""
    for page in pages():
        fences = re.findall(r"^[> ]*```", text(page), re.M)
        assert len(fences) == 2 * len(blocks(page)), page
    for block in ALL:
        what = f"{block.page}:{block.line}"
        known = {"bash", "console", "diff", "python", "text"} | ({"cpp"} if block.source else set())
        assert block.language in known, f"{what}: {block.language or 'no language'}"
        words = re.split("[,;] ", block.needs) if block.needs else []
        assert set(words) <= set(LACKING), f"{what}: {block.needs}"


def test_blocks_are_found() -> None:
    """The number of blocks is at least that at the time of writing."""
    counted = [len([b for b in kind if is_run(b)]) for kind in (COMMANDS, PYTHON, EXCERPTS)]
    assert all(count >= least for count, least in zip(counted, (11, 2, 6))), counted


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("\n\nfalse\n", "line 3 of the page failed"),
        ("\nlightseq-train nowhere\n", "line 2 of the page failed"),
        ("false | true\n", "line 1 of the page failed"),
        ("diff - <({ echo one; } 2>&1) <<'END'\ntwo\nEND\n", "> one"),
    ],
)
def test_a_command_that_fails_is_found(tmp_path: Path, code: str, line: str) -> None:
    (tmp_path / "nothing").mkdir()
    with pytest.raises(AssertionError, match=line):
        run_commands(code, tmp_path / "nothing", tmp_path)
