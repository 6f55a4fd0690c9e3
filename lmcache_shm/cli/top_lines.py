"""Lines of an exact width: the material of which the live view is made."""

from collections.abc import Iterable, Sequence

from rich.cells import cell_len, set_cell_size
from rich.text import Text

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
