"""Everything that fairseq needs on a current Python, torch and numpy, in one place.

``prepare()`` imports fairseq and repairs what the installed version gets wrong: 0.12.2 (the
default), 0.12.3, the development head and fairseq-fixed 0.12.3.1. A repair looks for its symptom,
not for a version number, and leaves a fairseq alone that does not show it. ``import_only()``
repairs nothing.

    patching      the list of all names that this package replaces in fairseq, repairs among them
    prepared      importing it calls ``prepare()``
    importing     while fairseq is imported: dataclasses, scikit-learn, logging; hydra's plugins
    command_line  --arch, --bf16 and --lr
    deprecations  calls that hydra and torch warn about
    batches       sentences that are dropped, functions that numpy has dropped, files over 2 GiB
    layers        0.12.2's encoder layer, the search for a NaN, cuDNN attention
    checkpoints   loading without running what a file says
    generation    --replace-unk, --no-repeat-ngram-size
    ranks         what ranks gather
"""

from __future__ import annotations

import importlib.util
import logging
import sys

from lightseq_fairseq import startup
from lightseq_fairseq.errors import UserError
from lightseq_fairseq.fairseq_compat import patching

logger = logging.getLogger(__name__)

INSTALL_COMMAND = (
    "pip install torch && pip install --no-deps fairseq==0.12.2 && "
    'pip install "omegaconf>=2.1" "hydra-core>=1.1" numpy cffi regex sacrebleu tqdm bitarray'
)
TESTED_VERSIONS = ("0.12.2", "0.12.3")

_prepared = False


def import_only() -> None:
    """Imports fairseq, also where it does not import by itself, and leaves it as it comes.

    Where `startup`'s line waits for the first import, that is this one: fairseq is repaired.

    Raises:
        UserError: as for ``prepare``.
    """
    if startup.is_watching():
        prepare()
    elif "fairseq" not in sys.modules:
        _import()


def prepare() -> None:
    """Imports fairseq and repairs it; every later call does nothing.

    Must run before anything imports fairseq where fairseq does not import by itself (0.12.2 and
    0.12.3 on Python 3.11 and later) and `startup`'s line is not installed; an already imported
    fairseq is repaired all the same.

    Raises:
        UserError: fairseq or a package that it needs is missing, or its version is too different
            for the repairs to find their places.
    """
    global _prepared
    if _prepared:
        return
    startup.unwatch()
    version = _import()
    if not version.startswith(TESTED_VERSIONS):
        logger.warning(
            "fairseq %s is not one of the versions this package is tested with (%s): its known "
            "faults are looked for and repaired, and fairseq==0.12.2 is the one to install if "
            "something fails.",
            version,
            ", ".join(TESTED_VERSIONS),
        )
    try:
        patching.apply("repair")
        from lightseq_fairseq.fairseq_compat import layers
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"fairseq {version} differs too much from the versions this package supports "
            f"({error}); install it with: {INSTALL_COMMAND}"
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
            f"{name} is not installed; run scripts/setup.sh, or install it with: {INSTALL_COMMAND}"
        )
    if spec.origin is None:
        # A folder of that name without __init__.py, such as a git clone, imports as empty package.
        folder = next(iter(spec.submodule_search_locations or ()), name)
        raise UserError(
            f"the folder {folder} hides the package {name} or stands where it is not installed; "
            f"run from another directory, or install it with: {INSTALL_COMMAND}"
        )
