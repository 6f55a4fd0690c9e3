"""``lmcache-shm server``: its flags. What it does is in serve.py, imported when it is really run."""

from typing import Any

from lmcache_shm.cli.command import flags
from lmcache_shm.config import SERVER, server_config


@flags(option.name for option in SERVER)
def server(**given: Any) -> None:
    """Run a cache server until SIGTERM or Ctrl-C: create or adopt an arena, then serve engines.

    In brackets: the default, and the environment variable that sets it.
    """
    config = server_config(given)
    from lmcache_shm.cli.serve import main  # noqa: PLC0415  (numpy and more, which --help does not need)

    main(config)
