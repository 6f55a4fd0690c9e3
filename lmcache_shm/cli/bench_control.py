"""How long the scheduler waits for the server, beside a bare Unix-socket echo in the same run."""

import statistics
import time
from collections.abc import Callable

import numpy as np

from lmcache_shm.arena.slot import same_tokens
from lmcache_shm.cli import bench_crowd
from lmcache_shm.cli.bench_echo import echo_peers
from lmcache_shm.cli.bench_rows import Row, laps, pace, quantiles, row
from lmcache_shm.cli.bench_server import BenchEngine, private_server, reservation
from lmcache_shm.protocol.keys import ChunkKeys, seed
from lmcache_shm.protocol.messages import GroupInfo, Step, Stepped, frame

CHUNK, TOKENS, STEP_TOKENS = 256, 128 << 10, 2048
CHUNKS = TOKENS // CHUNK
PROMPTS = 5
"""Prompts whose prefill is measured, and PACES times between them all, the machine's own pace."""
PACES = 5
GROUPS = [
    GroupInfo("full", "full"),
    GroupInfo("window", "window", 1024),
    GroupInfo("state", "recurrent"),
]
REGION_BYTES = [2048, 1024, 512]  # small: this is about the catalog, not about bytes
ALL = range(len(GROUPS))


def longest_pause(seconds: float = 1.0) -> float:
    """Milliseconds in which this process could not run at all: what no p99 below can be better than."""
    end = (last := time.perf_counter()) + seconds
    longest = 0.0
    while last < end:
        now = time.perf_counter()
        longest = max(longest, now - last)
        last = now
    return longest / 1e-3


def run(rounds: int, step: Callable[[str], None]) -> list[Row]:
    """All rows; ``step`` is called with a label before each part."""
    paces: list[float] = []

    def begin(part: str) -> None:
        step(part)
        paces.extend(pace() for _ in range(PACES))

    begin("socket echo")
    message = bytes(frame(Step()))
    with echo_peers(1) as (peer,):

        def bounce() -> None:
            peer.sendall(message)
            peer.recv(65536)

        laps(bounce, 500)
        echo = statistics.median(laps(bounce, 200 * rounds)) / 1e-6
    rows = [
        row("bare Unix-socket echo", echo, "µs"),
        row("longest pause of a loop that does nothing, in one second", longest_pause(), "ms"),
    ]
    with private_server(1.0, CHUNK) as server:
        rows.append(row("start to ready, 1 GiB arena", server.ready_s, "s", 1.0))
        engine = BenchEngine(server, GROUPS, REGION_BYTES, CHUNK)
        try:
            step("prefaulting")
            engine.wait_for_memory()
            begin("empty round trip")
            rows += empty_round_trip(engine, echo, rounds)
            begin("128k-token prefills, in steps")
            rows += prefills(engine)
            begin("look-up of a 128k-token prompt")
            rows += look_up(engine, prompt(0), rounds)
            begin("scheduler steps")
            rows += steps(engine, rounds)
            rows += bench_crowd.run(server, rounds, begin)
        finally:
            engine.close()
    rows.insert(
        2, row("pace of this machine meanwhile, slowest / fastest", max(paces) / min(paces), "x")
    )
    return rows


def empty_round_trip(engine: BenchEngine, echo_us: float, rounds: int) -> list[Row]:
    def empty() -> None:
        engine.scheduler.call(Step(), Stepped)

    laps(empty, 500)
    p50, p99 = quantiles(laps(empty, 200 * rounds), 1e-6)
    return [
        row("empty round trip", p50, "µs", p99=p99),
        row("empty round trip / echo", p50 / echo_us, "x", 3.0),
    ]


def prompt(number: int, tokens: int = TOKENS) -> list[int]:
    """Made-up token ids."""
    ids: list[int] = np.random.default_rng(number).integers(0, 150_000, tokens).tolist()
    return ids


def prefills(engine: BenchEngine) -> list[Row]:
    """The control of whole prefills; the first prompt finds everything cold and does not count."""
    hashing, control = zip(
        *[prefill(engine, prompt(i)) for i in range(PROMPTS + 1)][1:], strict=True
    )
    whole, worst = quantiles([a + b for a, b in zip(hashing, control, strict=True)], 1e-3)
    steps_made = TOKENS // STEP_TOKENS
    return [
        row("prefill of 128k tokens, per step", whole / steps_made, "ms", 1.0),
        row("prefill of 128k tokens, hashing and control in all", whole, "ms", 20.0, worst),
        row("  of it hashing", statistics.median(hashing) / 1e-3, "ms"),
    ]


def prefill(engine: BenchEngine, tokens: list[int]) -> tuple[float, float]:
    """Hash, commit the last step's chunks and reserve this one's, for every step of a long prompt.

    Seconds spent hashing, and asking.
    """
    keys = ChunkKeys(seed(engine.descriptor), CHUNK)
    committed, hashing, control = b"", 0.0, 0.0
    for end in range(STEP_TOKENS, TOKENS + 1, STEP_TOKENS):
        start = time.perf_counter()
        first = len(keys)
        last = keys.extend(tokens, end // CHUNK)
        hashed = time.perf_counter()
        request = Step(reserve=reservation(keys, ALL, first, last), commit=committed)
        committed = engine.scheduler.call(request, Stepped).rows
        hashing += hashed - start
        control += time.perf_counter() - hashed
        rows = np.frombuffer(committed, "<i4")
        if (rows < 0).any():
            raise RuntimeError("the arena of the benchmark has no room")
        engine.write_tokens(keys, ALL, first, rows)  # the worker's side, not the scheduler's
    start = time.perf_counter()
    engine.scheduler.call(Step(commit=committed), Stepped)
    return hashing, control + time.perf_counter() - start


def look_up(engine: BenchEngine, tokens: list[int], rounds: int) -> list[Row]:
    """From the list of token ids to the number of usable tokens: hash, ask, confirm."""
    data, cold, hot = engine.arena.data, engine.arena.cold, engine.arena.hot
    token_offset = engine.registered.token_offset[0]
    times: dict[str, list[float]] = {"hash": [], "ask": [], "confirm": [], "all": []}
    for _lap in range(10 * rounds):
        start = time.perf_counter()
        keys = engine.keys(tokens)
        hashed = time.perf_counter()
        hit = engine.acquire(keys, TOKENS + 1)
        answered = time.perf_counter()
        found = np.frombuffer(hit.rows[0], "<i4")
        if not same_tokens(data, cold["offset"][found] + token_offset, keys.token_bytes(0, CHUNKS)):
            raise RuntimeError("a chunk is not what was stored")
        if cold["extra_digest"][found].any() or not hot["pins"][found].all():
            raise RuntimeError("a chunk has another identity, or is not pinned")
        end = time.perf_counter()
        for name, a, b in (
            ("hash", start, hashed),
            ("ask", hashed, answered),
            ("confirm", answered, end),
            ("all", start, end),
        ):
            times[name].append(b - a)
        if hit.n_chunks != CHUNKS:
            raise RuntimeError(f"a hit of {hit.n_chunks} chunks instead of {CHUNKS}")
        engine.release(hit.lease)
    server_us = statistics.median(times["ask"]) / 1e-6
    whole, worst = quantiles(times["all"], 1e-3)
    return [
        row("hashing, per token", statistics.median(times["hash"]) / TOKENS / 1e-9, "ns", 12.0),
        row("look-up of 128k tokens, 3 groups: all", whole, "ms", 2.5, worst, 6.0),
        row("  of it asking the server", statistics.median(times["ask"]) / 1e-3, "ms"),
        row("  of it confirming token ids", statistics.median(times["confirm"]) / 1e-3, "ms"),
        row("asking, per key and group", server_us / CHUNKS / len(GROUPS), "µs", 0.5),
    ]


def steps(engine: BenchEngine, rounds: int) -> list[Row]:
    """One scheduler step that completes 8 chunks of 3 groups: commit, reserve, release in one message."""
    made = [engine.keys(prompt(1000 + i, 8 * CHUNK)) for i in range(10 * rounds)]
    times, committed = [], b""
    for keys in made:
        start = time.perf_counter()
        request = Step(reserve=reservation(keys, ALL, 0, 8), commit=committed)
        committed = engine.scheduler.call(request, Stepped).rows
        times.append(time.perf_counter() - start)
    engine.scheduler.call(Step(commit=committed), Stepped)
    p50, p99 = quantiles(times, 1e-3)
    return [row("step with 8 chunks completed, 3 groups", p50, "ms", 1.0, p99)]
