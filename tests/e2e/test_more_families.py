"""Every other tiny model that vLLM's CPU backend can run: from the arena the same answers, by the groups' own rules.

One engine per model. What it answers cold, with nothing to load, is the measure here: that a cold run with the connector equals
one without is shown for six models in `test_families`.
"""

import os

import pytest

from tests.e2e.lab import FULL, LONG, NEW, SLIDING, STATE, TOLERANCE, Bench, token_bytes
from tests.e2e.predict import Rule, World
from tests.unit import recipe_tables
from tools.server_process import Server, Table
from tools.tiny_models.process import Engine
from tools.tiny_models.prompts import tokens

BENCHES = [
    pytest.param(Bench("qwen3", 96, (FULL,)), marks=LONG),
    Bench("mistral_sw", 96, (SLIDING,)),
    pytest.param(Bench("gemma2", 96, (FULL, SLIDING)), marks=LONG),
    Bench("gemma3n", 128, (FULL, SLIDING)),  # the last layers own no KV
    pytest.param(Bench("gemma4_shared", 128, (FULL, SLIDING)), marks=LONG),  # the same
    pytest.param(
        Bench("cohere2", 64, (FULL, Rule("window", 65))), marks=LONG
    ),  # a window that reaches over two chunks
    pytest.param(Bench("olmo3", 128, (FULL, SLIDING)), marks=LONG),
    Bench("llama4", 64, (FULL, Rule("chunked", 128))),
    pytest.param(Bench("qwen3_5_moe", 160, (FULL, STATE)), marks=LONG),
    pytest.param(Bench("qwen3_next", 320, (FULL, STATE)), marks=LONG),
    pytest.param(Bench("granite_hybrid", 96, (FULL, STATE)), marks=LONG),
    Bench("nemotron_h", 192, (FULL, STATE)),
    pytest.param(Bench("zamba2", 96, (FULL, STATE)), marks=LONG),
    Bench("jamba", 128, (FULL, STATE)),
    Bench("lfm2", 128, (FULL, STATE)),
    pytest.param(Bench("lfm2_moe", 256, (FULL, STATE)), marks=LONG),
    pytest.param(Bench("deepseek_v2", 128, (FULL,)), marks=LONG),
    Bench("deepseek_v3", 128, (FULL,)),
    Bench("deepseek_v4", 256, (FULL, Rule("window", 128), Rule("window", 8))),
    # Attention picks among compressed entries from about 2,100 tokens on: the indexer's cache matters, too.
    pytest.param(
        Bench("deepseek_v4", 256, (FULL, Rule("window", 128), Rule("window", 8)), 2400), marks=LONG
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "bench", BENCHES, ids=lambda b: f"{b.family}-{b.length}" if b.length > 600 else b.family
)
def test_answers_from_the_arena_are_right(bench: Bench) -> None:
    """Cold, warm, a branch; then each object group's bytes are flipped in turn, and each time the answer changes."""
    size = bench.chunk
    long = tokens("long", max(bench.length, 2 * size + 40))
    branch = long[: size + size // 2] + tokens("branch", 80)
    prompts = [long, tokens("at", 2 * size), tokens("above", 2 * size + 1)]
    world = World(size, list(bench.rules))
    with (
        Server(f"test-{os.getpid()}-{bench.family}", chunk_size=size, size_mb=128) as server,
        Engine(bench.family, connector=server.connector()) as engine,
    ):
        page = recipe_tables.tables().get(bench.family)
        assert page in (None, recipe_tables.rows(engine.info["groups"])), "docs/recipes differs"
        # Under salts of their own nothing is shared, so the branch, too, is computed.
        cold = engine.generate(prompts, max_tokens=NEW, salt="one", cold=True)
        cold += engine.generate([branch], max_tokens=NEW, salt="another", cold=True)
        assert [output.external for output in cold] == [0, 0, 0, 0]
        server.wait_idle()
        server.clear()
        first = engine.generate(prompts, max_tokens=NEW, cold=True)
        table = server.wait_idle()
        computed = [p + o.tokens[:-1] for p, o in zip(prompts, first, strict=True)]
        for sequence in computed:
            world.computed(sequence)
        assert sorted(len(table.rows(group)) for group in range(len(bench.rules))) == sorted(
            world.count()
        )

        warm = engine.generate([*prompts, branch], max_tokens=NEW, cold=True)

        assert [output.external for output in warm] == [world.hit(p) for p in [*prompts, branch]]
        assert max(a.difference(b) for a, b in zip(cold, warm, strict=True)) <= TOLERANCE
        computed.append(branch + warm[-1].tokens[:-1])
        server.wait_idle()
        for group in range(len(bench.rules)):
            rows = table.rows(group)
            ends = {row: page_bytes(table, row, size, computed) for row in rows}
            for row, end in ends.items():
                table.flip(row, end)
            (broken,) = engine.generate([long], max_tokens=NEW, cold=True)
            for row, end in ends.items():
                table.flip(row, end)
            assert broken.external == world.hit(long)
            assert not cold[0].difference(broken) <= 10 * TOLERANCE, f"object group {group}"
        server.wait_idle()
        assert server.check() == []
        assert engine.ask("free_blocks") == engine.info["num_blocks"] - 1


def page_bytes(table: Table, row: int, size: int, computed: list[list[int]]) -> int:
    """Where in a slot the pages end: in front of the token ids of a chunk of one of these sequences."""
    start = int(table.cold["chunk"][row]) * size
    payload = table.payload(row).tobytes()
    holders = [ids[start : start + size] for ids in computed if len(ids) >= start + size]
    end = max(payload.rfind(token_bytes(ids)) for ids in holders)
    assert end > 0
    return end
