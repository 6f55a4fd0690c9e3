"""What a prefix produces: request-independent content for every token of every layer.

``h[p]`` is a 64-bit hash over the identity (salt, adapter) and tokens 0…p. A page holds words that are a
function of (layer, h): attention keeps ``h[p]`` for its tokens, a compressing layer the h of a state's
last token, a recurrent layer the h of the last token that went in. So two blocks are equal exactly when
they belong to the same prefix, position and layer, and any mix-up is an unequal word.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
_MASK = (1 << 64) - 1
_P, _Q = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03
MULTIPLIER = np.uint64(0xBF58476D1CE4E5B9)
VOCAB = 97


def _mix(h: int, token: int) -> int:
    h = ((h ^ (token + 1)) * _P + _Q) & _MASK
    return h ^ (h >> 29)


def start(identity: tuple[str | None, str | None]) -> int:
    """The hash before the first token, of (cache salt, adapter)."""
    h = 0x243F6A8885A308D3
    for part in identity:
        for byte in (part or "\x00").encode() + b"\xff":
            h = _mix(h, byte)
    return h


def chain(h: int, tokens: Iterable[int]) -> list[int]:
    """Hashes after each of the tokens."""
    out = []
    for token in tokens:
        h = _mix(h, token)
        out.append(h)
    return out


def next_token(h: int) -> int:
    """What a model says after that prefix."""
    return (h >> 33) % VOCAB


class Stream:
    """The tokens of one request as the worker knows them, with their hashes."""

    def __init__(self, identity: tuple[str | None, str | None], tokens: Sequence[int]) -> None:
        self.identity = identity
        self.tokens: list[int] = []
        self._last = [start(identity)]
        self._array = np.zeros(64, np.uint64)
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        tokens = list(tokens)
        hashes = chain(self._last[-1], tokens)
        n = len(self.tokens)
        self.tokens += tokens
        self._last += hashes
        while len(self.tokens) > len(self._array):
            self._array = np.concatenate([self._array, np.zeros_like(self._array)])
        self._array[n : len(self.tokens)] = hashes

    def reset(self, tokens: Sequence[int]) -> None:
        """Agree with what the scheduler says; the common part stays."""
        keep = len(self.tokens)
        if list(tokens[:keep]) != self.tokens:
            keep = next(
                i
                for i, (a, b) in enumerate(zip([*tokens, -1], [*self.tokens, -2], strict=False))
                if a != b
            )
            del self.tokens[keep:]
            del self._last[keep + 1 :]
        self.extend(tokens[keep:])

    def after(self, n: int) -> int:
        """Hash after the first n tokens."""
        return self._last[n]

    @property
    def h(self) -> U64:
        return self._array[: len(self.tokens)]

    def with_drafts(self, drafts: Sequence[int]) -> U64:
        if not drafts:
            return self.h
        return np.concatenate([self.h, np.array(chain(self._last[-1], drafts), np.uint64)])


def generate(identity: tuple[str | None, str | None], prompt: Sequence[int], n: int) -> list[int]:
    """The n tokens that follow a prompt, computed without any cache."""
    h = chain(start(identity), prompt)[-1]
    out: list[int] = []
    for _ in range(n):
        out.append(next_token(h))
        h = _mix(h, out[-1])
    return out
