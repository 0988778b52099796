"""Everything that fairseq needs on a current Python, torch and numpy, in one place.

``prepare()`` imports fairseq and repairs what the installed version gets wrong: 0.12.2 (the
default), 0.12.3, the development head and fairseq-fixed 0.12.3.1. A repair looks for its symptom,
not for a version number, and leaves a fairseq alone that does not show it.

    importing     while fairseq is imported: dataclasses, scikit-learn, logging, hydra's plugins
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

from lightseq_fairseq import startup
from lightseq_fairseq.errors import UserError

logger = logging.getLogger(__name__)

INSTALL_COMMAND = (
    "pip install torch && pip install --no-deps fairseq==0.12.2 && "
    'pip install "omegaconf>=2.1" "hydra-core>=1.1" numpy cffi regex sacrebleu tqdm bitarray'
)
TESTED_VERSIONS = ("0.12.2", "0.12.3")

_prepared = False


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
    _require("torch")
    _require("fairseq")

    from lightseq_fairseq.fairseq_compat import importing

    version = importing.import_fairseq(INSTALL_COMMAND)
    if not version.startswith(TESTED_VERSIONS):
        logger.warning(
            "fairseq %s is not one of the versions this package is tested with (%s): its known "
            "faults are looked for and repaired, and fairseq==0.12.2 is the one to install if "
            "something fails.",
            version,
            ", ".join(TESTED_VERSIONS),
        )
    try:
        from lightseq_fairseq.fairseq_compat import (
            batches,
            checkpoints,
            command_line,
            deprecations,
            generation,
            layers,
            ranks,
        )

        command_line.repair()
        deprecations.repair()
        batches.repair()
        layers.repair()
        checkpoints.repair()
        generation.repair()
        ranks.repair()
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"fairseq {version} differs too much from the versions this package supports "
            f"({error}); install it with: {INSTALL_COMMAND}"
        ) from error
    _prepared = True


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
