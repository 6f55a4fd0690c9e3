"""Random workloads against the real scheduler, connector, catalog and arena. The long run is soak.py."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.scheduler import workload
from tests.scheduler.families import FAMILIES
from tests.scheduler.late import Pace
from tests.scheduler.workload import Chances, Workload

SEEDS = 12
"""Per geometry."""


@pytest.mark.parametrize("family", FAMILIES)
def test_random_workloads_keep_every_promise(family: str, instance: str) -> None:
    """The engine lives, no copy touches a block that changed hands, what is served is what that prefix
    produced, what was stored is found, nothing is held at the end, and every request ends."""
    for seed in range(SEEDS):
        workload.run(workload.make(seed, family), f"{instance}-{seed}")


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Workloads whose parts hypothesis can shrink one by one."""
    drawn = workload.make(draw(st.integers(0, 1 << 20)), draw(st.sampled_from(list(FAMILIES))))
    small = st.sampled_from([0.0, 0.02, 0.1])
    return replace(
        drawn,
        setup=replace(drawn.setup, asynchronous=draw(st.booleans())),
        requests=draw(st.integers(1, 8)),
        lives=draw(st.integers(1, 2)),
        pace=Pace(
            draw(st.integers(0, 10)), draw(st.sampled_from([1.0, 0.3])), draw(small), draw(small)
        ),
        chances=Chances(
            draw(st.sampled_from([0.1, 0.5])), draw(small), draw(small), draw(small), draw(small),
            draw(small), draw(small),
        ),
    )  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(drawn=workloads())
def test_workloads_drawn_by_hypothesis_keep_every_promise(drawn: Workload, instance: str) -> None:
    """The same promises, with workloads that shrink."""
    workload.run(drawn, instance)
