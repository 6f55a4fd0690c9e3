"""The harness is worth something only if it fails when our code is wrong: each mutation must be caught."""

import itertools
import random
from dataclasses import replace

import pytest

from tests.scheduler import workload
from tests.scheduler.late import Pace
from tests.scheduler.mutations import MUTATIONS, broken
from tests.scheduler.oracle import Violation
from tests.scheduler.workload import Chances, Workload

ATTEMPTS = 120
"""Random workloads until a mutation has to have been noticed."""


def draw(seed: int, name: str) -> Workload:
    """A workload of a geometry in which the mutation can show, with enough going on."""
    mutation = MUTATIONS[name]
    drawn = workload.make(seed, mutation.families[seed % len(mutation.families)])
    rng = random.Random(f"{name} {seed}")
    chances = Chances(0.2, 0.01, 0.03, 0.3 if mutation.steal else 0.0, 0.02, 0.0)
    pace = Pace(8, 0.5, rng.choice([0, 0.3]), rng.choice([0, 0.3]))
    setup = drawn.setup
    if mutation.resets:
        chances = replace(chances, reset=0.1, pause=0.03)
        setup = replace(setup, asynchronous=seed % 3 > 0)
    if mutation.calm:
        chances, pace = Chances(0.2, 0.01, 0, 0, 0, 0), Pace(8, 0.5)
    if mutation.drafts:
        setup = replace(setup, asynchronous=False, drafts=rng.choice([1, 3]))
    return replace(
        drawn,
        setup=setup,
        arena_bytes=2 * workload.MIB,
        requests=10,
        lives=2,
        pace=pace,
        chances=chances,
        salts=(None, "a"),
        adapters=(None,),
        bases=drawn.bases[:2],
    )


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_of_our_code_is_caught(name: str, instance: str) -> None:
    """Within some random workloads the oracle says what went wrong, in one of the ways that fit."""
    caught = ""
    with broken(name):
        for seed in itertools.islice(itertools.count(), ATTEMPTS):
            try:
                workload.run(draw(seed, name), f"{instance}-{seed}")
            except Violation as violation:
                caught = violation.kind
                break
    assert caught in MUTATIONS[name].caught_as, f"{name}: {caught or 'not caught'}"


@pytest.mark.parametrize("name", MUTATIONS)
def test_without_the_mutation_the_same_workloads_pass(name: str, instance: str) -> None:
    """The negative control of the negative control."""
    for seed in range(3):
        workload.run(draw(seed, name), f"{instance}-{seed}")
