"""Engines that live at the same time on one arena: those of one namespace share it, all others never meet."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.lab import FULL, NEW, SLIDING, TOLERANCE
from tests.e2e.predict import World
from tools.server_process import Server
from tools.tiny_models.process import Engine, Output
from tools.tiny_models.prompts import tokens

FAMILY, CHUNK = "gemma3", 128
PROMPTS = [tokens("shared", 700), tokens("also shared", 450)]


@dataclass(frozen=True)
class Replicas:
    """A server and two live engines of one model."""

    server: Server
    one: Engine
    other: Engine
    model: Path


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    model = tmp_path_factory.mktemp("model")
    with (
        Server(f"test-{os.getpid()}-sharing", chunk_size=CHUNK, size_mb=128) as server,
        Engine(FAMILY, connector=server.connector(), model=model) as one,
        Engine(FAMILY, connector=server.connector(), model=model) as other,
    ):
        yield Replicas(server, one, other, model)


@pytest.fixture
def world(replicas: Replicas) -> World:
    """What the arena should hold: nothing, to begin with."""
    assert replicas.one.reset()
    assert replicas.other.reset()
    replicas.server.wait_idle()
    replicas.server.clear()
    return World(CHUNK, [FULL, SLIDING])


def note(world: World, prompts: list[list[int]], outputs: list[Output]) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        world.computed(prompt + output.tokens[:-1])


def hits(outputs: list[Output]) -> list[int]:
    return [output.external for output in outputs]


def worst(one: list[Output], other: list[Output]) -> float:
    return max(a.difference(b) for a, b in zip(one, other, strict=True))


def stored(server: Server) -> int:
    return len(server.wait_idle().rows())


def test_each_hits_what_the_other_stored_while_both_live(replicas: Replicas, world: World) -> None:
    first, second = PROMPTS
    (computed,) = replicas.one.generate([first], max_tokens=NEW)
    replicas.server.wait_idle()
    note(world, [first], [computed])

    (served,) = replicas.other.generate([first], max_tokens=NEW)

    assert (served.external, served.local) == (world.hit(first), 0)
    assert served.external > 0
    assert computed.difference(served) <= TOLERANCE
    (computed,) = replicas.other.generate([second], max_tokens=NEW)  # and the other way round
    replicas.server.wait_idle()
    note(world, [second], [computed])
    (served,) = replicas.one.generate([second], max_tokens=NEW)
    assert (served.external, served.local) == (world.hit(second), 0)
    assert computed.difference(served) <= TOLERANCE
    clients = replicas.server.status()["clients"]
    assert [client["connected"] for client in clients] == [True, True]
    assert len({client["namespace"] for client in clients}) == 1


def test_both_at_once_store_each_chunk_once(replicas: Replicas, world: World) -> None:
    for engine in (replicas.one, replicas.other):
        engine.send("generate", prompts=PROMPTS, max_tokens=NEW)
    one, other = (
        [Output(**told) for told in engine.receive()] for engine in (replicas.one, replicas.other)
    )

    note(world, PROMPTS, one)
    assert worst(one, other) <= TOLERANCE
    assert stored(replicas.server) == sum(world.count())
    assert replicas.server.check() == []
    for engine in (replicas.one, replicas.other):
        again = engine.generate(PROMPTS, max_tokens=NEW, cold=True)
        assert hits(again) == [world.hit(prompt) for prompt in PROMPTS]
        assert worst(one, again) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dtype": "bfloat16"}, "model.dtype (torch.float32 / torch.bfloat16)"),
        ({"block_size": 64}, "groups.0.block_size (32 / 64)"),
    ],
    ids=["dtype", "block size"],
)
def test_an_engine_that_differs_shares_nothing_and_status_says_why(
    replicas: Replicas, world: World, change: dict[str, object], why: str
) -> None:
    """The same model, tokens and chunk size; and a reset of it empties nobody's namespace."""
    server, one = replicas.server, replicas.one
    computed = one.generate(PROMPTS, max_tokens=NEW)
    note(world, PROMPTS, computed)
    assert stored(server) == sum(world.count())
    with Engine(FAMILY, connector=server.connector(), model=replicas.model, engine=change) as alien:
        assert hits(alien.generate(PROMPTS, max_tokens=NEW)) == [0, 0]
        assert stored(server) == 2 * sum(world.count())
        apart = [line for line in status(server) if line.startswith("apart")]
        assert hits(alien.generate(PROMPTS, max_tokens=NEW, cold=True)) == [
            world.hit(prompt) for prompt in PROMPTS
        ]
        again = one.generate(PROMPTS, max_tokens=NEW, cold=True)
        server.wait_idle()
        assert alien.reset(external=True)
        assert stored(server) == 2 * sum(world.count())
    assert any(why in line for line in apart), apart
    assert hits(again) == [world.hit(prompt) for prompt in PROMPTS]
    assert worst(computed, again) <= TOLERANCE


def status(server: Server) -> list[str]:
    """The lines of `lmcache-shm status`."""
    command = [sys.executable, "-m", "lmcache_shm", "status", "--instance", server.instance]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_after_a_reset_with_reset_external_an_engine_is_by_itself(
    replicas: Replicas, world: World
) -> None:
    """Its weights are others, so it says; its twin keeps what there is. A plain reset changes nothing. The last test
    here: the two never share again."""
    server = replicas.server
    computed = replicas.one.generate(PROMPTS, max_tokens=NEW)
    note(world, PROMPTS, computed)
    found = hits(replicas.other.generate(PROMPTS, max_tokens=NEW))
    assert found != [0, 0]
    assert replicas.one.reset()
    assert stored(server) == sum(world.count())

    assert replicas.one.reset(external=True)

    assert stored(server) == sum(world.count())
    assert hits(replicas.other.generate(PROMPTS, max_tokens=NEW, cold=True)) == found
    alone = replicas.one.generate(PROMPTS, max_tokens=NEW, cold=True)
    assert hits(alone) == [0, 0]
    assert worst(computed, alone) <= TOLERANCE
    assert stored(server) == 2 * sum(world.count())
    assert hits(replicas.one.generate(PROMPTS, max_tokens=NEW, cold=True)) == found
    assert hits(replicas.other.generate(PROMPTS, max_tokens=NEW, cold=True)) == found
