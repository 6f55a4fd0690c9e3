"""One frame of the live view: a pure function of the snapshot, its history and the view's settings.

A frame is exactly `height` lines of exactly `width` cells (0: as many lines as there are), so it needs no
terminal to be drawn. What does not fit is left out from the least important:
sections have a least and a wanted number of lines, and share what the fixed lines leave.
"""

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from lmcache_shm.cli import top_tables as tables
from lmcache_shm.cli.formatting import count, duration, percent, size, sparkline
from lmcache_shm.cli.top_tables import (
    DIM,
    Cell,
    beside,
    ends,
    legend,
    line,
    picture,
    slabs_per_cell,
    title,
)

WIDE = 132
"""From this width on there are two columns."""
NOW_S = 5.0
"""Over how many seconds "now" is averaged."""
MINUTES_S = 300.0
"""What a sparkline covers."""
ASCII = str.maketrans("█▓▒░·◆■─…▁▂▃▄▅▆▇", "#%=-.*#-~_.:-=+*")

Snapshot = Mapping[str, Any]
KEEP_S = 600.0


# ----------------------------------------------------------------------------------------- the history
@dataclass(frozen=True)
class Sample:
    at: float
    """Seconds, of the caller's monotonic clock."""
    boot: str
    counters: Mapping[str, float]


class History:
    """Samples of one server, across its restarts: counters then begin again from 0, which is no loss."""

    def __init__(self, keep_s: float = KEEP_S) -> None:
        self._keep_s = keep_s
        self._samples: deque[Sample] = deque()
        self.restarts = 0
        """How often the boot id changed while we were looking."""

    def add(self, at: float, snapshot: Mapping[str, Any]) -> None:
        """Remember a snapshot's counters; `at` never goes back."""
        boot = str(snapshot["server"]["boot"])
        if self._samples and self._samples[-1].boot != boot:
            self.restarts += 1
        self._samples.append(Sample(at, boot, _flat(snapshot)))
        while self._samples[0].at < at - self._keep_s:
            self._samples.popleft()

    def __len__(self) -> int:
        return len(self._samples)

    def gained(self, name: str, over_s: float) -> tuple[float, float]:
        """(what counter `name` gained, seconds it took) in the last `over_s`, at least one interval."""
        samples = list(self._samples)
        if len(samples) < 2:
            return 0.0, 0.0
        start = samples[-1].at - over_s
        gain = 0.0
        for k in range(len(samples) - 1, 0, -1):
            gain += _step(samples[k - 1], samples[k], name)
            if samples[k - 1].at <= start:
                break
        return gain, samples[-1].at - samples[k - 1].at

    def rate(self, name: str, over_s: float) -> float | None:
        """Per second over the last `over_s`; None before there are two samples."""
        gain, seconds = self.gained(name, over_s)
        return gain / seconds if seconds > 0 else None

    def ratio(self, part: str, whole: str, over_s: float) -> float | None:
        """Gain of one counter over another's; None when the other gained nothing."""
        of = self.gained(whole, over_s)[0]
        return self.gained(part, over_s)[0] / of if of > 0 else None

    def rates(self, name: str, points: int, over_s: float) -> list[float | None]:
        """Per second, in `points` equal intervals that end now; None where there is no sample."""
        return [
            gain / seconds if seconds > 0 else None
            for gain, seconds in self._bins([name], points, over_s)[0]
        ]

    def ratios(self, part: str, whole: str, points: int, over_s: float) -> list[float | None]:
        """`part` over `whole` in `points` equal intervals that end now; None where `whole` stood still."""
        parts, wholes = self._bins([part, whole], points, over_s)
        return [a / b if b > 0 else None for (a, _), (b, _) in zip(parts, wholes, strict=True)]

    def _bins(
        self, names: Sequence[str], points: int, over_s: float
    ) -> list[list[tuple[float, float]]]:
        """By name and bin: (gain, seconds observed); a gain is spread evenly over its interval."""
        bins = [[(0.0, 0.0)] * points for _ in names]
        samples = list(self._samples)
        if len(samples) < 2 or points < 1:
            return bins
        # Bins are aligned to whole multiples of their width, so that a picture shifts and does not flicker.
        width = over_s / points
        first = int(samples[-1].at / width) - points + 1
        for before, after in itertools.pairwise(samples):
            gains = [_step(before, after, name) for name in names]
            length = after.at - before.at
            if length <= 0:
                continue
            for slot in range(int(before.at / width), int(after.at / width) + 1):
                overlap = min(after.at, (slot + 1) * width) - max(before.at, slot * width)
                if overlap <= 0 or not 0 <= slot - first < points:
                    continue
                for row, gain in zip(bins, gains, strict=True):
                    had, seconds = row[slot - first]
                    row[slot - first] = had + gain * overlap / length, seconds + overlap
        return bins


def _flat(snapshot: Mapping[str, Any]) -> dict[str, float]:
    """All counters; those of namespace 2's group 0 as ``2/0/hits``."""
    flat: dict[str, float] = dict(snapshot["counters"])
    for namespace in snapshot["namespaces"]:
        for index, group in enumerate(namespace["groups"]):
            for name in ("served", "misses", "evictions"):
                flat[f"{namespace['id']}/{index}/{name}"] = group.get(name, 0)
    return flat


def _step(before: Sample, after: Sample, name: str) -> float:
    now = after.counters.get(name, 0.0)
    if after.boot != before.boot:
        return now  # since the restart
    return max(now - before.counters.get(name, 0.0), 0.0)


# ------------------------------------------------------------------------------------------- the frame
@dataclass(frozen=True)
class View:
    """What the viewer chose and where the view is shown."""

    width: int = 80
    height: int = 24
    colour: bool = True
    ascii: bool = False
    sort: str = tables.SORTS[0]
    namespace: int | None = None
    paused: bool = False
    lost_s: float | None = None
    """Since when no server has answered; None: it answers."""
    keys: bool = True
    """Whether there is a keyboard: then the last line shows the keys."""
    help: bool = False


@dataclass(frozen=True)
class Section:
    """A title and lines below it; `least` of the lines are wanted before others grow."""

    name: str
    lines: list[Text]
    least: int
    notes: tuple[Cell, ...] = ()


def frame(snapshot: Snapshot, history: History, view: View) -> list[Text]:
    """The lines of one frame."""
    width = max(view.width, 20)
    top = _head(snapshot, history, view, width)
    bottom = [_keys(view, width)] if view.keys else []
    room = view.height - len(top) - len(bottom) if view.height else 0
    if view.help:
        body = _fill(
            [Section("help", [line(width, text) for text in HELP.splitlines()], 1)], room, width
        )
    elif width >= WIDE:
        left_width = (width - 2) * 3 // 5
        right_width = width - 2 - left_width
        left = _left(snapshot, view, left_width, room)
        right = _right(snapshot, right_width)
        tallest = room or max(sum(len(s.lines) + 1 for s in part) for part in (left, right))
        body = beside(
            _fill(left, tallest, left_width), _fill(right, tallest, right_width), left_width
        )
    else:
        sections = _left(snapshot, view, width, room) + _right(snapshot, width)
        body = _fill(sections, room, width)
    lines = [*top, *body, *bottom]
    if view.height:
        lines = lines[: view.height]
    if view.ascii:
        for text in lines:
            text.plain = text.plain.translate(ASCII)
    return lines


def joined(lines: Sequence[Text]) -> Text:
    """A frame as one renderable."""
    return Text("\n", no_wrap=True, end="").join(lines)


# ------------------------------------------------------------------------------------- the top lines
def _head(snapshot: Snapshot, history: History, view: View, width: int) -> list[Text]:
    server, arena, counters = snapshot["server"], snapshot["arena"], snapshot["counters"]
    name: list[Cell] = [("lmcache-shm ", "bold"), (server["instance"], "bold cyan")]
    if view.lost_s is not None:
        name.append((f"  no answer for {duration(view.lost_s)}, waiting for a server", "bold red"))
    elif view.paused:
        name.append(("  paused", "bold yellow"))
    elif server.get("draining"):
        name.append(("  draining", "bold yellow"))
    engines = sum(1 for client in snapshot["clients"] if client["connected"])
    about: list[Cell] = [
        (f"v{server['version']} · ", DIM),
        (f"chunks of {server['chunk_size']} tokens · " if server["chunk_size"] else "", DIM),
        f"{engines} engine{'' if engines == 1 else 's'}",
        f" · pid {server['pid']}",
        f" · up {duration(server['uptime_s'])}",
    ]
    if history.restarts:
        about.append((f" · restarts seen: {history.restarts}", "yellow"))
    return [
        ends(width, name, about),
        _gauge(arena, view, width),
        _hit_line(counters, history, width),
        _flow_line("loaded", "bytes_acquired", "hit_tokens", snapshot, history, width),
        _flow_line("stored", "bytes_committed", "tokens_committed", snapshot, history, width),
        _pressure_line(snapshot, history, width),
    ]


def _gauge(arena: Mapping[str, Any], view: View, width: int) -> Text:
    nbytes, total = arena["bytes"], max(arena["data_bytes"], 1)
    taken = nbytes["used"] + nbytes["reserved"]
    text = f" {size(taken)} of {size(total)}, {percent(taken, total)}"
    backed = arena.get("backed_bytes", total)
    if backed < total:
        text += f", {size(backed)} reserved"
    bar = max(width - 8 - len(text), 4)
    shares = [
        ("█", "cyan", nbytes["used"]),
        ("▒", "yellow", nbytes["reserved"]),
        ("!" if not view.colour else "█", "red", nbytes["quarantined"]),
    ]
    cells: list[Cell] = [("arena   ", "")]
    drawn = 0
    for glyph, style, part in shares:
        # A single byte in use shows; only a full arena has a full bar.
        length = min(max(int(bar * part / total), 1 if part else 0), bar - drawn)
        cells.append((glyph * length, style))
        drawn += length
    cells += [("░" * (bar - drawn), DIM), text]
    return line(width, *cells)


def _hit_line(counters: Mapping[str, int], history: History, width: int) -> Text:
    if len(history) < 2:
        ever = percent(counters["hit_tokens"], counters["query_tokens"])
        asked = f" of {count(counters['query_tokens'])} looked-up tokens since the start"
        return line(width, "hits    ", (f"{ever:>5}", "bold"), asked)
    now = history.ratio("hit_tokens", "query_tokens", NOW_S)
    recent = history.ratio("hit_tokens", "query_tokens", MINUTES_S)
    ever = percent(counters["hit_tokens"], counters["query_tokens"])
    cells: list[Cell] = [
        "hits    ",
        (f"{'-' if now is None else percent(now, 1):>5}", "bold green" if now else "bold"),
        (" now  ", DIM),
    ]
    tail = f"  {percent(recent, 1) if recent is not None else '-'} of tokens in 5 min, {ever} ever"
    room = width - 19 - len(tail)
    points = history.ratios("hit_tokens", "query_tokens", max(room, 0), MINUTES_S)
    cells += [(sparkline(points, 1.0), "green"), tail]
    return line(width, *cells)


def _flow_line(
    name: str, nbytes: str, tokens: str, snapshot: Snapshot, history: History, width: int
) -> Text:
    counters = snapshot["counters"]
    speed, per_s = history.rate(nbytes, NOW_S), history.rate(tokens, NOW_S)
    mean = speed is None
    if speed is None:  # a single snapshot
        up = max(snapshot["server"]["uptime_s"], 1e-3)
        speed, per_s = counters[nbytes] / up, counters.get(tokens, 0) / up
    left = f"{size(speed) + '/s':>10} {count(per_s or 0) + ' tok/s':>12}  "
    tail = f"  {size(counters[nbytes])} in all"
    if mean:
        return line(width, f"{name:<8}", (left, "bold"), "on average,", tail[1:])
    room = width - 8 - len(left) - len(tail)
    points = history.rates(nbytes, max(room, 0), MINUTES_S)
    return line(width, f"{name:<8}", (left, "bold"), (sparkline(points), "cyan"), tail)


def _pressure_line(snapshot: Snapshot, history: History, width: int) -> Text:
    counters, arena = snapshot["counters"], snapshot["arena"]
    slots = arena["slots"]
    speed = history.rate("evictions", NOW_S)
    per_s = "" if speed is None else f"{count(speed)}/s, "
    cells: list[Cell] = [
        "evicted ", (f"{per_s}{count(counters['evictions'])} in all", "bold" if speed else ""),
    ]  # fmt: skip
    age = arena.get("coldest_age_s")
    if age is not None:
        cells.append(f" · coldest {duration(age)}")
    cells.append(f" · {count(slots['used'])} slots, ")
    cells.append((f"{count(slots['pinned'])} pinned, ", "bold" if slots["pinned"] else ""))
    cells.append((f"{count(slots['reserved'])} writing", "bold" if slots["reserved"] else ""))
    if slots["quarantined"]:
        cells.append((f", {count(slots['quarantined'])} in quarantine", "bold red"))
    skipped = counters["stores_skipped_full"]
    if skipped:
        cells.append((f" · {count(skipped)} stores had no room", "bold red"))
    return line(width, *cells)


# --------------------------------------------------------------------------------------- the sections
def _left(snapshot: Snapshot, view: View, width: int, room: int) -> list[Section]:
    held = tables.groups(snapshot, width, sort=view.sort, chosen=view.namespace, colour=view.colour)
    chosen = [n for n in snapshot["namespaces"] if n["id"] == view.namespace]
    if chosen:
        held = [*tables.describe(chosen[0], width), *held]
    total = len(snapshot["namespaces"])
    note = (
        f"{len(chosen)} of {total} namespaces" if chosen else f"by look-ups, sorted by {view.sort}"
    )
    # The picture may take a ninth of the room, and in two columns what the table leaves.
    rows = max((room or 24) // 9, room - len(held) - 2 if view.width >= WIDE else 0, 1)
    drawn = picture(snapshot, width, min(rows, 12), colour=view.colour, chosen=view.namespace)
    each = slabs_per_cell(snapshot, width * min(rows, 12))
    scale = (f"{size(each * snapshot['arena']['slab_bytes'])} a cell", DIM)
    return [
        Section("arena", drawn, len(drawn), (scale, legend(colour=view.colour))),
        Section("groups", held, 6, ((note, DIM),)),
    ]


def _right(snapshot: Snapshot, width: int) -> list[Section]:
    return [
        Section("misses", tables.misses(snapshot, width), 1, (("look-ups by reason", DIM),)),
        Section("engines", tables.clients(snapshot, width), 2),
        Section("events", tables.events(snapshot, width), 1),
    ]


def _fill(sections: Sequence[Section], room: int, width: int) -> list[Text]:
    """The sections in `room` lines (0: all of them): first the least of each in order, then more of each."""
    given = [len(section.lines) if not room else 0 for section in sections]
    left = room
    for k, section in enumerate(sections if room else ()):
        if left >= 2:  # a title alone is useless
            given[k] = min(section.least, len(section.lines), left - 1)
            left -= given[k] + 1
    for k, section in enumerate(sections if room else ()):
        more = min(len(section.lines) - given[k], left) if given[k] else 0
        given[k] += more
        left -= more
    lines = []
    for section, share in zip(sections, given, strict=True):
        if share:
            hidden = len(section.lines) - share
            lines.append(title(width, section.name, *section.notes, hidden=hidden))
            lines += section.lines[:share]
    return lines + [line(width)] * left


# -------------------------------------------------------------------------------------------- the keys
def _keys(view: View, width: int) -> Text:
    chosen = "all" if view.namespace is None else str(view.namespace)
    cells: list[Cell] = []
    for letter, what in (
        ("q", "quit"), ("p", "go on" if view.paused else "pause"), ("s", f"sort: {view.sort}"),
        ("n", f"namespace: {chosen}"), ("h", "help"),
    ):  # fmt: skip
        cells += [(f" {letter} ", "reverse"), f" {what}  "]
    return line(width, *cells)


HELP = """\
q  quit            p or space  pause, go on       s  next order of the groups
n  next namespace  a  all namespaces              h  this help, on and off

hits     share of looked-up prompt tokens that the arena served.
loaded   what engines read from the arena; stored: what they put into it.
evicted  slots given to newer chunks; coldest: how long ago the oldest chunk
         was last used. A few seconds mean that the arena is too small.
group    layers that are stored as one object: full, window (only the tail of
         a window is kept), recurrent (the state at a chunk's end), chunk-local.
         hits: look-ups it served; misses: look-ups that found nothing for want
         of it; short: look-ups that found something, but less for want of it.
misses   look-ups that got less than they asked for. never seen: nobody stored
         that text. evicted: it was there. incomplete group: a group misses its
         part. other namespace: stored by an engine that differs (see status).
         identity differs: other salt, adapter or image. no server, too slow."""
