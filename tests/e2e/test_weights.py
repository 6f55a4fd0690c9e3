"""Real engines whose weights change: by vLLM's own calls, as RL frameworks do it, and over sleep.

Sleep does nothing to the weights on the CPU back end, but vLLM goes through all of it: pause, reset, wake-up.
"""

import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.lab import NEW, TOLERANCE
from tools.server_process import Server
from tools.tiny_models import load
from tools.tiny_models.process import Engine, Output
from tools.tiny_models.prompts import tokens

PROMPT = tokens("weights", 700)
STORED = 640  # in chunks of 128
OWN = {"load_format": "auto"}
RELOAD = "llm.collective_rpc('reload_weights', kwargs={'weights_path': path + '/llama'})"
# The back end has packed the matrices; the others are as in the checkpoint.
WRITE = """
def write(model):
    import torch
    norms = [(name, p) for name, p in model.named_parameters() if "layernorm" in name]
    model.load_weights((name, torch.linspace(0.4, 1.6, p.numel())) for name, p in norms)
llm.apply_model(write)
"""
WRITE_UNSEEN = """
def write(model):
    import torch
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "layernorm" in name:
                p.copy_(torch.linspace(1.6, 0.4, p.numel()))
llm.apply_model(write)
"""


def checkpoint(folder: Path, seed: int) -> Path:
    """Weights of the llama family, saved as a trainer does; the folder that a tiny engine takes its model from."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = {
        k: v
        for k, v in load("llama").config.items()
        if k not in ("architectures", "model_type", "torch_dtype")
    }
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**config)).to(torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    model.save_pretrained(str(folder / "llama"), safe_serialization=True)
    load("llama").write(folder)  # or the engine would change the folder while it starts
    return folder


@dataclass
class Weights:
    """Two versions on disk, what each answers, and an engine with the cache that began with the first."""

    server: Server
    engine: Engine
    v1: Path
    v2: Path
    truth1: Output
    truth2: Output

    def ask(self, engine: Engine | None = None) -> Output:
        (output,) = (engine or self.engine).generate([PROMPT], max_tokens=NEW, cold=True)
        self.server.wait_idle()
        return output


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Weights]:
    root = tmp_path_factory.mktemp("weights")
    v1, v2 = checkpoint(root / "v1", 1), checkpoint(root / "v2", 2)
    time.sleep(0.2)
    with Engine("llama", model=v1, engine=OWN) as plain:
        (truth1,) = plain.generate([PROMPT], max_tokens=NEW)
        plain.ask("python", code=RELOAD, path=str(v2))
        (truth2,) = plain.generate([PROMPT], max_tokens=NEW, cold=True)
    with (
        Server(f"test-{os.getpid()}-weights", chunk_size=128) as server,
        Engine("llama", model=v1, engine=OWN, connector=server.connector()) as engine,
    ):
        yield Weights(server, engine, v1, v2, truth1, truth2)


def is_right(output: Output, truth: Output) -> bool:
    return output.difference(truth) <= TOLERANCE


def test_an_engine_goes_through_changes_of_its_weights(weights: Weights, tmp_path: Path) -> None:
    """One story, since an engine takes long to start. `external` is what the cache served."""
    w = weights
    assert not is_right(w.truth1, w.truth2)
    assert w.ask().external == 0
    assert (w.ask().external, is_right(w.ask(), w.truth1)) == (STORED, True)
    first = len(w.server.table().rows())

    # Sleep that keeps the weights.
    w.engine.ask("python", code="llm.sleep(level=1); llm.wake_up()")
    slept = w.ask()
    assert (slept.external, is_right(slept, w.truth1)) == (STORED, True)

    # New weights from disk; nobody resets the connector.
    w.engine.ask("python", code=RELOAD, path=str(w.v2))
    updated = w.ask()
    assert (updated.external, is_right(updated, w.truth2)) == (0, True)
    again = w.ask()
    assert (again.external, is_right(again, w.truth2)) == (STORED, True)

    # Written as RL frameworks do it.
    w.engine.ask("python", code=WRITE)
    written = w.ask()
    assert written.external == 0
    assert not is_right(written, w.truth2)
    assert (w.ask().external, is_right(w.ask(), written)) == (STORED, True)

    # In a way that cannot be seen, followed by the reset that the documentation asks for.
    w.engine.ask("python", code=WRITE_UNSEEN)
    assert w.engine.reset(external=True)
    unseen = w.ask()
    assert unseen.external == 0
    assert not is_right(unseen, written)
    assert (w.ask().external, is_right(w.ask(), unseen)) == (STORED, True)

    # Sleep that throws the weights away (the CPU back end keeps them, and nobody counts on it).
    w.engine.ask("python", code="llm.sleep(level=2); llm.wake_up()")
    assert w.ask().external == 0

    # What the checkpoint's own engines stored has been there all the time: for a copy in another place, too.
    copy = Path(shutil.copytree(w.v1, tmp_path / "copy"))
    time.sleep(0.2)
    with Engine("llama", model=copy, engine=OWN, connector=w.server.connector()) as other:
        served = w.ask(other)
    assert (served.external, is_right(served, w.truth1)) == (STORED, True)
    assert first <= len(w.server.table().rows()) <= 2 * first, (
        "what an engine left for good is cleared"
    )
