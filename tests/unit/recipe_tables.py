"""The tables in docs/recipes that say what vLLM makes of a tiny model: read back, to be compared with the engine."""

import re
from pathlib import Path
from typing import Any

RECIPES = Path(__file__).parents[2] / "docs" / "recipes"
SHOWN = {
    "FullAttentionSpec": "full",
    "SinkFullAttentionSpec": "full",
    "MLAAttentionSpec": "full (MLA)",
    "SlidingWindowSpec": "window",
    "SlidingWindowMLASpec": "window (MLA)",
    "ChunkedLocalAttentionSpec": "chunked local",
    "MambaSpec": "recurrent",
}


def tables() -> dict[str, list[str]]:
    """Family → the rows of its table, as "rule window block layers"."""
    found: dict[str, list[str]] = {}
    for page in sorted(RECIPES.glob("*.md")):
        family = ""
        for line in page.read_text().splitlines():
            if named := re.search(r"\(`tools/tiny_models/families/(\w+)\.py`", line):
                family = named[1]
                found[family] = []
            elif family and re.match(r"\| \d+ \|", line):
                cells = [cell.strip() for cell in line.strip("|").split("|")]
                found[family].append(" ".join(cells[1:]))
            elif line.startswith("N = "):
                family = ""
    return found


def rows(groups: list[dict[str, Any]]) -> list[str]:
    """The same, from what an engine says of its groups (`tools.tiny_models.runner.Runner.describe`)."""
    return [
        f"{SHOWN.get(g['kind'], g['kind'])} {g['window'] or g['attention_chunk'] or '–'} {g['block_size']} {g['layers']}"
        for g in groups
    ]
