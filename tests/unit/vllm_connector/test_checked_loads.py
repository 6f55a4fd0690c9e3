"""Which copies of a worker carry a checksum: a slot that has none must not fail its load."""

import numpy as np
import pytest

from lmcache_shm.arena.job import CopyJob, Pages
from lmcache_shm.arena.layout import COLD_DTYPE
from lmcache_shm.client.jobs import Place


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
    checks = np.zeros(4, COLD_DTYPE)["checks"]
    checks[3] = written
    job = CopyJob.of(1, kind, b"", [3], [4096], [7], [0], [[Pages(0, 0, [0, 1])]])
    place = Place(0, [[0, 64]], [128], mode, 256)

    regions, checksums = place.on_rank(job, 1, 1, checks)

    assert regions.tolist() == [4096 + 64]
    found = [-1] if checksums is None else checksums.tolist()
    assert found == [4096 + 128 + 8 if checked else -1]
