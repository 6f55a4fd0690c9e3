"""The near end of a simulated engine: starts engine.py, gives it orders, reads its answers."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any


def state_of(pid: int) -> str:
    """The process's state letter; "" when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


class EngineProcess:
    """engine.py in a process of its own."""

    def __init__(self, options: dict[str, Any], environment: dict[str, str]) -> None:
        self.options = {"world": 2, "replicas": 1} | options
        self.counts: Counter[str] = Counter()
        self.workers: list[int] = []
        self.asked = 0
        """Orders that are not answered yet."""
        self.reply: dict[str, Any] = {}
        self._buffer = b""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tools.harness.engine", json.dumps(self.options)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | environment, bufsize=0,
        )  # fmt: skip

    @property
    def fd(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def tell(self, **order: Any) -> None:
        assert self.process.stdin is not None
        self.asked += 1
        try:
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
        except OSError:
            pass  # it is dead; the answer will not come either

    def receive(self) -> bool:
        """Take what it has answered, without waiting for more than one piece; False at its end."""
        piece = os.read(self.fd, 65536)
        if not piece:
            self.asked = 0
            self.process.wait()  # its pipe is closed: it has ended, or is just about to
            return False
        *lines, self._buffer = (self._buffer + piece).split(b"\n")
        for line in lines:
            self.reply = json.loads(line)
            self.counts = Counter(self.reply["counts"])
            self.workers = self.reply["workers"]
            self.asked -= 1
        return True

    def answer(self, seconds: float = 60.0) -> dict[str, Any]:
        """The answer to all orders given so far; {} when the engine has ended."""
        end = time.monotonic() + seconds
        while self.asked:
            ready, _, _ = select.select([self.fd], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"engine {self.options['engine_id']} does not answer"
            if not self.receive():
                return {}
        return self.reply

    def ask(self, **order: Any) -> dict[str, Any]:
        self.tell(**order)
        return self.answer()

    def end(self, number: int = 0) -> None:
        """Ask it to quit, or send a signal; wait."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if number:
            self.process.send_signal(number)
        else:
            self.tell(quit=True)
        try:
            self.process.stdin.close()
        except OSError:
            pass
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        self.process.stdout.close()
