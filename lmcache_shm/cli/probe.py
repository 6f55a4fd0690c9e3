"""``lmcache-shm probe MODEL``: the unified block size N, the KV cache groups, and what to type.

vLLM's own configuration decides, in a process of its own (:mod:`lmcache_shm.vllm.probe.resolve`): no
engine, no weights, no GPU. This module starts it, and turns its answer into advice.
"""

import json
import shlex
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from lmcache_shm.cli.app import CommandError

KIND = {
    "full_attention": "full",
    "sink_full_attention": "full, sinks",
    "mla_attention": "full, MLA",
    "sliding_window": "window",
    "sliding_window_mla": "window, MLA",
    "chunked_local_attention": "chunked local",
    "mamba": "recurrent state",
}


class ProbeError(RuntimeError):
    """vLLM could not resolve the model here; with vLLM's reason."""


@dataclass(frozen=True)
class Advice:
    """What follows from the facts."""

    max_num_batched_tokens: int | None
    """Step budget for recurrent models in tokens, else None."""
    warnings: list[str]
    server: str
    """Command line of the cache server."""
    engine: str
    """Command line of vLLM."""


def resolve(model: str, args: list[str], platform: str = "auto", timeout_s: float = 600) -> Any:
    """Facts of :func:`lmcache_shm.vllm.probe.resolve.facts` for ``vllm serve MODEL ARGS``.

    Raises ProbeError with vLLM's own reason.
    """
    with tempfile.TemporaryDirectory(prefix="lmcache-shm-probe-") as folder:
        request, answer, log = (Path(folder) / name for name in ("request", "answer", "log"))
        request.write_text(json.dumps({"model": model, "args": args, "platform": platform}))
        command = [
            sys.executable,
            "-m",
            "lmcache_shm.vllm.probe.resolve",
            str(request),
            str(answer),
        ]
        with log.open("wb") as output:
            try:
                subprocess.run(
                    command, stdout=output, stderr=output, timeout=timeout_s, check=False
                )
            except subprocess.TimeoutExpired:
                raise ProbeError(f"vLLM did not resolve {model} in {timeout_s:.0f} s") from None
        if not answer.exists():
            raise ProbeError(_last_words(log.read_text(errors="replace")))
        result = json.loads(answer.read_text())
    if "error" in result:
        raise ProbeError(result["error"])
    return result


def _last_words(log: str) -> str:
    """The most telling line of a dead process's output."""
    if "No module named 'vllm'" in log:
        return (
            "vLLM is not installed in this environment; run probe where vLLM is: pip install vllm"
        )
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if "error:" in line or "Error" in line] or lines
    return errors[-1] if errors else "vLLM's configuration ended without a word"


def advise(model: str, args: list[str], facts: Any) -> Advice:
    """Step budget, command lines and warnings for the facts of one model."""
    recurrent = any(group["kind"] == "mamba" for group in facts["groups"] if group["cacheable"])
    # vLLM ends prefill steps on multiples of N. A budget under 2N makes every boundary such an
    # end; N itself would leave a prefill waiting as long as any other request decodes.
    budget = 2 * facts["n"] - 1 if recurrent and facts["n"] else None
    return Advice(
        max_num_batched_tokens=budget,
        warnings=_warnings(facts),
        server=f"lmcache-shm server --chunk-size {facts['auto_chunk'] or 'auto'} --l1-size-gb 4",
        engine=_engine_line(model, args, budget),
    )


def _engine_line(model: str, args: list[str], budget: int | None) -> str:
    line = ["vllm", "serve", model, *args]
    typed = {word.split("=")[0].replace("_", "-") for word in args}
    if not typed & {"--enable-prefix-caching", "--no-enable-prefix-caching"}:
        line.append("--enable-prefix-caching")
    if budget is not None:
        if "--mamba-cache-mode" not in typed:
            line += ["--mamba-cache-mode", "align"]
        if "--max-num-batched-tokens" not in typed:
            line += ["--max-num-batched-tokens", str(budget)]
    transfer = {
        "kv_connector": "LMCacheShmConnector",
        "kv_connector_module_path": "lmcache_shm.vllm",
        "kv_role": "kv_both",
    }
    line += ["--kv-transfer-config", json.dumps(transfer, separators=(",", ":"))]
    return shlex.join(line)


def _warnings(facts: Any) -> list[str]:
    said = [facts["refusal"]] if facts["refusal"] else []
    if facts["device_assumed"]:
        said.append(
            f"no such GPU here: {facts['device']}. The attention backend, and so N, may differ on "
            "your machine; run probe there to be sure"
        )
    if not facts["prefix_caching"]:
        said.append(
            "vLLM has prefix caching off for this model, platform and arguments; a cache needs it on"
        )
    if facts["recurrent"] and facts["mamba_cache_mode"] != "align":
        said.append(
            f"mamba cache mode is {facts['mamba_cache_mode']}; use --enable-prefix-caching "
            "--mamba-cache-mode align"
        )
    if facts["n"] > facts["max_model_len"]:
        said.append(f"no prompt is as long as one block: --max-model-len {facts['max_model_len']}")
    return said


def show(facts: Any, advice: Advice, console: Console) -> None:
    """Print it as text."""
    where = f"{facts['platform']} ({facts['device']})" if facts["device"] else facts["platform"]
    if facts["platform"] == facts["device"]:
        where = f"{facts['platform']} (this machine)"
    console.print(f"{facts['architecture']}, {facts['dtype']}, KV cache {facts['kv_cache_dtype']}")
    console.print(
        f"vLLM {facts['vllm']}, resolved for {where}; {', '.join(facts['backends'])}",
        soft_wrap=True,
    )
    console.print(f"\nN = {facts['n']} tokens (unified block size)\n", style="bold")
    table = Table(box=None, pad_edge=False)
    table.add_column("group")
    table.add_column("kind", no_wrap=True)
    for name in ("window", "block size", "layers", "bytes per block", "per token"):
        table.add_column(name, justify="right")
    for group in facts["groups"]:
        kind = KIND.get(group["kind"], group["kind"])
        state = group["kind"] == "mamba"
        table.add_row(
            str(group["group"]),
            kind if group["cacheable"] else f"{kind} (scratch, not cached)",
            str(group["window"] or group["attention_chunk"] or "-"),
            str(group["block_size"]),
            str(len(group["layers"])),
            f"{group['content_bytes']:,}",
            "-" if state else f"{group['content_bytes'] / group['tokens_per_block']:,.0f}",
        )
    console.print(table)
    if facts["chunk_sizes"]:
        sizes = ", ".join(map(str, facts["chunk_sizes"][:4]))
        more = ", …" if len(facts["chunk_sizes"]) > 4 else ""
        console.print(f"\nchunk sizes: {sizes}{more} (auto: {facts['auto_chunk']})")
    if advice.max_num_batched_tokens:
        console.print(
            f"step budget: {facts['n']} ≤ max_num_batched_tokens < {2 * facts['n']}, so that every "
            'boundary is cached; any from N on with "lmcache_shm.mamba_steps": "any"',
            soft_wrap=True,
        )
    for warning in advice.warnings:
        console.print(f"note: {warning}", style="yellow", soft_wrap=True)
    # Not through the console: it would wrap the lines that are to be pasted.
    print(f"\n{advice.server}\n{advice.engine}")


def probe(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Name or directory of the model.")],
    platform: Annotated[
        str, typer.Option(help="auto, cpu, or cuda:MAJOR.MINOR (no GPU needed: it is assumed).")
    ] = "auto",
    *,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Find the block size N and the KV cache groups of a model, without starting an engine.

    Further options are those of `vllm serve`, such as --tensor-parallel-size or --kv-cache-dtype.
    """
    args = list(context.args)
    if platform not in {"auto", "cpu"} and not platform.startswith("cuda"):
        raise typer.BadParameter("auto, cpu, cuda or cuda:MAJOR.MINOR", param_hint="--platform")
    try:
        facts = resolve(model, args, platform)
    except ProbeError as error:
        raise CommandError(str(error)) from None
    advice = advise(model, args, facts)
    if as_json:
        print(json.dumps({"model": model, "args": args, **facts, **asdict(advice)}))
    else:
        show(facts, advice, Console())


PROBE_CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Settings with which :func:`probe` is registered: what it does not know goes to vLLM."""
