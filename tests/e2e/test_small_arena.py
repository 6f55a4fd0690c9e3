"""An arena that holds a fraction of what is computed: it evicts, and every answer is right."""

import os
from collections.abc import Iterator

import pytest

from tests.e2e.lab import TOLERANCE
from tools.server_process import Server
from tools.tiny_models.process import Engine, Output
from tools.tiny_models.prompts import tokens

CHUNK = 128
# Wide KV heads, so that a prompt's slots are a good part of the smallest arena: 4 MiB for 128 tokens.
WIDE = {
    "hf_overrides": {"num_key_value_heads": 4, "head_dim": 256},
    "kv_cache_memory_bytes": 512 << 20,
}
LENGTHS = [700, 900, 650, 1100, 800]
PROMPTS = [tokens(f"small arena {i}", length) for i, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def small() -> Iterator[tuple[Server, Engine]]:
    with (
        Server(f"test-{os.getpid()}-small", chunk_size=CHUNK, size_mb=64) as server,
        Engine("gemma3", engine=WIDE, connector=server.connector()) as engine,
    ):
        yield server, engine


def differences(first: list[Output], second: list[Output]) -> list[float]:
    return [one.difference(other) for one, other in zip(first, second, strict=True)]


def with_local_hits(cases: list[tuple[int, int]]) -> list[Output]:
    """What an engine without a connector answers to prompt i when so many of its tokens are in vLLM's own cache.

    This wide model rounds so much that it matters at which token the rest of a prompt is begun (2e-4 for 384
    of 1,100 tokens), so a cold run is no measure of what a hit should give.
    """
    outputs = []
    with Engine("gemma3", engine=WIDE) as plain:
        for i, tokens_held in cases:
            plain.generate([PROMPTS[i][: tokens_held + 1]], cold=True)
            (output,) = plain.generate([PROMPTS[i]])
            assert output.local == tokens_held
            outputs.append(output)
    return outputs


def test_an_arena_too_small_for_everything_gives_right_answers_while_it_evicts(
    small: tuple[Server, Engine],
) -> None:
    """Rounds, back and forth, over prompts that need more than the arena; nothing loaded is ever wrong."""
    server, engine = small
    cold = engine.generate(PROMPTS, cold=True)
    assert [output.external + output.local for output in cold] == [0] * len(PROMPTS)
    found: list[tuple[int, Output]] = []
    forth = list(range(len(PROMPTS)))
    for order in (forth[::-1], forth, forth[:-3:-1]):  # the last: hits that were there before
        found += zip(order, engine.generate([PROMPTS[i] for i in order], cold=True), strict=True)

    table = server.wait_idle()
    status = server.status()
    size = status["arena"]["data_bytes"]
    assert status["counters"]["bytes_committed"] > 2 * size
    assert status["counters"]["evictions"] > 0
    hits = {(i, output.external): output for i, output in found if output.external}
    assert len(hits) > 2  # the latest prompts are still there
    for i, output in found:
        if not output.external:
            assert cold[i].difference(output) <= TOLERANCE
    right = with_local_hits(list(hits))
    assert max(differences(right, list(hits.values()))) <= TOLERANCE
    # The same hit again gives the same answer.
    assert all(
        hits[i, output.external].difference(output) <= TOLERANCE
        for i, output in found
        if output.external
    )
    assert int(table.cold["slot_bytes"][table.rows()].sum()) <= size
    assert server.check() == []
    assert engine.ask("free_blocks") == engine.info["num_blocks"] - 1


def test_newest_wins(small: tuple[Server, Engine]) -> None:
    """What was computed last is found, however full the arena was before."""
    server, engine = small
    newest = [tokens("newest", 600)]
    cold = engine.generate(newest, cold=True)
    server.wait_idle()

    (again,) = engine.generate(newest, cold=True)

    assert again.external == 600 // CHUNK * CHUNK
    assert differences(cold, [again])[0] <= TOLERANCE
    server.wait_idle()
