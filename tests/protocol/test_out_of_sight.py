"""A server in a pid namespace of its own, as in a container: its engines' pids read as 0 there.

That they have ended it learns from the pidfds of their sockets (Linux 6.5), and tells them apart by these (6.9).
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.protocol.harness import ServerProcess, WorkerProcess
from tools.harness.wait import until

UNSHARE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
KERNEL = tuple(int(part) for part in os.uname().release.split(".")[:2])
SCHEDULER = """
import sys
from lmcache_shm.client.connection import Connection
from lmcache_shm.protocol.messages import PROTOCOL, Hello, Registered, Step, Stepped
from tests.protocol.harness import Prefix, registration, rows_of
c = Connection.open(sys.argv[1], Hello(PROTOCOL, "scheduler", "far"), 10.0)
assert c.call(registration("far", world=2), Registered).ready
rows = rows_of(c.call(Step(Prefix(1, 3).reserve()), Stepped).rows)
print(len(rows), flush=True)
sys.stdin.read()
"""


def _can_unshare() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode == 0


pytestmark = [
    pytest.mark.skipif(not _can_unshare(), reason="needs leave to make a pid namespace"),
    pytest.mark.skipif(KERNEL < (6, 9), reason="needs pidfds with inodes of their own"),
]


@pytest.fixture
def apart(instance: str) -> Iterator[ServerProcess]:
    made = ServerProcess(instance, "--quarantine-grace-s", "0.2", wrap=UNSHARE)
    yield made
    made.end(signal.SIGKILL)
    subprocess.run(
        [sys.executable, "-m", "lmcache_shm", "purge", "--yes", "--instance", instance],
        capture_output=True,
        check=False,
    )


def quarantined(server: ServerProcess) -> int:
    return int(server.status()["arena"]["slots"]["quarantined"])


def test_slots_stay_in_quarantine_until_every_process_out_of_sight_has_ended(apart: ServerProcess):
    """The grace time is no proof here: whether such a process is stopped cannot be seen."""
    workers = [WorkerProcess(apart, "far", rank, 2) for rank in range(2)]
    scheduler = subprocess.Popen(
        [sys.executable, "-c", SCHEDULER, apart.path],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert scheduler.stdout is not None
        assert scheduler.stdout.readline().strip() == "6"
        (client,) = apart.status()["clients"]
        assert [(w["rank"], w["pid"]) for w in client["workers"]] == [(0, 0), (1, 0)]
        workers[1].process.send_signal(signal.SIGSTOP)  # in the middle of a copy, as it were
        scheduler.kill()
        until(lambda: quarantined(apart) == 6, "quarantine")
        workers[0].end()
        with pytest.raises(AssertionError):
            until(lambda: quarantined(apart) == 0, "", 1.5)
        workers[1].end()

        until(lambda: quarantined(apart) == 0, "freed when the last of them has ended")
    finally:
        scheduler.kill()
        scheduler.communicate()
        for worker in workers:
            worker.end()


def test_two_processes_out_of_sight_are_not_taken_for_one(apart: ServerProcess):
    first = WorkerProcess(apart, "twin")
    try:
        with pytest.raises(AssertionError, match="not let in"):
            WorkerProcess(apart, "twin")
    finally:
        first.end()


def test_doctor_tells_of_it(apart: ServerProcess):
    worker = WorkerProcess(apart, "far")
    try:
        done = subprocess.run(
            [sys.executable, "-m", "lmcache_shm", "doctor", "--instance", apart.instance],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    finally:
        worker.end()

    assert "engine far" in done.stdout
    assert "another pid namespace" in done.stdout
    assert "docs/deploy.md" in done.stdout
