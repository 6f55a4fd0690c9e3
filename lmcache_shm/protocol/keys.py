"""Namespace descriptors, and chain keys: 128-bit xxh3 over (parent key, token bytes, extra identity).

A descriptor lists everything that must match for bytes to be exchangeable; its hash is the parent key of all
first chunks. Keys are the same bytes in every process and every run. Token bytes are the ids as little-endian
u32, so every chunk has the same number of them. Keys are not collision-proof: a hit is confirmed by the token
bytes in the slot and by `extra_digest`.
"""

import hashlib
import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from lmcache_shm.protocol.messages import KEY

NO_DIGEST = bytes(KEY)
TOKEN = 4
"""Bytes of a token id."""
PIECE = 8192
"""Tokens encoded at a time."""

_digest = xxhash.xxh3_128_digest


def canonical(facts: Mapping[str, Any]) -> bytes:
    """The descriptor of a namespace: sorted JSON, the same bytes for equal facts."""
    text = json.dumps(
        facts, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode()


def describe(descriptor: bytes) -> dict[str, Any]:
    """The facts of a descriptor; {"descriptor": hex} if its bytes are not a JSON object."""
    try:
        facts = json.loads(descriptor)
    except ValueError:
        facts = None
    return facts if isinstance(facts, dict) else {"descriptor": descriptor.hex()}


def seed(descriptor: bytes) -> bytes:
    """The parent key of every first chunk in the namespace with this descriptor."""
    return _digest(descriptor)


def split(packed: bytes) -> list[bytes]:
    """Packed keys as a list of KEY bytes each."""
    keys: list[bytes] = np.frombuffer(packed, f"V{KEY}").tolist()
    return keys


def encode_tokens(token_ids: Sequence[int]) -> bytes:
    """Token bytes of ids from 0 to 2**32 - 1; raises OverflowError for other numbers, TypeError for other objects."""
    return array("I", token_ids).tobytes()


def extra_digest(extra: bytes) -> bytes:
    """16 bytes of blake2b of the extra identity; zeros when there is none."""
    return hashlib.blake2b(extra, digest_size=KEY).digest() if extra else NO_DIGEST


def salt_word(salt: bytes) -> int:
    """The u64 that stands for a cache salt in the slot table; 0 when there is none."""
    return xxhash.xxh3_64_intdigest(salt) or 1 if salt else 0


def next_key(parent: bytes, encoded: bytes | memoryview, extra: bytes) -> bytes:
    """Key of one chunk. All chunks of a namespace have the same number of token bytes, so these never run into `extra`."""
    return _digest(parent + encoded + extra)


def _encode(token_ids: Sequence[int], start: int, end: int) -> "array[int]":
    """Token ids [start, end) as u32."""
    if start == 0 and isinstance(token_ids, list) and 8 * (len(token_ids) - end) < end:
        ids = array("I", token_ids)  # a slice first would cost a fifth more
        del ids[end:]
        return ids
    ids = array("I")
    # In pieces: one slice of everything would need fresh pages from the kernel.
    for at in range(start, end, PIECE):
        ids += array("I", token_ids[at : min(at + PIECE, end)])
    return ids


class ChunkKeys:
    """The keys of one request, extended as its tokens become known. Append-only.

    Packed, for each chunk: `keys` and `digests`, KEY bytes. `tokens`: the token ids of the chunks, u32.
    """

    __slots__ = ("chunk_bytes", "chunk_size", "digests", "keys", "seed", "tokens")

    def __init__(self, seed_key: bytes, chunk_size: int) -> None:
        self.seed = seed_key
        self.chunk_size = chunk_size
        self.chunk_bytes = TOKEN * chunk_size
        self.keys = bytearray()
        self.tokens = array("I")
        self.digests = bytearray()

    def __len__(self) -> int:
        """Chunks hashed so far."""
        return len(self.keys) // KEY

    def extend(
        self,
        token_ids: Sequence[int],
        upto_chunks: int | None = None,
        extra_of: Callable[[int], bytes] | None = None,
    ) -> int:
        """Hash whole chunks of `token_ids` (all tokens of the request) up to chunk `upto_chunks`, exclusive.

        `extra_of(i)` gives the canonical extra identity of chunk i. Returns the number of chunks hashed
        so far. Chunks hashed before are not hashed again. Raises as `encode_tokens`.
        """
        size, done = self.chunk_size, len(self)
        whole = len(token_ids) // size
        end = whole if upto_chunks is None else min(whole, upto_chunks)
        if end <= done:
            return done
        parent = self.key(done - 1) if done else self.seed
        tokens = _encode(token_ids, done * size, end * size)
        keys: list[bytes] = []
        digests: list[bytes] = []
        with memoryview(tokens).cast("B") as encoded:
            for chunk in range(done, end):
                at = self.chunk_bytes * (chunk - done)
                if extra_of is None:
                    parent = _digest(parent + encoded[at : at + self.chunk_bytes])
                else:
                    extra = extra_of(chunk)
                    parent = next_key(parent, encoded[at : at + self.chunk_bytes], extra)
                    digests.append(extra_digest(extra))
                keys.append(parent)
        # Append all three last, so an exception leaves them consistent.
        if done:
            self.tokens += tokens
        else:
            self.tokens = tokens  # the whole prompt: no second copy
        self.digests += b"".join(digests) if digests else bytes(KEY * (end - done))
        self.keys += b"".join(keys)
        return end

    def key(self, chunk: int) -> bytes:
        """KEY bytes of one chunk."""
        return bytes(self.keys[chunk * KEY : (chunk + 1) * KEY])

    def split(self, first: int, end: int) -> list[bytes]:
        """KEY bytes of each of the chunks [first, end)."""
        return split(bytes(self.keys[first * KEY : end * KEY]))

    def token_bytes(self, chunk: int, end: int | None = None) -> memoryview:
        """`chunk_bytes` bytes a chunk of one chunk, or of chunks [chunk, end)."""
        end = chunk + 1 if end is None else end
        return memoryview(self.tokens)[chunk * self.chunk_size : end * self.chunk_size].cast("B")

    def parents(self, first: int = 0, end: int | None = None) -> bytes:
        """Parent keys of chunks [first, end), packed."""
        end = len(self) if end is None else end
        if end <= first:
            return b""
        if first:
            return bytes(self.keys[(first - 1) * KEY : (end - 1) * KEY])
        return self.seed + bytes(self.keys[: (end - 1) * KEY])
