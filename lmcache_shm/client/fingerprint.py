"""The fingerprint of weights on disk: a repository's commit, or the content of the files.

Paths and times are not part of it: copies of a model in two places have one fingerprint, and an overwritten
file has another one, even with equal size and equal headers. The whole content is read once; digests are
remembered by (device, inode, size, mtime, ctime), so the next start only calls stat.

The fingerprint must belong to the bytes that were *loaded* earlier. A file whose ctime (which no user can
set) is not older than the start of the engine therefore has none.
"""

import fcntl
import json
import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import xxhash

from lmcache_shm.arena.errors import NotOurs
from lmcache_shm.arena.owner import foreign, open_ours
from lmcache_shm.arena.processes import stat as process_stat

log = logging.getLogger("lmcache_shm")

SNAPSHOT = re.compile(r"models--(.+?)--(.+?)/snapshots/([0-9a-f]{40})/?$")
COMMIT = re.compile(r"[0-9a-f]{40}")
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.safetensors.index.json")
BESIDE = ("*.py", "*processor*config.json", "quant*.json")
"""These change the KV of a prompt, too, and are not part of the loaded configuration object."""
CLOCK_S = 0.1
"""Files get their times from a clock that lags by a tick: a ctime this close to `began` may be later."""
READ_BYTES = 8 << 20
THREADS = 3
SETTLED_S = 2.0
"""A file changed less than this ago may change again within the same tick of its clock."""
REMEMBERED = 4096

Stats = dict[Path, tuple[int, int, int, int, int]]
"""File → device, inode, size, mtime and ctime in nanoseconds."""


class Unidentified(Exception):
    """It cannot be known which bytes were loaded. The message, one line, has the reason."""


def identity_on_disk(
    model: str, revision: str | None, commit: str | None, began: float, memory: "Memory"
) -> str:
    """The fingerprint of the weights at `model`: a folder, a file, or a repository's name.

    `commit`: of the repository, if known. `began`: a time.time() before the weights were loaded. Reads whole
    files, unless `memory` has their digests. Raises Unidentified and OSError.
    """
    path = Path(model)
    snapshot = SNAPSHOT.search(model)
    if snapshot and all(file.is_symlink() for file in weights_in(path)):
        return f"{snapshot[1]}/{snapshot[2]}@{snapshot[3]}"
    if path.exists():
        return f"files#{_digest_of(path, began, memory)}"
    if commit is None and revision is not None and COMMIT.fullmatch(revision):
        commit = revision
    if commit is None:
        raise Unidentified(f"{model} is neither a local folder nor a repository of known commit")
    return f"{model}@{commit}"


def weights_in(path: Path) -> list[Path]:
    """Files that determine the KV of a prompt, ordered by name."""
    if not path.is_dir():
        return [path]
    return sorted({file for pattern in WEIGHTS + BESIDE for file in path.glob(pattern)})


def _digest_of(path: Path, began: float, memory: "Memory") -> str:
    files = weights_in(path)
    if not files:
        raise Unidentified(f"there are no weights in {path}")
    before = _stats(files)
    _check_untouched(path, before, began)
    digests = memory.digests(before)
    if _stats(weights_in(path)) != before:
        raise Unidentified(f"weights in {path} changed while they were read")
    facts = [[f.name if path.is_dir() else "", before[f][2], digests[f]] for f in files]
    return xxhash.xxh3_128_hexdigest(json.dumps(facts).encode())


def _stats(files: Iterable[Path]) -> Stats:
    return {
        file: (s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns)
        for file in files
        for s in (file.stat(),)
    }


def _check_untouched(path: Path, stats: Stats, began: float) -> None:
    """Raises Unidentified if the files now may differ from those at `began`."""
    # A folder's time is that of files that came, went, or took another's name; a link may have been turned.
    links = [part for part in (path.absolute(), *path.absolute().parents) if part.is_symlink()]
    times = [(file, ctime) for file, (_, _, _, _, ctime) in stats.items()]
    times += [(link, link.lstat().st_ctime_ns) for link in links]
    times.append((path, path.stat().st_ctime_ns))
    for file, ctime in times:
        if ctime >= (began - CLOCK_S) * 1e9:
            raise Unidentified(f"{file} changed after this engine had begun to start")


class Memory:
    """Digests of files that were read before, as JSON in the user's cache folder. A damaged file is ignored.

    So is whatever is not a regular file of this user (`sudo` may keep another's HOME): whoever can write the
    digests decides which weights pass for ours. It is neither followed, waited for, nor replaced.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.read_bytes = 0
        """Bytes of weights that were read."""

    def digests(self, stats: Stats) -> dict[Path, str]:
        """The digest of each file's content. Unknown files are read in THREADS threads. A lock lets engines that
        start together read one after the other: only the first one reads."""
        found = self._known(stats)
        if len(found) < len(stats):
            with self._alone() as kept:
                found = self._known(stats)
                missing = [file for file in stats if file not in found]
                self.read_bytes += sum(stats[file][2] for file in missing)
                with ThreadPoolExecutor(THREADS, "lmcache-shm-weights") as pool:
                    found.update(zip(missing, pool.map(content_digest, missing), strict=True))
                settled = (time.time() - SETTLED_S) * 1e9
                if kept:
                    self._save({_key(stats[f]): found[f] for f in missing if stats[f][4] < settled})
        return found

    def _known(self, stats: Stats) -> dict[Path, str]:
        known = self._load()
        return {file: known[key] for file, s in stats.items() if (key := _key(s)) in known}

    @contextmanager
    def _alone(self) -> Iterator[bool]:
        """Hold the lock file. False where that cannot be; then nothing is written into the folder."""
        try:
            handle = self._lock()
        except (OSError, NotOurs) as error:
            _not_remembered(error)
            yield False
            return
        try:
            yield True
        finally:
            os.close(handle)

    def _lock(self) -> int:
        """A descriptor that holds the lock. Raises OSError, and NotOurs for what belongs to others."""
        folder = self.file.parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (owner := folder.stat().st_uid) != os.geteuid():
            raise NotOurs(f"{folder} belongs to uid {owner}, not to uid {os.geteuid()}")
        path = self.file.with_suffix(".lock")
        handle = open_ours(path, os.O_CREAT | os.O_RDWR, f"remove it: rm -r {path}")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            os.close(handle)
            raise
        return handle

    def _load(self) -> dict[str, str]:
        try:
            with os.fdopen(open_ours(self.file, os.O_RDONLY, "it is ignored"), "rb") as file:
                known = json.loads(file.read())
        except (OSError, ValueError, NotOurs):
            return {}
        if not isinstance(known, dict):
            return {}
        return {
            k: v for k, v in known.items() if isinstance(v, str) and re.fullmatch("[0-9a-f]{32}", v)
        }

    def _save(self, new: dict[str, str]) -> None:
        if not new:
            return
        try:
            if os.path.lexists(self.file) and (why := foreign(self.file.lstat())):
                raise NotOurs(f"{self.file} {why}; remove it: rm -r {self.file}")
            kept = list((self._load() | new).items())[-REMEMBERED:]
            handle, name = tempfile.mkstemp(dir=self.file.parent, prefix=self.file.name)  # 0600
            try:
                with os.fdopen(handle, "w") as file:
                    json.dump(dict(kept), file)
                os.replace(name, self.file)  # noqa: PTH105
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise
        except (OSError, NotOurs) as error:
            _not_remembered(error)


def _not_remembered(error: Exception) -> None:
    log.info("lmcache_shm: digests of the weights are not remembered (%s)", error)


def _key(stat: Sequence[int]) -> str:
    return ":".join(map(str, stat))


def content_digest(file: Path) -> str:
    """xxh3-128 of a file's content, as 32 hexadecimal digits."""
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(READ_BYTES))
    with file.open("rb", buffering=0) as source:
        while n := source.readinto(buffer):
            digest.update(buffer[:n])  # lets go of Python's lock
    return digest.hexdigest()


def default_memory() -> Memory:
    """In $XDG_CACHE_HOME/lmcache-shm, else ~/.cache/lmcache-shm; nowhere for a user without a home."""
    given = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        home = Path(given).expanduser()
    except RuntimeError:  # no HOME, and a uid that /etc/passwd does not have, as in containers
        home = Path(os.devnull)  # has no files: nothing is found there, and nothing kept
    return Memory(home / "lmcache-shm" / "weights.json")


_lock = threading.Lock()
_began: list[float] = []


def note_start() -> None:
    """Remember that no weights were loaded in this process before now. Only the first call counts."""
    with _lock:
        if not _began:
            _began.append(time.time())


def started() -> float:
    """time.time() at the first `note_start` in this process; without one, when the process began."""
    if _began:
        return _began[0]
    ticks = process_stat(os.getpid())[1]
    up = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - up
