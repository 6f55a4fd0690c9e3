"""``lmcache-shm top``: what a running server does, live."""

import json
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Annotated, Any, Self

import typer
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live

from lmcache_shm.cli.app import CommandError
from lmcache_shm.cli.command import INSTANCE, connect, flags
from lmcache_shm.cli.top_tables import SORTS
from lmcache_shm.cli.top_view import History, View, frame, joined
from lmcache_shm.client.connection import Connection, ControlError
from lmcache_shm.client.reconnect import socket_path
from lmcache_shm.config import Config, server_config
from lmcache_shm.protocol.messages import Status, StatusReply

ANSWER_S = 2.0
"""A server that is silent for longer counts as lost; it is asked again at the next interval."""

Snapshot = Mapping[str, Any]


@flags(INSTANCE)
def top(
    *,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per interval, with rates.")
    ] = False,
    interval: Annotated[
        float, typer.Option(help="Seconds between frames.", min=0.1, max=3600)
    ] = 1.0,
    no_color: Annotated[bool, typer.Option("--no-color", help="No colours.")] = False,
    **given: Any,
) -> None:
    """Watch a running server. Keys: q quit, p pause, s sort, n namespace, h help.

    It waits for a server that is not there, and follows one that restarts.
    """
    config = server_config(given)
    source = Source(config)
    console = Console(no_color=no_color or None, highlight=False)
    try:
        if as_json:
            _stream(source, interval, once=once)
        elif once or not console.is_terminal:
            _print_once(source, console)
        else:
            _watch(source, console, interval)
    finally:
        source.close()


class Source:
    """Snapshots of one instance, over whatever server it has; dials again after a loss."""

    def __init__(self, config: Config) -> None:
        self.path = socket_path(config)
        self._connection: Connection | None = None

    def fetch(self) -> dict[str, Any]:
        """A snapshot. Raises ControlError when there is no answer; the next call tries anew."""
        try:
            if self._connection is None:
                self._connection = connect(self.path, "top", ANSWER_S)
            return self._connection.call(Status(), StatusReply).snapshot
        except ControlError:
            self.close()
            raise

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


# -------------------------------------------------------------------------------- without a terminal
def _print_once(source: Source, console: Console) -> None:
    try:
        snapshot = source.fetch()
    except ControlError as error:
        raise CommandError(f"{error} (lmcache-shm doctor tells why)") from None
    history = History()
    history.add(time.monotonic(), snapshot)
    view = View(console.width, 0, colour=_coloured(console), ascii=_is_ascii(console), keys=False)
    console.print(joined(frame(snapshot, history, view)), soft_wrap=True)


def _stream(source: Source, interval: float, *, once: bool) -> None:
    """JSON lines; where no server answers, ``{"error": …}`` in its place."""
    history = History()
    while True:
        try:
            snapshot = source.fetch()
        except ControlError as error:
            if once:
                raise CommandError(str(error)) from None
            line = {"time": time.time(), "error": str(error)}
        else:
            history.add(time.monotonic(), snapshot)
            line = {"time": time.time(), "rates": rates(history, interval), **snapshot}
        print(json.dumps(line, default=str), flush=True)
        if once:
            return
        time.sleep(interval)


RATES = {
    "loaded_bytes_per_s": "bytes_acquired",
    "loaded_tokens_per_s": "hit_tokens",
    "stored_bytes_per_s": "bytes_committed",
    "stored_tokens_per_s": "tokens_committed",
    "looked_up_tokens_per_s": "query_tokens",
    "evictions_per_s": "evictions",
}


def rates(history: History, over_s: float) -> dict[str, float | None]:
    """Per second over the last `over_s`; None before there is a second snapshot."""
    found = {name: history.rate(counter, over_s) for name, counter in RATES.items()}
    return {**found, "hit_rate": history.ratio("hit_tokens", "query_tokens", over_s)}


# ------------------------------------------------------------------------------------ with a terminal
@dataclass
class Screen:
    """What is shown, as a renderable: drawn for the size that the terminal has at that moment."""

    colour: bool
    ascii: bool
    snapshot: Snapshot | None = None
    history: History = field(default_factory=History)
    view: View = field(default_factory=View)
    waiting: str = ""
    shown: Snapshot | None = None
    """The snapshot at which it was paused."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.max_width, options.height or console.height
        if self.snapshot is None:
            yield f"{self.waiting}\nWaiting for it; q to quit."[: width * height]
            return
        view = replace(self.view, width=width, height=height, colour=self.colour, ascii=self.ascii)
        yield joined(frame(self.shown or self.snapshot, self.history, view))

    def press(self, letter: str) -> bool:
        """Act on a key; False: quit."""
        view = self.view
        if letter in {"q", "Q", "\x03", "\x04"}:
            return False
        if letter in {"p", " "}:
            paused = not view.paused
            self.shown = self.snapshot if paused else None
            self.view = replace(view, paused=paused)
        elif letter == "s":
            following = SORTS[(SORTS.index(view.sort) + 1) % len(SORTS)]
            self.view = replace(view, sort=following)
        elif letter == "n" and self.snapshot is not None:
            known = [None, *sorted(n["id"] for n in self.snapshot["namespaces"])]
            at = known.index(view.namespace) if view.namespace in known else 0
            self.view = replace(view, namespace=known[(at + 1) % len(known)])
        elif letter == "a":
            self.view = replace(view, namespace=None)
        elif letter in {"h", "?"}:
            self.view = replace(view, help=not view.help)
        return True

    def take(self, now: float, fetch: Callable[[], dict[str, Any]]) -> None:
        """Get a snapshot; a failure is shown, with the last one kept."""
        try:
            self.snapshot = fetch()
        except ControlError as error:
            self.waiting = str(error)
            since = self.view.lost_s if self.view.lost_s is not None else 0.0
            self.view = replace(self.view, lost_s=since)
        else:
            self.history.add(now, self.snapshot)
            self.view = replace(self.view, lost_s=None)
            if self.view.namespace not in {n["id"] for n in self.snapshot["namespaces"]}:
                self.view = replace(self.view, namespace=None)


def _watch(source: Source, console: Console, interval: float) -> None:
    screen = Screen(_coloured(console), _is_ascii(console))
    lost_at: float | None = None
    with (
        Keyboard() as keyboard,
        Live(screen, console=console, screen=True, auto_refresh=False) as live,
    ):
        due = time.monotonic()
        while True:
            now = time.monotonic()
            if now >= due:
                screen.take(now, source.fetch)
                due = max(due + interval, now)
                if screen.view.lost_s is None:
                    lost_at = None
                elif lost_at is None:
                    lost_at = now
            if lost_at is not None:
                screen.view = replace(screen.view, lost_s=now - lost_at)
            live.refresh()
            for letter in keyboard.wait(due - time.monotonic()):
                if not screen.press(letter):
                    return


class Keyboard:
    """Single keys from the terminal, without echo; also wakes up when the terminal's size changes."""

    def __init__(self) -> None:
        self._fd = sys.stdin.fileno() if sys.stdin.isatty() else -1
        self._before: list[Any] = []
        self._wake_out, self._wake_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def __enter__(self) -> Self:
        if self._fd >= 0:
            self._before = termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd)
        signal.signal(signal.SIGWINCH, lambda *_: os.write(self._wake_in, b"\0"))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGWINCH, signal.SIG_DFL)
        if self._fd >= 0:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._before)
        os.close(self._wake_out)
        os.close(self._wake_in)

    def wait(self, seconds: float) -> str:
        """Keys pressed until now, "" after `seconds` or a resize. The end of input reads as q."""
        fds = [self._wake_out] + ([self._fd] if self._fd >= 0 else [])
        ready, _, _ = select.select(fds, [], [], max(seconds, 0))
        if self._wake_out in ready:
            os.read(self._wake_out, 64)
        if self._fd in ready:
            data = os.read(self._fd, 64)
            # An arrow or function key is a sequence that begins with ESC: none of ours.
            return "q" if not data else "" if data[0] == 0x1B else data.decode("latin-1")
        return ""


def _coloured(console: Console) -> bool:
    return console.color_system is not None and not console.no_color


def _is_ascii(console: Console) -> bool:
    return not console.encoding.lower().startswith("utf")
