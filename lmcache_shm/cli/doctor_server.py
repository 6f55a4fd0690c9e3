"""What `doctor` finds at a server: why none answers, or whether it is whole, is used, and helps."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lmcache_shm import __version__
from lmcache_shm.arena.memory import SHM_DIR
from lmcache_shm.arena.processes import stat as process_stat
from lmcache_shm.cli.command import connect
from lmcache_shm.cli.doctor_host import Finding, note, ok, problem
from lmcache_shm.cli.formatting import RESERVE_FIX, count, duration, percent, reserved_of, unshared
from lmcache_shm.client.connection import (
    NOT_OURS,
    ControlError,
    DeadlineExceeded,
    ProtocolError,
    Refused,
)
from lmcache_shm.protocol.messages import Check, CheckReply, HelloReply, Status, StatusReply

Snapshot = Mapping[str, Any]
SHORT_LIFE_S = 60.0
"""A cache whose coldest chunk is younger than this turns over too fast to be of use."""
ENOUGH_LOOKUPS = 3


# ------------------------------------------------------------------------------------------- no answer
def no_answer(path: Path, instance: str, owner: int, error: ControlError) -> Iterator[Finding]:
    """Why no server answers for this instance. `owner`: pid of the arena's live owner, 0 if there is none."""
    area = "server"
    if isinstance(error, Refused) and error.code == NOT_OURS:
        yield problem(area, str(error), f"rm {path}, or another --runtime-dir")
        return
    if isinstance(error, Refused | ProtocolError):
        yield problem(area, str(error), f"pip install lmcache-shm=={__version__}   (on both sides)")
        return
    if owner and process_stat(owner)[0] in {"T", "t"}:
        yield problem(area, f"server {owner} is stopped", f"kill -CONT {owner}")
    elif isinstance(error, DeadlineExceeded):
        yield problem(
            area,
            f"the server does not answer: {error}",
            f"kill {owner or 'PID'}, then start it again",
        )
    elif owner:
        other = [
            p for p in _sockets() if p.name == f"{instance}.sock" and p != path and _ours(p.parent)
        ]
        where = other[0].parent if other else Path("DIR")
        yield problem(
            area,
            f"server {owner} owns instance {instance}, but does not listen at {path}: it has another "
            f"runtime directory{f' ({where})' if other else ''}",
            f"export LMCACHE_SHM_RUNTIME_DIR={where}   "
            f'(for engines: "lmcache_shm.runtime_dir":"{where}")',
        )
    else:
        running = sorted(
            p.stem
            for p in _sockets()
            if p.parent == path.parent and p.suffix == ".sock" and p != path
        )
        text = f"no server of instance {instance} is running"
        if running:
            text += f"; running here: {', '.join(running)}"
        yield problem(area, text, _start_line(instance))
        if path.exists():
            yield ok(area, f"{path} is left over; the next server replaces it")


def _ours(folder: Path) -> bool:
    try:
        return folder.lstat().st_uid == os.geteuid()
    except OSError:
        return False


def _start_line(instance: str) -> str:
    name = "" if instance == "default" else f" --instance {instance}"
    return f"lmcache-shm server{name}"


def _sockets() -> list[Path]:
    """Listening Unix sockets of this network namespace that have a path."""
    try:
        lines = Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    # Num RefCount Protocol Flags Type St Inode Path; flag 0x10000: listening
    words = [line.split(maxsplit=7) for line in lines[1:]]
    return [Path(w[7]) for w in words if len(w) == 8 and int(w[3], 16) & 0x10000 and w[7][0] == "/"]


# -------------------------------------------------------------------------------------------- a server
def greet(path: Path, deadline_s: float = 3.0) -> tuple[HelloReply, Snapshot, list[str]]:
    """(greeting, snapshot, what `check` finds) of the server at `path`. Raises ControlError."""
    connection = connect(path, "doctor", deadline_s)
    try:
        snapshot = connection.call(Status(), StatusReply).snapshot
        findings = connection.call(Check(), CheckReply, 30.0).findings
        return connection.hello, snapshot, findings
    finally:
        connection.close()


def health(hello: HelloReply, snapshot: Snapshot, broken: list[str]) -> Iterator[Finding]:
    """A server that answers: is it whole, is it used, does it help?"""
    area, server = "server", snapshot["server"]
    yield ok(
        area,
        f"instance {hello.instance}: version {hello.server_version}, pid {hello.pid}, up "
        f"{duration(server['uptime_s'])}",
    )
    if hello.server_version != __version__:
        yield note(
            area, f"the server is lmcache-shm {hello.server_version}, this is {__version__}",
            "restart the server from this environment",
        )  # fmt: skip
    if not Path(SHM_DIR + hello.data).exists():
        yield problem(
            area,
            f"the server's arena is not in this {SHM_DIR}: they are different mounts, engines here "
            "cannot map it",
            "share it: docker run --ipc=host (or --ipc=container:SERVER) for both",
        )
    arena = snapshot["arena"]
    if backing := reserved_of(arena):
        yield ok(area, backing) if arena["growing"] else problem(area, backing, RESERVE_FIX)
    if broken:
        yield problem(
            area,
            f"the slot table is inconsistent: {broken[0]}",
            "lmcache-shm check; then restart with --fresh",
        )
    if server["draining"]:
        yield problem(
            area,
            "the server is draining: it takes no new work",
            f"start another: {_start_line(hello.instance)}",
        )
    yield from _engines_of(snapshot)
    yield from examine_use(snapshot)
    yield from compare_namespaces(snapshot)


def _engines_of(snapshot: Snapshot) -> Iterator[Finding]:
    connected = [client for client in snapshot["clients"] if client["connected"]]
    if not connected:
        yield note(
            "engines", "no engine is connected",
            "start one with the line that the server printed at its start (README)",
        )  # fmt: skip
    for client in snapshot["clients"]:
        title = f"engine {client['engine_id']} (pid {client['pid'] or '?'})"
        dead = [str(worker["rank"]) for worker in client["workers"] if not worker["alive"]]
        stopped = [
            str(w["pid"])
            for w in client["workers"]
            if w["alive"] and process_stat(w["pid"])[0] in {"T", "t"}
        ]
        if dead and client["connected"]:
            yield problem(
                "engines",
                f"{title}: workers of rank {', '.join(dead)} are gone",
                "restart the engine",
            )
        if stopped:
            yield problem(
                "engines", f"{title}: workers are stopped", f"kill -CONT {' '.join(stopped)}"
            )
        if any(w["alive"] and w["pid"] <= 0 for w in client["workers"]):
            yield note(
                "engines",
                f"{title} runs in another pid namespace than the server: when a connection breaks, its "
                "slots wait until it has ended or is back",
                "docker run --pid=host for both, or shareProcessNamespace: true   (docs/deploy.md)",
            )
        if client["connected"]:
            yield ok(
                "engines", f"{title}: {len(client['workers'])} workers, {client['leases']} leases"
            )
        elif client["quarantined"]:
            yield note(
                "engines",
                f"{title} is gone; {client['quarantined']} slots stay in quarantine until its workers end",
                "end what is left of that engine" if not stopped else "",
            )


# ----------------------------------------------------------------------------------------- is it used
def examine_use(snapshot: Snapshot) -> Iterator[Finding]:
    """Does it help, and if not, why?"""
    counters, misses, arena = snapshot["counters"], snapshot["misses"], snapshot["arena"]
    area, asked, served = "use", counters["query_tokens"], counters["hit_tokens"]
    if asked:
        yield ok(
            area,
            f"{percent(served, asked)} of {count(asked)} looked-up tokens were served from the arena",
        )
    if counters["acquires"] >= ENOUGH_LOOKUPS and not served:
        ranked = sorted(((n, reason) for reason, n in misses.items() if n), reverse=True)
        reason = ranked[0][1] if ranked else "never_seen"
        text, fix = WHY_NO_HITS.get(
            reason, (reason.replace("_", " "), "see docs/troubleshooting.md")
        )
        yield problem(area, f"{counters['acquires']} look-ups and no hit: {text}", fix)
    for reason, (text, fix) in ENGINE_SIDE.items():
        if misses.get(reason):
            yield note(area, f"{misses[reason]} times {text}", fix)
    if counters["stores_skipped_full"] and not arena.get("growing"):  # more room is on its way
        yield problem(
            area,
            f"{counters['stores_skipped_full']} stores found no room that was not in use",
            _larger(arena["data_bytes"]),
        )
    age = arena.get("coldest_age_s")
    if counters["evictions"] and age is not None and age < SHORT_LIFE_S:
        yield problem(
            area,
            f"the oldest chunk was used {duration(age)} ago: the arena turns over too fast to serve much",
            _larger(arena["data_bytes"]),
        )


def _larger(data_bytes: int) -> str:
    return f"lmcache-shm server --l1-size-gb {data_bytes * 2 / 2**30:g}"


WHY_NO_HITS = {
    "never_seen": (
        "the prompts share no whole chunk with what was stored",
        "compare prompt lengths with the chunk size; send one prompt twice to test (docs/troubleshooting.md)",
    ),
    "evicted": (
        "chunks are evicted before they are asked for",
        "start the server with a larger --l1-size-gb",
    ),
    "other_namespace": (
        "the chunks were stored by an engine of other settings",
        "lmcache-shm status   (shows what differs between the namespaces)",
    ),
    "incomplete_group": (
        "one of the model's cache groups misses its part of each prefix",
        "probe the model: lmcache-shm probe MODEL, and use the step budget that it prints",
    ),
    "identity": (
        "the same tokens were stored under another cache salt, adapter or image",
        "use the same cache_salt if the users may share",
    ),
    "collision": (
        "the same tokens were stored under another cache salt, adapter or image",
        "use the same cache_salt if the users may share",
    ),
}
ENGINE_SIDE = {
    "no_server": ("an engine looked up while there was no server", "keep the server running"),
    "deadline": (
        "the server answered too late",
        'give it a free CPU, or raise "lmcache_shm.deadline_ms"',
    ),
    "lease_limit": ("too much was pinned at once", "lower --max-num-seqs of the engine"),
}


def compare_namespaces(snapshot: Snapshot) -> Iterator[Finding]:
    """One model in several namespaces: engines that could share, and do not."""
    for name, first, other, differing in unshared(snapshot["namespaces"]):
        yield note(
            "use",
            f"{name}: namespaces {first} and {other} share nothing: {'; '.join(differing[:4]) or 'see status'}",
            "start the engines with equal settings if they should share",
        )
