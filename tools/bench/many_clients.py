"""A load test: many clients at once, beside a bare echo for as many in the same run.

The echo says what the machine lets through: a virtual machine stops a process for some milliseconds now and
then, and of many clients one is always hit often.
"""

import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from lmcache_shm.cli.bench_control import PrivateServer, echo_peers
from lmcache_shm.cli.bench_results import Row, quantiles, row, samples
from lmcache_shm.client.connection import Connection
from lmcache_shm.protocol.messages import PROTOCOL, Hello, Step, frame

CLIENTS = 32
PACED_RATE = 10_000
"""Round trips a second of all clients together."""
Waits = list[list[float]]
"""Seconds of each round trip, by client."""


MANY = """
import select, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen(64)
print("ready", flush=True)
peers = {}
poll = select.epoll()
for _ in range(int(sys.argv[2])):
    peer, _ = listener.accept()
    peers[peer.fileno()] = peer
    poll.register(peer, select.EPOLLIN)
while peers:
    for number, _ in poll.poll():
        data = peers[number].recv(65536)
        if data:
            peers[number].send(data)
        else:
            peers.pop(number).close()
"""


class LoadTest(NamedTuple):
    """Many clients against the p50 of one that is alone: round trips a second, p99 of the slowest at both rates."""

    rate: float
    never_pausing: float
    paced: float

    @classmethod
    def of(cls, sockets: list[socket.socket], rounds: int) -> "LoadTest":
        """Driven from this one thread."""
        message = bytes(frame(Step()))

        def alone() -> None:
            sockets[0].sendall(message)
            sockets[0].recv(65536)

        samples(alone, 500)
        idle = quantiles(samples(alone, 200 * rounds), 1e-6)[0]
        rate, waits = saturated(sockets, 200 * rounds)
        paced = at_rate(sockets, PACED_RATE, 200 * rounds * len(sockets))
        worst = [max(quantiles(each, 1e-6)[1] for each in found) / idle for found in (waits, paced)]
        return cls(rate, *worst)


def run(server: PrivateServer, rounds: int, step: Callable[[str], None]) -> list[Row]:
    """As fast as the clients can, then at a fixed rate; each beside a bare echo."""
    step(f"{CLIENTS} clients")
    hello = Hello(PROTOCOL, "tool", "", os.getpid())
    clients = [Connection.open(server.socket, hello) for _ in range(CLIENTS)]
    try:
        ours = LoadTest.of([client.sock for client in clients], rounds)
    finally:
        for client in clients:
            client.close()
    step(f"a bare echo for {CLIENTS} clients")
    with echo_peers(CLIENTS, MANY) as peers:
        echo = LoadTest.of(peers, rounds)
    never, paced = (
        f"{CLIENTS} clients that never pause",
        f"{CLIENTS} clients, {PACED_RATE:,} a second",
    )
    return [
        row(f"{never}: round trips a second", ours.rate, "1/s", 10_000, least=True),
        row(f"{never}: slowest p99 / idle p50", ours.never_pausing, "x", 10.0),
        row("  the same with a bare echo", echo.never_pausing, "x"),
        row(f"{paced}: slowest p99 / idle p50", ours.paced, "x", 10.0),
        row("  the same with a bare echo", echo.paced, "x"),
    ]


def saturated(sockets: list[socket.socket], turns: int) -> tuple[float, Waits]:
    """Always one request of each client under way; round trips a second in all, seconds of each by client."""
    message = bytes(frame(Step()))
    sent = [0.0] * len(sockets)
    waits: Waits = [[] for _ in sockets]
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


def at_rate(sockets: list[socket.socket], rate: float, count: int) -> Waits:
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
    waits: Waits = [[] for _ in sockets]
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
