"""How much a tiny model's output depends on its KV cache: python -m tools.tiny_models.sensitivity [FAMILY …].

A test that compares outputs proves nothing on a model whose output does not depend on what is compared. For each family,
in one engine: a prompt cold, again (local hit), after a reset, in a batch; then the same tail after another prefix, the
other prefix differing only *before* the longest window, and a prompt with one token changed in its first block.
"""

import json
import sys
import time

from . import FAMILIES
from .process import Engine, EngineError, Output
from .prompts import tokens


def changed(mine: Output, other: Output) -> float:
    """Largest difference of the first token's logprobs over the tokens that both list (other prefix, same tail)."""
    first, second = mine.logprobs[0], other.logprobs[0]
    shared = first.keys() & second.keys()
    if not shared:
        return float("inf")
    return max(abs(first[key] - second[key]) for key in shared)


def measure(name: str, length: int = 700) -> dict[str, object]:
    """Load the family, measure, and return the figures."""
    started = time.monotonic()
    with Engine(name) as engine:
        loaded = time.monotonic() - started
        prompt = tokens("sensitivity", length)
        tail = 48  # within every window
        other = tokens("another prefix", length - tail) + prompt[-tail:]
        first_block = tokens("first block", 8) + prompt[8:]
        cold, again = engine.generate([prompt, prompt], max_tokens=12, top=20)
        engine.reset()
        (once_more,) = engine.generate([prompt], max_tokens=12, top=20)
        others = engine.generate([other, first_block], max_tokens=12, top=20)
        return {
            "family": name,
            "load_s": round(loaded, 1),
            "groups": [
                f"{g['kind']}/{g['block_size']}" + (f"/W{g['window']}" if g["window"] else "")
                for g in engine.info["groups"]
            ],
            "local_hit": again.local,
            "hit_vs_cold": cold.difference(again),
            "cold_vs_cold": cold.difference(once_more),
            "other_prefix": {
                "tokens_changed": others[0].tokens != cold.tokens,
                "logprob": round(changed(cold, others[0]), 3),
            },
            "first_block": {
                "tokens_changed": others[1].tokens != cold.tokens,
                "logprob": round(changed(cold, others[1]), 3),
            },
            "distinct_tokens": len(set(cold.tokens)),
            "seconds": round(time.monotonic() - started, 1),
        }


def main() -> None:
    """Print one JSON line per family."""
    for name in sys.argv[1:] or FAMILIES:
        try:
            print(json.dumps(measure(name)), flush=True)
        except EngineError as error:
            print(json.dumps({"family": name, "error": str(error)[-1500:]}), flush=True)


if __name__ == "__main__":
    main()
