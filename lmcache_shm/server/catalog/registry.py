"""Which namespaces there are; kept in the meta segment, dropped when they hold nothing and nobody uses them."""

from collections.abc import Callable, Sequence
from typing import Any

from lmcache_shm.server.catalog.namespaces import (
    MAX_NAMESPACES,
    CatalogError,
    Group,
    GroupSpec,
    Namespace,
    NamespaceStore,
)
from lmcache_shm.server.catalog.slots import Slots


class Registry:
    def __init__(
        self, slots: Slots, evict_all: Callable[[Namespace], None], limit: int = MAX_NAMESPACES
    ) -> None:
        """`evict_all` empties a namespace without users, as far as it can."""
        self._slots = slots
        self._evict_all = evict_all
        self._limit = limit
        self._store = NamespaceStore(slots.arena)
        self._by_identity: dict[tuple[Any, ...], Namespace] = {}
        self._next_id = 1

    def load(self) -> None:
        """After a warm restart. Raises CatalogError when the table is damaged."""
        self._next_id, found = self._store.load()
        for space in found:
            self._add(space)

    def register(
        self, descriptor: bytes, groups: Sequence[GroupSpec], chunk_size: int
    ) -> Namespace:
        """The namespace with this identity, made if need be; one user more. Raises CatalogError."""
        self._check(groups, chunk_size)
        made = [Group(i, spec) for i, spec in enumerate(groups)]
        space = Namespace(self._next_id, descriptor, chunk_size, made)
        known = self._by_identity.get(space.identity)
        if known is None:
            known = self._create(space)
        else:
            for group, spec in zip(known.groups, groups, strict=True):
                group.spec = spec  # what is said for people may have changed
        known.users += 1
        return known

    def leave(self, space: Namespace) -> None:
        """One user less."""
        space.users = max(space.users - 1, 0)

    def _create(self, space: Namespace) -> Namespace:
        if len(self._slots.spaces) >= self._limit:
            self._make_room()
        while True:
            self._add(space)
            self._next_id = space.id + 1
            try:
                self._store.save(self._next_id, list(self._slots.spaces.values()))
            except CatalogError:
                self._remove(space)
                if not self._drop_idle() and not self._drop_coldest():
                    raise
                continue
            return space

    def _make_room(self) -> None:
        if not self._drop_idle() and not self._drop_coldest():
            raise CatalogError(
                f"all {len(self._slots.spaces)} namespaces are in use by connected engines or have "
                "slots in flight; stop some engines"
            )

    def _drop_idle(self) -> bool:
        """Drop all namespaces that hold nothing and have no user."""
        idle = [space for space in self._slots.spaces.values() if not space.users and space.empty]
        for space in idle:
            self._remove(space)
        self._slots.counters["namespaces_dropped"] += len(idle)
        return bool(idle)

    def _drop_coldest(self) -> bool:
        """Empty and drop the namespace without users that was used least recently."""
        unused = [space for space in self._slots.spaces.values() if not space.users]
        for space in sorted(unused, key=lambda space: space.last_tick):
            self._evict_all(space)
            if space.empty:
                self._remove(space)
                self._slots.counters["namespaces_dropped"] += 1
                return True
        return False

    def _add(self, space: Namespace) -> None:
        self._slots.spaces[space.id] = space
        self._by_identity[space.identity] = space

    def _remove(self, space: Namespace) -> None:
        del self._slots.spaces[space.id]
        del self._by_identity[space.identity]

    def _check(self, groups: Sequence[GroupSpec], chunk_size: int) -> None:
        if chunk_size < 1:
            raise CatalogError(f"a chunk of {chunk_size} tokens; say how long a chunk is")
        if not 1 <= len(groups) <= 1 << 16:
            raise CatalogError(f"{len(groups)} object groups; 1 to 65536 are possible")
        allocator = self._slots.allocator
        for spec in groups:
            if spec.slot_bytes < 1:
                raise CatalogError(f"group {spec.name}: a slot of {spec.slot_bytes} bytes")
            if not allocator.fits(spec.slot_bytes):
                room = allocator.room_slabs() * allocator.slab_bytes
                raise CatalogError(
                    f"one chunk of group {spec.name} takes {spec.slot_bytes / 2**20:.1f} MiB, the "
                    f"arena has room for {room / 2**20:.1f} MiB; start the server with a larger "
                    "--l1-size-gb or a smaller --chunk-size"
                )
