"""The identity of the weights in an engine's memory: a text that is part of its namespace.

Equal identities mean equal bytes in memory. The identity starts as the fingerprint of what was loaded
(see `fingerprint`) or as ``lmcache_shm.weight_version``. After a change of the weights, or a reset of the
cache, it is a random token that no other engine and no later start can have. An engine that was started
with a ``weight_version`` can be given the version of its new weights, and shares again.
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
    """A token that no other engine has."""
    return PRIVATE + secrets.token_hex(16)


class Weights:
    """Thread-safe; `find` once, `close` once. Times are time.monotonic()."""

    def __init__(self, engine: str, version: str, on_disk: Callable[[], str]) -> None:
        """`engine`: what finds them again (`weights_of`). `version`: ``weight_version`` or "". Without one, `on_disk` returns the fingerprint of what was loaded, or
        raises Unidentified or OSError; it is called once, in a thread."""
        self.engine = engine
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
        """Start to take the fingerprint."""
        if self._loaded is not None:
            self._known.set()
            return
        threading.Thread(target=self._find, name="lmcache-shm-weights", daemon=True).start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether `identity` is known, after at most that time."""
        return self._known.wait(timeout_s)

    def close(self) -> None:
        """Release every waiting thread; an unknown identity becomes a random token."""
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
        """The cache was reset: the weights count as changed now."""
        with self._lock:
            self._before_reset = self._current
            self._current = private(), time.monotonic()

    def changed(self, at: float) -> bool:
        """The weights were changed, for the last time at `at`. Returns False if `since` is later: nothing to do."""
        with self._lock:
            if at <= self._current[1]:
                return False
            self._before_reset = None
            self._current = private(), at
            return True

    def name(self, version: str) -> None:
        """The weights in memory have this version from now on: engines with equal ``weight_version`` and equal
        version share. Does nothing without a ``weight_version``."""
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
        """EngineCore.sleep was called: the next reset may be its own."""
        with self._lock:
            self._before_reset = None

    def sleeps(self, level: int) -> None:
        """EngineCore.sleep has ended. Level 1 keeps the weights, so the reset that belongs to it is taken back."""
        with self._lock:
            if level == 1 and self._before_reset is not None:
                self._current = self._before_reset
            self._before_reset = None


_all: "WeakSet[Weights]" = WeakSet()


def weights_of(engine: str) -> list[Weights]:
    """The `Weights` of an engine in this process: one per connector of ours."""
    return [weights for weights in list(_all) if weights.engine == engine]
