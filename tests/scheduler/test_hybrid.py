"""Models that mix attention kinds: what is stored, and what is found again."""

import pytest

from tests.scheduler.families import FAMILIES
from tests.scheduler.lab import Lab
from tests.scheduler.late import Pace

ALL = list(FAMILIES)
EVERY_CHUNK = [f.name for f in FAMILIES.values() if not f.recurrent]
EXACT = [
    f.name for f in FAMILIES.values() if f.recurrent and "lmcache_shm.mamba_steps" not in f.extra
]


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("beyond", [-1, 0, 1])
def test_at_least_one_token_is_computed_around_a_chunks_end(
    family: str, beyond: int, instance: str
) -> None:
    """A prompt of kC−1, kC or kC+1 tokens: the hit ends at a boundary strictly before the last token."""
    with Lab(family, instance) as lab:
        prompt = lab.prompt(3 * lab.chunk + beyond)
        lab.ask(prompt, 2)
        lab.wipe()
        again = lab.ask(prompt, 2)

        assert (len(prompt) - 1) // lab.chunk * lab.chunk == again.external_tokens


@pytest.mark.parametrize("family", EVERY_CHUNK)
def test_every_chunk_of_a_prompt_much_longer_than_the_window_is_stored(
    family: str, instance: str
) -> None:
    """Storing does not stop at the group whose blocks stop growing."""
    with Lab(family, instance, step=FAMILIES[family].steps[0]) as lab:
        lab.ask(lab.prompt(9 * lab.chunk + 3 if lab.chunk < 64 else 4 * lab.chunk + 3))

        chunks = list(range(9 if lab.chunk < 64 else 4))
        assert [chunks] * len(lab.cache.members()) == lab.stored_chunks()


@pytest.mark.parametrize("family", EXACT)
def test_short_steps_store_the_state_of_every_boundary(family: str, instance: str) -> None:
    """With steps in [N, 2N) each chunk's end is the end of a step."""
    with Lab(family, instance) as lab:
        lab.ask(lab.prompt(8 * lab.chunk + 3))

        assert [list(range(8))] * len(lab.cache.members()) == lab.stored_chunks()


@pytest.mark.parametrize("family", ["gdn_any", "mamba2"])
def test_long_steps_store_the_boundaries_that_the_engine_snapshots(
    family: str, instance: str
) -> None:
    """mamba_steps any: fewer states, and hits land on those; an identical prompt finds the last one."""
    with Lab(family, instance, step=96) as lab:
        prompt = lab.prompt(150)
        lab.ask(prompt)
        states = lab.stored_chunks()[-1]
        lab.wipe()
        again = lab.ask(prompt)

        assert len(states) < 150 // lab.chunk
        assert (states[-1] + 1) * lab.chunk == again.external_tokens == 144


@pytest.mark.parametrize("family", ["gdn", "gdn_fine", "gdn_window"])
@pytest.mark.parametrize("drafts", [1, 3])
def test_with_drafts_about_only_states_that_exist_are_stored(
    family: str, drafts: int, instance: str
) -> None:
    """Speculative columns move and leave null blocks; each stored state is compared with its prefix."""
    with Lab(family, instance, drafts=drafts, pace=Pace(4, 0.5)) as lab:
        for number in range(3):
            prompt = lab.prompt(20 + 13 * number, seed=number)
            lab.ask(prompt, 60)
            lab.wipe()
            lab.ask(prompt, 60)


@pytest.mark.parametrize("family", [f for f in ALL if FAMILIES[f].drafts])
def test_what_was_stored_while_speculating_is_found(family: str, instance: str) -> None:
    """The rule of writing and the rule of reading agree, and no draft token is ever stored."""
    with Lab(family, instance, drafts=3) as lab:
        prompt = lab.prompt(5 * lab.chunk + 1)
        first = lab.ask(prompt, 30)
        lab.wipe()
        again = lab.ask(prompt, 30)
        lab.wipe()
        onward = lab.ask([*prompt, *first.output, 5], 3)

        assert 5 * lab.chunk == again.external_tokens
        assert onward.external_tokens >= again.external_tokens


def test_a_longer_external_prefix_leaves_the_blocks_of_the_local_one_alone(instance: str) -> None:
    """The engine's own hit may end inside a chunk, or inside a block; what it holds is not written again."""
    with Lab("gdn_fine", instance, chunk=32) as lab:
        lab.ask(lab.prompt(150))
        lab.wipe()
        local = lab.ask(lab.prompt(57), salt=None)
        assert 32 == local.external_tokens
        again = lab.ask(lab.prompt(150))

        assert 0 < again.local_tokens < 64
        assert 128 == again.local_tokens + again.external_tokens


@pytest.mark.parametrize("family", ["full", "windows", "gdn", "deepseek_v4", "local"])
def test_a_hit_inside_a_chunk_is_extended_from_where_it_ends(family: str, instance: str) -> None:
    """Local tokens that are no multiple of the chunk: the load begins at the first page that is missing."""
    kind = FAMILIES[family]
    with Lab(family, instance, chunk=kind.chunks[-1], arena_bytes=8 << 20) as lab:
        size, unit = lab.chunk, lab.engine.kv_config.cache_hit_alignment_tokens
        long = lab.prompt(3 * size + 5)
        lab.ask(long)
        lab.wipe()
        lab.server.ask(lab.server.catalog.clear)
        lab.ask(long[: size + unit + 1])
        lab.rest()
        lab.wipe()
        lab.ask(long)
        lab.wipe()
        short = lab.ask(long[: size + unit + 1])
        again = lab.ask(long)

        assert size == short.external_tokens
        assert 3 * size == again.local_tokens + again.external_tokens


@pytest.mark.parametrize("family", ["full_tp2", "windows_tp2", "mla_tp2"])
def test_a_chunk_is_found_only_when_every_rank_has_written_it(family: str, instance: str) -> None:
    """One rank is done, the other is not: a miss."""
    with Lab(family, instance) as lab:
        lab.hold()
        lab.add(lab.prompt(4 * lab.chunk + 1))
        lab.run(idle_too=False)
        writers = [e for e in lab.cache.engines if e.pending]
        for engine in writers[:-1]:
            engine.finish()
        lab.cache.publish()
        lab.cache.flush()
        assert {} == lab.cache.stored()

        writers[-1].finish()
        lab.cache.publish()
        lab.cache.flush()
        assert (1 if family == "mla_tp2" else 2) == len(writers)
        assert 4 * len(lab.cache.members()) == len(lab.cache.stored())


@pytest.mark.parametrize("family", ["windows", "gdn"])
@pytest.mark.parametrize("missing", [0, 1])
def test_without_one_groups_slot_a_chunk_is_not_usable(
    family: str, missing: int, instance: str
) -> None:
    """The hit is decided over all groups at once: it falls back to where every group has what it needs."""
    with Lab(family, instance) as lab:
        prompt = lab.prompt(4 * lab.chunk + 1)
        lab.ask(prompt)
        lab.wipe()
        cold = lab.server.arena.cold
        last = [
            r
            for (_, g, _), r in lab.cache.stored().items()
            if g == missing and cold["chunk"][r] == 3
        ]
        assert 1 == lab.server.evict(last)
        again = lab.ask(prompt)

        assert 3 * lab.chunk == again.external_tokens
