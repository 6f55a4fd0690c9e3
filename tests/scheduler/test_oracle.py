"""The harness itself: vLLM alone passes it, and it sees what it is there to see."""

import random

import pytest

from tests.scheduler import workload
from tests.scheduler.content import VOCAB
from tests.scheduler.engine import Engine
from tests.scheduler.families import FAMILIES, Setup
from tests.scheduler.oracle import Violation


def engine(family: str, seed: int = 1, **setup: object) -> Engine:
    kind = FAMILIES[family]
    given = {"room": 1.5, "max_len": 256, **setup}
    return Engine(Setup(kind, kind.chunks[0], kind.steps[0], **given), random.Random(seed))  # type: ignore[arg-type]


def traffic(one: Engine, requests: int = 8) -> None:
    """Requests that share beginnings, with short and long answers; some are aborted."""
    rng = one.rng
    bases = [[rng.randrange(VOCAB) for _ in range(150)] for _ in range(2)]

    def between() -> None:
        if len(one.asked) < requests and rng.random() < 0.4:
            end = [rng.randrange(VOCAB) for _ in range(rng.randrange(20))]
            one.add([*rng.choice(bases)[: rng.randrange(1, 150)], *end], rng.randrange(1, 60))
        if rng.random() < 0.01 and one.unfinished():
            one.abort(rng.choice(one.unfinished()))

    one.add(bases[0], 10)
    one.run(between)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("drafts", [0, 2])
def test_without_a_connector_the_engine_keeps_every_promise(
    family: str, asynchronous: bool, drafts: int
) -> None:
    """The simulated worker follows vLLM's rules: no false alarm, in any geometry and mode."""
    if drafts and not FAMILIES[family].drafts:
        pytest.skip("vLLM does not speculate with this kind of model here")
    one = engine(family, asynchronous=asynchronous, drafts=drafts)
    traffic(one)

    one.oracle.all_free()
    assert one.workers.tokens_checked > 200


@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_with_other_content_is_noticed(family: str) -> None:
    """One block in use is overwritten: the next step that reads it fails."""
    one = engine(family)
    one.add([n % VOCAB for n in range(70)], 20)
    for _ in range(8):
        one.turn()
    group = next(g for g in one.workers.ranks[0].groups if not g.ring)
    block = [b for b in one.workers.requests["r0"].tables[group.index] if b][-1]
    one.workers.ranks[0].poison([block])

    with pytest.raises(Violation, match="read"):
        one.run()


@pytest.mark.parametrize("family", ["full", "windows", "gdn"])
def test_a_block_that_two_requests_own_is_noticed(family: str) -> None:
    """The pool hands out what somebody still has: contents, or the owner's generation, tell."""
    one = engine(family, room=4.0)
    one.add([n % VOCAB for n in range(100)], 30)
    for _ in range(9):
        one.turn()
    group = next(g for g in one.workers.ranks[0].groups if not g.ring)
    used = [b for b in one.workers.requests["r0"].tables[group.index] if b][-1]
    before = one.oracle.generation[used]
    one.oracle.pool.blocks[used].ref_cnt = 0
    one.oracle.pool.free_block_queue.prepend_n([one.oracle.pool.blocks[used]])
    one.add([1 + n % VOCAB for n in range(60)], 5)

    with pytest.raises(AssertionError):
        one.run()
    assert one.oracle.generation[used] > before


def test_the_same_seed_makes_the_same_run(instance: str) -> None:
    """A failure can be repeated by its number."""
    first, second = (workload.run(workload.make(77), instance) for _ in range(2))
    assert first == second


def test_workloads_reach_what_they_are_meant_to_reach(instance: str) -> None:
    """Taken together they preempt, abort, evict, reset, load, fail to load, and check that all was stored."""
    outcomes = [workload.run(workload.make(seed), f"{instance}-{seed}") for seed in range(40)]
    for what in ("resumed", "aborted", "loads", "failed_loads", "evictions", "resets", "chunks"):
        assert sum(getattr(o, what) for o in outcomes) > 0, what
