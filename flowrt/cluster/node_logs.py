"""What a node logs as JSON: one object a line, for those who collect the logs of many."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any

_USUAL = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """Makes of each record an object with ``time`` (UTC), ``level``, ``node``, ``message`` and ``fields``.

    Among ``fields`` are the name of the ``logger``, the ``traceback`` of an error, and what ``extra=`` gave.
    """

    def __init__(self, node: str) -> None:
        super().__init__()
        self.node = node

    def format(self, record: logging.LogRecord) -> str:
        fields = {name: value for name, value in vars(record).items() if name not in _USUAL}
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return self._line(record.created, record.levelname, record.getMessage(), {"logger": record.name, **fields})

    def say(self, message: str, **fields: Any) -> str:
        """The line of what is said beside the log."""
        return self._line(datetime.now(UTC).timestamp(), "info", message, fields)

    def _line(self, seconds: float, level: str, message: str, fields: dict[str, Any]) -> str:
        time = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
        told = {"time": time, "level": level.lower(), "node": self.node, "message": message, "fields": fields}
        return json.dumps(told, default=str, ensure_ascii=False)
