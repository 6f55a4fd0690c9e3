"""doctor: planted misconfigurations are found, each with its fix, and sound things are left alone."""

import importlib.metadata
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from lmcache_shm.arena.memory import Limit
from lmcache_shm.cli import doctor_engine as engine
from lmcache_shm.cli import doctor_host as host
from lmcache_shm.cli import doctor_server as server
from lmcache_shm.cli.doctor import examine
from lmcache_shm.cli.doctor_host import Finding
from lmcache_shm.cli.doctor_server import compare_namespaces
from lmcache_shm.client.connection import DeadlineExceeded, Refused, Unavailable
from lmcache_shm.config import ConfigError
from lmcache_shm.protocol.messages import HelloReply
from tests.unit.sample_snapshot import snapshot

GIB = 1 << 30
GOOD = {
    "kv_connector": "LMCacheShmConnector",
    "kv_connector_module_path": "lmcache_shm.vllm",
    "kv_role": "kv_both",
}


def problems(found: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in found if finding.level == "problem"]


def the_problem(found: Iterable[Finding]) -> Finding:
    (only,) = problems(found)
    assert only.fix
    assert "\n" not in only.text + only.fix
    return only


def options(extra: dict[str, Any] | None = None, **changes: Any) -> list[Finding]:
    given = {**GOOD, **({"kv_connector_extra_config": extra} if extra else {}), **changes}
    given = {name: value for name, value in given.items() if value is not None}
    return engine.transfer_config(json.dumps(given), {})[0]


# ---------------------------------------------------------------------- planted: the host's memory
def test_a_containers_default_shared_memory_is_found():
    found = problems(
        host.shared_memory(
            4 * GIB, has_arena=False, bounds=[Limit("/dev/shm", 64 << 20, "x")], total=64 << 20
        )
    )

    assert "the default of a container" in found[0].text
    assert "--shm-size" in found[0].fix
    assert "--l1-size-gb" in found[1].fix


def test_a_memory_limit_below_the_arena_is_found():
    limit = Limit("the cgroup's memory limit", 2 * GIB, "raise it (--memory)")
    found = the_problem(
        host.shared_memory(8 * GIB, has_arena=False, bounds=[limit], total=64 * GIB)
    )

    assert "cgroup" in found.text
    assert found.fix == "lmcache-shm server --l1-size-gb 1.8"


def test_room_that_a_running_server_has_already_is_not_asked_for():
    assert not problems(
        host.shared_memory(
            8 * GIB, has_arena=True, bounds=[Limit("/dev/shm", GIB, "x")], total=9 * GIB
        )
    )


def test_a_file_size_limit_is_found():
    found = _limited(f"resource.setrlimit(resource.RLIMIT_FSIZE, ({GIB}, {GIB}))")

    assert "ulimit -f unlimited" in found


def test_too_few_open_files_are_found():
    found = _limited("resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))")

    assert "ulimit -n 1024" in found


def _limited(limit: str) -> str:
    """Remedies of user_limits in a process with that limit."""
    program = f"""
import resource
{limit}
from lmcache_shm.cli.doctor_host import user_limits
for finding in user_limits(4 << 30, gpu=False):
    if finding.level == "problem":
        print(finding.fix)
"""
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout


def test_locked_memory_matters_with_a_gpu_only(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        resource,
        "getrlimit",
        lambda what: (8 << 20, 8 << 20) if what == resource.RLIMIT_MEMLOCK else (1 << 62, 1 << 62),
    )

    with_gpu = [f for f in host.user_limits(GIB, gpu=True) if f.level != "ok"]
    assert "memlock" in with_gpu[0].fix
    assert not [f for f in host.user_limits(GIB, gpu=False) if f.level != "ok"]


def test_huge_pages_and_numa_nodes_are_told(tmp_path: Path):
    place = tmp_path / "sys/kernel/mm/transparent_hugepage"
    place.mkdir(parents=True)
    (place / "shmem_enabled").write_text("always within_size advise [never] deny force\n")
    (tmp_path / "proc/self").mkdir(parents=True)
    mounts = tmp_path / "proc/self/mounts"
    mounts.write_text("tmpfs /dev/shm tmpfs rw,size=8g 0 0\n")
    for node in range(2):
        (tmp_path / f"sys/devices/system/node/node{node}").mkdir(parents=True)

    (pages,) = host.huge_pages(tmp_path)
    (numa,) = host.numa(tmp_path)
    assert (pages.level, numa.level) == ("note", "note")
    assert "mount -o remount,huge=within_size /dev/shm" in pages.fix
    mounts.write_text("tmpfs /dev/shm tmpfs rw,huge=within_size,size=8g 0 0\n")
    assert [page.level for page in host.huge_pages(tmp_path)] == ["ok"]
    assert "numactl" in numa.fix


def test_segments_that_go_with_a_log_out_are_told(tmp_path: Path):
    (tmp_path / "run/systemd/seats").mkdir(parents=True)

    (found,) = host.log_out(tmp_path, uid=1000)
    assert "RemoveIPC" in found.text
    assert not list(host.log_out(tmp_path, uid=998))  # a system user
    (tmp_path / "etc/systemd/logind.conf.d").mkdir(parents=True)
    (tmp_path / "etc/systemd/logind.conf.d/x.conf").write_text("[Login]\nRemoveIPC=no\n")
    assert not list(host.log_out(tmp_path, uid=1000))


# -------------------------------------------------------------------- planted: the runtime directory
def test_a_runtime_directory_that_is_a_link_is_found(tmp_path: Path):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")

    assert "is not a directory" in the_problem(host.runtime_directory(tmp_path / "link", "x")).text


def test_a_runtime_directory_that_others_can_read_is_found(tmp_path: Path):
    path = tmp_path / "open"
    path.mkdir()
    path.chmod(0o755)

    assert the_problem(host.runtime_directory(path, "x")).fix == f"chmod 700 {path}"


def test_a_runtime_directory_of_another_user_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)

    assert "run as one user" in the_problem(host.runtime_directory(tmp_path, "x")).text


def test_a_path_too_long_for_a_socket_is_found(tmp_path: Path):
    found = the_problem(host.runtime_directory(tmp_path / ("long" * 30), "default"))

    assert "107 are allowed" in found.text
    assert "LMCACHE_SHM_RUNTIME_DIR" in found.fix


def test_a_sound_runtime_directory_is_left_alone(tmp_path: Path):
    tmp_path.chmod(0o700)

    assert not problems(host.runtime_directory(tmp_path, "x"))
    assert not problems(host.runtime_directory(tmp_path / "not yet", "x"))


# ---------------------------------------------------------------------- planted: names and options
def test_a_misspelt_environment_variable_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LMCACHE_SHM_CHUNKSIZE", "256")
    found = [f for f in examine({}) if f.area == "environment"]

    assert "did you mean LMCACHE_SHM_CHUNK_SIZE" in the_problem(found).text


def test_a_mistake_on_the_command_line_is_told_like_any_other():
    with pytest.raises(ConfigError, match="l1-size-gb"):
        list(examine({"l1_size_gb": "many"}))


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ({"lmcache_shm.instanse": "x"}, "did you mean lmcache_shm.instance"),
        ({"deadline_ms": 100}, "did you mean lmcache_shm.deadline_ms"),
        ({"lmcache_shm.deadline_ms": "soon"}, "expected a number"),
        ({"lmcache_shm.l1_size_gb": 8}, "option of the server"),
        ({"lmcache_shm.mamba_steps": "sometimes"}, "one of exact, any"),
    ],
)
def test_a_wrong_connector_option_is_found(extra: dict[str, Any], told: str):
    assert told in the_problem(options(extra)).text


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"kv_conector": "x"}, 'write "kv_connector"'),
        ({"lmcache_shm.instance": "x"}, "kv_connector_extra_config"),
        ({"kv_connector": "LMCacheSHMConector"}, '"kv_connector":"LMCacheShmConnector"'),
        (
            {"kv_connector": "LMCacheMPConnector", "kv_connector_module_path": None},
            '"kv_connector_module_path":"lmcache_shm.vllm"',
        ),
        (
            {"kv_connector_module_path": "lmcache_shm.vlm"},
            '"kv_connector_module_path":"lmcache_shm.vllm"',
        ),
        ({"kv_role": "kv_consumer"}, '"kv_role":"kv_both"'),
        ({"kv_role": None}, '"kv_role":"kv_both"'),
    ],
)
def test_a_wrong_member_of_the_transfer_config_is_found(changes: dict[str, Any], remedy: str):
    assert remedy in the_problem(options(**changes)).fix


@pytest.mark.parametrize(
    ("top", "child", "told"),
    [
        ({}, {}, ""),
        ({}, {"kv_role": "kv_producer"}, ""),
        ({"kv_role": "kv_producer"}, {"kv_role": "kv_producer"}, ""),
        ({"kv_role": "kv_producer"}, {}, "stores only"),
        ({}, {"kv_conector": "x"}, "kv_conector is no member"),
        ({}, {"kv_connector_extra_config": {"lmcache_shm.chunk_sise": 1}}, "chunk_sise is unknown"),
        ({}, {"kv_connector": "NixlConnector", "kv_connector_module_path": None}, "not ours"),
    ],
)
def test_our_connector_is_looked_at_inside_multiconnector(
    top: dict[str, Any], child: dict[str, Any], told: str
):
    ours = {name: value for name, value in {**GOOD, **child}.items() if value is not None}
    found = options(
        {"connectors": [{"kv_connector": "NixlConnector", "kv_role": "kv_both"}, ours]},
        **{"kv_connector": "MultiConnector", "kv_connector_module_path": None, **top},
    )
    assert told in the_problem(found).text if told else not problems(found)


@pytest.mark.parametrize("text", ["{kv_connector:LMCacheShmConnector}", "", "[]", "'{}'"])
def test_quoting_that_the_shell_ate_is_found(text: str):
    found = the_problem(engine.transfer_config(text)[0])

    assert "JSON" in found.text
    assert engine.GOOD in found.fix


def test_options_of_another_system_are_named():
    (found,) = [f for f in options({"lmcache.mp.port": 5555}) if f.level == "note"]

    assert "lmcache.mp.port" in found.text
    assert "migrating" in found.fix


def test_good_options_are_left_alone():
    assert not problems(options())
    assert not problems(options({"lmcache_shm.instance": "prod", "lmcache_shm.autostart_gb": 8}))
    assert not problems(options(kv_connector="LMCacheMPConnector"))


def test_the_members_are_those_of_the_engine():
    vllm_config = pytest.importorskip("vllm.config.kv_transfer")

    assert set(engine.KNOWN) == set(vllm_config.KVTransferConfig.__dataclass_fields__)


def test_a_running_engine_without_the_connector_is_found():
    words = ["/x/python", "/x/bin/vllm", "serve", "some/model"]
    found = the_problem(engine.engines([(77, words)]))

    assert "engine 77 runs without the cache" in found.text
    assert "--kv-transfer-config" in found.fix


def test_a_running_engines_options_are_read_from_its_command_line():
    bad = json.dumps({**GOOD, "kv_role": "kv_producer"})
    for words in (
        ["vllm", "serve", "m", "--kv-transfer-config", bad],
        ["vllm", "serve", "m", f"--kv_transfer_config={bad}"],
    ):
        assert "engine 5: kv_role" in the_problem(engine.engines([(5, words)])).text
    good = ["vllm", "serve", "m", "--kv-transfer-config", json.dumps(GOOD)]
    assert not list(engine.engines([(5, good)]))


# ------------------------------------------------------------------------------ planted: versions
def test_another_vllm_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.19.1")

    assert the_problem(engine.versions()).fix == "pip install 'vllm==0.32.*'"


def test_a_driver_is_named(tmp_path: Path):
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu\n"
    )

    assert any("570.86.15" in finding.text for finding in engine.versions(tmp_path))


# ------------------------------------------------------------------------------ planted: the server
def test_a_missing_server_is_found_with_the_line_that_starts_it(tmp_path: Path):
    found = the_problem(
        server.no_answer(tmp_path / "prod.sock", "prod", 0, Unavailable("no server"))
    )

    assert found.fix == "lmcache-shm server --instance prod"


def test_a_server_of_another_version_is_found(tmp_path: Path):
    error = Refused("version", "this server (lmcache-shm 9) speaks protocol 9, not 1")
    found = the_problem(server.no_answer(tmp_path / "x.sock", "x", 1, error))

    assert "pip install lmcache-shm==" in found.fix


def test_a_server_that_hangs_is_found(tmp_path: Path):
    found = the_problem(
        server.no_answer(tmp_path / "x.sock", "x", os.getpid(), DeadlineExceeded("no answer"))
    )

    assert found.fix.startswith(f"kill {os.getpid()}")


HELLO = HelloReply(b"b", 1, b"a", "default", "/.", "/x", 0, True, "off", "0.1.0", 4711)


def health(**changes: Any) -> list[Finding]:
    changes = {"clients": [], **changes}
    return list(server.health(HELLO, snapshot(**changes), []))


def test_a_sound_server_is_left_alone():
    assert not problems(health())


def test_a_broken_table_is_found():
    found = the_problem(server.health(HELLO, snapshot(clients=[]), ["row 5 has two owners"]))

    assert "--fresh" in found.fix


def test_an_arena_of_another_mount_is_found():
    hello = HelloReply(
        b"b", 1, b"a", "default", "/lmcache_shm.nowhere", "/x", 0, True, "off", "0.1.0", 1
    )

    assert "--ipc=host" in the_problem(server.health(hello, snapshot(clients=[]), [])).fix


def test_an_arena_that_could_not_be_reserved_to_its_end_is_found():
    changes = {"arena__backed_bytes": 1 << 30, "arena__growing": False}
    found = the_problem(health(**changes))

    assert "only 1.0 GiB of 4.0 GiB could be reserved" in found.text
    assert "--shm-size" in found.fix


def test_an_arena_that_is_still_being_reserved_is_told_and_no_problem():
    """Nor is what found no room yet."""
    changes = {"arena__backed_bytes": 1 << 30, "counters__stores_skipped_full": 3}
    found = health(**changes, arena__growing=True)

    assert not problems(found)
    assert any("1.0 GiB of 4.0 GiB reserved, the rest follows" in f.text for f in found)
    assert len(problems(health(**changes, arena__growing=False))) == 2


def test_a_draining_server_is_found():
    assert "draining" in the_problem(health(server__draining=True)).text


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("never_seen", "one prompt twice"),
        ("evicted", "--l1-size-gb"),
        ("other_namespace", "lmcache-shm status"),
        ("incomplete_group", "lmcache-shm probe"),
        ("identity", "cache_salt"),
    ],
)
def test_a_hit_rate_of_zero_is_explained(reason: str, remedy: str):
    found = the_problem(health(counters__hit_tokens=0, misses={reason: 9, "in_flight": 1}))

    assert remedy in found.fix


def test_an_arena_that_turns_over_too_fast_is_found():
    assert the_problem(health(arena__coldest_age_s=4.0)).fix == "lmcache-shm server --l1-size-gb 8"


def test_stores_without_room_are_found():
    assert "no room" in the_problem(health(counters__stores_skipped_full=12)).text


def test_a_dead_worker_is_found():
    client = {**snapshot()["clients"][1], "connected": True}

    assert "workers of rank 1 are gone" in problems(health(clients=[client]))[0].text


def test_two_namespaces_of_one_model_are_compared():
    item = snapshot()
    twin = {**item["namespaces"][0], "id": 7, "description": {"model": "Qwen/Qwen3.5-4B", "tp": 2}}
    found = list(compare_namespaces({"namespaces": [*item["namespaces"], twin]}))

    assert "tp (1 / 2)" in found[0].text


# --------------------------------------------------------------------------------- on the command line
def run(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lmcache_shm", "doctor", *words]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environ}, check=False
    )


def test_the_command_says_what_mends_it_and_exits_with_1(instance: str):
    done = run("--instance", instance)

    assert done.returncode == 1
    assert f"no server of instance {instance} is running" in done.stdout
    assert f"→ lmcache-shm server --instance {instance}" in done.stdout


def test_the_command_in_json(instance: str):
    done = run(
        "--instance",
        instance,
        "--json",
        "--kv-transfer-config",
        json.dumps({**GOOD, "kv_role": "x"}),
    )
    found = json.loads(done.stdout)

    assert done.returncode == 1
    assert {"area", "level", "text", "remedy"} == set(found[0])
    assert any(item["level"] == "problem" and "kv_role" in item["text"] for item in found)


def test_the_engines_instance_is_the_one_that_is_looked_for(instance: str):
    extra = {"lmcache_shm.instance": instance}
    done = run("--kv-transfer-config", json.dumps({**GOOD, "kv_connector_extra_config": extra}))

    assert f"no server of instance {instance}" in done.stdout


def test_an_engine_that_starts_its_own_server_needs_none(instance: str):
    extra = {"lmcache_shm.instance": instance, "lmcache_shm.autostart_gb": 0.0625}
    done = run(
        "-q", "--kv-transfer-config", json.dumps({**GOOD, "kv_connector_extra_config": extra})
    )

    assert "no server" not in done.stdout


def test_a_wrong_call_exits_with_2():
    assert run("--no-such-option").returncode == 2
