"""Repairs that let fairseq run on current versions of Python, torch and numpy.

``prepare()`` imports fairseq and repairs the known bugs of the installed version: 0.12.2 (the
default), 0.12.3, the development head or fairseq-fixed 0.12.3.1. No repair depends on a version
number. Some test for their symptom, and are skipped if it is absent. ``import_only()`` imports
fairseq without repairs.

    patching      replaces names of fairseq, as the list `lightseq_fairseq.patches` says
    importing     during fairseq's import: dataclasses, scikit-learn, logging; hydra's plugins
    command_line  --arch, --bf16 and --lr
    deprecations  calls that hydra and torch warn about
    batches       dropped sentences, functions that numpy has removed, files over 2 GiB
    epochs        masks and shuffling of each epoch, also in workers and in resumed runs
    layers        0.12.2's encoder layer, the NaN detector, cuDNN attention
    checkpoints   safe loading (weights_only), dead parameters, settings of newer versions
    generation    --replace-unk, --no-repeat-ngram-size
    lines         carriage returns within lines of text
    scoring       unknown words, and languages without spaces, in sacrebleu's scores
    ranks         empty batches; gathering and DistributedDataParallel without GPUs
    workers       ends data loading processes on the way out
    overlay       a module with some names replaced, for one other module
    wrapped_dataset  base of datasets that wrap another one
"""

from __future__ import annotations

import importlib.util
import logging
import sys

from lightseq_fairseq.base import import_hook
from lightseq_fairseq.base.errors import UserError
from lightseq_fairseq.fairseq_compat import patching

logger = logging.getLogger(__name__)

INSTALL_COMMAND = (
    "pip install torch && pip install --no-deps fairseq==0.12.2 && "
    'pip install "omegaconf>=2.1" "hydra-core>=1.1" numpy cffi regex sacrebleu tqdm bitarray'
)
TESTED_VERSIONS = ("0.12.2", "0.12.3")

_prepared = False


def import_only() -> None:
    """Imports fairseq without repairs, even a version that cannot be imported by itself.

    Exception: if `startup`'s import hook is active, this is the first import of fairseq, and the
    hook repairs it.

    Raises:
        UserError: as for ``prepare``.
    """
    if import_hook.is_watching():
        prepare()
    elif "fairseq" not in sys.modules:
        _import()


def prepare() -> None:
    """Imports fairseq and repairs it; every later call does nothing.

    fairseq 0.12.2 and 0.12.3 cannot be imported by themselves on Python 3.11 and later. There this
    must run before anything else imports fairseq, unless `startup`'s import hook is installed. A
    fairseq that is already imported is repaired as well.

    Raises:
        UserError: fairseq or a package that it needs is missing, or the version differs so much
            that the names to replace do not exist.
    """
    global _prepared
    if _prepared:
        return
    import_hook.unwatch()
    version = _import()
    if not version.startswith(TESTED_VERSIONS):
        logger.warning(
            "fairseq %s was not tested with this package; tested versions are %s. Known faults are "
            "repaired. If something fails, install fairseq==0.12.2.",
            version,
            ", ".join(TESTED_VERSIONS),
        )
    try:
        patching.apply("repair")
        from lightseq_fairseq.fairseq_compat import layers
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"fairseq {version} is too different from the versions that this package supports "
            f"({error}): install a supported one with: {INSTALL_COMMAND}"
        ) from error
    layers.disable_cudnn_attention()
    _prepared = True


def _import() -> str:
    _require("torch")
    _require("fairseq")
    from lightseq_fairseq.fairseq_compat import importing

    return importing.import_fairseq(INSTALL_COMMAND)


def _require(name: str) -> None:
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise UserError(
            f"{name} is not installed: run scripts/setup.sh, or install it with: {INSTALL_COMMAND}"
        )
    if spec.origin is None:
        # A folder of that name without __init__.py, such as a git clone, imports as a namespace
        # package.
        folder = next(iter(spec.submodule_search_locations or ()), name)
        raise UserError(
            f"Python finds the folder {folder} instead of the package {name}: run the command from "
            f"another folder, or install the package with: {INSTALL_COMMAND}"
        )
