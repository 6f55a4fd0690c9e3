"""Random operations on a catalog over a tiny arena, beside a model that knows what must be true.

The model does not predict which slots leave; it knows which may not (pinned, reserved, quarantined, a prefix's
own beginning), that nothing leaves except to make room, and what every look-up must find in what is left.
"""

from collections import Counter
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lmcache_shm.arena import segment
from lmcache_shm.arena.layout import SlotState
from lmcache_shm.protocol.messages import BUSY, EXISTS, FULL
from lmcache_shm.protocol.rules import ChunkedLocal, Full, Recurrent, Window
from lmcache_shm.server.catalog.catalog import Catalog
from tests.unit.server import rig
from tests.unit.server.rig import CHUNK, SLAB, Prefix, spec, usable_by_force

Name = tuple[int, int, bytes]

# Slot sizes that do not divide a slab, one larger than a slab, one of a single byte.
MODELS = [
    [spec(Full(), 12345), spec(Window(40), 5000)],
    [spec(Recurrent(), 70001), spec(Full(), 20000), spec(Recurrent(), 1)],
    [spec(Full(), 12345)],
    [spec(ChunkedLocal(32), 33333), spec(Window(3), 5000)],
]
PREFIXES = ("a", "b", "c", "d")
CHUNKS = 7
DATA_BYTES = [SLAB * 3, SLAB * 5 + 4097, SLAB * 9, SLAB * 20 + 3333]


class CatalogMachine(RuleBasedStateMachine):
    arena: segment.Arena

    @initialize(data_bytes=st.sampled_from(DATA_BYTES), max_slots=st.sampled_from([None, 40, 161]))
    def start(self, data_bytes: int, max_slots: int | None) -> None:
        self._context = rig.arena_of(data_bytes, max_slots=max_slots)
        self.arena = self._context.__enter__()
        self.catalog = Catalog(self.arena)
        self._register()
        self.committed: dict[Name, int] = {}
        self.reserved: dict[
            int, tuple[Name, int, bool]
        ] = {}  # row → name, client, cleared meanwhile
        self.quarantined: dict[int, int] = {}
        self.leases: list[list[list[int]]] = []
        self.cleared_pins: set[int] = set()
        self.meant: dict[int, tuple[Name, int]] = {}  # row → chunk, generation

    def _register(self) -> None:
        self.spaces = [
            self.catalog.register(b"model %d" % i, groups) for i, groups in enumerate(MODELS)
        ]
        self.prefixes = [
            {name: Prefix(space, name, CHUNKS, salt=i % 2) for i, name in enumerate(PREFIXES)}
            for space in self.spaces
        ]

    # ------------------------------------------------------------------------------------ model
    def pins(self) -> Counter[int]:
        return Counter(row for lease in self.leases for rows in lease for row in rows)

    def expect(self, *, may_evict: bool = False) -> dict[Name, int]:
        """Compare what may be found with the model; what has left, which may only be what was evicted."""
        now = rig.visible(self.catalog)
        gone = {name: row for name, row in self.committed.items() if name not in now}
        assert now == {name: row for name, row in self.committed.items() if name not in gone}
        assert may_evict or not gone
        assert not set(gone.values()) & set(self.pins())
        self.committed = now
        return gone

    def blocked(self) -> bool:
        return bool(self.reserved or self.quarantined or self.pins())

    # -------------------------------------------------------------------------------- operations
    @rule(
        which=st.integers(0, len(MODELS) - 1),
        name=st.sampled_from(PREFIXES),
        first=st.integers(0, CHUNKS - 1),
        count=st.integers(1, CHUNKS),
        groups=st.sets(st.integers(0, 2), min_size=1),
        client=st.integers(0, 2),
        by_chunk=st.booleans(),
        repeat=st.booleans(),
    )
    def reserve(self, which, name, first, count, groups, client, by_chunk, repeat) -> None:
        space, prefix = self.spaces[which], self.prefixes[which][name]
        groups = [g for g in sorted(groups) if g < len(space.groups)]
        chunks = range(first, min(first + count, CHUNKS))
        entries = [(prefix, c, g) for g in groups for c in chunks]
        if by_chunk:
            entries.sort(key=lambda entry: entry[1])
        if repeat and entries:
            entries.append(entries[0])
        if not entries:
            return
        before, was_blocked = dict(self.committed), self.blocked()
        pending = {owner: row for row, (owner, _, dropped) in self.reserved.items() if not dropped}
        had_place = {
            g: self.catalog._slots.allocator.extents_of(space.groups[g].size) for g in groups
        }

        rows = rig.reserve_all(self.catalog, space, entries, client)

        gone = self.expect(may_evict=True)
        seen: set[Name] = set()
        for (_, chunk, group), row in zip(entries, rows, strict=True):
            owner = space.id, group, prefix.key(chunk)
            if owner in before:
                # It may have had to leave for another group or an earlier chunk of the same request.
                assert row == EXISTS or (owner in gone and len(entries) > 1)
            elif owner in pending or (owner in seen and row < 0):
                assert row in {BUSY, FULL}
            else:
                assert row >= 0 or row == FULL
            seen.add(owner)
            if row >= 0:
                assert row not in self.reserved
                assert row not in self.quarantined
                assert row not in self.committed.values()
                self.reserved[row] = owner, client, False
        # A state is of no use without the chunk of full attention that found no room.
        useful = space.groups[groups[0]].full or (
            bytes(prefix.key(0)) not in self.catalog._reserver._refused
        )
        if not was_blocked and first == 0 and len(groups) == 1 and useful and rows[0] != EXISTS:
            assert rows[0] >= 0, "the first chunk of a prefix finds room when nothing is held"
        if len(groups) == 1 and space.groups[groups[0]].full and had_place[groups[0]]:
            self._beginning_stayed(space, prefix, groups[0], first, before, gone)

    @staticmethod
    def _beginning_stayed(space, prefix, group, first, before, gone) -> None:
        for chunk in range(first - 1, -1, -1):
            owner = space.id, group, prefix.key(chunk)
            if owner not in before:
                return
            assert owner not in gone, "a prefix evicted its own beginning"

    @rule(
        which=st.integers(0, len(MODELS) - 1),
        name=st.sampled_from(PREFIXES),
        first=st.sampled_from([0, 0, 0, 2, 5]),
        groups=st.sampled_from([{0}, {1}, {0, 1, 2}]),
    )
    def store(self, which, name, first, groups) -> None:
        """What engines do most: the rest of a prefix, written and published."""
        before = set(self.reserved)
        self.reserve(which, name, first, CHUNKS, groups, 0, False, False)
        self._commit(sorted(set(self.reserved) - before))

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def commit(self, data) -> None:
        rows = data.draw(st.lists(st.sampled_from(sorted(self.reserved)), min_size=1, unique=True))
        self._commit(rows)

    def _commit(self, rows: list[int]) -> None:
        published = 0
        for row in rows:
            owner, _, dropped = self.reserved.pop(row)
            if not dropped:
                self.committed[owner] = row
                published += 1

        assert self.catalog.commit(rows) == published
        self.expect()

    @precondition(lambda self: self.reserved or self.quarantined)
    @rule(data=st.data())
    def abort(self, data) -> None:
        known = sorted({**self.reserved, **self.quarantined})
        rows = data.draw(st.lists(st.sampled_from(known), min_size=1, unique=True))

        assert self.catalog.abort(rows) == len(rows)
        for row in rows:
            self.reserved.pop(row, None)
            self.quarantined.pop(row, None)
        self.expect()

    @rule(
        what=st.sampled_from(["lose_client", "client_is_dead", "clear", "clear", "restart"]),
        client=st.integers(0, 2),
        which=st.none() | st.integers(0, len(MODELS) - 1),
        salt=st.none() | st.integers(0, 1),
    )
    def accident(self, what, client, which, salt) -> None:
        """Rarer than the rest, or nothing would ever be full."""
        if what == "clear":
            self.clear(which, salt)
        elif what == "restart":
            self.restart()
        else:
            getattr(self, what)(client)

    def lose_client(self, client) -> None:
        rows = [row for row, (_, owner, _) in self.reserved.items() if owner == client]

        assert self.catalog.quarantine(rows) == len(rows)
        for row in rows:
            del self.reserved[row]
            self.quarantined[row] = client
        self.expect()

    def client_is_dead(self, client) -> None:
        rows = [row for row, owner in self.quarantined.items() if owner == client]

        assert self.catalog.unquarantine(client) == len(rows)
        for row in rows:
            del self.quarantined[row]
        self.expect()

    @rule(
        data=st.data(),
        num_tokens=st.just((CHUNKS + 1) * CHUNK) | st.integers(0, (CHUNKS + 1) * CHUNK),
        part=st.just(0.0) | st.floats(0, 1),
    )
    def acquire(self, data, num_tokens, part) -> None:
        stored = {(space, key) for space, _, key in self.committed}
        begun = [
            (which, name)
            for which, space in enumerate(self.spaces)
            for name, prefix in self.prefixes[which].items()
            if (space.id, prefix.key(0)) in stored
        ]
        anything = [(which, name) for which in range(len(MODELS)) for name in PREFIXES]
        which, name = data.draw(st.sampled_from(begun or anything))
        space, prefix = self.spaces[which], self.prefixes[which][name]
        local = int(num_tokens * part)
        rules = [group.spec.rule for group in space.groups]
        present = [
            [(space.id, g, prefix.key(c)) in self.committed for c in range(CHUNKS)]
            for g in range(len(rules))
        ]
        expected = usable_by_force(CHUNK, num_tokens, local, rules, present)

        hit = self.catalog.acquire(space.id, prefix.keys, local, num_tokens)

        assert hit.n_chunks == expected
        for g, (first, rows) in enumerate(zip(hit.first, hit.rows, strict=True)):
            for chunk, row in enumerate(rows.tolist(), first):
                assert self.committed[space.id, g, prefix.key(chunk)] == row
            assert not expected or first + len(rows) == expected
        if expected:
            self.leases.append([rows.tolist() for rows in hit.rows])
        self.expect()

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data) -> None:
        lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        for rows in lease:
            self.catalog.release(np.array(rows, np.int32))
        self.cleared_pins &= set(self.pins())
        self.expect()

    def clear(self, which, salt) -> None:
        ids = {space.id for i, space in enumerate(self.spaces) if which in {None, i}}
        salted = {
            (space.id, prefix.key(c))
            for i, space in enumerate(self.spaces)
            for prefix in self.prefixes[i].values()
            for c in range(CHUNKS)
            if salt in {None, prefix.salt}
        }

        def meant(owner: Name) -> bool:
            return owner[0] in ids and (owner[0], owner[2]) in salted

        count = self.catalog.clear(None if which is None else self.spaces[which].id, salt)

        pins = self.pins()
        lost = {owner: row for owner, row in self.committed.items() if meant(owner)}
        assert count == len(lost)
        self.cleared_pins |= {row for row in lost.values() if pins[row]}
        self.committed = {o: row for o, row in self.committed.items() if o not in lost}
        self.reserved = {
            row: (owner, client, dropped or meant(owner))
            for row, (owner, client, dropped) in self.reserved.items()
        }
        self.expect()

    def restart(self) -> None:
        """The server is killed; a new one adopts the arena. Clients' leases are gone with it."""
        name, geometry = self.arena.instance, self.arena.geometry
        self.arena.close()
        self.arena = segment.adopt(name, geometry)
        self.catalog = Catalog(self.arena)
        found = self.catalog.recover()
        assert found["damaged"] == 0
        assert found["slots"] == len(self.committed)
        assert found["dropped"] == len(self.reserved) + len(self.quarantined) + len(
            self.cleared_pins
        )
        self.reserved, self.quarantined, self.leases = {}, {}, []
        self.cleared_pins.clear()
        self._register()
        self.expect()

    # ------------------------------------------------------------------------------- always true
    @invariant()
    def consistent(self) -> None:
        if not hasattr(self, "catalog"):
            return
        assert self.catalog.check() == []
        state, pins = self.arena.hot["state"], self.arena.hot["pins"]
        for states, rows in (
            (SlotState.RESERVED, set(self.reserved)),
            (SlotState.QUARANTINED, set(self.quarantined)),
            (SlotState.COMMITTED, set(self.committed.values()) | self.cleared_pins),
        ):
            assert rows == set(np.flatnonzero(state == states).tolist())
        expected = self.pins()
        assert {row: n for row, n in enumerate(pins.tolist()) if n} == dict(expected)
        self._generations()

    def _generations(self) -> None:
        """A row keeps its generation as long as it means the same chunk; afterwards it has another one."""
        now = self.arena.hot["generation"]
        means: dict[int, Any] = {row: name for name, row in self.committed.items()}
        means |= {row: name for row, (name, _, _) in self.reserved.items()}
        means |= {row: self.meant[row][0] for row in [*self.cleared_pins, *self.quarantined]}
        for row, (name, generation) in self.meant.items():
            assert now[row] == generation if means.get(row) == name else now[row] > generation
        self.meant = {row: (name, int(now[row])) for row, name in means.items()}

    @invariant()
    def bytes_add_up(self) -> None:
        if hasattr(self, "catalog"):
            arena = self.catalog.snapshot()["arena"]
            assert sum(arena["bytes"].values()) == self.arena.data_bytes
            assert min(arena["bytes"].values()) >= 0

    def teardown(self) -> None:
        if hasattr(self, "catalog"):
            # The context still holds the first mapping; the name may by now be another object's.
            self.arena.unlink()
            self.arena.close()
            self._context.gen.close()


CatalogMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip
TestCatalog = CatalogMachine.TestCase
