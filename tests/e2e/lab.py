"""One model's bench: outputs of an engine without any connector, a server, and an engine that uses it."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from tests.e2e.predict import Rule, World
from tools.harness import leftovers
from tools.harness.wait import until
from tools.server_process import Server, Table
from tools.tiny_models.process import Engine, Output
from tools.tiny_models.prompts import tokens

NEW = 8  # generated tokens
TOLERANCE = 1e-4  # of a logprob: rounding gives 1e-5 in float32, another prefix 0.1 and more
WINDOW = 64


@dataclass(frozen=True)
class Bench:
    """What is particular to a model. chunk: tokens; rules: one per object group; length: of its long prompt."""

    family: str
    chunk: int
    rules: tuple[Rule, ...]
    length: int = 600


LONG = pytest.mark.skipif("LONG_TESTS" not in os.environ, reason="LONG_TESTS=1 runs it")
"""For what resembles another test closely, and takes long."""

FULL, SLIDING, STATE = Rule("full"), Rule("window", WINDOW), Rule("recurrent")
BENCHES = {
    bench.family: bench
    for bench in (
        Bench("llama", 128, (FULL,)),
        Bench("gemma3", 128, (FULL, SLIDING)),
        Bench("gemma4", 128, (FULL, SLIDING)),
        Bench("gpt_oss", 128, (FULL, SLIDING)),
        # Twice vLLM's unified block (160, 96): so a local hit can end in the middle of a chunk.
        Bench("qwen3_5", 320, (FULL, STATE)),
        Bench("falcon_h1", 192, (FULL, STATE)),
    )
}


def prompts(chunk: int) -> dict[str, list[int]]:
    """The prompts of every test. Names say how they relate."""
    whole = 256 // chunk + 1  # chunks in the boundary cases: 3 of 128, 2 of 192, 1 of 320
    long = tokens("long", 1317)
    cut = 2 * chunk + chunk // 2 + 30
    shared = tokens("shared", 2 * chunk + 50)
    return {
        "below": tokens("below", whole * chunk - 1),
        "at": tokens("at", whole * chunk),
        "above": tokens("above", whole * chunk + 1),
        "long": long,
        "start of long": long[:cut],
        "branch of long": long[:cut] + tokens("branch", 200),
        "other prefix": tokens("other", 1317 - 48) + long[-48:],
        **{f"batch {i}": shared + tokens(f"batch {i}", 60 + 40 * i) for i in range(4)},
    }


class Lab:
    """A server, an engine with the connector, and the truth about both."""

    def __init__(self, bench: Bench, instance: str) -> None:
        self.bench = bench
        self.prompts = prompts(bench.chunk)
        with Engine(bench.family) as engine:
            outputs = engine.generate(list(self.prompts.values()), max_tokens=NEW, cold=True)
        self.baseline = dict(zip(self.prompts, outputs, strict=True))
        self.world = World(bench.chunk, list(bench.rules))
        self.server = Server(
            instance, chunk_size=bench.chunk, size_mb=256, flags=("--log-level", "debug")
        )
        try:
            self.engine = self.new_engine()
        except BaseException:
            self.server.close()
            raise

    def new_engine(self, hash_seed: str | None = None, **options: Any) -> Engine:
        """An engine with the connector, in a process with that PYTHONHASHSEED (None: that of the tests' engines)."""
        return Engine(
            self.bench.family,
            connector=self.server.connector(**options),
            env={"PYTHONHASHSEED": hash_seed} if hash_seed else {},
        )

    def close(self) -> None:
        try:
            self.engine.close()
        finally:
            self.server.close()

    def fresh(self) -> None:
        """Nothing cached anywhere."""
        self.server.wait_idle()
        self.server.clear()
        assert self.engine.reset(), "vLLM's prefix cache cannot be emptied: blocks are held"
        self.world.forget()

    def settle(self) -> Table:
        """Wait for the stores under way, then empty vLLM's own cache."""
        table = self.server.wait_idle()
        assert self.engine.reset(), "vLLM's prefix cache cannot be emptied: blocks are held"
        return table

    def run(self, *names: str, engine: Engine | None = None, **options: Any) -> list[Output]:
        """Generate for these prompts and note what the engine has now computed."""
        outputs = (engine or self.engine).generate(
            [self.prompts[name] for name in names], max_tokens=NEW, **options
        )
        for name, output in zip(names, outputs, strict=True):
            self.world.computed(self.computed(name, output))
        return outputs

    def computed(self, name: str, output: Output) -> list[int]:
        """The tokens whose KV was computed: the last generated one is not fed back."""
        return self.prompts[name] + output.tokens[:-1]

    def difference(self, name: str, output: Output) -> float:
        return self.baseline[name].difference(output)

    def assert_right(self, names: Sequence[str], outputs: Sequence[Output]) -> None:
        """Tokens and logprobs are those of the engine without a connector."""
        assert [
            (name, self.difference(name, output) <= TOLERANCE)
            for name, output in zip(names, outputs, strict=True)
        ] == [(name, True) for name in names], {
            name: self.difference(name, output) for name, output in zip(names, outputs, strict=True)
        }

    # -------------------------------------------------------------------------------- the arena
    def groups(self) -> list[int]:
        """Numbers of the object groups in the slot table, in the order of `bench.rules`."""
        (namespace,) = self.server.status()["namespaces"]
        kinds = [group["kind"] for group in namespace["groups"]]
        assert len(kinds) == len(self.bench.rules)
        return [
            kinds.index({"chunked": "chunked_local"}.get(rule.kind, rule.kind))
            for rule in self.bench.rules
        ]

    @contextmanager
    def server_down(self) -> Iterator[None]:
        """The server is killed, and comes back afterwards; the engine goes on living."""
        self.server.kill()
        yield
        self.server.start()
        leftovers.shared_processes.add(self.server.pid)
        self.wait_connected()

    def wait_connected(self, timeout_s: float = 20.0) -> None:
        """Wait until the engine has registered (again)."""

        def registered() -> bool:
            clients = self.server.status()["clients"]
            return any(c["connected"] and c["namespace"] >= 0 for c in clients)

        until(registered, "the engine comes back (see its log)", timeout_s)

    def stored(self, table: Table) -> list[int]:
        """Committed chunks by rule."""
        return [len(table.rows(group)) for group in self.groups()]

    def page_bytes(self, table: Table, row: int, name: str) -> int:
        """Where in the slot the pages end and the token ids begin: found by looking for the ids."""
        chunk = int(table.cold["chunk"][row])
        size = self.bench.chunk
        ids = token_bytes(self.prompts[name][chunk * size : (chunk + 1) * size])
        at = table.payload(row).tobytes().rfind(ids)
        assert at > 0, f"slot {row} does not hold the token ids of chunk {chunk} of {name!r}"
        return at


def token_bytes(ids: Sequence[int]) -> bytes:
    """How a slot keeps its token ids."""
    return b"".join(token.to_bytes(4, "little") for token in ids)
