"""Log lines of the server and the commands: as text, or one JSON object a line.

Everything logs to the logger ``lmcache_shm``; fields of a line go in as ``extra={"fields": {…}}`` and
are shown as ``name=value`` or as members of the object. Inside an engine `setup` is not called: there the
lines go where vLLM sends them.
"""

import json
import logging
import queue
import sys
import threading
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


class ThreadedHandler(logging.Handler):
    """Writes lines in a thread of its own, so that no caller waits for a reader that has stopped.

    Beyond `most` waiting lines the newest are dropped (and counted in a line of their own).
    """

    def __init__(self, target: logging.Handler, most: int = 1000) -> None:
        super().__init__()
        self._target = target
        self._most = most
        self._lines: queue.SimpleQueue[logging.LogRecord | None] = queue.SimpleQueue()
        self._dropped = 0
        self._thread = threading.Thread(target=self._write, name="lmcache-shm-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        if self._lines.qsize() >= self._most:
            self._dropped += 1
            return
        if self._dropped:
            text = f"{self._dropped} lines were dropped: nobody took them"
            self._dropped = 0
            self._lines.put(logging.LogRecord(NAME, logging.WARNING, "", 0, text, None, None))
        self._lines.put(record)

    def close(self) -> None:
        """Write what is waiting, as far as someone takes it within a second."""
        self._lines.put(None)
        self._thread.join(1.0)
        super().close()

    def _write(self) -> None:
        while (record := self._lines.get()) is not None:
            self._target.handle(record)


def setup(
    log_format: str = "human",
    level: str = "info",
    stream: TextIO | None = None,
    *,
    threaded: bool = False,
) -> None:
    """Send the project's lines to `stream` (stderr), in the given format, once however often called.

    `threaded`: write in a thread, so that a full pipe cannot stop the process (see ThreadedHandler).
    """
    logger = logging.getLogger(NAME)
    handler: logging.Handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(Json() if log_format == "json" else Human())
    if threaded:
        handler = ThreadedHandler(handler)
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
