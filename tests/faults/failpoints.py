"""Make a process kill or stop itself at a chosen call of a chosen function. Only in processes of this harness.

The environment variable FAULTS holds a JSON list of ``{"at": "module:Class.method", "when": "before" |
"after", "nth": 3, "do": "kill" | "stop"}``. The product has no hooks: functions are wrapped by name, so a
renamed function makes the test fail loudly instead of testing nothing.
"""

import functools
import importlib
import json
import os
import signal
from typing import Any

VARIABLE = "FAULTS"
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def spec(at: str, when: str = "before", nth: int = 1, do: str = "kill") -> str:
    """The value of FAULTS for one failpoint."""
    return json.dumps([{"at": at, "when": when, "nth": nth, "do": do}])


def install() -> None:
    """Arm what FAULTS asks for. Raises AttributeError for a name that does not exist."""
    for one in json.loads(os.environ.get(VARIABLE, "[]")):
        _arm(**one)


def _arm(at: str, when: str, nth: int, do: str) -> None:
    module, _, path = at.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original = getattr(owner, name)
    calls = 0

    def strike(now: str) -> None:
        if now == when and calls == nth:
            os.kill(os.getpid(), SIGNALS[do])

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        strike("before")
        result = original(*args, **kwargs)
        strike("after")
        return result

    setattr(owner, name, wrapped)
