"""What `doctor` finds on this host: shared memory, limits, pages, NUMA, the runtime directory, leftovers."""

import contextlib
import os
import re
import resource
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lmcache_shm.arena.errors import ArenaError
from lmcache_shm.arena.leftovers import Leftover, foreigners, leftovers
from lmcache_shm.arena.memory import SHM_DIR, Limit, check_room, limits
from lmcache_shm.arena.memory import huge_pages as arena_pages
from lmcache_shm.cli.formatting import size

DOCKER_DEFAULT_SHM = 64 << 20
FIRST_NORMAL_UID = 1000
FEW_FILES = 1024
"""A server has up to three descriptors per connection, and 128 connections."""
Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """One result of a check. `area` groups findings; `fix` is what to type or do, "" when nothing is to fix."""

    area: str
    level: Level
    text: str
    fix: str = ""

    def as_json(self) -> dict[str, str]:
        return {"area": self.area, "level": self.level, "text": self.text, "remedy": self.fix}


def ok(area: str, text: str) -> Finding:
    return Finding(area, "ok", text)


def note(area: str, text: str, fix: str = "") -> Finding:
    return Finding(area, "note", text, fix)


def problem(area: str, text: str, fix: str) -> Finding:
    return Finding(area, "problem", text, fix)


# ---------------------------------------------------------------------------------------------- host
def examine_host(
    wanted_bytes: int, *, has_arena: bool, root: Path = Path("/")
) -> Iterator[Finding]:
    """Can a server of `wanted_bytes` start here, and will it be quick? `has_arena`: the memory is reserved already."""
    yield from shared_memory(wanted_bytes, has_arena=has_arena)
    yield from users()
    yield from log_out(root)
    yield from user_limits(wanted_bytes, gpu=(root / "proc/driver/nvidia/version").exists())
    yield from huge_pages(root)
    yield from numa(root)


def shared_memory(
    wanted_bytes: int,
    *,
    has_arena: bool,
    bounds: Sequence[Limit] | None = None,
    total: int | None = None,
) -> Iterator[Finding]:
    """`bounds` and `total` replace this host's values."""
    area = "shared memory"
    try:
        bounds = limits() if bounds is None else bounds
        if total is None:
            facts = os.statvfs(SHM_DIR)
            total = facts.f_blocks * facts.f_frsize
    except (ArenaError, OSError) as error:
        yield problem(area, str(error), f"mount -t tmpfs -o size=80% tmpfs {SHM_DIR}")
        return
    if total == DOCKER_DEFAULT_SHM:
        yield problem(
            area,
            f"{SHM_DIR} has {size(total)}, the default of a container",
            "docker run --shm-size=64g …   (Compose: shm_size: 64g; Kubernetes: an emptyDir of medium "
            f"Memory at {SHM_DIR})",
        )
    elif not os.access(SHM_DIR, os.W_OK | os.X_OK):
        yield problem(
            area, f"{SHM_DIR} is not writable for uid {os.geteuid()}", f"chmod 1777 {SHM_DIR}"
        )
    else:
        yield ok(
            area, f"{SHM_DIR} has {size(total)}" if total else f"{SHM_DIR} has no limit of its own"
        )
    for limit in bounds:
        yield ok(area, f"{limit.what}: {size(limit.free)} left")
    if has_arena:
        return
    try:
        check_room(wanted_bytes, bounds)
    except ArenaError as error:
        text = str(error)
        fits = min(limit.free for limit in bounds) * 9 // 10
        smaller = f"lmcache-shm server --l1-size-gb {max(fits / 2**30, 0.0625):.2g}"
        yield problem(area, f"a server of {size(wanted_bytes)} would not start: {text}", smaller)


def users(most: int = 4) -> Iterator[Finding]:
    """The largest files in /dev/shm, and which processes have them mapped."""
    try:
        found = [
            (entry.stat(follow_symlinks=False).st_blocks * 512, entry.name)
            for entry in os.scandir(SHM_DIR)
            if entry.is_file(follow_symlinks=False)
        ]
    except OSError:
        return
    mapped = _mapped({name for _, name in found})
    for nbytes, name in sorted(found, reverse=True)[:most]:
        if nbytes >= 1 << 20:
            who = ", ".join(f"{command} ({pid})" for pid, command in mapped.get(name, [])[:3])
            yield ok(
                "shared memory",
                f"{SHM_DIR}/{name}: {size(nbytes)}, mapped by {who or 'no visible process'}",
            )


def _mapped(names: set[str]) -> dict[str, list[tuple[int, str]]]:
    """name in /dev/shm → (pid, command) of the processes that have it mapped, where we may look."""
    found: dict[str, list[tuple[int, str]]] = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            maps = Path(entry.path, "maps").read_text(encoding="utf-8", errors="replace")
            command = Path(entry.path, "comm").read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            continue
        for name in {m for m in re.findall(rf"{SHM_DIR}/(\S+)", maps) if m in names}:
            found.setdefault(name, []).append((int(entry.name), command))
    return found


def log_out(root: Path = Path("/"), uid: int | None = None) -> Iterator[Finding]:
    """logind deletes the shared memory of a normal user whose last session ends, unless RemoveIPC is off."""
    uid = os.geteuid() if uid is None else uid
    if uid < FIRST_NORMAL_UID or not (root / "run/systemd/seats").is_dir():
        return
    places = [
        root / "etc/systemd/logind.conf",
        *sorted((root / "etc/systemd/logind.conf.d").glob("*.conf")),
    ]
    chosen = "yes"
    for place in places:
        with contextlib.suppress(OSError):
            for found in re.findall(
                r"^\s*RemoveIPC\s*=\s*(\w+)", place.read_text(encoding="utf-8"), re.MULTILINE
            ):
                chosen = found.lower()
    if chosen in {"yes", "true", "1", "on"}:
        yield note(
            "shared memory",
            f"RemoveIPC is on: the arena of uid {uid}, a normal user, is deleted when the user logs out",
            "run the server as a system user (docs/deploy.md), or: loginctl enable-linger",
        )


def user_limits(wanted_bytes: int, *, gpu: bool) -> Iterator[Finding]:
    area = "limits"
    files = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if files != resource.RLIM_INFINITY and files < wanted_bytes:
        yield problem(
            area,
            f"the file size limit is {size(files)}, less than the arena",
            "ulimit -f unlimited",
        )
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if descriptors < FEW_FILES:
        yield problem(area, f"only {descriptors} open files are allowed", f"ulimit -n {FEW_FILES}")
    else:
        yield ok(area, f"{descriptors} open files are allowed")
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if locked == resource.RLIM_INFINITY:
        yield ok(area, "locked memory is not limited")
    elif gpu and locked < wanted_bytes:
        yield note(
            area,
            f"locked memory is limited to {size(locked)}; where the driver counts pinned memory, "
            "copies to and from the GPU stay pageable and slow (the engine logs it)",
            "ulimit -l unlimited   (docker run --ulimit memlock=-1; systemd: LimitMEMLOCK=infinity)",
        )
    else:
        yield ok(area, f"locked memory is limited to {size(locked)}, which matters with a GPU only")


def huge_pages(root: Path = Path("/")) -> Iterator[Finding]:
    if not (root / "sys/kernel/mm/transparent_hugepage/shmem_enabled").exists():
        return
    mode = arena_pages(root)
    if mode in {"never", "advise"}:
        yield note(
            "pages",
            f"{SHM_DIR} has no huge pages for the arena (huge={mode}); with them copies of small "
            "pages, and each engine's first use of the arena, are faster",
            f"sudo mount -o remount,huge=within_size {SHM_DIR}   (before the server starts)",
        )
    else:
        yield ok("pages", f"{SHM_DIR} has huge pages: {mode}")


def numa(root: Path = Path("/")) -> Iterator[Finding]:
    nodes = list((root / "sys/devices/system/node").glob("node[0-9]*"))
    if len(nodes) > 1:
        yield note(
            "NUMA",
            f"{len(nodes)} NUMA nodes: an arena on one of them is slower for GPUs at the others",
            "numactl --interleave=all lmcache-shm server …   (or one server per node with --instance "
            "and numactl --cpunodebind=N --membind=N)",
        )
    elif nodes:
        yield ok("NUMA", "one NUMA node")


# ---------------------------------------------------------------------------------- runtime directory
def runtime_directory(path: Path, instance: str) -> Iterator[Finding]:
    """Is the directory of the socket safe and usable?"""
    area, elsewhere = "runtime directory", "export LMCACHE_SHM_RUNTIME_DIR=$HOME/.lmcache-shm"
    socket_bytes = len(os.fsencode(path / f"{instance}.sock"))
    if socket_bytes > 107:  # sockaddr_un
        yield problem(
            area,
            f"the socket's path in {path} has {socket_bytes} bytes, 107 are allowed",
            elsewhere,
        )
        return
    try:
        facts = path.lstat()
    except FileNotFoundError:
        parent = next((p for p in path.parents if p.exists()), Path("/"))
        if os.access(parent, os.W_OK | os.X_OK):
            yield ok(area, f"{path} does not exist yet; the first server makes it")
        else:
            yield problem(area, f"{path} does not exist and {parent} is not writable", elsewhere)
        return
    except OSError as error:
        yield problem(area, f"{path}: {error.strerror}", elsewhere)
        return
    if not stat.S_ISDIR(facts.st_mode):
        yield problem(area, f"{path} is not a directory (a link is not taken)", f"rm {path}")
    elif facts.st_uid != os.geteuid():
        yield problem(
            area,
            f"{path} belongs to uid {facts.st_uid}, we are uid {os.geteuid()}: servers and engines "
            "of one cache run as one user",
            elsewhere,
        )
    elif facts.st_mode & 0o700 != 0o700:
        yield problem(area, f"{path} has mode {facts.st_mode & 0o777:o}", f"chmod 700 {path}")
    elif facts.st_mode & 0o077:
        yield problem(
            area,
            f"{path} is open to other users (mode {facts.st_mode & 0o777:o})",
            f"chmod 700 {path}",
        )
    else:
        yield ok(area, f"{path}, mode 700")


# ------------------------------------------------------------------------------------------ leftovers
def owner(instance: str, folder: Path) -> int:
    """Pid of the live server that has this instance's arena or lock; 0 if none has (or it is unknown)."""
    return max(
        (entry.pid for entry in leftovers(folder) if entry.live and entry.instance == instance),
        default=0,
    )


def has_arena(instance: str, folder: Path) -> bool:
    """Whether this instance has its memory already: of a live server, or left for the next one."""
    return any(entry.kind == "data" and entry.instance == instance for entry in leftovers(folder))


def examine_leftovers(folder: Path) -> Iterator[Finding]:
    """Findings about files whose server is gone."""
    dead: dict[str, list[Leftover]] = {}
    for entry in leftovers(folder):
        if not entry.live:
            dead.setdefault(entry.instance, []).append(entry)
    for instance, entries in dead.items():
        held = sum(entry.nbytes for entry in entries if entry.kind in {"data", "meta"})
        what = entries[0].note
        if held:
            yield note(
                "leftovers",
                f"instance {instance} has no server, and {size(held)} in /dev/shm ({what})",
                f"lmcache-shm server --instance {instance} …   takes it over warm; lmcache-shm purge removes it",
            )
        else:
            yield note("leftovers", f"instance {instance}: {what}", "lmcache-shm purge")
    if not dead:
        yield ok("leftovers", "nothing of dead servers")
    for other in foreigners():
        text = f"{other.path} ({size(other.nbytes)}) {other.why}"
        if other.in_the_way_of:
            yield problem(
                "leftovers",
                f"{text}: no server of instance {other.in_the_way_of} can start",
                f"have its owner remove it (rm -r {other.path}), or: lmcache-shm server --instance OTHER",
            )
        else:
            yield ok("leftovers", f"{text}: it is left alone")
