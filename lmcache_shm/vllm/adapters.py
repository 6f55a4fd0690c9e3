"""LoRA adapters: what the workers *have loaded*, and what the scheduler side knows of it.

An adapter's files may be replaced while the engine computes with the old ones, and vLLM reads an adapter
anew whenever it has evicted it, so a path says nothing. Each worker therefore takes a digest of the very
tensors that it makes resident, and numbers an adapter's contents: what was computed under one number was
computed with one content. Digests and numbers travel with the next step to the scheduler side. The digest
of all ranks is the adapter's identity, wherever its files lie. The numbers go into each job: a worker
refuses a copy of another one.
"""

import hashlib
import itertools
import stat
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from lmcache_shm.arena.job import Adapter

Content = tuple[int, bytes]
"""Number of an adapter's content (it only grows, and 0 is none), digest (b"": has none)."""
Files = tuple[tuple[object, ...], ...]

SETTLED_S = 2.0
"""File times have a granularity: of a file written less than this ago another write might go unnoticed."""
PATIENCE = 20
"""Steps that an adapter's first request waits at most until the workers have said what they hold."""
MIXED = b"mixed"

_watching: "weakref.WeakSet[LoadedAdapters]" = weakref.WeakSet()
_sources: "weakref.WeakKeyDictionary[Any, tuple[str, Files | None]]" = weakref.WeakKeyDictionary()


class LoadedAdapters:
    """One worker's adapters by vLLM's id. `watch` makes vLLM's managers tell it."""

    def __init__(self, rank: int, lora_config: Any) -> None:
        self._rank = rank
        self._config = lora_config
        self._manager: Callable[[], Any] = lambda: None
        self._contents: dict[int, Content] = {}
        self._sources: dict[int, tuple[str, Files | None]] = {}
        self._told: dict[int, Content] = {}
        self._numbers = itertools.count(1)

    def watch(self) -> None:
        """From now on note what vLLM loads under this engine's configuration, in this process."""
        if self._config is not None:
            _hook()
            _watching.add(self)

    def watches(self, manager: Any) -> bool:
        return manager.lora_config is self._config

    def loaded(self, manager: Any, number: int, digest: bytes) -> None:
        """`manager` has made adapter `number` resident."""
        self._manager = weakref.ref(manager)
        had = self._contents.get(number)
        if had is None or not digest or had[1] != digest:
            self._contents[number] = next(self._numbers), digest

    def read(self, number: int, path: str, files: Files | None) -> None:
        """Its bytes came from `path`; `files`: as they were before and after, if that is certain."""
        self._sources[number] = path, files

    def report(self, *, everything: bool) -> dict[int, Content]:
        """What is resident, as far as the scheduler side has not been told, or all of it."""
        if not self._contents:
            return {}
        resident = self._resident()
        now = {number: c for number, c in self._contents.items() if number in resident}
        news = now if everything else {n: c for n, c in now.items() if self._told.get(n) != c}
        self._told |= news
        return news

    def same(self, adapter: Adapter) -> bool:
        """Whether no other content was loaded under this id since it was what `adapter` says."""
        content = self._contents.get(adapter.id)
        return content is not None and content[0] == adapter.contents[self._rank]

    def would_compute(self, adapter: Adapter) -> bool:
        """Whether a prefix that were computed right now would be computed with this content: it is
        resident, or its files are those that were read."""
        if not self.same(adapter):
            return False
        if adapter.id in self._resident() and not adapter.reloads:
            return True
        path, files = self._sources.get(adapter.id, ("", None))
        return path == adapter.path and files is not None and files == files_of(path)

    def _resident(self) -> set[int]:
        manager = self._manager()
        return set(manager.list_adapters()) if manager is not None else set()


class KnownAdapters:
    """Scheduler side: adapters as the workers have reported them, by vLLM's id. Scheduler thread only."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._ranks: dict[int, dict[int, Content]] = {}
        self._names: dict[int, set[tuple[str, str]]] = {}
        self._local: dict[tuple[str, str], bytes] = {}
        self._asked: dict[int, tuple[int, int]] = {}
        self._questions = self._answered = 0

    @property
    def question(self) -> int:
        """Number of the question what is loaded that the workers have not answered; 0: there is none."""
        return self._questions if self._questions > self._answered else 0

    def of(self, lora: Any) -> Adapter | None:
        """The adapter of a vLLM LoRARequest as it is loaded; None while that is not known."""
        contents = [
            self._ranks.get(r, {}).get(lora.lora_int_id, (0, b"")) for r in range(self._world)
        ]
        if not all(digest for _, digest in contents):
            return None
        digest = hashlib.sha256(b"".join(digest for _, digest in contents)).digest()
        numbers = tuple(number for number, _ in contents)
        return Adapter(lora.lora_int_id, digest, numbers, lora.lora_path, reloads=lora.load_inplace)

    def awaited(self, lora: Any) -> bool:
        """Whether the workers may have loaded this adapter and just had no step to say so in (it was
        added through the API): ask them once."""
        number = lora.lora_int_id
        if number not in self._asked:
            self._questions += 1
            self._asked[number] = self._questions, PATIENCE
        question, patience = self._asked[number]
        self._asked[number] = question, patience - 1
        return question > self._answered and patience > 0 and self.of(lora) is None

    def seen(self, lora: Any) -> None:
        """There is a request for it: vLLM's own cache may get blocks under its name."""
        name = lora.lora_name, lora.lora_path
        self._names.setdefault(lora.lora_int_id, set()).add(name)

    def foreign_blocks(self, lora: Any) -> bool:
        """Whether vLLM's own prefix cache may hold blocks of another content under this adapter's name."""
        name, adapter = (lora.lora_name, lora.lora_path), self.of(lora)
        return adapter is None or self._local.setdefault(name, adapter.digest) != adapter.digest

    def local_cache_is_empty(self) -> None:
        """VLLM's own prefix cache was reset."""
        self._local.clear()

    def take(self, reports: Mapping[int, Mapping[int, Content]], answer: int) -> set[int]:
        """Learn what ranks report; ids under which there is another content now than before."""
        self._answered = max(self._answered, answer)
        changed = set()
        for rank, contents in reports.items():
            known = self._ranks.setdefault(rank, {})
            changed |= {n for n, content in contents.items() if known.get(n, content) != content}
            known.update(contents)
        for number in changed:
            for name in self._names.get(number, ()):
                self._local[name] = MIXED
        return changed


# ------------------------------------------------------------------------------- what vLLM loads
def _hook() -> None:
    """Have vLLM's LoRA managers tell what they load. Idempotent; there is no interface for it."""
    from vllm.lora.model_manager import LoRAModelManager  # noqa: PLC0415  (only in workers that have LoRA)
    from vllm.lora.worker_manager import WorkerLoRAManager  # noqa: PLC0415

    add, load = LoRAModelManager._add_adapter, WorkerLoRAManager._load_adapter  # noqa: SLF001
    if getattr(add, "hooked", False):
        return

    def add_and_tell(self: Any, lora: Any) -> None:
        told = [loaded for loaded in _watching if loaded.watches(self)]
        # Before: vLLM packs and scales the tensors in place.
        digest = digest_of(self.lora_config, lora) if told else b""
        add(self, lora)
        for loaded in told:
            loaded.loaded(self, lora.id, digest)
            loaded.read(lora.id, *_sources.get(lora, ("", None)))

    def load_and_tell(self: Any, request: Any) -> Any:
        before = files_of(request.lora_path)
        lora = load(self, request)
        after = files_of(request.lora_path)
        _sources[lora] = request.lora_path, after if before == after else None
        return lora

    add_and_tell.hooked = True  # type: ignore[attr-defined]
    LoRAModelManager._add_adapter = add_and_tell  # noqa: SLF001
    WorkerLoRAManager._load_adapter = load_and_tell  # noqa: SLF001


def files_of(path: str) -> Files | None:
    """An adapter's files as the file system tells one state of them from another; None: it cannot yet, or
    `path` is no folder (a repository's name: who knows what would be read)."""
    try:
        stats = [(f.name, f.stat()) for f in sorted(Path(path).expanduser().iterdir())]
    except OSError:
        return None
    files = [(name, s) for name, s in stats if stat.S_ISREG(s.st_mode)]
    if not files or max(s.st_ctime for _, s in files) > time.time() - SETTLED_S:
        return None
    return tuple(
        (name, s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in files
    )


def digest_of(lora_config: Any, lora: Any) -> bytes:
    """Digest of everything in a vLLM LoRAModel but its id, and of the options that say how it is applied.

    b"" if there is something in it that cannot be told apart by its content.
    """
    digest = hashlib.sha256()
    options = [
        sorted(lora_config.target_modules or ()),
        lora_config.enable_tower_connector_lora,
        lora_config.enable_mixed_moe_lora_format,
        lora_config.enable_moe_shared_loras,
    ]
    try:
        _feed(digest, [options, {k: v for k, v in vars(lora).items() if k != "id"}])
    except TypeError:
        return b""
    return digest.digest()


def _feed(digest: Any, value: Any) -> None:
    """Add a value, with marks that keep one structure from looking like another. Raises TypeError."""
    if isinstance(value, torch.Tensor):
        digest.update(f"<{value.dtype}{list(value.shape)}>".encode())
        digest.update(value.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy())
    elif value is None or isinstance(value, (bool, int, float, str)):
        digest.update(f"<{value!r}>".encode())
    elif isinstance(value, (list, tuple)):
        digest.update(f"<{len(value)}>".encode())
        for item in value:
            _feed(digest, item)
    elif isinstance(value, dict):
        _feed(digest, [part for key in sorted(value) for part in (key, value[key])])
    elif type(value).__module__.startswith("vllm.lora."):
        _feed(digest, [type(value).__name__, vars(value)])
    else:
        raise TypeError(f"an adapter with a {type(value).__name__} in it has no digest")
