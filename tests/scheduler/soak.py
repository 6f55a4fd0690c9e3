"""Run many random workloads: ``python -m tests.scheduler.soak --schedules 20000``.

A *schedule* is one random workload from an empty arena to the end. A failure prints the seed and what
went before; ``--seed N --schedules 1`` repeats it. Segments and the runtime directory carry this process's
id as those of a test run do, so what a killed soak leaves is removed by the next soak or ``bin/test``.
"""

import argparse
import gc
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import fields

from tests.scheduler import workload
from tests.scheduler.families import FAMILIES
from tools.harness import leftovers


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.scheduler.soak", description=__doc__)
    parser.add_argument("--schedules", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--family", choices=FAMILIES, help="only this geometry")
    parser.add_argument("--keep-going", action="store_true", help="do not end at the first failure")
    parser.add_argument(
        "--minutes", type=float, default=0, help="end after this time, if it comes first"
    )
    given = parser.parse_args()
    for line in leftovers.clear_dead_runs():
        print(line)
    # An ordinary kill ends it like Ctrl-C does: every arena is removed on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    with tempfile.TemporaryDirectory(prefix=f"lmcshm-test-{os.getpid()}-") as folder:
        os.environ["LMCACHE_SHM_RUNTIME_DIR"] = folder
        gc.freeze()  # vLLM's modules need not be looked at again and again
        try:
            return soak(given)
        finally:
            gc.unfreeze()


def soak(given: argparse.Namespace) -> int:
    began = last = time.monotonic()
    totals: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    try:
        for n in range(given.schedules):
            seed = given.seed + n
            drawn = workload.make(seed, given.family)
            try:
                outcome = workload.run(drawn, f"test-{os.getpid()}-soak")
            except Exception as error:  # noqa: BLE001 - an exception out of the engine is a finding, too
                told = str(error) if isinstance(error, AssertionError) else traceback.format_exc()
                failures[
                    f"{type(error).__name__} {getattr(error, 'kind', '')} {drawn.setup.family.name}"
                ] += 1
                print(f"FAILED {drawn.name}\n{told}\n", flush=True)
                if not given.keep_going:
                    return 1
                continue
            totals["workloads"] += 1
            for field in fields(outcome):
                if field.name != "name":
                    totals[field.name] += getattr(outcome, field.name)
            now = time.monotonic()
            if n % 50 == 0:
                gc.collect()  # mappings of arenas that are in reference cycles
            if now - last > 30:
                last = now
                print(f"{n + 1} in {now - began:.0f} s: {dict(totals)}", flush=True)
            if given.minutes and now - began > 60 * given.minutes:
                break
    finally:  # also when it was told to end
        print(
            f"{totals['workloads']} workloads in {time.monotonic() - began:.0f} s: {dict(totals)}"
        )
        for what, times in failures.most_common():
            print(f"{times} × {what}")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
