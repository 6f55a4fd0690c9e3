"""verify's judgement, against a stand-in for `vllm serve` whose answers and counters are given."""

import importlib.util
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lmcache_shm.cli import app, verify, verify_tasks
from lmcache_shm.cli.verify_api import Answer, Deployment, VerifyError


class Engine:
    """What the stand-in does; a test changes the fields."""

    def __init__(self) -> None:
        self.dev_mode = True
        self.resets = 0
        self.refused_resets = 0
        self.salts: set[str] = set()
        self.requests: list[dict[str, Any]] = []
        self.hit_tokens = 0
        self.served_per_request = 256
        self.taken_share: float | None = 1.0
        self.failures = 0
        self.reserved = 0
        self.logprob: Callable[[bool], float] = lambda _warm: -1.0
        self.right: Callable[[bool], bool] = lambda _warm: True

    @property
    def warm(self) -> bool:
        return self.resets >= 2

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        self.requests.append(body)
        self.salts.add(body["cache_salt"])
        if self.warm:
            self.hit_tokens += self.served_per_request
        code = "?"
        if isinstance(body["prompt"], str) and self.right(self.warm):
            page, _, question = body["prompt"].rpartition("the code of ")
            name = question.split()[0]
            code = page.split(f"The code of {name} is ")[1].split(".")[0]
        top = {"a": self.logprob(self.warm), "b": -3.0}
        choice = {
            "index": 0,
            "text": f" {code}.",
            "token_ids": [1, 2, 3],
            "logprobs": {"top_logprobs": [top, {"c": -1.0}]},
        }
        return {"choices": [choice]}

    def snapshot(self) -> dict[str, Any]:
        counts = {
            "hit_tokens": self.hit_tokens, "query_tokens": 300 * len(self.requests),
            "loads_failed": self.failures if self.warm else 0, "commits": 7,
        }  # fmt: skip
        return {"counters": counts, "arena": {"slots": {"reserved": self.reserved}}}


class Handler(BaseHTTPRequestHandler):
    engine: Engine

    def _answer(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self._metrics()
        else:
            self._answer(200, {"data": [{"id": "tiny", "max_model_len": 2000}]})

    def _metrics(self) -> None:
        share = self.engine.taken_share
        if share is None:
            self._answer(404, {})
            return
        taken = self.engine.hit_tokens * share
        text = (
            "# TYPE vllm:external_prefix_cache_hits_total counter\n"
            f'vllm:external_prefix_cache_hits_total{{engine="0",model_name="tiny"}} {taken}\n'
        ).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path == "/v1/completions":
            self._answer(200, self.engine.complete(json.loads(body)))
        elif self.path == "/reset_prefix_cache" and self.engine.dev_mode:
            if self.engine.refused_resets:
                self.engine.refused_resets -= 1
                self._answer(200, {"success": False})
            else:
                self.engine.resets += 1
                self._answer(200, {"success": True})
        else:
            self._answer(404, {"detail": "Not Found"})

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine()
    monkeypatch.setattr(verify, "counters", lambda _config: engine.snapshot())
    monkeypatch.setattr(verify, "settled", lambda _config: engine.snapshot())
    return engine


@pytest.fixture
def url(engine: Engine) -> Iterator[str]:
    handler = type("Bound", (Handler,), {"engine": engine})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def call(*words: str) -> int:
    with pytest.raises(SystemExit) as end:
        app.main(["verify", *words])
    return int(end.value.code or 0)


def test_served_and_alike_is_ok(
    engine: Engine, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = call("--base-url", url, "--limit", "8", "--json")

    said = json.loads(capsys.readouterr().out)
    assert (status, said["ok"], said["complaints"]) == (0, True, [])
    assert said["served_tokens"] == 8 * 256
    assert {score["name"]: score["warm"] for score in said["scores"]}["right answers"] == 1.0
    assert said["tokens_equal"] == 1.0


def test_both_runs_send_the_same_under_one_salt_of_their_own(engine: Engine, url: str) -> None:
    call("--base-url", url, "--limit", "6")
    (first,) = engine.salts
    cold, warm = engine.requests[:6], engine.requests[6:]
    engine.salts.clear()
    call("--base-url", url, "--limit", "6")

    assert [r["prompt"] for r in cold] == [r["prompt"] for r in warm]
    assert {first} != engine.salts
    assert all(r["temperature"] == 0 for r in cold)


def test_nothing_served_is_a_failure(
    engine: Engine, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.served_per_request = 0

    status = call("--base-url", url)

    assert status == 1
    assert "nothing was served from the arena" in capsys.readouterr().out


@pytest.mark.parametrize(("share", "status"), [(1.0, 0), (0.5, 0), (0.0, 1), (None, 0)])
def test_what_vllm_did_not_take_was_not_served(
    engine: Engine, url: str, share: float | None, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A hit that the engine refused counts as none; an engine without metrics is believed our counters."""
    engine.taken_share = share

    assert call("--base-url", url, "--limit", "4", "--json") == status
    said = json.loads(capsys.readouterr().out)
    assert said["served_tokens"] == int(4 * 256 * (1.0 if share is None else share))


def test_wrong_answers_from_the_cache_are_a_failure(
    engine: Engine, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.right = lambda warm: not warm

    status = call("--base-url", url)

    assert status == 1
    assert "right answers: 1 without the cache, 0 from it" in capsys.readouterr().out


def test_moved_logprobs_are_a_failure_even_if_the_tokens_stay(
    engine: Engine, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.logprob = lambda warm: -2.0 if warm else -1.0

    status = call("--base-url", url, "--task", "ids", "--json")

    said = json.loads(capsys.readouterr().out)
    assert (status, said["tokens_equal"]) == (1, 1.0)
    assert "logprob of the first token" in said["complaints"][0]


def test_a_difference_within_the_tolerance_is_none(engine: Engine, url: str) -> None:
    engine.logprob = lambda warm: -1.2 if warm else -1.0

    assert call("--base-url", url, "--task", "ids") == 0


def test_failed_loads_are_told(
    engine: Engine, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.failures = 3

    status = call("--base-url", url)

    assert status == 0
    assert "loads that failed and were recomputed: 3" in capsys.readouterr().out


def test_without_dev_mode_the_error_names_the_variable(
    engine: Engine, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.dev_mode = False

    status = call("--base-url", url)

    assert status == 2
    assert "VLLM_SERVER_DEV_MODE=1" in capsys.readouterr().err


def test_a_reset_that_is_refused_for_a_while_is_repeated(engine: Engine, url: str) -> None:
    engine.refused_resets = 2

    assert call("--base-url", url) == 0


def test_a_reset_that_never_succeeds_is_given_up(
    engine: Engine, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmcache_shm.cli.verify_api.RESET_S", 0.2)
    engine.refused_resets = 1 << 30

    with pytest.raises(VerifyError, match="verify wants the deployment to itself"):
        Deployment(url).reset_prefix_cache()


def test_nobody_at_the_url(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--base-url", "http://127.0.0.1:9") == 2
    assert "no answer from http://127.0.0.1:9" in capsys.readouterr().err
    assert call("--base-url", "localhost:8000") == 2
    assert "expected http://HOST:PORT" in capsys.readouterr().err


def test_no_cache_server(
    engine: Engine, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.undo()

    status = call("--base-url", url, "--instance", "nobody")

    assert status == 2
    assert "no server at" in capsys.readouterr().err
    assert engine.requests == []  # said before the long run


def test_prompts_are_the_same_everywhere_and_share_prefixes() -> None:
    prompts = verify_tasks.recall(8, 600)

    assert prompts == verify_tasks.recall(8, 600)
    assert len({prompt.text for prompt in prompts}) == 8
    assert prompts[0].text[:1000] == prompts[4].text[:1000]
    assert prompts[0].text[:100] != prompts[1].text[:100]
    assert all(f"is {prompt.answer}.\n" in prompt.text for prompt in prompts)
    ids = verify_tasks.ids(8, 100)
    assert ids[0].text[:100] == ids[4].text[:100]
    assert ids[0].text != ids[4].text
    assert all(3 <= token < 1000 for prompt in ids for token in prompt.text)


def test_drift_is_0_for_equal_and_counts_tokens_that_left_the_list() -> None:
    def answer(**first: float) -> Answer:
        return Answer("", [], first)

    one, moved, gone = answer(a=-1, b=-2), answer(a=-1.5, b=-2), answer(c=-0.5, d=-1)

    assert verify_tasks.drift([one], [one]) == 0.0
    assert verify_tasks.drift([one], [moved]) == 0.25
    assert verify_tasks.drift([one], [gone]) == pytest.approx((0 + 0 + 1.5 + 1) / 4)
    assert verify_tasks.drift([one, one], [one, moved]) == 0.125
    assert verify_tasks.drift([one], [answer()]) == 0.0


def test_in_common_sees_another_ranking_where_all_logprobs_are_alike() -> None:
    one, other = Answer("", [], {"a": -5.0, "b": -5.1}), Answer("", [], {"c": -5.0, "d": -5.1})

    assert verify_tasks.drift([one], [other]) < 0.1
    assert verify_tasks.in_common([one], [other]) == 0.0
    assert verify_tasks.in_common([one, one], [one, other]) == 0.5
    assert verify_tasks.in_common([one], [Answer("", [], {})]) == 1.0


def test_a_task_of_lm_eval_without_lm_eval(
    engine: Engine, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if importlib.util.find_spec("lm_eval"):
        pytest.skip("lm_eval is installed here")

    status = call("--base-url", url, "--task", "gsm8k")

    assert status == 2
    assert "pip install 'lmcache-shm[verify]'" in capsys.readouterr().err


TASK = """
task: codes
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 8}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


def test_a_task_of_lm_eval(
    engine: Engine, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the extra is installed: right cold, wrong warm; the prompts carry the salt."""
    pytest.importorskip("lm_eval")
    documents = [
        {"question": f"The code of x{k} is {k}.\nthe code of x{k} is", "answer": f" {k}."}
        for k in range(6)
    ]
    data = tmp_path / "codes.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in documents))
    (tmp_path / "codes.yaml").write_text(TASK.format(data=data))
    engine.right = lambda warm: not warm

    status = call(
        "--base-url", url, "--task", str(tmp_path / "codes.yaml"), "--limit", "6", "--json"
    )

    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (status, len(engine.salts)) == (1, 1)
    assert (said["scores"][0]["cold"], said["scores"][0]["warm"]) == (1.0, 0.0)
