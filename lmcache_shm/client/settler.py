"""Tell the server what has ended, also when the engine does not step any more.

An active engine settles in its own steps. When it falls idle, a thread notices the last completions on
the board, commits them, and gives leases back, so that a chunk can be found as soon as it is stored.
"""

import threading
import time
from collections.abc import Callable

from lmcache_shm.client.client import CacheClient
from lmcache_shm.client.in_flight import StoreBook
from lmcache_shm.client.registration import Epoch

POLL_S = 0.005
IDLE_S = 0.02
"""After this time without a step the thread takes over."""


class Settler:
    """`exchange` is held over "look at the board, then tell": rows must not change their meaning in between."""

    def __init__(
        self, client: CacheClient, book: StoreBook, latest: Callable[[], Epoch | None]
    ) -> None:
        self.exchange = threading.RLock()
        self._client = client
        self._book = book
        self._latest = latest
        self._stepped = 0.0
        self._closed = False
        self._wanted = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lmcache-shm-settle", daemon=True)
        self._thread.start()

    def settle(self) -> None:
        """Commit, abort and release what has ended. Any thread."""
        with self.exchange:
            message = self._book.settle(self._latest())
            if message:
                self._client.step(None, message.commit, message.abort, message.release)

    def stepped(self) -> None:
        """The scheduler settles itself for now."""
        self._stepped = time.monotonic()

    def wake(self) -> None:
        """There may be something to settle."""
        if not self._wanted.is_set() and self._book.untold:
            self._wanted.set()

    def close(self) -> None:
        self._closed = True
        self._wanted.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            while not self._closed and self._book.untold:
                if time.monotonic() - self._stepped > IDLE_S:
                    self.settle()
                time.sleep(POLL_S)
            self._wanted.clear()
            if self._closed:
                return
            if self._book.untold:  # it came between the last look and clear()
                self._wanted.set()
