"""Removes fairseq's whole configuration from the log, unless --log-config asks for it."""

from __future__ import annotations

import logging
import os

LOG_CONFIG = "LIGHTSEQ_LOG_CONFIG"  # environment variable, which spawned ranks see too
_LOGGERS = (
    *(f"fairseq_cli.{name}" for name in ("train", "generate", "interactive", "validate")),
    *("fairseq_cli.eval_lm", "fairseq_cli.preprocess", "fairseq.dataclass.utils"),
)


def _is_no_configuration(record: logging.LogRecord) -> bool:
    """Log filter: False for a configuration (15,000 characters); one precedes some errors, too."""
    is_one = type(record.msg).__name__ in ("DictConfig", "CachedConfig", "Namespace")
    return not is_one and not str(record.msg).startswith("Error when composing. Overrides:")


def leave_out_configurations() -> None:
    """Filters configurations out of fairseq's log, unless LOG_CONFIG is set."""
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        if LOG_CONFIG in os.environ:
            logger.removeFilter(_is_no_configuration)
        else:
            logger.addFilter(_is_no_configuration)
