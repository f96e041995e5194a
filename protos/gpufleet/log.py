"""Logging to stderr, one line per change of state; the journal adds the time."""

import logging
import os
import sys


def setup(level: str = "info") -> None:
    """Log to stderr; under systemd without a time stamp, with the journal's priority prefix."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Journal() if os.environ.get("JOURNAL_STREAM") else logging.Formatter(_FORMAT))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("apscheduler").setLevel(logging.WARNING)


_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_PRIORITY = {"DEBUG": 7, "INFO": 6, "WARNING": 4, "ERROR": 3, "CRITICAL": 2}


class _Journal(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"<{_PRIORITY.get(record.levelname, 6)}>{record.name}: {record.getMessage()}" + (
            f" ({record.exc_info[1]!r})" if record.exc_info else ""
        )
