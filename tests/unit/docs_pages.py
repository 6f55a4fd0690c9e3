"""The docs as data: pages, links, headings, and command blocks with what they need."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
SHELLS = {"bash", "sh", "console"}
# What a block may need that a test has not: it is then only checked, not run.
NEEDS = {"GPU", "a model", "network", "root", "docker", "kubernetes"}


@dataclass(frozen=True)
class Block:
    """A fenced block; `marker` is the comment on the line before it."""

    page: Path
    line: int
    language: str
    marker: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def runs(self) -> bool:
        return not self.marker

    def commands(self) -> list[list[str]]:
        """Words of each command; comments and continuations are gone."""
        text = re.sub(r"\\\n\s*", " ", self.text)
        lines = [line for line in _logical(text) if line and not line.startswith("#")]
        return [shlex.split(line, comments=True) for line in lines]


def _logical(text: str) -> Iterator[str]:
    """Lines, where a quoted text may go over several of them."""
    held = ""
    for line in text.splitlines():
        held = f"{held} {line.strip()}" if held else line.strip()
        if held.count("'") % 2 == 0:
            yield held
            held = ""
    if held:
        yield held


def blocks(page: Path) -> list[Block]:
    found, lines = [], page.read_text(encoding="utf-8").splitlines()
    start = None
    for number, line in enumerate(lines):
        fence = re.fullmatch(r"(\s*)```(\w*)", line)
        if fence and start is None:
            start = number, fence[2], fence[1]
        elif start is not None and line.strip() == "```":
            first, language, indent = start
            marker = re.fullmatch(r"\s*<!-- (.+) -->", lines[first - 1]) if first else None
            body = "\n".join(text.removeprefix(indent) for text in lines[first + 1 : number])
            found.append(Block(page, first + 1, language, marker[1] if marker else "", body))
            start = None
    assert start is None, f"{page}: a block that does not end"
    return found


def shell_blocks() -> list[Block]:
    return [block for page in PAGES for block in blocks(page) if block.language in SHELLS]


def links(page: Path) -> list[str]:
    """Targets of links and pictures, outside of code."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    text = re.sub(r"`[^`]*`", "", text)
    return re.findall(r"\]\(([^)\s]+)\)", text)


def anchors(page: Path) -> set[str]:
    """Anchors of the headings, as forges make them."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE):
        plain = re.sub(r"[^\w\s-]", "", heading.lower())
        found.add(re.sub(r"\s", "-", plain.strip()))
    return found


def transfer_configs(page: Path) -> list[tuple[str, str]]:
    """(where, JSON) of each complete --kv-transfer-config in shell blocks and deployment files."""
    found = []
    for block in blocks(page):
        for words in block.commands() if block.language in SHELLS else []:
            found += [
                (block.where, words[k + 1])
                for k, word in enumerate(words[:-1])
                if word == "--kv-transfer-config"
            ]
    return found
