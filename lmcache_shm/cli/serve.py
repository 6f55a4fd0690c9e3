"""The server process: own an arena, serve its catalog, leave nothing behind but what was asked for."""

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from lmcache_shm import __version__, log
from lmcache_shm.arena.memory import FIRST, SHM_DIR, remedy
from lmcache_shm.arena.segment import (
    AdoptError,
    Arena,
    ArenaError,
    Geometry,
    OwnerLock,
    adopt,
    create,
    prefault,
    reserve_rest,
    segment_names,
    shm_path,
)
from lmcache_shm.cli.app import CommandError
from lmcache_shm.cli.formatting import reserved_size, size
from lmcache_shm.client.reconnect import socket_path
from lmcache_shm.config import OPTIONS, Config
from lmcache_shm.server.catalog.catalog import Catalog, CatalogError
from lmcache_shm.server.handlers import Service
from lmcache_shm.server.listener import check_path
from lmcache_shm.server.loop import Server

logger = logging.getLogger("lmcache_shm")


def main(config: Config) -> None:
    """Run a server. Raises CommandError with one line for people."""
    log.setup(config.log_format, config.log_level, threaded=True)
    signal.signal(signal.SIGTERM, _give_up)  # until the server is there to end in order
    try:
        run(config)
    except (ArenaError, OSError) as error:
        raise CommandError(str(error)) from None


def _give_up(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def engine_line(config: Config) -> str:
    """What to type to start an engine that uses this server."""
    connector: dict[str, Any] = {
        "kv_connector": "LMCacheShmConnector",
        "kv_connector_module_path": "lmcache_shm.vllm",
        "kv_role": "kv_both",
    }
    extra = {
        f"lmcache_shm.{name}": getattr(config, name)
        for name in ("instance", "runtime_dir")
        if getattr(config, name) != OPTIONS[name].default
    }
    if extra:
        connector["kv_connector_extra_config"] = extra
    return f"vllm serve MODEL --kv-transfer-config '{json.dumps(connector, separators=(',', ':'))}'"


def run(config: Config) -> None:
    """Own the instance, serve until told to stop, and leave nothing behind but what was asked for.

    Raises ArenaError or OSError with a line for people.
    """
    path = socket_path(config)
    check_path(path)
    lock = OwnerLock(path.parent, config.instance)
    lock.acquire()
    try:
        arena, adopted = open_arena(config)
        stop = threading.Event()
        threads: list[threading.Thread] = []
        try:
            try:
                catalog = Catalog(arena)
                recovered = catalog.recover() if adopted else None
            except CatalogError as error:
                logger.warning("the arena that is there is not adopted: %s; starting empty", error)
                arena.unlink()
                arena.close()
                arena, _ = open_arena(replace(config, fresh=True))
                catalog, recovered = Catalog(arena), None
            service = Service(arena, catalog, config)
            arena.set_owner(service.boot)
            if config.reserve == "wait":
                reserve_all(service)
            serving = Server(service, path)
            serving.catch_signals()
            with metrics(config, serving):
                announce(config, service, path, recovered)
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


def open_arena(config: Config) -> tuple[Arena, bool]:
    """The instance's arena, and whether it was adopted from an earlier server."""
    geometry = Geometry.plan(
        int(config.l1_size_gb * 2**30), config.chunk_size, config.separate_object_groups
    )
    if not config.fresh:
        try:
            return adopt(config.instance, geometry), True
        except AdoptError as error:
            if shm_path(segment_names(config.instance)[0]).exists():
                logger.warning("the arena that is there is not adopted: %s; starting empty", error)
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


def reserve_all(service: Service) -> None:
    """Reserve now what an earlier server left unreserved; progress on stderr."""
    arena = service.arena
    with progress_bar(arena.data_bytes) as progress:
        _tell_end(service, reserve_rest(arena, threading.Event(), progress))


def reserving(service: Service, stop: threading.Event) -> threading.Thread:
    """A thread that reserves the rest of the arena's memory until `stop`."""
    arena = service.arena

    def work() -> None:
        if arena.growing:
            _tell_end(service, reserve_rest(arena, stop))

    thread = threading.Thread(target=work, name="lmcache-shm-reserve", daemon=True)
    thread.start()
    return thread


def _tell_end(service: Service, error: OSError | None) -> None:
    arena = service.arena
    if error is not None:
        service.journal.tell(
            f"only {size(arena.backed_bytes)} of the arena's {size(arena.data_bytes)} could be reserved "
            f"({SHM_DIR}: {error.strerror}); serving with these; {remedy(error.errno or 0)}, "
            "or choose a smaller --l1-size-gb, and restart the server",
            logging.WARNING,
        )
    elif arena.backed_bytes == arena.data_bytes:
        service.note(f"all {size(arena.data_bytes)} of the arena are reserved")


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on stderr while memory is reserved, if people are watching."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console  # noqa: PLC0415  (a tenth of a second)
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn  # noqa: PLC0415

    columns = (
        "reserving memory",
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda done, end: bar.update(task, completed=done, total=end)


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
        serving.run()  # takes its socket away
        raise
    logger.info("metrics at http://%s:%d/metrics", config.metrics_host, config.metrics_port)
    try:
        yield
    finally:
        served.close()


def announce(config: Config, service: Service, path: Path, adopted: dict[str, int] | None) -> None:
    """Say that it is ready, what was found, and what to type next: the first thing on stdout."""
    arena = service.arena
    if config.log_format == "json":
        fields = {
            "instance": config.instance,
            "pid": os.getpid(),
            "arena": arena.data_name,
            "arena_bytes": arena.data_bytes,
            "backed_bytes": arena.backed_bytes,
            "socket": str(path),
            "boot": service.boot.hex(),
            "adopted": adopted,
            "engine": engine_line(config),
        }
        print(json.dumps({"message": "ready", **fields}), flush=True)
        return
    chunks = f"{config.chunk_size} tokens" if config.chunk_size else "as each model needs (auto)"
    end = "kept" if config.keep_arena else "removed"
    backing = reserved_size(arena.backed_bytes, arena.data_bytes, growing=arena.growing)
    lines = [
        f"lmcache-shm {__version__}: instance {config.instance} is ready (pid {os.getpid()})",
        f"  arena   {shm_path(arena.data_name)}, {size(arena.data_bytes)}, {_found(adopted)}; {end} at the end",
        *([f"  memory  {backing}"] if backing else []),
        f"  socket  {path}",
        f"  chunks  {chunks}",
        "Start an engine with",
        f"  {engine_line(config)}",
    ]
    print("\n".join(lines), flush=True)


def _found(adopted: dict[str, int] | None) -> str:
    if adopted is None:
        return "new and empty"
    words = ", ".join(f"{n} {name.replace('_', ' ')}" for name, n in adopted.items())
    return f"adopted ({words})"


def end_arena(config: Config, arena: Arena) -> None:
    """Keep or remove the segments, and say which."""
    path = shm_path(arena.data_name)
    if config.keep_arena:
        logger.info(
            "ended; the arena stays at %s for a warm start (lmcache-shm purge removes it)", path
        )
    elif arena.unlink():
        logger.info("ended; the arena at %s is removed", path)
    else:
        logger.warning("ended; the arena at %s is not ours any more and stays", path)
    arena.close()
