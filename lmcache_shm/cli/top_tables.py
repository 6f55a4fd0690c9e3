"""Parts of the live view: lines of an exact width, the picture of the arena, and the tables."""

import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from lmcache_shm.cli.formatting import count, duration, percent, size

Cell = str | tuple[str, str]
"""A text, or (text, style)."""

DIM = "bright_black"


def parts(cell: Cell) -> tuple[str, str]:
    return (cell, "") if isinstance(cell, str) else cell


def clip(text: str, width: int) -> str:
    """`text` in at most `width` terminal cells, with an ellipsis where something was cut."""
    if cell_len(text) <= width:
        return text
    return set_cell_size(text, width - 1) + "…" if width > 0 else ""


def line(width: int, *cells: Cell) -> Text:
    """Cells one after the other, cut and filled to exactly `width`."""
    text = Text(no_wrap=True, end="")
    left = width
    for cell in cells:
        word, style = parts(cell)
        shown = clip(word, left)
        text.append(shown, style)
        left -= cell_len(shown)
    text.append(" " * left)
    return text


def ends(width: int, left: Sequence[Cell], right: Sequence[Cell]) -> Text:
    """`left` at the left edge; `right` at the right edge as far as there is room for it."""
    taken = sum(cell_len(parts(cell)[0]) for cell in left)
    kept = list(right)
    while kept and taken + 1 + sum(cell_len(parts(cell)[0]) for cell in kept) > width:
        kept.pop(0)
    gap = width - taken - sum(cell_len(parts(cell)[0]) for cell in kept)
    return line(width, *left, " " * max(gap, 0), *kept)


def title(width: int, name: str, *notes: Cell, hidden: int = 0) -> Text:
    """``── name  note ───────────── 3 more ──``, where `hidden` lines had no room."""
    cells: list[Cell] = [("── ", DIM), (name, "bold")]
    for note in notes:
        cells += ["  ", note]
    tail = f" {hidden} more ──" if hidden else ""
    taken = sum(cell_len(parts(cell)[0]) for cell in cells)
    if taken + 2 + len(tail) > width:
        cells, taken = cells[:2], sum(cell_len(parts(cell)[0]) for cell in cells[:2])
    return line(width, *cells, (" " + "─" * max(width - taken - 1 - len(tail), 0) + tail, DIM))


class Columns:
    """A table's columns: names, widths (0: takes what is left), and whether numbers stand in them."""

    def __init__(self, *columns: tuple[str, int, bool]) -> None:
        self.columns = columns

    def fitting(self, width: int, least: int) -> "Columns":
        """The first columns that fit, with `least` cells kept for the one of width 0."""
        kept: list[tuple[str, int, bool]] = []
        used = 0
        for name, wide, numeric in self.columns:
            used += (wide or least) + 1
            if kept and used - 1 > width:
                break
            kept.append((name, wide, numeric))
        return Columns(*kept)

    def head(self, width: int) -> Text:
        return self.row(width, [(name, DIM) for name, _, _ in self.columns])

    def row(self, width: int, cells: Iterable[Cell | None]) -> Text:
        """One line; a cell takes the room of the Nones after it; cells beyond the columns are left out."""
        fixed = sum(wide + 1 for _, wide, _ in self.columns if wide)
        text = Text(no_wrap=True, end="")
        spans: list[tuple[Cell, int, bool]] = []
        for (_, wide, numeric), cell in zip(self.columns, cells, strict=False):
            space = wide or max(width - fixed, 0)
            if cell is None and spans:
                before, room, kind = spans.pop()
                spans.append((before, room + 1 + space, kind))
            else:
                spans.append((cell or "", space, numeric))
        for cell, space, numeric in spans:
            word, style = parts(cell)
            word = clip(word, space)
            fill = " " * (space - cell_len(word))
            text.append(fill + word if numeric else word + fill, style)
            text.append(" ")
        text.truncate(width)
        text.append(" " * (width - text.cell_len))
        return text


def beside(left: Sequence[Text], right: Sequence[Text], width: int, gap: int = 2) -> list[Text]:
    """Two blocks in columns; `width` is that of the left one."""
    rows = max(len(left), len(right))
    blank = Text(" " * width)
    joined = []
    for k in range(rows):
        text = Text(no_wrap=True, end="")
        text.append_text(left[k] if k < len(left) else blank)
        text.append(" " * gap)
        if k < len(right):
            text.append_text(right[k])
        joined.append(text)
    return joined


# ----------------------------------------------------------------------------------------- the picture
# One cell for some neighbouring slabs, in the arena's order. With colour a cell has its object group's colour,
# shaded by how full it is; without, it is the group's letter, large when at least half full. What is pinned
# or being written stands out in both.
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


# ------------------------------------------------------------------------------------------ the tables
SORTS = ("slots", "hits", "misses", "evictions", "name")

# Reasons of misses as they are counted → as they are shown.
REASONS = {
    "never_seen": "never seen",
    "evicted": "evicted",
    "other_namespace": "other namespace",
    "incomplete_group": "incomplete group",
    "identity": "identity differs",
    "no_server": "no server",
    "deadline": "server too slow",
    "draining": "draining",
    "in_flight": "being written",
    "lease_limit": "too many leases",
}

GROUPS = Columns(
    ("", 1, False),
    ("model / group", 0, False),
    ("kind", 11, False),
    ("window", 6, True),
    ("slots", 6, True),
    ("of", 8, True),
    ("hits", 6, True),
    ("misses", 6, True),
    ("hit", 5, True),
    ("evicted", 7, True),
    ("short", 6, True),
    ("block", 7, True),
    ("pinned", 6, True),
    ("writing", 7, True),
)
CLIENTS = Columns(
    ("engine", 0, False),
    ("pid", 8, True),
    ("workers", 7, True),
    ("leases", 6, True),
    ("pins", 6, True),
    ("writing", 7, True),
    ("last seen", 9, True),
    ("quarantine", 10, True),
)
Namespace = Mapping[str, Any]


def kind(name: str) -> str:
    return {"chunked_local": "chunk-local"}.get(name, name)


def groups(
    snapshot: Mapping[str, Any], width: int, *, sort: str, chosen: int | None, colour: bool
) -> list[Text]:
    """A head, then by namespace its name and a line for each object group."""
    ranks = order(snapshot)
    columns = GROUPS.fitting(width, 15)
    shown = [
        n for n in sorted_namespaces(snapshot["namespaces"], sort) if chosen in {None, n["id"]}
    ]
    if not shown:
        return [line(width, ("no engine has registered yet", DIM))]
    lines = [columns.head(width)]
    for namespace in shown:
        hits, misses = namespace["hits"], namespace["misses"]
        slots = sum(group["slots"] for group in namespace["groups"])
        evicted = sum(group["evictions"] for group in namespace["groups"])
        cells: list[Cell | None] = [
            "", (namespace["name"], "bold"), None, None, count(slots), "", count(hits), count(misses),
            percent(hits, hits + misses), count(evicted),
        ]  # fmt: skip
        lines.append(columns.row(width, cells))
        for index, group in sorted_groups(namespace["groups"], sort):
            mark = key((namespace["id"], index), ranks, colour=colour)
            lines.append(columns.row(width, list(_group(mark, group))))
    return lines


def _group(mark: Cell, group: Mapping[str, Any]) -> Iterator[Cell]:
    yield mark
    yield f" {group['name']}"
    yield kind(group["kind"])
    yield str(group["window"] or "-")
    yield count(group["slots"])
    yield size(group["slot_bytes"])
    yield count(group["served"])
    yield count(group["misses"])
    yield percent(group["served"], group["served"] + group["misses"])
    yield count(group["evictions"])
    yield count(group.get("short", 0))
    yield "/".join(
        map(str, dict.fromkeys(group.get("block_sizes") or [group.get("block_size") or "-"]))
    )
    yield (count(group["pinned"]), "bold" if group["pinned"] else DIM)
    yield (count(group["reserved"]), "bold" if group["reserved"] else DIM)


def _weight(group: Mapping[str, Any], sort: str) -> float:
    return -float(group.get("served" if sort == "hits" else sort, 0)) if sort != "name" else 0.0


def sorted_namespaces(namespaces: Sequence[Namespace], sort: str) -> list[Namespace]:
    def weight(namespace: Namespace) -> tuple[float, str, int]:
        total = sum(_weight(group, sort) for group in namespace["groups"])
        return total, namespace["name"], namespace["id"]

    return sorted(namespaces, key=weight)


def sorted_groups(
    found: Sequence[Mapping[str, Any]], sort: str
) -> list[tuple[int, Mapping[str, Any]]]:
    def weight(item: tuple[int, Mapping[str, Any]]) -> tuple[float, str, int]:
        return _weight(item[1], sort), item[1]["name"], item[0]

    return sorted(enumerate(found), key=weight)


def misses(snapshot: Mapping[str, Any], width: int) -> list[Text]:
    """Reasons with their counts, the most frequent first, on as many lines as they take."""
    found: dict[str, int] = {}
    for reason, n in snapshot["misses"].items():
        word = REASONS.get(reason, reason.replace("_", " "))
        found[word] = found.get(word, 0) + n
    ranked = sorted(((n, word) for word, n in found.items() if n), reverse=True)
    if not ranked:
        return [line(width, ("none", DIM))]
    lines, cells, used = [], list[Cell](), 0
    for n, word in ranked:
        item = f"{word} {count(n)}"
        if cells and used + 3 + len(item) > width:
            lines.append(line(width, *cells))
            cells, used = [], 0
        if cells:
            cells.append((" · ", DIM))
            used += 3
        cells += [f"{word} ", (count(n), "bold")]
        used += len(item)
    lines.append(line(width, *cells))
    return lines


def clients(snapshot: Mapping[str, Any], width: int) -> list[Text]:
    found = snapshot["clients"]
    if not found:
        return [line(width, ("none connected", DIM))]
    columns = CLIENTS.fitting(width, 16)
    lines = [columns.head(width)]
    for client in sorted(found, key=lambda c: (not c["connected"], c["engine_id"])):
        workers = client["workers"]
        alive = sum(1 for worker in workers if worker["alive"])
        style = "" if client["connected"] else "yellow"
        state = duration(client["last_activity_s"]) if client["connected"] else "gone"
        cells: list[Cell] = [
            (client["engine_id"], style), str(client["pid"] or "-"),
            (f"{alive}/{len(workers)}", "" if alive == len(workers) else "red"),
            count(client["leases"]), count(client["pins"]), count(client["reservations"]),
            (state, style), (count(client["quarantined"]), "red" if client["quarantined"] else DIM),
        ]  # fmt: skip
        lines.append(columns.row(width, cells))
    return lines


def events(snapshot: Mapping[str, Any], width: int) -> list[Text]:
    """The newest first, each on as many lines as it takes."""
    found = snapshot["events"]
    if not found:
        return [line(width, ("none yet", DIM))]
    lines = []
    for event in reversed(found):
        at = time.strftime("%H:%M:%S ", time.localtime(event["t"]))
        for text in textwrap.wrap(event["text"], max(width - len(at), 20)) or [""]:
            lines.append(line(width, (at, DIM), text))
            at = " " * len(at)
    return lines


def describe(namespace: Namespace, width: int) -> list[Text]:
    """What identifies a namespace, on one line of ``name=value``."""
    pairs = [f"{name}={value}" for name, value in _flat(namespace.get("description") or {})]
    return [line(width, (" ".join(pairs) or "-", DIM))]


def _flat(item: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in item.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif not isinstance(value, list):
            yield f"{prefix}{name}", str(value)
