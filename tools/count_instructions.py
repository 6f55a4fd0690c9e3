"""How many machine instructions the hot paths of the control side execute: a benchmark for noisy machines.

Counts are valgrind's (callgrind, event Ir): every instruction that the process executes in user space, the
interpreter, numpy, msgspec and xxhash included; not the kernel's, and nothing of caches or waiting. They
hardly depend on what else the machine does (repeats agree within a per cent), so a change of a few per cent is
seen where timings differ by half. They are no times: a cache miss counts like a hit. Needs valgrind, but no
privileges; hardware counters (perf stat -e instructions:u) would do as well, but most virtual machines have none.

    python -m tools.count_instructions             table, and comparison with instruction_counts.json
    python -m tools.count_instructions --json      one JSON object instead
    python -m tools.count_instructions --update    write what was counted down as the new baseline

Ends with 1 when a count is more than the tolerance above the baseline. Counts of other versions of Python or of the
libraries cannot be compared; then it only shows both. `hot_paths.py` has the workloads.
"""

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from tools.hot_paths import TIMES
from tools.scratch import scratch_folder

BASELINE = Path(__file__).with_name("instruction_counts.json")
TOLERANCE = 0.05
WORKLOADS = ("acquire", "step", "full", "hashing")
LEAST = 10_000
"""Fewer instructions between two dumps are of the mark itself, which callgrind sees in two libraries."""
_SUMMARY = re.compile(r"^summary: (\d+)", re.MULTILINE)


class NoCounter(RuntimeError):
    """Nothing here can count; one line with what to install."""


def count(names: Sequence[str], timeout_s: float = 600.0) -> dict[str, int]:
    """Instructions of one action of each workload ("module:function", each once). Raises NoCounter."""
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        raise NoCounter("valgrind is not installed (e.g. apt-get install valgrind)")
    with scratch_folder() as folder:
        command = [
            valgrind, "--tool=callgrind", f"--callgrind-out-file={folder}/out", "--dump-before=*getsid*",
            sys.executable, "-m", "tools.hot_paths", *names,
        ]  # fmt: skip
        # The same hashes of strings, and so the same dicts, in every run; one thread.
        environment = {**os.environ, "PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"}
        ran = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if ran.returncode:
            raise NoCounter(f"valgrind or a workload failed:\n{ran.stderr[-2000:]}")
        parts = [_instructions(Path(folder, f"out.{i + 1}")) for i in range(_dumps(folder))]
    # Before a workload's first mark is its preparation, between its marks is what is counted.
    counted = [n for n in parts if n >= LEAST][1::2]
    if len(counted) != len(names):
        raise NoCounter(f"valgrind left {len(parts)} dumps for {len(names)} workloads")
    return {name: n // TIMES for name, n in zip(names, counted, strict=True)}


def _dumps(folder: str) -> int:
    return len(list(Path(folder).glob("out.*")))


def _instructions(dump: Path) -> int:
    found = _SUMMARY.search(dump.read_text(encoding="utf-8", errors="replace"))
    return int(found[1]) if found else 0


def versions() -> dict[str, str]:
    """What the counts depend on besides our code."""
    libraries = {name: metadata.version(name) for name in ("numpy", "msgspec", "xxhash")}
    return {"python": platform.python_version(), "machine": platform.machine(), **libraries}


def compare(
    counts: Mapping[str, int], baseline: Mapping[str, Any], tolerance: float
) -> list[dict[str, Any]]:
    """One row per workload. `grown`: more than `tolerance` above a baseline that can be compared."""
    same = baseline.get("versions") == versions()
    rows = []
    for name, n in counts.items():
        before = baseline.get("counts", {}).get(name)
        ratio = n / before if before else None
        grown = bool(same and ratio is not None and ratio > 1 + tolerance)
        rows.append({"name": name, "count": n, "baseline": before, "ratio": ratio, "grown": grown})
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [f"{'workload':<12}{'instructions':>16}{'baseline':>16}{'ratio':>8}"]
    for row in rows:
        before = "" if row["baseline"] is None else f"{row['baseline']:,}"
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.3f}"
        mark = "  grown" if row["grown"] else ""
        lines.append(f"{row['name']:<12}{row['count']:>16,}{before:>16}{ratio:>8}{mark}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Count the instructions of the control side's hot paths."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--update", action="store_true", help="write the counts as the baseline")
    parser.add_argument("--baseline", type=Path, default=BASELINE)
    parser.add_argument("--tolerance", type=float, default=TOLERANCE)
    given = parser.parse_args()
    try:
        found = count([f"tools.hot_paths:{name}" for name in WORKLOADS])
    except NoCounter as error:
        print(error, file=sys.stderr)
        return 2
    counts = {name.partition(":")[2]: n for name, n in found.items()}
    written = json.loads(given.baseline.read_text()) if given.baseline.exists() else {}
    rows = compare(counts, written, given.tolerance)
    result = {"versions": versions(), "counts": counts}
    if given.update:
        given.baseline.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({**result, "rows": rows}) if given.json else table(rows))
    if written and written.get("versions") != versions():
        print(f"the baseline is of other versions: {written['versions']}", file=sys.stderr)
    return int(any(row["grown"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
