"""Chain keys: 128-bit xxh3 over (parent key, the chunk's token bytes, the chunk's extra identity).

The same bytes in every process and every run. Token bytes are msgpack of the id list. Not
collision-proof: a hit is confirmed by the token bytes in the slot and by `extra_digest`.
"""

import hashlib
from collections.abc import Callable, Sequence

import msgspec
import xxhash

KEY = 16
"""Bytes of a key."""
NO_DIGEST = bytes(KEY)

_encoder = msgspec.msgpack.Encoder()
_encode = _encoder.encode
_encode_into = _encoder.encode_into
_digest = xxhash.xxh3_128_digest


def seed(namespace: bytes) -> bytes:
    """The parent key of every first chunk in the namespace with this canonical descriptor."""
    return _digest(namespace)


def encode_tokens(token_ids: list[int]) -> bytes:
    """Canonical bytes of a chunk's token ids; at most 5 bytes an id below 2**32, and 5 more."""
    return _encode(token_ids)


def extra_digest(extra: bytes) -> bytes:
    """16 bytes of blake2b of the extra identity; zeros when there is none."""
    return hashlib.blake2b(extra, digest_size=KEY).digest() if extra else NO_DIGEST


def salt_word(salt: bytes) -> int:
    """The u64 under which a cache salt stands in the slot table; 0 when there is none."""
    return xxhash.xxh3_64_intdigest(salt) or 1 if salt else 0


def next_key(parent: bytes, encoded: bytes, extra: bytes) -> bytes:
    """Key of one chunk. Token bytes tell their own end, so they cannot run together with `extra`."""
    return _digest(parent + encoded + extra)


def chain(parent: bytes, encoded: Sequence[bytes], extras: Sequence[bytes] = ()) -> bytes:
    """Keys of consecutive chunks, packed: KEY bytes each. `extras` is empty or one per chunk."""
    keys = bytearray()
    for i, tokens in enumerate(encoded):
        parent = next_key(parent, tokens, extras[i] if extras else b"")
        keys += parent
    return bytes(keys)


class ChunkKeys:
    """The keys of one request, extended as its tokens become known. Append-only.

    `keys`: KEY bytes a chunk, packed. `encoded[i]`: token bytes of chunk i. `digests`: KEY bytes a chunk.
    """

    __slots__ = ("chunk_size", "digests", "encoded", "keys", "seed")

    def __init__(self, seed_key: bytes, chunk_size: int) -> None:
        self.seed = seed_key
        self.chunk_size = chunk_size
        self.keys = bytearray()
        self.encoded: list[bytes] = []
        self.digests = bytearray()

    def __len__(self) -> int:
        """Chunks hashed so far."""
        return len(self.encoded)

    def extend(
        self,
        token_ids: Sequence[int],
        upto_chunks: int | None = None,
        extra_of: Callable[[int], bytes] | None = None,
    ) -> int:
        """Hash whole chunks of `token_ids` (all tokens of the request) up to chunk `upto_chunks`, exclusive.

        `extra_of(i)` gives the canonical extra identity of chunk i. Returns the number of chunks hashed
        so far. Chunks hashed before are not looked at again.
        """
        size, done = self.chunk_size, len(self.encoded)
        whole = len(token_ids) // size
        end = whole if upto_chunks is None else min(whole, upto_chunks)
        if end <= done:
            return done
        parent = self.key(done - 1) if done else self.seed
        encoded: list[bytes] = []
        keys: list[bytes] = []
        digests: list[bytes] = []
        # Into one buffer, which does not grow anew for each chunk, then out of it: a fifth faster than encode().
        buffer = bytearray()
        for i in range(done, end):
            _encode_into(token_ids[i * size : (i + 1) * size], buffer)
            tokens = bytes(buffer)
            if extra_of is None:
                parent = _digest(parent + tokens)
            else:
                extra = extra_of(i)
                parent = next_key(parent, tokens, extra)
                digests.append(extra_digest(extra))
            keys.append(parent)
            encoded.append(tokens)
        # At last, so that the three fit together whatever was raised before.
        self.encoded += encoded
        self.keys += b"".join(keys)
        self.digests += b"".join(digests) if digests else bytes(KEY * (end - done))
        return end

    def key(self, chunk: int) -> bytes:
        """KEY bytes of one chunk."""
        return bytes(self.keys[chunk * KEY : (chunk + 1) * KEY])

    def parents(self, first: int = 0, end: int | None = None) -> bytes:
        """Parent keys of chunks [first, end), packed."""
        end = len(self) if end is None else end
        if end <= first:
            return b""
        if first:
            return bytes(self.keys[(first - 1) * KEY : (end - 1) * KEY])
        return self.seed + bytes(self.keys[: (end - 1) * KEY])
