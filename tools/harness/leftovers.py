"""What a test run leaves behind: found, named, and (for a run that was killed) removed.

Every process that a run starts inherits `MARK=<pid>:<start time>` of the pytest process; instances
are named `test-<pid>-…`. So the leftovers of a dead run can be told from a live neighbour's.
Run as a program (`python -m tools.harness.leftovers`) it clears what dead runs left.
"""

import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

MARK = "LMCACHE_SHM_TEST_RUN"
SHM = Path("/dev/shm")
SEGMENT = re.compile(r"lmcache_shm\.(?:\d+\.)?test-(\d+)-")
shared_processes: set[int] = set()
"""Processes that a fixture of wider scope started anew in the middle of a test, and will end."""
SCRATCH = re.compile(r"lmcshm-test-(\d+)-")


def start_time(pid: int) -> str:
    """The kernel's start time of a process ("" when it is gone or a zombie): pids are reused, this is not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def mark() -> str:
    return f"{os.getpid()}:{start_time(os.getpid())}"


def marked_processes() -> Iterator[tuple[int, str]]:
    """(pid, mark) of each live process of this user that any test run has started."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if entry.stat().st_uid != os.geteuid():  # root may look at others', but not end them
                continue
            environ = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        for item in environ:
            if item.startswith(MARK.encode() + b"=") and start_time(int(entry.name)):
                yield int(entry.name), item.partition(b"=")[2].decode()


def processes_of(run: str) -> dict[int, str]:
    """pid → command line of what this run started and still lives (the pytest process itself excepted)."""
    found = {}
    for pid, owner in marked_processes():
        if owner == run and pid != int(run.partition(":")[0]):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            found[pid] = command[:160]
    return found


def segments() -> set[str]:
    """Names in /dev/shm that could be ours: the project's and those that vLLM's ranks share, minus those of other
    live test runs."""
    names = set()
    for entry in SHM.iterdir():
        match = SEGMENT.match(entry.name)
        foreign = match and int(match[1]) != os.getpid() and start_time(int(match[1]))
        if entry.name.startswith(("lmcache_shm", "vllm_dist_", "psm_")) and not foreign:
            names.add(entry.name)
    return names


def is_mapped_elsewhere(name: str, own: set[int]) -> bool:
    """Whether a process that this run did not start has the segment mapped: then it is a neighbour's."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) not in own:
            try:
                if f"/dev/shm/{name}" in (entry / "maps").read_text():
                    return True
            except OSError:
                continue
    return False


def is_ours(path: Path) -> bool:
    """/dev/shm and /tmp are everybody's: whether this user owns what is there (a link itself, not its target)."""
    try:
        return path.lstat().st_uid == os.geteuid()
    except OSError:
        return False


def clear_dead_runs() -> list[str]:
    """End and remove what dead runs of this user left; returns what was done, one line each."""
    done = []
    for pid, owner in marked_processes():
        owner_pid, _, started = owner.partition(":")
        if start_time(int(owner_pid)) != started and pid != os.getpid():
            os.kill(pid, signal.SIGKILL)
            done.append(f"ended process {pid} of a test run that is gone")
    if done:
        time.sleep(0.2)  # the kernel takes a moment to drop their mappings
    for folder, pattern in ((SHM, SEGMENT), (Path(tempfile.gettempdir()), SCRATCH)):
        for entry in folder.iterdir():
            match = pattern.match(entry.name)
            if match and not start_time(int(match[1])) and is_ours(entry):
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry, ignore_errors=True)
                else:
                    entry.unlink(missing_ok=True)
                done.append(f"removed {entry}")
    return done


if __name__ == "__main__":
    for line in clear_dead_runs():
        print(line)
