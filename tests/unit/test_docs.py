"""The docs are true: links resolve, generated pages are up to date, commands exist, and those that can be are run."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_shm.cli import app, doctor_engine
from lmcache_shm.config import OPTIONS
from tests.unit.docs_pages import (
    NEEDS,
    PAGES,
    ROOT,
    Block,
    anchors,
    links,
    shell_blocks,
    transfer_configs,
)

SERVER_SIZE = "0.0625"


def label(item: object) -> str:
    if isinstance(item, Path):
        return str(item.relative_to(ROOT))
    return item.where if isinstance(item, Block) else ""


# ----------------------------------------------------------------------------------------------- text
@pytest.mark.parametrize("page", PAGES, ids=label)
def test_links_resolve(page: Path):
    for target in links(page):
        if re.match(r"https?:|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(file), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_every_page_can_be_reached(page: Path):
    """From the README, or from a page that can be."""
    assert page in _reached()


def test_tests_that_the_docs_name_exist():
    named = {
        match
        for page in PAGES
        for match in re.findall(r"([\w/]+\.py)::(test_\w+)", page.read_text())
    }
    missing = [
        f"{file}::{test}"
        for file, test in sorted(named)
        if f"def {test}(" not in (ROOT / "tests" / file).read_text()
    ]

    assert len(named) > 70
    assert missing == []


def _reached() -> set[Path]:
    seen, ahead = set(), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        if page in seen or page.suffix != ".md" or not page.exists():
            continue
        seen.add(page)
        ahead += [
            (page.parent / target.partition("#")[0]).resolve()
            for target in links(page)
            if not target.startswith(("http", "#"))
        ]
    return seen


@pytest.mark.parametrize("module", ["tools.make_options", "tools.make_dashboard"])
def test_generated_pages_are_up_to_date(module: str):
    done = subprocess.run(
        [sys.executable, "-m", module, "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout


def test_options_that_the_text_names_exist():
    known = {option.connector for option in OPTIONS.values()} | {
        option.env for option in OPTIONS.values()
    }
    foreign = {"LMCACHE_SHM_"}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        named = set(re.findall(r'"(lmcache_shm\.[a-z_]+)"\s*:', text)) | set(
            re.findall(r"\bLMCACHE_SHM_[A-Z0-9_]+", text)
        )
        assert named - foreign <= known, page.name


def test_modules_that_the_architecture_names_exist():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`(?:lmcache_shm/)?(\w+/\w+\.py)`", text)

    assert len(named) > 10
    assert [name for name in named if not (ROOT / "lmcache_shm" / name).exists()] == []


def test_metrics_that_the_text_names_exist():
    from lmcache_shm.server.metrics import families
    from tests.unit.sample_snapshot import snapshot

    exist = {sample.name for family in families(snapshot()) for sample in family.samples}
    exist |= {family.name for family in families(snapshot())}
    text = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(lmcache_shm_[a-z_]+)", text))
    prefixes = {name for name in named if name.endswith("_")}

    assert named - prefixes <= exist
    assert all(any(name.startswith(prefix) for name in exist) for prefix in prefixes)


# -------------------------------------------------------------------------------------------- commands
SHELL_BLOCKS = shell_blocks()


@pytest.mark.parametrize("block", SHELL_BLOCKS, ids=label)
def test_a_command_is_run_or_says_what_it_needs(block: Block):
    kind, _, what = block.marker.partition(": ")
    if kind == "needs":
        assert what in NEEDS
    elif kind == "run by":
        assert (ROOT / what).exists()
    elif block.marker:
        assert kind == "not run", block.marker
    else:
        for words in block.commands():
            assert words[0] == "lmcache-shm", f"{block.where}: {words[0]} is not run by this test"


@pytest.mark.parametrize("block", SHELL_BLOCKS, ids=label)
def test_commands_of_ours_exist_with_their_options(block: Block):
    """Also of blocks that are not run."""
    import click

    for words in block.commands():
        if words[0] not in {"lmcache-shm", "./bin/lmcache-shm"}:
            continue
        command = app.load(words[1])
        settings = getattr(command, "context_settings", {})
        if settings.get("ignore_unknown_options"):
            continue
        flags = {
            flag
            for parameter in command.params
            for flag in (*parameter.opts, *parameter.secondary_opts)
        }
        given = {word.partition("=")[0] for word in words[2:] if word.startswith("-")}
        assert given <= flags | {"--help"}, block.where
    assert click


@pytest.mark.parametrize("block", SHELL_BLOCKS, ids=label)
def test_tools_and_scripts_exist_with_their_options(block: Block):
    for words in block.commands():
        if words[0].startswith("./"):
            assert os.access(ROOT / words[0], os.X_OK), block.where
        if words[:2] == ["python", "-m"] and words[2].startswith("tools."):
            source = (ROOT / f"{words[2].replace('.', '/')}.py").read_text(encoding="utf-8")
            for word in words[3:]:
                assert not word.startswith("--") or f'"{word}"' in source, f"{block.where}: {word}"


def test_recipes_of_the_justfile_name_what_exists():
    text = (ROOT / "Justfile").read_text(encoding="utf-8")
    scripts = set(re.findall(r"(?<!venv/)\bbin/[\w-]+", text))

    assert {"setup", "serve", "demo", "test", "lint", "bench", "top"} <= set(
        re.findall(r"^(\w+)(?: \*args)?:$", text, flags=re.MULTILINE)
    )
    assert len(scripts) == 4
    assert all((ROOT / script).exists() for script in scripts)
    assert set(re.findall(r"bin/lmcache-shm (\w+)", text)) <= set(app.COMMANDS)


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_transfer_configs_are_valid(page: Path):
    for where, text in transfer_configs(page):
        if "lmcache.integration" in text:  # LMCache's own, in the comparison
            continue
        found = [f for f in doctor_engine.transfer_config(text, {})[0] if f.level != "ok"]
        assert not found, where


# ------------------------------------------------------------------------------------------ run for real
class Sandbox:
    """An instance of the test's own in which the docs' commands run as they stand; sizes are made small."""

    def __init__(self, instance: str) -> None:
        self.environ = {
            **os.environ,
            "LMCACHE_SHM_INSTANCE": instance,
            "LMCACHE_SHM_L1_SIZE_GB": SERVER_SIZE,
            "COLUMNS": "100",
        }
        self.server: subprocess.Popen[str] | None = None

    def words(self, words: list[str]) -> list[str]:
        text = [sys.executable, "-m", "lmcache_shm", *words[1:]]
        for k, word in enumerate(text):
            if word == "--l1-size-gb":
                text[k + 1] = SERVER_SIZE
            if word == "--metrics-port":
                text[k + 1] = str(_free_port())
        return text

    def start(self, words: list[str]) -> None:
        self.stop()
        self.server = subprocess.Popen(
            self.words(words),
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self.server.stdout is not None
        said = ""
        while "vllm serve" not in said:
            line = self.server.stdout.readline()
            assert line, f"{words}: {said}"
            said += line

    def run(self, words: list[str]) -> subprocess.CompletedProcess[str]:
        if words[1] == "server":
            self.start(words)
            return subprocess.CompletedProcess(words, 0, "", "")
        if self.server is None:
            self.start(["lmcache-shm", "server"])
        done = subprocess.run(
            self.words(words),
            env=self.environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if words[1] == "stop":
            self.stop()
        return done

    def stop(self) -> None:
        if self.server is not None:
            with contextlib.suppress(OSError):
                self.server.send_signal(signal.SIGTERM)
            self.server.communicate(timeout=30)
            self.server = None


def _free_port() -> int:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture
def sandbox(instance: str) -> Iterator[Sandbox]:
    made = Sandbox(instance)
    yield made
    made.stop()


def _fresh_commands() -> dict[Path, list[tuple[str, list[str]]]]:
    """By page: (where, words) of what is to be run; what stands on several pages is run for the first."""
    seen: set[tuple[str, ...]] = set()
    found: dict[Path, list[tuple[str, list[str]]]] = {}
    for block in SHELL_BLOCKS:
        for words in block.commands() if block.runs else []:
            if tuple(words) not in seen:
                seen.add(tuple(words))
                found.setdefault(block.page, []).append((block.where, words))
    return found


COMMANDS = _fresh_commands()


@pytest.mark.parametrize("page", COMMANDS, ids=label)
def test_commands_of_a_page_work(page: Path, sandbox: Sandbox):
    """In their order, against a real server. doctor may find fault with this host, but says so properly."""
    for where, words in COMMANDS[page]:
        done = sandbox.run(words)
        good = {0, 1} if words[1] == "doctor" else {0}
        assert done.returncode in good, (
            f"{where}: {words}: {done.stdout[-300:]}{done.stderr[-300:]}"
        )
        assert "Traceback" not in done.stderr, where


def test_inline_commands_exist():
    """`lmcache-shm clear --all --yes` in running text: the command and its options are there."""
    for page in PAGES:
        for text in re.findall(r"`(lmcache-shm [a-z][^`\n]*)`", page.read_text(encoding="utf-8")):
            words = text.replace("…", "").replace("'", "").split()
            assert words[1] in app.COMMANDS, f"{page.name}: {text}"
            command = app.load(words[1])
            flags = {
                flag
                for parameter in command.params
                for flag in (*parameter.opts, *parameter.secondary_opts)
            }
            given = {word for word in words[2:] if word.startswith("--") and word != "--"}
            assert given <= flags | {"--help"}, f"{page.name}: {text}"


def test_the_readme_names_no_figure_without_a_source():
    """Speed belongs on the performance page, with its command and its machine."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")

    assert not re.findall(
        r"\d+(?:\.\d+)?\s?(?:GB/s|×)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    )


def test_the_picture_is_a_picture():
    text = (ROOT / "docs" / "img" / "top.svg").read_text(encoding="utf-8")

    assert text.lstrip().startswith("<svg")
    assert "lmcache-shm" in text.replace("&#160;", " ")
    assert json.dumps(text)
