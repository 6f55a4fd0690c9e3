"""Benches for engineers: all that `lmcache-shm bench` measures, and more."""
