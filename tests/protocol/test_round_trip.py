"""What an engine does in its life, over a real socket."""

import contextlib

import numpy as np
import pytest

from lmcache_shm.arena.layout import SlotState
from lmcache_shm.arena.segment import attach
from lmcache_shm.client.connection import Connection, Refused
from lmcache_shm.protocol.messages import (
    EXISTS,
    PROTOCOL,
    Attached,
    AttachWorker,
    Clear,
    Done,
    GroupInfo,
    Hello,
    List,
    ListReply,
    Registered,
    Status,
    StatusReply,
)
from tests.protocol.harness import (
    CHUNK,
    GROUPS,
    REGION,
    WAIT_S,
    Engine,
    Prefix,
    ServerProcess,
    engine,
    registration,
    rows_of,
)


@pytest.fixture
def one(lasting: ServerProcess):
    with engine(lasting) as made:
        yield made
        made.scheduler.call(Clear(), Done)


def test_every_reply_carries_the_same_boot_id(lasting, one):
    boot = one.scheduler.hello.boot
    prefix = Prefix(1, 3)

    assert one.registered.boot == one.attached.boot == boot
    assert one.acquire(prefix).boot == boot
    assert one.worker.hello.boot == boot
    assert one.scheduler.call(Status(), StatusReply).snapshot["server"]["boot"] == boot.hex()


def test_what_was_committed_is_found_and_pinned(lasting, one):
    prefix = Prefix(2, 5)
    rows = one.store(prefix)
    hit = one.acquire(prefix)

    assert hit.n_chunks == 5
    assert hit.first == [0, 2]  # a window of 40 tokens reaches back into chunk 2 (tokens 32 to 47)
    assert rows_of(hit.rows[0]) == rows[:5]
    assert rows_of(hit.rows[1]) == rows[5 + 2 : 10]
    status = lasting.status()
    assert status["arena"]["slots"]["pinned"] == 8
    one.step(release=[hit.lease])
    assert lasting.status()["arena"]["slots"]["pinned"] == 0


def test_a_reservation_is_invisible_until_its_commit_and_visible_right_after(lasting, one):
    prefix = Prefix(3, 2)
    rows = one.step(prefix.reserve())

    assert one.acquire(prefix).n_chunks == 0
    one.step(commit=np.array(rows, "<i4").tobytes())
    hit = one.acquire(prefix)
    assert hit.n_chunks == 2
    one.step(release=[hit.lease])


def test_only_what_is_missing_is_reserved(lasting, one):
    one.store(Prefix(4, 2))
    rows = one.step(Prefix(4, 4).reserve(1))

    assert rows[:2] == [EXISTS, EXISTS]
    assert min(rows[2:]) >= 0
    one.step(abort=np.array(rows[2:], "<i4").tobytes())


def test_one_step_releases_commits_aborts_and_reserves(lasting, one):
    first, second = Prefix(5, 1), Prefix(6, 1)
    one.store(first)
    hit = one.acquire(first)
    good, bad = one.step(second.reserve())
    rows = one.step(
        Prefix(7, 1).reserve(),
        commit=np.array([good], "<i4").tobytes(),
        abort=np.array([bad], "<i4").tobytes(),
        release=[hit.lease],
    )
    slots = lasting.status()["arena"]["slots"]

    assert (slots["pinned"], slots["reserved"], slots["used"]) == (0, 2, 3)
    one.step(abort=np.array(rows, "<i4").tobytes())


def test_release_is_idempotent(lasting, one):
    prefix = Prefix(8, 2)
    one.store(prefix)
    hit, other = one.acquire(prefix), one.acquire(prefix)
    one.step(release=[hit.lease])
    one.step(release=[hit.lease, hit.lease])

    assert lasting.status()["arena"]["slots"]["pinned"] == 2 + 2
    one.step(release=[other.lease])


def test_a_new_look_up_can_replace_an_old_lease(lasting, one):
    prefix = Prefix(9, 3)
    one.store(prefix)
    hit = one.acquire(prefix)
    again = one.acquire(prefix, replaces=hit.lease)

    assert again.lease != hit.lease
    assert lasting.status()["clients"][0]["leases"] == 1
    one.step(release=[again.lease])


def test_slots_hold_the_regions_of_all_ranks_without_overlap(lasting):
    engine_id, world, replicas = "sixteen", 4, 2
    workers = []
    regions = [[100, 64], [100, 64], [333, 0], [333, 0]]
    with contextlib.ExitStack() as stack:
        scheduler = Connection.open(lasting.path, Hello(PROTOCOL, "scheduler", engine_id), WAIT_S)
        stack.callback(scheduler.close)
        request = registration(engine_id, world, replicas=replicas)
        answer = scheduler.call(request, Registered)
        assert not answer.ready
        assert "rank 0, 1, 2, 3 of 4" in answer.message
        for rank in range(world):
            worker = Connection.open(lasting.path, Hello(PROTOCOL, "worker", engine_id), WAIT_S)
            stack.callback(worker.close)
            worker.call(AttachWorker(engine_id, rank, world, replicas, regions[rank]), Attached)
            workers.append(worker)
        answer = scheduler.call(request, Registered)

    assert answer.ready
    assert answer.region_offsets == [[0, 0, 128, 128], [0, 0, 64, 64]]
    assert answer.checksum_offset == [128 + 384, 64]
    assert answer.token_offset == [512 + 8 * 4, 64 + 8 * 4]
    assert answer.slot_bytes == [at + 4 * CHUNK for at in answer.token_offset]


def test_clear_forgets_one_namespace_or_one_salt(lasting, one):
    prefix = Prefix(10, 3)
    one.store(prefix)
    namespace = one.registered.namespace
    with contextlib.closing(lasting.tool()) as tool:
        assert tool.call(Clear(namespace, b"nobody's"), Done).count == 0
        assert one.acquire(prefix).n_chunks == 3
        assert tool.call(Clear(namespace + 1), Done).count == 0
        assert tool.call(Clear(namespace), Done).count == 6

    assert one.acquire(prefix).n_chunks == 0


def test_a_list_shows_what_is_cached(lasting, one):
    one.store(Prefix(11, 2))
    entries = one.scheduler.call(List(one.registered.namespace, 10), ListReply).entries

    assert [entry["chunk"] for entry in entries] == [0, 1]


def test_engines_of_one_model_share_what_they_store(lasting, one):
    prefix = Prefix(12, 4)
    one.store(prefix)
    with engine(lasting, "another") as another:
        assert another.registered.namespace == one.registered.namespace
        assert another.registered.client != one.registered.client
        assert another.acquire(prefix).n_chunks == 4


def test_engines_of_different_models_do_not(lasting, one):
    prefix = Prefix(13, 4)
    one.store(prefix)
    with engine(lasting, "another", descriptor=b'{"model":"other"}') as another:
        assert another.registered.namespace != one.registered.namespace
        assert another.acquire(prefix).n_chunks == 0


@pytest.mark.parametrize("server", [["--chunk-size", "32"]], indirect=True)
def test_a_server_with_a_chunk_size_refuses_another_and_says_what_to_type(server):
    with pytest.raises(Refused, match=r"--chunk-size 16 \(or auto\)"):
        Engine(server)


@pytest.mark.parametrize("server", [["--no-separate-object-groups"]], indirect=True)
def test_a_server_of_one_object_group_says_so_and_refuses_two(server):
    with contextlib.closing(server.tool()) as tool:
        assert not tool.hello.separate
    with pytest.raises(Refused, match="one object group"):
        Engine(server)


def test_a_chunk_that_is_larger_than_the_arena_is_refused_with_the_remedy(lasting):
    with contextlib.ExitStack() as stack:
        worker = Connection.open(lasting.path, Hello(PROTOCOL, "worker", "huge"), WAIT_S)
        stack.callback(worker.close)
        worker.call(AttachWorker("huge", 0, 1, 1, [1 << 30, REGION]), Attached)
        scheduler = Connection.open(lasting.path, Hello(PROTOCOL, "scheduler", "huge"), WAIT_S)
        stack.callback(scheduler.close)
        with pytest.raises(Refused, match=r"1024\.\d MiB.*--l1-size-gb"):
            scheduler.call(registration("huge"), Registered)


def test_a_store_beyond_the_arena_evicts_the_oldest_at_once(lasting, one):
    size = -(-one.registered.slot_bytes[0] // 4096) * 4096
    chunks = lasting.status()["arena"]["data_bytes"] // size // 2 // 4
    for number in range(20, 26):
        rows = one.store(Prefix(number, chunks))
        assert min(rows) >= 0

    newest = one.acquire(Prefix(25, chunks))
    assert newest.n_chunks == chunks
    assert one.acquire(Prefix(20, chunks)).n_chunks < chunks
    one.step(release=[newest.lease])


def test_the_table_says_what_the_server_says(lasting, one):
    rows = one.store(Prefix(30, 3))
    arena = attach(lasting.instance, writable_data=False)
    try:
        assert arena.arena_id == one.registered.arena_id
        assert set(arena.hot["state"][rows].tolist()) == {SlotState.COMMITTED}
    finally:
        arena.close()


def test_unknown_rules_and_groups_without_end_are_refused(lasting):
    for groups in (
        [],
        [GroupInfo("x", "magic")] * 2,
        GROUPS * 40,
        [GroupInfo("w", "window", 0)] * 2,
    ):
        with pytest.raises(Refused):
            Engine(lasting, groups=groups)
