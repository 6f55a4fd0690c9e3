"""Leases are given back in the next step here, unless a test says otherwise: one that is put off is a test of its own."""

import pytest

from lmcache_shm.client import in_flight as book


@pytest.fixture(autouse=True)
def nothing_is_put_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book, "RELEASE_S", 0.0)
