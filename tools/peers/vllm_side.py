"""One vLLM CPU engine with one connector (or none), in this process; dummy weights, 128 KiB of KV a token.

`connector`: none, ours, simple (SimpleCPUOffloadConnector), offloading (OffloadingConnector), or
engine_driven / lmcache_driven (LMCache's connector in its two modes; needs its venv).
"""

import json
import os
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_DISABLE_BANNER": "1",
}
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from tools.peers.side import serve

HERE = Path(__file__).parent
GIB = 1 << 30
CACHE_GIB = 3


def tolerate_foreign_modules() -> None:
    """vLLM's CPU build looks into vars() of every module; llvmlite's (numba is LMCache's) has none."""
    import builtins
    import types

    from vllm.triton_utils import dispatcher

    def safe_vars(value: Any) -> Any:
        found = builtins.vars(value)
        return found if isinstance(found, dict | types.MappingProxyType) else {}

    dispatcher.vars = safe_vars


class Subject:
    """The operations that tools/compare_vllm_offload.py asks for."""

    def __init__(self, connector: str, threads: int = 0) -> None:
        if threads:
            os.environ["OMP_NUM_THREADS"] = str(threads)
        else:
            os.environ.pop("OMP_NUM_THREADS", None)
        self.server: Any = None
        self.folder = Path(tempfile.mkdtemp(prefix="compare-vllm-"))
        config = json.loads((HERE / "llama_kv128k.json").read_text())
        (self.folder / "config.json").write_text(json.dumps(config))
        extra: dict[str, Any] = {}
        transfer = self._connector(connector)
        if transfer:
            extra["kv_transfer_config"] = transfer
        started = time.perf_counter()
        from vllm import LLM

        self.llm = LLM(
            model=str(self.folder), load_format="dummy", skip_tokenizer_init=True, enforce_eager=True,
            max_model_len=8192, max_num_batched_tokens=2048, max_num_seqs=32, seed=0,
            enable_prefix_caching=True, kv_cache_memory_bytes=2 * GIB, disable_log_stats=True, **extra,
        )  # fmt: skip
        self.engine = self.llm.llm_engine
        self.requests = 0
        self.info = {"connector": connector, "load_s": round(time.perf_counter() - started, 1)}

    def _connector(self, name: str) -> dict[str, Any]:
        if name == "none":
            return {}
        if name == "ours":
            from tools.server_process import Server

            os.environ["LMCACHE_SHM_RUNTIME_DIR"] = str(self.folder)
            self.server = Server("compare-vllm", size_mb=CACHE_GIB * 1024)
            return dict(self.server.connector())
        if name in {"simple", "offloading"}:
            from tools.peers import offload_on_cpu

            getattr(offload_on_cpu, name)()
            kind = {"simple": "SimpleCPUOffloadConnector", "offloading": "OffloadingConnector"}[
                name
            ]
            return {
                "kv_connector": kind,
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"cpu_bytes_to_use": CACHE_GIB * GIB},
            }
        from tools.peers.lmcache_side import LMCacheServer

        tolerate_foreign_modules()
        self.server = LMCacheServer(name, CACHE_GIB, 256)
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://localhost",
                "lmcache.mp.port": self.server.port,
                "lmcache.mp.mp_transfer_mode": name,
            },
        }

    def _run(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        """Greedy answers of all prompts together; seconds to the first token and to the end."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        params = SamplingParams(max_tokens=tokens, temperature=0, detokenize=False, ignore_eos=True)
        began, first = time.perf_counter(), 0.0
        for prompt in prompts:
            self.requests += 1
            self.engine.add_request(
                str(self.requests), TokensPrompt(prompt_token_ids=prompt), params
            )
        answers: dict[str, list[int]] = {}
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                first = first or time.perf_counter() - began
                answers[output.request_id] = list(output.outputs[0].token_ids)
        seconds = time.perf_counter() - began
        return {"first_s": first, "seconds": seconds, "tokens": sorted(answers.items())}

    def _reset(self) -> None:
        """Empty vLLM's own prefix cache, once every store is done (some connectors need steps for that)."""
        end = time.monotonic() + 30
        while not self.llm.reset_prefix_cache():
            if time.monotonic() > end:
                raise RuntimeError("the prefix cache cannot be reset")
            self.engine.step()
            time.sleep(0.01)

    def prompt(self, tokens: int, seed: int, *, external: bool) -> dict[str, Any]:
        """One prompt of `tokens`: cold, after a reset of vLLM's own cache (`external`), and a local hit."""
        numbers = random.Random(seed)
        prompt = [numbers.randrange(3, 1000) for _ in range(tokens)]
        runs = {"cold": self._run([prompt], 8)}
        if external:
            self._reset()
            runs["hit"] = self._run([prompt], 8)
        for _ in range(3):
            self.engine.step()
        runs["local"] = self._run([prompt], 8)
        alike = (
            len({json.dumps([answer for _, answer in run["tokens"]]) for run in runs.values()}) == 1
        )
        self._reset()
        times = {
            f"{name}_{what}": run[what]
            for name, run in runs.items()
            for what in ("first_s", "seconds")
        }
        return times | {"alike": alike}

    def throughput(self, seed: int, prompts: int, tokens: int, outputs: int) -> dict[str, Any]:
        """Output tokens a second of prompts that nobody has seen."""
        numbers = random.Random(seed)
        batch = [[numbers.randrange(3, 1000) for _ in range(tokens)] for _ in range(prompts)]
        run = self._run(batch, outputs)
        self._reset()
        return {"tokens_per_s": prompts * outputs / run["seconds"]}

    def close(self) -> None:
        self.engine.engine_core.shutdown()
        if self.server is not None:
            (self.server.stop if hasattr(self.server, "stop") else self.server.close)()
        shutil.rmtree(self.folder, ignore_errors=True)
        os._exit(0)  # some of the threads here do not end by themselves


if __name__ == "__main__":
    serve(Subject, Subject.close)
