"""Chain keys: 128-bit xxh3 over (parent key, the chunk's token bytes, the chunk's extra identity).

The same bytes in every process and every run. Token bytes are the ids as little-endian u32, so every
chunk has the same number of them. Not collision-proof: a hit is confirmed by the token bytes in the
slot and by `extra_digest`.
"""

import hashlib
import mmap
from array import array
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

KEY = 16
"""Bytes of a key."""
NO_DIGEST = bytes(KEY)
TOKEN = 4
"""Bytes of a token id."""
PIECE = 8192
"""Tokens that are encoded at a time."""

_digest = xxhash.xxh3_128_digest


def seed(namespace: bytes) -> bytes:
    """The parent key of every first chunk in the namespace with this canonical descriptor."""
    return _digest(namespace)


def encode_tokens(token_ids: Sequence[int]) -> bytes:
    """Token bytes of ids from 0 to 2**32 - 1; raises OverflowError for others, TypeError for what is none."""
    return array("I", token_ids).tobytes()


def same_tokens(
    data: mmap.mmap, places: npt.NDArray[np.uint64], tokens: bytes | memoryview
) -> bool:
    """Whether the token bytes of n chunks stand at `places`, u64[n] byte offsets in `data`; `tokens`: those of all, packed."""
    if not len(places):
        return not tokens
    nbytes = len(tokens) // len(places)
    starts = len(data) - nbytes + 1  # every byte is one, so any place may be looked at
    if int(places.max()) >= starts:
        return False
    slots = np.ndarray((starts,), f"V{nbytes}", data, strides=(1,))
    wanted = np.frombuffer(tokens, "<u4").reshape(len(places), -1)
    some = max(2 * PIECE * TOKEN // nbytes, 1)
    return all(
        np.array_equal(slots[places[at : at + some]].view("<u4"), wanted[at : at + some].ravel())
        for at in range(0, len(places), some)
    )


def extra_digest(extra: bytes) -> bytes:
    """16 bytes of blake2b of the extra identity; zeros when there is none."""
    return hashlib.blake2b(extra, digest_size=KEY).digest() if extra else NO_DIGEST


def salt_word(salt: bytes) -> int:
    """The u64 under which a cache salt stands in the slot table; 0 when there is none."""
    return xxhash.xxh3_64_intdigest(salt) or 1 if salt else 0


def next_key(parent: bytes, encoded: bytes | memoryview, extra: bytes) -> bytes:
    """Key of one chunk. All chunks of a namespace have as many token bytes, so these never run into `extra`."""
    return _digest(parent + encoded + extra)


def chain(parent: bytes, encoded: Sequence[bytes], extras: Sequence[bytes] = ()) -> bytes:
    """Keys of consecutive chunks, packed: KEY bytes each. `extras` is empty or one per chunk."""
    keys = bytearray()
    for i, tokens in enumerate(encoded):
        parent = next_key(parent, tokens, extras[i] if extras else b"")
        keys += parent
    return bytes(keys)


def _encode(token_ids: Sequence[int], start: int, end: int) -> "array[int]":
    """Token ids [start, end) as u32."""
    if start == 0 and isinstance(token_ids, list) and 8 * (len(token_ids) - end) < end:
        ids = array("I", token_ids)  # a slice first would cost a fifth more
        del ids[end:]
        return ids
    ids = array("I")
    for at in range(
        start, end, PIECE
    ):  # a slice of everything would need fresh pages from the kernel
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
        so far. Chunks hashed before are not looked at again. Raises as `encode_tokens`.
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
            self.tokens = tokens  # of a whole prompt: not copied again
        self.digests += b"".join(digests) if digests else bytes(KEY * (end - done))
        self.keys += b"".join(keys)
        return end

    def key(self, chunk: int) -> bytes:
        """KEY bytes of one chunk."""
        return bytes(self.keys[chunk * KEY : (chunk + 1) * KEY])

    def split(self, first: int, end: int) -> list[bytes]:
        """KEY bytes of each of the chunks [first, end)."""
        packed = np.frombuffer(bytes(self.keys[first * KEY : end * KEY]), f"V{KEY}")
        names: list[bytes] = packed.tolist()
        return names

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
