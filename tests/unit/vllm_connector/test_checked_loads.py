"""Which copies of a worker carry a checksum: a slot that has none must not fail its load."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lmcache_shm.arena.layout import COLD_DTYPE
from lmcache_shm.client.jobs import Place
from lmcache_shm.vllm.worker import WorkerSide


@pytest.mark.parametrize(
    ("mode", "kind", "written", "checked"),
    [
        ("off", "store", 0, False),
        ("store", "store", 0, True),
        ("verify", "store", 0, True),
        ("off", "load", 5, False),
        ("store", "load", 5, False),
        ("verify", "load", 5, True),
        ("verify", "load", 0, False),  # committed under an earlier server, with checksums off
    ],
)
def test_a_load_is_checked_where_a_checksum_was_written(mode, kind, written, checked):
    cold = np.zeros(4, COLD_DTYPE)
    cold["checks"][3] = written
    layout = SimpleNamespace(place=(0,), part=({0: 0},))
    mount: Any = SimpleNamespace(arena=SimpleNamespace(cold=cold), layout=layout)
    side: Any = SimpleNamespace(rank=1, replicas=1)
    slot: Any = SimpleNamespace(
        row=3, offset=4096, generation=7, group=0, runs=[(0, 0, np.arange(2))]
    )
    item = WorkerSide._item(side, mount, slot, Place(0, [[0, 64]], [128], mode, 256), kind)
    assert item is not None
    assert item.checksum_at == (4096 + 128 + 8 if checked else -1)
