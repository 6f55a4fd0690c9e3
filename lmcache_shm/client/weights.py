"""Which weights an engine has in its memory, as a text that its namespace is made of.

Equal texts: equal bytes in memory. It begins as what was loaded (see `fingerprint`), or as the name that
the user gave (``lmcache_shm.weight_version``). After the weights were changed, or whoever may have changed them
reset the cache, it is a random token: no other engine, and no later one, can have the same. Somebody
who knows better can name the new weights, if the engine's weights have had a name from the start.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable
from weakref import WeakSet

from lmcache_shm.client.fingerprint import Unidentified

log = logging.getLogger("lmcache_shm")

PRIVATE = "private#"
ALWAYS = float("-inf")


def private() -> str:
    """A token that nobody else has."""
    return PRIVATE + secrets.token_hex(16)


class Weights:
    """Thread-safe; `find` once, `close` once. Times are time.monotonic()."""

    def __init__(self, engine_id: str, version: str, on_disk: Callable[[], str]) -> None:
        """`version`: the name the user gave, or ""; otherwise `on_disk` says what was loaded, or raises
        Unidentified or OSError. It is called once, in a thread of its own."""
        self.engine_id = engine_id
        self._version = version
        self._on_disk = on_disk
        self._loaded: str | None = f"version:{version}" if version else None
        self._current: tuple[str | None, float] = None, ALWAYS  # None: as loaded
        self._before_reset: tuple[str | None, float] | None = None
        self._lock = threading.Lock()
        self._known = threading.Event()
        self._told = False
        _all.add(self)

    @property
    def identity(self) -> str | None:
        """None while it is not known yet."""
        return self._current[0] or self._loaded

    @property
    def since(self) -> float:
        """Nothing that was computed before belongs to `identity`."""
        return self._current[1]

    # ------------------------------------------------------------------------------------ loaded
    def find(self) -> None:
        """Begin to find out what was loaded."""
        if self._loaded is not None:
            self._known.set()
            return
        threading.Thread(target=self._find, name="lmcache-shm-weights", daemon=True).start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether `identity` is known, after at most that time."""
        return self._known.wait(timeout_s)

    def close(self) -> None:
        """Whoever waits shall wait no more."""
        if self._loaded is None:
            self._loaded = private()
        self._known.set()
        _all.discard(self)

    def _find(self) -> None:
        began = time.monotonic()
        try:
            loaded = self._on_disk()
        except (Unidentified, OSError) as error:
            loaded = private()
            log.warning(
                "lmcache_shm: this engine shares its cache with no other, and with no later one: %s; "
                'start it again, or name its weights with "lmcache_shm.weight_version"',
                error,
            )
        except Exception:
            loaded = private()
            log.exception("lmcache_shm: the weights could not be identified; nothing is shared")
        with self._lock:
            if self._loaded is None:
                self._loaded = loaded
        log.info("lmcache_shm: weights %s (%.1f s)", loaded, time.monotonic() - began)
        self._known.set()

    # ----------------------------------------------------------------------------------- changes
    def reset(self) -> None:
        """Whoever resets the cache says that the weights have changed."""
        with self._lock:
            self._before_reset = self._current
            self._current = private(), time.monotonic()

    def changed(self, at: float) -> bool:
        """They were changed until `at`. False: that is known, `since` is later."""
        with self._lock:
            if at <= self._current[1]:
                return False
            self._before_reset = None
            self._current = private(), at
            return True

    def name(self, version: str) -> None:
        """What is in memory from now on has this name: all engines that were started with the same
        ``weight_version`` and are told the same name share."""
        with self._lock:
            if self._version:
                self._before_reset = None
                self._current = f"version:{self._version}/{version}", time.monotonic()
                return
        if not self._told:
            self._told = True
            log.info(
                "lmcache_shm: the weight version %r does not let engines share; for that, start them with "
                'one name for the weights, "lmcache_shm.weight_version"',
                version,
            )

    def sleep_begins(self) -> None:
        """VLLM will reset the cache and put the weights aside."""
        with self._lock:
            self._before_reset = None

    def sleeps(self, level: int) -> None:
        """It has. At level 1 they come back as they were, so the last reset did not mean a change."""
        with self._lock:
            if level == 1 and self._before_reset is not None:
                self._current = self._before_reset
            self._before_reset = None


_all: "WeakSet[Weights]" = WeakSet()


def weights_of(engine_id: str) -> list[Weights]:
    """Of that engine, in this process (more than one if it has several of our connectors)."""
    return [weights for weights in list(_all) if weights.engine_id == engine_id]
