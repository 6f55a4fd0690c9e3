"""What else than its token ids identifies a chunk: cache salt, LoRA adapter, media, prompt embeddings.

An adapter counts by its content as it is loaded, and by nothing else: see `adapters`.

The canonical bytes of it go into a chunk's key, and their digest is compared at a hit. Salt and adapter
count for every chunk and not only (through the chain) from the first one on: then a collision of keys
can never cross from one tenant to another.
"""

import hashlib
import os
import re
from collections.abc import Callable
from typing import Any

import msgspec

from lmcache_shm.arena.job import Adapter
from lmcache_shm.client.requests import Identity, Unidentified
from lmcache_shm.vllm.adapters import KnownAdapters

_encode = msgspec.msgpack.Encoder().encode
_CONTENT_HASH = re.compile(r"([0-9a-f]{64}|[0-9a-f]{128})")
_HERE = os.urandom(16)
"""Of this process: what is meant in it only."""


def identify(request: Any, chunk_size: int, adapters: KnownAdapters) -> Identity | None:
    """Of vLLM's `request`; None until its adapter is loaded, with the first step that needs it. Raises Unidentified."""
    lora = request.lora_request
    adapter = adapters.of(lora) if lora is not None else None
    if lora is not None and adapter is None:
        return None
    return Identity(extra_of(request, chunk_size, adapter), salt_bytes(request), adapter)


def extra_of(
    request: Any, chunk_size: int, adapter: Adapter | None = None
) -> Callable[[int], bytes] | None:
    """A function from a chunk's number to its extra identity; None if the tokens say everything.

    Raises Unidentified. `request` is vLLM's; its media are looked up anew at each call, since a streaming
    session may add some. `adapter`: what is loaded of the LoRA adapter that it names, if it names one.
    """
    common = _common(request, adapter)
    if not (common or request.mm_features or request.prompt_embeds is not None):
        return None
    for feature in request.mm_features:
        if not feature.identifier:
            raise Unidentified(f"a {feature.modality} without a hash")
        # Encoded with the adapter (--enable-tower-connector-lora): vLLM keeps the result under the adapter's
        # name, also after it was replaced.
        if adapter is not None and feature.identifier.startswith(
            f"{request.lora_request.lora_name}:"
        ):
            raise Unidentified(f"a {feature.modality} that is encoded with an adapter")

    def of(chunk: int) -> bytes:
        start, end = chunk * chunk_size, (chunk + 1) * chunk_size
        facts = [*common, *_media(request, start, end), *_embeddings(request, start, end)]
        return _encode(facts) if facts else b""

    return of


def salt_bytes(request: Any) -> bytes:
    """The cache salt as the server knows it (to clear one tenant's chunks)."""
    return request.cache_salt.encode() if request.cache_salt else b""


def _common(request: Any, adapter: Adapter | None) -> list[tuple[Any, ...]]:
    facts: list[tuple[Any, ...]] = []
    if request.lora_request is not None:
        if adapter is None:
            raise Unidentified("an adapter that is not loaded yet")
        facts.append(("lora", adapter.digest))
    if request.cache_salt:
        facts.append(("salt", request.cache_salt))
    return facts


def _media(request: Any, start: int, end: int) -> list[tuple[Any, ...]]:
    """Each item that reaches into [start, end): its hash, and where it begins relative to `start`.

    A name that the client has given (`uuid`) is no hash: another engine's clients may call something else so.
    """
    return [
        ("mm", feature.identifier, feature.mm_position.offset - start)
        if _CONTENT_HASH.fullmatch(feature.identifier)
        else ("named mm", feature.identifier, feature.mm_position.offset - start, _HERE)
        for feature in request.mm_features
        if feature.mm_position.offset < end
        and feature.mm_position.offset + feature.mm_position.length > start
    ]


def _embeddings(request: Any, start: int, end: int) -> list[tuple[Any, ...]]:
    embeds = request.prompt_embeds
    if embeds is None or start >= len(embeds):
        return []
    import torch  # noqa: PLC0415  (only where there are tensors)

    part = embeds[start:end].detach().contiguous().cpu()
    digest = hashlib.blake2b(part.view(torch.uint8).numpy().tobytes(), digest_size=32)
    mask = request.prompt_is_token_ids
    if mask is not None:
        digest.update(bytes(map(bool, mask[start:end])))
    return [("embeds", str(part.dtype), digest.digest())]
