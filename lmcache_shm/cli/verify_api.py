"""The deployment under test, over HTTP (the OpenAI completions API of ``vllm serve``), and its cache server."""

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmcache_shm.cli.command import connect
from lmcache_shm.client.connection import ControlError
from lmcache_shm.client.reconnect import socket_path
from lmcache_shm.config import Config
from lmcache_shm.protocol.messages import Status, StatusReply

TOP = 5  # logprobs per token; the most that every deployment allows
RESET_S = 30.0


class VerifyError(RuntimeError):
    """The check could not be made; one line with what to do."""


@dataclass(frozen=True)
class Answer:
    """One completion: its text, its token ids, and for the first token {token: logprob} of the likeliest."""

    text: str
    tokens: list[int]
    first: dict[str, float]


class Deployment:
    """A running ``vllm serve``."""

    def __init__(self, base_url: str, api_key: str = "", timeout_s: float = 600.0) -> None:
        """`base_url` with or without ``/v1``. Raises VerifyError without an answer."""
        self.url = base_url.rstrip("/").removesuffix("/v1")
        self.timeout_s = timeout_s
        if not self.url.startswith(("http://", "https://")):
            raise VerifyError(f"--base-url {base_url}: expected http://HOST:PORT")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        model = self._call("GET", "/v1/models")["data"][0]
        self.model = str(model["id"])
        self.max_model_len = int(model.get("max_model_len") or 4096)

    def complete(self, prompt: str | list[int], max_tokens: int, salt: str) -> Answer:
        """A greedy completion; `salt` keeps these prompts apart from everybody else's in every cache."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "seed": 0,
            "logprobs": TOP,
            "return_token_ids": True,
            "cache_salt": salt,
        }
        choice = self._call("POST", "/v1/completions", body)["choices"][0]
        top = (choice.get("logprobs") or {}).get("top_logprobs") or [{}]
        return Answer(choice["text"], choice.get("token_ids") or [], dict(top[0] or {}))

    def reset_prefix_cache(self) -> None:
        """Empty vLLM's own prefix cache and leave the arena alone. Raises VerifyError when that fails."""
        end = time.monotonic() + RESET_S
        while True:
            try:
                answer = self._call("POST", "/reset_prefix_cache")
            except _NotFound:
                raise VerifyError(
                    f"{self.url}/reset_prefix_cache does not exist: start `vllm serve` with "
                    "VLLM_SERVER_DEV_MODE=1 in its environment (not for production)"
                ) from None
            if not isinstance(answer, dict) or answer.get("success", True):
                return
            if time.monotonic() > end:
                raise VerifyError(
                    f"vLLM could not reset its prefix cache in {RESET_S:.0f} s: other requests are "
                    "running; verify wants the deployment to itself"
                )
            time.sleep(0.1)

    def loaded_tokens(self) -> int | None:
        """Prompt tokens that vLLM took from its connector so far; None when it shows no metrics."""
        try:
            text = self._fetch("GET", "/metrics").decode(errors="replace")
        except VerifyError:
            return None
        values = re.findall(
            r"^vllm:external_prefix_cache_hits_total(?:{.*?})? (\S+)", text, re.MULTILINE
        )
        return int(sum(map(float, values))) if values else None

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        text = self._fetch(method, path, body)
        return json.loads(text) if text else None

    def _fetch(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(  # noqa: S310  (the scheme was checked)
            self.url + path, data=data, headers=self._headers, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as reply:  # noqa: S310
                return bytes(reply.read())
        except urllib.error.HTTPError as error:
            if error.code == 404:
                raise _NotFound(f"{self.url}{path} does not exist") from None
            reason = error.read(2000).decode(errors="replace").strip()
            raise VerifyError(f"{self.url}{path}: {error.code} {reason}") from None
        except (OSError, ValueError) as error:
            raise VerifyError(f"no answer from {self.url}{path}: {_reason(error)}") from None


class _NotFound(VerifyError):
    pass


def _reason(error: Exception) -> object:
    return error.reason if isinstance(error, urllib.error.URLError) else error


def counters(config: Config) -> Any:
    """The snapshot of the cache server of `config.instance`. Raises VerifyError when there is none."""
    try:
        connection = connect(socket_path(config), "verify", 30.0)
        try:
            return connection.call(Status(), StatusReply).snapshot
        finally:
            connection.close()
    except ControlError as error:
        raise VerifyError(
            f"{error}; verify runs on the host of the cache server (--instance, --runtime-dir)"
        ) from None


def settled(config: Config, timeout_s: float = 60.0) -> Any:
    """A snapshot taken when no store was in flight any more, or the last one within `timeout_s`."""
    end = time.monotonic() + timeout_s
    before = counters(config)
    while time.monotonic() < end:
        time.sleep(0.2)
        after = counters(config)
        quiet = after["arena"]["slots"]["reserved"] == 0
        if quiet and after["counters"].get("commits") == before["counters"].get("commits"):
            return after
        before = after
    return before
