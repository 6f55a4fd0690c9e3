"""vLLM end to end on a CPU, with our connector, others, and none: python -m tools.compare_vllm_offload.

A round starts one engine after the other (there is room for one), in alternating order. Each runs prompts of
several lengths cold, after a reset of vLLM's own prefix cache, and as a local prefix hit; then a batch of
prompts that nobody has seen. The model has dummy weights and 128 KiB of KV a token. One JSON object is the
last line (and goes to --out).
"""

import argparse
import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from tools.peers import machine
from tools.peers.side import Side, SideError, spread

VLLM = ("none", "ours", "simple", "offloading")
LMCACHE = ("engine_driven", "lmcache_driven")
NAMES = {
    "none": "no connector",
    "ours": "LMCacheShmConnector",
    "simple": "SimpleCPUOffloadConnector",
    "offloading": "OffloadingConnector",
    "engine_driven": "LMCache, engine_driven",
    "lmcache_driven": "LMCache, lmcache_driven",
}
BATCH = {"prompts": 16, "tokens": 300, "outputs": 64}
Figures = dict[str, dict[str, list[float]]]


def run_engine(connector: str, python: str, lengths: list[int], number: int) -> dict[str, float]:
    """Start one engine, measure, end it. Times in ms."""
    figures: dict[str, float] = {}
    options = {"connector": connector}
    with Side(connector, python, "tools.peers.vllm_side", options) as side:
        external = connector != "none"
        side.ask("prompt", tokens=lengths[0], seed=1, external=external)  # warms every path
        side.ask("throughput", seed=2, **(BATCH | {"outputs": 4}))
        for tokens in lengths:
            found = side.ask(
                "prompt", tokens=tokens, seed=1000 * number + tokens, external=external
            )
            if not found.pop("alike"):
                raise SideError(f"{connector}: the answers differ; the figures mean nothing")
            for name, seconds in found.items():
                run, _, what = name.partition("_")
                label = "first token" if what == "first_s" else "8 tokens"
                figures[f"{tokens} tokens, {run}, {label}, ms"] = seconds * 1e3
            if external:
                ratio = found["hit_seconds"] / found["local_seconds"]
                figures[f"{tokens} tokens, hit ÷ local hit, 8 tokens"] = ratio
        rates = [
            side.ask("throughput", seed=10 * number + k, **BATCH)["tokens_per_s"] for k in (1, 2)
        ]
        figures["no hits, output tokens/s"] = max(rates)
    return figures


def table(figures: Figures) -> str:
    sides = list(figures)
    names = list(dict.fromkeys(name for side in sides for name in figures[side]))
    lines = [f"| | {' | '.join(NAMES[side] for side in sides)} |", "|---|" + "---|" * len(sides)]
    for name in names:
        cells = []
        for side in sides:
            values = figures[side].get(name)
            s = spread(values) if values else None
            cells.append(f"{s['median']:.3g} ({s['min']:.3g}–{s['max']:.3g})" if s else "")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def against_none(figures: Figures) -> dict[str, dict[str, float]]:
    """Output tokens/s without hits, over those without a connector in the same round."""
    name = "no hits, output tokens/s"
    base = figures.get("none", {}).get(name, [])
    return {
        side: spread([a / b for a, b in zip(found[name], base, strict=True)])
        for side, found in figures.items()
        if base and side != "none"
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--connectors", default="", help=f"of {', '.join(VLLM + LMCACHE)}")
    parser.add_argument(
        "--lmcache-python", help="interpreter of a venv with lmcache 0.5.6: adds its modes"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--lengths", default="257,513,1025,2049,4097", help="prompt lengths in tokens"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    chosen = [c for c in args.connectors.split(",") if c]
    connectors = chosen or [*VLLM, *(LMCACHE if args.lmcache_python else ())]
    lengths = [int(each) for each in args.lengths.split(",")]
    figures: Figures = {name: defaultdict(list) for name in connectors}
    memcpy: list[float] = []
    load: list[float] = []

    def report() -> dict[str, Any]:
        return {
            "command": " ".join(["python -m tools.compare_vllm_offload", *sys.argv[1:]]),
            "machine": machine.describe(),
            "load_average": load,
            "memcpy_GBps": spread(memcpy),
            "batch": BATCH,
            "figures": {
                side: {name: spread(values) | {"all": values} for name, values in found.items()}
                for side, found in figures.items()
            },
            "throughput_against_none": against_none(figures),
        }

    for number in range(1, args.rounds + 1):
        memcpy.append(machine.memcpy_rates(3)["median"])
        for connector in connectors if number % 2 else connectors[::-1]:
            python = args.lmcache_python if connector in LMCACHE else sys.executable
            for name, value in run_engine(connector, python, lengths, number).items():
                figures[connector][name].append(value)
            print(f"round {number} of {args.rounds}: {connector}", file=sys.stderr)
        load.append(os.getloadavg()[1])
        if args.out:  # whoever ends a long run early has what was measured
            args.out.write_text(json.dumps(report(), indent=1) + "\n")
    print(table(figures))
    print(json.dumps(report()))


if __name__ == "__main__":
    main()
