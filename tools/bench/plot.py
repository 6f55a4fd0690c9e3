"""The copies of one run as bars: memcpy, store, load."""

import importlib
from pathlib import Path
from typing import Any

SERIES = (
    ("memcpy_gbs", "memcpy", "#b0b0b0"),
    ("store_gbs", "store", "#1f77b4"),
    ("load_gbs", "load", "#2ca02c"),
)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Write a PNG. Needs matplotlib, which is no dependency."""
    importlib.import_module("matplotlib").use("agg")
    plt = importlib.import_module("matplotlib.pyplot")
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.5 * len(rows)), layout="constrained")
    for offset, (field, label, color) in enumerate(SERIES):
        places = [i + (offset - 1) * 0.27 for i in range(len(rows))]
        axes.barh(places, [row[field] for row in rows], 0.25, label=label, color=color)
    axes.set_yticks(range(len(rows)), [row["case"] for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("GB/s, one thread")
    figure.legend(loc="outside upper center", ncols=len(SERIES))
    figure.savefig(path, dpi=120)
    plt.close(figure)
