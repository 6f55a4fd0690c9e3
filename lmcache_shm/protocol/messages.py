"""What travels on the control socket: one struct per message, a u32 length in front of each frame.

A frame is ``u32 little-endian length | msgpack``; a struct is an array whose first element is its
tag. A connection begins with :class:`Hello`. Every reply carries the boot id of the server, so a
client notices a restart at the first answer. Packed fields are little-endian numpy arrays as bytes;
their widths stand behind the fields. Rows are slot numbers: indices into the arena's slot table.
"""

import hashlib
import struct
from typing import Any

import msgspec

PROTOCOL = 3
MAX_FRAME = 16 << 20
"""Bytes of one frame's body."""
MAX_KEYS = 128 << 10
"""Keys in one Acquire or Reserve."""
KEY = 16
"""Bytes of a chain key."""
LENGTH = struct.Struct("<I")

EXISTS, BUSY, FULL = -1, -2, -3
"""In place of a row in the answer to a Reserve: stored already, being written, no room now."""


class Message(msgspec.Struct, array_like=True, tag=True, gc=False):
    """A frame's content; unknown trailing fields of a newer peer are ignored."""


# ---------------------------------------------------------------------------------------- requests
class Hello(Message):
    """First message of a connection; answered by HelloReply. `pid` and `info` are for display only."""

    version: int
    role: str
    """"scheduler", "worker" or "tool"."""
    engine_id: str = ""
    pid: int = 0
    info: dict[str, str | int | float | bool] = {}


class AttachWorker(Message):
    """A worker is there and says how many bytes of a slot it fills; answered by Attached.

    It holds its connection open as long as it lives: pid and liveness come from the socket.
    `region_bytes[g]` is its share of a slot of object group g. Ranks that hold the same bytes
    (`replicas` neighbouring ranks, e.g. all of a MLA model) share one region. `facts`: what only a worker knows
    and the namespace must hold; the server hands them to the engine's scheduler as they are.
    """

    engine_id: str
    rank: int
    world: int
    replicas: int
    region_bytes: list[int]
    facts: bytes = b""


class GroupInfo(Message):
    """One object group: what is stored as one object, and the rule of its hits."""

    name: str
    rule: str
    """"full", "window", "chunked_local" or "recurrent"."""
    param: int = 0
    """Window or local chunk in tokens."""
    kv_groups: list[int] = []
    layers: int = 0
    block_sizes: list[int] = []
    parts: list[str] = []
    """One text per KV cache group in it, for people: kind, window, block size."""


class Register(Message):
    """The scheduler side asks for slots of its groups; answered by Registered.

    Until all `world` workers have attached, the answer has ``ready=False`` and says who is missing:
    ask again. So it has when `facts` is not the digest of all that the workers say of themselves: the answer holds
    it, and `descriptor` has to be made of it. `descriptor` is the canonical namespace. `busy_rows` (i4) are rows that this engine
    reserved on a connection that broke and that its workers may still be writing: these stay
    quarantined until they are given in `Step.abort`; all other quarantined rows of the engine are freed.
    """

    engine_id: str
    world: int
    replicas: int
    chunk_size: int
    descriptor: bytes
    groups: list[GroupInfo]
    busy_rows: bytes = b""
    name: str = ""
    """The model's name, for people."""
    facts: bytes = b""
    """`facts_digest` of what the workers say of themselves, as `descriptor` holds it."""


class Acquire(Message):
    """Look up a prefix and pin what a hit needs; answered by Acquired.

    keys: KEY bytes per chunk. `local_tokens`: what the engine already holds; `num_tokens`: length of the
    request. `replaces`: a lease to release first (0: none).
    """

    keys: bytes
    local_tokens: int
    num_tokens: int
    replaces: int = 0


class Reserve(Message):
    """Slots to write; entry i is one chunk of one object group. All fields hold n entries."""

    groups: bytes  # u2, index of the object group
    keys: bytes  # KEY bytes each
    parents: bytes  # KEY bytes each
    chunks: bytes  # u4, number of the chunk in its prefix
    digests: bytes  # 16 bytes each, of the extra identity
    salts: bytes  # u8


class Step(Message):
    """All of one scheduler step, done in this order: release, commit, abort, reserve; answered by Stepped.

    Rows must be this connection's own, leases too; else nothing is done and the answer is an Error.
    """

    reserve: Reserve | None = None
    commit: bytes = b""  # i4 rows
    abort: bytes = b""  # i4 rows
    release: list[int] = []


class Report(Message):
    """Counts of what only the client sees: misses by reason (no_server, deadline, collision, …)."""

    counts: dict[str, int]


class Clear(Message):
    """Forget committed chunks: of one namespace (-1: all), of one cache salt (None: all). Answered by Done."""

    namespace: int = -1
    salt: bytes | None = None


class Status(Message):
    """Ask for the snapshot; answered by StatusReply."""


class List(Message):
    """What is cached in a namespace (-1: all); at most `limit` chunks. Answered by ListReply."""

    namespace: int = -1
    limit: int = 1000


class Check(Message):
    """Compare the server's index with the slot table; answered by CheckReply."""


class Drain(Message):
    """Give no new leases from now on; answered by Done with the number of leases outstanding."""


class Shutdown(Message):
    """End the server; `drain`: when the last lease is gone or its drain time is over."""

    drain: bool = True


# ----------------------------------------------------------------------------------------- replies
class HelloReply(Message):
    boot: bytes
    version: int
    arena_id: bytes
    instance: str
    data: str
    meta: str
    """Names of the two shared-memory segments."""
    chunk_size: int
    """0: the engine chooses."""
    separate: bool
    checksum: str
    """"off", "store" or "verify"."""
    server_version: str
    pid: int


class Attached(Message):
    boot: bytes
    client: int
    """Index of the engine in the arena's boards."""


class Registered(Message):
    """The engine's place; offsets are bytes from the start of a slot."""

    boot: bytes
    arena_id: bytes
    ready: bool
    message: str = ""
    namespace: int = -1
    client: int = -1
    chunk_size: int = 0
    slot_bytes: list[int] = []
    region_offsets: list[list[int]] = []
    """[group][rank]"""
    checksum_offset: list[int] = []
    """Start of 8 bytes per rank, by group."""
    token_offset: list[int] = []
    """Start of the token ids, by group."""
    facts: list[bytes] = []
    """By rank, what the workers say of themselves; only where ``ready`` is False for want of it."""


class Acquired(Message):
    """A hit of `n_chunks` chunks (0: a miss, lease 0). By group: number of the first pinned chunk, and rows."""

    boot: bytes
    lease: int
    n_chunks: int
    first: list[int]
    rows: list[bytes]  # i4


class Stepped(Message):
    boot: bytes
    rows: bytes = b""  # i4, one per reserved entry: a row, EXISTS, BUSY or FULL


class Done(Message):
    boot: bytes
    count: int = 0


class StatusReply(Message):
    boot: bytes
    snapshot: dict[str, Any]


class ListReply(Message):
    boot: bytes
    entries: list[dict[str, Any]]


class CheckReply(Message):
    boot: bytes
    findings: list[str]


class Error(Message):
    """The request did nothing. code: "version", "hello", "refused", "busy" (refused
    for now), "limit", "not_yours", "invalid", "draining"."""

    boot: bytes
    code: str
    message: str


Request = (
    Hello
    | AttachWorker
    | Register
    | Acquire
    | Step
    | Report
    | Clear
    | Status
    | List
    | Check
    | Drain
    | Shutdown
)
Reply = (
    HelloReply
    | Attached
    | Registered
    | Acquired
    | Stepped
    | Done
    | StatusReply
    | ListReply
    | CheckReply
    | Error
)

_encoder = msgspec.msgpack.Encoder()
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode


def facts_digest(facts: list[bytes]) -> bytes:
    """A digest of what all workers of an engine say of themselves, by rank; b"" when none says anything."""
    if not any(facts):
        return b""
    return hashlib.blake2b(_encoder.encode(facts), digest_size=16).digest()


def frame(message: Message) -> bytearray:
    """The bytes on the wire. Raises ValueError when the body is longer than MAX_FRAME."""
    buffer = bytearray(LENGTH.size)
    _encoder.encode_into(message, buffer, LENGTH.size)
    body = len(buffer) - LENGTH.size
    if body > MAX_FRAME:
        raise ValueError(f"a frame of {body} bytes; at most {MAX_FRAME} are allowed")
    LENGTH.pack_into(buffer, 0, body)
    return buffer
