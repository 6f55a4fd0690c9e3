"""A server for each test, or one for all tests of a module; clean at the end of each."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.protocol.harness import ServerProcess, assert_clean


@pytest.fixture(scope="module")
def shared_server(runtime_dir: Path, request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    """One server for a module; tests use `lasting`, which looks after each of them."""
    import os

    module = request.module.__name__.rpartition(".")[2].replace("_", "-")
    server = ServerProcess(f"test-{os.getpid()}-{module}"[:48], "--quarantine-grace-s", "0.5")
    yield server
    server.end()


@pytest.fixture
def lasting(shared_server: ServerProcess) -> Iterator[ServerProcess]:
    yield shared_server
    assert shared_server.process.poll() is None
    assert_clean(shared_server)


@pytest.fixture
def server(instance: str, request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    """A server of this test's own; flags by @pytest.mark.parametrize("server", [[…]], indirect=True)."""
    flags = getattr(request, "param", [])
    made = ServerProcess(instance, *flags)
    yield made
    if made.process.poll() is None:
        assert_clean(made)
    made.end()
