"""Log lines of the server and the commands: for people, or one JSON object a line.

Everything logs to the logger ``lmcache_shm``; fields of a line go in as ``extra={"fields": {…}}`` and
are shown as ``name=value`` or as members of the object. Inside an engine nobody calls `setup`: there the
lines go where vLLM sends them.
"""

import json
import logging
import sys
import time
from typing import TextIO

NAME = "lmcache_shm"


class Human(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        fields = getattr(record, "fields", {})
        tail = "".join(f"  {name}={value}" for name, value in fields.items())
        line = f"{clock} {level}{record.getMessage()}{tail}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        item = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            item["exception"] = self.formatException(record.exc_info)
        return json.dumps(item, default=str)


def setup(log_format: str = "human", level: str = "info", stream: TextIO | None = None) -> None:
    """Send the project's lines to `stream` (stderr), in the given format, once however often called."""
    logger = logging.getLogger(NAME)
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(Json() if log_format == "json" else Human())
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
