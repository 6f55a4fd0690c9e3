"""Commands about a running server, its arena, its leftovers and its options."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from lmcache_shm.arena.check import check as check_arena
from lmcache_shm.arena.layout import SlotState
from lmcache_shm.arena.leftovers import foreigners, leftovers
from lmcache_shm.arena.leftovers import purge as remove
from lmcache_shm.arena.owner import runtime_dir, safe_dir
from lmcache_shm.arena.segment import ArenaError, attach
from lmcache_shm.cli.app import CommandError
from lmcache_shm.cli.command import INSTANCE, Json, Yes, confirmed, flags, server_of
from lmcache_shm.cli.formatting import (
    count,
    duration,
    percent,
    reserved_of,
    reserved_size,
    size,
    unshared,
)
from lmcache_shm.config import OPTIONS, SERVER, Config, ConfigError, connector_config, server_config
from lmcache_shm.protocol.messages import (
    Check,
    CheckReply,
    Clear,
    Done,
    Shutdown,
    Status,
    StatusReply,
)


@flags(INSTANCE)
def status(*, as_json: Json = False, **given: Any) -> None:
    """Show what a server holds and what it has done."""
    with server_of(server_config(given), "status") as server:
        found = server.call(Status(), StatusReply).snapshot
    print(json.dumps(found) if as_json else "\n".join(_status_lines(found)))


def _status_lines(s: dict[str, Any]) -> list[str]:
    server, arena, counters = s["server"], s["arena"], s["counters"]
    nbytes, slots = arena["bytes"], arena["slots"]
    held = ", ".join(f"{name} {slots[name]}" for name in ("pinned", "reserved", "quarantined"))
    taken = nbytes["used"] + nbytes["reserved"]  # as in top
    share = percent(taken, arena["data_bytes"])
    used = f"{size(taken)} of {size(arena['data_bytes'])} used ({share})"
    up = f"up {duration(server['uptime_s'])}{', draining' if server['draining'] else ''}"
    done = {"look-ups": "acquires", "slots stored": "commits", "evicted": "evictions"}
    lines = [
        f"server    {server['instance']}, pid {server['pid']}, version {server['version']}, {up}",
        f"arena     {used}, {count(slots['used'])} slots; {held}",
        *([f"memory    {backing}"] if (backing := reserved_of(arena)) else []),
        "work      " + ", ".join(f"{count(counters.get(n, 0))} {word}" for word, n in done.items()),
    ]
    hit, asked = counters.get("hit_tokens", 0), counters.get("query_tokens", 0)
    if asked:
        lines.append(f"hits      {percent(hit, asked)} of {count(asked)} tokens asked for")
    missed = ", ".join(f"{name} {count(n)}" for name, n in s["misses"].items() if n)
    if missed:
        lines.append(f"misses    {missed}")
    for space in s["namespaces"]:
        lines.append(
            f"model     {space['name']} (namespace {space['id']}, chunks of {space.get('chunk_size')})"
        )
        lines += [
            f"          {group['name']}: {group['kind']}"
            + (f" {group['window']}" if group["window"] else "")
            + f", {count(group['slots'])} slots of {size(group['slot_bytes'])}"
            + _served(group)
            for group in space["groups"]
        ]
    lines += [
        f"apart     namespaces {one} and {other} of {model}: {'; '.join(differing)}"
        for model, one, other, differing in unshared(s["namespaces"])
    ]
    lines += [
        f"engine    {client['engine_id']} (pid {client['pid']}): "
        f"{'connected' if client['connected'] else 'gone'}, {len(client['workers'])} worker{'s' * (len(client['workers']) != 1)}, "
        f"{client['leases']} leases, {client['reservations']} reservations, {client['quarantined']} in quarantine"
        for client in s["clients"]
    ]
    return lines


def _served(group: dict[str, Any]) -> str:
    """What share of its look-ups a group served, as in `top`; "" before the first one."""
    asked = group["served"] + group["misses"]
    return f", served {percent(group['served'], asked)} of {count(asked)} look-ups" if asked else ""


@flags(INSTANCE)
def check(*, as_json: Json = False, **given: Any) -> None:
    """Prove that the arena and its slot table are consistent. Works without a server, too."""
    config = server_config(given)
    try:
        arena = attach(config.instance, writable_data=False)
    except ArenaError as error:
        raise CommandError(str(error)) from None
    live, findings = True, []
    try:
        with server_of(config, "check") as server:
            findings = server.call(Check(), CheckReply, 60.0).findings
    except CommandError:
        live = False
    findings += [line for line in check_arena(arena, live=live) if line not in findings]
    used = int((arena.hot["state"] == SlotState.COMMITTED).sum())
    data, backed = arena.data_bytes, arena.backed_bytes
    backing = reserved_size(backed, data, growing=live and arena.growing)
    arena.close()
    seen = "beside its server" if live else "without a server"
    if as_json:
        print(
            json.dumps(
                {
                    "ok": not findings,
                    "findings": findings,
                    "slots_used": used,
                    "server": live,
                    "data_bytes": data,
                    "backed_bytes": backed,
                }
            )
        )
    elif findings:
        print("\n".join(findings))
    else:
        print(f"consistent: instance {config.instance}, {used} slots used, looked at {seen}")
        if backing:
            print(f"memory: {backing}")
    if findings:
        raise typer.Exit(1)


@flags(INSTANCE)
def clear(
    *,
    namespace: Annotated[
        int | None, typer.Option(help="Number of a namespace (see status).")
    ] = None,
    salt: Annotated[str | None, typer.Option(help="A cache salt.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All that is cached.")] = False,
    yes: Yes = False,
    **given: Any,
) -> None:
    """Forget what is cached: of a namespace, of a cache salt, or all of it."""
    config = server_config(given)
    if not everything and namespace is None and salt is None:
        raise CommandError("say what to clear: --namespace N, --salt TEXT, or --all", 2)
    if everything and (namespace is not None or salt is not None):
        raise CommandError("--all goes with neither --namespace nor --salt", 2)
    with server_of(config, "clear") as server:
        known = {
            space["id"]: space
            for space in server.call(Status(), StatusReply).snapshot["namespaces"]
        }
        if namespace is not None and namespace not in known:
            there = ", ".join(map(str, known)) or "none"
            raise CommandError(f"there is no namespace {namespace}; there are: {there}", 2)
        what = (
            "everything"
            if namespace is None
            else f"namespace {namespace} ({known[namespace]['name']})"
        )
        what += "" if salt is None else f" under the salt {salt!r}"
        if not confirmed(f"Forget {what} in instance {config.instance}?", yes=yes):
            raise CommandError("nothing was cleared")
        request = Clear(
            -1 if namespace is None else namespace, None if salt is None else salt.encode()
        )
        print(f"{server.call(request, Done, 60.0).count} slots forgotten")


@flags(INSTANCE)
def stop(
    *,
    now: Annotated[
        bool, typer.Option("--now", help="Do not wait for engines to finish their copies.")
    ] = False,
    **given: Any,
) -> None:
    """End a running server, after it has drained."""
    config = server_config(given)
    with server_of(config, "stop") as server:
        pid = server.hello.pid
        left = server.call(Shutdown(not now), Done).count
    print(f"server {pid} ends" + (f" when {left} leases are released" if left and not now else ""))


@flags(INSTANCE)
def purge(*, yes: Yes = False, as_json: Json = False, **given: Any) -> None:
    """Remove what dead servers left behind (of one instance, if you name it): segments, sockets, locks.

    Only what is this user's; what is not is named and stays.
    """
    config = server_config(given)
    folder = safe_dir(Path(config.runtime_dir)) if config.runtime_dir else runtime_dir()
    named = config.origins["instance"] != "default"
    dead = [
        entry
        for entry in leftovers(folder)
        if not entry.live and (not named or entry.instance == config.instance)
    ]
    if dead and not as_json:
        print("\n".join(f"{size(e.nbytes):>9}  {e.path}  {e.note}" for e in dead))
    if not as_json and not named:
        for other in foreigners():
            print(f"{size(other.nbytes):>9}  {other.path}  {other.why}: stays")
    if dead and not confirmed(f"Remove these {len(dead)} files?", yes=yes):
        raise CommandError("nothing was removed")
    removed = remove(dead)
    freed = sum(entry.nbytes for entry in removed)
    if as_json:
        print(json.dumps({"removed": [str(entry.path) for entry in removed], "bytes": freed}))
    else:
        print(f"{len(removed)} files removed, {size(freed)} freed")


@flags(option.name for option in SERVER)
def config(
    *,
    connector: Annotated[
        str | None, typer.Option(help="kv_connector_extra_config of an engine, as JSON.")
    ] = None,
    as_json: Json = False,
    **given: Any,
) -> None:
    """Show every option, its value, and where it comes from: a flag, the environment, or the default."""
    serving = server_config(given)
    engine = connector_config(_json_object(connector))
    rows = []
    for option in OPTIONS.values():
        source: Config = engine if option.scope == "engine" else serving
        if option.scope == "both" and engine.origins[option.name] == option.connector:
            source = engine
        rows.append((option, getattr(source, option.name), source.origins[option.name]))
    if as_json:
        print(json.dumps({o.name: {"value": value, "from": origin} for o, value, origin in rows}))
        return
    width = max(len(name) for name in OPTIONS)
    shown = {True: "true", False: "false"}
    for option, value, origin in rows:
        text = option.shown if origin == "default" else shown.get(value, value)
        unit = f" {option.unit}" if option.unit and text != "auto" else ""
        print(f"{option.name:<{width}}  {f'{text}{unit}':<28}  {origin}")


def _json_object(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--connector is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(
            "--connector: expected a JSON object, as in '{\"lmcache_shm.deadline_ms\": 100}'"
        )
    return found
