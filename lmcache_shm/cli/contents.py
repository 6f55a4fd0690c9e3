"""Commands that look into the cache: `ls` (prefixes as a tree) and `inspect` (one chunk)."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from lmcache_shm.arena.layout import SlotState
from lmcache_shm.arena.segment import Arena, ArenaError, attach
from lmcache_shm.arena.slot import token_area
from lmcache_shm.cli.app import CommandError
from lmcache_shm.cli.command import INSTANCE, Json, flags, server_of
from lmcache_shm.cli.formatting import count, duration, size
from lmcache_shm.config import server_config
from lmcache_shm.protocol.messages import List, ListReply, Status, StatusReply
from lmcache_shm.server.catalog.groups import CatalogError, Namespace
from lmcache_shm.server.catalog.namespaces import NamespaceStore

SHOWN_IDS = 16
SHORT = 12
"""Hex digits of a key in lists; `inspect` takes any beginning that is unique."""


# ---------------------------------------------------------------------------------------------- ls
@flags(INSTANCE)
def ls(
    *,
    namespace: Annotated[
        int, typer.Option(help="Number of a namespace (see status); -1: all.")
    ] = -1,
    limit: Annotated[
        int, typer.Option(help="At most so many chunks, the latest used.", min=1)
    ] = 1000,
    as_json: Json = False,
    **given: Any,
) -> None:
    """List what is cached as a tree of prefixes. A line is a run of chunks; what continues it is indented."""
    with server_of(server_config(given), "ls") as server:
        entries = server.call(List(namespace, limit), ListReply, 30.0).entries
        spaces = server.call(Status(), StatusReply).snapshot["namespaces"]
    if as_json:
        print(json.dumps({"namespaces": spaces, "chunks": entries}))
        return
    for space in spaces:
        mine = [entry for entry in entries if entry["namespace"] == space["id"]]
        if mine:
            print(f"namespace {space['id']}  {space['name']}  ({count(len(mine))} chunks)")
            print("\n".join(_tree_lines(mine, space)))
    if not entries:
        print("nothing is cached")
    elif len(entries) == limit:
        print(f"… the latest {limit}; --limit shows more")


def _tree_lines(entries: list[dict[str, Any]], space: dict[str, Any]) -> Iterator[str]:
    """Runs of chunks that only continue each other share a line; depth counts branchings, not chunks."""
    children: dict[str, int] = {}
    for entry in entries:
        entry["groups"].sort()
        children[entry["parent"]] = children.get(entry["parent"], 0) + 1
    depths: dict[str, int] = {}
    run: list[dict[str, Any]] = []
    for entry in entries:
        follows = bool(run) and entry["parent"] == run[-1]["key"]
        if follows and children[entry["parent"]] == 1 and entry["groups"] == run[-1]["groups"]:
            run.append(entry)
        else:
            if run:
                yield _run_line(run, depths[run[0]["key"]], space)
            depths[entry["key"]] = depths.get(entry["parent"], -1) + 1
            run = [entry]
        depths[entry["key"]] = depths[run[0]["key"]]
    if run:
        yield _run_line(run, depths[run[0]["key"]], space)


def _run_line(run: list[dict[str, Any]], depth: int, space: dict[str, Any]) -> str:
    first, last = run[0], run[-1]
    chunks = (
        f"chunk {first['chunk']}" if first is last else f"chunks {first['chunk']}-{last['chunk']}"
    )
    tokens = space.get("chunk_size", 0) * len(run)
    names = [space["groups"][g]["name"] for g in first["groups"] if g < len(space["groups"])]
    age = duration(time.time() - max(entry["created_s"] for entry in run))
    total = size(sum(entry["bytes"] for entry in run))
    hits = max(entry["hits"] for entry in run)
    pinned = ", in use" if any(entry["pins"] for entry in run) else ""
    return (
        f"  {'  ' * depth}{first['key'][:SHORT]}  {chunks}, {count(tokens)} tokens, {total}, "
        f"{', '.join(names)}; hits {count(hits)}, {age} old{pinned}"
    )


# ----------------------------------------------------------------------------------------- inspect
@flags(INSTANCE)
def inspect(
    chunk: Annotated[str, typer.Argument(help="Beginning of a key (see ls), or @ROW.")],
    *,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Directory with the model's tokenizer.json: show text.")
    ] = None,
    all_tokens: Annotated[
        bool, typer.Option("--all", help="All token ids, not just the first.")
    ] = False,
    as_json: Json = False,
    **given: Any,
) -> None:
    """Show one cached chunk: where it is, who may use it, its token ids or text. Needs no server."""
    config = server_config(given)
    try:
        arena = attach(config.instance, writable_data=False)
        spaces = {space.id: space for space in NamespaceStore(arena).load()[1]}
    except (ArenaError, CatalogError) as error:
        raise CommandError(str(error)) from None
    try:
        found = [_facts(arena, row, spaces) for row in _rows(arena, chunk)]
    finally:
        arena.close()
    text = None if tokenizer is None else _text(tokenizer, found[0]["tokens"])
    if as_json:
        print(json.dumps({"slots": found, "text": text}))
        return
    first = found[0]
    print(f"key      {first['key']}")
    print(f"parent   {first['parent']}")
    print(f"chunk    {first['chunk']} of its prefix, {len(first['tokens'])} tokens")
    print(f"model    {first['model']} (namespace {first['namespace']})")
    for slot in found:
        print(
            f"slot     {slot['row']}: {slot['group']}, {size(slot['bytes'])} at byte {slot['offset']}, "
            f"generation {slot['generation']}, pins {slot['pins']}, hits {slot['hits']}"
        )
    ids = first["tokens"] if all_tokens else first["tokens"][:SHOWN_IDS]
    more = "" if len(ids) == len(first["tokens"]) else f" … (--all shows {len(first['tokens'])})"
    print(f"tokens   {' '.join(map(str, ids))}{more}")
    if text is not None:
        print(f"text     {text!r}")


def _rows(arena: Arena, chunk: str) -> list[int]:
    """Committed rows of one key, given by its beginning or by one of its rows. Raises CommandError."""
    committed = np.flatnonzero(arena.hot["state"] == SlotState.COMMITTED)
    keys = np.ascontiguousarray(arena.cold["key"][committed]).view("S16").ravel()
    if chunk.startswith("@"):
        if not chunk[1:].isdigit() or int(chunk[1:]) not in committed:
            raise CommandError(f"{chunk}: expected @ROW with the number of a slot in use", 2)
        wanted = {_hex(arena, int(chunk[1:]))}
    else:
        start = chunk.lower()
        if not start or set(start) - set("0123456789abcdef"):
            raise CommandError(f"{chunk!r} is neither the beginning of a key (hex) nor @ROW", 2)
        head = bytes.fromhex(start[: len(start) // 2 * 2])
        near = committed[np.char.startswith(keys, head)] if head else committed
        wanted = {
            key for key in (_hex(arena, row) for row in near.tolist()) if key.startswith(start)
        }
    if len(wanted) != 1:
        problem = (
            f"{len(wanted)} keys begin so; type more of it"
            if wanted
            else "no such key (lmcache-shm ls)"
        )
        raise CommandError(f"{chunk}: {problem}", 2)
    key = bytes.fromhex(wanted.pop())
    return [row for row in committed.tolist() if arena.cold["key"][row].tobytes() == key]


def _hex(arena: Arena, row: int) -> str:
    key: bytes = arena.cold["key"][row].tobytes()
    return key.hex()


def _facts(arena: Arena, row: int, spaces: dict[int, Namespace]) -> dict[str, Any]:
    """One slot's facts; its token ids are [] when the slot was reused while it was read."""
    hot, cold = arena.hot[row], arena.cold[row]
    generation = int(hot["generation"])
    space = spaces.get(int(hot["namespace"]))
    number = int(hot["group"])
    tokens: list[int] = []
    name, model = f"group {number}", "unknown"
    if space is not None and number < len(space.groups):
        spec = space.groups[number].spec
        name, model = spec.name, str(spec.info.get("model") or "unknown")
        at = int(cold["offset"]) + spec.slot_bytes - token_area(space.chunk_size)
        tokens = _token_ids(arena.data[at : at + int(cold["token_bytes"])])
    if int(arena.hot["generation"][row]) != generation:
        tokens = []
    return {
        "row": row,
        "key": cold["key"].tobytes().hex(),
        "parent": cold["parent"].tobytes().hex(),
        "namespace": int(hot["namespace"]),
        "model": model,
        "group": name,
        "chunk": int(cold["chunk"]),
        "offset": int(cold["offset"]),
        "bytes": int(cold["slot_bytes"]),
        "generation": generation,
        "pins": int(hot["pins"]),
        "hits": int(hot["hits"]),
        "created_s": int(cold["created_ns"]) / 1e9,
        "tokens": tokens,
    }


def _token_ids(encoded: bytes) -> list[int]:
    ids: list[int] = np.frombuffer(encoded, "<u4").tolist()
    return ids


def _text(folder: Path, ids: list[int]) -> str:
    try:
        from tokenizers import Tokenizer  # noqa: PLC0415  (optional, and heavy)
    except ModuleNotFoundError:
        raise CommandError(
            "--tokenizer needs the package tokenizers; pip install tokenizers"
        ) from None
    file = folder if folder.is_file() else folder / "tokenizer.json"
    if not file.is_file():
        raise CommandError(f"there is no {file}; give the model's directory", 2)
    try:
        return str(Tokenizer.from_file(str(file)).decode(ids, skip_special_tokens=False))
    except Exception as error:  # noqa: BLE001  (the package raises just that)
        raise CommandError(f"{file} cannot be read as a tokenizer: {error}") from None
