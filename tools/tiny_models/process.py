"""An engine in a process of its own: started, asked, and ended without a trace."""

import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from . import zygote
from .family import load, python


class EngineError(RuntimeError):
    """The engine process answered with an error, died, or fell silent; the message has the end of its log."""


@dataclass(frozen=True)
class Output:
    """What one prompt gave. `local` and `external` are prompt tokens from vLLM's cache and from the connector."""

    prompt_tokens: int
    tokens: list[int]
    logprobs: list[dict[str, float]]
    local: int
    external: int
    ttft_s: float

    def difference(self, other: "Output") -> float:
        """Largest difference of a logprob, while both chose the same tokens; infinite when the tokens differ."""
        if self.tokens != other.tokens:
            return float("inf")
        worst = 0.0
        for mine, theirs in zip(self.logprobs, other.logprobs, strict=True):
            shared = mine.keys() & theirs.keys()
            worst = max(worst, *(abs(mine[key] - theirs[key]) for key in shared))
        return worst


class Engine:
    """One vLLM engine process with a tiny model. A context manager; `close` ends it."""

    def __init__(
        self,
        family: str,
        *,
        connector: dict[str, Any] | None = None,
        engine: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
        folder: Path | None = None,
        model: Path | None = None,
        start_s: float = 240.0,
    ) -> None:
        """Start it and wait until it is ready.

        `connector` is a vLLM kv_transfer_config or None; `engine` overrides engine arguments; `env` adds variables;
        `model` is a folder for the model's own, shared by engines that are to be of one model (else one of its own).
        Raises EngineError with vLLM's reason.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="tiny-models-", dir=folder)
        self.log = Path(self._folder.name) / "engine.log"
        args = dict(engine or {})
        if connector is not None:
            args["kv_transfer_config"] = connector
        options = {"family": family, "folder": self._folder.name, "engine": args}
        options["model"] = str(model or self._folder.name)
        variables = {
            "VLLM_RPC_BASE_PATH": self._folder.name
        }  # sockets that vLLM itself leaves behind
        environment = load(family).environment(**variables, **(env or {}))
        with self.log.open("wb") as log:
            self._process = started(json.dumps(options), environment, log.fileno())
        self._pending = b""
        self._selector = selectors.DefaultSelector()
        if self._process.stdout is None or self._process.stdin is None:
            raise EngineError("no pipes")
        os.set_blocking(self._process.stdout.fileno(), False)
        self._selector.register(self._process.stdout, selectors.EVENT_READ)
        try:
            self.info: dict[str, Any] = self._read(start_s)["ready"]
        except BaseException:
            self.close(ask=False)
            raise

    @property
    def pid(self) -> int:
        """The engine's process id."""
        return self._process.pid

    def log_tail(self, lines: int = 30) -> str:
        """The end of what the process printed."""
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        except OSError:
            return "(no log)"

    def _read(self, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._pending:
            if not self._selector.select(max(0.0, deadline - time.monotonic())):
                raise EngineError(f"no answer in {timeout_s:.0f} s\n{self.log_tail()}")
            piece = os.read(self._process.stdout.fileno(), 1 << 20)  # type: ignore[union-attr]
            if not piece:
                raise EngineError(f"the engine process ended\n{self.log_tail()}")
            self._pending += piece
        line, _, self._pending = self._pending.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineError(f"{answer['error']}\n{self.log_tail(12)}")
        return answer

    def send(self, op: str, **fields: Any) -> None:
        """Ask without waiting (then call `receive`)."""
        if self._process.stdin is None:
            raise EngineError("closed")
        self._process.stdin.write(json.dumps({"op": op, **fields}).encode() + b"\n")
        self._process.stdin.flush()

    def receive(self, timeout_s: float = 300.0) -> Any:
        """The answer to the oldest `send`."""
        return self._read(timeout_s)["ok"]

    def ask(self, op: str, timeout_s: float = 300.0, **fields: Any) -> Any:
        """One operation of `runner.Runner`."""
        self.send(op, **fields)
        return self.receive(timeout_s)

    def generate(
        self, prompts: list[list[int]], *, timeout_s: float = 600.0, **options: Any
    ) -> list[Output]:
        """Greedy outputs; options as in `runner.Runner.generate`."""
        return [
            Output(**result)
            for result in self.ask("generate", timeout_s, prompts=prompts, **options)
        ]

    def reset(self, *, external: bool = False) -> bool:
        """Empty vLLM's own prefix cache."""
        return bool(self.ask("reset", external=external))

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self, *, ask: bool = True) -> None:
        """End the process (asked first if `ask`, killed after 20 s) and remove what it leaves. Idempotent."""
        left = collective_segments(self._process.pid)
        if ask:
            try:
                self.send("exit")
                self._process.wait(20)
            except (OSError, EngineError, subprocess.TimeoutExpired):
                pass
        try:
            os.killpg(self._process.pid, signal.SIGKILL)  # whatever is left of its session
        except ProcessLookupError:
            pass
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    pass
        self._selector.close()
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
        self.close(ask=error is None)


def started(
    argument: str, environment: dict[str, str], log: int
) -> zygote.Forked | subprocess.Popen[bytes]:
    """A process of `runner` in a session of its own: its helpers are ended with it, and Ctrl-C reaches only the caller."""
    zygotes = zygote.current()
    forked = zygotes.fork(argument, environment, log) if zygotes else None
    if forked is not None:
        return forked
    return subprocess.Popen(
        [python(), "-m", "tools.tiny_models.runner", argument],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        env=environment,
        start_new_session=True,
    )


BETWEEN_RANKS = ("/dev/shm/vllm_dist_", "/dev/shm/psm_")


def collective_segments(session: int) -> set[Path]:
    """Shared memory between vLLM's ranks in that session: its CPU collectives leave theirs behind, and a killed
    engine its message queues, too."""
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.getsid(int(entry.name)) == session:
                maps = (entry / "maps").read_text().split()
                found.update(Path(word) for word in maps if word.startswith(BETWEEN_RANKS))
        except OSError:
            continue
    return found
