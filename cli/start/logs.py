"""What fairseq logs and nobody reads, unless asked for with --log-config."""

from __future__ import annotations

import logging
import os

LOG_CONFIG = "LIGHTSEQ_LOG_CONFIG"  # an environment variable, which spawned ranks see
_LOGGERS = (
    *(f"fairseq_cli.{name}" for name in ("train", "generate", "interactive", "validate")),
    *("fairseq_cli.preprocess", "fairseq.dataclass.utils"),
)


def _is_no_configuration(record: logging.LogRecord) -> bool:
    """A whole configuration has fifteen thousand characters; before an error comes one more."""
    is_one = type(record.msg).__name__ in ("DictConfig", "CachedConfig", "Namespace")
    return not is_one and not str(record.msg).startswith("Error when composing. Overrides:")


def leave_out_configurations() -> None:
    """From now on fairseq's log is without them, if they are not asked for."""
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        if LOG_CONFIG in os.environ:
            logger.removeFilter(_is_no_configuration)
        else:
            logger.addFilter(_is_no_configuration)
