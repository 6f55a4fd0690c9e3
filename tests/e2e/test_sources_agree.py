"""The server's metrics, the engine's metrics and the engine's log line tell the same story."""

import re
import socket
import urllib.request
from pathlib import Path

import pytest

from tools.server_process import Server
from tools.tiny_models.process import Engine
from tools.tiny_models.prompts import tokens

PROMPT = tokens("agree", 700)
# Counters of this engine as its Prometheus endpoint would give them, and its log line for the interval.
METRICS = """
llm.llm_engine.do_log_stats()
result = {}
for metric in llm.get_metrics():
    if metric.name.startswith(("vllm:external_prefix_cache", "vllm:lmcache_shm")) and hasattr(metric, "value"):
        result[metric.name] = result.get(metric.name, 0) + metric.value
"""


def test_server_engine_and_log_agree(instance: str, tmp_path: Path) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    with (
        Server(instance, size_mb=256, flags=("--metrics-port", str(port))) as server,
        Engine(
            "llama", connector=server.connector(), engine={"disable_log_stats": False},
            env={"VLLM_LOGGING_LEVEL": "INFO"}, folder=tmp_path,
        ) as engine,
    ):  # fmt: skip
        engine.generate([PROMPT])
        server.wait_idle()
        assert engine.reset()
        (warm,) = engine.generate([PROMPT])
        server.wait_idle()
        told = engine.ask("python", code=METRICS)
        log = engine.log.read_text(errors="replace")
        status = server.status()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
            text = reply.read().decode()
    scraped = {
        name: float(value)
        for name, _, value in (line.rpartition(" ") for line in text.splitlines() if line[0] != "#")
    }

    hit = warm.external
    assert hit > 0
    assert status["counters"]["hit_tokens"] == hit
    assert scraped["lmcache_shm_hit_tokens_total"] == hit
    assert told["vllm:external_prefix_cache_hits"] == hit
    assert told["vllm:lmcache_shm_hit_tokens"] == hit
    # The same bytes, seen from both ends: slots are rounded up to pages and hold more than pages of KV.
    assert 0 < told["vllm:lmcache_shm_loaded_bytes"] <= scraped["lmcache_shm_loaded_bytes_total"]
    assert 0 < told["vllm:lmcache_shm_stored_bytes"] <= scraped["lmcache_shm_stored_bytes_total"]
    rates = re.findall(r"External prefix cache hit rate: ([\d.]+)%", log)
    assert rates, log[-2000:]
    asked = told["vllm:external_prefix_cache_queries"]
    assert float(rates[-1]) == pytest.approx(100 * hit / asked, abs=0.06)
