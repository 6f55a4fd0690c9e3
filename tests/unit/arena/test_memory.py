"""What bounds shared memory here: read from a made-up system."""

import os

import pytest

from lmcache_shm.arena import memory
from lmcache_shm.arena.errors import ArenaError
from lmcache_shm.arena.memory import Limit, check_room, limits


def test_this_machine_has_limits_that_make_sense():
    found = {limit.what: limit.free for limit in limits()}

    assert found["/dev/shm"] > 0
    assert 0 < found["the host's available memory"] < 1 << 50


def test_the_tightest_limit_speaks():
    bounds = [
        Limit("a", 100 << 20, "do A"),
        Limit("b", 50 << 20, "do B"),
        Limit("c", 1 << 40, "do C"),
    ]

    check_room(50 << 20, bounds)
    with pytest.raises(ArenaError, match=r"need 50.0 MiB, but b leaves 50.0 MiB; do B, or choose"):
        check_room((50 << 20) + 1, bounds)
    with pytest.raises(ArenaError, match=r"need 3.00 GiB"):
        check_room(3 << 30, bounds)


def cgroup(tmp_path, monkeypatch, line, files):
    """Redirect the module's look at /proc and /sys into a directory of ours."""
    for name, content in {"proc/self/cgroup": line + "\n", **files}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    real = memory.Path
    monkeypatch.setattr(
        memory,
        "Path",
        lambda p: real(f"{tmp_path}{p}") if str(p).startswith(("/proc", "/sys")) else real(p),
    )
    return list(memory._cgroup_room())


STAT = "anon 1\ninactive_file 10000\nactive_file 5000\n"


def test_cgroup_v2_limits_of_all_levels_count(tmp_path, monkeypatch):
    base = "sys/fs/cgroup"
    files = {
        f"{base}/a/b/memory.max": "max", f"{base}/a/b/memory.current": "5", f"{base}/a/b/memory.stat": STAT,
        f"{base}/a/memory.max": "1000000", f"{base}/a/memory.current": "400000", f"{base}/a/memory.stat": STAT,
    }  # fmt: skip

    assert cgroup(tmp_path, monkeypatch, "0::/a/b", files) == [615000]


def test_cgroup_v2_in_a_container(tmp_path, monkeypatch):
    """With a cgroup namespace the path is "/", and the limit stands at the mount's root."""
    base = "sys/fs/cgroup"
    files = {
        f"{base}/memory.max": "1000",
        f"{base}/memory.current": "5000",
        f"{base}/memory.stat": "",
    }

    assert cgroup(tmp_path, monkeypatch, "0::/", files) == [0]


def test_cgroup_v1_in_a_container(tmp_path, monkeypatch):
    """The path is the host's and does not exist in here; the mount's root is our group."""
    base = "sys/fs/cgroup/memory"
    stat = "inactive_file 1\ntotal_inactive_file 70\ntotal_active_file 30\n"
    files = {
        f"{base}/memory.limit_in_bytes": "5000", f"{base}/memory.usage_in_bytes": "2000", f"{base}/memory.stat": stat,
    }  # fmt: skip

    assert cgroup(tmp_path, monkeypatch, "7:memory,cpu:/docker/abc", files) == [3100]


def test_no_limit_in_cgroup_v1_is_a_huge_number(tmp_path, monkeypatch):
    base = "sys/fs/cgroup/memory"
    files = {
        f"{base}/memory.limit_in_bytes": "9223372036854771712", f"{base}/memory.usage_in_bytes": "2",
        f"{base}/memory.stat": STAT,
    }  # fmt: skip

    assert cgroup(tmp_path, monkeypatch, "7:memory:/", files) == []


def test_no_cgroups_at_all(monkeypatch):
    monkeypatch.setattr(
        memory, "Path", lambda p: __import__("pathlib").Path("/nonexistent" + str(p))
    )

    assert list(memory._cgroup_room()) == []
    assert memory._meminfo("MemAvailable") is None


def test_no_dev_shm_is_said(monkeypatch):
    monkeypatch.setattr(memory, "SHM_DIR", "/nonexistent")

    with pytest.raises(ArenaError, match="there is no /nonexistent; mount a tmpfs there"):
        limits()


def test_other_errors_are_told_as_they_are():
    read_end, write_end = os.pipe()
    try:
        with pytest.raises(ArenaError, match="cannot reserve 1.0 MiB: Invalid argument"):
            memory.reserve(write_end, 1 << 20)
    finally:
        os.close(read_end)
        os.close(write_end)


@pytest.mark.parametrize(
    ("options", "above", "mode"),
    [
        ("rw,size=8g", "never", "never"),
        ("rw,huge=always,size=8g", "never", "always"),
        ("rw,size=8g,huge=within_size", "advise", "within_size"),
        ("rw,huge=advise", "always", "advise"),
        ("rw,size=8g", "always", "never"),
        ("rw,huge=always", "deny", "never"),
        ("rw", "force", "always"),
    ],
)
def test_the_mount_says_whether_there_are_huge_pages(tmp_path, options, above, mode):
    """Not shmem_enabled: that is for shared memory that lies in no mount that people see."""
    folder = tmp_path / "sys/kernel/mm/transparent_hugepage"
    folder.mkdir(parents=True)
    (folder / "shmem_enabled").write_text(f"always never deny force [{above}]\n")
    (tmp_path / "proc/self").mkdir(parents=True)
    mounts = f"proc /proc proc rw 0 0\nx /dev/shm tmpfs rw,huge=always 0 0\ny /dev/shm tmpfs {options} 0 0\n"
    (tmp_path / "proc/self/mounts").write_text(mounts)

    assert memory.huge_pages(tmp_path) == mode


def test_a_kernel_without_huge_pages(tmp_path):
    assert memory.huge_pages(tmp_path) == "never"
