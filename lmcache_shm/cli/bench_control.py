"""How long the scheduler waits for the server, beside a bare Unix-socket echo in the same run."""

import gc
import os
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from lmcache_shm.catalog.keys import ChunkKeys, seed
from lmcache_shm.cli.bench_server import BenchEngine, PrivateServer, private_server, reservation
from lmcache_shm.control.connection import Connection
from lmcache_shm.control.messages import PROTOCOL, GroupInfo, Hello, Step, Stepped, frame

CHUNK, TOKENS, STEP_TOKENS = 256, 128 << 10, 2048
CHUNKS = TOKENS // CHUNK
CLIENTS = 32
PACED_RATE = 20_000
"""Round trips a second of all clients together, twice what is asked of a server."""
GROUPS = [
    GroupInfo("full", "full"),
    GroupInfo("window", "window", 1024),
    GroupInfo("state", "recurrent"),
]
REGION_BYTES = [2048, 1024, 512]  # small: this is about the catalog, not about bytes
ALL = range(len(GROUPS))
Row = dict[str, Any]

ECHO = """
import socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("ready", flush=True)
peer, _ = listener.accept()
while data := peer.recv(65536):
    peer.sendall(data)
"""


@contextmanager
def echo_peer() -> Iterator[socket.socket]:
    """A connection to a process that sends back what it gets."""
    with tempfile.TemporaryDirectory(prefix="lmcache-shm-bench-") as folder:
        path = str(Path(folder) / "echo")
        with (
            subprocess.Popen(
                [sys.executable, "-c", ECHO, path], stdout=subprocess.PIPE, text=True
            ) as process,
            socket.socket(socket.AF_UNIX) as peer,
        ):
            if process.stdout is not None:
                process.stdout.readline()
            peer.connect(path)
            yield peer
            peer.shutdown(socket.SHUT_RDWR)
            process.wait()


def laps(action: Callable[[], object], times: int) -> list[float]:
    """Seconds of each call, garbage collection held back."""
    found = []
    enabled = gc.isenabled()
    gc.disable()
    try:
        for _ in range(times):
            start = time.perf_counter()
            action()
            found.append(time.perf_counter() - start)
    finally:
        if enabled:
            gc.enable()
    return found


def longest_pause(seconds: float = 1.0) -> float:
    """Milliseconds in which this process could not run at all: what no p99 below can be better than."""
    end = (last := time.perf_counter()) + seconds
    longest = 0.0
    while last < end:
        now = time.perf_counter()
        longest = max(longest, now - last)
        last = now
    return longest / 1e-3


def quantiles(seconds: list[float], unit: float) -> tuple[float, float]:
    """p50 and p99 in units of ``unit`` seconds."""
    ordered = sorted(seconds)
    last = min(len(ordered) - 1, round(0.99 * len(ordered)))
    return statistics.median(ordered) / unit, ordered[last] / unit


def row(
    name: str,
    value: float,
    unit: str,
    bar: float | None = None,
    p99: float | None = None,
    p99_bar: float | None = None,
    *,
    least: bool = False,
) -> Row:
    """One line of the table. ``bar`` is the most that is good enough (or the least)."""
    met = None
    if bar is not None:
        met = value >= bar if least else value <= bar
        if p99 is not None and p99_bar is not None:
            met = met and p99 <= p99_bar
    return {
        "name": name,
        "value": value,
        "unit": unit,
        "p99": p99,
        "bar": bar,
        "p99_bar": p99_bar,
        "met": met,
    }


def run(rounds: int, step: Callable[[str], None]) -> list[Row]:
    """All rows; ``step`` is called with a label before each part."""
    step("socket echo")
    message = bytes(frame(Step()))
    with echo_peer() as peer:

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
            step("empty round trip")
            rows += empty_round_trip(engine, echo, rounds)
            step("a 128k-token prefill, in steps")
            tokens = np.random.default_rng(0).integers(0, 150_000, TOKENS).tolist()
            rows += prefill(engine, tokens)
            step("look-up of a 128k-token prompt")
            rows += look_up(engine, tokens, rounds)
            step("scheduler steps")
            rows += steps(engine, rounds)
            step(f"{CLIENTS} clients")
            rows += crowd(server, rows, rounds)
        finally:
            engine.close()
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


def prefill(engine: BenchEngine, tokens: list[int]) -> list[Row]:
    """Hash, commit the last step's chunks and reserve this one's, for every step of a long prompt."""
    keys = ChunkKeys(seed(engine.descriptor), CHUNK)
    committed, spent = b"", 0.0
    for end in range(STEP_TOKENS, TOKENS + 1, STEP_TOKENS):
        start = time.perf_counter()
        first = len(keys)
        last = keys.extend(tokens, end // CHUNK)
        request = Step(reserve=reservation(keys, ALL, first, last), commit=committed)
        committed = engine.scheduler.call(request, Stepped).rows
        spent += time.perf_counter() - start
        rows = np.frombuffer(committed, "<i4")
        if (rows < 0).any():
            raise RuntimeError("the arena of the benchmark has no room")
        engine.write_tokens(keys, ALL, first, rows)  # the worker's side, not the scheduler's
    engine.scheduler.call(Step(commit=committed), Stepped)
    steps_made = TOKENS // STEP_TOKENS
    return [
        row("prefill of 128k tokens, per step", spent / steps_made / 1e-3, "ms", 1.0),
        row("prefill of 128k tokens, hashing and control in all", spent / 1e-3, "ms", 20.0),
    ]


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
        places = (cold["offset"][found] + token_offset).tolist()
        for encoded, at in zip(keys.encoded, places, strict=True):
            if data[at : at + len(encoded)] != encoded:
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
    number = iter(range(1 << 30))

    def prompt() -> list[int]:
        rng = np.random.default_rng(next(number) + 1)
        return [int(x) for x in rng.integers(0, 150_000, 8 * CHUNK)]

    made = [engine.keys(prompt()) for _ in range(10 * rounds)]
    times, committed = [], b""
    for keys in made:
        start = time.perf_counter()
        request = Step(reserve=reservation(keys, ALL, 0, 8), commit=committed)
        committed = engine.scheduler.call(request, Stepped).rows
        times.append(time.perf_counter() - start)
    engine.scheduler.call(Step(commit=committed), Stepped)
    p50, p99 = quantiles(times, 1e-3)
    return [row("step with 8 chunks completed, 3 groups", p50, "ms", 1.0, p99)]


def crowd(server: PrivateServer, rows: list[Row], rounds: int) -> list[Row]:
    """Many clients, driven from one thread: as fast as they can, then at a fixed rate."""
    idle = float(next(r["value"] for r in rows if r["name"] == "empty round trip"))
    hello = Hello(PROTOCOL, "tool", "", os.getpid())
    clients = [Connection.open(server.socket, hello) for _ in range(CLIENTS)]
    try:
        sockets = [client.sock for client in clients]
        rate, waits = saturated(sockets, 200 * rounds)
        paced = at_rate(sockets, PACED_RATE, 200 * rounds * CLIENTS)
    finally:
        for client in clients:
            client.close()

    def worst(found: list[list[float]]) -> float:
        return max(quantiles(each, 1e-6)[1] for each in found) / idle

    never_pause = f"{CLIENTS} clients that never pause"
    return [
        row(f"{never_pause}: round trips a second", rate, "1/s", 10_000, least=True),
        row(f"{never_pause}: slowest client's p99 / idle p50", worst(waits), "x"),
        row(
            f"{CLIENTS} clients, {PACED_RATE:,} round trips a second: slowest p99 / idle p50",
            worst(paced),
            "x",
            10.0,
        ),
    ]


def saturated(sockets: list[socket.socket], turns: int) -> tuple[float, list[list[float]]]:
    """Always one request of each client under way; round trips a second in all, seconds of each by client."""
    message = bytes(frame(Step()))
    sent = [0.0] * len(sockets)
    waits: list[list[float]] = [[] for _ in sockets]
    began = time.perf_counter()
    for i, sock in enumerate(sockets):
        sent[i] = time.perf_counter()
        sock.sendall(message)
    for turn in range(turns):
        for i, sock in enumerate(sockets):
            sock.recv(65536)
            now = time.perf_counter()
            waits[i].append(now - sent[i])
            if turn + 1 < turns:
                sent[i] = now
                sock.sendall(message)
    return turns * len(sockets) / (time.perf_counter() - began), waits


def at_rate(sockets: list[socket.socket], rate: float, count: int) -> list[list[float]]:
    """Requests at random moments (Poisson), `rate` a second over all clients; seconds of each by client.

    A request counts from the moment it was due, whether or not this thread came to send it in time.
    """
    message = bytes(frame(Step()))
    sockets[0].sendall(message)
    reply_bytes = len(sockets[0].recv(65536))
    rng = np.random.default_rng(0)
    due = np.cumsum(rng.exponential(1 / rate, count)).tolist()
    senders = rng.integers(0, len(sockets), count).tolist()
    client_of = {sock.fileno(): i for i, sock in enumerate(sockets)}
    under_way: list[deque[float]] = [deque() for _ in sockets]
    waits: list[list[float]] = [[] for _ in sockets]
    answered, at = 0, 0
    with select.epoll() as readable:
        for number in client_of:
            readable.register(number, select.EPOLLIN)
        began = time.perf_counter()
        while answered < count:
            while at < count and due[at] <= time.perf_counter() - began:
                under_way[senders[at]].append(due[at])
                sockets[senders[at]].sendall(message)
                at += 1
            for number, _ in readable.poll(0):
                i = client_of[number]
                replies = len(sockets[i].recv(65536)) // reply_bytes
                now = time.perf_counter() - began
                for _ in range(replies):
                    waits[i].append(now - under_way[i].popleft())
                answered += replies
    return waits
