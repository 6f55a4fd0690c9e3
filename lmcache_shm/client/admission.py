"""Room for requests that hold blocks but do not run: those that are being loaded, or wait for their first step.

vLLM cannot preempt them, and it admits the next one by an estimate that counts blocks before a window as if
they were still held. So loads can take the last blocks from each other: each waits for the others, nothing
runs, for ever. Another load is begun only if, with nothing but parked requests there, any of them could
be scheduled.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lmcache_shm.client.groups import KVGroup
from lmcache_shm.protocol.rules import ChunkedLocal, Full, Recurrent, Window


@dataclass(frozen=True, slots=True)
class Parked:
    """Blocks that a request holds now, and how many more its first step may take."""

    held: int
    need: int


class Parking:
    """Scheduler thread only. `groups` are the cached ones, `scratch` the number of those that are not."""

    def __init__(self, vllm_config: Any, groups: Sequence[KVGroup], scratch: int) -> None:
        scheduler = vllm_config.scheduler_config
        budget = scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens
        drafts = int(vllm_config.num_speculative_tokens)
        self._step = int(budget) + 1 + drafts + int(vllm_config.num_lookahead_tokens)
        # A running state, a checkpoint, and one per draft token.
        self._states = 2 + drafts
        self._groups = tuple(groups)
        self._scratch = scratch
        self._parked: dict[str, Parked] = {}

    def has_room(self, num_tokens: int, total_tokens: int, blocks: int) -> bool:
        """Whether a request of `num_tokens` may load up to `total_tokens` in a pool of `blocks` usable blocks.

        The first one always may: vLLM has made sure that each request fits by itself.
        """
        if not self._parked:
            return True
        here = [*self._parked.values(), self._expected(num_tokens, total_tokens)]
        return blocks - sum(p.held for p in here) >= max(p.need for p in here)

    def enter(
        self,
        req_id: str,
        num_tokens: int,
        total_tokens: int,
        tables: Sequence[Sequence[int]],
        null: int,
    ) -> None:
        """vLLM has allocated the blocks of a load."""
        held = sum(block != null for table in tables for block in table)
        self._parked[req_id] = Parked(held, self._need(num_tokens, total_tokens))

    def leave(self, req_id: str) -> None:
        """It is scheduled, has given its blocks back, or has ended."""
        self._parked.pop(req_id, None)

    def __bool__(self) -> bool:
        return bool(self._parked)

    def _expected(self, num_tokens: int, total_tokens: int) -> Parked:
        held = self._scratch
        for group in self._groups:
            pages = -(-total_tokens // group.block_size)
            match group.rule:
                case Full():
                    held += pages
                case Window(tokens) | ChunkedLocal(tokens):
                    held += min(pages, -(-tokens // group.block_size) + 1)
                case Recurrent():
                    held += 1
        return Parked(held, self._need(num_tokens, total_tokens))

    def _need(self, num_tokens: int, total_tokens: int) -> int:
        """Full attention needs the rest of the prompt (vLLM admits whole prompts), the others one step."""
        need = 0
        step = min(num_tokens, total_tokens + self._step)
        for group in self._groups:
            size = group.block_size
            if isinstance(group.rule, Recurrent):
                need += self._states
            else:
                end = num_tokens if isinstance(group.rule, Full) else step
                need += -(-end // size) - total_tokens // size
        return need
