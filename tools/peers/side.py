"""One side of a comparison: a process that answers JSON lines, and what both sides have in common.

A side's program calls `serve` with its operations; `Side` starts such a program and asks it. Operations
return dicts of figures. What libraries print goes to the side's log.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Shape:
    """KV cache and request of the copying figures: `layers` tensors [blocks, heads, block, 2·head_size] bf16."""

    layers: int = 32
    heads: int = 8
    head_size: int = 128
    block: int = 128
    chunk: int = 256
    tokens: int = 16384
    step: int = 8192
    """Tokens of one prefill step, and of one store."""

    @property
    def token_bytes(self) -> int:
        return self.layers * self.heads * self.head_size * 2 * 2

    @property
    def total_bytes(self) -> int:
        return self.token_bytes * self.tokens


CONTROL = Shape(layers=1, heads=1, head_size=16, block=16, tokens=131072, step=2048)
"""For what the control path costs: 128k tokens are 8 MiB of KV, next to nothing to copy."""


def token_ids(count: int, seed: int) -> list[int]:
    """Python ints, as a tokenizer gives them."""
    numbers = random.Random(seed)
    return [numbers.randrange(3, 120000) for _ in range(count)]


def block_order(count: int, seed: int) -> list[int]:
    """Blocks of a request in a cache that has been in use: scattered."""
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order


class SideError(RuntimeError):
    """The side's process failed; the message has the end of its log."""


class Side:
    """A side as its driver sees it. A context manager; `close` ends the process."""

    def __init__(self, name: str, python: str, module: str, options: Mapping[str, Any]) -> None:
        """Start `python -m module` with `options` as JSON, and wait until it is ready. Raises SideError."""
        self.name = name
        descriptor, path = tempfile.mkstemp(prefix=f"side-{name}-", suffix=".log")
        self.log = Path(path)
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with os.fdopen(descriptor, "wb") as log:
            self._process = subprocess.Popen(
                [python, "-m", module, json.dumps(dict(options))],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=env, text=True,
            )  # fmt: skip
        try:
            self.info = self._read()
        except BaseException:
            self.close()
            raise

    def ask(self, op: str, **fields: Any) -> Any:
        """One operation; its figures. Raises SideError."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"op": op, **fields}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": "the process ended"}
        if "error" in answer:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])
            raise SideError(f"{self.name}: {answer['error']}\n{tail}")
        return answer["ok"]

    def close(self) -> None:
        """Ask it to end, then kill it after a while. Idempotent."""
        if self._process.poll() is None:
            assert self._process.stdin is not None
            try:
                self._process.stdin.close()
                self._process.wait(40)
            except (OSError, subprocess.TimeoutExpired):
                self._process.kill()
                self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self.log.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def serve(start: Callable[..., Any], end: Callable[[Any], None]) -> None:
    """Be a side: `start(**options)` makes an object whose methods are the operations, until stdin closes."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    subject = None
    try:
        subject = start(**json.loads(sys.argv[1]))
        answers.write(json.dumps({"ok": getattr(subject, "info", {})}) + "\n")
        for line in sys.stdin:
            request = json.loads(line)
            operation = request.pop("op")
            answers.write(json.dumps({"ok": getattr(subject, operation)(**request)}) + "\n")
    except BaseException as error:  # noqa: BLE001  (also SystemExit: the driver must learn of it)
        traceback.print_exc()
        answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
    finally:
        if subject is not None:
            end(subject)


def cpu_seconds(*pids: int) -> float:
    """Processor time of this process and others so far: hardly changed by what else the machine does."""
    ticks = 0
    for pid in (os.getpid(), *pids):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, extremes and count of repeated figures."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "n": len(values),
    }


def p(values: Iterable[float], share: float) -> float:
    """The value below which `share` of them lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
