"""Six models, real vLLM: what the arena gives is what the rules say, and the answers are those of an engine without it."""

import os

import pytest

from lmcache_shm.arena.layout import SlotState
from tests.e2e.lab import NEW, TOLERANCE, Lab
from tests.unit import recipe_tables
from tools.tiny_models.process import Output

BOUNDARY = ("below", "at", "above")
SECOND_ENGINE = {"gemma3", "qwen3_5"}
"""A window, and GDN beside full attention; the others with LONG_TESTS=1."""


def externals(outputs: list[Output]) -> list[int]:
    return [output.external for output in outputs]


def test_the_model_depends_on_its_cache(lab: Lab) -> None:
    """Another prefix under the same tail changes the output clearly: else equal outputs would prove nothing."""
    other = lab.baseline["other prefix"]

    assert lab.difference("long", other) > 1000 * TOLERANCE


def test_the_recipe_shows_the_groups_that_the_engine_has(lab: Lab) -> None:
    shown = recipe_tables.tables()[lab.bench.family]

    assert recipe_tables.rows(lab.engine.info["groups"]) == shown


def test_a_cold_run_equals_the_baseline_and_stores_every_whole_chunk(lab: Lab) -> None:
    """Lengths kC−1, kC, kC+1 and one of many chunks, prefilled in several steps: Σ⌊len/C⌋ chunks of each group."""
    names = [*BOUNDARY, "long"]

    outputs = lab.run(*names)

    assert externals(outputs) == [0, 0, 0, 0]
    lab.assert_right(names, outputs)
    size = lab.bench.chunk
    sums = sum(len(lab.computed(n, o)) // size for n, o in zip(names, outputs, strict=True))
    assert lab.world.count() == [sums] * len(lab.bench.rules)
    assert lab.stored(lab.settle()) == lab.world.count()


def test_after_a_reset_hits_are_what_the_rules_predict(lab: Lab) -> None:
    """Also at kC−1, kC and kC+1, where one token more or less decides about a chunk."""
    names = [*BOUNDARY, "long"]
    lab.run(*names)
    lab.settle()
    predicted = [lab.world.hit(lab.prompts[name]) for name in names]

    outputs = lab.run(*names)

    size = lab.bench.chunk
    whole = len(lab.prompts["at"]) // size
    assert predicted[:3] == [(whole - 1) * size, (whole - 1) * size, whole * size]
    assert predicted[3] == len(lab.prompts["long"]) // size * size
    assert externals(outputs) == predicted
    assert [output.local for output in outputs] == [0, 0, 0, 0]
    lab.assert_right(names, outputs)


def test_nothing_is_stored_twice(lab: Lab) -> None:
    lab.run("long")
    before = lab.stored(lab.settle())

    lab.run("long")

    assert lab.stored(lab.settle()) == before


def test_a_branch_hits_up_to_the_last_common_chunk(lab: Lab) -> None:
    """Two prompts part in the middle of a chunk."""
    lab.run("long")
    lab.settle()

    outputs = lab.run("branch of long")

    assert externals(outputs) == [2 * lab.bench.chunk]
    lab.assert_right(["branch of long"], outputs)


def test_a_local_hit_in_the_middle_of_a_chunk_is_carried_on(lab: Lab) -> None:
    """vLLM holds two chunks and a half, the arena many: only what vLLM lacks is loaded."""
    lab.run("long")
    lab.settle()
    lab.run("start of long")

    (output,) = lab.run("long")

    assert output.local % lab.bench.chunk != 0
    assert output.local > 2 * lab.bench.chunk
    assert output.external == lab.world.hit(lab.prompts["long"], output.local)
    assert (
        output.local + output.external
        == len(lab.prompts["long"]) // lab.bench.chunk * lab.bench.chunk
    )
    lab.assert_right(["long"], [output])


def test_requests_that_run_together_get_the_same(lab: Lab) -> None:
    """Four prompts with a common start, all at once: cold, and then from the arena."""
    names = [f"batch {i}" for i in range(4)]
    cold = lab.run(*names, together=True)
    lab.assert_right(names, cold)
    lab.settle()
    predicted = [lab.world.hit(lab.prompts[name]) for name in names]

    warm = lab.run(*names, together=True)

    lab.assert_right(names, warm)
    assert [o.local + o.external for o in warm] == predicted
    assert sum(externals(warm)) >= predicted[0] > 0


def test_a_connector_that_never_loads_changes_nothing(lab: Lab) -> None:
    """It stores as always, and answers "nothing" to every lookup."""
    lab.run("long")
    lab.settle()
    lab.engine.ask("python", code=NEVER_LOADS)
    try:
        outputs = lab.run("long", *BOUNDARY)
    finally:
        lab.engine.ask("python", code=LOADS_AGAIN)

    assert externals(outputs) == [0, 0, 0, 0]
    lab.assert_right(["long", *BOUNDARY], outputs)


def test_flipped_bytes_in_a_slot_change_the_output(lab: Lab) -> None:
    """Each group's slots in turn: so the bytes of every group are really loaded and used. Flipped back, all is well."""
    lab.run("long")
    lab.settle()
    for group in lab.groups():
        table = lab.server.table()
        rows = table.rows(group)
        ends = [lab.page_bytes(table, row, "long") for row in rows]
        for row, end in zip(rows, ends, strict=True):
            table.flip(row, end)

        (broken,) = lab.engine.generate([lab.prompts["long"]], max_tokens=NEW, cold=True)

        for row, end in zip(rows, ends, strict=True):
            table.flip(row, end)
        assert broken.external == lab.world.hit(lab.prompts["long"])
        assert not lab.difference("long", broken) <= 10 * TOLERANCE, f"group {group}"
        outputs = lab.run("long", cold=True)
        assert externals(outputs) == [broken.external]
        lab.assert_right(["long"], outputs)
        lab.settle()


def test_a_slot_that_changes_hands_during_the_copy_is_recomputed(lab: Lab) -> None:
    """Between the first check and the copy somebody else takes a slot and writes into it: right answer all the same."""
    lab.run("long")
    lab.settle()
    lab.engine.ask("python", code=CHANGES_HANDS, meta=str(lab.server.meta))
    try:
        outputs = lab.run("long")
    finally:
        taken = lab.engine.ask("python", code=GIVEN_BACK)

    assert taken
    lab.assert_right(["long"], outputs)
    lab.settle()
    again = lab.run("long")
    assert externals(again) == [lab.world.hit(lab.prompts["long"])]
    lab.assert_right(["long"], again)


def test_a_lost_slot_of_one_group_gives_a_shorter_hit(lab: Lab) -> None:
    """The server is killed, one group's last slot is lost, and the restarted server finds the rest."""
    size = lab.bench.chunk
    lab.run("long")
    lab.settle()
    prompt = lab.prompts["long"]
    last = lab.world.hit(prompt) // size
    for rule, group in enumerate(lab.groups()):
        table = lab.server.table()
        row = next(r for r in table.rows(group) if table.cold["chunk"][r] == last - 1)
        with lab.server_down():
            table.hot["state"][row] = SlotState.FREE
        lab.world.stored[rule].discard(tuple(prompt[: last * size]))
        predicted = lab.world.hit(prompt)
        assert predicted < last * size

        outputs = lab.run("long", cold=True)

        assert externals(outputs) == [predicted]
        lab.assert_right(["long"], outputs)
        lab.settle()


def test_a_second_engine_hits_whatever_its_hash_seed(lab: Lab) -> None:
    """Another process, another PYTHONHASHSEED: it finds all that the first one stored."""
    if lab.bench.family not in SECOND_ENGINE and "LONG_TESTS" not in os.environ:
        pytest.skip("LONG_TESTS=1 runs it")
    names = [*BOUNDARY, "long"]
    lab.run(*names)
    lab.settle()
    predicted = [lab.world.hit(lab.prompts[name]) for name in names]
    stored = lab.world.count()

    with lab.new_engine("2") as second:
        outputs = lab.run(*names, engine=second)
        lab.server.wait_idle()

    assert externals(outputs) == predicted
    assert sum(predicted) > 0
    lab.assert_right(names, outputs)
    assert lab.stored(lab.server.table()) == stored


NEVER_LOADS = """
connector = scheduler.connector
connector.get_num_new_matched_tokens = lambda request, num_computed_tokens: (0, False)
"""
LOADS_AGAIN = "del scheduler.connector.get_num_new_matched_tokens"
CHANGES_HANDS = """
from tests.e2e.changes_hands import Takeover
runner.takeover = Takeover(meta)
"""
GIVEN_BACK = "result = runner.takeover.give_back()"
