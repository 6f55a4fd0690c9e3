"""What dead servers left: segments in /dev/shm, sockets and locks in the runtime directory. And what is not ours."""

from collections.abc import Iterator
from pathlib import Path

from lmcache_shm.arena.leftovers import Leftover, foreigners, leftovers
from lmcache_shm.cli.figures import size
from lmcache_shm.cli.findings import Finding, note, ok, problem


def owner(instance: str, folder: Path) -> int:
    """Pid of the live server that has this instance's arena or lock; 0 if none has (or it is unknown)."""
    return max(
        (entry.pid for entry in leftovers(folder) if entry.live and entry.instance == instance),
        default=0,
    )


def has_arena(instance: str, folder: Path) -> bool:
    """Whether this instance has its memory already: of a live server, or left for the next one."""
    return any(entry.kind == "data" and entry.instance == instance for entry in leftovers(folder))


def examine(folder: Path) -> Iterator[Finding]:
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
