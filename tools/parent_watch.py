"""For child processes: end when the process that started this one is gone, however it went.

The parent holds the other end of the standard input; when nobody does any more, the kernel says so. (A parent-death
signal would come when the *thread* that started us ends, and is lost when the parent is gone before we ask for it.)
"""

import os
import select
import signal
import threading
import time
from collections.abc import Callable


def on_parents_end(act: Callable[[], None]) -> None:
    """Call `act` in a thread once nobody holds the other end of stdin (a pipe), which is not read here."""

    def wait() -> None:
        poll = select.poll()
        poll.register(0, select.POLLHUP)
        poll.poll()
        act()

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()


def terminate_in_order() -> None:
    """SIGTERM to this process as soon as it has a handler for it (before, it could not tidy up), SIGKILL after 20 s."""
    deadline = time.monotonic() + 20.0
    while signal.getsignal(signal.SIGTERM) == signal.SIG_DFL and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(max(0.0, deadline - time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)
