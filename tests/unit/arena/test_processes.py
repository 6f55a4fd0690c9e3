"""What is told of a process when it cannot be looked at."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lmcache_shm.arena.processes import Process, stat


@contextmanager
def no_descriptor() -> Iterator[None]:
    """Nothing can be opened within."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_process_that_cannot_be_looked_at_is_not_taken_for_a_dead_one() -> None:
    """Else a server without file descriptors would end a quarantine while its worker still writes."""
    pid = os.getpid()
    process = Process(pid, stat(pid)[1])
    with no_descriptor():
        found, alive, running = stat(pid), process.alive(), process.running()

    assert found == ("?", 0)
    assert (alive, running) == (True, False)
    assert (process.alive(), process.running()) == (True, True)


@pytest.mark.parametrize("pidfd", [False, True])
def test_one_that_has_ended_is_gone(pidfd: bool) -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    process = Process(child, stat(child)[1], os.pidfd_open(child) if pidfd else -1)
    os.waitpid(child, 0)

    assert not process.alive()
    process.close()
