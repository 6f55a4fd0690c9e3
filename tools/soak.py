"""Random faults for a while, and a table of what became of them.

    python -m tools.soak --seconds 1800 --seed 1
    python -m tools.soak --all-points            # every failpoint, before and after, killed and stopped

Real processes: a server and three simulated engines of two workers each on one arena that holds a quarter
of what they want. Every byte that is loaded is compared with what its key demands. Ends with status 1 when a
byte was wrong, a request stuck, or anything was left behind.
"""

import argparse
import itertools
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tools.harness import leftovers
from tools.harness.cluster import Cluster
from tools.harness.points import POINTS
from tools.harness.strike import lose_scheduler, strike

ENGINES = 3
CHECK_EVERY = 12


class Soak:
    """One run."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster = cluster
        self.random = random.Random(seed)
        self.faults: Counter[str] = Counter()
        self.leaks: list[str] = []
        self.memory: dict[str, int] = {}

    def begin(self) -> None:
        self.cluster.start_server()
        self.cluster.add_engines(*[{}] * ENGINES)
        self.cluster.settle()
        self.memory = self.cluster.memory()

    def all_points(self) -> None:
        """Every failpoint in every way."""
        ways = list(itertools.product(("before", "after"), ("kill", "stop")))
        for number, (point, (when, do)) in enumerate(itertools.product(POINTS, ways)):
            strike(self.cluster, point, when, do)
            self.faults[f"{do} at a failpoint of the {point.process}"] += 1
            self.cluster.prove(1)
            self.look()
            if number % 20 == 19:
                print(f"{number + 1} of {len(POINTS) * len(ways)} …", flush=True)

    def run(self, seconds: float) -> None:
        """Random faults; everything is proved now and then, and at the end."""
        began = said = time.monotonic()
        for number in itertools.count():
            now = time.monotonic()
            if now > began + seconds:
                break
            if now > said + 60:
                said = now
                print(f"{now - began:.0f} s: {self.line()}", flush=True)
            self.fault()
            if number % CHECK_EVERY == CHECK_EVERY - 1:
                self.cluster.prove(1)
                self.look()
        self.cluster.prove()
        self.look()

    def fault(self) -> None:
        """One fault of a random kind, then a moment of work in which it is found and mended."""
        kind = self.random.choice(
            [
                "kill",
                "kill",
                "stop",
                "stop",
                "point",
                "point",
                "point",
                "reconnect",
                "clear",
                "lose",
            ]
        )
        cluster = self.cluster
        if kind == "point":
            point = self.random.choice(POINTS)
            do = self.random.choice(["kill", "stop"])
            strike(cluster, point, self.random.choice(["before", "after"]), do)
            self.faults[f"{do} at a failpoint of the {point.process}"] += 1
            return
        engine = self.random.choice(cluster.engines)
        if kind in {"reconnect", "clear"}:
            engine.tell(**{kind: True})
            self.faults[
                {"reconnect": "connections broken", "clear": "namespace cleared"}[kind]
            ] += 1
        elif kind == "lose":
            cluster.settle()
            cluster.drive(lambda: all(e.reply["up"] for e in cluster.engines), "all are connected")
            cluster.settle()
            lose_scheduler(cluster, self.random.choice(cluster.engines))
            self.faults["scheduler killed while its worker was stopped in a copy"] += 1
        else:
            who, pid = self.victim()
            if kind == "kill":
                kill(pid)
            else:
                cluster.stop(pid, self.random.uniform(0.05, 1.5))
            self.faults[f"{kind} of the {who} at a random time"] += 1
        until = time.monotonic() + self.random.uniform(0.1, 1.0)
        cluster.drive(lambda: time.monotonic() > until, "a moment of work")

    def victim(self) -> tuple[str, int]:
        """A process chosen at random; a server as often as a scheduler or a worker."""
        who = self.random.choice(["server", "scheduler", "worker"])
        engine = self.random.choice(self.cluster.engines)
        if who == "server":
            assert self.cluster.server is not None
            return who, self.cluster.server.pid
        if who == "scheduler" or not engine.workers:
            return "scheduler", engine.process.pid
        return who, self.random.choice(engine.workers)

    def look(self) -> None:
        """`prove` has seen that leases drain and the tables agree; here: no memory, no names."""
        memory = self.cluster.memory()
        if memory != self.memory:
            self.leaks.append(f"memory was {self.memory}, is {memory}")
            self.memory = memory

    def line(self) -> str:
        total = self.cluster.total()
        return (
            f"{total['operations']} operations, {sum(self.faults.values())} faults, {total['wrong']} wrong "
            f"bytes, {len(self.leaks)} leaks, {total['stuck']} stuck"
        )

    def table(self, seconds: float) -> str:
        total, kept = self.cluster.total(), self.cluster.kept
        loads = total["loads_ok"] + total["loads_generation"] + total["loads_arena"]
        before, adopted = (sum(column) for column in zip(*kept, strict=True)) if kept else (0, 0)
        rows = [
            ("operations", f"{total['operations']:,} in {seconds:.0f} s"),
            ("faults injected", f"{sum(self.faults.values()):,}"),
            *((f"– {kind}", str(n)) for kind, n in sorted(self.faults.items())),
            ("chunks loaded and compared", f"{total['hit_chunks']:,}"),
            (
                "loads refused by the generation check",
                f"{total['loads_generation']:,} of {loads:,}",
            ),
            ("**wrong bytes**", str(total["wrong"])),
            ("**leaks** (memory, names, pins, reservations, quarantine)", str(len(self.leaks))),
            ("**stuck requests**", str(total["stuck"])),
            (
                "committed slots found again after a server's death",
                f"{adopted / before:.4f} ({len(kept)} restarts)" if before else "no restart",
            ),
        ]
        return "\n".join(["| what | how many |", "|---|---|", *(f"| {a} | {b} |" for a, b in rows)])


def kill(pid: int) -> None:
    try:
        os.kill(pid, 9)
    except ProcessLookupError:
        pass  # it has just been replaced


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.soak", description=__doc__.split("\n", 1)[0]
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--all-points", action="store_true", help="every failpoint in every way, then end"
    )
    options = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix=f"lmcshm-soak-{os.getpid()}-"))
    os.environ["LMCACHE_SHM_RUNTIME_DIR"] = str(folder)
    os.environ.setdefault(leftovers.MARK, leftovers.mark())
    began = time.monotonic()
    soak = None
    try:
        with Cluster(f"test-{os.getpid()}-soak") as cluster:
            soak = Soak(cluster, options.seed)
            soak.begin()
            if options.all_points:
                soak.all_points()
            else:
                soak.run(options.seconds)
        if cluster.memory():
            soak.leaks.append(f"left at the end: {cluster.memory()}")
    finally:
        if soak is not None:
            print(soak.table(time.monotonic() - began), flush=True)
        shutil.rmtree(folder, ignore_errors=True)
    total = soak.cluster.total()
    kept_all = all(adopted >= 0.99 * before for before, adopted in soak.cluster.kept)
    return int(bool(total["wrong"] or total["stuck"] or soak.leaks or not kept_all))


if __name__ == "__main__":
    sys.exit(main())
