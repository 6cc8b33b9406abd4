"""The scheduler's own log: a readable form and a JSON form, to the terminal or to a file that rotates."""

from __future__ import annotations

import json
import logging
import logging.handlers
import sys
import traceback
from datetime import UTC, datetime

from crater_core.service.config import LogSettings

FILE_BYTES_MAX = 50 * 1024**2
FILES_KEPT = 5


class TextForm(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S")


class JsonForm(logging.Formatter):
    """One object a line; a traceback is a field of it."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"at": at, "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            line["error"] = "".join(traceback.format_exception(*record.exc_info))
        return json.dumps(line, ensure_ascii=False)


def start_logging(settings: LogSettings) -> None:
    """Send everything to one handler. Raises OSError when the file cannot be written."""
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if settings.file is not None:
        path = settings.file.expanduser()
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.handlers.RotatingFileHandler(path, maxBytes=FILE_BYTES_MAX, backupCount=FILES_KEPT, encoding="utf-8")
    handler.setFormatter(JsonForm() if settings.format == "json" else TextForm())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("crater").setLevel(settings.level.upper())
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
