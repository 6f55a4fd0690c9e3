"""Every option of the project, once: name, default, unit, help, check, and where it may be set.

The fields of :class:`Config` are the table. From it come the server's flags (``--chunk-size``), the
environment variables (``LMCACHE_SHM_CHUNK_SIZE``), the connector options
(``"lmcache_shm.chunk_size"`` in ``kv_connector_extra_config``), ``lmcache-shm config`` and the
options reference. What is given explicitly wins over the environment, which wins over the default.
An unknown or misspelt name, or a value that does not pass its check, is one :class:`ConfigError`
of one line.
"""

import difflib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal

PREFIX = "lmcache_shm."
ENV_PREFIX = "LMCACHE_SHM_"
# Variables with the prefix that are no options: a test run's mark, failpoints of the fault harness.
ENV_FOREIGN = ("LMCACHE_SHM_TEST_", "LMCACHE_SHM_FAIL")

Scope = Literal["server", "engine", "both"]


class ConfigError(ValueError):
    """One line: what is wrong, what is expected, what to type."""

    def __init__(self, line: str) -> None:
        super().__init__(" ".join(line.split()))  # whatever a name or a value holds


# ------------------------------------------------------------------------------------------ checks
# A check takes what a person gave (text, or JSON's number or boolean) and returns the value, or
# raises ValueError whose text completes "expected …".


def whole(low: int, high: int) -> Callable[[Any], int]:
    def check(given: Any) -> int:
        if isinstance(given, bool) or not re.fullmatch(r"[+-]?\d+", str(given).strip()):
            raise ValueError(f"a whole number from {low} to {high}")
        if not low <= int(given) <= high:
            raise ValueError(f"a whole number from {low} to {high}")
        return int(given)

    return check


def number(low: float, high: float) -> Callable[[Any], float]:
    def check(given: Any) -> float:
        try:
            value = float("nan") if isinstance(given, bool) else float(given)
        except (TypeError, ValueError):
            value = float("nan")
        if not low <= value <= high:  # not a number fails, too
            raise ValueError(f"a number from {low:g} to {high:g}")
        return value

    return check


def one_of(*names: str) -> Callable[[Any], str]:
    def check(given: Any) -> str:
        for name in names:
            if str(given).lower() == name.lower():
                return name
        raise ValueError(f"one of {', '.join(names)}")

    return check


def switch(given: Any) -> bool:
    word = str(given).strip().lower()
    if word in {"1", "true", "yes", "on"}:
        return True
    if word in {"0", "false", "no", "off"}:
        return False
    raise ValueError("true or false")


def instance_name(given: Any) -> str:
    # It becomes part of a segment's and a socket's name.
    if isinstance(given, str) and re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,47}", given):
        return given
    raise ValueError("a name of at most 48 letters, digits, '-', '_' and '.'")


def chunk_size(given: Any) -> int:
    """Tokens; 0 stands for ``auto``."""
    if str(given).strip().lower() == "auto":
        return 0
    try:
        return whole(1, 1 << 20)(given)
    except ValueError:
        raise ValueError("auto, or tokens per chunk from 1 to 1048576") from None


def folder(given: Any) -> str:
    """An absolute path; "" stands for the default place."""
    if given == "":
        return ""
    if isinstance(given, str) and "\0" not in given:
        try:
            return os.path.abspath(os.path.expanduser(given))  # noqa: PTH100, PTH111  (pathlib is slow to import)
        except OSError:  # a relative one, in a working directory that was removed
            raise ValueError("an absolute directory") from None
    raise ValueError("a directory")


def text(given: Any) -> str:
    if isinstance(given, str) and given and "\0" not in given:
        return given
    raise ValueError("a text")


def title(given: Any) -> str:
    """Any short text; "" stands for none."""
    if isinstance(given, str) and len(given) <= 200 and "\0" not in given:
        return given
    raise ValueError("a name of at most 200 characters")


# ------------------------------------------------------------------------------------------- table
@dataclass(frozen=True, slots=True)
class Option:
    """One row of the table; `default` is the checked value, `shown` how users write it."""

    name: str
    default: Any
    unit: str
    help: str
    check: Callable[[Any], Any]
    scope: Scope
    shown: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.name.upper()

    @property
    def connector(self) -> str:
        return PREFIX + self.name


def _option(
    default: Any,
    unit: str,
    help_text: str,
    check: Callable[[Any], Any],
    scope: Scope,
    shown: str | None = None,
) -> Any:
    row = {"unit": unit, "help": help_text, "check": check, "scope": scope, "shown": shown}
    return field(default=default, metadata=row)


@dataclass(frozen=True)
class Config:
    """Checked values of all options; fields without a row in the table record where values came from."""

    instance: str = _option(
        "default", "", "Name of the cache: servers and engines of one name meet.",
        instance_name, "both",
    )  # fmt: skip
    runtime_dir: str = _option(
        "", "", "Directory (0700) of sockets and locks.", folder, "both",
        "$XDG_RUNTIME_DIR/lmcache-shm, else /tmp/lmcache-shm-UID",
    )  # fmt: skip
    chunk_size: int = _option(
        0, "tokens", "Unit of caching; auto: the smallest admissible multiple of the model's "
        "block sizes from 256 on.", chunk_size, "both", "auto",
    )  # fmt: skip
    l1_size_gb: float = _option(
        4.0, "GiB", "Size of the shared-memory arena.", number(0.0625, 65536), "server"
    )
    eviction_policy: str = _option(
        "LRU", "", "Which chunks leave a full arena: least recently used first.",
        one_of("LRU"), "server",
    )  # fmt: skip
    separate_object_groups: bool = _option(
        True, "", "Store layers of different windows as objects of their own; off: one object "
        "per chunk, kept as full attention.", switch, "server",
    )  # fmt: skip
    keep_arena: bool = _option(
        False, "", "Leave the arena in /dev/shm at the end, for a warm start.", switch, "server"
    )
    fresh: bool = _option(
        False, "", "Start empty even if an arena of this instance could be adopted.",
        switch, "server",
    )  # fmt: skip
    checksum: str = _option(
        "off", "", "Checksums of slot contents: off, store (made at commit), verify (also "
        "compared at each load, and by a scrub while the server is idle).", one_of("off", "store", "verify"), "server",
    )  # fmt: skip
    reserve: str = _option(
        "behind", "", "When the arena's memory is reserved: behind (its first 512 MiB before the server "
        "is ready, the rest behind the first requests), or wait (all of it before).",
        one_of("behind", "wait"), "server",
    )  # fmt: skip
    prefault_threads: int = _option(
        2, "threads", "Threads that touch the arena's pages after the start; 0: none.",
        whole(0, 256), "server",
    )  # fmt: skip
    metrics_port: int = _option(
        0, "", "Prometheus metrics over HTTP at this port; 0: none.", whole(0, 65535), "server"
    )
    metrics_host: str = _option(
        "127.0.0.1", "", "Address at which the metrics are served.", text, "server"
    )
    drain_s: float = _option(
        2.0, "seconds", "At the end, wait this long for engines to finish their copies.",
        number(0, 3600), "server",
    )  # fmt: skip
    quarantine_grace_s: float = _option(
        120.0, "seconds", "Slots that a lost engine may still be writing are reused after its "
        "processes were seen running this long (at once when they have ended). Keep it above "
        "the engines' store_deadline_s.",
        number(0, 86400), "server",
    )  # fmt: skip
    log_format: str = _option(
        "human", "", "Log lines as text, or one JSON object a line.",
        one_of("human", "json"), "server",
    )  # fmt: skip
    log_level: str = _option(
        "info", "", "Least level that is logged; debug: also each request.",
        one_of("debug", "info", "warning", "error"), "server",
    )  # fmt: skip
    deadline_ms: float = _option(
        250.0, "milliseconds", "Longest time that the engine waits for the server; then it is "
        "a miss.", number(1, 60000), "engine",
    )  # fmt: skip
    reconnect_max_s: float = _option(
        2.0, "seconds", "Longest pause between attempts to reach a lost server.",
        number(0.05, 3600), "engine",
    )  # fmt: skip
    load_deadline_s: float = _option(
        30.0, "seconds", "A load that takes longer is given up, and the tokens are computed.",
        number(0.05, 3600), "engine",
    )  # fmt: skip
    store_deadline_s: float = _option(
        60.0, "seconds", "A store that takes longer is given up.", number(0.05, 3600), "engine"
    )
    transfer_threads: int = _option(
        2,
        "threads",
        "Copying threads of each worker (where the KV cache is in host memory).",
        whole(1, 64),
        "engine",
    )
    copy_backend: str = _option(
        "auto", "", "How a worker with an NVIDIA GPU copies pinned memory: auto (by page size), "
        "batch (cuMemcpyBatchAsync), kernel (Triton), rows (2D copies), ranges (one copy a "
        "range), or pageable (pin nothing). What cannot be had falls back to the next best.",
        one_of("auto", "batch", "kernel", "rows", "ranges", "pageable"), "engine",
    )  # fmt: skip
    load_kernel_below: int = _option(
        28 << 10, "bytes", "With copy_backend auto, loads of pages smaller than this go by kernel; "
        "`lmcache-shm bench transfer --device cuda` measures where.", whole(0, 1 << 30), "engine",
    )  # fmt: skip
    store_kernel_below: int = _option(
        0, "bytes", "The same for stores.", whole(0, 1 << 30), "engine"
    )
    mamba_steps: str = _option(
        "exact", "", "exact: refuse a max_num_batched_tokens under which recurrent states end off "
        "chunk boundaries; any: accept it and cache the boundaries that the engine does snapshot.",
        one_of("exact", "any"), "engine",
    )  # fmt: skip
    weight_version: str = _option(
        "", "", "Name of the weights that the engine loads. Engines of one model and one name share, wherever the files "
        "lie, and these are not read to tell them from others. A version that vLLM is told later "
        "(`/update_weight_version`) is added to it.", title, "engine", "what the files hold",
    )  # fmt: skip
    autostart_gb: float = _option(
        0.0, "GiB", "Start a detached server of this size when none is running; 0: never.",
        number(0, 65536), "engine",
    )  # fmt: skip

    origins: Mapping[str, str] = field(default_factory=dict)
    """name → where its value came from: "default", "--flag", "ENV_VARIABLE" or "lmcache_shm.key"."""
    ignored: tuple[str, ...] = ()
    """Keys of ``kv_connector_extra_config`` that are not ours."""


def _table() -> dict[str, Option]:
    rows = {}
    for f in fields(Config):
        if f.metadata:
            shown = f.metadata["shown"]
            if shown is None:
                plain = f.default
                shown = str(plain).lower() if isinstance(plain, bool) else f"{plain}"
            facts = {k: f.metadata[k] for k in ("unit", "help", "check", "scope")}
            assert f.default is not MISSING  # noqa: S101  (a mistake in the table above)
            rows[f.name] = Option(name=f.name, default=f.default, shown=shown, **facts)
    return rows


OPTIONS: dict[str, Option] = _table()
SERVER = tuple(o for o in OPTIONS.values() if o.scope in {"server", "both"})
ENGINE = tuple(o for o in OPTIONS.values() if o.scope in {"engine", "both"})


# ------------------------------------------------------------------------------------------ reading
def nearest(word: str, known: list[str]) -> str:
    """`` did you mean X?`` or an empty string."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def _checked(option: Option, given: Any, origin: str) -> Any:
    try:
        return option.check(given)
    except ValueError as error:
        unit = f" ({option.unit})" if option.unit and option.unit not in str(error) else ""
        raise ConfigError(f"{origin}: {given!r} is not valid; expected {error}{unit}") from None


def _from_environment(environ: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    known = {option.env: option for option in OPTIONS.values()}
    found = {}
    for name, given in environ.items():
        if not name.startswith(ENV_PREFIX) or name.startswith(ENV_FOREIGN):
            continue
        if name not in known:
            raise ConfigError(
                f"environment variable {name} is unknown{nearest(name, list(known))}"
                " (lmcache-shm config lists all)"
            )
        if given != "":
            found[known[name].name] = (given, name)
    return found


def _build(
    scope: tuple[Option, ...], explicit: Mapping[str, tuple[Any, str]], environ: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, str]]:
    environment = _from_environment(environ)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for option in OPTIONS.values():
        given = explicit.get(option.name)
        if given is None and option in scope:
            given = environment.get(option.name)
        if given is None:
            origins[option.name] = "default"
        else:
            values[option.name] = _checked(option, *given)
            origins[option.name] = given[1]
    return values, origins


def server_config(flags: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Config:
    """Options of a server or a command: `flags` maps option names to what was typed (None: not given)."""
    given = {
        name: (value, OPTIONS[name].flag) for name, value in flags.items() if value is not None
    }
    values, origins = _build(SERVER, given, os.environ if environ is None else environ)
    return Config(**values, origins=origins)


def connector_config(extra: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Config:
    """Options of an engine from ``kv_connector_extra_config``.

    Raises ConfigError for an unknown key under ``lmcache_shm.``, for a server's option, and for a
    key without the prefix that was surely meant to have it. Other keys land in `Config.ignored`.
    """
    known = {option.connector: option for option in ENGINE}
    explicit: dict[str, tuple[Any, str]] = {}
    ignored = []
    for key, given in extra.items():
        bare = key.removeprefix(PREFIX)
        if key in known:
            explicit[known[key].name] = (given, key)
        elif key.startswith(PREFIX) and bare in OPTIONS:
            raise ConfigError(
                f"{key} is an option of the server; give it there: lmcache-shm server "
                f"{OPTIONS[bare].flag} {given}"
            )
        elif key.startswith(PREFIX):
            raise ConfigError(f"{key} is unknown{nearest(key, list(known))}")
        elif key in OPTIONS or difflib.get_close_matches(key, list(known), n=1, cutoff=0.85):
            wanted = PREFIX + key if PREFIX + key in known else ""
            hint = f"; did you mean {wanted}?" if wanted else nearest(key, list(known))
            raise ConfigError(f"{key} is unknown{hint}")
        else:
            ignored.append(key)
    values, origins = _build(ENGINE, explicit, os.environ if environ is None else environ)
    return Config(**values, origins=origins, ignored=tuple(ignored))
