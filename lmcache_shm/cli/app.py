"""The command line's entry: a table of commands, each imported only when it is asked for.

A command is a function with typer's annotations, or a Typer application, named ``module:object`` below.
Bad input of any kind ends in one line on stderr and an exit status of 2; a refusal or failure that a
command knows (CommandError) in one line and status 1.
"""

import difflib
import importlib
import os
import sys
from typing import Any, NoReturn

from lmcache_shm import __version__

NAME = "lmcache-shm"

# name → (where it is, what it does). In the order of the help.
COMMANDS: dict[str, tuple[str, str]] = {
    "server": ("lmcache_shm.cli.server:server", "Run a cache server: create or adopt an arena, and serve."),
    "top": ("lmcache_shm.cli.top:top", "Watch a running server: hit rates, occupancy, clients, events."),
    "status": ("lmcache_shm.cli.admin:status", "Show what a server holds and what it has done."),
    "ls": ("lmcache_shm.cli.contents:ls", "List what is cached, as a tree of prefixes."),
    "inspect": ("lmcache_shm.cli.contents:inspect", "Show one cached chunk: where it is, its token ids or text."),
    "clear": ("lmcache_shm.cli.admin:clear", "Forget a namespace, a cache salt, or everything."),
    "check": ("lmcache_shm.cli.admin:check", "Prove that the arena and its slot table are consistent."),
    "purge": ("lmcache_shm.cli.admin:purge", "Remove what dead servers left behind."),
    "config": ("lmcache_shm.cli.admin:config", "Show every option, its value, and where it comes from."),
    "stop": ("lmcache_shm.cli.admin:stop", "End a running server, after it has drained."),
    "doctor": ("lmcache_shm.cli.doctor:doctor", "Find out why the cache does nothing, and how to fix it."),
    "probe": ("lmcache_shm.cli.probe:probe", "Find a model's cache groups and chunk sizes, without weights."),
    "bench": ("lmcache_shm.cli.bench:bench", "Measure this machine's limits, and the cache against them."),
    "verify": ("lmcache_shm.cli.verify:verify", "Compare a deployment's answers with and without the cache."),
}  # fmt: skip


class CommandError(Exception):
    """A failure that is one line for the user; `status` is the exit status."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


def main(arguments: list[str] | None = None) -> NoReturn:
    """The console script. Always ends in SystemExit."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        status = _dispatch(words)
        sys.stdout.flush()
    except BrokenPipeError:  # e.g. `lmcache-shm ls | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        status = 0
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)


def _dispatch(words: list[str]) -> int:
    if _completing(words):
        return _run(_group(), words)
    if not words or words[0] in {"--help", "-h", "help"}:
        print(_help())
        return 0 if words else 2
    if words[0] in {"--version", "-V"}:
        print(f"{NAME} {__version__}")
        return 0
    if words[0] not in COMMANDS:
        known = [*COMMANDS, "--help", "--version", "--install-completion", "--show-completion"]
        near = difflib.get_close_matches(words[0], known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"{NAME} --help lists the commands"
        return _complain(f"no command {words[0]!r}; {hint}", 2)
    try:
        command = load(words[0])
    except ModuleNotFoundError as error:
        return _complain(_missing(words[0], error), 1)
    return _run(command, words[1:], f"{NAME} {words[0]}")


def load(name: str) -> Any:
    """The click command of this name; a module's NAME_CONTEXT are its click context settings. Raises ModuleNotFoundError when its module, or one it needs, is missing."""
    import typer  # noqa: PLC0415  (a quarter of a second that --help does not need)

    module, _, attribute = COMMANDS[name][0].partition(":")
    source = importlib.import_module(module)
    target = getattr(source, attribute)
    if not isinstance(target, typer.Typer):
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        settings = {
            "help_option_names": ["-h", "--help"],
            **getattr(source, f"{name.upper()}_CONTEXT", {}),
        }
        app.command(name, context_settings=settings)(target)
        target = app
    return typer.main.get_command(target)


def _run(command: Any, words: list[str], shown_as: str = NAME) -> int:
    """Run a click command; its exit status."""
    from lmcache_shm.arena.errors import ArenaError  # noqa: PLC0415
    from lmcache_shm.config import ConfigError  # noqa: PLC0415

    try:
        result = command.main(args=words, prog_name=shown_as, standalone_mode=False)
    except ConfigError as error:
        return _complain(str(error), 2)
    except CommandError as error:
        return _complain(str(error), error.status)
    except ArenaError as error:
        return _complain(str(error), 1)
    except BrokenPipeError:
        raise
    except OSError as error:  # a file or a directory that this user may not read, write or enter
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        return _complain(what, 1)
    except Exception as error:
        # typer brings its own click or uses the installed one: recognised by shape, not by class.
        if hasattr(error, "format_message"):
            text = " ".join(error.format_message().split())
            return _complain(f"{text.rstrip('.')} ({shown_as} --help)", 2)
        if type(error).__name__ == "Abort":
            return _complain("not done", 1)
        raise
    return result if isinstance(result, int) else 0


def _complain(line: str, status: int) -> int:
    print(f"{NAME}: {line}", file=sys.stderr)
    return status


def _missing(name: str, error: ModuleNotFoundError) -> str:
    if (error.name or "").startswith("lmcache_shm"):
        return f"{name} is not part of this installation ({error.name} is missing)"
    extra = "verify" if name == "verify" else "vllm"
    return (
        f"{name} needs the package {error.name}, which is not installed here; "
        f"pip install 'lmcache-shm[{extra}]'"
    )


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join([
        f"Usage: {NAME} COMMAND [OPTIONS]",
        "",
        "A KV cache for vLLM in this host's shared memory.",
        "",
        "Commands:",
        *lines,
        "",
        f"{NAME} COMMAND --help lists a command's options. {NAME} --install-completion adds them to your shell.",
    ])  # fmt: skip


# ------------------------------------------------------------------------------ shell completion
def _completing(words: list[str]) -> bool:
    return "_LMCACHE_SHM_COMPLETE" in os.environ or bool(
        words and words[0].partition("=")[0] in {"--install-completion", "--show-completion"}
    )


def _group() -> Any:
    """All commands as one click group, which is what shells ask for completions; imported one by one."""
    import typer  # noqa: PLC0415
    from typer.core import TyperGroup  # noqa: PLC0415

    class Lazy(TyperGroup):
        def list_commands(self, ctx: Any) -> list[str]:
            return list(COMMANDS)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            try:
                return load(cmd_name) if cmd_name in COMMANDS else None
            except ModuleNotFoundError:
                return None

    app = typer.Typer(cls=Lazy, add_completion=True, rich_markup_mode=None)
    app.callback()(lambda: None)
    return typer.main.get_command(app)
