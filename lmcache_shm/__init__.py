"""lmcache_shm: a KV cache for vLLM in host shared memory."""

__version__ = "0.1.0"
