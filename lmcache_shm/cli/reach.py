"""How commands reach a server, and what they say when there is none."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from lmcache_shm.cli.app import CommandError
from lmcache_shm.client.connection import Connection, ControlError, DeadlineExceeded, Unavailable
from lmcache_shm.client.reconnect import socket_path
from lmcache_shm.config import Config
from lmcache_shm.protocol.messages import PROTOCOL, Hello

ANSWER_S = 5.0


@contextmanager
def server_of(config: Config, command: str) -> Iterator[Connection]:
    """A connection to the instance's server. All that goes wrong on it is a CommandError of one line."""
    path = socket_path(config)
    try:
        hello = Hello(PROTOCOL, "tool", "", os.getpid(), {"command": command})
        connection = Connection.open(str(path), hello, ANSWER_S)
        try:
            yield connection
        finally:
            connection.close()
    except Unavailable:
        name = "" if config.instance == "default" else f" --instance {config.instance}"
        raise CommandError(
            f"no server of instance {config.instance} answers at {path}; "
            f"start one with: lmcache-shm server{name}"
        ) from None
    except DeadlineExceeded:
        raise CommandError(
            f"the server at {path} is there but does not answer within {ANSWER_S:.0f} s (stopped?)"
        ) from None
    except ControlError as error:
        raise CommandError(str(error)) from None


def confirmed(question: str, *, yes: bool) -> bool:
    """Ask, unless `yes`. Raises CommandError where nobody can be asked."""
    if yes:
        return True
    if not sys.stdin.isatty():
        raise CommandError(f"{question} Nobody can be asked here; add --yes", 2)
    import typer  # noqa: PLC0415

    return bool(typer.confirm(question))
