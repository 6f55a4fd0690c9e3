"""A real engine whose LoRA adapter's files change under it: what it answers is what it computes with."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from lmcache_shm.vllm.adapters import SETTLED_S
from tests.e2e.lab import LONG
from tools.server_process import Server
from tools.tiny_models.process import Engine
from tools.tiny_models.prompts import tokens

MAKE = """
import json, torch
from pathlib import Path
from safetensors.torch import save_file
path = Path(path)
path.mkdir(exist_ok=True)
generator = torch.Generator().manual_seed(seed)
weights = {}
for layer in range(3):
    for proj, out in (("q_proj", 128), ("k_proj", 64), ("v_proj", 64), ("o_proj", 128)):
        name = f"base_model.model.model.layers.{layer}.self_attn.{proj}"
        weights[name + ".lora_A.weight"] = torch.randn(8, 128, generator=generator) * 0.2
        weights[name + ".lora_B.weight"] = torch.randn(out, 8, generator=generator) * 0.2
save_file(weights, str(path / "new"))
(path / "new").rename(path / "adapter_model.safetensors")
(path / "adapter_config.json").write_text(json.dumps({
    "peft_type": "LORA", "r": 8, "lora_alpha": 8, "bias": "none", "task_type": "CAUSAL_LM", "lora_dropout": 0.0,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "base_model_name_or_path": "x"}))
result = True
"""
ASK = """
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
runner.prefill.clear()
lora = LoRARequest(name, number, path)
if inplace:
    llm.llm_engine.add_lora(LoRARequest(name, number, path, load_inplace=True))
params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
asked = {"prompt_token_ids": prompt, **({"cache_salt": salt} if salt else {})}
(out,) = llm.generate([asked], params, use_tqdm=False, lora_request=lora)
result = [list(out.outputs[0].token_ids), runner.prefill[out.request_id].num_external_cached_tokens]
"""


class Asker:
    """One engine with adapters; each question is asked with vLLM's own prefix cache empty."""

    def __init__(self, engine: Engine, server: Server, folder: Path) -> None:
        self.engine, self.server, self.folder = engine, server, folder
        self.prompt = tokens("doc", 700)

    def make(self, name: str, seed: int) -> None:
        self.engine.ask("python", code=MAKE, path=str(self.folder / name), seed=seed)
        time.sleep(SETTLED_S)  # else the next eviction costs a hit

    def ask(self, name: str, number: int, *, inplace: bool = False, salt: str = "") -> Any:
        """Tokens of the answer, and how many tokens of the prompt came from the arena."""
        self.engine.reset()
        answer = self.engine.ask(
            "python", code=ASK, name=name, number=number, path=str(self.folder / name),
            prompt=self.prompt, inplace=inplace, salt=salt,
        )  # fmt: skip
        self.server.wait_idle()
        return answer


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=LONG)])
def test_an_adapter_that_is_replaced_in_place_gets_nothing_of_the_old_one(
    ranks: int, tmp_path: Path
) -> None:
    """And what is loaded counts: until it is loaded anew, an adapter is the old one; under another name it is itself."""
    options: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}
    env = {}
    if ranks > 1:  # workers are processes of their own
        cpus = sorted(os.sched_getaffinity(0))
        options |= {"tensor_parallel_size": ranks, "distributed_executor_backend": "mp"}
        env = {"VLLM_CPU_OMP_THREADS_BIND": f"{cpus[0]}|{cpus[-1]}"}
    with (
        Server(f"test-{os.getpid()}-lora", chunk_size=128) as server,
        Engine("llama", connector=server.connector(), engine=options, env=env) as engine,
    ):
        lab = Asker(engine, server, tmp_path)
        for name, seed in (("one", 1), ("two", 2), ("x", 1)):
            lab.make(name, seed)
        one, two = (lab.ask(n, i, salt="truth")[0] for i, n in ((11, "one"), (12, "two")))
        assert one != two
        assert lab.ask("x", 1) == [one, 0]
        assert lab.ask("x", 1) == [one, 640]
        lab.make("x", 2)
        assert lab.ask("x", 1) == [one, 640], "the engine still computes with what it has loaded"

        assert lab.ask("x", 1, inplace=True) == [two, 0]

        assert lab.ask("x", 1) == [two, 640]
        lab.ask(
            "one", 11
        )  # there is room for one adapter: this one is evicted, and read again afterwards
        assert lab.ask("x", 1) == [two, 640]
        lab.make("x", 1)
        lab.ask("one", 11)
        assert lab.ask("x", 1)[0] == one, "read again, it is another one"
        assert lab.ask("two", 12)[0] == two
        assert lab.ask("two", 12) == [two, 640], "the same content, whatever its name"
        assert server.check() == []
        (space,) = server.status()["namespaces"]
        (group,) = space["description"]["workers"]["0"]["groups"].values()
        assert (group["dtypes"], group["backends"]) == (["auto"], ["CPU_ATTN"])
