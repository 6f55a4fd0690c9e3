"""Chain keys: the same bytes everywhere, and different ones wherever anything differs."""

import subprocess
import sys
import time

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from lmcache_shm.catalog import keys as k

SEED = k.seed(b"namespace")
TOKENS = st.lists(st.integers(0, 2**32 - 1), min_size=0, max_size=70)


def by_hand(tokens: list[int], size: int, extras: dict[int, bytes]) -> list[bytes]:
    """The definition, written down once more."""
    parent, found = SEED, []
    for i in range(len(tokens) // size):
        chunk = msgspec.msgpack.encode(tokens[i * size : (i + 1) * size])
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
    assert len(request) == len(expected) == len(request.encoded)
    assert (
        b"".join(k.extra_digest(extras.get(i, b"")) for i in range(len(expected)))
        == request.digests
    )
    assert b"".join([SEED, *expected][:-1]) == request.parents()
    assert [request.key(i) for i in range(len(request))] == expected
    for first in range(len(request)):
        assert request.parents(first, first + 1) == ([SEED, *expected])[first]


def test_chain_and_chunk_keys_agree():
    request = k.ChunkKeys(SEED, 4)
    request.extend(list(range(17)), None, lambda i: b"x" if i == 2 else b"")

    assert k.chain(SEED, request.encoded, [b"", b"", b"x", b""]) == request.keys
    assert k.chain(SEED, []) == b""


@given(TOKENS, TOKENS, st.binary(max_size=8), st.binary(max_size=8))
def test_tokens_and_extras_never_run_together(a, b, extra_a, extra_b):
    """Different (tokens, extra) hash different bytes."""
    same = (a, extra_a) == (b, extra_b)

    assert same == (k.encode_tokens(a) + extra_a == k.encode_tokens(b) + extra_b)


def test_each_identity_has_its_own_keys():
    tokens = k.encode_tokens([1, 2, 3])
    found = {
        k.chain(SEED, [tokens]),
        k.chain(k.seed(b"other model"), [tokens]),
        k.chain(SEED, [tokens], [b"salt"]),
        k.chain(SEED, [tokens], [b"lora"]),
        k.chain(SEED, [k.encode_tokens([1, 2, 4])]),
        k.chain(SEED, [tokens, tokens])[k.KEY :],
    }

    assert len(found) == 6


def test_same_bytes_in_every_process():
    """Nothing depends on PYTHONHASHSEED."""
    program = (
        "from lmcache_shm.catalog import keys as k;"
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
    """Five bytes an id below 2**32, and a head of at most five."""
    assert len(k.encode_tokens([2**32 - 1] * 4096)) <= 5 * 4096 + 16
    assert len(k.encode_tokens([2**32 - 1] * 70000)) <= 5 * 70000 + 16


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
