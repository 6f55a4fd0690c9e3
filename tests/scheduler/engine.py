"""vLLM's real scheduler in a loop like EngineCore's, with simulated workers and an oracle."""

import hashlib
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.scheduler import families
from tests.scheduler.content import VOCAB, Stream, generate, next_token
from tests.scheduler.families import Setup
from tests.scheduler.oracle import Oracle
from tests.scheduler.worker import Identity, Step, Workers

init_none_hash(sha256)


def _feature(image: str) -> MultiModalFeatureSpec:
    """Something of 16 tokens at the beginning of a prompt."""
    return MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier=hashlib.sha256(image.encode()).hexdigest(),
        mm_position=PlaceholderRange(0, 16),
    )


@dataclass
class Asked:
    """A request as its sender sees it."""

    prompt: list[int]
    max_tokens: int
    identity: Identity
    adapter: str | None = None
    """The content of its adapter."""
    request: Request | None = None
    output: list[int] = field(default_factory=list)
    finish: str = ""
    external_tokens: int = 0
    local_tokens: int = 0


class Engine:
    """An engine. `cache`, if any, brings the connectors (see cache.py); without it vLLM runs alone."""

    def __init__(
        self, setup: Setup, rng: random.Random, cache: Any = None, engine_id: str = "engine"
    ) -> None:
        self.setup = setup
        self.rng = rng
        self.oracle = Oracle()
        self.asked: dict[str, Asked] = {}
        self.queue: deque[Step] = deque()
        self.steps = 0
        self.resumed = 0
        self.schedules = 0
        self._ids = 0
        self._adapters: dict[str, int] = {}
        self._cache = cache
        self.scheduler: Any = None
        self.config = families.vllm_config(
            setup, engine_id if cache else None, cache.options(setup) if cache else {}
        )
        worker_configs, self.kv_config, block = families.kv_cache_configs(setup, self.config)
        self.workers = Workers(
            worker_configs,
            self.oracle,
            lambda req_id: self.asked[req_id].identity,
            drafts=setup.drafts,
            asynchronous=setup.asynchronous,
            propose=self._propose,
        )
        if cache:
            cache.begin(self)
        kind = AsyncScheduler if setup.asynchronous else Scheduler
        self.scheduler = kind(
            self.config,
            self.kv_config,
            StructuredOutputManager(self.config),
            block_size=block,
            hash_block_size=self.kv_config.hash_block_size,
            log_stats=True,
        )
        self._hasher = get_request_block_hasher(self.kv_config.hash_block_size, sha256)
        self.oracle.watch(self.scheduler.kv_cache_manager.block_pool)
        if cache:
            cache.attach(self, worker_configs)

    # ---------------------------------------------------------------------------- requests
    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int = 1,
        salt: str | None = None,
        adapter: str | None = None,
        priority: int = 0,
        image: str | None = None,
        session: bool = False,
        **more: Any,
    ) -> str:
        """A request arrives; its id. `image`: the prompt begins with one; `session`: more input may follow."""
        req_id = f"r{self._ids}"
        self._ids += 1
        lora = self._lora(adapter) if adapter else None
        content = self.workers.adapters[lora.lora_int_id] if lora else None
        who = f"{content} sees {image}" if image else content
        self.asked[req_id] = Asked(list(prompt), max_tokens, (salt, who), content)
        request = Request(
            req_id,
            list(prompt),
            SamplingParams(max_tokens=max_tokens, ignore_eos=True, **more),
            None,
            arrival_time=float(self._ids),
            lora_request=lora,
            cache_salt=salt,
            priority=priority,
            block_hasher=self._hasher,
            mm_features=[_feature(image)] if image else None,
            resumable=session,
        )
        self.oracle.note(f"add {req_id}: {len(prompt)} tokens + {max_tokens}, {salt}/{adapter}")
        self.asked[req_id].request = request
        self.scheduler.add_request(request)
        return req_id

    def load_adapter(self, name: str, content: str) -> None:
        """VLLM's add_lora, in place if it is loaded. What is running must have ended."""
        number = self._adapters.setdefault(name, 1 + len(self._adapters))
        self.oracle.note(f"load adapter {name}: {content}")
        self.workers.load_adapter(number, content)

    def _lora(self, name: str) -> LoRARequest:
        if name not in self._adapters:
            self.load_adapter(name, name)
        return LoRARequest(name, self._adapters[name], f"/adapters/{name}")

    def say_more(self, req_id: str, tokens: Sequence[int], max_tokens: int) -> None:
        """The next input of a session; vLLM forgets the last token that it said, which it has not computed."""
        asked = self.asked[req_id]
        asked.prompt += [*asked.output[:-1], *tokens]
        asked.output, asked.finish = [], ""
        self.scheduler.add_request(self._turn(req_id, tokens, max_tokens, more=True))

    def end_session(self, req_id: str) -> None:
        self.scheduler.add_request(self._turn(req_id, [0], 1, more=False))

    @staticmethod
    def _turn(req_id: str, tokens: Sequence[int], max_tokens: int, *, more: bool) -> Request:
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        return Request(req_id, list(tokens), sampling, None, arrival_time=0.0, resumable=more)

    def abort(self, req_id: str) -> None:
        request = self.request(req_id)
        self.oracle.note(f"abort {req_id} ({request.status if request else 'gone'})")
        self.scheduler.finish_requests(req_id, RequestStatus.FINISHED_ABORTED)
        if not self.asked[req_id].finish:
            self.asked[req_id].finish = "abort"

    def request(self, req_id: str) -> Request | None:
        return self.scheduler.requests.get(req_id)

    def unfinished(self) -> list[str]:
        return [req_id for req_id, asked in self.asked.items() if not asked.finish]

    # ---------------------------------------------------------------------------- the loop
    @property
    def depth(self) -> int:
        """Steps that may be under way at once."""
        return 2 if self.setup.asynchronous else 1

    def schedule(self) -> Step:
        self.schedules += 1
        output = self.scheduler.schedule()
        step = Step(
            self.schedules, output, self.oracle.generation.copy(), self.oracle.take_handed_out()
        )
        new = {r.req_id: r.num_computed_tokens for r in output.scheduled_new_reqs}
        resumed = output.scheduled_cached_reqs.resumed_req_ids
        self.oracle.note(
            f"schedule {step.number}: {output.num_scheduled_tokens} new {new} resumed {sorted(resumed)}"
        )
        self.queue.append(step)
        self.resumed += len(resumed)
        if self._cache:
            self._cache.planned(step)
        return step

    def execute(self) -> None:
        """The oldest step that has not run yet runs."""
        step = next(s for s in self.queue if s.result is None)
        self.oracle.note(f"execute {step.number}")
        self.workers.execute(step)

    def update(self) -> None:
        """The oldest step's result reaches the scheduler."""
        step = self.queue.popleft()
        assert step.result is not None
        reply = step.result.kv_connector_output
        if reply and (reply.finished_recving or reply.failed_recving):
            self.oracle.note(f"received {reply.finished_recving} failed {reply.failed_recving}")
        outputs = self.scheduler.update_from_output(step.output, step.result)
        self.steps += 1
        if self._cache and reply:
            self._cache.updated(reply)
        for of_client in outputs.values():
            for one in of_client.outputs:
                self._take(one)
        if self.setup.drafts and not self.setup.asynchronous and step.output.num_scheduled_tokens:
            ids = [r for r in step.output.num_scheduled_tokens if r in self.workers.requests]
            proposals = [self.workers.requests[r].drafts for r in ids]
            self.scheduler.update_draft_token_ids(DraftTokenIds(ids, [list(p) for p in proposals]))

    def turn(self, between: Callable[[], None] = lambda: None) -> bool:
        """One move of EngineCore; `between` is called wherever the world may change. False: nothing to do."""
        runnable = any(s.result is None for s in self.queue)
        can_schedule = len(self.queue) < self.depth and self.scheduler.has_requests()
        if not can_schedule and not self.queue:
            between()
            return False
        if can_schedule and not (runnable and self.rng.random() < 0.3):
            self.schedule()
            between()
            if self.setup.asynchronous and self.rng.random() < 0.6:
                return True
        if any(s.result is None for s in self.queue):
            self.execute()
            between()
            if self.setup.asynchronous and len(self.queue) < self.depth and self.rng.random() < 0.6:
                return True
        if self.queue and self.queue[0].result is not None:
            self.update()
            between()
        return True

    def run(
        self,
        between: Callable[[], None] = lambda: None,
        limit: int = 5000,
        *,
        idle_too: bool = True,
    ) -> None:
        """Until every request has ended; `idle_too`: and until the engine has nothing left to do at all."""
        idle = 0
        for _ in range(limit):
            if not self.unfinished() and not (idle_too and self.scheduler.has_requests()):
                while self.queue:
                    if self.queue[0].result is None:
                        self.execute()
                    self.update()
                return
            idle = 0 if self.turn(between) else idle + 1
            if idle > 200 and self.unfinished():
                break
        self.oracle.fail("stuck", f"requests do not end: {self.state()}")

    # ---------------------------------------------------------------------------- resets, pauses
    def reset(self, *, running: bool = False, external: bool = False) -> bool:
        """POST /reset_prefix_cache. With `running` it must succeed: without a cache it would."""
        self.oracle.note(
            f"reset_prefix_cache running={running} external={external}: {self.state()}"
        )
        if self._cache:
            self._cache.before_reset()
        done: bool = self.scheduler.reset_prefix_cache(running, external)
        if self._cache:
            self._cache.after_reset(done=done, external=external)
        pool = self.oracle.pool
        if done and (left := [b.block_id for b in pool.blocks if b.block_hash is not None]):
            self.oracle.fail("reset", f"blocks {left[:10]} can still be found")
        if running and not done:
            self.oracle.fail("reset", f"it was refused: {self.state()}")
        return done

    @property
    def between_steps(self) -> bool:
        """Whether EngineCore would listen now: a synchronous one does not while a step is under way."""
        return self.setup.asynchronous or not self.queue

    def pause(
        self,
        mode: str = "abort",
        between: Callable[[], None] = lambda: None,
        *,
        clear: bool = True,
        limit: int = 5000,
    ) -> None:
        """POST /pause as EngineCoreProc does it: it comes back when nothing is to be done any more.

        Sleep is this with `clear`, and then the KV cache's memory goes.
        """
        self.oracle.note(f"pause {mode} clear={clear}")
        if mode == "abort":
            for req_id in self.unfinished():
                self.abort(req_id)
        state = PauseState.PAUSED_ALL if mode == "keep" else PauseState.PAUSED_NEW
        self.scheduler.set_pause_state(state)
        for _ in range(limit):
            if not (self.queue or self.scheduler.has_requests()):
                break
            self.turn(between)
        else:
            self.oracle.fail("stuck", f"it does not come to rest: {self.state()}")
        if clear:
            self.reset(running=True, external=True)
            self.poison()

    def resume(self) -> None:
        self.oracle.note("resume")
        self.scheduler.set_pause_state(PauseState.UNPAUSED)

    def poison(self) -> None:
        """The KV cache's memory is given away while the engine sleeps: nothing in it can be used any more."""
        for rank in self.workers.ranks:
            rank.poison(range(self.oracle.pool.num_gpu_blocks))

    def state(self) -> str:
        """Where everything is, for people."""
        pool, told = self.oracle.pool, []
        for req_id in self.unfinished():
            request = self.request(req_id)
            if request is None:
                told.append(f"{req_id} unknown to the scheduler")
                continue
            tables = self.scheduler.kv_cache_manager.get_block_ids(req_id)
            told.append(
                f"{req_id} {request.status.name} {request.num_computed_tokens}/{request.num_tokens} tokens, "
                f"{[sum(b > 0 for b in t) for t in tables]} blocks"
            )
        free = pool.get_num_free_blocks()
        return f"{'; '.join(told)}; {free} of {pool.num_gpu_blocks - 1} blocks free"

    # ---------------------------------------------------------------------------- inside
    def _propose(self, stream: Stream) -> list[int]:
        """Drafts for the next step: some right, some not."""
        drafts: list[int] = []
        for _ in range(self.rng.choice([0, self.setup.drafts, self.setup.drafts])):
            fork = Stream(stream.identity, [*stream.tokens, *drafts])
            right = next_token(fork.after(len(fork.tokens)))
            drafts.append(right if self.rng.random() < 0.7 else self.rng.randrange(VOCAB))
        return drafts

    def _take(self, output: Any) -> None:
        asked = self.asked[output.request_id]
        if output.prefill_stats is not None:
            asked.external_tokens = output.prefill_stats.num_external_cached_tokens
            asked.local_tokens = output.prefill_stats.num_local_cached_tokens
        if asked.finish:
            return
        asked.output += output.new_token_ids
        if output.finish_reason is not None:
            asked.finish = str(output.finish_reason)
            self.oracle.note(f"finished {output.request_id} ({asked.finish})")
            wanted = generate(asked.identity, asked.prompt, len(asked.output))
            if asked.output != wanted or asked.finish == "error":
                self.oracle.fail(
                    "output",
                    f"{output.request_id} ended as {asked.finish}: {asked.output}, not {wanted}",
                )
