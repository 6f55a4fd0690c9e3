"""The picture of the arena: one cell for some neighbouring slabs, in the arena's order.

With colour a cell has its object group's colour and shades by how full it is; without, it is the group's
letter, large when at least half full. What is pinned or being written stands out in both.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from lmcache_shm.cli.top_lines import DIM, Cell, line

COLOURS = (
    "cyan", "green", "yellow", "magenta", "blue", "bright_red", "bright_cyan", "bright_green",
    "bright_yellow", "bright_magenta", "bright_blue", "red",
)  # fmt: skip
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SHADES = "░▒▓█"
FREE, PINNED, RESERVED, QUARANTINED = "·", "◆", "+", "!"
PLAIN = {FREE: ".", PINNED: "*", RESERVED: "+", QUARANTINED: "!"}

Owner = tuple[int, int]
"""(namespace, object group)."""


@dataclass(frozen=True)
class Extent:
    """Neighbouring slabs of one slot size; `owner` is the group that holds most of its slots, or None."""

    owner: Owner | None
    slots: int
    used: int
    pinned: int
    reserved: int
    slabs: int
    quarantined: int


def extents(snapshot: Mapping[str, Any]) -> list[Extent]:
    found = []
    for row in snapshot["slab_map"]:
        namespace, group, slots, used, pinned, reserved, slabs, quarantined = (*row, 1, 0)[:8]
        owner = (namespace, group) if namespace >= 0 else None
        found.append(Extent(owner, slots, used, pinned, reserved, max(slabs, 1), quarantined))
    return found


def order(snapshot: Mapping[str, Any]) -> dict[Owner, int]:
    """Which colour and letter each object group has: by namespace and group, stable while these are."""
    owners = [
        (namespace["id"], index)
        for namespace in snapshot["namespaces"]
        for index in range(len(namespace["groups"]))
    ]
    return {owner: k for k, owner in enumerate(sorted(owners))}


def key(owner: Owner, ranks: Mapping[Owner, int], *, colour: bool) -> Cell:
    """The mark of an object group, as it stands beside its name."""
    rank = ranks.get(owner, 0)
    return ("■" if colour else LETTERS[rank % len(LETTERS)], COLOURS[rank % len(COLOURS)])


def picture(
    snapshot: Mapping[str, Any], width: int, rows: int, *, colour: bool, chosen: int | None = None
) -> list[Text]:
    """At most `rows` lines of `width`; slabs of other namespaces than `chosen` are dim."""
    ranks = order(snapshot)
    cells = _cells(extents(snapshot), width * rows)
    drawn = [_draw(cell, ranks, colour=colour, chosen=chosen) for cell in cells]
    return [line(width, *drawn[k : k + width]) for k in range(0, len(drawn), width)]


def slabs_per_cell(snapshot: Mapping[str, Any], cells: int) -> int:
    total = sum(extent.slabs for extent in extents(snapshot))
    return max(1, -(-total // max(cells, 1)))


def _cells(found: Sequence[Extent], most: int) -> list[list[tuple[Extent, int]]]:
    """The extents cut into equal numbers of slabs: by cell, (extent, how many of its slabs)."""
    total = sum(extent.slabs for extent in found)
    each = max(1, -(-total // max(most, 1)))
    cells: list[list[tuple[Extent, int]]] = []
    room = 0
    for extent in found:
        left = extent.slabs
        while left:
            if not room:
                cells.append([])
                room = each
            part = min(left, room)
            cells[-1].append((extent, part))
            left -= part
            room -= part
    return cells


def _draw(
    cell: Sequence[tuple[Extent, int]],
    ranks: Mapping[Owner, int],
    *,
    colour: bool,
    chosen: int | None,
) -> Cell:
    weight: dict[Owner, float] = {}
    for extent, slabs in cell:
        if extent.owner is not None:
            weight[extent.owner] = weight.get(extent.owner, 0) + slabs
    if not weight:
        return (FREE if colour else PLAIN[FREE], DIM)
    owner = max(weight, key=lambda o: (weight[o], -ranks.get(o, 0)))
    full = sum(
        slabs * (e.used + e.reserved) / e.slots for e, slabs in cell if e.owner and e.slots
    ) / sum(slabs for _, slabs in cell)
    mark = _mark([extent for extent, _ in cell])
    rank = ranks.get(owner, 0)
    style = COLOURS[rank % len(COLOURS)]
    if chosen is not None and owner[0] != chosen:
        style, mark = DIM, ""
    if mark:
        return (mark if colour else PLAIN[mark], f"bold {style}")
    if colour:
        return (SHADES[min(int(full * len(SHADES)), len(SHADES) - 1)], style)
    letter = LETTERS[rank % len(LETTERS)]
    return (letter.upper() if full >= 0.5 else letter, style)


def _mark(found: Sequence[Extent]) -> str:
    """What stands out in a cell: trouble before writing before reading."""
    if any(extent.quarantined for extent in found):
        return QUARANTINED
    if any(extent.reserved for extent in found):
        return RESERVED
    return PINNED if any(extent.pinned for extent in found) else ""


def legend(*, colour: bool) -> Cell:
    if colour:
        return (f"░▒▓█ how full  {FREE} free  {PINNED} pinned  {RESERVED} being written", DIM)
    return ("A full  a partly  . free  * pinned  + being written", DIM)
