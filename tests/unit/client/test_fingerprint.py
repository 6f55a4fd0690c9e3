"""Weights on disk: the same content anywhere is the same, anything else is not, and what cannot be known is said to be unknown."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lmcache_shm.client import fingerprint
from lmcache_shm.client.fingerprint import (
    Memory,
    Unidentified,
    content_digest,
    default_memory,
    identity_on_disk,
)

COMMIT = "0123456789abcdef" * 2 + "01234567"
LONG = bytes(range(256)) * 100


def checkpoint(folder: Path, content: bytes = LONG) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(content)
    (folder / "config.json").write_text("{}")
    return folder


def identity(path: Path | str, memory: Memory, began: float | None = None, **more: Any) -> str:
    """As of an engine that begins to start now, once the clock of the files has moved on."""
    time.sleep(0.15 if began is None else 0)
    given = {"revision": None, "commit": None, **more}
    return identity_on_disk(
        str(path), given["revision"], given["commit"], began or time.time(), memory
    )


@pytest.fixture
def memory(tmp_path: Path) -> Memory:
    return Memory(tmp_path / "cache" / "weights.json")


# ------------------------------------------------------------------------------------ content
def test_copies_in_two_places_are_the_same_weights(tmp_path: Path, memory: Memory) -> None:
    one = checkpoint(tmp_path / "a" / "v1")
    other = checkpoint(tmp_path / "b" / "elsewhere")
    os.utime(other / "model.safetensors", ns=(5, 5))

    assert identity(one, memory) == identity(f"{other}/", memory)


def test_one_byte_of_the_same_size_and_time_makes_other_weights(
    tmp_path: Path, memory: Memory
) -> None:
    """A second version of one architecture: equal sizes, equal headers, and even the time was set back."""
    folder = checkpoint(tmp_path / "model")
    weights = folder / "model.safetensors"
    before, stat = identity(folder, memory), weights.stat()
    weights.write_bytes(LONG[:-1] + b"x")
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    assert weights.stat().st_mtime_ns == stat.st_mtime_ns
    assert identity(folder, memory) != before


@pytest.mark.parametrize("name", ["model-2.safetensors", "modeling.py", "preprocessor_config.json"])
def test_every_file_that_decides_what_is_computed_counts(
    name: str, tmp_path: Path, memory: Memory
) -> None:
    folder = checkpoint(tmp_path / "model")
    before = identity(folder, memory)
    (folder / name).write_text("more")

    assert identity(folder, memory) != before


def test_what_lies_beside_the_weights_does_not_count(tmp_path: Path, memory: Memory) -> None:
    folder = checkpoint(tmp_path / "model")
    before = identity(folder, memory)
    (folder / "README.md").write_text("hello")

    assert identity(folder, memory) == before


def test_the_names_of_two_files_cannot_be_exchanged(tmp_path: Path, memory: Memory) -> None:
    folder = checkpoint(tmp_path / "model")
    (folder / "other.safetensors").write_bytes(LONG[::-1])
    before = identity(folder, memory)
    (folder / "other.safetensors").write_bytes(LONG)
    (folder / "model.safetensors").write_bytes(LONG[::-1])

    assert identity(folder, memory) != before


def test_a_single_file_is_its_content(tmp_path: Path, memory: Memory) -> None:
    one, other = tmp_path / "a.gguf", tmp_path / "b.gguf"
    one.write_bytes(LONG)
    other.write_bytes(LONG)

    assert identity(one, memory) == identity(other, memory)


def test_a_file_larger_than_a_read_is_digested_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "weights.bin"
    file.write_bytes(LONG)
    whole = content_digest(file)
    monkeypatch.setattr(fingerprint, "READ_BYTES", 3333)

    assert content_digest(file) == whole


# -------------------------------------------------------------------------------- repositories
def test_a_snapshot_of_a_repository_is_its_name_and_commit(tmp_path: Path, memory: Memory) -> None:
    """Its files are links to blobs that are named after their content."""
    blob = tmp_path / "models--org--model" / "blobs" / "b"
    snapshot = tmp_path / "models--org--model" / "snapshots" / COMMIT
    blob.parent.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    blob.write_bytes(LONG)
    (snapshot / "model.safetensors").symlink_to(blob)

    assert identity(snapshot, memory) == f"org/model@{COMMIT}"
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").write_bytes(b"tuned")
    assert identity(snapshot, memory).startswith("files#"), "somebody saved over the link"


def test_a_repository_is_its_commit(memory: Memory) -> None:
    assert identity("org/model", memory, revision=COMMIT) == f"org/model@{COMMIT}"
    assert identity("org/model", memory, commit=COMMIT, revision="v2") == f"org/model@{COMMIT}"
    with pytest.raises(Unidentified, match="commit"):
        identity("org/model", memory, revision="v2")


# ---------------------------------------------------------------------- what nobody can know
def test_weights_that_changed_since_the_engine_began_to_start_have_no_identity(
    tmp_path: Path, memory: Memory
) -> None:
    folder = checkpoint(tmp_path / "model")
    began = time.time()
    os.utime(folder / "model.safetensors", ns=(5, 5))  # ctime is not to be set

    with pytest.raises(Unidentified, match=r"model\.safetensors changed after"):
        identity(folder, memory, began)


def test_a_file_that_was_replaced_since_has_no_identity(tmp_path: Path, memory: Memory) -> None:
    """Its own times are old; it came by another name."""
    folder = checkpoint(tmp_path / "model")
    checkpoint(tmp_path / "new", LONG[::-1])
    time.sleep(0.15)
    began = time.time()
    (tmp_path / "new" / "model.safetensors").replace(folder / "model.safetensors")

    with pytest.raises(Unidentified):
        identity(folder, memory, began)


def test_a_link_that_was_turned_since_has_no_identity(tmp_path: Path, memory: Memory) -> None:
    """``current`` pointed to version 1 when it was loaded, and points to version 2 now."""
    checkpoint(tmp_path / "v1")
    checkpoint(tmp_path / "v2", LONG[::-1])
    (tmp_path / "current").symlink_to("v1")
    time.sleep(0.15)
    began = time.time()
    assert identity(tmp_path / "current", memory, began)
    (tmp_path / "next").symlink_to("v2")
    (tmp_path / "next").replace(tmp_path / "current")

    with pytest.raises(Unidentified, match="current changed after"):
        identity(tmp_path / "current", memory, began)


def test_a_folder_without_weights_has_no_identity(tmp_path: Path, memory: Memory) -> None:
    with pytest.raises(Unidentified, match="no weights"):
        identity(tmp_path, memory)


def test_weights_that_change_while_they_are_read_have_no_identity(
    tmp_path: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(tmp_path / "model")

    def while_written(file: Path) -> str:
        file.write_bytes(LONG[::-1])
        return content_digest(file)

    monkeypatch.setattr(fingerprint, "content_digest", while_written)

    with pytest.raises(Unidentified, match="while they were read"):
        identity(folder, memory)


def test_without_a_note_of_the_start_it_is_the_process_that_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fingerprint, "_began", [])
    began = fingerprint.started()
    assert 0 < time.time() - began < 3600
    fingerprint.note_start()
    noted = fingerprint.started()
    fingerprint.note_start()

    assert began < noted == fingerprint.started()


# ------------------------------------------------------------------------------------- memory
def old(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As if its files had been written some time ago."""
    monkeypatch.setattr(fingerprint, "SETTLED_S", 0.1)
    time.sleep(0.15)
    return folder


def test_a_second_start_reads_nothing(
    tmp_path: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = old(checkpoint(tmp_path / "model"), monkeypatch)
    first = identity(folder, memory)
    again = Memory(memory.file)

    assert identity(folder, again) == first
    assert (memory.read_bytes, again.read_bytes) == (len(LONG), 0)
    assert memory.file.stat().st_mode & 0o777 == 0o600
    left = sorted(file.name for file in memory.file.parent.iterdir())
    assert left == ["weights.json", "weights.lock"], "nothing half-written is left"


def test_a_file_that_was_changed_just_now_is_not_remembered(tmp_path: Path, memory: Memory) -> None:
    """Within one tick of the clock it could change again under the same times."""
    identity(checkpoint(tmp_path / "model"), memory)

    assert not memory.file.exists()


def test_engines_that_start_together_read_once(
    tmp_path: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = old(checkpoint(tmp_path / "model"), monkeypatch)
    memories = [Memory(memory.file) for _ in range(4)]
    threads = [threading.Thread(target=identity, args=(folder, each)) for each in memories]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sum(each.read_bytes for each in memories) == len(LONG)


@pytest.mark.parametrize("damage", [b"", b"{", b"[1]", b'{"a": 1}', b"\xff\xfe"])
def test_a_damaged_memory_costs_time_and_no_more(
    damage: bytes, tmp_path: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = old(checkpoint(tmp_path / "model"), monkeypatch)
    first = identity(folder, memory)
    memory.file.write_bytes(damage)

    assert identity(folder, Memory(memory.file)) == first
    again = Memory(memory.file)
    assert identity(folder, again) == first
    assert again.read_bytes == 0


def test_a_memory_that_cannot_be_written_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    folder = old(checkpoint(tmp_path / "model"), monkeypatch)

    assert identity(folder, Memory(tmp_path / "file" / "weights.json"))


def test_the_memory_lies_in_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    assert default_memory().file == tmp_path / "lmcache-shm" / "weights.json"
