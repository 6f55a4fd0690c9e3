"""``python -m lmcache_shm`` is the console script."""

from lmcache_shm.cli.app import main

main()
