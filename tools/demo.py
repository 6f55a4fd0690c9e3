"""The demo: a real vLLM engine with a tiny hybrid model, served from the shared-memory arena.

    ./bin/demo [--model NAME] [--json]

Four prompts that share a long prefix run cold; vLLM's own prefix cache is emptied and they run again; then a second
engine process runs them. A run without any connector is the measure of right. At last the bytes in the arena are flipped:
the answer must change, which proves that they are what is served. Nothing that was started outlives the demo.
"""

import argparse
import json
import os
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lmcache_shm.protocol.keys import encode_tokens
from tools.scratch import scratch_folder
from tools.server_process import Server, ServerError
from tools.tiny_models import FAMILIES
from tools.tiny_models.process import Engine, EngineError, Output
from tools.tiny_models.prompts import tokens
from tools.tiny_models.zygote import zygotes

PREFIX, TAILS, NEW = 1100, (40, 52, 45, 60), 8
TOLERANCE = 1e-3  # of a logprob; another prefix moves them by 0.1 and more
PROMPTS = [tokens("prefix", PREFIX) + tokens(f"tail {i}", n) for i, n in enumerate(TAILS)]


@dataclass(frozen=True)
class Run:
    """All prompts once: sums, and the mean time to the first token."""

    ttft_s: float
    prompt_tokens: int
    local_hit_tokens: int
    external_hit_tokens: int
    bytes_stored: int
    bytes_loaded: int
    tokens_equal_to_baseline: bool
    logprobs_equal_to_baseline: bool


class Demo:
    """What the runs have in common: the server, and the answers of an engine without a connector."""

    def __init__(self, model: str, server: Server, say: Any) -> None:
        self.model = model
        self.server = server
        self.say = say
        self.baseline: list[Output] = []
        self._moved = self._bytes()

    def _bytes(self) -> tuple[int, int]:
        counters = self.server.status()["counters"]
        return counters["bytes_committed"], counters["bytes_acquired"]

    def run(self, engine: Engine) -> Run:
        """Generate for all prompts, one after the other, and wait for the stores."""
        engine.generate([tokens("warm-up", 64)], max_tokens=2)  # libraries load on first use
        outputs = engine.generate(PROMPTS, max_tokens=NEW)
        self.server.wait_idle()
        before, self._moved = self._moved, self._bytes()
        pairs = list(zip(self.baseline, outputs, strict=True))
        return Run(
            ttft_s=round(sum(o.ttft_s for o in outputs) / len(outputs), 4),
            prompt_tokens=sum(o.prompt_tokens for o in outputs),
            local_hit_tokens=sum(o.local for o in outputs),
            external_hit_tokens=sum(o.external for o in outputs),
            bytes_stored=self._moved[0] - before[0],
            bytes_loaded=self._moved[1] - before[1],
            tokens_equal_to_baseline=all(a.tokens == b.tokens for a, b in pairs),
            logprobs_equal_to_baseline=all(a.difference(b) <= TOLERANCE for a, b in pairs),
        )

    def flip_and_run(self, engine: Engine) -> dict[str, Any]:
        """The negative control: answers from damaged slots. The slots are as before afterwards."""
        (namespace,) = self.server.status()["namespaces"]
        size = namespace["chunk_size"]
        table = self.server.table()
        ends = {}
        for row in table.rows():
            chunk = int(table.cold["chunk"][row])
            ids = encode_tokens(PROMPTS[0][chunk * size : (chunk + 1) * size])
            ends[row] = max(table.payload(row).tobytes().rfind(ids), 0)
        for row, end in ends.items():
            table.flip(row, end)
        (broken,) = engine.generate(PROMPTS[:1], max_tokens=NEW, cold=True)
        for row, end in ends.items():
            table.flip(row, end)
        self.server.wait_idle()
        self._moved = self._bytes()
        return {
            "flipped_bytes": sum(end // 2 for end in ends.values()),
            "output_changed": not self.baseline[0].difference(broken) <= TOLERANCE,
        }

    def groups(self, engine: Engine) -> list[dict[str, Any]]:
        """One entry per KV cache group of vLLM's, with the object group that it is stored in."""
        (namespace,) = self.server.status()["namespaces"]
        found = []
        for group in namespace["groups"]:
            for number in group["kv_groups"]:
                of_vllm = engine.info["groups"][number]
                found.append(
                    {
                        "kv_cache_group": number,
                        "kind": of_vllm["kind"],
                        "rule": group["kind"],
                        "window": group["window"],
                        "block_size": of_vllm["block_size"],
                        "layers": of_vllm["layers"],
                        "object_group": group["name"],
                        "slots_used": group["slots"],
                        "slot_bytes": group["slot_bytes"],
                    }
                )
        return sorted(found, key=lambda entry: entry["kv_cache_group"])


def show(
    console: Console,
    model: str,
    runs: dict[str, Run],
    groups: list[dict[str, Any]],
    control: dict[str, Any],
) -> None:
    """Two tables and a verdict, within 80 columns."""
    table = Table(title=f"{model}: {len(PROMPTS)} prompts that share {PREFIX} tokens")
    for name in ("run", "TTFT", "prompt", "vLLM", "arena", "stored", "loaded", "output"):
        table.add_column(
            name, justify="left" if name in {"run", "output"} else "right", no_wrap=True
        )
    for name, run in runs.items():
        right = run.tokens_equal_to_baseline and run.logprobs_equal_to_baseline
        table.add_row(
            name.replace("_", " "),
            f"{run.ttft_s * 1e3:.0f} ms",
            f"{run.prompt_tokens}",
            f"{run.local_hit_tokens}",
            f"{run.external_hit_tokens}",
            f"{run.bytes_stored / 1e6:.1f} MB",
            f"{run.bytes_loaded / 1e6:.1f} MB",
            "[green]equal[/]" if right else "[red]DIFFERENT[/]",
        )
    console.print(table)
    console.print(
        "[dim]mean time to the first token; tokens: all, from vLLM's own cache, from the arena; bytes moved[/]\n"
    )
    table = Table(title="KV cache groups")
    for name in ("group", "kind", "rule", "window", "block", "layers", "slots", "of bytes"):
        table.add_column(
            name, justify="left" if name in {"kind", "rule"} else "right", no_wrap=True
        )
    for g in groups:
        table.add_row(
            f"{g['kv_cache_group']}", g["kind"].removesuffix("Spec"), g["rule"], f"{g['window'] or '–'}", f"{g['block_size']}",
            f"{g['layers']}", f"{g['slots_used']}", f"{g['slot_bytes']:,}",
        )  # fmt: skip
    console.print(table)
    changed = (
        "changed the output, as it must"
        if control["output_changed"]
        else "[red]DID NOT change the output[/]"
    )
    console.print(
        f"Negative control: {control['flipped_bytes']:,} flipped bytes in the arena {changed}."
    )


def run_demo(model: str, size_mb: float, say: Any) -> dict[str, Any]:
    """All of it. Raises EngineError or ServerError; whatever happens, nothing is left."""
    with ExitStack() as stack:
        folder = stack.enter_context(scratch_folder())
        os.environ["LMCACHE_SHM_RUNTIME_DIR"] = folder  # a server of its own, apart from any in use
        say(f"starting a server with an arena of {size_mb:g} MiB")
        server = stack.enter_context(Server(f"demo-{os.getpid()}", size_mb=size_mb))
        demo = Demo(model, server, say)
        stack.enter_context(zygotes())  # vLLM is imported once for three engines
        say(f"starting vLLM with the tiny {model}, without a connector: the measure of right")
        with Engine(model, folder=Path(folder)) as engine:
            demo.baseline = engine.generate(PROMPTS, max_tokens=NEW, cold=True)
        say("starting vLLM with LMCacheShmConnector")
        runs = {}
        with Engine(model, connector=server.connector(), folder=Path(folder)) as engine:
            say("running the prompts cold")
            runs["cold"] = demo.run(engine)
            if not engine.reset():
                raise EngineError("vLLM's prefix cache could not be emptied: blocks are held")
            say("vLLM's own prefix cache is empty again: running them from the arena")
            runs["warm"] = demo.run(engine)
            say("flipping bytes in the arena: the answer must change")
            control = demo.flip_and_run(engine)
        say("that engine is gone; starting another process")
        with Engine(model, connector=server.connector(), folder=Path(folder)) as engine:
            runs["second_engine"] = demo.run(engine)
            groups = demo.groups(engine)
        findings = server.check()
        if findings:
            raise ServerError(f"the arena is not consistent: {findings}")
    return {"model": model, "groups": groups, "runs": runs, "negative_control": control}


def interrupted(number: int, _frame: object) -> None:
    """First signal: unwind. Further ones: the unwinding is under way already."""
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.SIG_IGN)
    sys.exit(128 + number)


def main() -> int:
    """The command. 0: all outputs equal and the control changed them; 1: not; 130: interrupted."""
    parser = argparse.ArgumentParser(prog="demo", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--model",
        choices=FAMILIES,
        default="gemma3",
        metavar="NAME",
        help=f"one of {', '.join(FAMILIES)}",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    parser.add_argument(
        "--size-mb", type=float, default=256, metavar="MIB", help="size of the arena (256)"
    )
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupted)
    started = time.monotonic()
    progress = Console(stderr=True)

    def say(text: str) -> None:
        progress.print(f"[dim]{time.monotonic() - started:5.1f} s[/]  {text}", highlight=False)

    try:
        found = run_demo(options.model, options.size_mb, say)
    except (EngineError, ServerError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    runs, control = found.pop("runs"), found["negative_control"]
    show(Console(), options.model, runs, found["groups"], control)
    result = {**found, **{name: asdict(run) for name, run in runs.items()}}
    if options.json:
        print(json.dumps(result), flush=True)
    right = all(r.tokens_equal_to_baseline and r.logprobs_equal_to_baseline for r in runs.values())
    served = runs["warm"].external_hit_tokens > 0 and runs["second_engine"].external_hit_tokens > 0
    return 0 if right and served and control["output_changed"] else 1


if __name__ == "__main__":
    sys.exit(main())
