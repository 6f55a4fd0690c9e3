"""Which prefix is usable: a pure function over what each object group holds.

C is the chunk size, n a hit of n chunks: the engine continues at token n·C. Per rule, a hit of n needs

    Full            all chunks beyond what the engine holds
    Window(W)       the chunks that intersect [n·C − W + 1, n·C)
    ChunkedLocal(A) the chunks that intersect [⌊n·C / A⌋·A, n·C)
    Recurrent       the state at n·C: chunk n − 1

of these only chunks that end beyond `local_tokens`, which the engine already holds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Full:
    """Every earlier token is attended to."""


@dataclass(frozen=True)
class Window:
    """Token t attends to (t − tokens, t]."""

    tokens: int


@dataclass(frozen=True)
class ChunkedLocal:
    """Token t attends to [⌊t / tokens⌋·tokens, t]."""

    tokens: int


@dataclass(frozen=True)
class Recurrent:
    """A state that summarises all earlier tokens."""


Rule = Full | Window | ChunkedLocal | Recurrent
Present = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


def rule_of(name: str, tokens: int) -> Rule:
    """The rule with this name and parameter on the wire. Raises ValueError when there is none."""
    match name:
        case "full":
            return Full()
        case "recurrent":
            return Recurrent()
        case "window" | "chunked_local":
            if tokens < 1:
                raise ValueError(f"{name} of {tokens} tokens")
            return Window(tokens) if name == "window" else ChunkedLocal(tokens)
    raise ValueError(f"unknown rule {name[:40]!r}")


def rule_words(rule: Rule) -> tuple[str, int]:
    """A rule as `rule_of` takes it: (name, parameter), e.g. "window", 128."""
    match rule:
        case Full():
            return "full", 0
        case Window(tokens):
            return "window", tokens
        case ChunkedLocal(tokens):
            return "chunked_local", tokens
        case Recurrent():
            return "recurrent", 0


def _first_needed(rule: Rule, chunk_size: int, n: Ints, local_tokens: int) -> Ints:
    """Number of the first chunk that each hit in `n` needs; n itself where it needs none."""
    end = n * chunk_size
    match rule:
        case Full():
            start = np.zeros_like(n)
        case Window(tokens):
            start = np.maximum(end - tokens + 1, 0) // chunk_size
        case ChunkedLocal(tokens):
            start = end // tokens * tokens // chunk_size
        case Recurrent():
            start = n - 1
    first: Ints = np.minimum(np.maximum(start, local_tokens // chunk_size), n)
    return first


def needed(rule: Rule, chunk_size: int, n: int, local_tokens: int) -> range:
    """Numbers of the chunks that must be loaded of a group for a hit of `n` chunks."""
    first = _first_needed(rule, chunk_size, np.array([n]), local_tokens)
    return range(int(first[0]), n)


def usable_chunks(
    chunk_size: int,
    num_tokens: int,
    local_tokens: int,
    rules: Sequence[Rule],
    present: Sequence[Present],
) -> int:
    """The largest usable n: local_tokens < n·C < num_tokens, every group has what n needs. Else 0.

    `present[g][i]`: group g has chunk i; arrays may differ in length; chunks beyond an array's end are absent.
    At least one token is always left to compute.
    """
    low = local_tokens // chunk_size + 1
    high = (num_tokens - 1) // chunk_size
    n = np.arange(low, high + 1)
    usable = np.ones(len(n), np.bool_)
    for rule, have in zip(rules, present, strict=True):
        usable &= _has(rule, chunk_size, n, local_tokens, have)
    found = np.flatnonzero(usable)
    return int(n[found[-1]]) if len(found) else 0


def _has(rule: Rule, chunk_size: int, n: Ints, local_tokens: int, have: Present) -> Present:
    """Whether a group has everything that each hit in `n` needs."""
    if not len(n):
        return np.zeros(0, np.bool_)
    end = int(n[-1])
    padded = np.zeros(end, np.bool_)
    padded[: len(have)] = have[:end]
    last_gap = np.maximum.accumulate(np.where(padded, -1, np.arange(end)))
    return last_gap[n - 1] < _first_needed(rule, chunk_size, n, local_tokens)
