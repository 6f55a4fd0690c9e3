"""Make a process kill or stop itself at a chosen call of a chosen function. Only in processes of this harness.

The product has no hooks: functions are wrapped by name while they are armed, so a renamed function makes a
test fail loudly instead of testing nothing. A strike is written down before it happens: a line in the file
that the environment variable FAULT_MARKS names, so that the harness knows that (and whom) it struck.
"""

import functools
import importlib
import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

AT_START = "FAULTS"
MARKS = "FAULT_MARKS"
LATER = "FAULT_FILE"
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}

_disarm: list[Callable[[], None]] = []


def spec(at: str, when: str = "before", nth: int = 1, do: str = "kill") -> dict[str, Any]:
    """A failpoint: at the nth call of "module:Class.method" from now, before or after it, do that."""
    return {"at": at, "when": when, "nth": nth, "do": do}


def install() -> None:
    """Arm what the environment asks for, and what FAULT_FILE holds whenever SIGUSR1 comes."""
    arm(json.loads(os.environ.get(AT_START, "null")))
    if LATER in os.environ:
        signal.signal(signal.SIGUSR1, _on_signal)


def _on_signal(_number: int, _frame: FrameType | None) -> None:
    arm(json.loads(Path(os.environ[LATER]).read_text()))


def arm(fault: dict[str, Any] | None) -> None:
    """Arm one failpoint instead of the one armed so far. Raises AttributeError for a name that is not there."""
    while _disarm:
        _disarm.pop()()
    if fault is None:
        return
    module, _, path = fault["at"].partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original = getattr(owner, name)
    calls = 0

    def strike(now: str) -> None:
        if now == fault["when"] and calls == fault["nth"]:
            with Path(os.environ[MARKS]).open("a", encoding="utf-8") as marks:
                marks.write(json.dumps(fault | {"pid": os.getpid()}) + "\n")
            # To this very thread: a stop sent to the process takes effect when its main thread runs next.
            signal.pthread_kill(threading.get_ident(), SIGNALS[fault["do"]])

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        strike("before")
        result = original(*args, **kwargs)
        strike("after")
        return result

    setattr(owner, name, wrapped)
    _disarm.append(lambda: setattr(owner, name, original))
