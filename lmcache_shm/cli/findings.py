"""What `doctor` finds: a sentence, how bad it is, and the command that mends it."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """`area` groups findings for people; `remedy` is what to type or do, "" when there is nothing to mend."""

    area: str
    level: Level
    text: str
    remedy: str = ""


def ok(area: str, text: str) -> Finding:
    return Finding(area, "ok", text)


def note(area: str, text: str, remedy: str = "") -> Finding:
    return Finding(area, "note", text, remedy)


def problem(area: str, text: str, remedy: str) -> Finding:
    return Finding(area, "problem", text, remedy)
