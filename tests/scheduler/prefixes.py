"""Which prefix a chain key stands for: learned from the tokens of every request that there was."""

import hashlib
from collections.abc import Callable
from typing import Any

from lmcache_shm.arena.job import Adapter
from lmcache_shm.protocol.keys import ChunkKeys
from lmcache_shm.vllm.identity import extra_of
from tests.scheduler.content import Stream
from tests.scheduler.engine import Engine

Known = dict[bytes, tuple[Stream, int]]
"""Key → the prefix, and the number of the chunk at its end."""


class Prefixes:
    """Of one engine's requests; `known` may be shared by engines that share an arena."""

    def __init__(self, engine: Engine, seed_of: Callable[[int], bytes], known: Known) -> None:
        self.known = known
        self._engine = engine
        self._chunk = engine.setup.chunk
        self._seed_of = seed_of
        self._keys: dict[tuple[int, str], tuple[ChunkKeys, Stream]] = {}

    def of_key(self, key: bytes, namespace: int) -> tuple[Stream, int] | None:
        """None: no request ever had such a prefix."""
        if key not in self.known:
            for req_id in self._engine.asked:
                self.keys(namespace, req_id)
        return self.known.get(key)

    def keys(self, namespace: int, req_id: str) -> ChunkKeys:
        """The keys of all whole chunks that a request has by now."""
        asked, size = self._engine.asked[req_id], self._chunk
        request: Any = asked.request
        tokens = list(request.all_token_ids)
        at = namespace, req_id
        if at not in self._keys:
            self._keys[at] = (
                ChunkKeys(self._seed_of(namespace), size), Stream(asked.identity, ()),
            )  # fmt: skip
        keys, stream = self._keys[at]
        if tokens[: len(stream.tokens)] != stream.tokens:
            self._engine.oracle.fail("engine", f"{req_id} has changed tokens")
        stream.extend(tokens[len(stream.tokens) :])
        extra = extra_of(request, size, self._adapter(asked.adapter))
        for chunk in range(len(keys), keys.extend(tokens, None, extra)):
            end = (chunk + 1) * size
            other, number = self.known.setdefault(keys.key(chunk), (stream, chunk))
            if other.after(end) != stream.after(end) or number != chunk:
                self._engine.oracle.fail(
                    "key", f"one key for two prefixes ({req_id}, chunk {chunk})"
                )
        return keys

    def _adapter(self, content: str | None) -> Adapter | None:
        """Every rank has loaded the same."""
        if content is None:
            return None
        digests = [hashlib.sha256(content.encode()).digest()] * len(self._engine.workers.ranks)
        return Adapter(0, hashlib.sha256(b"".join(digests)).digest(), (), "")
