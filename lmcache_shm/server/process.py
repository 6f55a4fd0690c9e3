"""The server process: own an instance, make or adopt its arena, serve, and leave nothing behind but a kept arena."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

from lmcache_shm.arena.memory import FIRST, SHM_DIR, Progress, remedy, size
from lmcache_shm.arena.segment import (
    AdoptError,
    Arena,
    Geometry,
    OwnerLock,
    adopt,
    create,
    prefault,
    reserve_rest,
    segment_names,
    shm_path,
)
from lmcache_shm.config import Config
from lmcache_shm.server.catalog.catalog import Catalog
from lmcache_shm.server.catalog.groups import CatalogError
from lmcache_shm.server.handlers import Service
from lmcache_shm.server.loop import Server, check_path

log = logging.getLogger("lmcache_shm")

ProgressBar = Callable[[int], AbstractContextManager[Progress | None]]
"""Shows progress while so many bytes are reserved."""


def run(
    config: Config,
    path: Path,
    ready: Callable[[Service, dict[str, int] | None], None],
    progress_bar: ProgressBar,
) -> None:
    """Own the instance and serve at the socket `path` until told to stop.

    `ready(service, adopted)` is called when engines can connect; `adopted`: what an earlier server left (see
    Catalog.recover), None for a new arena. Raises ArenaError or OSError with a line for people.
    """
    check_path(path)
    lock = OwnerLock(path.parent, config.instance)
    lock.acquire()
    try:
        arena, adopted = open_arena(config, progress_bar)
        stop = threading.Event()
        threads: list[threading.Thread] = []
        try:
            try:
                catalog = Catalog(arena)
                recovered = catalog.recover() if adopted else None
            except CatalogError as error:
                log.warning("existing arena not adopted (%s); starting empty", error)
                arena.unlink()
                arena.close()
                arena, _ = open_arena(replace(config, fresh=True), progress_bar)
                catalog, recovered = Catalog(arena), None
            service = Service(arena, catalog, config)
            arena.set_owner(service.boot)
            if config.reserve == "wait":
                with progress_bar(arena.data_bytes) as progress:
                    _note_end(service, reserve_rest(arena, stop, progress))
            serving = Server(service, path)
            serving.catch_signals()
            with metrics(config, serving):
                ready(service, recovered)
                threads = [reserving(service, stop)]
                threads += prefault(arena, config.prefault_threads, stop)
                serving.run()
        finally:
            stop.set()
            for thread in threads:
                thread.join()
            end_arena(config, arena)
    finally:
        lock.release()


def open_arena(config: Config, progress_bar: ProgressBar) -> tuple[Arena, bool]:
    """The instance's arena, and whether it was adopted from an earlier server."""
    geometry = Geometry.plan(
        int(config.l1_size_gb * 2**30), config.chunk_size, config.separate_object_groups
    )
    if not config.fresh:
        try:
            return adopt(config.instance, geometry), True
        except AdoptError as error:
            if shm_path(segment_names(config.instance)[0]).exists():
                log.warning("existing arena not adopted (%s); starting empty", error)
    with progress_bar(geometry.data_bytes) as progress:
        arena = create(
            config.instance,
            geometry.data_bytes,
            chunk_size=config.chunk_size,
            separate=config.separate_object_groups,
            progress=progress,
            first=None if config.reserve == "wait" else FIRST,
        )
    return arena, False


def reserving(service: Service, stop: threading.Event) -> threading.Thread:
    """A thread that reserves the rest of the arena's memory until `stop`."""
    arena = service.arena

    def work() -> None:
        if arena.growing:
            _note_end(service, reserve_rest(arena, stop))

    thread = threading.Thread(target=work, name="lmcache-shm-reserve", daemon=True)
    thread.start()
    return thread


def _note_end(service: Service, error: OSError | None) -> None:
    """Log the end of reserving: all of it, or the error that ended it."""
    arena = service.arena
    if error is not None:
        service.stats.events.add(
            f"only {size(arena.backed_bytes)} of the arena's {size(arena.data_bytes)} could be reserved "
            f"({SHM_DIR}: {error.strerror}); serving with these; {remedy(error.errno or 0)}, "
            "or choose a smaller --l1-size-gb, and restart the server",
            logging.WARNING,
        )
    elif arena.backed_bytes == arena.data_bytes:
        service.note(f"all {size(arena.data_bytes)} of the arena are reserved")


@contextmanager
def metrics(config: Config, serving: Server) -> Iterator[None]:
    """Prometheus metrics as long as the server runs, if a port was given. Raises OSError when it is taken."""
    if not config.metrics_port:
        yield
        return
    from lmcache_shm.server.metrics import MetricsServer  # noqa: PLC0415  (a tenth of a second)

    try:
        served = MetricsServer(serving, config.metrics_port, config.metrics_host)
    except OSError:
        serving.stop(0.0)
        serving.run()  # removes its socket
        raise
    log.info("metrics at http://%s:%d/metrics", config.metrics_host, config.metrics_port)
    try:
        yield
    finally:
        served.close()


def end_arena(config: Config, arena: Arena) -> None:
    """Keep or remove the segments, and log which."""
    path = shm_path(arena.data_name)
    if config.keep_arena:
        log.info(
            "ended; the arena stays at %s for a warm start (lmcache-shm purge removes it)", path
        )
    elif arena.unlink():
        log.info("ended; the arena at %s is removed", path)
    else:
        log.warning("ended; the arena at %s is not ours any more and stays", path)
    arena.close()
