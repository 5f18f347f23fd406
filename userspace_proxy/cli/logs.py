"""Log lines on stderr, as text for people or JSON for machines."""

from __future__ import annotations

import datetime
import json
import logging
from typing import Literal

DEBUG_FROM_VERBOSITY = 2

LogFormat = Literal["text", "json"]


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "ts": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "msg": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def set_up_logging(verbosity: int, log_format: LogFormat) -> None:
    """Log to stderr: INFO and above, from verbosity 2 on also DEBUG, which has a line per connection."""
    handler = logging.StreamHandler()
    if log_format == "json":
        handler.setFormatter(_JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s.%(msecs)03d %(levelname)-7s %(message)s", "%H:%M:%S"))
    logging.basicConfig(
        level=logging.DEBUG if verbosity >= DEBUG_FROM_VERBOSITY else logging.INFO, handlers=[handler], force=True
    )
    logging.getLogger("asyncio").setLevel(logging.INFO)


def set_up_daemon_logging(verbosity: int, log_format: str) -> None:
    """Log as the daemon's configuration says."""
    set_up_logging(verbosity, "json" if log_format == "json" else "text")
