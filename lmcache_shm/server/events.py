"""What happened lately: for status and top, and for the log."""

import logging
import time
from collections import deque

log = logging.getLogger("lmcache_shm")

MAX_A_SECOND = 20
"""Events a second that are told one by one."""
KEPT = 50


class Journal:
    """A flood of events is only counted: a peer that misbehaves all day must not fill a log."""

    def __init__(self) -> None:
        self.events: deque[tuple[float, str]] = deque(maxlen=KEPT)
        """(Unix time, text) of the latest."""
        self._second = 0
        self._told = 0

    def tell(self, text: str, level: int = logging.INFO) -> None:
        if self.may_tell():
            self.events.append((time.time(), text))
            log.log(level, "%s", text)

    def may_tell(self) -> bool:
        """Whether one more event fits into this second."""
        now = int(time.time())
        if now != self._second:
            if self._told > MAX_A_SECOND:
                log.warning("%d more events in that second", self._told - MAX_A_SECOND)
            self._second, self._told = now, 0
        self._told += 1
        return self._told <= MAX_A_SECOND
