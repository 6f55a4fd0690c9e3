"""Random workloads: one number makes one, and the same one again."""

import random
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.sched.interface import PauseState

from tests.scheduler.cache import Cache
from tests.scheduler.content import VOCAB
from tests.scheduler.engine import Engine
from tests.scheduler.families import FAMILIES, Family, Setup
from tests.scheduler.late import Pace
from tests.scheduler.oracle import Violation
from tests.scheduler.prefixes import Known
from tests.scheduler.server import CacheServer

KIB, MIB = 1 << 10, 1 << 20


@dataclass
class Chances:
    """Per move of the engine."""

    arrive: float
    abort: float
    evict: float
    steal: float
    reset: float
    clear: float
    forget: float = 0.0
    pause: float = 0.0


@dataclass
class Outcome:
    """What one workload went through."""

    name: str
    requests: int = 0
    schedules: int = 0
    tokens: int = 0
    resumed: int = 0
    aborted: int = 0
    stores: int = 0
    loads: int = 0
    failed_loads: int = 0
    external_tokens: int = 0
    evictions: int = 0
    resets: int = 0
    pauses: int = 0
    chunks: int = 0
    """Chunks that had to be stored, and were."""


@dataclass
class Workload:
    """A workload before it runs; `make` draws one from a seed."""

    seed: int
    setup: Setup
    arena_bytes: int
    pace: Pace
    chances: Chances
    requests: int
    lives: int
    """Engines one after the other (a restart empties the KV cache, not the arena)."""
    salts: tuple[str | None, ...]
    adapters: tuple[str | None, ...]
    bases: list[list[int]] = field(default_factory=list)
    answers: tuple[int, ...] = (1, 4, 40)
    """Upper bounds of max_tokens."""

    @property
    def name(self) -> str:
        s = self.setup
        how = "async" if s.asynchronous else "sync"
        return (
            f"seed {self.seed}: {s.family.name}, {how}, chunk {s.chunk}, step {s.step}, room {s.room}, "
            f"length {s.max_len}, drafts {s.drafts}, {s.policy}, arena {self.arena_bytes // KIB} KiB"
        )


def make(seed: int, family: str | None = None) -> Workload:
    """Draw a workload."""
    rng = random.Random(seed)
    crowded = rng.random() < 0.4  # many short prompts with long answers: they push each other out
    kind = FAMILIES[family or rng.choice(list(FAMILIES))]
    chunk = rng.choice(kind.chunks)
    asynchronous = rng.random() < 0.4
    drafts = rng.choice([0, 0, 1, 3]) if kind.drafts else 0
    setup = Setup(
        kind,
        chunk,
        rng.choice(kind.steps),
        room=rng.choice(_rooms(kind, crowded=crowded)),
        max_len=rng.choice([128, 192, 320])
        if kind.name != "deepseek_v4"
        else rng.choice([256, 448]),
        asynchronous=asynchronous,
        drafts=drafts,
        max_seqs=6 if crowded else rng.choice([2, 4, 6]),
        policy=rng.choice(["fcfs", "fcfs", "priority"]),
    )
    late = rng.choice([0, 0, 3, 12])
    pace = Pace(
        wait=late,
        go=rng.choice([1.0, 0.5, 0.15]) if late else 1.0,
        fail_loads=rng.choice([0, 0, 0.1, 0.4]),
        fail_stores=rng.choice([0, 0, 0.1]),
    )
    calm = rng.random() < 0.3
    chances = Chances(
        arrive=0.6 if crowded else rng.choice([0.05, 0.2, 0.6]),
        abort=0 if calm else rng.choice([0, 0.01, 0.05]),
        evict=0 if calm else rng.choice([0, 0, 0.05]),
        steal=0 if calm else rng.choice([0, 0, 0.02]),
        reset=0 if calm else rng.choice([0, 0.01]),
        clear=0 if calm else rng.choice([0, 0, 0.01]),
        forget=rng.choice([0, 0.05, 0.3]),
    )
    longest = setup.max_len // 3 if crowded else setup.max_len - 8
    bases = [
        [rng.randrange(VOCAB) for _ in range(rng.randrange(1, longest))]
        for _ in range(rng.choice([1, 2, 4]))
    ]
    drawn = Workload(
        seed, setup, rng.choice([256 * KIB, 512 * KIB, 2 * MIB, 2 * MIB]), pace, chances,
        requests=rng.choice([3, 6, 12]), lives=rng.choice([1, 1, 2]),
        salts=rng.choice([(None,), (None, "a", "b")]), adapters=rng.choice([(None,), (None, "x")]),
        bases=bases, answers=(40, 120) if crowded else (1, 4, 40),
    )  # fmt: skip
    chances.pause = 0 if calm else rng.choice([0, 0, 0.02])
    return drawn


def _rooms(kind: Family, *, crowded: bool) -> list[float]:
    """Pool sizes, in requests of the greatest length."""
    # A partial hit of a recurrent model takes vLLM some blocks more than one request needs.
    least = 1.3 if kind.recurrent else 1.0
    return [least, least + 0.2] if crowded else [least, least + 0.1, 1.5, 2.5, 6.0]


def run(workload: Workload, instance: str) -> Outcome:
    """Run it from an empty arena. Raises Violation."""
    return Run(workload, instance).all_lives()


class Run:
    """A workload under way."""

    def __init__(self, workload: Workload, instance: str) -> None:
        self.workload = workload
        self.rng = random.Random(f"run {workload.seed}")
        self.outcome = Outcome(workload.name)
        self._instance = instance
        self._server: CacheServer | None = None
        self.prompts: list[list[int]] = []
        self.known: Known = {}

    @property
    def server(self) -> CacheServer:
        assert self._server is not None
        return self._server

    def all_lives(self) -> Outcome:
        w = self.workload
        self._server = CacheServer(self._instance, w.arena_bytes, separate=w.setup.family.separate)
        try:
            for life in range(w.lives):
                self._live(life)
        except Violation as violation:
            raise Violation(violation.kind, f"{w.name}\n  {violation}") from None
        except Exception as error:
            raise Violation("engine_died", f"{w.name}: {error!r}") from error
        finally:
            self.server.close()
        return self.outcome

    def _live(self, life: int) -> None:
        w = self.workload
        self.cache = Cache(self.server, self.rng, w.pace, known=self.known)
        self.cache.lossy = w.chances.steal > 0
        try:
            self.engine = Engine(w.setup, self.rng, self.cache, f"engine-{life}")
            self.left = w.requests
            self._arrive()
            while True:
                self.engine.run(self._between)
                if not self.left:
                    break
                self._arrive()
            self._drain()
            self._note()
        finally:
            self.cache.close()

    def _drain(self) -> None:
        cache, engine = self.cache, self.engine
        cache.catch_up()
        cache.flush()
        for _ in range(20):
            if not engine.turn(cache.publish):
                break
        if engine.scheduler.has_requests():
            engine.oracle.fail("stuck", "the engine still has work although all is over")
        cache.drained()
        if self._lossless():
            self._complete()

    def _lossless(self) -> bool:
        """Nothing was to be lost in this run: all stores went well and there was room for all."""
        w, c = self.workload, self.workload.chances
        counters = self.server.catalog.snapshot()["counters"]
        return not (
            c.evict or c.steal or c.reset or c.clear or c.pause or w.pace.fail_stores
            or counters["evictions"] or counters["stores_skipped_full"]
            or "lmcache_shm.mamba_steps" in w.setup.family.extra
        )  # fmt: skip

    def _complete(self) -> None:
        """Every whole chunk of every prompt that was computed is there, in all object groups."""
        cache, chunk = self.cache, self.workload.setup.chunk
        stored, space = cache.stored(), cache.namespace()
        for req_id, asked in self.engine.asked.items():
            if asked.finish != "length":
                continue
            keys = cache.keys_of(req_id)
            for number in range(len(cache.members())):
                for i in range(len(asked.prompt) // chunk):
                    if (i + 1) * chunk <= asked.local_tokens and self._left_at_once():
                        continue
                    self.outcome.chunks += 1
                    if (space, number, keys.key(i)) not in stored:
                        self.engine.oracle.fail(
                            "not_stored",
                            f"chunk {i} of object group {number} of {req_id} was computed and is not there",
                        )

    def _left_at_once(self) -> bool:
        """Chunks of generated text may be left out: which drafts were right is known when vLLM has given up the
        blocks of a local span that ended with them. Nobody can store those."""
        return self.workload.setup.family.name == "local" and self.workload.setup.drafts > 0

    def _note(self) -> None:
        o, e, c = self.outcome, self.engine, self.cache
        o.requests += len(e.asked)
        o.schedules += e.schedules
        o.tokens += e.workers.tokens_checked
        o.resumed += e.resumed
        o.aborted += sum(a.finish == "abort" for a in e.asked.values())
        o.stores += c.stores
        o.loads += c.loads
        o.failed_loads += c.failed_loads
        o.external_tokens += sum(a.external_tokens for a in e.asked.values())

    # ---------------------------------------------------------------------------- events
    def _between(self) -> None:
        rng, chances = self.rng, self.workload.chances
        self.cache.tick()
        if rng.random() < 0.1:
            self.cache.flush()
        if self.left and rng.random() < chances.arrive:
            self._arrive()
        if rng.random() < chances.abort and (alive := self.engine.unfinished()):
            self.engine.abort(rng.choice(alive))
        if rng.random() < chances.evict:
            self.outcome.evictions += self.server.evict(list(self.cache.stored().values()))
        if rng.random() < chances.steal and (rows := list(self.cache.stored().values())):
            self._steal(rng.choice(rows))
        if rng.random() < chances.forget:
            self._forget()
        if rng.random() < chances.reset:
            self._reset()
        if chances.pause and rng.random() < chances.pause:
            self._pause()
        if rng.random() < chances.clear:
            self._clear()

    def _arrive(self) -> None:
        rng, w = self.rng, self.workload
        self.left -= 1
        longest = w.setup.max_len - 2
        prompt = self._prompt()[: longest - 1]
        room = longest - len(prompt)
        req_id = self.engine.add(
            prompt,
            rng.randint(1, min(room, rng.choice(w.answers))),
            rng.choice(w.salts),
            rng.choice(w.adapters),
            priority=rng.randrange(3) if w.setup.policy == "priority" else 0,
        )
        self.prompts.append(self.engine.asked[req_id].prompt)

    def _prompt(self) -> list[int]:
        """A shared beginning and an own end, an earlier prompt again, or what follows from one."""
        rng, w = self.rng, self.workload
        kind = rng.random()
        if self.prompts and kind < 0.25:
            return list(rng.choice(self.prompts))
        if self.engine.asked and kind < 0.4:
            asked = rng.choice(list(self.engine.asked.values()))
            return [*asked.prompt, *asked.output, *self._tokens(rng.randrange(1, 20))]
        base = rng.choice(w.bases)
        cut = rng.randrange(1, len(base) + 1)
        if rng.random() < 0.5:
            # Around a chunk's end: one less, exact, one more.
            near = round(cut / w.setup.chunk) * w.setup.chunk + rng.choice([-1, 0, 0, 1])
            cut = min(max(near, 1), len(base))
        return base[:cut] + (self._tokens(rng.randrange(30)) if rng.random() < 0.5 else [])

    def _tokens(self, n: int) -> list[int]:
        return [self.rng.randrange(VOCAB) for _ in range(n)]

    def _steal(self, row: int) -> None:
        """Overwritten by a bug elsewhere: whoever reads it must notice; nobody may find it again."""
        self.engine.oracle.note(f"steal row {row}")
        self.server.steal(row)

    def _reset(self) -> None:
        """POST /reset_prefix_cache, sometimes with everything running and the external cache."""
        rng, engine = self.rng, self.engine
        running = rng.random() < 0.4 and engine.between_steps
        self.outcome.resets += engine.reset(running=running, external=rng.random() < 0.3)

    def _pause(self) -> None:
        """POST /pause in any of its ways, and /resume; while it comes to rest the world goes on."""
        rng, engine = self.rng, self.engine
        if not engine.between_steps or engine.scheduler.pause_state != PauseState.UNPAUSED:
            return
        self.outcome.pauses += 1
        mode = rng.choice(["keep", "wait", "abort"])
        engine.pause(mode, self._between, clear=rng.random() < 0.7)
        engine.resume()

    def _forget(self) -> None:
        """The engine loses part of its own prefix cache, as if others had needed the blocks."""
        pool = self.engine.oracle.pool
        cached = [b.block_id for b in pool.blocks if b.ref_cnt == 0 and b.block_hash is not None]
        if cached:
            pool.evict_blocks(set(self.rng.sample(cached, self.rng.randint(1, len(cached)))))

    def _clear(self) -> None:
        """Somebody empties the cache with the command line."""
        self.engine.oracle.note("clear")
        salt: Any = self.rng.choice([None, b"a"])
        self.server.ask(lambda: self.server.catalog.clear(None, salt))
