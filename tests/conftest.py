"""Every test leaves the machine as it was: no segment in /dev/shm, no process, no socket."""

import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tools.harness import leftovers

RUN = leftovers.mark()
os.environ[leftovers.MARK] = RUN

# A slow machine is no failure: what must be fast has a test that measures it.
settings.register_profile("lmcache_shm", deadline=None)
settings.load_profile("lmcache_shm")

HERE = Path(__file__).parent
# Tests of these folders start processes, so each of them is checked for processes it left.
WITH_PROCESSES = {"protocol", "faults", "e2e", "scheduler"}
SECONDS = {"e2e": 900, "faults": 300, "scheduler": 600}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The folder is the marker."""
    for item in items:
        if HERE not in item.path.parents:
            continue
        folder = item.path.relative_to(HERE).parts[0]
        if folder in {"unit", "protocol", "scheduler", "faults", "e2e"}:
            item.add_marker(getattr(pytest.mark, folder))
        if folder in SECONDS and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SECONDS[folder]))


@pytest.fixture(scope="session", autouse=True)
def runtime_dir() -> Iterator[Path]:
    """A runtime directory of this run's own (short: a socket path has 107 bytes), so that no test meets a user's server."""
    path = Path(tempfile.mkdtemp(prefix=f"lmcshm-test-{os.getpid()}-"))
    before = os.environ.get("LMCACHE_SHM_RUNTIME_DIR")
    os.environ["LMCACHE_SHM_RUNTIME_DIR"] = str(path)
    yield path
    if before is None:
        del os.environ["LMCACHE_SHM_RUNTIME_DIR"]
    else:
        os.environ["LMCACHE_SHM_RUNTIME_DIR"] = before
    shutil.rmtree(path, ignore_errors=True)


_numbers = itertools.count()


@pytest.fixture
def instance() -> str:
    """An instance name that no other test, run or user has."""
    return f"test-{os.getpid()}-{next(_numbers)}"


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test after which there is a new segment in /dev/shm or a new process.

    Set up after fixtures of wider scope, so a server that a whole module shares is not counted.
    """
    folder = request.path.relative_to(HERE).parts[0] if HERE in request.path.parents else ""
    checks_processes = folder in WITH_PROCESSES
    shm_before = leftovers.segments()
    pids_before = set(leftovers.processes_of(RUN)) if checks_processes else set()
    yield
    # A process that was told to end may need a moment; one that was not, never goes.
    deadline = time.monotonic() + 5.0
    while True:
        pids = leftovers.processes_of(RUN) if checks_processes else {}
        known = pids_before | leftovers.shared_processes
        new = {pid: command for pid, command in pids.items() if pid not in known}
        own = {os.getpid(), *new}
        names = sorted(
            name
            for name in leftovers.segments() - shm_before
            if not leftovers.is_mapped_elsewhere(name, own)
        )
        if (not new and not names) or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    left = [f"process {pid}: {command}" for pid, command in new.items()]
    left += [f"/dev/shm/{name}" for name in names]
    if left:
        pytest.fail("left behind: " + "; ".join(left), pytrace=False)


@pytest.hookimpl(trylast=True)  # after the last fixtures have ended
def pytest_sessionfinish(session: pytest.Session) -> None:
    """The last word: nothing of this run may outlive it."""
    left = leftovers.processes_of(RUN)
    if left:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print(f"\nleft behind by this run: {left}")
