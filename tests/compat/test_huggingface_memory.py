"""What import and export of a folder of `transformers` take."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from helpers import hugging_face
from helpers.hugging_face import KINDS

# The first model brings the memory of the libraries; the second one is measured.
CODE = """
import filecmp, re, sys
from pathlib import Path
from lightseq_fairseq.cli import export, import_

def peak(folder):
    imported, home = f"{folder}.imported", f"{folder}.home"
    flags = ["--to", "huggingface", "--data", imported, "--tokenizer", folder, "--output", home]
    for command, words in (
        (import_.main, [folder, imported]), (export.main, [f"{imported}/model.pt", *flags])
    ):
        try:
            command(words)
        except SystemExit as error:
            assert not error.code, error.code
    assert filecmp.cmp(f"{folder}/model.safetensors", f"{home}/model.safetensors", shallow=False)
    # Not ru_maxrss, which begins with that of the process that started this one.
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

first, second = sys.argv[1:]
before = peak(first)
print((peak(second) - before) / Path(second, "model.safetensors").stat().st_size)
"""


def test_import_and_export_take_at_most_twice_the_file(tmp_path: Path) -> None:
    """In one process, beside the libraries; the bytes that come home are the same."""
    kind, sides = KINDS["nllb"], ("encoder", "decoder")
    # 127 words a megabyte; nllb-200-distilled-600M has 104.
    sizes = {"d_model": 512, "vocab_size": 10_000}
    sizes |= {
        f"{side}_{name}": n for side in sides for name, n in (("layers", 2), ("ffn_dim", 2048))
    }
    hugging_face.make(kind, tmp_path / "small")
    hugging_face.make(kind._replace(config={**kind.config, **sizes}), tmp_path / "large")
    folders = [str(tmp_path / name) for name in ("small", "large")]
    done = subprocess.run([sys.executable, "-c", CODE, *folders], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ratio = float(done.stdout.splitlines()[-1])
    assert 0.5 < ratio < 2.0
