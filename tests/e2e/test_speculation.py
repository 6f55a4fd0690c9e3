"""Speculative decoding (ngram): what is stored is what a run without it stores, and it is found; drafts leave no trace."""

import os

import numpy as np
import pytest

from tests.e2e.lab import FULL, LONG, NEW, SLIDING, Bench
from tests.e2e.predict import World
from tests.e2e.test_more_families import page_bytes
from tools.server_process import Server
from tools.tiny_models.process import Engine, Output
from tools.tiny_models.prompts import tokens

NGRAM = {
    "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3,
}  # fmt: skip
BENCHES = [
    pytest.param(Bench("llama", 64, (FULL,)), marks=LONG),
    Bench("gemma3", 64, (FULL, SLIDING)),
]
ANSWER = (
    150  # tokens: more than two chunks are generated, and each of them in steps that carry drafts
)
TOLERANCE = 1e-3  # of a value in the KV cache: a token alone or among drafts differs by rounding
COUNTERS = """
result = {m.name: m.value for m in llm.get_metrics() if "spec_decode_num" in m.name and hasattr(m, "value")}
"""


def pages(
    server: Server, bench: Bench, computed: list[list[int]]
) -> dict[tuple[int, bytes], np.ndarray]:
    """(object group, key) → the KV values of each stored chunk."""
    table = server.wait_idle()
    found = {}
    for group in range(len(bench.rules)):
        for row in table.rows(group):
            end = page_bytes(table, row, bench.chunk, computed) // 4 * 4
            key = group, table.cold["key"][row].tobytes()
            # Behind the pages there may be a few bytes of checksums, always in the same place.
            found[key] = table.payload(row)[: end - 64].copy().view(np.float32)
    return found


def sequences(prompts: list[list[int]], outputs: list[Output]) -> list[list[int]]:
    """The tokens whose KV was computed."""
    return [prompt + output.tokens[:-1] for prompt, output in zip(prompts, outputs, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("bench", BENCHES, ids=lambda bench: bench.family)
def test_no_draft_is_stored_and_everything_else_is_found(bench: Bench) -> None:
    """Keys and KV of every chunk equal those of a run without speculation, also of the generated part."""
    motif = tokens("motif", 40)
    prompts = [motif * 4 + motif[:7], tokens("no motif", 150)]
    with Server(f"test-{os.getpid()}-drafts-{bench.family}", chunk_size=bench.chunk) as server:
        with Engine(bench.family, connector=server.connector()) as plain:
            expected = plain.generate(prompts, max_tokens=ANSWER, cold=True, together=True)
            computed = sequences(prompts, expected)
            # The next turn of a conversation: all that was said, and something new.
            turns = [p + o.tokens + motif[:9] for p, o in zip(prompts, expected, strict=True)]
            wanted = pages(server, bench, computed)
            following = plain.generate(turns, max_tokens=NEW, cold=True, salt="apart")
        world = World(bench.chunk, list(bench.rules))
        for sequence in computed:
            world.computed(sequence)
        assert len(wanted) == sum(world.count())
        server.clear()

        speculating = {"speculative_config": NGRAM, "disable_log_stats": False}
        with Engine(bench.family, connector=server.connector(), engine=speculating) as drafting:
            outputs = drafting.generate(prompts, max_tokens=ANSWER, cold=True, together=True)
            told = drafting.ask("python", code=COUNTERS)
            stored = pages(server, bench, computed)
            warm = drafting.generate(turns, max_tokens=NEW, cold=True)

        drafts = told["vllm:spec_decode_num_draft_tokens"]
        accepted = told["vllm:spec_decode_num_accepted_tokens"]
        assert drafts - accepted > ANSWER // 2, (
            told
        )  # rejected: their KV was computed and must not be here
        assert [output.tokens for output in outputs] == [output.tokens for output in expected]
        assert stored.keys() == wanted.keys()
        assert max(distance(stored[key], wanted[key]) for key in wanted) < TOLERANCE
        # A wrong token somewhere would show: chunks of other tokens are far apart.
        ours = [values for (group, _), values in wanted.items() if group == 0]
        assert distance(ours[0], ours[-1]) > 100 * TOLERANCE
        assert [output.external for output in warm] == [world.hit(turn) for turn in turns]
        assert [a.tokens for a in warm] == [b.tokens for b in following]
        assert len(server.status()["namespaces"]) == 1
        assert server.check() == []


def distance(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one - other).max())
