"""The log of the server and of its processes, on stderr."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

LOGGER = logging.getLogger("lightseq-serve")
_FIELDS = "fields"  # of a record: what JSON has besides its text


def set_up(as_json: bool) -> None:
    """Call this first in each process; as_json: an object for each line, for programs."""
    logging.basicConfig(format="%(name)s: %(message)s", force=True)
    if as_json:
        logging.root.handlers[0].setFormatter(_Json())
    LOGGER.setLevel(logging.INFO)
    if not as_json:  # a person reads /metrics
        LOGGER.addFilter(lambda record: not hasattr(record, _FIELDS))


def request(**fields: Any) -> None:
    """A request has been answered."""
    LOGGER.info("request", extra={_FIELDS: fields})


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        found = {
            "time": f"{when}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, _FIELDS, {}),
        }
        if record.exc_info:
            found["traceback"] = self.formatException(record.exc_info)
        return json.dumps(found, ensure_ascii=False)
