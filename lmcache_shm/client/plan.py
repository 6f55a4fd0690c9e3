"""The cache plan: KV cache groups and their rules, how they are cut into objects, and which models must be refused.

A chunk's object holds, for each KV cache group in it, one *part*::

    full, chunked local   all C/B pages of the chunk
    window W              the last min(C/B, ⌈(W−1)/B⌉) pages: no hit at or after the chunk's end needs more
    recurrent             one page: the state after the chunk's last token
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lmcache_shm.protocol.rules import ChunkedLocal, Full, Recurrent, Rule, Window, rule_words

AUTO_FROM = 256
"""``--chunk-size auto`` is the smallest admissible size from here on."""
SHOWN = 4
"""Admissible sizes that an error names."""


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


@dataclass(frozen=True)
class Part:
    """One KV cache group's share of a chunk's object."""

    group: KVGroup
    pages_per_chunk: int
    """Blocks of the group per chunk; 1 for a recurrent state."""
    first_page: int
    """Number of the first page in the chunk that is stored."""

    @property
    def stored_pages(self) -> int:
        return self.pages_per_chunk - self.first_page


@dataclass(frozen=True)
class ObjectGroup:
    """KV cache groups whose pages of a chunk are one object, found by one rule."""

    name: str
    rule: Rule
    parts: tuple[Part, ...]

    @property
    def recurrent(self) -> bool:
        """Whether it holds a recurrent state (alone, or among others)."""
        return any(part.group.recurrent for part in self.parts)


@dataclass(frozen=True)
class CachePlan:
    """How one engine's KV is cut into objects. Equal in the scheduler and in all workers."""

    chunk_size: int
    groups: tuple[ObjectGroup, ...]
    ignored: tuple[IgnoredGroup, ...] = ()

    @property
    def rules(self) -> list[Rule]:
        return [group.rule for group in self.groups]

    def lines(self, slot_bytes: Sequence[int] = ()) -> list[str]:
        """The plan for the log, one line per object group and per ignored group."""
        said = []
        for i, group in enumerate(self.groups):
            size = f": {slot_bytes[i]:,} bytes a chunk" if slot_bytes else ""
            parts = "; ".join(f"group {part.group.index} ({part.group})" for part in group.parts)
            said.append(f"object group {group.name}{size}: {parts}")
        said += [
            f"KV cache group {ignored.index} ({len(ignored.layers)} layers) is not cached: {ignored.why}"
            for ignored in self.ignored
        ]
        return said


def make_plan(
    groups: Sequence[KVGroup],
    ignored: Sequence[IgnoredGroup] = (),
    chunk_size: int = 0,
    *,
    separate: bool = True,
) -> CachePlan:
    """The plan for these groups; `chunk_size` 0 is auto. Raises ModelError naming what is admissible."""
    if not groups:
        why = "; ".join(f"group {g.index}: {g.why}" for g in ignored) or "it has no KV cache"
        raise ModelError(f"nothing of this model can be cached ({why})")
    size = chunk_size or auto_chunk_size(groups)
    _require_admissible(groups, size)
    parts = [_part(group, size) for group in groups]
    return CachePlan(size, _object_groups(parts, separate=separate), tuple(ignored))


def chosen_chunk_size(server: int, engine: int) -> int:
    """Tokens per chunk that were asked for, 0 for auto. Raises ModelError if the two sides disagree."""
    if server and engine and server != engine:
        raise ModelError(
            f"the server caches chunks of {server} tokens, lmcache_shm.chunk_size asks for {engine}; "
            "leave it out, or give the server the same --chunk-size (or auto)"
        )
    return server or engine


def admissible_sizes(groups: Sequence[KVGroup]) -> list[int]:
    """The smallest chunk sizes that fit the groups, at most 4096 / N of them, but at least SHOWN if there are."""
    unit = unified_block_size(groups)
    spans = [g.rule.tokens for g in groups if isinstance(g.rule, ChunkedLocal)]
    if spans:
        return [size for size in range(unit, min(spans) + 1, unit) if _fits(size, unit, spans)]
    return [unit * i for i in range(1, max(SHOWN, 4096 // unit) + 1)]


def auto_chunk_size(groups: Sequence[KVGroup]) -> int:
    """The smallest admissible size from AUTO_FROM on, else the largest there is. Raises ModelError."""
    sizes = admissible_sizes(groups)
    if not sizes:
        _require_admissible(groups, unified_block_size(groups))
    return next((size for size in sizes if size >= AUTO_FROM), sizes[-1])


def _fits(size: int, unit: int, spans: Sequence[int]) -> bool:
    return size % unit == 0 and all(span % size == 0 for span in spans)


def _require_admissible(groups: Sequence[KVGroup], size: int) -> None:
    unit = unified_block_size(groups)
    spans = [g.rule.tokens for g in groups if isinstance(g.rule, ChunkedLocal)]
    if _fits(size, unit, spans):
        return
    blocks = ", ".join(map(str, sorted({g.block_size for g in groups})))
    need = f"a multiple of {unit} (block sizes of its KV cache groups: {blocks})"
    if spans:
        need += f" that divides {' and '.join(map(str, sorted(set(spans))))} (span of its local attention)"
    sizes = admissible_sizes(groups)
    if not sizes:
        raise ModelError(
            f"no chunk size fits this model: it has to be {need}; start vLLM with another --block-size"
        )
    shown = ", ".join(map(str, sizes[:SHOWN]))
    more = ", …" if len(sizes) > SHOWN or not spans else ""
    raise ModelError(
        f"chunk size {size} does not fit this model: it has to be {need}; admissible are {shown}{more}: "
        f"start the server with --chunk-size auto (here {auto_chunk_size(groups)}) or one of these"
    )


def _part(group: KVGroup, chunk_size: int) -> Part:
    if group.recurrent:
        return Part(group, 1, 0)
    pages = chunk_size // group.block_size
    if isinstance(group.rule, Window):
        # A window of one token needs no earlier page at all; still keep one, an object is never empty.
        tail = max(1, -(-(group.rule.tokens - 1) // group.block_size))
        return Part(group, pages, pages - min(pages, tail))
    return Part(group, pages, 0)


def _object_groups(parts: Sequence[Part], *, separate: bool) -> tuple[ObjectGroup, ...]:
    if not separate:
        return (ObjectGroup("all", Full(), tuple(parts)),)
    by_rule: dict[Rule, list[Part]] = {}
    for part in parts:
        by_rule.setdefault(part.group.rule, []).append(part)
    order = {Full: 0, ChunkedLocal: 1, Window: 2, Recurrent: 3}
    ordered = sorted(by_rule, key=lambda r: (order[type(r)], getattr(r, "tokens", 0)))
    return tuple(ObjectGroup(_name(rule), rule, tuple(by_rule[rule])) for rule in ordered)


def _name(rule: Rule) -> str:
    word, tokens = rule_words(rule)
    return f"{word}-{tokens}" if tokens else word
