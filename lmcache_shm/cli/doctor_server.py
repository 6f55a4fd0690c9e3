"""The server's side of `doctor`: where it listens, what dead ones left, how a live one does."""

import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lmcache_shm import __version__
from lmcache_shm.arena.memory import SHM_DIR
from lmcache_shm.arena.processes import stat as process_stat
from lmcache_shm.cli.backing import REMEDY, of_snapshot
from lmcache_shm.cli.doctor_use import compare_namespaces, examine_use
from lmcache_shm.cli.figures import duration
from lmcache_shm.cli.findings import Finding, note, ok, problem
from lmcache_shm.client.connection import (
    NOT_OURS,
    Connection,
    ControlError,
    DeadlineExceeded,
    ProtocolError,
    Refused,
)
from lmcache_shm.protocol.messages import (
    PROTOCOL,
    Check,
    CheckReply,
    Hello,
    HelloReply,
    Status,
    StatusReply,
)

Snapshot = Mapping[str, Any]


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


# ------------------------------------------------------------------------------------------- no answer
def no_answer(path: Path, instance: str, owner: int, error: ControlError) -> Iterator[Finding]:
    """Nobody serves this instance for us: why? `owner`: pid of the arena's live owner, 0 if there is none."""
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
    hello = Hello(PROTOCOL, "tool", "", os.getpid(), {"command": "doctor"})
    connection = Connection.open(str(path), hello, deadline_s)
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
    if backing := of_snapshot(arena):
        yield ok(area, backing) if arena["growing"] else problem(area, backing, REMEDY)
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
