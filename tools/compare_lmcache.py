"""Side by side with LMCache 0.5.6's multi-process mode, in one run: python -m tools.compare_lmcache --lmcache-python PYTHON.

Every round measures plain memcpy, then each side, one after the other, so that a noisy neighbour hits
all of them. Printed and written: median and spread of every figure, and the median of the rounds' ratios
of LMCache's better mode to ours. One JSON object as the last line (and in --out).
"""

import argparse
import json
import os
import statistics
import sys
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tools.peers import machine
from tools.peers.side import Shape, Side, spread

MODES = ("engine_driven", "lmcache_driven")
LOOKUPS = (8192, 32768, 131072)
Figures = dict[str, dict[str, list[float]]]


def round_of(side: Side, number: int, gigabytes: float) -> dict[str, float]:
    """All figures of one side once; rates in GB/s, everything else in ms."""
    # Not counted: memory that lay idle while others were measured is slow once.
    side.ask("copy", seed=10 + number)
    copied = side.ask("copy", seed=5000 + number)
    control = side.ask("control", seed=1000 + 2 * number)
    figures = {
        "store GB/s": gigabytes / copied["store_s"],
        "retrieve GB/s": gigabytes / copied["retrieve_s"],
        "store, processor seconds per GB": copied["store_cpu_s"] / gigabytes,
        "retrieve, processor seconds per GB": copied["retrieve_cpu_s"] / gigabytes,
        "control of a 128k prefill, ms": control["prefill_s"] * 1e3,
    }
    if "with_copies_s" in control:
        figures["control of a 128k prefill and its 8 MiB of copies, ms"] = (
            control["with_copies_s"] * 1e3
        )
    right = copied["right"]
    for tokens in LOOKUPS:
        found = [side.ask("lookup", tokens=tokens) for _ in range(7)]
        figures[f"lookup of {tokens // 1024}k tokens, ms"] = 1e3 * statistics.median(
            each["seconds"] for each in found
        )
        right = right and all(each["right"] for each in found)
    trips = side.ask("round_trips", count=300)["seconds"]
    figures["empty round trip, ms"] = statistics.median(trips) * 1e3
    if not right:
        sys.exit(f"{side.name}: wrong bytes or an incomplete hit; the figures mean nothing")
    return figures


def ratios(figures: Figures, ours: str) -> dict[str, dict[str, float]]:
    """By figure: how many times better ours is than LMCache's better mode in the same round."""
    result = {}
    for name, values in figures[ours].items():
        others = [figures[mode][name] for mode in MODES if name in figures.get(mode, {})]
        if not others:
            continue
        rate = name.endswith("GB/s")
        best = [max(each) if rate else min(each) for each in zip(*others, strict=True)]
        pairs = zip(values, best, strict=True)
        result[name] = spread([a / b if rate else b / a for a, b in pairs])
    return result


def table(figures: Figures, better: dict[str, dict[str, float]], *memcpy: list[float]) -> str:
    names = list(dict.fromkeys(name for side in figures.values() for name in side))
    lines = [
        f"| | {' | '.join(figures)} | ours against the better |",
        "|---|" + "---|" * (len(figures) + 1),
    ]
    for name in names:
        cells = []
        for side in figures.values():
            if name in side:
                s = spread(side[name])
                cells.append(f"{s['median']:.3g} ({s['min']:.3g}–{s['max']:.3g})")
            else:
                cells.append("")
        ratio = better.get(name)
        cells.append(
            f"{ratio['median']:.1f} × ({ratio['min']:.1f}–{ratio['max']:.1f})" if ratio else ""
        )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    for target, rates in zip(("private memory", "shared memory"), memcpy, strict=True):
        s = spread(rates)
        lines.append(
            f"\nmemcpy into {target}, one thread, in the same rounds: {s['median']:.1f} GB/s ({s['min']:.1f}–{s['max']:.1f})"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--lmcache-python", required=True, help="interpreter of a venv with lmcache 0.5.6"
    )
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--tokens", type=int, default=16384, help="of the request that is copied (128 KiB each)"
    )
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--l1-gb", type=float, default=3.0)
    parser.add_argument("--startup-gb", type=float, default=4.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    shape = Shape(tokens=args.tokens, block=args.block)
    figures: Figures = defaultdict(lambda: defaultdict(list))
    memcpy: list[float] = []
    shared: list[float] = []
    load: list[float] = []
    common: dict[str, Any] = {"l1_gb": args.l1_gb, "shape": asdict(shape)}

    def report() -> dict[str, Any]:
        return {
            "command": " ".join(["python -m tools.compare_lmcache", *sys.argv[1:]]),
            "machine": machine.describe(),
            "load_average": load,
            "shape": asdict(shape) | {"bytes": shape.total_bytes},
            "memcpy_GBps": spread(memcpy),
            "memcpy_into_shared_GBps": spread(shared),
            "figures": {
                side: {name: spread(values) | {"all": values} for name, values in found.items()}
                for side, found in figures.items()
            },
            "ours_against_better": ratios(figures, "ours"),
        }

    def keep() -> None:
        if args.out:
            args.out.write_text(json.dumps(report(), indent=1) + "\n")

    sides = [Side("ours", sys.executable, "tools.peers.ours_side", common)]
    try:
        sides += [
            Side(mode, args.lmcache_python, "tools.peers.lmcache_side", common | {"mode": mode})
            for mode in args.modes.split(",")
        ]
        for number in range(args.rounds + 1):
            rates = machine.memcpy_rates(3), machine.memcpy_rates(3, shared=True)
            # Every other round the other way round: nobody always goes first.
            for side in sides if number % 2 else sides[::-1]:
                found = round_of(side, number, shape.total_bytes / 1e9)
                if number:  # the first round touches memory for the first time
                    for name, value in found.items():
                        figures[side.name][name].append(value)
            if number:
                memcpy.append(rates[0]["median"])
                shared.append(rates[1]["median"])
                load.append(os.getloadavg()[0])
                keep()  # whoever ends a long run early has what was measured
            print(f"round {number} of {args.rounds}", file=sys.stderr)
        for _ in range(3):
            for side in sides:
                started = side.ask("start", l1_gb=args.startup_gb)
                name = f"start to serving, {args.startup_gb:g} GB, ms"
                figures[side.name][name].append(started["start_s"] * 1e3)
                figures[side.name]["memory when idle, MiB"].append(started["rss_mib"])
            keep()
    finally:
        for side in sides:
            side.close()
    print(table(figures, ratios(figures, "ours"), memcpy, shared))
    print(json.dumps(report()))


if __name__ == "__main__":
    main()
