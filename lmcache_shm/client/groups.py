"""KV cache groups as the cache sees them: which are kept, by which rule, in blocks of how many tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lmcache_shm.protocol.rules import ChunkedLocal, Recurrent, Rule, Window


class ModelError(ValueError):
    """This model, or the way it is started, cannot be cached; one line with what to change."""


@dataclass(frozen=True)
class KVGroup:
    """A KV cache group that is cached."""

    index: int
    """Its place in ``kv_cache_config.kv_cache_groups`` and in block tables."""
    rule: Rule
    block_size: int
    """Tokens that one block id covers (all ranks of context parallelism together)."""
    layers: tuple[str, ...]
    """Of this rank's pipeline stage; may be empty there."""
    kind: str

    @property
    def recurrent(self) -> bool:
        return isinstance(self.rule, Recurrent)

    def __str__(self) -> str:
        reach = {Window: "window ", ChunkedLocal: "span "}.get(type(self.rule), "")
        tokens = f", {reach}{getattr(self.rule, 'tokens', '')}" if reach else ""
        return f"{self.kind}{tokens}, block {self.block_size}, {len(self.layers)} layers"


@dataclass(frozen=True)
class IgnoredGroup:
    """A KV cache group that no later request could use, and why."""

    index: int
    layers: tuple[str, ...]
    why: str


def unified_block_size(groups: Sequence[KVGroup]) -> int:
    """N: the smallest number of tokens that ends a block in every group."""
    return math.lcm(*(group.block_size for group in groups))
