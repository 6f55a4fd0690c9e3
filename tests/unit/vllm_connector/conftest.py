"""Leases are given back in the next step here, unless a test says otherwise: one that is put off is a test of its own."""

import pytest

from lmcache_shm.client import in_flight


@pytest.fixture(autouse=True)
def nothing_is_deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight, "RELEASE_S", 0.0)
