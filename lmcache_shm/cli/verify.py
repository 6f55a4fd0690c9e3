"""``lmcache-shm verify``: does this deployment answer alike with and without the cache?

Cold run, reset of vLLM's own prefix cache (the arena keeps what it has), warm run. Our server's
counters show whether the warm run was really served from the arena. Exit status 0: served, and the
scores agree; 1: they differ, or nothing was served; 2: the check could not be made.
"""

import json
import secrets
import time
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from lmcache_shm.cli.app import CommandError
from lmcache_shm.cli.command import INSTANCE, flags
from lmcache_shm.cli.verify_api import Answer, Deployment, VerifyError, counters, settled
from lmcache_shm.cli.verify_tasks import TASKS, accuracy, drift, equal_tokens, evaluate, in_common
from lmcache_shm.config import Config, server_config

MAX_TOKENS = 24
PREFIX_TOKENS = 6000  # several chunks of any model; less where the model's context is shorter


RANKING_TOLERANCE = (
    0.4  # rounding swaps tokens at the end of a list of five; a wrong cache, all of them
)


@dataclass(frozen=True)
class Score:
    """A value of both runs that must agree within `tolerance`."""

    name: str
    cold: float
    warm: float
    tolerance: float

    @property
    def agrees(self) -> bool:
        return abs(self.cold - self.warm) <= self.tolerance


@dataclass
class Verdict:
    """What both runs came to."""

    model: str
    task: str
    scores: list[Score] = field(default_factory=list)
    tokens_equal: float | None = None
    """Share of prompts with equal tokens: for information, not every model is bit-exact."""
    served_tokens: int = 0
    """Prompt tokens of the warm run that came from the arena: found there, and taken by vLLM."""
    asked_tokens: int = 0
    """Prompt tokens for which the engine asked the arena in the warm run."""
    failed_loads: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.complaints


def run(
    deployment: Deployment,
    config: Config,
    task: str,
    limit: int,
    *,
    tolerance: float,
    drift_tolerance: float,
    prefix_tokens: int,
) -> Verdict:
    """Both runs and the comparison. Raises VerifyError when the check cannot be made."""
    verdict = Verdict(deployment.model, task)
    counters(config)  # fails before a long run, not after it
    salt = f"lmcache-shm-verify-{secrets.token_hex(8)}"
    if task in TASKS:
        room = deployment.max_model_len - MAX_TOKENS - 64
        prompts = TASKS[task](limit, min(prefix_tokens, room * 2 // 3))

        def once() -> list[Answer]:
            return [deployment.complete(prompt.text, MAX_TOKENS, salt) for prompt in prompts]

        cold, warm = _twice(once, deployment, config, verdict)
        right = accuracy(prompts, cold), accuracy(prompts, warm)
        if right[0] is not None and right[1] is not None:
            verdict.scores.append(Score("right answers", right[0], right[1], tolerance))
        verdict.scores += [
            Score("logprob of the first token, moved by", 0, drift(cold, warm), drift_tolerance),
            Score("likeliest first tokens in common", 1, in_common(cold, warm), RANKING_TOLERANCE),
        ]
        verdict.tokens_equal = equal_tokens(cold, warm)
    else:
        first, second = _twice(
            lambda: _lm_eval(deployment, task, limit, salt), deployment, config, verdict
        )
        for name in first.keys() & second.keys():
            verdict.scores.append(Score(name, first[name], second[name], tolerance))
    _judge(verdict)
    return verdict


def _lm_eval(deployment: Deployment, task: str, limit: int, salt: str) -> dict[str, float]:
    try:
        return evaluate(deployment, task, limit, salt)
    except ModuleNotFoundError as error:
        raise VerifyError(
            f"--task {task} is none of {', '.join(TASKS)}, and for tasks of lm_eval the package "
            f"{error.name} is missing: pip install 'lmcache-shm[verify]'"
        ) from None


def _twice(once: Any, deployment: Deployment, config: Config, verdict: Verdict) -> tuple[Any, Any]:
    """Result of a cold and a warm run; what the warm one got from the arena goes into `verdict`."""
    deployment.reset_prefix_cache()
    started = time.monotonic()
    cold = once()
    verdict.seconds["cold"] = round(time.monotonic() - started, 3)
    before, loaded_before = settled(config)["counters"], deployment.loaded_tokens()
    deployment.reset_prefix_cache()
    started = time.monotonic()
    warm = once()
    verdict.seconds["warm"] = round(time.monotonic() - started, 3)
    after, loaded_after = counters(config)["counters"], deployment.loaded_tokens()

    def gained(name: str) -> int:
        return int(after.get(name, 0)) - int(before.get(name, 0))

    verdict.served_tokens, verdict.asked_tokens = gained("hit_tokens"), gained("query_tokens")
    if loaded_before is not None and loaded_after is not None:
        # What the server found, the engine may have refused: its confirmation of the token ids has the last word.
        verdict.served_tokens = min(verdict.served_tokens, loaded_after - loaded_before)
    verdict.failed_loads = gained("loads_failed")
    return cold, warm


def _judge(verdict: Verdict) -> None:
    if verdict.served_tokens <= 0:
        verdict.complaints.append(
            "nothing was served from the arena: is the engine started with LMCacheShmConnector, and on "
            "this instance? (lmcache-shm doctor finds out why)"
        )
    for score in verdict.scores:
        if not score.agrees:
            verdict.complaints.append(
                f"{score.name}: {score.cold:.4g} without the cache, {score.warm:.4g} from it, "
                f"allowed difference {score.tolerance:g}"
            )


def show(verdict: Verdict, console: Console) -> None:
    """Print it as text."""
    console.print(f"{verdict.model}, task {verdict.task}", markup=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in ("cold", "warm", "allowed difference"):
        table.add_column(name, justify="right")
    table.add_row("seconds", *(f"{verdict.seconds[run]:.2f}" for run in ("cold", "warm")), "")
    for score in verdict.scores:
        table.add_row(score.name, f"{score.cold:.4g}", f"{score.warm:.4g}", f"{score.tolerance:g}")
    console.print(table)
    if verdict.tokens_equal is not None:
        console.print(f"answers with equal tokens: {verdict.tokens_equal:.0%} (for information)")
    console.print(
        f"served from the arena: {verdict.served_tokens:,} of {verdict.asked_tokens:,} prompt tokens"
    )
    if verdict.failed_loads:
        console.print(f"loads that failed and were recomputed: {verdict.failed_loads}")
    for complaint in verdict.complaints:
        console.print(f"FAILED: {complaint}", style="red", markup=False, soft_wrap=True)
    if verdict.ok:
        console.print("OK: served from the arena, and the answers agree", style="green")


@flags(INSTANCE)
def verify(
    base_url: Annotated[
        str, typer.Option(help="Where `vllm serve` listens.")
    ] = "http://localhost:8000",
    task: Annotated[
        str,
        typer.Option(
            help="recall (questions about long lists), ids (token ids, for models that cannot read), "
            "or a task of lm_eval such as gsm8k (needs the extra verify)."
        ),
    ] = "recall",
    limit: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 16,
    tolerance: Annotated[
        float, typer.Option(min=0, help="Allowed difference of a score (0 to 1).")
    ] = 0.1,
    drift_tolerance: Annotated[
        float, typer.Option(min=0, help="Allowed mean movement of the first token's logprobs.")
    ] = 0.25,
    prefix_tokens: Annotated[
        int, typer.Option(min=16, help="Length of the shared prefixes; cut to the model's context.")
    ] = PREFIX_TOKENS,
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="Of the deployment.")] = "",
    *,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    **given: Any,
) -> None:
    """Compare a deployment's answers with and without the cache.

    Run it on the host of the engine; the engine needs VLLM_SERVER_DEV_MODE=1 in its environment, and
    no other traffic. Exit status 0: served from the arena and alike; 1: not; 2: could not be checked.
    """
    try:
        verdict = run(
            Deployment(base_url, api_key),
            server_config(given),
            task,
            limit,
            tolerance=tolerance,
            drift_tolerance=drift_tolerance,
            prefix_tokens=prefix_tokens,
        )
    except VerifyError as error:
        raise CommandError(str(error), 2) from None
    if as_json:
        print(json.dumps(asdict(verdict) | {"ok": verdict.ok}))
    else:
        show(verdict, Console())
    if not verdict.ok:
        raise typer.Exit(1)
