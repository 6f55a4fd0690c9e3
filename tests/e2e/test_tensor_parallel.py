"""Two tensor-parallel ranks, real engines: one slot holds both ranks' shards, or one copy where ranks hold the same KV.

The measure is an engine with as many ranks and no connector.
"""

import os

import pytest

from tests.e2e.lab import FULL, LONG, NEW, SLIDING, STATE, TOLERANCE, Bench
from tests.e2e.predict import World
from tests.e2e.test_more_families import page_bytes
from tools.server_process import Server, Table
from tools.tiny_models.process import Engine, Output
from tools.tiny_models.prompts import tokens

BENCHES = [
    pytest.param(Bench("gemma3", 128, (FULL, SLIDING)), marks=LONG),
    Bench("qwen3_5", 320, (FULL, STATE)),
    Bench("deepseek_v3", 128, (FULL,)),  # MLA: both ranks hold the same
]
REPLICATED = {"deepseek_v3"}


def engine(family: str, server: Server | None = None) -> Engine:
    """An engine of two ranks, one thread each."""
    cpus = sorted(os.sched_getaffinity(0))
    return Engine(
        family,
        connector=server.connector() if server else None,
        engine={"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
        env={"VLLM_CPU_OMP_THREADS_BIND": f"{cpus[0]}|{cpus[-1]}"},
    )


def worst(one: list[Output], other: list[Output]) -> float:
    return max(a.difference(b) for a, b in zip(one, other, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("bench", BENCHES, ids=lambda bench: bench.family)
def test_two_ranks_share_a_slot(bench: Bench) -> None:
    """Cold and warm equal the baseline, hits as predicted; the bytes of each rank are used, and each is needed."""
    size = bench.chunk
    long = tokens("long", max(600, 2 * size + 40))
    prompts = [long, tokens("at", 2 * size), tokens("above", 2 * size + 1)]
    other = tokens("other", len(long) - 48) + long[-48:]
    with engine(bench.family) as plain:
        *baseline, elsewhere = plain.generate([*prompts, other], max_tokens=NEW, cold=True)
    assert baseline[0].difference(elsewhere) > 100 * TOLERANCE  # the model depends on its cache
    world = World(size, list(bench.rules))
    with (
        Server(f"test-{os.getpid()}-tp-{bench.family}", chunk_size=size, size_mb=128) as server,
        engine(bench.family, server) as shared,
    ):
        cold = shared.generate(prompts, max_tokens=NEW, cold=True)
        table = server.wait_idle()
        computed = [p + o.tokens[:-1] for p, o in zip(prompts, cold, strict=True)]
        for sequence in computed:
            world.computed(sequence)
        assert [output.external for output in cold] == [0, 0, 0]
        assert worst(baseline, cold) <= TOLERANCE
        stored = [len(table.rows(group)) for group in range(len(bench.rules))]
        assert sorted(stored) == sorted(world.count())

        warm = shared.generate(prompts, max_tokens=NEW, cold=True)

        assert [output.external for output in warm] == [world.hit(p) for p in prompts]
        assert worst(baseline, warm) <= TOLERANCE
        server.wait_idle()
        for group in range(len(bench.rules)):
            for part in parts(bench):
                flip(table, group, part, size, computed)
                (broken,) = shared.generate([long], max_tokens=NEW, cold=True)
                flip(table, group, part, size, computed)
                assert broken.external == world.hit(long)
                assert not baseline[0].difference(broken) <= 10 * TOLERANCE, (group, part)
        assert worst(baseline[:1], shared.generate([long], max_tokens=NEW, cold=True)) <= TOLERANCE
        server.wait_idle()
        assert server.check() == []
        assert shared.ask("free_blocks") == shared.info["num_blocks"] - 1
        assert [c["world"] for c in server.status()["clients"]] == [2]
        if bench.family in REPLICATED:
            assert_as_large_as_with_one_rank(bench, server)


def parts(bench: Bench) -> list[tuple[float, float]]:
    """Which part of a slot's pages each rank fills."""
    return [(0, 1)] if bench.family in REPLICATED else [(0, 0.5), (0.5, 1)]


def flip(
    table: Table, group: int, part: tuple[float, float], size: int, computed: list[list[int]]
) -> None:
    """Change the sign of each value in that part of the pages of a group's slots. Twice: nothing changed."""
    for row in table.rows(group):
        end = page_bytes(table, row, size, computed)
        # Regions begin on 64 bytes and checksums follow them: keep off both seams.
        first, last = (int(end * edge) // 128 * 128 for edge in part)
        table.payload(row)[first + 129 : last - 128 : 2] ^= 0x80


def assert_as_large_as_with_one_rank(bench: Bench, server: Server) -> None:
    """Replicated KV is stored once. The engine with one rank is another namespace, and finds nothing."""
    prompt = tokens("long", 2 * bench.chunk + 40)
    with Engine(bench.family, connector=server.connector()) as single:
        (cold,) = single.generate([prompt], max_tokens=NEW)
        server.wait_idle()
    assert cold.external == 0
    two, one = server.status()["namespaces"]
    sizes = [[group["slot_bytes"] for group in space["groups"]] for space in (two, one)]
    assert sizes[0] == sizes[1]
    assert [space["description"]["parallel"]["replicas"] for space in (two, one)] == [2, 1]
