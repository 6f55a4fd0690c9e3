"""Chain keys: the same bytes everywhere, and different ones wherever anything differs."""

import mmap
import subprocess
import sys
import time

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from lmcache_shm.arena.slot import same_tokens, token_area
from lmcache_shm.protocol import keys as k

SEED = k.seed(b"namespace")
TOKENS = st.lists(st.integers(0, 2**32 - 1), min_size=0, max_size=70)


def by_hand(tokens: list[int], size: int, extras: dict[int, bytes]) -> list[bytes]:
    """The definition, written down once more."""
    parent, found = SEED, []
    for i in range(len(tokens) // size):
        chunk = b"".join(t.to_bytes(4, "little") for t in tokens[i * size : (i + 1) * size])
        parent = xxhash.xxh3_128(parent + chunk + extras.get(i, b"")).digest()
        found.append(parent)
    return found


@given(
    TOKENS, st.integers(1, 9), st.dictionaries(st.integers(0, 5), st.binary(max_size=9)), st.data()
)
def test_keys_do_not_depend_on_the_steps_in_which_tokens_become_known(tokens, size, extras, data):
    request = k.ChunkKeys(SEED, size)
    seen = 0
    while seen < len(tokens):
        seen = data.draw(st.integers(seen + 1, len(tokens)))
        upto = data.draw(st.none() | st.integers(0, 9))
        request.extend(tokens[:seen], upto, lambda i: extras.get(i, b""))
    request.extend(tokens, None, lambda i: extras.get(i, b""))
    expected = by_hand(tokens, size, extras)

    assert b"".join(expected) == request.keys
    assert len(request) == len(expected)
    assert (
        b"".join(k.extra_digest(extras.get(i, b"")) for i in range(len(expected)))
        == request.digests
    )
    assert b"".join([SEED, *expected][:-1]) == request.parents()
    assert [request.key(i) for i in range(len(request))] == expected
    assert request.tokens.tobytes() == k.encode_tokens(tokens[: len(expected) * size])
    for first in range(len(request)):
        assert request.parents(first, first + 1) == ([SEED, *expected])[first]


def test_token_bytes_are_those_of_each_chunk():
    request = k.ChunkKeys(SEED, 4)
    request.extend(list(range(17)), None, lambda i: b"x" if i == 2 else b"")

    encoded = [request.token_bytes(i) for i in range(4)]
    assert encoded == [k.encode_tokens(range(4 * i, 4 * i + 4)) for i in range(4)]


@pytest.mark.parametrize("size", [1000, k.PIECE, k.PIECE + 1])
def test_keys_do_not_depend_on_how_many_tokens_are_encoded_at_a_time(size):
    tokens = [i * 7919 % 150_000 for i in range(3 * k.PIECE + 5)]
    request = k.ChunkKeys(SEED, size)
    request.extend(tokens[:size])
    request.extend(tokens)

    assert request.keys == b"".join(by_hand(tokens, size, {}))
    assert request.tokens.tobytes() == k.encode_tokens(tokens[: len(request) * size])


@pytest.mark.parametrize("token", [-1, 2**32])
def test_what_is_no_token_id_leaves_the_keys_as_they_were(token):
    request = k.ChunkKeys(SEED, 2)
    request.extend([1, 2])
    before = request.keys[:], request.tokens[:], request.digests[:]

    with pytest.raises(OverflowError):
        request.extend([1, 2, 3, token])

    assert (request.keys, request.tokens, request.digests) == before


@pytest.fixture
def stored():
    """Three chunks of 8 tokens, somewhere in 4 KiB; their places and packed token bytes."""
    data = mmap.mmap(-1, 4096)
    tokens = k.encode_tokens(range(24))
    places = np.array([4096 - 32, 100, 1000], np.uint64)
    for i, at in enumerate(places.tolist()):
        data[at : at + 32] = tokens[32 * i : 32 * (i + 1)]
    return data, places, tokens


def test_token_bytes_in_slots_are_compared(stored):
    data, places, tokens = stored

    assert same_tokens(data, places, tokens)
    assert same_tokens(data, places[:0], b"")
    assert same_tokens(data, places[1:], memoryview(tokens)[32:])


@pytest.mark.parametrize("at", [4064, 4095, 100, 131, 1016])
def test_one_changed_byte_is_noticed(stored, at):
    data, places, tokens = stored
    data[at] ^= 0x80

    assert not same_tokens(data, places, tokens)


def test_token_bytes_that_are_elsewhere_or_fewer_are_not_the_same(stored):
    data, places, tokens = stored

    assert not same_tokens(data, places[::-1], tokens)
    assert not same_tokens(data, places[:0], tokens)
    assert not same_tokens(data, places + np.uint64(1), tokens)  # beyond the end
    assert not same_tokens(data, places + np.uint64(1 << 40), tokens)


PAIRS = st.integers(0, 9).flatmap(
    lambda n: st.tuples(*[st.lists(st.integers(0, 2**32 - 1), min_size=n, max_size=n)] * 2)
)


@given(PAIRS, st.binary(max_size=8), st.binary(max_size=8))
def test_tokens_and_extras_never_run_together(pair, extra_a, extra_b):
    """Different (as many tokens, extra) hash different bytes."""
    a, b = pair
    same = (a, extra_a) == (b, extra_b)

    assert same == (k.encode_tokens(a) + extra_a == k.encode_tokens(b) + extra_b)


def test_each_identity_has_its_own_keys():
    def last_key(seed: bytes, tokens: list[int], extra: bytes = b"") -> bytes:
        request = k.ChunkKeys(seed, 3)
        request.extend(tokens, None, lambda _: extra)
        return request.key(len(request) - 1)

    found = {
        last_key(SEED, [1, 2, 3]),
        last_key(k.seed(b"other model"), [1, 2, 3]),
        last_key(SEED, [1, 2, 3], b"salt"),
        last_key(SEED, [1, 2, 3], b"lora"),
        last_key(SEED, [1, 2, 4]),
        last_key(SEED, [1, 2, 3, 1, 2, 3]),
    }

    assert len(found) == 6


def test_same_bytes_in_every_process():
    """Nothing depends on PYTHONHASHSEED."""
    program = (
        "from lmcache_shm.protocol import keys as k;"
        "r = k.ChunkKeys(k.seed(b'n'), 8); r.extend(list(range(100)), None, lambda i: b'e%d' % i);"
        "print(r.keys.hex(), r.digests.hex(), k.salt_word(b's'))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }

    assert len(outputs) == 1


def test_digest_of_no_extra_is_zero_and_of_any_other_is_not():
    assert k.extra_digest(b"") == bytes(16)
    assert len({k.extra_digest(bytes([i])) for i in range(256)} | {bytes(16)}) == 257


def test_no_salt_is_zero_and_a_salt_is_not():
    assert k.salt_word(b"") == 0
    assert k.salt_word(b"a") not in {0, k.salt_word(b"b")}


def test_token_bytes_stay_within_their_area():
    for tokens in ([0] * 4096, [2**32 - 1] * 4096):
        assert len(k.encode_tokens(tokens)) == token_area(4096)


@pytest.mark.parametrize("chunk", [256, 2048])
def test_hashing_is_cheap(chunk):
    """Stated budget: 12 ns a token for 131072 tokens; five times that is a broken build."""
    tokens = [(i * 7919) % 150000 for i in range(131072)]
    best = 1.0
    for _ in range(5):
        began = time.thread_time()
        k.ChunkKeys(SEED, chunk).extend(tokens)
        best = min(best, time.thread_time() - began)

    assert best / len(tokens) < 60e-9
