"""The connector for vLLM. Names are looked up late: the package itself imports neither vLLM nor torch.

``LMCacheMPConnector`` is the same class, for people who follow LMCache's documentation.
"""

from typing import Any

__all__ = ["LMCacheMPConnector", "LMCacheShmConnector"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from lmcache_shm.vllm.connector import LMCacheShmConnector  # noqa: PLC0415

        return LMCacheShmConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
