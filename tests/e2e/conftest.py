"""Real engines: one process per model for most checks, never two at work at once."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.lab import BENCHES, Lab
from tools.harness import leftovers
from tools.tiny_models.zygote import zygotes


@pytest.fixture(scope="session", autouse=True)
def imported_once(runtime_dir: Path) -> Iterator[None]:
    """Engines are forked from processes that have imported vLLM, and that end with the run."""
    with zygotes(leftovers.shared_processes.add):
        yield


@pytest.fixture(scope="module", params=list(BENCHES))
def shared_lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """One model's baseline, server and engine, for all tests of a module."""
    import os

    bench = BENCHES[request.param]
    lab = Lab(bench, f"test-{os.getpid()}-{bench.family}")
    yield lab
    lab.close()


@pytest.fixture
def lab(shared_lab: Lab) -> Iterator[Lab]:
    """The same, with nothing cached; afterwards nothing is pinned, reserved or held, and the arena is consistent."""
    shared_lab.fresh()
    yield shared_lab
    shared_lab.server.wait_idle()
    assert shared_lab.server.check() == []
    assert shared_lab.engine.ask("free_blocks") == shared_lab.engine.info["num_blocks"] - 1
