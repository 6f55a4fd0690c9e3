"""A server killed at any moment leaves a table that the next one can use as it is."""

import os
import random
import subprocess
import sys
import textwrap
import time

import pytest

from lmcache_shm.arena import segment
from lmcache_shm.server.catalog.catalog import Catalog
from tests.unit.server import rig
from tests.unit.server.rig import SLAB

CHURN = """
    import random, sys
    sys.path[:0] = {path!r}
    from lmcache_shm.arena import segment
    from lmcache_shm.server.catalog.catalog import Catalog
    from tests.unit.server.rig import *
    from tests.unit.server.test_catalog_stateful import MODELS

    arena = segment.adopt({name!r}, segment.Geometry(*{geometry!r}))
    catalog = Catalog(arena)
    catalog.recover()
    rng = random.Random({seed})
    spaces = [catalog.register(b"%d" % i, groups) for i, groups in enumerate(MODELS)]
    print("ready", flush=True)
    while True:
        space = rng.choice(spaces)
        prefix = Prefix(space, rng.choice("abcdefgh"), 7)
        group = rng.randrange(len(space.groups))
        rows = [r for r in reserve(catalog, space, prefix, range(7), group) if r >= 0]
        hit = catalog.acquire(space.id, prefix.keys, 0, 999)
        (catalog.commit if rng.random() < 0.8 else catalog.abort)(rows)
        for pinned in hit.rows:
            catalog.release(pinned)
        if rng.random() < 0.05:
            catalog.clear(rng.choice([None, space.id]))
        if rng.random() < 0.01:
            catalog.register(b"new %d" % rng.randrange(10**9), MODELS[0])
"""


@pytest.mark.parametrize("seed", range(3))
def test_killed_in_the_middle_of_anything(seed):
    with rig.arena_of(20 * SLAB) as arena:
        name, g = arena.instance, arena.geometry
        geometry = (g.data_bytes, g.chunk_size, g.separate, g.slab_bytes, g.max_slots)
        arena.close()
        for attempt in range(3):
            program = textwrap.dedent(CHURN).format(
                path=sys.path, name=name, geometry=geometry, seed=seed * 100 + attempt
            )
            child = subprocess.Popen(
                [sys.executable, "-c", program], stdout=subprocess.PIPE, env=dict(os.environ)
            )
            assert child.stdout.readline() == b"ready\n"
            time.sleep(random.Random(seed * 7 + attempt).uniform(0.002, 0.1))  # any moment will do
            child.kill()
            child.communicate()

            adopted = segment.adopt(name, g)
            catalog = Catalog(adopted)
            found = catalog.recover()
            findings = catalog.check()
            adopted.close()

            assert found["damaged"] == 0
            assert findings == []
        segment.adopt(name, g).unlink()
