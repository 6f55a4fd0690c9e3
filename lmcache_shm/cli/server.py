"""``lmcache-shm server``: its flags and its texts. The process itself is server/process.py, imported when it runs."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcache_shm import __version__, log
from lmcache_shm.cli.app import CommandError
from lmcache_shm.cli.command import flags
from lmcache_shm.config import OPTIONS, SERVER, Config, server_config

if TYPE_CHECKING:
    from lmcache_shm.server.handlers import Service


@flags(option.name for option in SERVER)
def server(**given: Any) -> None:
    """Run a cache server until SIGTERM or Ctrl-C: create or adopt an arena, then serve engines.

    In brackets: the default, and the environment variable that sets it.
    """
    main(server_config(given))


def main(config: Config) -> None:
    """Run a server. Raises CommandError with one line for the user."""
    # numpy and more, which --help does not need
    from lmcache_shm.arena.errors import ArenaError  # noqa: PLC0415
    from lmcache_shm.client.reconnect import socket_path  # noqa: PLC0415
    from lmcache_shm.server.process import run  # noqa: PLC0415

    log.setup(config.log_format, config.log_level, threaded=True)
    signal.signal(signal.SIGTERM, _give_up)  # until the server has a handler that ends it in order
    path = socket_path(config)

    def ready(service: "Service", adopted: dict[str, int] | None) -> None:
        announce(config, service, path, adopted)

    try:
        run(config, path, ready, progress_bar)
    except (ArenaError, OSError) as error:
        raise CommandError(str(error)) from None


def _give_up(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def engine_line(config: Config) -> str:
    """The command that starts an engine with this server."""
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


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on stderr while memory is reserved, if that is a terminal."""
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


def announce(
    config: Config, service: "Service", path: Path, adopted: dict[str, int] | None
) -> None:
    """Print that the server is ready, its arena, and the next command: the first lines on stdout."""
    from lmcache_shm.arena.segment import shm_path  # noqa: PLC0415  (numpy)
    from lmcache_shm.cli.formatting import reserved_size, size  # noqa: PLC0415

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
