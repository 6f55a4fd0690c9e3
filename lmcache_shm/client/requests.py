"""One request of an engine, as far as the cache has to remember it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from lmcache_shm.arena.job import Adapter
from lmcache_shm.client.lookup import Hit
from lmcache_shm.client.registration import Registration
from lmcache_shm.protocol.keys import ChunkKeys, salt_word

NEVER = 1 << 62


class Unidentified(Exception):
    """Something in the request has no identity, so nothing of it may be stored or looked up."""


class Identity(NamedTuple):
    """What identifies a request's chunks beside their token ids."""

    extra: Callable[[int], bytes] | None
    """From a chunk's number to its extra identity; None if the tokens are all there is."""
    salt: bytes
    adapter: Adapter | None = None
    """Of a LoRA adapter that it names: what is loaded of it. Part of `extra`."""


class Request(Protocol):
    """An engine's request, as it is now. Everything else of it is for `identify` to read."""

    request_id: str
    all_token_ids: Sequence[int]
    num_tokens: int
    num_prompt_tokens: int
    num_computed_tokens: int


Identify = Callable[[Any, int], Identity | None]
"""Of a request, in chunks of so many tokens; None as long as it is not known. Raises Unidentified."""


@dataclass(eq=False, slots=True)
class RequestState:
    """One request between its arrival and its end, preemptions included.

    `next_end`: token count from which on there is something to store; NEVER if nothing may be.
    """

    request: Any
    """A `Request`; the adapter to an engine may read more of it."""
    identify: Identify
    next_end: int = 0
    next_chunk: int = 0
    """First chunk that no step has been through yet."""
    registration: Registration | None = None
    """That `keys` and the cursors belong to."""
    keys: ChunkKeys | None = None
    extra: Callable[[int], bytes] | None = None
    adapter: Adapter | None = None
    """What is loaded of the LoRA adapter that it names; part of `keys`."""
    salt: int = 0
    hit: Hit | None = None
    """Looked up and pinned, not loaded yet."""
    loading: bool = False
    """What it waits for, or has got without running since, is a load of ours."""
    no_external: bool = False
    """A load failed: never offer this request anything again."""
    passed_over: bool = False
    """A load failed just now: the next time it is asked about, vLLM shall skip it once."""
    outdated: bool = False
    """Holds KV from before the cache was reset or its adapter replaced, so nothing of it may be stored until it
    is recomputed."""
    since: float = field(default_factory=time.monotonic)
    """When it was admitted last, in time.monotonic(): everything it holds was computed or loaded later."""
    prefix_tokens: int = 0
    """Tokens that came from a cache, ours or the engine's own, when it was last admitted."""
    speculative: bool = False
    """Whether the engine speculates at all."""
    states: set[int] = field(default_factory=set)
    """Chunks whose recurrent state was stored or reserved."""
    held: dict[tuple[int, int], Any] = field(default_factory=dict)
    """(KV cache group, boundary) → block with a state whose tokens are not known yet, referenced."""

    def enter(self, registration: Registration) -> bool:
        """Make `keys` and cursors belong to `registration`; False if this request cannot be cached."""
        if self.registration is registration:
            return self.keys is not None
        size, self.adapter = registration.plan.chunk_size, None
        try:
            identity = self.identify(self.request, size)
            if identity is None:
                return False
        except Unidentified:
            identity = None
        self.registration, self.keys = registration, None
        self.rewind()
        if identity is None:
            self.next_end = NEVER
            return False
        self.extra, self.adapter = identity.extra, identity.adapter
        self.salt = salt_word(identity.salt)
        self.keys = ChunkKeys(registration.seed, size)
        return True

    def void(self) -> None:
        """Its adapter is another one now: what it holds has no identity, and it has to get a new one."""
        self.outdated, self.registration = True, None

    def start_anew(self) -> None:
        """Its load was of no use: it is computed from its beginning."""
        self.no_external = self.passed_over = True

    def rewind(self) -> None:
        """Start over: the prefix is being determined (again)."""
        self.next_chunk = self.prefix_tokens = 0
        self.next_end = self.registration.plan.chunk_size if self.registration is not None else 0
        self.states.clear()

    def extend(self, chunks: int) -> ChunkKeys:
        """Keys of at least the first `chunks` chunks, as far as the tokens are known."""
        keys = self.keys
        if keys is None:
            raise RuntimeError("enter() comes first")
        if len(keys) < chunks:
            tokens = self.request.all_token_ids
            # The list behind vLLM's read-only view, where there is one: it need not be copied.
            keys.extend(getattr(tokens, "_x", tokens), chunks, self.extra)
        return keys

    def advance(self, chunk: int) -> None:
        """Every chunk below `chunk` has been dealt with."""
        if self.registration is not None and chunk > self.next_chunk:
            self.next_chunk = chunk
            self.next_end = (chunk + 1) * self.registration.plan.chunk_size
