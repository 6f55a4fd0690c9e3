"""Prompts of token ids, the same in every process."""

import random


def tokens(name: str, length: int, vocab_size: int = 1024) -> list[int]:
    """`length` ids drawn by a generator seeded with the text `name` (ids 0–2 are special and left out)."""
    draw = random.Random(
        name
    )  # seeding with a string hashes it with SHA-512: not PYTHONHASHSEED's business
    return [draw.randrange(3, vocab_size) for _ in range(length)]
