"""Engines without an engine: look-ups, stores and loads against a running server, to see `top` at work.

    python -m tools.synthetic_load --instance NAME [--seconds 60] [--picture docs/img/top.svg]

Two pretended engines (a GDN hybrid and a sliding-window model) serve prompts that share prefixes. What is
stored and pinned is real; the slots' contents are not written. ``--picture`` writes what `top` shows at the
end as an SVG file.
"""

import argparse
import json
import os
import random
import re
import time
from pathlib import Path

import numpy as np
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from lmcache_shm.cli.bench_control import BenchEngine, PrivateServer
from lmcache_shm.cli.top import Source
from lmcache_shm.cli.top_view import History, View, frame, joined
from lmcache_shm.config import server_config
from lmcache_shm.protocol.messages import GroupInfo, Step, Stepped

MODELS = {
    "Qwen/Qwen3.5-4B": (
        320,
        [
            GroupInfo("full", "full", 0, [3], 8, [160]),
            GroupInfo("recurrent", "recurrent", 0, [0, 1, 2], 24, [160]),
        ],
        [1_310_720, 823_296],
    ),
    "openai/gpt-oss-20b": (
        256,
        [
            GroupInfo("full", "full", 0, [1], 12, [16]),
            GroupInfo("window-128", "window", 128, [0], 12, [16]),
        ],
        [786_432, 393_216],
    ),
}


class PretendedEngine(BenchEngine):
    """An engine that looks up, stores and loads at random."""

    def __init__(self, server: PrivateServer, model: str, rng: random.Random) -> None:
        chunk_size, groups, regions = MODELS[model]
        descriptor = json.dumps({"model": {"weights": model}, "parallel": {"tensor": 1}}).encode()
        name = f"{model.rpartition('/')[2].lower()}-{rng.randrange(1 << 16):04x}"
        super().__init__(
            server, groups, regions, chunk_size, name, descriptor=descriptor, model=model
        )
        self.groups = range(len(groups))
        self.rng = rng
        self.prefixes = [self._text(rng.randrange(2, 14)) for _ in range(24)]
        self.leases: list[tuple[float, int]] = []
        self.writing: list[tuple[float, bytes]] = []

    def _text(self, chunks: int) -> list[int]:
        return [self.rng.randrange(150_000) for _ in range(chunks * self.chunk_size)]

    def request(self, now: float) -> None:
        """A prompt: a shared prefix and something new; its hit is held, and its rest stored, for a moment."""
        # Prefixes are not equally popular, and go out of fashion.
        chosen = self.rng.choice(self.prefixes[: self.rng.randrange(1, len(self.prefixes) + 1)])
        if self.rng.random() < 0.02:
            self.prefixes[self.rng.randrange(len(self.prefixes))] = self._text(
                self.rng.randrange(2, 14)
            )
        tokens = chosen + self._text(self.rng.randrange(0, 2)) + [1]
        keys = self.keys(tokens)
        hit = self.acquire(keys, len(tokens))
        if hit.lease:
            self.leases.append((now + self.rng.uniform(0.05, 0.6), hit.lease))
        if hit.n_chunks < len(keys):
            rows = self.reserve(keys, self.groups, hit.n_chunks, len(keys))
            self.writing.append((now + self.rng.uniform(0.05, 0.4), rows[rows >= 0].tobytes()))

    def settle(self, now: float) -> None:
        """Let go of what is due."""
        commit = b"".join(rows for at, rows in self.writing if at <= now)
        release = [lease for at, lease in self.leases if at <= now]
        self.writing = [item for item in self.writing if item[0] > now]
        self.leases = [item for item in self.leases if item[0] > now]
        if commit or release:
            self.scheduler.call(Step(commit=commit, release=release), Stepped)

    def close(self) -> None:
        self.settle(float("inf"))
        super().close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instance", default="default")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--per-second", type=float, default=40.0, help="requests")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--size", default="100x34", help="of the picture, in characters")
    given = parser.parse_args()
    config = server_config({"instance": given.instance})
    rng = random.Random(7)
    source, history = Source(config), History()
    server = PrivateServer(config.instance, str(source.path))
    engines = [PretendedEngine(server, model, rng) for model in MODELS]
    start = time.monotonic()
    look_at = start
    while (now := time.monotonic()) < start + given.seconds:
        # The load breathes, so that the sparklines have something to show.
        if rng.random() < 0.55 + 0.45 * np.sin((now - start) / 9):
            rng.choice(engines).request(now)
        for engine in engines:
            engine.settle(now)
        if now >= look_at:
            look_at += 1.0
            history.add(now, source.fetch())
        time.sleep(1 / given.per_second)
    if given.picture:
        width, height = map(int, given.size.split("x"))
        with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
            console = Console(
                record=True,
                width=width,
                file=nowhere,
                force_terminal=True,
                color_system="truecolor",
            )
            console.print(joined(frame(source.fetch(), history, View(width, height))))
        # Without fonts from elsewhere: a picture should show the same on any machine.
        plain = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
        plain = plain.replace("Fira Code", "Menlo, Consolas, DejaVu Sans Mono")
        console.save_svg(str(given.picture), title="lmcache-shm top", code_format=plain)
    for engine in engines:
        engine.close()
    source.close()


if __name__ == "__main__":
    main()
