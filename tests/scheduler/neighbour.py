"""Another connector beside ours under MultiConnector: like NixlConnector it has handshake metadata of its own."""

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.request import RequestStatus


@dataclass
class Address(KVConnectorHandshakeMetadata):
    """Where a rank could be reached."""

    rank: int


@dataclass
class Errands(KVConnectorMetadata):
    """What a worker has to report after this step."""

    sent: set[str]
    received: set[str]


class Neighbour(KVConnectorBase_V1, SupportsHMA):
    """Accepts no handshake but its own; keeps the blocks of a request that came to its end for another step, as a
    producer does that is sending them; may say that it has a prefix, which never arrives before `deliver`."""

    offers = 0
    """Tokens that it has for each request."""
    deliver = False

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.met: dict[Any, Any] = {}
        self._sending: set[str] = set()
        self._loading: set[str] = set()

    # ------------------------------------------------------------------ scheduler side
    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        strangers = [type(m).__name__ for m in metadata.values() if not isinstance(m, Address)]
        if strangers:
            raise ValueError(f"Neighbour expects Address, not {strangers}")
        self.met = dict(metadata)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        more = self.offers - num_computed_tokens
        return (more, True) if more > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._loading.add(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        sent, self._sending = self._sending, set()
        received: set[str] = set()
        if self.deliver:
            received, self._loading = self._loading, set()
        return Errands(sent, received)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        if request.status != RequestStatus.FINISHED_LENGTH_CAPPED:
            return False, None
        self._sending.add(request.request_id)
        return True, {"neighbour": request.request_id}

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids)

    # ------------------------------------------------------------------ worker side
    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return Address(0)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        errands = self._get_connector_metadata()
        assert isinstance(errands, Errands)
        return KVConnectorTransferResults(
            finished_sending=set(errands.sent), finished_recving=set(errands.received)
        )
