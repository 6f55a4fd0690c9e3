"""verify against a real `vllm serve` with a GDN + full attention model, and with an arena gone bad."""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from lmcache_shm.arena.layout import SlotState
from lmcache_shm.cli import app, verify, verify_api
from tests.e2e.deployment import Deployment, NotServedError
from tools.harness.engines import state_of
from tools.harness.wait import LONG_S, until
from tools.server_process import Server
from tools.tiny_models.prompts import tokens

FAMILY = "qwen3_5"
N = 160  # tokens; its unified block size with --block-size 32
TOKEN_BYTES = 4 * 320
"""Of a chunk: two blocks."""


@pytest.fixture(scope="module")
def deployed() -> Iterator[Deployment]:
    with (
        Server(f"test-{os.getpid()}-verify", size_mb=256) as server,
        Deployment(server, FAMILY, "--max-num-batched-tokens", str(2 * N - 1)) as deployment,
    ):
        yield deployment


def run(deployed: Deployment, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    words = ["--base-url", deployed.url, "--instance", deployed.server.instance, "--task", "ids"]
    with pytest.raises(SystemExit) as end:
        app.main(["verify", *words, "--limit", "8", "--prefix-tokens", "1300", "--json"])
    captured = capsys.readouterr()
    assert captured.out, f"{captured.err}\n{deployed.log_tail()}"
    return int(end.value.code or 0), json.loads(captured.out)


def tokens_at(payload: npt.NDArray[np.uint8]) -> int:
    """Where a chunk's token ids begin: they are the last in a slot, and no id is 0."""
    end = (int(np.flatnonzero(payload)[-1]) // 4 + 1) * 4
    return end - TOKEN_BYTES


def before_the_warm_run(monkeypatch: pytest.MonkeyPatch, action: Any) -> None:
    """Do something to the arena when all stores of the cold run are committed."""

    def settled(config: Any) -> Any:
        snapshot = verify_api.settled(config)
        action()
        return snapshot

    monkeypatch.setattr(verify, "settled", settled)


def test_a_sound_deployment_passes(
    deployed: Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    status, said = run(deployed, capsys)

    assert (status, said["complaints"]) == (0, [])
    # Four prefixes of 1,300 tokens: at least each one's first prompt is served, whole chunks of it.
    assert said["served_tokens"] >= 4 * (1300 // 320) * 320
    assert said["tokens_equal"] == 1.0
    assert said["failed_loads"] == 0


def test_flipped_bytes_in_the_arena_are_found(
    deployed: Deployment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def corrupt() -> None:
        table = deployed.server.table()
        for row in table.rows():
            # The token ids behind the pages stay right.
            table.flip(int(row), tokens_at(table.payload(int(row))))

    before_the_warm_run(monkeypatch, corrupt)

    status, said = run(deployed, capsys)

    assert status == 1, said
    assert said["served_tokens"] > 0  # it was served, and wrong
    assert "first token" in said["complaints"][0]
    assert said["tokens_equal"] < 1.0


def test_flipped_token_ids_are_no_hit(
    deployed: Deployment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exact-match confirmation refuses them, so the answers are right, but not from the arena."""

    def corrupt() -> None:
        table = deployed.server.table()
        for row in table.rows():
            payload = table.payload(int(row))
            at = tokens_at(payload)
            payload[at : at + TOKEN_BYTES] ^= 1

    before_the_warm_run(monkeypatch, corrupt)

    status, said = run(deployed, capsys)

    assert (status, said["served_tokens"], said["tokens_equal"]) == (1, 0, 1.0), said
    assert "nothing was served" in said["complaints"][0]


def test_an_arena_that_was_emptied_serves_nothing(
    deployed: Deployment, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before_the_warm_run(monkeypatch, deployed.server.clear)

    status, said = run(deployed, capsys)

    assert (status, said["served_tokens"]) == (1, 0)
    assert "nothing was served from the arena" in said["complaints"][0]


def test_nothing_stays_pinned(deployed: Deployment) -> None:
    table = deployed.server.wait_idle()

    assert table.pins() == 0
    assert len(table.rows(state=SlotState.RESERVED)) == 0
    assert deployed.server.check() == []


def test_a_reset_with_reset_external_over_http_moves_the_engine_on(deployed: Deployment) -> None:
    """After the others: what the runs before it stored stays, for engines whose weights did not change."""
    deployed.complete(tokens("moved on", 4 * N))
    before = len(deployed.server.wait_idle().rows())
    assert before > 0

    deployed.post("/reset_prefix_cache?reset_external=true")
    deployed.complete(tokens("moved on", 4 * N))

    assert len(deployed.server.wait_idle().rows()) > before
    assert len(deployed.server.status()["namespaces"]) == 2


def test_a_killed_engine_core_leaves_nothing(deployed: Deployment) -> None:
    """kill -9 of EngineCore in the middle of a store, its API server beside it; the last test on this deployment."""
    deployed.server.clear()
    core = deployed.server.status()["clients"][0]["workers"][0]["pid"]
    table = deployed.server.table()
    with ThreadPoolExecutor(1) as pool:
        for attempt in range(30):
            answer = pool.submit(deployed.complete, tokens(f"killed {attempt}", 8 * N))
            until(lambda: len(table.rows(state=SlotState.RESERVED)), "a store is under way", LONG_S)
            os.kill(core, signal.SIGSTOP)
            until(lambda: state_of(core) == "T", "it is stopped", LONG_S)
            if len(table.rows(state=SlotState.RESERVED)):
                break  # in the middle of the store, surely
            os.kill(core, signal.SIGCONT)
            assert answer.result()
        os.kill(core, signal.SIGKILL)
        with pytest.raises(NotServedError):
            answer.result()
    until(
        lambda: not any(c["connected"] for c in deployed.server.status()["clients"]),
        "it left",
        LONG_S,
    )
    until(lambda: not len(table.rows(state=SlotState.QUARANTINED)), "quarantine ends", LONG_S)
    test_nothing_stays_pinned(deployed)
