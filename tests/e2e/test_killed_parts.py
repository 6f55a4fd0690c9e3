"""kill -9 of one part of a real `vllm serve` with two ranks: of its API server, or of a single worker.

What vLLM does then: nothing ends EngineCore and the workers of an API server that is gone; they finish what they
had been asked for, and stay idle. An engine that loses a worker ends itself; the other ranks get some seconds first.
"""

import hashlib
import json
import os
import signal
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lmcache_shm.arena.layout import SlotState
from tests.e2e.deployment import Deployment, NotServedError
from tests.e2e.lab import LONG, NEW, TOLERANCE
from tools.harness import failpoints, leftovers
from tools.harness.engines import state_of
from tools.harness.points import TRANSFER
from tools.harness.wait import LONG_S, until
from tools.server_process import Server, Table
from tools.tiny_models.prompts import tokens

CHUNK = 128
LENGTH = 600
HIT = LENGTH // CHUNK * CHUNK  # tokens
STORED = {name: tokens(name, LENGTH) for name in ("first", "second", "third")}
"""Committed before the kill; the others come with it."""
OTHERS = {name: tokens(name, LENGTH) for name in ("new", "newer")}
PROMPTS = STORED | OTHERS
COPIER = TRANSFER + "strided:RunCopier."


class House:
    """A cache server, and one `vllm serve` after the other; `right`: what the first answered, nothing cached."""

    def __init__(self, marks: Path) -> None:
        self.marks = marks
        self.server = Server(f"test-{os.getpid()}-parts", chunk_size=CHUNK, size_mb=128)
        self.deployments: list[Deployment] = []
        try:
            self.start()
            self.right = {name: self.current.complete(PROMPTS[name], NEW) for name in PROMPTS}
        except BaseException:
            self.close()
            raise

    @property
    def current(self) -> Deployment:
        return self.deployments[-1]

    def start(self) -> None:
        """Another `vllm serve`, with one thread for each rank."""
        cpus = sorted(os.sched_getaffinity(0))
        deployment = Deployment(
            self.server, "gemma3", "--tensor-parallel-size", "2",
            "--distributed-executor-backend", "mp", "--enable-prompt-tokens-details",
            "--worker-extension-cls", "tests.e2e.armed.Armed",
            VLLM_CPU_OMP_THREADS_BIND=f"{cpus[0]}|{cpus[-1]}", FAULT_MARKS=str(self.marks),
            VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS="1",
        )  # fmt: skip
        self.deployments.append(deployment)
        leftovers.shared_processes.update(deployment.processes())

    def close(self) -> None:
        for deployment in self.deployments:
            deployment.close()
        self.server.close()

    def only_stored(self) -> Table:
        """Have STORED in the arena and nothing else, and nothing in vLLM's own cache."""
        self.server.wait_idle()
        self.server.clear()
        self.current.reset()
        for prompt in STORED.values():
            self.current.complete(prompt)
        table = self.server.wait_idle()
        self.current.reset()
        return table

    def connected(self) -> list[dict[str, Any]]:
        return [client for client in self.server.status()["clients"] if client["connected"]]

    def assert_nothing_is_held(self) -> None:
        """No pin, no reservation; what was quarantined is free again."""
        table = self.server.wait_idle()
        until(lambda: not len(table.rows(state=SlotState.QUARANTINED)), "quarantine ends", LONG_S)
        assert self.server.check() == []

    def assert_the_next_engine_is_right(self) -> dict[str, int]:
        """Start one: it hits all of STORED and answers rightly; what it hit of the others."""
        self.start()
        answers = {name: self.current.complete(prompt, NEW) for name, prompt in PROMPTS.items()}
        assert {name: answers[name].cached for name in STORED} == dict.fromkeys(STORED, HIT)
        wrong = {name: answers[name].difference(self.right[name]) for name in PROMPTS}
        assert max(wrong.values()) <= TOLERANCE, wrong
        self.assert_nothing_is_held()
        return {name: answers[name].cached for name in OTHERS}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    made = House(tmp_path_factory.mktemp("parts") / "marks")
    yield made
    made.close()


@contextmanager
def struck(house: House, copy: str, do: str, names: Iterable[str]) -> Iterator[int]:
    """Within, rank 1 (its pid) was killed or stopped in the middle of a copy for these requests; none of them
    is answered after all."""
    spec = json.dumps(failpoints.spec(COPIER + copy, "before", 2, do))
    house.marks.write_text("")
    house.current.post("/collective_rpc", {"method": "arm_failpoint", "args": ["1", spec]})
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        requests = [pool.submit(house.current.complete, PROMPTS[name], NEW) for name in names]
        until(house.marks.read_text, f"rank 1 is in the middle of a {copy}", LONG_S)
        yield int(json.loads(house.marks.read_text())["pid"])
        for request in requests:
            with pytest.raises(NotServedError):
                request.result()


@pytest.mark.parametrize("copy", ["load", pytest.param("store", marks=LONG)])
def test_a_killed_api_server_leaves_nothing(house: House, runtime_dir: Path, copy: str) -> None:
    """Pins and reservations end with the copies, although EngineCore lives on; the next engine works beside it."""
    table = house.only_stored()
    files = sorted(runtime_dir.iterdir())
    orphan = house.current
    with struck(house, copy, "stop", PROMPTS) as rank:
        until(lambda: state_of(rank) == "T", "it is stopped", LONG_S)
        assert table.pins() if copy == "load" else len(table.rows(state=SlotState.RESERVED))
        orphan.process.kill()
        orphan.process.wait()
        os.kill(rank, signal.SIGCONT)
    house.assert_nothing_is_held()

    house.assert_the_next_engine_is_right()

    for client in house.connected():
        if client["pid"] in orphan.processes():
            os.kill(client["pid"], signal.SIGKILL)
    until(lambda: not orphan.processes(), "its workers end with it", LONG_S)
    until(lambda: len(house.connected()) == 1, "the server knows", LONG_S)
    house.assert_nothing_is_held()
    assert sorted(runtime_dir.iterdir()) == files


@pytest.mark.parametrize("copy", ["store", pytest.param("load", marks=LONG)])
def test_a_killed_worker_ends_its_engine_and_leaves_nothing(house: House, copy: str) -> None:
    """The other rank goes on writing: nothing that only one of them has written is committed, or served."""
    committed = contents(house.only_stored())
    names = STORED if copy == "load" else OTHERS
    with struck(house, copy, "kill", names):
        until(lambda: not house.current.processes(), "vLLM ends what is left", LONG_S)
    until(lambda: not house.connected(), "the server knows", LONG_S)
    house.assert_nothing_is_held()
    assert contents(house.server.table()) == committed

    others = house.assert_the_next_engine_is_right()

    assert others == dict.fromkeys(OTHERS, 0)


def contents(table: Table) -> dict[int, str]:
    """A digest of the bytes of every committed slot."""
    return {int(row): hashlib.sha256(table.payload(row)).hexdigest() for row in table.rows()}
