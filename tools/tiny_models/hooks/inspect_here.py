"""vLLM looks at a model's class in a process of its own, once per class and machine, so as not to start CUDA.

That process imports vLLM for 10 s; tiny models have no CUDA to start, and look at it here.
"""


def install() -> None:
    """Replace the process by a call."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda fn: fn()
