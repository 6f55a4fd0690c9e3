"""verify with a task of lm_eval (extra ``verify``), over the deployment's completions API.

Only generation tasks make sense: for log-likelihoods of a prompt vLLM computes all of the prompt.
"""

import logging
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager

from lmcache_shm.cli.verify_api import Deployment, VerifyError


class SaltedCompletions(LocalCompletionsAPI):  # type: ignore[misc]
    """lm_eval's client, whose prompts share no cache entry with anybody else's."""

    def __init__(self, deployment: Deployment, salt: str) -> None:
        super().__init__(
            model=deployment.model,
            base_url=f"{deployment.url}/v1/completions",
            tokenizer_backend=None,  # prompts go as text; vLLM has the tokenizer
            tokenized_requests=False,
            max_length=deployment.max_model_len,
            timeout=int(deployment.timeout_s),
        )
        self._salt = salt

    def _create_payload(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        payload: dict[str, Any] = super()._create_payload(*args, **kwargs)
        return payload | {"cache_salt": self._salt}


def evaluate(deployment: Deployment, task: str, limit: int, salt: str) -> dict[str, float]:
    """Metrics of the first `limit` documents of a task: a name that lm_eval knows, or NAME.yaml.

    Raises VerifyError when lm_eval has no such task or cannot load its data.
    """
    logging.getLogger("lm_eval").setLevel(logging.WARNING)
    path = Path(task)
    own = path.suffix == ".yaml" and path.is_file()
    manager = TaskManager(include_path=str(path.parent) if own else None)
    name = path.stem if own else task
    try:
        results = simple_evaluate(
            model=SaltedCompletions(deployment, salt),
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
