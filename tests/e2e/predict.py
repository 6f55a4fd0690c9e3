"""What the arena must hold and give, worked out from the rules alone: no code of the product is used here.

A chunk of a token sequence is named by the whole prefix up to its end. Everything that an engine computes is
stored, once per rule; a hit of n chunks needs, by rule:

    full         every chunk that the engine does not hold itself
    window W     those chunks that reach into the last W − 1 tokens before n·C, as far as the engine lacks them
    chunked A    those that reach into the attention chunk of A tokens that token n·C is in
    recurrent    chunk n (its slot is the state after n·C tokens)
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

Prefix = tuple[int, ...]


@dataclass(frozen=True)
class Rule:
    """How one object group is found. kind: "full", "window", "chunked" or "recurrent"."""

    kind: str
    tokens: int = 0

    def needs(self, chunk: int, n: int, size: int) -> bool:
        """Whether a hit of n chunks needs this chunk (0 is the first), were nothing held locally."""
        end = (chunk + 1) * size
        if self.kind == "recurrent":
            return chunk == n - 1
        if self.kind == "window":
            return end > n * size - self.tokens + 1
        if self.kind == "chunked":
            return end > n * size // self.tokens * self.tokens
        return True


@dataclass
class World:
    """The arena as it should be."""

    size: int  # tokens per chunk
    rules: list[Rule]
    stored: list[set[Prefix]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.stored = [set() for _ in self.rules]

    def chunks(self, tokens: Sequence[int]) -> list[Prefix]:
        return [tuple(tokens[:end]) for end in range(self.size, len(tokens) + 1, self.size)]

    def computed(self, tokens: Sequence[int]) -> None:
        """An engine computed all of these tokens."""
        for group in self.stored:
            group.update(self.chunks(tokens))

    def count(self) -> list[int]:
        """Stored chunks by rule."""
        return [len(group) for group in self.stored]

    def hit(self, prompt: Sequence[int], local: int = 0) -> int:
        """Tokens that the connector must bring for this prompt when vLLM's own cache has the first `local`."""
        best = 0
        for n in range(
            1, (len(prompt) - 1) // self.size + 1
        ):  # at least one token is left to compute
            if n * self.size <= local:
                continue
            if all(
                tuple(prompt[: (chunk + 1) * self.size]) in group
                for rule, group in zip(self.rules, self.stored, strict=True)
                for chunk in range(n)
                if rule.needs(chunk, n, self.size) and (chunk + 1) * self.size > local
            ):
                best = n
        return best * self.size - local if best else 0
