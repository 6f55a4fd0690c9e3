"""One vLLM engine in this process, driven by JSON lines: `python -m tools.tiny_models.runner '{"family": …}'`.

The first answer is {"ready": …}. Each line of input is {"op": …, …}; each answer is one line, {"ok": …} or
{"error": …}. Answers go to the process's original stdout; everything that libraries print goes to stderr.
The engine core runs in this process (no busy loop), so a step happens only while `generate` is at work.
"""

import atexit
import json
import os
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from tools.parent_watch import on_parents_end

from .family import load
from .hooks import install_named


class Runner:
    """The engine and the operations on it."""

    def __init__(self, options: dict[str, Any]) -> None:
        install_named()  # before vLLM is imported: one hook must come first
        from vllm import LLM

        family = load(options["family"])
        model = family.write(Path(options.get("model") or options["folder"]))
        args = family.engine_args(**options.get("engine", {}))
        started = time.monotonic()
        self.llm = LLM(model=str(model), **args)
        self.load_s = time.monotonic() - started
        self.prefill: dict[str, Any] = {}
        self.first: dict[str, float] = {}
        self._watch_outputs()

    def _watch_outputs(self) -> None:
        """Keep what vLLM knows per request and does not hand out: whose cache served the prompt, and when."""
        processor = self.llm.llm_engine.output_processor
        process_outputs = processor.process_outputs

        def watched(outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
            now = time.monotonic()
            for output in outputs:
                # A request's id in the engine has a random suffix; the outer id is what LLM counts.
                state = processor.request_states.get(output.request_id)
                outer = getattr(state, "external_req_id", None) or output.request_id
                if output.prefill_stats is not None:
                    self.prefill[outer] = output.prefill_stats
                if output.new_token_ids:
                    self.first.setdefault(outer, now)
            return process_outputs(outputs, *args, **kwargs)

        processor.process_outputs = watched

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def describe(self) -> dict[str, Any]:
        """What the engine turned out to be."""
        groups = []
        config = self.scheduler.kv_cache_config
        for group in config.kv_cache_groups:
            spec = group.kv_cache_spec
            groups.append(
                {
                    "kind": type(spec).__name__,
                    "block_size": spec.block_size,
                    "page_bytes": spec.page_size_bytes,
                    "window": getattr(spec, "sliding_window", None),
                    "attention_chunk": getattr(spec, "attention_chunk_size", None),
                    "layers": len(group.layer_names),
                }
            )
        return {
            "load_s": round(self.load_s, 2),
            "groups": groups,
            "prefix_cacheable": list(
                getattr(config, "prefix_cacheable_group_ids", range(len(groups)))
            ),
            "num_blocks": config.num_blocks,
        }

    def generate(
        self,
        prompts: list[list[int]],
        *,
        max_tokens: int = 8,
        top: int = 10,
        salt: str | None = None,
        together: bool = False,
        cold: bool = False,
    ) -> list[dict[str, Any]]:
        """Greedy outputs with logprobs, one prompt after the other or all `together`.

        `cold` empties vLLM's prefix cache before each; `salt` is the requests' cache_salt.
        """
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            min_tokens=max_tokens,
            ignore_eos=True,
            logprobs=top,
            detokenize=False,
        )
        inputs: list[dict[str, Any]] = [{"prompt_token_ids": prompt} for prompt in prompts]
        if salt is not None:
            inputs = [entry | {"cache_salt": salt} for entry in inputs]
        results: list[dict[str, Any]] = []
        for batch in [inputs] if together else [[entry] for entry in inputs]:
            if cold and not self.reset():
                raise RuntimeError("vLLM's prefix cache cannot be emptied: blocks are still held")
            self.prefill.clear()
            self.first.clear()
            started = time.monotonic()
            outputs = self.llm.generate(batch, params, use_tqdm=False)
            results += [self._result(output, started) for output in outputs]
        return results

    def _result(self, output: Any, started: float) -> dict[str, Any]:
        stats = self.prefill.get(output.request_id)
        completion = output.outputs[0]
        return {
            "prompt_tokens": len(output.prompt_token_ids),
            "tokens": list(completion.token_ids),
            # Per generated token: {token id: logprob} of the chosen and the likeliest ones.
            "logprobs": [
                {str(token): entry.logprob for token, entry in position.items()}
                for position in completion.logprobs
            ],
            "local": stats.num_local_cached_tokens if stats else None,
            "external": stats.num_external_cached_tokens if stats else None,
            "ttft_s": round(self.first.get(output.request_id, started) - started, 4),
        }

    def reset(self, *, external: bool = False) -> bool:
        """Empty vLLM's own prefix cache (and, if asked, the connector's); False when blocks are still held."""
        return bool(self.llm.llm_engine.reset_prefix_cache(reset_connector=external))

    def free_blocks(self) -> int:
        """Blocks of the pool that nobody holds (num_blocks − 1 when idle)."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def python(self, code: str, **names: Any) -> Any:
        """Run test code beside the engine: `result` in it becomes the answer."""
        scope: dict[str, Any] = {
            "llm": self.llm,
            "scheduler": self.scheduler,
            "runner": self,
            **names,
        }
        exec(code, scope)  # noqa: S102  the caller is the test that started this process
        return scope.get("result")


def abandoned(folder: Path) -> None:
    """The process that started this one is gone: end at once, with all helpers (they share its session)."""
    shutil.rmtree(folder, ignore_errors=True)
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


OPERATIONS = ("generate", "reset", "describe", "free_blocks", "python")


def main() -> None:
    """Answer requests until told to end."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    options = json.loads(sys.argv[1])
    on_parents_end(lambda: abandoned(Path(options["folder"])))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")

    try:
        runner = Runner(options)
        answer({"ready": runner.describe()})
    except BaseException as error:  # noqa: BLE001  also SystemExit: the reader must learn of it
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"})
        os._exit(1)
    for line in sys.stdin:
        request = json.loads(line)
        operation = request.pop("op")
        if operation == "exit":
            break
        try:
            if operation not in OPERATIONS:
                raise ValueError(f"no operation {operation!r}")
            answer({"ok": getattr(runner, operation)(**request)})
        except Exception as error:  # noqa: BLE001  the reader decides
            traceback.print_exc()
            answer({"error": f"{type(error).__name__}: {error}"})
    core = runner.llm.llm_engine.engine_core
    core.shutdown()
    answer({"ok": "bye"})
    # What is registered for the end runs; to take apart all that was imported would take 3 s, and mend nothing.
    atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
