"""The rows of one engine: every change of hands, and what the table says afterwards."""

from collections.abc import Iterator

import numpy as np
import pytest

from lmcache_shm.arena.layout import SlotState
from lmcache_shm.protocol.rules import Full
from lmcache_shm.server.catalog.catalog import Catalog
from lmcache_shm.server.engines import Denied, Ownership
from tests.unit.server import rig
from tests.unit.server.rig import SLAB, Prefix, spec

CLIENT = 3


class Owned:
    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.space = catalog.register(b"owned", [spec(Full(), 4096)])
        self.own = Ownership(catalog, CLIENT)

    def reserve(self, name: str, n: int) -> np.ndarray:
        """Rows for a prefix of n chunks."""
        prefix = Prefix(self.space, name, n)
        return self.own.reserve(
            self.space.id,
            {
                "groups": np.zeros(n, np.uint16),
                "keys": prefix.keys,
                "parents": prefix.parents,
                "chunks": np.arange(n, dtype=np.uint32),
                "digests": bytes(16 * n),
                "salts": np.zeros(n, np.uint64),
            },
        )

    def check(self) -> None:
        """The sets are what the table has."""
        hot = self.catalog.arena.hot
        mine = hot["client"] == CLIENT
        for state, rows in (
            (SlotState.RESERVED, self.own.reserved),
            (SlotState.QUARANTINED, self.own.quarantined),
        ):
            assert set(np.flatnonzero(mine & (hot["state"] == state)).tolist()) == rows
        assert self.catalog.check() == []


@pytest.fixture
def owned() -> Iterator[Owned]:
    with rig.arena_of(32 * SLAB) as arena:
        made = Owned(Catalog(arena))
        yield made
        made.check()


def packed(rows: np.ndarray) -> bytes:
    return rows.astype("<i4").tobytes()


def test_rows_are_reserved_until_they_are_committed_or_aborted(owned: Owned):
    rows = owned.reserve("a", 6)
    owned.check()
    owned.own.commit(owned.own.named(packed(rows[:2]), "commit"), [])
    owned.own.abort(owned.own.named(packed(rows[2:4]), "abort"))

    assert set(rows[4:].tolist()) == owned.own.reserved
    with pytest.raises(Denied, match="not reserved by you"):
        owned.own.named(packed(rows[:1]), "commit")
    with pytest.raises(Denied, match="named twice"):
        owned.own.named(packed(rows[[4, 4]]), "commit")


def test_lost_rows_are_quarantined_while_somebody_may_write(owned: Owned):
    rows = owned.reserve("a", 4)

    assert owned.own.lose(writers=True) == 4
    assert set(rows.tolist()) == owned.own.quarantined
    owned.check()
    assert owned.own.end_quarantine() == 4


def test_lost_rows_without_a_writer_are_free(owned: Owned):
    owned.reserve("a", 4)

    assert owned.own.lose(writers=False) == 0
    assert not owned.own.reserved | owned.own.quarantined


def test_who_registers_again_keeps_only_busy_rows_and_can_only_abort_them(owned: Owned):
    rows = owned.reserve("a", 4)
    owned.own.lose(writers=True)
    owned.own.register(packed(rows[:1]))

    assert owned.own.quarantined == {int(rows[0])}
    with pytest.raises(Denied):
        owned.own.named(packed(rows[:1]), "commit")
    owned.own.abort(owned.own.named(packed(rows[:1]), "abort", quarantined=True))
    assert not owned.own.quarantined


def test_rows_of_a_request_that_failed_half_way_are_free_again(owned: Owned):
    known = owned.reserve("a", 2)
    prefix = Prefix(owned.space, "b", 3)
    orphaned = rig.reserve(owned.catalog, owned.space, prefix, range(3), client=CLIENT)

    owned.own.abort_orphaned()

    assert (owned.catalog.arena.hot["state"][orphaned] == SlotState.FREE).all()
    assert set(known.tolist()) == owned.own.reserved
