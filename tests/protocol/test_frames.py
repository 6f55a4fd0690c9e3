"""Bytes of any kind: the worst they do is to end the connection they came on."""

import contextlib
import random
import socket
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache_shm.protocol.messages import (
    LENGTH,
    MAX_FRAME,
    PROTOCOL,
    Error,
    Hello,
    HelloReply,
    Request,
    Status,
    StatusReply,
    frame,
)
from lmcache_shm.server.frames import SMALL
from tests.protocol.harness import ServerProcess, exchange, is_closed, receive
from tools.harness.wait import until

MESSAGES = [cls.__name__ for cls in Request.__args__]


def greeted(server: ServerProcess, role: str = "tool") -> socket.socket:
    sock = server.raw()
    assert isinstance(exchange(sock, Hello(PROTOCOL, role, "engine")), HelloReply)
    return sock


def still_serves(server: ServerProcess) -> None:
    with contextlib.closing(server.tool()) as tool:
        tool.call(Status(), StatusReply, 2.0)


def private_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
# Of the right tag and of wrong content, of wrong tags, and of no structure at all. A request to end the
# server is obeyed, so that one is left out.
bodies = st.one_of(
    st.builds(
        lambda tag, fields: msgspec.msgpack.encode([tag, *fields]),
        st.sampled_from([name for name in MESSAGES if name not in {"Shutdown", "Drain"}]),
        st.lists(values, max_size=9),
    ),
    st.builds(msgspec.msgpack.encode, values),
    st.binary(max_size=200),
)


@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(bodies, min_size=1, max_size=8), st.lists(st.integers(1, 60), max_size=6))
def test_any_frames_in_any_pieces_end_their_own_connection_at_most(lasting, contents, cuts):
    stream = b"".join(LENGTH.pack(len(body)) + body for body in contents)
    with contextlib.closing(greeted(lasting)) as sock:
        with contextlib.suppress(ConnectionError):
            for cut in cuts:
                sock.sendall(stream[:cut])
                stream = stream[cut:]
            sock.sendall(stream)
            sock.shutdown(socket.SHUT_WR)
        assert is_closed(sock)
    still_serves(lasting)


def mutated(rng: random.Random, body: bytes) -> bytes:
    data = bytearray(body)
    for _ in range(rng.randint(1, 4)):
        kind, at = rng.randrange(4), rng.randrange(len(data) + 1)
        if kind == 0 and at < len(data):
            data[at] = rng.randrange(256)
        elif kind == 1:
            data[at:at] = rng.randbytes(rng.randint(1, 8))
        elif kind == 2:
            del data[at : at + rng.randint(1, 8)]
        else:
            data += data[: rng.randint(0, 16)]
    return bytes(data)


def test_twenty_thousand_mutated_frames_harm_nothing(lasting):
    """Only frames that the server looked at are counted: what follows a malformed one is not."""
    rng = random.Random(20)
    samples = [bytes(frame(message))[4:] for message in _samples()]
    hello = bytes(frame(Hello(PROTOCOL, "scheduler", "engine")))
    started = private_bytes(lasting.pid)
    looked_at = 0
    while looked_at < 20_000:
        batch = [mutated(rng, rng.choice(samples)) for _ in range(8)]
        stream = b"".join(
            LENGTH.pack(len(b)) + b for b in batch if b"Shut" not in b and b"Drain" not in b
        )
        with contextlib.closing(lasting.raw()) as sock:
            with contextlib.suppress(ConnectionError):
                sock.sendall(hello + stream)
                sock.shutdown(socket.SHUT_WR)
            looked_at += replies(sock) + 1 - 1  # without the greeting's, with the one that ended it
    still_serves(lasting)
    assert private_bytes(lasting.pid) - started < 20 << 20


def replies(sock: socket.socket) -> int:
    """How many whole answers come before the end."""
    got = bytearray()
    with contextlib.suppress(ConnectionError):
        while more := sock.recv(1 << 16):
            got += more
    count = at = 0
    while at + 4 <= len(got):
        at += 4 + LENGTH.unpack_from(got, at)[0]
        count += 1
    return count


def _samples():
    from lmcache_shm.protocol.messages import Acquire, AttachWorker, Clear, List, Report, Step
    from tests.protocol.harness import GROUPS, Prefix, registration

    prefix = Prefix(1, 3)
    yield from (Hello(PROTOCOL, "scheduler", "engine", 1, {"a": 1}), Status(), List(-1, 5))
    yield from (Clear(0, b"salt"), Report({"deadline": 3}), prefix.acquire())
    yield Step(prefix.reserve(), b"\0" * 8, b"\1\0\0\0", [1, 2])
    yield Acquire(prefix.keys, 5, 50, 77)
    yield registration("engine", groups=list(GROUPS))
    yield AttachWorker("engine", 0, 1, 1, [100, 200])


@pytest.mark.parametrize("size", [MAX_FRAME + 1, 2**31, 2**32 - 1])
def test_a_frame_beyond_the_limit_ends_its_connection_before_it_is_read(lasting, size):
    with contextlib.closing(greeted(lasting)) as sock:
        sock.sendall(LENGTH.pack(size))
        assert is_closed(sock)
    still_serves(lasting)


def test_an_empty_frame_is_no_message(lasting):
    with contextlib.closing(greeted(lasting)) as sock:
        sock.sendall(LENGTH.pack(0))
        assert is_closed(sock)


def test_malformed_frames_are_counted(lasting):
    before = lasting.status()["counters"].get("malformed_frames", 0)
    with contextlib.closing(greeted(lasting)) as sock:
        sock.sendall(LENGTH.pack(3) + b"\xc1\xc1\xc1")
        assert is_closed(sock)

    assert lasting.status()["counters"]["malformed_frames"] == before + 1


def test_deeply_nested_content_is_refused(lasting):
    for body in (b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff\xa6Status" + b"\x91" * 100_000):
        with contextlib.closing(greeted(lasting)) as sock:
            with contextlib.suppress(ConnectionError):
                sock.sendall(LENGTH.pack(len(body)) + body)
            assert is_closed(sock)
    still_serves(lasting)


def test_a_frame_that_comes_byte_by_byte_is_served(lasting):
    with contextlib.closing(greeted(lasting)) as sock:
        for byte in bytes(frame(Status())):
            sock.sendall(bytes([byte]))
        assert isinstance(receive(sock), StatusReply)


def test_many_requests_in_one_piece_are_answered_in_order(lasting):
    with contextlib.closing(greeted(lasting)) as sock:
        sock.sendall(b"".join(bytes(frame(Status())) for _ in range(50)))
        for _ in range(50):
            assert isinstance(receive(sock), StatusReply)


def test_half_frames_of_many_connections_take_a_bounded_amount_of_memory(lasting):
    """Each of 60 peers announces 16 MiB and sends all but the last byte, as far as the server takes it."""
    before = private_bytes(lasting.pid)
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(contextlib.closing(greeted(lasting))) for _ in range(60)]
        piece = bytes(1 << 20)
        for sock in peers:
            sock.sendall(LENGTH.pack(MAX_FRAME))
            sock.setblocking(False)
        end = time.monotonic() + 1.5
        sent = dict.fromkeys(peers, 0)
        while time.monotonic() < end:
            for sock in peers:
                with contextlib.suppress(BlockingIOError, ConnectionError):
                    sent[sock] += sock.send(piece[: min(len(piece), MAX_FRAME - 1 - sent[sock])])
            still_serves(lasting)
        assert private_bytes(lasting.pid) - before < 130 << 20
    until(lambda: private_bytes(lasting.pid) - before < 40 << 20, "memory given back")


def test_a_large_frame_waits_for_its_turn_and_is_served(lasting):
    """Three announced frames use up the budget; a fourth is taken when they are gone."""
    with contextlib.ExitStack() as stack:
        holders = [stack.enter_context(contextlib.closing(greeted(lasting))) for _ in range(3)]
        for sock in holders:
            sock.sendall(LENGTH.pack(MAX_FRAME) + b"x" * 10)
        late = stack.enter_context(contextlib.closing(greeted(lasting)))
        body = bytes(frame(Hello(PROTOCOL, "tool", info={"x": "y" * (4 * SMALL)})))
        still_serves(lasting)
        late.setblocking(False)
        sent = late.send(body)
        for sock in holders:
            sock.close()
        late.settimeout(10)
        late.sendall(body[sent:])
        answer = receive(late)
        assert isinstance(answer, Error)  # a second greeting; what matters is that it was read


def test_a_reader_that_stops_delays_nobody_and_grows_nothing(lasting):
    before = private_bytes(lasting.pid)
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(contextlib.closing(greeted(lasting))) for _ in range(20)]
        requests = bytes(frame(Status())) * 2000
        for sock in readers:
            sock.setblocking(False)
        for _ in range(30):
            for sock in readers:
                with contextlib.suppress(BlockingIOError, ConnectionError):
                    sock.send(requests)
            began = time.monotonic()
            still_serves(lasting)
            assert time.monotonic() - began < 1.0
        assert private_bytes(lasting.pid) - before < 30 << 20


def test_silent_and_half_open_connections_delay_nobody(lasting):
    with contextlib.ExitStack() as stack:
        for i in range(40):
            sock = stack.enter_context(contextlib.closing(lasting.raw()))
            if i % 2:
                sock.sendall(b"\x05")
            elif i % 4:
                sock.shutdown(socket.SHUT_WR)
        still_serves(lasting)


def test_connections_beyond_the_limit_are_told_so(lasting):
    with contextlib.ExitStack() as stack:
        for _ in range(128):
            stack.enter_context(contextlib.closing(greeted(lasting)))
        late = stack.enter_context(contextlib.closing(lasting.raw()))
        answer = receive(late)

        assert isinstance(answer, Error)
        assert "128 connections" in answer.message
    until(lambda: _serves(lasting), "served again")


def _serves(server: ServerProcess) -> bool:
    from lmcache_shm.client.connection import ControlError

    try:
        still_serves(server)
    except ControlError:
        return False
    return True


def test_a_flood_of_connections_leaves_no_descriptors(lasting):
    def descriptors() -> int:
        return len(list(Path(f"/proc/{lasting.pid}/fd").iterdir()))

    before = descriptors()
    for _ in range(300):
        lasting.raw().close()
    still_serves(lasting)

    until(lambda: descriptors() <= before, "descriptors closed")
