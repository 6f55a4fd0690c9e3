"""The hot paths of the control side as actions that can be repeated, and what runs them under a counter.

Each workload is a context that yields an action: without sockets and threads, always the same work. A request
is encoded, decoded, handled and answered as in a server's turn.
"""

import gc
import importlib
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np

from lmcache_shm.arena.segment import create
from lmcache_shm.cli.bench_control import reservation
from lmcache_shm.config import Config
from lmcache_shm.protocol.keys import ChunkKeys, seed
from lmcache_shm.protocol.messages import (
    LENGTH,
    Acquire,
    Acquired,
    Error,
    Message,
    Step,
    Stepped,
    decode_reply,
    decode_request,
    frame,
)
from lmcache_shm.protocol.rules import Full, Recurrent, Window
from lmcache_shm.server.catalog.catalog import Catalog
from lmcache_shm.server.catalog.groups import GroupSpec
from lmcache_shm.server.handlers import Service

CHUNK, CHUNKS, STEP_CHUNKS = 256, 512, 8
"""A prompt of 128k tokens, prefilled 2,048 tokens at a time."""
FULL_CHUNKS, FULL_PROMPTS = 128, 2
"""Of the workload that evicts: small enough to fill an arena under a counter."""
SLOT_BYTES = 4096
RULES = (Full(), Window(1024), Recurrent())
WARM, TIMES = 2, 4

Action = Callable[[], None]
Workload = Callable[[], AbstractContextManager[Action]]


class Desk:
    """A service with one registered engine, asked directly. Room for so many chunks of every group."""

    def __init__(self, chunks: int) -> None:
        slots = chunks * len(RULES)
        name = f"count-{os.getpid()}"
        self.arena = create(name, slots * SLOT_BYTES, chunk_size=CHUNK, max_slots=slots)
        self.arena.unlink()  # only this process needs it; nothing stays if it is killed
        catalog = Catalog(self.arena)
        specs = [GroupSpec(type(rule).__name__, rule, SLOT_BYTES) for rule in RULES]
        space = catalog.register(b"count", specs, CHUNK)
        self.service = Service(self.arena, catalog, Config())
        self._ours, theirs = socket.socketpair()
        with theirs:
            self.session = self.service.open_session(theirs)
        engine = self.service.engines.find(self.session, "count")
        self.service.engines.bind(engine, self.session, 1, 1)
        self.session.role, self.session.namespace = "scheduler", space.id
        self.session.groups = len(RULES)

    def ask(self, request: Message) -> Message:
        """One turn: from the request's frame to the answer's."""
        answer = self.service.handle(
            self.session, decode_request(memoryview(frame(request))[LENGTH.size :])
        )
        assert not isinstance(answer, Error), answer
        return decode_reply(memoryview(frame(answer))[LENGTH.size :])

    def step(self, step: Step) -> bytes:
        answer = self.ask(step)
        assert isinstance(answer, Stepped)
        return answer.rows

    def close(self) -> None:
        self.service.close_session(self.session)
        self._ours.close()
        self.arena.close()


def prompt() -> list[int]:
    """Made-up token ids."""
    found: list[int] = np.random.default_rng(0).integers(0, 150_000, CHUNKS * CHUNK).tolist()
    return found


@contextmanager
def desk(chunks: int = 4 * CHUNKS) -> Iterator[Desk]:
    found = Desk(chunks)
    try:
        yield found
    finally:
        found.close()


@contextmanager
def acquire() -> Iterator[Action]:
    """Look up a stored prompt of 512 chunks in 3 groups and pin what it needs; then release it."""
    with desk() as at:
        keys = ChunkKeys(seed(b"count"), CHUNK)
        keys.extend(prompt())
        rows = at.step(Step(reserve=reservation(keys, range(len(RULES)), 0, CHUNKS)))
        at.step(Step(commit=rows))

        def action() -> None:
            hit = at.ask(Acquire(bytes(keys.keys), 0, CHUNKS * CHUNK + 1))
            assert isinstance(hit, Acquired)
            assert hit.n_chunks == CHUNKS
            at.step(Step(release=[hit.lease]))

        yield action


@contextmanager
def step() -> Iterator[Action]:
    """One step of a prefill: commit the last step's 8 chunks in 3 groups, reserve the next."""
    with desk() as at:
        keys = ChunkKeys(seed(b"count"), CHUNK)
        keys.extend(prompt())
        first, rows = 0, b""

        def action() -> None:
            nonlocal first, rows
            reserve = reservation(keys, range(len(RULES)), first, first + STEP_CHUNKS)
            rows = at.step(Step(reserve=reserve, commit=rows))
            first += STEP_CHUNKS

        yield action


@contextmanager
def full() -> Iterator[Action]:
    """The 16 steps of a prompt of 128 chunks, when the arena is full: an older prompt leaves for it."""
    with desk(FULL_PROMPTS * FULL_CHUNKS) as at:
        numbers = iter(range(1 << 20))

        def action() -> None:
            keys = ChunkKeys(seed(b"count"), CHUNK)
            # Other keys of the same length: hashing is counted by itself.
            keys.keys = bytearray(np.random.default_rng(next(numbers)).bytes(16 * FULL_CHUNKS))
            keys.digests = bytearray(16 * FULL_CHUNKS)
            rows = b""
            for first in range(0, FULL_CHUNKS, STEP_CHUNKS):
                reserve = reservation(keys, range(len(RULES)), first, first + STEP_CHUNKS)
                rows = at.step(Step(reserve=reserve, commit=rows))
            at.step(Step(commit=rows))

        for _ in range(FULL_PROMPTS):
            action()
        yield action


@contextmanager
def hashing() -> Iterator[Action]:
    """The chain of 512 keys of a prompt, from its list of token ids."""
    tokens = prompt()

    def action() -> None:
        assert ChunkKeys(seed(b"count"), CHUNK).extend(tokens) == CHUNKS

    yield action


def mark() -> None:
    """What the counter listens for: a function of libc that nothing else here calls."""
    os.getsid(0)


def main() -> None:
    """Run the workloads that are named, each as module:function, between two marks."""
    gc.disable()
    for name in sys.argv[1:]:
        module, function = name.split(":")
        workload: Workload = getattr(importlib.import_module(module), function)
        with workload() as action:
            for _ in range(WARM):
                action()
            mark()
            for _ in range(TIMES):
                action()
            mark()


if __name__ == "__main__":
    main()
