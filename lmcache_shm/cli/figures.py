"""Numbers for people: short, of a known width, with their unit."""

from collections.abc import Sequence

BARS = "▁▂▃▄▅▆▇█"


def size(nbytes: float) -> str:
    """``3.1 GiB``; binary units, at most 8 characters below 1 EiB."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 999.5 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" or value >= 99.5 else f"{value:.1f} {unit}"


def count(n: float) -> str:
    """``12345`` as ``12.3k``; at most 5 characters below 10**15."""
    value, unit = float(n), ""
    if abs(value) < 9999.5:
        return f"{value:.0f}" if value == int(value) or value >= 99.5 else f"{value:.1f}"
    for unit in ("k", "M", "G", "T"):  # noqa: B007  (used after the loop)
        value /= 1000
        if abs(value) < 999.5:
            break
    return f"{value:.0f}{unit}" if value >= 99.5 else f"{value:.1f}{unit}"


def duration(seconds: float) -> str:
    """``3 h 12 min``: the two largest units that matter."""
    s = max(0, round(seconds))
    if s < 60:
        return f"{s} s"
    if s < 3600:
        return f"{s // 60} min" + (f" {s % 60} s" if s < 600 and s % 60 else "")
    if s < 86400:
        return f"{s // 3600} h {s % 3600 // 60} min"
    return f"{s // 86400} d {s % 86400 // 3600} h"


def percent(part: float, whole: float) -> str:
    """``83 %``, or ``-`` where there is nothing to divide by. Rounds to 0 and 100 only what is so."""
    if whole <= 0:
        return "-"
    value = 100 * part / whole
    if value != 0 and value < 1:
        return "<1 %"
    return "99 %" if 99 < value < 100 else f"{value:.0f} %"


def sparkline(values: Sequence[float | None], top: float | None = None) -> str:
    """One character per value, scaled to `top` (else to the largest); a blank for None."""
    high = max((v for v in values if v is not None), default=0.0) if top is None else top
    drawn = []
    for value in values:
        if value is None:
            drawn.append(" ")
        elif high <= 0:
            drawn.append(BARS[0])
        else:
            level = round(min(max(value / high, 0.0), 1.0) * (len(BARS) - 1))
            drawn.append(BARS[max(level, 1) if value > 0 else 0])
    return "".join(drawn)
