"""Many clients at once: everyone is served, nobody waits for the slow ones, and the sums are right."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lmcache_shm.arena.segment import attach, segment_names, shm_path
from lmcache_shm.client.connection import Connection, Refused
from lmcache_shm.protocol.messages import (
    PROTOCOL,
    Clear,
    Done,
    Hello,
    Report,
    Status,
    StatusReply,
    frame,
)
from tests.protocol.harness import (
    WAIT_S,
    Engine,
    Prefix,
    ServerProcess,
    is_closed,
    receive,
    registration,
)
from tools.harness.wait import until

CLIENTS = 32
CLIENT = """
import sys
import numpy as np
from tests.protocol.harness import *
class Server: path = sys.argv[1]
numbers = [int(word) for word in sys.argv[2:]]
engines = [Engine(Server, f"engine-{n}") for n in numbers]
print("ready", flush=True)
sys.stdin.readline()
for round in range(20):
    for n, one in zip(numbers, engines):
        # One prefix of its own each, and one that all of them want.
        for prefix in (Prefix(1000 * (n + 1) + round, 3), Prefix(7, 10)):
            rows = [row for row in one.step(prefix.reserve()) if row >= 0]
            one.step(commit=np.array(rows, "<i4").tobytes())
            hit = one.acquire(prefix)
            assert prefix.number == 7 or hit.n_chunks == 3, (n, round, hit)
            one.step(release=[hit.lease] if hit.lease else [])
for one in engines:
    assert one.acquire(Prefix(7, 10)).n_chunks == 10
    one.close()
"""


def test_thirty_two_clients_store_and_find_at_once(lasting):
    processes = []
    for p in range(CLIENTS // 8):
        command = [sys.executable, "-c", CLIENT, lasting.path, *(str(8 * p + i) for i in range(8))]
        pipe = subprocess.PIPE
        processes.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        process.communicate(timeout=60)
    assert [process.returncode for process in processes] == [0] * len(processes)
    counters = lasting.status()["counters"]
    assert counters["commits"] == 2 * (CLIENTS * 20 * 3 + 10)
    with contextlib.closing(lasting.tool()) as tool:
        tool.call(Clear(), Done)
    # These processes are gone, so their places are, too.
    until(lambda: lasting.status()["clients"] == [], "places given back")


def test_a_flood_of_requests_on_one_connection_leaves_the_others_their_turn(lasting):
    """Fair: a connection that has thousands of requests waiting gets one answer per round, like all others."""
    flood = bytes(frame(Report({}))) * 20_000
    with contextlib.ExitStack() as stack:
        loud = stack.enter_context(contextlib.closing(lasting.raw()))
        loud.sendall(bytes(frame(Hello(PROTOCOL, "tool"))))
        receive(loud)
        sender = threading.Thread(target=loud.sendall, args=(flood,))
        reader = threading.Thread(target=drain, args=(loud, 20_000))
        quiet = stack.enter_context(contextlib.closing(lasting.tool()))
        sender.start()
        reader.start()
        answered = 0
        while reader.is_alive():
            quiet.call(Report({}), Done)
            answered += 1
        sender.join()
        reader.join()
    # With one answer of theirs between two of ours there would be 20,000; a third of that leaves room for
    # the Python of this process, which all three threads share.
    assert answered > 1_000


def drain(sock: socket.socket, n: int) -> None:
    for _ in range(n):
        receive(sock)


def test_a_large_request_holds_up_the_others_only_for_its_own_work(lasting):
    """A reservation of 100k entries that all do not fit is the most work that one request can ask for."""
    with contextlib.ExitStack() as stack:
        one = Engine(lasting, "large")
        stack.callback(one.close)
        quiet = stack.enter_context(contextlib.closing(lasting.tool()))
        reserve = Prefix(5, 60_000).reserve()
        worst = []
        done = threading.Event()

        def look() -> None:
            while not done.is_set():
                began = time.monotonic()
                quiet.call(Report({}), Done)
                worst.append(time.monotonic() - began)

        thread = threading.Thread(target=look)
        thread.start()
        rows = one.step(reserve)
        done.set()
        thread.join()
        assert max(worst) < 2.0
        assert sum(row >= 0 for row in rows) > 0


def test_a_server_out_of_file_descriptors_serves_those_it_has(instance):
    limit = 40
    few = ["sh", "-c", f'ulimit -n {limit} && exec "$@"', "sh"]
    server = ServerProcess(instance, "--prefault-threads", "0", wrap=few)
    try:
        with contextlib.ExitStack() as stack:
            first = stack.enter_context(contextlib.closing(server.tool()))
            for _ in range(limit):
                stack.enter_context(contextlib.closing(server.raw()))
            first.call(Status(), StatusReply)
            until(lambda: "ulimit -n" in server.errors, "told")
        until(server.status, "served again")
    finally:
        server.end()


# --------------------------------------------------------------------------------------- intruders
NOBODY = 65534


def as_nobody(action: Callable[[], str]) -> str:
    """What `action` returns in a forked child that has become another user."""
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            told = action()
        except BaseException as error:  # noqa: BLE001  (told to the parent)
            told = f"{type(error).__name__}: {error}"
        os.write(write, told.encode())
        os._exit(0)
    os.close(write)
    told = b""
    while more := os.read(read, 4096):
        told += more
    os.close(read)
    os.waitpid(child, 0)
    return told.decode()


@contextlib.contextmanager
def open_to_all(server: ServerProcess):
    """As if someone had loosened the directory and the socket."""
    folder, path = Path(server.path).parent, Path(server.path)
    folder.chmod(0o755)
    path.chmod(0o666)
    try:
        yield
    finally:
        path.chmod(0o600)
        folder.chmod(0o700)


def test_another_user_can_neither_connect_nor_map(lasting):
    def connect() -> str:
        Connection.open(lasting.path, Hello(PROTOCOL, "tool"), WAIT_S)
        return "connected"

    assert as_nobody(connect).startswith("Refused")  # the directory is ours alone
    names = segment_names(lasting.instance)
    for path in map(shm_path, names):
        assert path.exists()
        assert as_nobody(lambda path=path: str(path.open("rb"))).startswith("PermissionError")
    told = as_nobody(lambda: str(attach(lasting.instance, writable_data=False, names=names)))
    assert told.startswith("NotOurs")


def test_the_server_turns_another_user_away_even_when_he_gets_to_the_socket(lasting):
    def connect() -> str:
        return receive(lasting.raw()).message

    with open_to_all(lasting):
        told = as_nobody(connect)

    assert told == f"this server belongs to uid 0, not to uid {NOBODY}"
    assert lasting.status()["counters"]["refused_uid"] == 1


def test_the_client_tells_why_it_was_turned_away(lasting):
    def connect() -> str:
        Connection.open(lasting.path, Hello(PROTOCOL, "tool"), WAIT_S)
        return "connected"

    with open_to_all(lasting):
        told = as_nobody(connect)

    assert told.startswith("Refused")
    assert "belongs to uid 0" in told


def test_a_server_of_another_user_is_not_trusted(runtime_dir):
    """Somebody listens where our server should be: his answers could serve wrong bytes."""
    path = runtime_dir / "impostor.sock"
    listener = socket.socket(socket.AF_UNIX)
    runtime_dir.chmod(0o777)

    def impostor() -> None:
        listener.bind(str(path))
        listener.listen()
        os.write(told, b"x")
        time.sleep(60)

    heard, told = os.pipe()
    child = 0
    try:
        if os.geteuid() != 0:
            pytest.skip("only root can become somebody else")
        child = os.fork()
        if child == 0:
            try:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
                impostor()
            finally:
                os._exit(1)  # whatever happens: never on as a second pytest
        os.close(told)  # so that a child that failed is heard, too
        told = -1
        os.read(heard, 1)
        with pytest.raises(Refused, match=f"belongs to uid {NOBODY}, not to uid 0"):
            Connection.open(str(path), Hello(PROTOCOL, "tool"), WAIT_S)
    finally:
        if child > 0:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        listener.close()
        os.close(heard)
        if told >= 0:
            os.close(told)
        runtime_dir.chmod(0o700)
        path.unlink(missing_ok=True)


def test_the_server_survives_peers_that_vanish_in_the_middle_of_anything(lasting):
    whole = bytes(frame(Hello(PROTOCOL, "scheduler", "x"))) + bytes(frame(registration("x")))
    for cut in range(0, len(whole), 3):
        sock = lasting.raw()
        sock.sendall(whole[:cut])
        sock.close()
    with contextlib.closing(lasting.raw()) as sock:
        sock.sendall(whole + b"\xff\xff\xff\xff")
        assert is_closed(sock)
