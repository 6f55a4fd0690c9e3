"""Hooks in vLLM, which does not report changed weights or a sleeping engine to a connector.

These methods are wrapped once per process. A method that does not exist is left out.

======================================= ======================= ==========================================
in each worker                          `Worker`                reload_weights, reset_weights, update_weights,
                                                                (start|finish)_weight_update, discard, sleep
after the loading, on the model itself  load_weights            how RL frameworks write new weights
in the scheduler's process              `EngineCore`            sleep, set_weight_version
======================================= ======================= ==========================================

Any other write to parameters (a function sent with `collective_rpc`) is not seen. It must be followed by
``reset_prefix_cache`` with ``reset_external``, as vLLM's own cache needs a reset then, too.
"""

import functools
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from lmcache_shm.client.weights import weights_of

WORKER = "vllm.v1.worker.gpu_worker"
CORE = "vllm.v1.engine.core"


class Changes:
    """Number and time of changes of the weights in this process. Thread-safe."""

    def __init__(self) -> None:
        self.count = 0
        self.at = 0.0
        """time.monotonic() after the last one."""
        self.listeners: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def note(self) -> None:
        """Count one change and call the listeners."""
        with self._lock:
            self.count += 1
            self.at = time.monotonic()
        for listener in list(self.listeners):
            listener()


CHANGES = Changes()


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a method of a class or of one object by `around(original, *args, **options)`. Idempotent."""
    original = getattr(owner, name, None)
    if not callable(original) or hasattr(original, "lmcache_shm"):
        return

    @functools.wraps(original)
    def watched(*args: Any, **options: Any) -> Any:
        return around(original, *args, **options)

    watched.lmcache_shm = True  # type: ignore[attr-defined]
    setattr(owner, name, watched)


# ---------------------------------------------------------------------------------------- workers
def watch_worker(module: str = WORKER) -> None:
    """Count changes of the weights in `CHANGES` from now on."""
    worker = getattr(sys.modules.get(module), "Worker", None)
    if worker is None:
        return
    for name in (
        "reload_weights",
        "reset_weights",
        "start_weight_update",
        "start_draft_weight_update",
        "update_weights",
        "finish_weight_update",
    ):
        wrap(worker, name, _changing)
    wrap(worker, "sleep", _sleeping)
    wrap(worker, "discard", _discarding)
    # The engine asks for it once the model is loaded, and before it serves.
    wrap(worker, "get_kv_connector_handshake_metadata", _loaded)


def watch_model(model: Any) -> None:
    """Count calls of this model's load_weights."""
    if model is not None:
        wrap(model, "load_weights", _changing)


def _changing(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    try:
        return original(*args, **options)
    finally:
        CHANGES.note()  # also when it failed half-way


def _sleeping(original: Callable[..., Any], worker: Any, level: int = 1) -> Any:
    try:
        return original(worker, level)
    finally:
        if level != 1:  # discarded: undefined after the wake-up
            CHANGES.note()


def _discarding(original: Callable[..., Any], worker: Any, tags: Any) -> Any:
    try:
        return original(worker, tags)
    finally:
        if "weights" in tags:
            CHANGES.note()


def _loaded(original: Callable[..., Any], worker: Any) -> Any:
    runner = getattr(worker, "model_runner", None)
    for name in ("get_model", "get_draft_model"):
        found = getattr(runner, name, None)
        if callable(found):
            watch_model(found())
    return original(worker)


# --------------------------------------------------------------------------------- EngineCore
def watch_engine(module: str = CORE) -> None:
    """Pass sleep and set_weight_version of each EngineCore in this process on to its `Weights`."""
    core = getattr(sys.modules.get(module), "EngineCore", None)
    if core is not None:
        wrap(core, "sleep", _engine_sleeping)
        wrap(core, "set_weight_version", _engine_named)


def _engine_sleeping(
    original: Callable[..., Any], core: Any, level: int = 1, *args: Any, **options: Any
) -> Any:
    ours = weights_of(str(core.vllm_config.instance_id))
    for weights in ours:
        weights.sleep_begins()
    future = original(core, level, *args, **options)

    def asleep(ended: Any) -> None:
        if ended is None or ended.exception() is None:
            for weights in ours:
                weights.sleeps(level)

    if future is None:
        asleep(None)
    else:
        future.add_done_callback(asleep)
    return future


def _engine_named(original: Callable[..., Any], core: Any, weight_version: str) -> Any:
    answer = original(core, weight_version)
    for weights in weights_of(str(core.vllm_config.instance_id)):
        weights.name(weight_version)
    return answer
