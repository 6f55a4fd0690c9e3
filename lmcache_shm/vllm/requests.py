"""What the scheduler side remembers of one request."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lmcache_shm.client.jobs import Adapter
from lmcache_shm.client.lookup import Hit
from lmcache_shm.client.registration import Epoch
from lmcache_shm.protocol.keys import ChunkKeys, salt_word
from lmcache_shm.vllm.adapters import KnownAdapters
from lmcache_shm.vllm.identity import Unidentified, extra_of, salt_bytes

NEVER = 1 << 62


@dataclass(eq=False, slots=True)
class RequestState:
    """One request between its arrival and its end, preemptions included.

    `next_end`: token count from which on there is something to store; NEVER if nothing may be.
    """

    request: Any
    adapters: KnownAdapters
    next_end: int = 0
    next_chunk: int = 0
    """First chunk that no step has been through yet."""
    epoch: Epoch | None = None
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
    """What it got from a cache, ours or the engine's own, when it was last admitted."""
    speculative: bool = False
    """Whether the engine speculates at all."""
    states: set[int] = field(default_factory=set)
    """Chunks whose recurrent state was stored or reserved."""
    held: dict[tuple[int, int], Any] = field(default_factory=dict)
    """(KV cache group, boundary) → block with a state whose tokens are not known yet, referenced."""

    def enter(self, epoch: Epoch) -> bool:
        """Make `keys` and cursors belong to `epoch`; False if this request cannot be cached."""
        if self.epoch is epoch:
            return self.keys is not None
        lora = self.request.lora_request
        self.adapter = self.adapters.of(lora) if lora is not None else None
        if lora is not None and self.adapter is None:
            return False  # for the time being: it is loaded with the first step that needs it
        self.epoch, self.keys = epoch, None
        self.rewind()
        size = epoch.plan.chunk_size
        try:
            self.extra = extra_of(self.request, size, self.adapter)
        except Unidentified:
            self.next_end = NEVER
            return False
        self.salt = salt_word(salt_bytes(self.request))
        self.keys = ChunkKeys(epoch.seed, size)
        return True

    def void(self) -> None:
        """Its adapter is another one now: what it holds has no identity, and it has to get a new one."""
        self.outdated, self.epoch = True, None

    def start_anew(self) -> None:
        """Its load was of no use: it is computed from its beginning."""
        self.no_external = self.passed_over = True

    def rewind(self) -> None:
        """Begin anew: the prefix is being determined (again)."""
        self.next_chunk = self.prefix_tokens = 0
        self.next_end = self.epoch.plan.chunk_size if self.epoch is not None else 0
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
        if self.epoch is not None and chunk > self.next_chunk:
            self.next_chunk = chunk
            self.next_end = (chunk + 1) * self.epoch.plan.chunk_size
