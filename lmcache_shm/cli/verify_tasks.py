"""The tasks that ship with verify: deterministic prompts that share long prefixes, and their score.

``recall`` asks a model for lines of a long list that it was given: any model that can read scores high,
and a wrong cache makes it fail. ``ids`` is a list of token ids for models that cannot read, such as
ones with random weights. Both also compare the first token's logprobs and ranking, for which the context
is the same in both runs whatever was generated; that sees a wrong cache in any model.
"""

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcache_shm.cli.verify_api import Answer, Deployment, VerifyError

FAMILIES = 4  # prefixes; the prompts are dealt over them
WORDS = [
    "amber", "anchor", "apple", "arrow", "badge", "basket", "beacon", "bridge", "button",
    "candle", "canyon", "carpet", "castle", "cedar", "circle", "copper", "cotton", "dragon",
    "eagle", "engine", "falcon", "feather", "forest", "garden", "glacier", "hammer", "harbor",
    "island", "jacket", "kettle", "ladder", "lantern", "lemon", "marble", "meadow", "mirror",
    "needle", "ocean", "orange", "paper", "pearl", "pepper", "pillow", "planet", "pocket",
    "quarry", "ribbon", "river", "rocket", "saddle", "silver", "spider", "stone", "sugar",
    "summer", "temple", "thunder", "tiger", "timber", "tunnel", "valley", "velvet", "violet",
    "walnut", "window", "winter", "yellow", "zebra",
]  # fmt: skip


@dataclass(frozen=True)
class Prompt:
    """What is sent, and the beginning of a right answer ("" if there is none)."""

    text: str | list[int]
    answer: str


def _numbers(name: str, count: int, below: int) -> list[int]:
    """The same numbers in every run and on every machine."""
    stream = hashlib.shake_128(name.encode()).digest(4 * count)
    return [int.from_bytes(stream[4 * k : 4 * k + 4], "little") % below for k in range(count)]


def recall(limit: int, prefix_tokens: int) -> list[Prompt]:
    """`limit` questions about lists of about `prefix_tokens` tokens (a line is about 12)."""
    lines = max(8, prefix_tokens // 12)
    prompts = []
    for k in range(limit):
        family = k % FAMILIES
        codes = _numbers(f"codes {family}", lines, 9000)
        order = _numbers(f"words {family}", lines, len(WORDS))
        names = [f"{WORDS[w]}-{i}" for i, w in enumerate(order)]
        page = "".join(
            f"The code of {name} is {1000 + code}.\n"
            for name, code in zip(names, codes, strict=True)
        )
        asked = _numbers(f"question {k}", 1, lines)[0]
        question = f"\nFrom the list above: the code of {names[asked]} is"
        prompts.append(Prompt(f"List number {family}.\n{page}{question}", f"{1000 + codes[asked]}"))
    return prompts


def ids(limit: int, prefix_tokens: int) -> list[Prompt]:
    """`limit` prompts of token ids 3…999: `prefix_tokens` that a family shares, and 24 of their own."""
    return [
        Prompt(
            [3 + n for n in _numbers(f"prefix {k % FAMILIES}", prefix_tokens, 997)]
            + [3 + n for n in _numbers(f"tail {k}", 24, 997)],
            "",
        )
        for k in range(limit)
    ]


TASKS: dict[str, Callable[[int, int], list[Prompt]]] = {"recall": recall, "ids": ids}


def accuracy(prompts: Sequence[Prompt], answers: Sequence[Answer]) -> float | None:
    """Share of answers that begin right; None for a task without right answers."""
    marks = [
        answer.text.strip().startswith(prompt.answer)
        for prompt, answer in zip(prompts, answers, strict=True)
        if prompt.answer
    ]
    return sum(marks) / len(marks) if marks else None


def drift(cold: Sequence[Answer], warm: Sequence[Answer]) -> float:
    """Mean over the prompts of how far the first token's logprobs moved.

    Per prompt: mean |difference| over the tokens that both runs list; a token that only one run
    lists moved at least from there to the end of the other's list.
    """
    moved = [_moved(one.first, two.first) for one, two in zip(cold, warm, strict=True)]
    return sum(moved) / len(moved) if moved else 0.0


def _moved(one: dict[str, float], two: dict[str, float]) -> float:
    if not one or not two:
        return 0.0
    return sum(_distance(token, one, two) for token in one.keys() | two.keys()) / len(
        one.keys() | two.keys()
    )


def _distance(token: str, one: dict[str, float], two: dict[str, float]) -> float:
    if token in one and token in two:
        return abs(one[token] - two[token])
    # Beyond the end of the other list: how much further is not known.
    known, other = (one[token], two) if token in one else (two[token], one)
    return max(0.0, known - min(other.values()))


def in_common(cold: Sequence[Answer], warm: Sequence[Answer]) -> float:
    """Mean over the prompts of the share of likeliest first tokens that both runs list.

    In a flat distribution all logprobs are close to each other, so drift is small whatever happens;
    there the ranking shows a difference.
    """
    shares = [
        len(one.first.keys() & two.first.keys()) / max(len(one.first), len(two.first))
        for one, two in zip(cold, warm, strict=True)
        if one.first and two.first
    ]
    return sum(shares) / len(shares) if shares else 1.0


def equal_tokens(cold: Sequence[Answer], warm: Sequence[Answer]) -> float:
    """Share of prompts for which both runs generated the same tokens."""
    same = [one.tokens == two.tokens for one, two in zip(cold, warm, strict=True)]
    return sum(same) / len(same) if same else 1.0


# --------------------------------------------------------------------------------------- tasks of lm_eval
def evaluate(deployment: Deployment, task: str, limit: int, salt: str) -> dict[str, float]:
    """Metrics of the first `limit` documents of a task: a name that lm_eval knows, or NAME.yaml.

    Only generation tasks make sense: for log-likelihoods of a prompt vLLM computes all of the prompt.
    Raises ModuleNotFoundError without the extra ``verify``, and VerifyError when lm_eval has no such task or
    cannot load its data.
    """
    from lm_eval import simple_evaluate  # noqa: PLC0415
    from lm_eval.models.openai_completions import LocalCompletionsAPI  # noqa: PLC0415
    from lm_eval.tasks import TaskManager  # noqa: PLC0415

    class SaltedCompletions(LocalCompletionsAPI):  # type: ignore[misc]
        """lm_eval's client, whose prompts share no cache entry with anybody else's."""

        def _create_payload(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            payload: dict[str, Any] = super()._create_payload(*args, **kwargs)
            return payload | {"cache_salt": salt}

    logging.getLogger("lm_eval").setLevel(logging.WARNING)
    model = SaltedCompletions(
        model=deployment.model,
        base_url=f"{deployment.url}/v1/completions",
        tokenizer_backend=None,  # prompts go as text; vLLM has the tokenizer
        tokenized_requests=False,
        max_length=deployment.max_model_len,
        timeout=int(deployment.timeout_s),
    )
    path = Path(task)
    own = path.suffix == ".yaml" and path.is_file()
    manager = TaskManager(include_path=str(path.parent) if own else None)
    name = path.stem if own else task
    try:
        results = simple_evaluate(
            model=model,
            tasks=[name],
            task_manager=manager,
            limit=limit,
            bootstrap_iters=0,
            log_samples=False,
        )
    except VerifyError:
        raise
    except Exception as error:  # whatever a task's loader raises: no such task, no such data set
        text = " ".join(str(error).split())[:300]
        raise VerifyError(f"lm_eval cannot run {task}: {type(error).__name__}: {text}") from error
    scores = {
        metric: float(value)
        for metrics in results["results"].values()
        for metric, value in metrics.items()
        if isinstance(value, int | float) and "_stderr" not in metric and metric != "sample_len"
    }
    if not scores:
        raise VerifyError(f"lm_eval gave no score for {task}")
    return scores
