"""One engine with one cache server, for tests that tell a story."""

import random
from collections.abc import Sequence
from typing import Any, Self

from tests.scheduler.cache import Cache
from tests.scheduler.content import VOCAB
from tests.scheduler.engine import Asked, Engine
from tests.scheduler.families import FAMILIES, Setup
from tests.scheduler.late import Pace
from tests.scheduler.prefixes import Known
from tests.scheduler.server import CacheServer

MIB = 1 << 20


class Lab:
    """``with Lab("gdn", instance) as lab``: leaving it checks that nothing is held and every stored byte is right.

    Copies are done at once, unless `pace` or `hold` says otherwise.
    """

    def __init__(
        self,
        family: str,
        instance: str,
        *,
        chunk: int = 0,
        step: int = 0,
        pace: Pace | None = None,
        arena_bytes: int = 4 * MIB,
        seed: int = 1,
        server: CacheServer | None = None,
        engine_id: str = "engine",
        own_threads: bool = False,
        known: Known | None = None,
        **setup: Any,
    ) -> None:
        kind = FAMILIES[family]
        self.rng = random.Random(seed)
        self._own_server = server is None
        self.server = server or CacheServer(instance, arena_bytes, separate=kind.separate)
        self.cache = Cache(self.server, self.rng, pace, own_threads=own_threads, known=known)
        self._wait = self.cache.pace.wait
        self.setup = Setup(
            kind, chunk or kind.chunks[0], step or kind.steps[0], **{"room": 4.0, **setup}
        )
        try:
            self.engine = Engine(self.setup, self.rng, self.cache, engine_id)
        except BaseException:
            self.cache.close()
            if self._own_server:
                self.server.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None:
                self.release()
                self.run()
                self.rest()
                self.cache.drained()
        finally:
            self.cache.close()
            if self._own_server:
                self.server.close()

    @property
    def chunk(self) -> int:
        return self.setup.chunk

    @property
    def scheduler(self) -> Any:
        return self.engine.scheduler

    def prompt(self, tokens: int, seed: int = 7) -> list[int]:
        """Token ids; a shorter prompt of the same seed is a prefix of a longer one."""
        rng = random.Random(seed)
        return [rng.randrange(VOCAB) for _ in range(tokens)]

    def add(self, prompt: Sequence[int], max_tokens: int = 1, **more: Any) -> str:
        return self.engine.add(prompt, max_tokens, **more)

    def run(self, *, idle_too: bool = True) -> None:
        """Until every request has ended; copies get on meanwhile."""
        self.engine.run(self.cache.tick, idle_too=idle_too)

    def ask(self, prompt: Sequence[int], max_tokens: int = 1, **more: Any) -> Asked:
        """One request from its arrival to its end, with nothing else going on; no copy is held."""
        self.release()
        req_id = self.add(prompt, max_tokens, **more)
        self.run()
        self.rest()
        return self.engine.asked[req_id]

    def rest(self) -> None:
        """Everything that is underway comes to its end; copies are not held any more."""
        self.release()
        self.cache.catch_up()
        self.cache.flush()
        for _ in range(20):
            if not self.engine.turn(self.cache.publish):
                break
        self.cache.flush()

    def hold(self) -> None:
        """From now on copies wait for `finish`."""
        self.cache.pace.wait = 1 << 30

    def release(self) -> None:
        """Copies are done at once again; those that waited, too."""
        self.cache.pace.wait = self._wait
        self.finish()

    def finish(self, kind: str = "", fail: str = "") -> None:
        """Copies of this kind end now, on all ranks, and are reported."""
        for engine in self.cache.engines:
            engine.finish(kind, fail)
        self.cache.publish()

    def pending(self, kind: str) -> int:
        """Copies of this kind that are underway."""
        return sum(p.job.kind == kind for e in self.cache.engines for p in e.pending)

    def turns(self, n: int) -> None:
        """The engine makes n moves; nothing else happens."""
        for _ in range(n):
            self.engine.turn()

    def status(self, req_id: str) -> str:
        request = self.engine.request(req_id)
        return request.status.name if request else "gone"

    def wipe(self) -> None:
        """The engine forgets its own prefix cache."""
        self.rest()
        assert self.scheduler.reset_prefix_cache(), self.engine.state()

    def stored_chunks(self) -> list[list[int]]:
        """Numbers of the chunks that are stored, by object group."""
        cold = self.server.arena.cold
        found: list[list[int]] = [[] for _ in self.cache.members()]
        for (_, group, _), row in self.cache.stored().items():
            found[group].append(int(cold["chunk"][row]))
        return [sorted(chunks) for chunks in found]
