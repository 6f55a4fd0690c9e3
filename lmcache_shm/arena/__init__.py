"""The arena and its slot table in POSIX shared memory. No sockets, no torch."""
