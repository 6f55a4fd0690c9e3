"""A real `vllm serve` of a tiny model: API server, EngineCore and workers as processes of their own."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tools.server_process import Server
from tools.tiny_models import load
from tools.tiny_models.process import collective_segments


class NotServedError(RuntimeError):
    """A request was refused or cut off, or `vllm serve` did not start; the message has what is known."""


@dataclass(frozen=True)
class Answer:
    """One completion. `cached`: prompt tokens that were not computed; `logprobs`: of the chosen tokens."""

    text: str
    logprobs: list[float]
    cached: int

    def difference(self, other: "Answer") -> float:
        """Largest difference of a logprob; infinite when the tokens differ."""
        if self.text != other.text:
            return math.inf
        return max(abs(a - b) for a, b in zip(self.logprobs, other.logprobs, strict=True))


class Deployment:
    """Started and healthy once it is made. A context manager; `close` ends it with all that it left."""

    def __init__(
        self, server: Server, family: str, *flags: str, start_s: float = 240.0, **env: str
    ) -> None:
        """`flags` and `env` go to `vllm serve`, which uses that cache server. Raises NotServedError."""
        port = free_port()
        self.server = server
        self.url = f"http://127.0.0.1:{port}"
        self._folder = tempfile.TemporaryDirectory(prefix="deployed-")
        self.log = Path(self._folder.name) / "vllm.log"
        command = [
            sys.executable, "-m", "tools.tiny_models.serve", family, "--port", str(port),
            "--host", "127.0.0.1", "--kv-transfer-config", json.dumps(server.connector() | {"engine_id": "ours"}), *flags,
        ]  # fmt: skip
        folder = self._folder.name
        variables = {"TINY_MODELS_FOLDER": folder, "VLLM_RPC_BASE_PATH": folder} | env
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                env=load(family).environment(VLLM_SERVER_DEV_MODE="1", **variables),
                start_new_session=True,
            )
        self._between_ranks: set[Path] = set()
        try:
            self._wait_healthy(start_s)
            self._between_ranks = collective_segments(self.process.pid)
        except BaseException:
            self.close()
            raise

    def _wait_healthy(self, start_s: float) -> None:
        end = time.monotonic() + start_s
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (OSError, urllib.error.URLError):
                if self.process.poll() is not None or time.monotonic() > end:
                    raise NotServedError(f"vllm serve did not start\n{self.log_tail()}") from None
                time.sleep(0.2)

    def log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    def post(self, path: str, body: Any = None, timeout_s: float = 60.0) -> bytes:
        """The reply. Raises NotServedError when it is refused, or cut off."""
        data = b"" if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"Content-Type": "application/json"}, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as reply:
                return bytes(reply.read())
        except urllib.error.HTTPError as error:
            with error:
                raise NotServedError(f"{path}: {error.code} {error.read()!r}") from None
        except OSError as error:
            raise NotServedError(f"{path}: {error}") from None

    def complete(self, prompt: list[int], max_tokens: int = 1) -> Answer:
        """A greedy completion. Raises NotServedError."""
        asked = {"prompt": prompt, "max_tokens": max_tokens, "min_tokens": max_tokens}
        reply = self.post(
            "/v1/completions", asked | {"temperature": 0, "ignore_eos": True, "logprobs": 1}
        )
        said = json.loads(reply)
        (choice,) = said["choices"]
        details = said["usage"].get("prompt_tokens_details") or {}
        return Answer(
            choice["text"], choice["logprobs"]["token_logprobs"], details.get("cached_tokens") or 0
        )

    def reset(self) -> None:
        """Empty vLLM's own prefix cache."""
        self.post("/reset_prefix_cache")

    def processes(self) -> list[int]:
        """Pids of its session that still run: the API server's, EngineCore's, workers', helpers'."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and os.getsid(int(entry.name)) == self.process.pid:
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                    found += [int(entry.name)] if state not in "ZX" else []
            except OSError:
                continue
        return found

    def close(self) -> None:
        """SIGTERM, then SIGKILL to whatever is left of its session. Idempotent."""
        left = self._between_ranks | collective_segments(self.process.pid)
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        self._folder.cleanup()
        for segment in left:
            segment.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
