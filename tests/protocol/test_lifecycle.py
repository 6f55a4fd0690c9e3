"""Starting, ending, adopting; and the command line around it."""

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lmcache_shm.arena.segment import attach, segment_names, shm_path
from lmcache_shm.cli.app import COMMANDS, main
from lmcache_shm.client.connection import Connection, ControlError, Unavailable
from lmcache_shm.protocol.messages import PROTOCOL, Done, Drain, Hello, Shutdown
from tests.protocol.harness import Engine, Prefix, ServerProcess, assert_clean, engine, rows_of
from tools.harness.wait import until

SHM = Path("/dev/shm")


def segments(instance: str) -> list[str]:
    """Names in /dev/shm that have to do with the instance, whatever they are called."""
    found = (path.name for path in SHM.glob("lmcache_shm.*"))
    return sorted(name for name in found if name.removesuffix(".meta").endswith(f".{instance}"))


def run(*words: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "lmcache_shm", *words],
        capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL,
        env={**os.environ, **environment}, check=False,
    )  # fmt: skip


@pytest.fixture
def here(capsys, monkeypatch):
    """`run` for commands that only ask: in this process, because starting Python takes longer than they do."""

    def call(*words: str, **environment: str) -> subprocess.CompletedProcess:
        with monkeypatch.context() as patched:
            for name, value in environment.items():
                patched.setenv(name, value)
            with pytest.raises(SystemExit) as ended:
                main(list(words))
        said = capsys.readouterr()
        return subprocess.CompletedProcess(words, ended.value.code, said.out, said.err)

    return call


def refusal(result: subprocess.CompletedProcess) -> str:
    """What a command that failed says: one line, on stderr, and a status that is not 0."""
    assert result.returncode in {1, 2}, result
    return one_line(result.stderr)


def complaint(*words: str, **environment: str) -> str:
    """What a command in a process of its own says when it must fail."""
    return refusal(run(*words, **environment))


def one_line(text: str) -> str:
    lines = text.splitlines()
    assert len(lines) == 1, text
    assert lines[0].startswith("lmcache-shm: ")
    return lines[0]


@pytest.fixture
def servers():
    """Start servers in a test; those still running at its end are checked and ended."""
    made: list[ServerProcess] = []

    def start(instance: str, *flags: str, **environment: str) -> ServerProcess:
        made.append(ServerProcess(instance, *flags, **environment))
        return made[-1]

    yield start
    for server in made:
        if server.process.poll() is None:
            assert_clean(server)
        server.end()


# ------------------------------------------------------------------------------------------- start
def test_it_says_what_to_type_next(servers, instance):
    ready = servers(instance).ready

    assert f"instance {instance} is ready" in ready
    assert f"/dev/shm/lmcache_shm.{os.geteuid()}.{instance}" in ready
    assert "new and empty" in ready
    line = next(line for line in ready.splitlines() if "vllm serve" in line)
    options = json.loads(line.partition("--kv-transfer-config ")[2].strip("'"))
    assert options["kv_connector"] == "LMCacheShmConnector"
    assert options["kv_connector_module_path"] == "lmcache_shm.vllm"
    assert options["kv_role"] == "kv_both"
    assert options["kv_connector_extra_config"]["lmcache_shm.instance"] == instance


def test_in_json_it_says_so_in_json(servers, instance):
    server = servers(instance, "--log-format", "json")
    fields = json.loads(server.ready)

    assert fields["message"] == "ready"
    assert fields["pid"] == server.pid
    assert "vllm serve MODEL" in fields["engine"]
    with engine(server):
        pass
    server.end()
    for line in server.errors.splitlines():
        assert {"time", "level", "message"} <= json.loads(line).keys()


def test_the_server_process_imports_neither_torch_nor_vllm(servers, instance, monkeypatch):
    monkeypatch.delenv(
        "LD_PRELOAD", raising=False
    )  # vLLM sets it in a process that asks it for its platform
    server = servers(instance)
    with engine(server) as one:
        one.store(Prefix(1, 2))
        server.status()
    mapped = Path(f"/proc/{server.pid}/maps").read_text()

    assert "libtorch" not in mapped
    assert "/torch/" not in mapped
    assert "libcuda" not in mapped
    probe = "import sys, lmcache_shm.cli.server, lmcache_shm.server.process; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=True
    )
    assert not {"torch", "vllm", "cuda", "triton"} & set(loaded.stdout.split())


def test_segments_and_socket_are_for_the_owner_only(servers, instance):
    server = servers(instance)
    for path in [SHM / name for name in segments(instance)] + [Path(server.path)]:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(Path(server.path).parent.stat().st_mode) == 0o700


def test_a_second_server_names_the_first(servers, instance, tmp_path):
    first = servers(instance)
    for extra in ([], ["--runtime-dir", str(tmp_path)], ["--fresh"]):
        line = complaint("server", "--instance", instance, "--l1-size-gb", "0.0625", *extra)
        assert f"process {first.pid}" in line
    with engine(first) as one:
        one.store(Prefix(1, 1))


def test_servers_of_two_instances_do_not_meet(servers, instance):
    one, other = servers(instance), servers(instance + "-b")
    with engine(one) as first, engine(other) as second:
        first.store(Prefix(1, 3))
        assert second.acquire(Prefix(1, 3)).n_chunks == 0


def test_a_socket_without_a_server_is_taken_over(servers, instance, runtime_dir):
    path = runtime_dir / f"{instance}.sock"
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()
    server = servers(instance)

    assert server.status()["server"]["instance"] == instance


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["server", "--chunk-size", "12.5"],
            "--chunk-size: '12.5' is not valid; expected auto, or",
        ),
        (["server", "--l1-size-gb", "much"], "expected a number from"),
        (["server", "--l1-sizegb", "4"], "--l1-size-gb"),
        (["server", "--eviction-policy", "FIFO"], "expected one of LRU"),
        (["server", "now"], "Got unexpected extra argument"),
        (["serve"], "did you mean server?"),
        (["xyzzy"], "--help lists the commands"),
        (["status", "--instance", "no/such"], "a name of at most 48"),
        (
            ["status", "--instance", "nobody"],
            "start one with: lmcache-shm server --instance nobody",
        ),
        (["ls", "--instance", "nobody"], "no server of instance nobody"),
        (["stop", "--instance", "nobody"], "no server of instance nobody"),
        (["clear", "--instance", "nobody"], "say what to clear"),
        (["clear", "--all", "--salt", "x"], "goes with neither"),
        (["check", "--instance", "nobody"], "no arena of instance nobody"),
        (["inspect", "abc", "--instance", "nobody"], "no arena of instance nobody"),
        (["config", "--connector", "{"], "--connector is not JSON"),
        (["config", "--connector", "[]"], "expected a JSON object"),
        (
            ["config", "--connector", '{"lmcache_shm.deadlin_ms": 1}'],
            "did you mean lmcache_shm.deadline_ms?",
        ),
    ],
)
def test_bad_input_is_one_line_with_what_to_type(words, expected, here):
    assert expected in refusal(here(*words))


def test_bad_input_is_one_line_in_a_process_of_its_own_too(instance):
    line = complaint("status", LMCACHE_SHM_INSTNACE=instance)

    assert "did you mean LMCACHE_SHM_INSTANCE?" in line


def test_more_memory_than_there_is_names_the_remedy(instance):
    line = complaint("server", "--instance", instance, "--l1-size-gb", "60000")

    assert "--shm-size" in line or "free some memory" in line or "memory limit" in line
    assert "--l1-size-gb" in line
    assert segments(instance) == []


def test_a_file_size_limit_is_told(instance):
    import resource

    result = subprocess.run(
        [sys.executable, "-m", "lmcache_shm", "server", "--instance", instance, "--l1-size-gb", "0.1"],
        capture_output=True, text=True, check=False, timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)),
    )  # fmt: skip

    assert result.returncode == 1
    assert "ulimit -f" in result.stderr
    assert segments(instance) == []


def test_a_runtime_directory_that_is_a_link_is_refused(instance, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    line = complaint("server", "--instance", instance, "--runtime-dir", str(link))

    assert "is not a directory" in line


def test_a_socket_path_that_is_too_long_is_told(instance, tmp_path):
    line = complaint("server", "--instance", instance, "--runtime-dir", str(tmp_path / ("x" * 100)))

    assert "107 bytes" in line
    assert segments(instance) == []


def test_help_of_every_command(here):
    overview = here("--help").stdout
    for name in COMMANDS:
        assert f"\n  {name} " in overview
        shown = here(name, "--help")
        assert shown.returncode == 0
        assert shown.stdout.startswith(f"Usage: lmcache-shm {name} ")
    assert here("--version").stdout.startswith("lmcache-shm 0.")
    assert (here().returncode, here().stdout) == (2, overview)


def test_a_command_whose_module_is_missing_is_one_line(here, monkeypatch):
    monkeypatch.setitem(COMMANDS, "absent", ("lmcache_shm.cli.absent:absent", ""))
    monkeypatch.setitem(COMMANDS, "foreign", ("absent_package.x:y", ""))

    assert "not part of this installation" in refusal(here("absent"))
    assert "pip install" in refusal(here("foreign"))


# --------------------------------------------------------------------------------------------- end
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_and_leaves_nothing(servers, instance, number):
    server = servers(instance)
    with engine(server) as one:
        one.store(Prefix(1, 3))

    assert server.end(number) == 0
    assert "is removed" in server.errors
    assert segments(instance) == []
    assert not Path(server.path).exists()
    assert not Path(server.path).with_suffix(".lock").exists()


def test_a_signal_while_memory_is_being_reserved_leaves_nothing(instance):
    process = subprocess.Popen(
        [sys.executable, "-m", "lmcache_shm", "server", "--instance", instance, "--l1-size-gb", "3"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    data = shm_path(segment_names(instance)[0])
    until(lambda: data.exists() and data.stat().st_blocks > 0, "reserving")
    process.send_signal(signal.SIGTERM)

    assert process.wait(20) in {0, 143}  # 0 if it was ready by then
    assert segments(instance) == []


def test_with_keep_arena_it_says_that_it_stays_and_the_next_one_is_warm(servers, instance):
    server = servers(instance, "--keep-arena")
    prefix = Prefix(1, 5)
    with engine(server) as one:
        one.store(prefix)
        arena_id = one.registered.arena_id
    assert server.end() == 0
    assert "stays at /dev/shm" in server.errors
    assert len(segments(instance)) == 2

    again = servers(instance)
    assert "adopted" in again.ready
    assert again.status()["server"]["adopted"]["slots"] == 10
    with engine(again) as one:
        assert one.registered.arena_id == arena_id
        assert one.acquire(prefix).n_chunks == 5


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--fresh"], ""),
        (["--chunk-size", "64"], "chunk size in tokens (0: auto) is 0, wanted 64"),
        (["--no-separate-object-groups"], "separate object groups is True"),
        (["--l1-size-gb", "0.07"], "size in bytes"),
    ],
)
def test_another_wish_starts_empty_and_says_why(servers, instance, flags, why):
    server = servers(instance, "--keep-arena")
    with engine(server) as one:
        one.store(Prefix(1, 5))
    server.end()
    again = servers(instance, *flags)

    assert "new and empty" in again.ready
    until(lambda: why in again.errors, "the reason in the log")
    assert again.status()["arena"]["slots"]["used"] == 0


def test_after_a_kill_committed_slots_stay_and_half_written_ones_do_not(servers, instance):
    server = servers(instance)
    with engine(server) as one:
        stored = one.store(Prefix(1, 5))
        one.acquire(Prefix(1, 5))
        half = one.step(Prefix(2, 3).reserve())
        server.end(signal.SIGKILL)
    assert len(segments(instance)) == 2
    again = servers(instance, "--quarantine-grace-s", "0.3")
    # The worker of those half-written slots is this process, which lives.
    assert again.status()["arena"]["slots"]["quarantined"] == len(half)
    with engine(again, "another") as one:
        hit = one.acquire(Prefix(1, 5))
        assert rows_of(hit.rows[0]) == stored[:5]
        assert one.acquire(Prefix(2, 3)).n_chunks == 0
    until(lambda: again.status()["arena"]["slots"]["quarantined"] == 0, "grace time")


def test_kills_leave_the_hit_rate_and_the_memory_as_they_were(servers, instance):
    def blocks() -> list[int]:
        return [(SHM / name).stat().st_blocks for name in segments(instance)]

    server = servers(instance)
    with engine(server) as one:
        one.store(Prefix(1, 50))
    before = blocks()
    for _ in range(6):
        server.end(signal.SIGKILL)
        server = servers(instance)
    assert server.status()["server"]["restarts"] == 6
    assert blocks() == before
    with engine(server) as one:
        assert one.acquire(Prefix(1, 50)).n_chunks == 50


def test_the_name_of_another_s_segment_is_not_taken_away(servers, instance):
    """Someone replaced our segments by others of the same name: they stay."""
    server = servers(instance)
    for name in segments(instance):
        (SHM / name).unlink()
        (SHM / name).write_bytes(b"another's")
    Path(server.path).unlink()
    Path(server.path).write_bytes(b"another's")
    server.process.send_signal(signal.SIGTERM)
    server.process.wait(10)

    assert "is not ours any more" in server.errors
    assert len(segments(instance)) == 2
    assert Path(server.path).exists()
    for name in segments(instance):
        (SHM / name).unlink()
    Path(server.path).unlink()


def test_the_end_waits_for_copies_under_way_but_not_forever(servers, instance):
    server = servers(instance, "--drain-s", "20", "--keep-arena")
    with engine(server) as one:
        prefix = Prefix(1, 2)
        one.store(prefix)
        lease = one.acquire(prefix).lease
        rows = one.step(Prefix(2, 2).reserve())
        server.process.send_signal(signal.SIGTERM)
        until(lambda: refused(server), "no new connections")
        # Draining: nothing new is given, what is under way may end.
        assert one.acquire(prefix).n_chunks == 0
        assert set(one.step(Prefix(3, 1).reserve())) == {-3}
        one.step(commit=np.array(rows, "<i4").tobytes())
        assert server.process.poll() is None
        one.step(release=[lease])
        assert server.process.wait(5) == 0
    again = servers(instance)
    with engine(again) as one:
        assert one.acquire(Prefix(2, 2)).n_chunks == 2


def refused(server: ServerProcess) -> bool:
    try:
        Connection.open(server.path, Hello(PROTOCOL, "tool"), 0.2).close()
    except ControlError:
        return True
    return False


@pytest.mark.parametrize("how", ["time", "second signal"])
def test_a_lease_that_never_comes_back_does_not_keep_it(servers, instance, how):
    server = servers(instance, "--drain-s", "0.3" if how == "time" else "60")
    with engine(server) as one:
        one.store(Prefix(1, 2))
        one.acquire(Prefix(1, 2))
        server.process.send_signal(signal.SIGTERM)
        if how != "time":
            until(lambda: refused(server), "draining")
            server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(5) == 0


def test_a_server_can_be_drained_and_ended_from_outside(servers, instance):
    server = servers(instance)
    with engine(server) as one:
        one.store(Prefix(1, 2))
        lease = one.acquire(Prefix(1, 2)).lease
        with contextlib.closing(server.tool()) as tool:
            assert tool.call(Drain(), Done).count == 1
            assert tool.call(Shutdown(), Done).count == 1
        assert server.process.poll() is None
        one.step(release=[lease])
        assert server.process.wait(5) == 0


def test_engines_keep_their_mapping_when_the_server_has_gone(servers, instance):
    server = servers(instance)
    one = Engine(server)
    rows = one.store(Prefix(1, 2))
    arena = attach(instance, writable_data=True)
    server.end()
    arena.data_array[int(arena.cold["offset"][rows[0]])] = 77
    assert arena.data_array[int(arena.cold["offset"][rows[0]])] == 77
    arena.close()
    with pytest.raises(Unavailable):
        one.acquire(Prefix(1, 2))
    one.close()


# ---------------------------------------------------------------------------------------- commands
@pytest.fixture
def filled(servers, instance):
    """A server with two prefixes that share two chunks, with token ids in their slots."""
    server = servers(instance)
    with engine(server) as one:
        arena = attach(instance, writable_data=True)
        prefix = Prefix(1, 4)
        rows = one.step(prefix.reserve())
        for i, row in enumerate(rows):
            at = int(arena.cold["offset"][row]) + one.registered.token_offset[i // 4]
            encoded = prefix.encoded[i % 4]
            arena.data[at : at + len(encoded)] = encoded
        one.step(commit=np.array(rows, "<i4").tobytes())
        arena.close()
    return server


def test_status_ls_and_check_tell_what_there_is(filled, instance, here):
    shown = here("status", "--instance", instance)
    assert "8 slots stored" in shown.stdout
    assert "window: window 40, 4 slots" in shown.stdout
    assert (
        json.loads(here("status", "--json", "--instance", instance).stdout)["server"]["pid"]
        == filled.pid
    )
    listed = here("ls", "--instance", instance).stdout
    assert "chunks 0-3, 64 tokens" in listed
    assert len(json.loads(here("ls", "--json", "--instance", instance).stdout)["chunks"]) == 4
    checked = here("check", "--instance", instance)
    assert (checked.returncode, checked.stdout[:10]) == (0, "consistent")


def test_inspect_shows_token_ids_or_text(filled, instance, tmp_path, here):
    key = json.loads(here("ls", "--json", "--instance", instance).stdout)["chunks"][1]["key"]
    found = json.loads(here("inspect", key[:7], "--json", "--instance", instance).stdout)
    assert found["slots"][0]["tokens"] == [100_016 + i for i in range(16)]
    assert {slot["group"] for slot in found["slots"]} == {"full", "window"}
    row = found["slots"][0]["row"]
    assert "100016 100017" in here("inspect", f"@{row}", "--instance", instance).stdout
    assert "no such key" in refusal(here("inspect", "0000000000", "--instance", instance))
    assert "neither the beginning" in refusal(here("inspect", "xyz", "--instance", instance))
    assert "expected @ROW" in refusal(here("inspect", "@999999", "--instance", instance))
    line = refusal(here("inspect", key, "--tokenizer", str(tmp_path), "--instance", instance))
    assert "tokenizer" in line


def test_inspect_shows_the_text_with_a_tokenizer(filled, instance, tmp_path, here):
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{i}": 100_000 + i for i in range(64)} | {"[UNK]": 0}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    key = json.loads(here("ls", "--json", "--instance", instance).stdout)["chunks"][0]["key"]
    shown = here("inspect", key, "--tokenizer", str(tmp_path), "--instance", instance).stdout

    assert "w0 w1 w2" in shown


def test_clear_asks_first(filled, instance, here):
    assert "add --yes" in refusal(here("clear", "--all", "--instance", instance))
    assert "there is no namespace 9" in refusal(
        here("clear", "--namespace", "9", "--instance", instance)
    )
    assert (
        here("clear", "--salt", "x", "--yes", "--instance", instance).stdout
        == "0 slots forgotten\n"
    )
    assert here("clear", "--all", "--yes", "--instance", instance).stdout == "8 slots forgotten\n"
    assert "nothing is cached" in here("ls", "--instance", instance).stdout


def test_check_finds_damage(filled, instance, here):
    arena = attach(instance, writable_data=False, server=False)
    row = int(np.flatnonzero(arena.hot["state"] == 3)[0])
    at = arena.regions.cold + row * arena.cold.dtype.itemsize
    arena.close()
    with (SHM / segments(instance)[1]).open("r+b") as meta:
        meta.seek(at)
        good = meta.read(8)
        meta.seek(at)
        meta.write(bytes(8))
    result = here("check", "--instance", instance)
    assert result.returncode == 1
    assert str(row) in result.stdout
    with (SHM / segments(instance)[1]).open("r+b") as meta:
        meta.seek(at)
        meta.write(good)


def test_purge_removes_what_the_dead_left_and_only_that(servers, instance, here):
    living, dead = servers(instance), servers(instance + "-dead")
    dead.end(signal.SIGKILL)
    assert "add --yes" in refusal(here("purge", "--instance", instance + "-dead"))
    removed = json.loads(here("purge", "--yes", "--json", "--instance", instance + "-dead").stdout)

    assert len(removed["removed"]) == 4  # two segments, socket, lock
    assert removed["bytes"] >= 64 << 20
    assert segments(instance + "-dead") == []
    assert here("purge", "--yes", "--instance", instance).stdout == "0 files removed, 0 B freed\n"
    assert living.status()["server"]["pid"] == living.pid


def test_stop_ends_a_server(servers, instance, here):
    server = servers(instance)
    assert f"server {server.pid} ends" in here("stop", "--instance", instance).stdout

    assert server.process.wait(5) == 0


def test_config_tells_where_each_value_comes_from(runtime_dir, here):
    result = here(
        "config", "--json", "--chunk-size", "128", "--connector", '{"lmcache_shm.deadline_ms": 100}',
        LMCACHE_SHM_L1_SIZE_GB="2",
    )  # fmt: skip
    found = json.loads(result.stdout)

    assert found["chunk_size"] == {"value": 128, "from": "--chunk-size"}
    assert found["l1_size_gb"] == {"value": 2.0, "from": "LMCACHE_SHM_L1_SIZE_GB"}
    assert found["deadline_ms"] == {"value": 100.0, "from": "lmcache_shm.deadline_ms"}
    assert found["fresh"] == {"value": False, "from": "default"}
    assert found["runtime_dir"]["value"] == str(runtime_dir)
    lines = here("config").stdout.splitlines()
    assert len(lines) == len(found)


def test_shell_completion_knows_the_commands():
    result = run(
        _LMCACHE_SHM_COMPLETE="complete_bash", COMP_WORDS="lmcache-shm ser", COMP_CWORD="1"
    )

    assert result.stdout.split() == ["server"]
