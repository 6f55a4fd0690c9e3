"""Real misconfigurations, planted: `doctor`, or the error itself, names the cause and its fix.

Each case plants one and returns what a person reads. Where the remedy can be carried out here it is, and
the complaint has to be gone: a text that is always printed would pass neither the control nor the mending.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.protocol.harness import ServerProcess

GOOD = {
    "kv_connector": "LMCacheShmConnector",
    "kv_connector_module_path": "lmcache_shm.vllm",
    "kv_role": "kv_both",
}


@dataclass
class Place:
    """Where a case plants: an instance and a runtime directory that nobody else has."""

    instance: str
    folder: Path
    undo: contextlib.ExitStack

    def run(self, *words: str, before: tuple[str, ...] = (), **environment: str) -> str:
        """All that a command of ours says."""
        done = subprocess.run(
            [*before, sys.executable, "-m", "lmcache_shm", *words],
            env={
                **os.environ,
                "LMCACHE_SHM_RUNTIME_DIR": str(self.folder),
                "LMCACHE_SHM_INSTANCE": self.instance,
                "LMCACHE_SHM_L1_SIZE_GB": "0.0625",
                **environment,
            },
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert "Traceback" not in done.stderr, done.stderr
        return done.stdout + done.stderr

    def doctor(self, **extra: object) -> str:
        """With the engine's options, if there are any."""
        return self.run("doctor", "-q", *(("--kv-transfer-config", config(extra)) if extra else ()))

    def serve(self, **environment: str) -> ServerProcess:
        before = os.environ["LMCACHE_SHM_RUNTIME_DIR"]
        os.environ["LMCACHE_SHM_RUNTIME_DIR"] = str(self.folder)
        try:
            server = ServerProcess(self.instance, **environment)
        finally:
            os.environ["LMCACHE_SHM_RUNTIME_DIR"] = before
        self.undo.callback(server.end)
        return server


def config(extra: dict[str, object]) -> str:
    return json.dumps({**GOOD, "kv_connector_extra_config": extra})


@pytest.fixture
def place(instance: str) -> Iterator[Place]:
    folder = Path(tempfile.mkdtemp(prefix=f"lmcshm-test-{os.getpid()}-"))
    with contextlib.ExitStack() as undo:
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        yield Place(instance, folder, undo)


# ------------------------------------------------------------------------------------ what is planted
def small_dev_shm(place: Place) -> str:
    """64 MB, as a container has."""
    mount = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64m t /dev/shm && "$@"', "-")
    said = place.run("server", "--l1-size-gb", "0.5", before=mount)
    if re.search("unshare|mount:", said):
        pytest.skip("no private mounts here")
    return said + place.run("doctor", "-q", "--l1-size-gb", "0.5", before=mount)


def open_directory(place: Place) -> str:
    place.folder.chmod(0o755)
    (place.folder / "notes.txt").touch()  # an empty one the server closes itself
    said = place.run("server") + place.doctor()
    mended = re.search(r"chmod 700 \S+", said)
    assert mended
    subprocess.run(mended[0].split(), check=True)
    assert "chmod" not in place.doctor()
    return said


def misspelt_option(place: Place) -> str:
    return place.doctor(**{"lmcache_shm.instanse": place.instance})


def misspelt_variable(place: Place) -> str:
    return place.run("server", LMCACHE_SHM_CHUNKSIZE="256")


def no_server(place: Place) -> str:
    said = place.doctor()
    place.serve()
    assert "no server" not in place.doctor()
    return said


def two_servers(place: Place) -> str:
    first = place.serve()
    said = place.run("server")
    assert str(first.pid) in said
    return said


def another_instance(place: Place) -> str:
    place.serve()
    wanted = f"{place.instance}-b"
    return place.run(
        "doctor", "-q", "--instance", wanted,
        "--kv-transfer-config", config({"lmcache_shm.instance": wanted}),
    )  # fmt: skip


def another_directory(place: Place) -> str:
    place.serve()
    elsewhere = place.folder / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    return place.run("doctor", "-q", LMCACHE_SHM_RUNTIME_DIR=str(elsewhere))


def leftovers_of_a_dead_server(place: Place) -> str:
    place.serve().end(signal.SIGKILL)
    said = place.run("doctor")
    place.run("purge", "--yes", "--instance", place.instance)
    assert f"instance {place.instance} has no server" not in place.run("doctor")
    return said


def stopped_server(place: Place) -> str:
    server = place.serve()
    server.process.send_signal(signal.SIGSTOP)
    said = place.doctor()
    mended = re.search(r"kill -CONT \d+", said)
    assert mended
    subprocess.run(mended[0].split(), check=True)
    assert "kill -CONT" not in place.doctor()
    return said


def another_version(place: Place) -> str:
    """A server that speaks a later protocol."""
    program = "import lmcache_shm.protocol.messages as m; m.PROTOCOL += 1\nfrom lmcache_shm.cli.app import main; main()"
    later = subprocess.Popen(
        [sys.executable, "-c", program, "server", "--instance", place.instance, "--l1-size-gb", "0.0625"],
        env={**os.environ, "LMCACHE_SHM_RUNTIME_DIR": str(place.folder)},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert later.stdout is not None
        while "vllm serve" not in (line := later.stdout.readline()):
            assert line
        return place.doctor()
    finally:
        later.terminate()
        later.communicate()


def little_locked_memory(place: Place) -> str:
    """As where there is a GPU: only then it matters."""
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))\n"
        "from lmcache_shm.cli.doctor_host import user_limits\n"
        "for f in user_limits(1 << 30, gpu=True): print(f.level, f.text, f.fix)"
    )
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout


def eaten_quotes(place: Place) -> str:
    return place.run("doctor", "-q", "--kv-transfer-config", "{kv_connector:LMCacheShmConnector}")


def no_state_snapshots(place: Place) -> str:
    return refused(
        "check_recurrent(engine(mode='none'), groups_of(full(160), state(160)), 'exact')"
    )


def steps_too_large(place: Place) -> str:
    return refused(
        "check_recurrent(engine(budget=8192), groups_of(full(160), state(160)), 'exact')"
    )


def chunk_that_does_not_fit(place: Place) -> str:
    return refused("make_plan(groups_of(full(400)), chunk_size=256)")


def refused(call: str) -> str:
    """What an engine ends with at its start; the checks are those that the connector makes."""
    pytest.importorskip("vllm")
    from lmcache_shm.client.plan import ModelError, make_plan
    from lmcache_shm.vllm.groups import check_recurrent
    from tests.unit.vllm_connector import worlds

    names = {**vars(worlds), "check_recurrent": check_recurrent, "make_plan": make_plan}
    with pytest.raises(ModelError) as caught:
        eval(call, names)  # three constants, above
    return str(caught.value)


# By case: (cause, remedy) as they are read.
CASES: dict[Callable[[Place], str], tuple[str, str]] = {
    small_dev_shm: (r"/dev/shm leaves", r"--shm-size"),
    open_directory: (r"is open to others and holds more[^\n]*\n(?s:.*)is open to other users", r"chmod 700 \S+"),
    misspelt_option: (r"lmcache_shm\.instanse is unknown", r"did you mean lmcache_shm\.instance\b"),
    misspelt_variable: (r"LMCACHE_SHM_CHUNKSIZE is unknown", r"did you mean LMCACHE_SHM_CHUNK_SIZE\b"),
    no_server: (r"no server of instance \S+ is running", r"→ lmcache-shm server --instance \S+"),
    two_servers: (r"is served by process \d+", r"lmcache-shm stop|--instance"),
    another_instance: (r"no server of instance \S+-b is running; running here: ", r"→ lmcache-shm server --instance \S+-b"),
    another_directory: (r"another runtime directory", r"export LMCACHE_SHM_RUNTIME_DIR=\S+"),
    leftovers_of_a_dead_server: (r"has no server, and .* in /dev/shm", r"lmcache-shm purge"),
    stopped_server: (r"stopped", r"kill -CONT \d+"),
    another_version: (r"speaks protocol", r"pip install lmcache-shm=="),
    little_locked_memory: (r"locked memory is limited to 64", r"ulimit -l unlimited"),
    eaten_quotes: (r"not JSON", r'"kv_connector":"LMCacheShmConnector"'),
    no_state_snapshots: (r"recurrent layers", r"--mamba-cache-mode align"),
    steps_too_large: (r"max_num_batched_tokens is 8192", r"--max-num-batched-tokens 319"),
    chunk_that_does_not_fit: (r"chunk size 256 does not fit this model", r"--chunk-size auto"),
}  # fmt: skip


@pytest.mark.parametrize("plant", CASES, ids=lambda case: case.__name__)
def test_a_planted_misconfiguration_is_named_with_what_mends_it(
    plant: Callable[[Place], str], place: Place
):
    cause, remedy = CASES[plant]
    said = plant(place)

    assert re.search(cause, said), said
    assert re.search(remedy, said), said


def test_nothing_planted_is_nothing_found(place: Place):
    """The control: beside a sound server none of these texts is printed."""
    place.serve()
    said = place.doctor(**{"lmcache_shm.instance": place.instance})

    for cause, _ in CASES.values():
        assert not re.search(cause, said), said
