"""The simulated workers: everything a model runner does with blocks, except the arithmetic.

It follows vLLM's V1 model runner: block tables only grow (or are replaced when a request resumes), new
blocks are zeroed (here: poisoned), copy-on-write copies run before the forward, recurrent state moves
between the columns of `align` mode as in `mamba_utils`. Each forward checks every block that it reads.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from lmcache_shm.vllm import LMCacheShmConnector
from tests.scheduler.content import Stream, next_token
from tests.scheduler.oracle import Oracle
from tests.scheduler.storage import Group, Storage

Identity = tuple[str | None, str | None]


def ours(connector: Any) -> LMCacheShmConnector:
    """Our connector: this one, or a child of this one."""
    family = getattr(connector, "sub_connectors", [connector])
    return next(c for c in family if isinstance(c, LMCacheShmConnector))


@dataclass(eq=False)
class Step:
    """One schedule() and what became of it."""

    number: int
    output: SchedulerOutput
    generation: npt.NDArray[np.int64]
    """Of every block, right after schedule(): what the plans in this output refer to."""
    handed_out: list[int]
    result: ModelRunnerOutput | None = None


@dataclass
class Running:
    """What a model runner keeps of one request."""

    stream: Stream
    tables: list[list[int]]
    computed: int
    state_column: int | None = None
    accepted: int = 1
    """Tokens accepted in the last step: which speculative state column is the running one."""
    drafts: list[int] = field(default_factory=list)


@dataclass
class Ran:
    """One request's part in one step."""

    begin: int
    end: int
    drafts: list[int]
    sampled: list[int]


class Workers:
    """All ranks of one engine. `connectors` are the worker-side connectors, one per rank (or none)."""

    def __init__(
        self,
        configs: Sequence[KVCacheConfig],
        oracle: Oracle,
        identity_of: Callable[[str], Identity],
        *,
        drafts: int,
        asynchronous: bool,
        propose: Callable[[Stream], list[int]],
    ) -> None:
        self.ranks = [Storage(config, rank) for rank, config in enumerate(configs)]
        self.config = configs[0]
        self.oracle = oracle
        self.connectors: list[Any] = []
        self.requests: dict[str, Running] = {}
        self.adapters: dict[int, str] = {}
        """What is loaded, by vLLM's id."""
        self.tokens_checked = 0
        self._identity_of = identity_of
        self._drafts = drafts
        self._asynchronous = asynchronous
        self._propose = propose
        self._aggregator = KVOutputAggregator(len(configs))
        self.on_bind: Callable[[Step], None] = lambda step: None

    # ---------------------------------------------------------------------------- adapters
    def load_adapter(self, number: int, content: str) -> None:
        """What vLLM's LoRA manager tells of an adapter that it has made resident."""
        self.adapters[number] = content
        for connector in self.connectors:
            digest = hashlib.sha256(content.encode()).digest()
            ours(connector).worker.adapters.loaded(self, number, digest)

    def list_adapters(self) -> dict[int, str]:
        """As vLLM's LoRA manager does."""
        return self.adapters

    # ---------------------------------------------------------------------------- one step
    def execute(self, step: Step) -> None:
        """Run the step as a model runner would; `step.result` is what update_from_output takes."""
        out = step.output
        metadata = out.kv_connector_metadata
        self.on_bind(step)
        for connector in self.connectors:
            connector.handle_preemptions(metadata)
        self._update_states(out)
        for storage in self.ranks:
            storage.poison(step.handed_out)
            for copy in out.kv_cache_block_copies or ():
                storage.copy_block(copy.src_block_id, copy.dst_block_id)
        for connector in self.connectors:
            connector.bind_connector_metadata(metadata)
            if out.has_sync_kv_loads:
                connector.start_load_kv(None)
        sampled = {
            req_id: self._forward(req_id, n, out.scheduled_spec_decode_tokens.get(req_id))
            for req_id, n in out.num_scheduled_tokens.items()
        }
        ids = list(sampled)
        step.result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={req_id: i for i, req_id in enumerate(ids)},
            sampled_token_ids=[sampled[req_id] for req_id in ids],
        )
        if self.connectors:
            step.result = self._aggregator.aggregate(
                [self._finish(rank, out, step.result) for rank in range(len(self.ranks))]
            )

    def _finish(
        self, rank: int, out: SchedulerOutput, result: ModelRunnerOutput
    ) -> ModelRunnerOutput:
        """What a runner asks of its connector after the forward."""
        connector = self.connectors[rank]
        if not out.has_sync_kv_loads:
            connector.start_load_kv(None)
        late_save = self._drafts > 0 and out.total_num_scheduled_tokens > 0
        if not late_save:
            connector.wait_for_save()
        transfers = connector.get_transfer_results(out.finished_req_ids)
        reply = KVConnectorOutput(
            finished_sending=transfers.finished_sending,
            finished_recving=transfers.finished_recving,
            failed_recving=transfers.failed_recving,
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_stats=connector.get_kv_connector_stats(),
            kv_cache_events=connector.get_kv_connector_kv_cache_events(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        if late_save:
            connector.wait_for_save()
        connector.clear_connector_metadata()
        return ModelRunnerOutput(
            req_ids=result.req_ids,
            req_id_to_index=result.req_id_to_index,
            sampled_token_ids=result.sampled_token_ids,
            kv_connector_output=reply,
        )

    # ---------------------------------------------------------------------------- requests
    def _update_states(self, out: SchedulerOutput) -> None:
        for req_id in out.finished_req_ids:
            self.requests.pop(req_id, None)
        for new in out.scheduled_new_reqs:
            tokens = new.prefill_token_ids or new.prompt_token_ids
            assert tokens is not None
            self.requests[new.req_id] = Running(
                Stream(self._identity_of(new.req_id), tokens),
                [list(ids) for ids in new.block_ids],
                new.num_computed_tokens,
            )
        cached = out.scheduled_cached_reqs
        for i, req_id in enumerate(cached.req_ids):
            request, blocks = self.requests[req_id], cached.new_block_ids[i]
            if req_id in cached.resumed_req_ids:
                # What the scheduler did not take (a dropped output) has not happened.
                request.stream.reset(cached.all_token_ids[req_id])
                assert blocks is not None
                request.tables = [list(ids) for ids in blocks]
                request.computed = cached.num_computed_tokens[i]
                request.state_column, request.accepted = None, 1
            elif blocks is not None:
                for table, ids in zip(request.tables, blocks, strict=True):
                    table.extend(ids)
            if not (self._asynchronous and self._drafts):
                self._expect(
                    request.computed == cached.num_computed_tokens[i],
                    "engine",
                    f"{req_id}: worker at {request.computed}, scheduler at {cached.num_computed_tokens[i]}",
                )

    def _expect(self, condition: bool, kind: str, message: str) -> None:
        if not condition:
            self.oracle.fail(kind, message)

    # ---------------------------------------------------------------------------- forward
    def _forward(self, req_id: str, n: int, placeholders: list[int] | None) -> list[int]:
        request = self.requests[req_id]
        stream, begin = request.stream, request.computed
        end, known = begin + n, len(stream.tokens)
        drafts: list[int] = []
        if end > known:
            drafts = request.drafts if self._asynchronous else list(placeholders or ())
            drafts = [*drafts, *[-1] * (end - known)][: end - known]
        sampled: list[int] = []
        if end >= known:
            sampled.append(next_token(stream.after(known)))
            fork = Stream(stream.identity, ())
            fork._last = [stream.after(known)]
            for draft in drafts:
                if draft != sampled[-1]:
                    break
                fork.extend([draft])
                sampled.append(next_token(fork.after(len(fork.tokens))))
        ran = Ran(begin, end, drafts, sampled)
        h = stream.with_drafts(drafts)
        for rank, storage in enumerate(self.ranks):
            for group in storage.groups:
                if not group.recurrent and not group.ring:
                    self._attend(req_id, request, rank, group, ran, h)
            if any(group.recurrent for group in storage.groups):
                self._advance(req_id, request, rank, storage, ran, h)
        self._settle(request, ran)
        stream.extend(sampled)
        request.computed = end - (len(drafts) - max(len(sampled) - 1, 0))
        if sampled and self._drafts:
            request.drafts = self._propose(stream)
        self.tokens_checked += n
        return sampled

    def _attend(
        self, req_id: str, request: Running, rank: int, group: Group, ran: Ran, h: Any
    ) -> None:
        table = np.asarray(request.tables[group.index], np.int64)
        needed = -(-ran.end // group.block_size)
        self._expect(
            len(table) >= needed, "engine", f"{req_id}: {len(table)} blocks, needs {needed}"
        )
        first = group.first_read(ran.begin)
        bad = group.wrong(table, h, first, ran.begin)
        if bad:
            position, block = bad[0]
            self.oracle.fail(
                "read",
                f"{req_id} (rank {rank}, group {group.index}) computes tokens {ran.begin}…{ran.end - 1} "
                f"and reads something else at {len(bad)} places, first token {position} in block {block}",
            )
        group.write(table, h, ran.begin, ran.end)

    # ---------------------------------------------------------------------------- recurrent
    def _advance(
        self, req_id: str, request: Running, rank: int, storage: Storage, ran: Ran, h: Any
    ) -> None:
        """preprocess_mamba, the forward, postprocess_mamba; for every recurrent group of a rank."""
        groups = [g for g in storage.groups if g.recurrent]
        size = groups[0].block_size
        previous = request.state_column
        if previous is None:
            previous = (ran.begin - 1) // size
        current = -(-ran.end // size) - 1
        for group in groups:
            table, accepted = request.tables[group.index], request.accepted
            if previous not in (-1, current):
                group.copy_state(table[previous + accepted - 1], table[current])
                accepted = 1
            running = table[current + accepted - 1]
            if ran.begin > 0 and not group.state_is(running, request.stream.after(ran.begin)):
                self.oracle.fail(
                    "read",
                    f"{req_id} (rank {rank}, group {group.index}) starts at token {ran.begin} from block "
                    f"{running}, which does not hold the state of its first {ran.begin} tokens",
                )
            before_drafts = ran.end - len(ran.drafts)
            if group.checkpoint and not ran.drafts:
                self._checkpoint(group, table, ran, h)
            group.write_state(table[current], int(h[before_drafts - 1]))
            for i in range(len(ran.drafts)):
                group.write_state(table[current + 1 + i], int(h[before_drafts + i]))
            # A boundary that accepted drafts passed gets its state from a speculative column.
            new = before_drafts + max(len(ran.sampled), 1) - 1
            boundary = new // size * size
            if boundary >= before_drafts:
                source = table[current + boundary - before_drafts]
                target = table[boundary // size - 1]
                if source != target:
                    group.copy_state(source, target)

    def _checkpoint(self, group: Group, table: list[int], ran: Ran, h: Any) -> None:
        spec = self.config.kv_cache_groups[group.index].kv_cache_spec
        (offset,), (column,) = compute_mamba_prefill_checkpoints(
            [ran.end], [ran.end - ran.begin], self.config.hash_block_size, group.block_size,
            spec.prefill_checkpoint_alignment, False, self.config.cache_hit_alignment_tokens,
        )  # fmt: skip
        if offset:
            group.write_state(table[column], int(h[ran.begin + offset - 1]))

    def _settle(self, request: Running, ran: Ran) -> None:
        """Which column holds the running state now (the same for all ranks and groups)."""
        recurrent = [g for g in self.ranks[0].groups if g.recurrent]
        if not recurrent:
            return
        size = recurrent[0].block_size
        current = -(-ran.end // size) - 1
        request.state_column = current
        request.accepted = max(len(ran.sampled), 1)
        before_drafts = ran.end - len(ran.drafts)
        boundary = (before_drafts + request.accepted - 1) // size * size
        if boundary >= before_drafts and boundary // size - 1 == current:
            request.accepted = 1
