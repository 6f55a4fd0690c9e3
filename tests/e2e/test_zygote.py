"""Engines of these tests are forked: each is a process like one that was started afresh."""

import os
import signal
from pathlib import Path

from tools.tiny_models.process import Engine
from tools.tiny_models.zygote import Forked

ABOUT = """
import os, sys
result = [os.environ.get("LMCACHE_SHM_CHUNK_SIZE"), os.getsid(0), os.getppid(), os.readlink("/proc/self/fd/2")]
"""


def test_a_forked_engine_has_its_own_session_environment_and_log() -> None:
    with Engine("llama", env={"LMCACHE_SHM_CHUNK_SIZE": "192"}) as engine:
        assert isinstance(engine._process, Forked)
        chunk, session, parent, log = engine.ask("python", code=ABOUT)

        assert (chunk, session, log) == ("192", engine.pid, str(engine.log))
        assert parent != os.getpid()
        assert not engine._process.ended()
        os.kill(engine.pid, signal.SIGKILL)
        engine._process.wait(10)
    assert not Path(f"/proc/{engine.pid}").exists(), "its zygote has waited for it"
