"""A real engine whose MultiConnector has our connector as a child: as if there were nothing around it."""

import os
from pathlib import Path

from tests.e2e.lab import NEW, TOLERANCE
from tools.server_process import Server
from tools.tiny_models.process import Engine
from tools.tiny_models.prompts import tokens

FAMILY, CHUNK, LENGTH = "gemma3", 128, 700


def test_an_engine_with_multiconnector_shares_with_one_without(tmp_path: Path) -> None:
    """One namespace, worker facts included; it hits what the other has stored, and the scheduler's policy is set."""
    prompt = tokens("beside others", LENGTH)
    with Server(f"test-{os.getpid()}-multi", chunk_size=CHUNK, size_mb=128) as server:
        with Engine(FAMILY, connector=server.connector(), model=tmp_path) as plain:
            (computed,) = plain.generate([prompt], max_tokens=NEW)
        server.wait_idle()
        multi = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": [server.connector()]},
        }
        loud = {"VLLM_LOGGING_LEVEL": "INFO"}
        with Engine(FAMILY, connector=multi, model=tmp_path, env=loud) as engine:
            (served,) = engine.generate([prompt], max_tokens=NEW)
            said = engine.log.read_text(errors="replace")
        assert LENGTH // CHUNK * CHUNK == served.external
        assert computed.difference(served) <= TOLERANCE
        assert 1 == len(server.status()["namespaces"])
        assert "kv_load_failure_policy is recompute for all connectors of MultiConnector" in said
