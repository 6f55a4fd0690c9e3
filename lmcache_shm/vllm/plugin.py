"""The entry point that makes vLLM know the connector by name, in every one of its processes."""

from lmcache_shm.client.fingerprint import note_start

NAME = "LMCacheShmConnector"


def register() -> None:
    """Register the name (idempotent): vLLM calls this in each process, before it loads a model."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415  (only inside vLLM)

    note_start()
    if NAME not in KVConnectorFactory._registry:  # noqa: SLF001  (there is no other way to ask)
        KVConnectorFactory.register_connector(NAME, "lmcache_shm.vllm.connector", NAME)
