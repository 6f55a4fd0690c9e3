"""What a real engine start refuses and says, and larger steps with mamba_steps "any"."""

import pytest

from tests.e2e.lab import NEW, TOLERANCE
from tools.server_process import Server
from tools.tiny_models.process import Engine, EngineError
from tools.tiny_models.prompts import tokens

N = 160  # tokens, of qwen3_5


def test_a_chunk_size_that_does_not_fit_ends_the_start(instance: str) -> None:
    with (
        Server(instance, chunk_size=100) as server,
        pytest.raises(EngineError) as caught,
        Engine("llama", connector=server.connector()),
    ):
        pass
    text = str(caught.value)
    assert "chunk size 100 does not fit this model: it has to be a multiple of 32" in text
    assert "admissible are 32, 64, 96, 128, …" in text


@pytest.mark.slow
def test_larger_steps_end_the_start_or_cache_what_vllm_snapshots(instance: str) -> None:
    """512 tokens a step: those end on 480 and on 800, so a hit ends there and nowhere else, and is right."""
    prompt = tokens("steps", 827)
    branch = prompt[:700] + tokens("branch", 60)
    large = {"max_num_batched_tokens": 512}
    with Server(instance, chunk_size=N) as server:
        with (
            pytest.raises(EngineError) as caught,
            Engine("qwen3_5", connector=server.connector(), engine=large),
        ):
            pass
        text = str(caught.value)
        assert "max_num_batched_tokens is 512, but the unified block size" in text
        assert "--max-num-batched-tokens 319" in text
        assert '"lmcache_shm.mamba_steps": "any"' in text

        with Engine(
            "qwen3_5", connector=server.connector(mamba_steps="any"), engine=large,
            env={"VLLM_LOGGING_LEVEL": "INFO"},
        ) as engine:  # fmt: skip
            cold = engine.generate([prompt], max_tokens=NEW, cold=True, salt="one")
            cold += engine.generate([branch], max_tokens=NEW, cold=True, salt="another")
            server.wait_idle()
            server.clear()
            first = engine.generate([prompt], max_tokens=NEW, cold=True)
            table = server.wait_idle()
            (space,) = server.status()["namespaces"]
            kinds = [group["kind"] for group in space["groups"]]
            states = table.cold["chunk"][table.rows(kinds.index("recurrent"))]
            warm = engine.generate([prompt, branch], max_tokens=NEW, cold=True)
            log = engine.log.read_text(errors="replace")

    assert first[0].external == 0
    assert [(int(chunk) + 1) * N for chunk in states] == [480, 800]
    assert len(table.rows(kinds.index("full"))) == 5
    assert [output.external for output in warm] == [800, 480]
    assert max(a.difference(b) for a, b in zip(cold, warm, strict=True)) <= TOLERANCE
    assert (
        "recurrent states are cached only at boundaries that vLLM snapshots (mamba_steps any" in log
    )
