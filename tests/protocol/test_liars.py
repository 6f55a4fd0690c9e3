"""A client that lies about what it owns gets an Error, and harms nobody's data."""

import contextlib

import numpy as np
import pytest

from lmcache_shm.client.connection import Connection, Refused
from lmcache_shm.protocol.messages import (
    MAX_KEYS,
    PROTOCOL,
    Acquire,
    Acquired,
    Attached,
    AttachWorker,
    Clear,
    Done,
    Error,
    Hello,
    Registered,
    Report,
    Status,
    Step,
    Stepped,
)
from tests.protocol.harness import (
    GROUPS,
    REGION,
    WAIT_S,
    Engine,
    Prefix,
    WorkerProcess,
    engine,
    exchange,
    is_closed,
    registration,
)
from tools.harness.wait import until


def packed(*rows: int) -> bytes:
    return np.array(rows, "<i4").tobytes()


@pytest.fixture
def victim(lasting):
    """An engine with a reservation, a lease and something stored."""
    with engine(lasting, "victim") as made:
        made.stored = Prefix(1, 3)
        made.store(made.stored)
        made.lease = made.acquire(made.stored).lease
        made.rows = made.step(Prefix(2, 2).reserve())
        yield made
        slots = lasting.status()["arena"]["slots"]
        assert slots["reserved"] == 4
        assert slots["pinned"] == 6
        # All that it holds is still good.
        made.step(commit=packed(*made.rows), release=[made.lease])
        for number, chunks in ((1, 3), (2, 2)):
            hit = made.acquire(Prefix(number, chunks))
            assert hit.n_chunks == chunks
            made.step(release=[hit.lease])
        made.scheduler.call(Clear(), Done)


@pytest.fixture
def liar(lasting, victim):
    with engine(lasting, "liar") as made:
        yield made


def refused(liar: Engine, code: str, request=None, reply=Stepped, **fields) -> str:
    with pytest.raises(Refused) as error:
        liar.scheduler.call(request or Step(**fields), reply)
    assert error.value.code == code
    assert "\n" not in str(error.value)
    return str(error.value)


def test_rows_of_another_can_be_neither_committed_nor_aborted(victim, liar):
    for row in victim.rows:
        refused(liar, "not_yours", commit=packed(row))
        refused(liar, "not_yours", abort=packed(row))


def test_committed_rows_can_be_neither_committed_nor_aborted_again(victim, liar):
    mine = liar.step(Prefix(3, 1).reserve())
    liar.step(commit=packed(*mine))

    refused(liar, "not_yours", commit=packed(*mine))
    refused(liar, "not_yours", abort=packed(*mine))


@pytest.mark.parametrize("row", [-1, -3, 2**31 - 1, -(2**31), 1 << 20])
def test_rows_that_do_not_exist_are_not_yours(victim, liar, row):
    refused(liar, "not_yours", commit=packed(row))
    refused(liar, "not_yours", abort=packed(row))


def test_a_row_is_finished_once(victim, liar):
    row, other = liar.step(Prefix(4, 1).reserve())

    refused(liar, "invalid", commit=packed(row, row))
    refused(liar, "invalid", commit=packed(row), abort=packed(row))
    refused(liar, "invalid", commit=packed(row)[:3])
    liar.step(abort=packed(row, other))
    refused(liar, "not_yours", abort=packed(row))


def test_a_step_with_one_lie_does_nothing_at_all(lasting, victim, liar):
    rows = liar.step(Prefix(5, 1).reserve())
    before = lasting.status()["arena"]["slots"]
    refused(liar, "not_yours", Step(Prefix(6, 1).reserve(), packed(*rows), b"", [victim.lease]))

    assert lasting.status()["arena"]["slots"] == before
    liar.step(abort=packed(*rows))


def test_leases_of_another_can_be_neither_released_nor_replaced(victim, liar):
    refused(liar, "not_yours", release=[victim.lease])
    refused(liar, "not_yours", Acquire(b"", 0, 1, victim.lease), Acquired)


@pytest.mark.parametrize("lease", [0, -1, 1, 2**63, 2**64 - 1])
def test_leases_that_were_never_given_are_not_yours(victim, liar, lease):
    refused(liar, "not_yours", release=[lease])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("groups", np.array([2], "<u2").tobytes()),
        ("groups", b""),
        ("groups", b"\0"),
        ("keys", b"short"),
        ("keys", b"\1" * 32),
        ("parents", b""),
        ("chunks", b"\0\0"),
        ("digests", b"\0"),
        ("salts", b"\0" * 16),
    ],
)
def test_reservations_of_impossible_shape_are_refused(victim, liar, field, value):
    reserve = Prefix(7, 1).reserve(1)
    setattr(reserve, field, value)
    refused(liar, "invalid", Step(reserve))


def test_more_keys_than_allowed_are_refused(victim, liar):
    keys = bytes(16) * (MAX_KEYS + 1)
    refused(liar, "limit", Acquire(keys, 0, 1), Acquired)


@pytest.mark.parametrize(("local", "total"), [(-1, 5), (6, 5), (0, 2**62), (-(2**60), -5)])
def test_token_counts_that_make_no_sense_are_refused(victim, liar, local, total):
    refused(liar, "invalid", Acquire(victim.stored.keys, local, total), Acquired)


def test_counts_of_tokens_beyond_the_keys_find_only_what_there_is(victim, liar):
    hit = liar.scheduler.call(Acquire(victim.stored.keys, 0, 2**39), Acquired)

    assert hit.n_chunks == 3
    liar.step(release=[hit.lease])


def test_reports_without_end_are_bounded(lasting, victim, liar):
    for i in range(20):
        counts = {f"reason {i} {j} {'x' * 100}": 1 for j in range(100)}
        liar.scheduler.call(Report(counts), Done)
    liar.scheduler.call(Report({"negative": -5, "huge": 1 << 60}), Done)
    misses = lasting.status()["misses"]

    assert len(misses) < 100
    assert max(map(len, misses)) <= 64
    assert min(misses.values()) >= 0


# ------------------------------------------------------------------------------------- identities
def test_another_process_cannot_take_the_place_of_a_worker_or_a_scheduler(lasting, victim):
    # victim's worker and scheduler are this process; WorkerProcess is another one.
    with pytest.raises(AssertionError):
        WorkerProcess(lasting, "victim")


def test_nobody_speaks_for_an_engine_that_it_did_not_greet_for(lasting, victim, liar):
    with contextlib.closing(
        Connection.open(lasting.path, Hello(PROTOCOL, "worker", "liar"), WAIT_S)
    ) as c:
        with pytest.raises(Refused):
            c.call(AttachWorker("victim", 0, 1, 1, [REGION] * 2), Attached)
        with pytest.raises(Refused):
            c.call(registration("victim"), Registered)
    refused(liar, "invalid", registration("liar"), Registered)
    refused(liar, "refused", registration("victim"), Registered)


@pytest.mark.parametrize(
    ("rank", "world", "replicas", "regions"),
    [
        (-1, 1, 1, [REGION] * 2),
        (1, 1, 1, [REGION] * 2),
        (0, 0, 1, [REGION] * 2),
        (0, 17, 1, [REGION] * 2),
        (0, 4, 3, [REGION] * 2),
        (0, 4, 0, [REGION] * 2),
        (0, 1, 1, []),
        (0, 1, 1, [REGION] * 65),
        (0, 1, 1, [-1, 1]),
        (0, 1, 1, [1 << 60, 1]),
    ],
)
def test_workers_of_impossible_shape_are_refused(lasting, rank, world, replicas, regions):
    with (
        contextlib.closing(
            Connection.open(lasting.path, Hello(PROTOCOL, "worker", "odd"), WAIT_S)
        ) as c,
        pytest.raises(Refused),
    ):
        c.call(AttachWorker("odd", rank, world, replicas, regions), Attached)


def test_a_worker_cannot_say_without_end_of_itself(lasting):
    hello = Hello(PROTOCOL, "worker", "odd")
    with contextlib.closing(Connection.open(lasting.path, hello, WAIT_S)) as c:
        with pytest.raises(Refused, match="65536 bytes"):
            c.call(AttachWorker("odd", 0, 1, 1, [REGION] * 2, bytes(1 << 17)), Attached)
        c.call(AttachWorker("odd", 0, 1, 1, [REGION] * 2, bytes(1 << 16)), Attached)


@pytest.mark.parametrize(
    ("world", "replicas"), [(0, 1), (-1, -2), (17, 1), (2**31 - 1, 1), (2**40, 1), (4, 3), (4, 0)]
)
def test_schedulers_of_impossible_shape_are_refused(lasting, world, replicas):
    """Without a worker there is nothing to compare with; two billion missing ranks must not be listed."""
    with (
        contextlib.closing(
            Connection.open(lasting.path, Hello(PROTOCOL, "scheduler", "odd"), WAIT_S)
        ) as c,
        pytest.raises(Refused, match="workers") as refusal,
    ):
        c.call(registration("odd", world, replicas=replicas), Registered)
    assert refusal.value.code in {"limit", "invalid"}


def test_workers_and_scheduler_must_agree(lasting):
    with contextlib.ExitStack() as stack:
        worker = Connection.open(lasting.path, Hello(PROTOCOL, "worker", "odd"), WAIT_S)
        stack.callback(worker.close)
        worker.call(AttachWorker("odd", 0, 2, 1, [REGION] * 2), Attached)
        scheduler = Connection.open(lasting.path, Hello(PROTOCOL, "scheduler", "odd"), WAIT_S)
        stack.callback(scheduler.close)
        with pytest.raises(Refused, match="its scheduler says 1"):
            scheduler.call(registration("odd", 1), Registered)
        second = Connection.open(lasting.path, Hello(PROTOCOL, "worker", "odd"), WAIT_S)
        stack.callback(second.close)
        with pytest.raises(Refused, match="has 2 workers, not 3"):
            second.call(AttachWorker("odd", 1, 3, 1, [REGION] * 2), Attached)
        second.call(AttachWorker("odd", 1, 2, 1, [REGION] * 3), Attached)
        with pytest.raises(Refused, match="rank 1 has 3 object groups"):
            scheduler.call(registration("odd", 2), Registered)


def test_an_engine_whose_workers_are_not_there_yet_is_told_for_whom_it_waits(lasting):
    with contextlib.ExitStack() as stack:
        scheduler = Connection.open(lasting.path, Hello(PROTOCOL, "scheduler", "slow"), WAIT_S)
        stack.callback(scheduler.close)
        said = [scheduler.call(registration("slow", 3), Registered)]
        for rank in (1, 0, 2):
            worker = Connection.open(lasting.path, Hello(PROTOCOL, "worker", "slow"), WAIT_S)
            stack.callback(worker.close)
            worker.call(AttachWorker("slow", rank, 3, 1, [REGION] * 2), Attached)
            said.append(scheduler.call(registration("slow", 3), Registered))

        assert [(reply.ready, reply.message) for reply in said] == [
            (False, "waiting for rank 0, 1, 2 of 3 to attach"),
            (False, "waiting for rank 0, 2 of 3 to attach"),
            (False, "waiting for rank 2 of 3 to attach"),
            (True, ""),
        ]


def test_ranks_that_hold_the_same_bytes_must_have_the_same_number_of_them(lasting):
    with contextlib.ExitStack() as stack:
        for rank in range(2):
            worker = Connection.open(lasting.path, Hello(PROTOCOL, "worker", "mla"), WAIT_S)
            stack.callback(worker.close)
            worker.call(AttachWorker("mla", rank, 2, 2, [REGION + rank, 7]), Attached)
        scheduler = Connection.open(lasting.path, Hello(PROTOCOL, "scheduler", "mla"), WAIT_S)
        stack.callback(scheduler.close)
        with pytest.raises(Refused, match="ranks 0 and 1 are said to hold the same bytes"):
            scheduler.call(registration("mla", 2, replicas=2), Registered)


def test_before_its_greeting_nobody_gets_anything(lasting):
    for request in (Status(), Clear(), Step(), registration("x")):
        with contextlib.closing(lasting.raw()) as sock:
            answer = exchange(sock, request)
            assert isinstance(answer, Error)
            assert answer.code == "hello"
            assert is_closed(sock)


def test_another_version_is_told_what_to_do(lasting):
    with contextlib.closing(lasting.raw()) as sock:
        answer = exchange(sock, Hello(PROTOCOL + 1, "tool"))

        assert isinstance(answer, Error)
        assert "install the same lmcache-shm on both sides" in answer.message
        assert is_closed(sock)


def test_a_tool_cannot_read_or_write_slots(lasting):
    with contextlib.closing(lasting.tool()) as tool:
        for request, reply in ((Step(), Stepped), (Acquire(b"", 0, 1), Acquired)):
            with pytest.raises(Refused, match="has not registered"):
                tool.call(request, reply)


def test_engines_beyond_the_board_s_rows_are_refused(lasting):
    until(lambda: lasting.status()["clients"] == [], "engines of earlier tests gone")
    with contextlib.ExitStack() as stack:
        for i in range(64):
            worker = Connection.open(lasting.path, Hello(PROTOCOL, "worker", f"many-{i}"), WAIT_S)
            stack.callback(worker.close)
            worker.call(AttachWorker(f"many-{i}", 0, 1, 1, [1] * len(GROUPS)), Attached)
        worker = Connection.open(lasting.path, Hello(PROTOCOL, "worker", "one more"), WAIT_S)
        stack.callback(worker.close)
        with pytest.raises(Refused, match="64 engines"):
            worker.call(AttachWorker("one more", 0, 1, 1, [1] * len(GROUPS)), Attached)


@pytest.mark.parametrize(
    ("server", "says"),
    [
        (
            ["--chunk-size", "32"],
            "the server caches chunks of 32 tokens, this engine wants 16; start the server with --chunk-size 16",
        ),
        (
            ["--no-separate-object-groups"],
            "the server keeps all layers in one object group, the engine has more",
        ),
    ],
    indirect=["server"],
)
def test_an_engine_that_the_servers_options_do_not_fit_is_told_what_to_type(server, says):
    with pytest.raises(Refused, match=says), engine(server):
        pass
