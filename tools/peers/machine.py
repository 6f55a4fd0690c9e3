"""What the machine can do: the figures next to which all others are read."""

import mmap
import os
import platform
import re
import time
from pathlib import Path
from typing import Any

import numpy as np

from .side import spread

GIB = 1 << 30


def memcpy_rates(repeats: int = 5, *, shared: bool = False) -> dict[str, float]:
    """GB/s (10^9) of one thread copying 1 GiB that has been touched before (numpy's memcpy).

    shared: the target is shared memory, as an arena is (4 KiB pages where the kernel gives no larger
    ones to shared memory, which costs some of the rate).
    """
    source = np.ones(GIB, dtype=np.uint8)
    if shared:
        fd = os.memfd_create("memcpy")
        os.ftruncate(fd, GIB)
        target = np.frombuffer(mmap.mmap(fd, GIB), dtype=np.uint8)
        os.close(fd)
    else:
        target = np.empty_like(source)
    target[:] = 0
    rates = []
    for _ in range(repeats):
        started = time.perf_counter()
        np.copyto(target, source)
        rates.append(GIB / 1e9 / (time.perf_counter() - started))
    return spread(rates)


def describe() -> dict[str, Any]:
    """Processor, cores this process may use, memory, kernel, Python."""
    cpu = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    memory = re.search(r"^MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return {
        "cpu": cpu.group(1) if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(memory.group(1)) / 2**20, 1) if memory else None,
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
    }
