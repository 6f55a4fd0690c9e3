"""What else than token ids identifies a chunk; the same bytes in every process."""

import hashlib
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lmcache_shm.arena.job import Adapter
from lmcache_shm.protocol.keys import ChunkKeys, seed
from lmcache_shm.vllm.identity import Unidentified, extra_of, salt_bytes

C = 64


def request(**facts: Any) -> Any:
    plain = {
        "lora_request": None, "cache_salt": None, "mm_features": [], "prompt_embeds": None,
        "prompt_is_token_ids": None,
    }  # fmt: skip
    return SimpleNamespace(**{**plain, **facts})


def item(content: str, offset: int, length: int) -> Any:
    """As vLLM identifies it: by a hash."""
    return named_item(hashlib.sha256(content.encode()).hexdigest(), offset, length)


def named_item(identifier: str | None, offset: int, length: int) -> Any:
    return SimpleNamespace(
        identifier=identifier,
        modality="image",
        mm_position=SimpleNamespace(offset=offset, length=length),
    )


def named(name: str = "a", path: str = "/a") -> Any:
    return SimpleNamespace(lora_name=name, lora_path=path, lora_int_id=1)


def adapter(digest: bytes) -> Adapter:
    return Adapter(1, digest, (1,), "/a")


def extra(chunk: int = 0, adapter: Adapter | None = None, **facts: Any) -> bytes:
    of = extra_of(request(**facts), C, adapter)
    return of(chunk) if of else b""


def test_plain_requests_have_no_extra_identity() -> None:
    assert extra_of(request(), C) is None


def test_a_salt_counts_for_every_chunk() -> None:
    """A collision of keys must not lead from one tenant to another, in any chunk."""
    assert extra(0, cache_salt="a") == extra(7, cache_salt="a") != b""
    assert extra(7, cache_salt="a") != extra(7, cache_salt="b")
    assert salt_bytes(request(cache_salt="ä")) == "ä".encode()
    assert salt_bytes(request()) == b""


def test_an_adapter_is_its_content_and_nothing_else() -> None:
    """Names, paths and files say nothing about what the engine computes with."""
    first = extra(3, lora_request=named(), adapter=adapter(b"one"))

    assert first == extra(4, lora_request=named("b", "/elsewhere"), adapter=adapter(b"one"))
    assert first != extra(3, lora_request=named(), adapter=adapter(b"two"))
    assert first != extra(3)


def test_an_adapter_of_which_nothing_is_known_makes_a_request_unidentified() -> None:
    with pytest.raises(Unidentified, match="an adapter that is not loaded yet"):
        extra(0, lora_request=named())


def test_media_that_were_encoded_with_an_adapter_make_a_request_unidentified() -> None:
    """VLLM keeps what an adapter made of an image under the adapter's name, also when that is replaced."""
    mine, plain = named_item("a:cat", 10, 20), item("cat", 10, 20)

    with pytest.raises(Unidentified, match="a image that is encoded with an adapter"):
        extra(0, lora_request=named(), adapter=adapter(b"one"), mm_features=[mine])
    assert extra(0, lora_request=named(), adapter=adapter(b"one"), mm_features=[plain])


def test_salt_and_adapter_do_not_run_together() -> None:
    assert extra(cache_salt="x") != extra(lora_request=named(), adapter=adapter(b"x"))


def test_media_count_where_they_reach() -> None:
    """An image over tokens 50–149 of chunks of 64 concerns chunks 0, 1 and 2 only."""
    features = [item("cat", 50, 100)]

    found = [extra(chunk, mm_features=features) for chunk in range(4)]

    assert [bool(e) for e in found] == [True, True, True, False]
    assert len(set(found[:3])) == 3, "where it begins is part of the identity"


def test_other_media_and_other_places_differ() -> None:
    base = extra(0, mm_features=[item("cat", 10, 20)])

    assert extra(0, mm_features=[item("dog", 10, 20)]) != base
    assert extra(0, mm_features=[item("cat", 11, 20)]) != base
    assert extra(0, mm_features=[item("cat", 10, 20), item("dog", 40, 8)]) != base


def test_media_without_a_hash_make_a_request_unidentified() -> None:
    with pytest.raises(Unidentified, match="a image without a hash"):
        extra(0, mm_features=[named_item(None, 10, 20)])


def test_a_name_that_a_client_gave_to_media_means_something_in_this_engine_only() -> None:
    """Clients of another server may call another image so; their engines are other processes."""
    code = (
        "from tests.unit.vllm_connector.test_identity import extra, item, named_item as n;"
        "print(extra(0, mm_features=[n('my cat', 10, 20)]).hex(), extra(0, mm_features=[item('cat', 10, 20)]).hex())"
    )
    command = [sys.executable, "-c", code]
    env = {**os.environ, "PYTHONPATH": "."}
    there = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout

    named, hashed = map(bytes.fromhex, there.split())

    assert extra(0, mm_features=[named_item("my cat", 10, 20)]) != named
    assert extra(0, mm_features=[item("cat", 10, 20)]) == hashed
    again = [extra(0, mm_features=[named_item("my cat", 10, 20)]) for _ in range(2)]
    assert again[0] == again[1]


def test_embeddings_count_by_their_bytes() -> None:
    embeds = torch.arange(100 * 4, dtype=torch.bfloat16).reshape(100, 4)
    other = embeds.clone()
    other[70] += 1

    assert extra(0, prompt_embeds=embeds) == extra(0, prompt_embeds=other)
    assert extra(1, prompt_embeds=embeds) != extra(1, prompt_embeds=other)
    assert extra(2, prompt_embeds=embeds) == b"", "beyond the prompt there are tokens"
    assert extra(0, prompt_embeds=embeds) != extra(0, prompt_embeds=embeds.float())


def test_which_positions_are_embeddings_counts() -> None:
    embeds = torch.zeros(64, 4)
    one, two = [True] * 64, [True] * 63 + [False]

    assert extra(0, prompt_embeds=embeds, prompt_is_token_ids=one) != extra(
        0, prompt_embeds=embeds, prompt_is_token_ids=two
    )


def test_keys_are_the_same_whatever_the_hash_seed() -> None:
    code = (
        "from tests.unit.vllm_connector.test_identity import keys_of_a_salted_request as k;"
        "print(k())"
    )
    env = {**os.environ, "PYTHONPATH": "."}
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env={**env, "PYTHONHASHSEED": seed}, check=True,
            capture_output=True, text=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }  # fmt: skip

    assert found == {keys_of_a_salted_request()}


def keys_of_a_salted_request() -> str:
    keys = ChunkKeys(seed(b"namespace"), C)
    of = extra_of(request(cache_salt="tenant", mm_features=[item("cat", 50, 100)]), C)
    keys.extend(list(range(200)), None, of)
    return bytes(keys.keys).hex()
