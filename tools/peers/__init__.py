"""Other caches, and ours, each in a process of its own that the comparisons drive; see tools/README.md."""
