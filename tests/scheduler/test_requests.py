"""Kinds of requests: what makes a prefix another prefix, sessions, requests that want no cache."""

import pytest

from tests.scheduler.lab import Lab


def test_salts_and_adapters_never_share(instance: str) -> None:
    """The same tokens under another cache salt or adapter are another prefix: zero hits."""
    with Lab("full", instance) as lab:
        prompt = lab.prompt(4 * lab.chunk + 1)
        who = [(None, None), ("a", None), ("b", None), (None, "x"), ("a", "x")]
        for salt, adapter in who:
            assert 0 == lab.ask(prompt, salt=salt, adapter=adapter).external_tokens
        lab.wipe()
        for salt, adapter in who:
            asked = lab.ask(prompt, salt=salt, adapter=adapter)
            assert 4 * lab.chunk == asked.external_tokens


@pytest.mark.parametrize("family", ["full", "windows_tp2", "mla_tp2", "gdn"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_adapter_is_what_is_loaded(family: str, asynchronous: bool, instance: str) -> None:
    """Replaced in place, under the same name, id and path: nothing of the old one is used. The same content under
    another name: all of it."""
    with Lab(family, instance, asynchronous=asynchronous) as lab:
        prompt = lab.prompt(4 * lab.chunk + 1)
        lab.engine.load_adapter("x", "v1")
        assert 0 == lab.ask(prompt, adapter="x").external_tokens
        lab.wipe()
        lab.engine.load_adapter("x", "v2")
        lab.cache.blind = True  # the workers know first: they refuse what the scheduler side offers
        lab.ask(prompt, adapter="x")
        assert 1 == lab.cache.failed_loads
        lab.cache.blind = False
        lab.wipe()
        found = [lab.ask(prompt, adapter="x").external_tokens]
        lab.wipe()
        lab.engine.load_adapter("y", "v2")
        found += [lab.ask(prompt, adapter="y").external_tokens]

        assert [4 * lab.chunk] * 2 == found


def test_an_image_is_part_of_what_a_prefix_is(instance: str) -> None:
    """The same placeholder tokens with another image behind them: zero hits."""
    with Lab("full", instance, chunk=16) as lab:
        lab.scheduler.max_num_encoder_input_tokens = 1 << 20
        lab.scheduler.encoder_cache_manager.cache_size = 1 << 20
        lab.scheduler.encoder_cache_manager.num_free_slots = 1 << 20
        lab.scheduler.encoder_cache_manager.num_freeable_slots = 1 << 20
        prompt = lab.prompt(4 * lab.chunk + 1)
        for image in ("cat", "dog", None):
            assert 0 == lab.ask(prompt, image=image).external_tokens
        lab.wipe()
        for image in ("cat", "dog", None):
            assert 4 * lab.chunk == lab.ask(prompt, image=image).external_tokens


def test_a_request_that_wants_no_cache_is_served_without_and_stored(instance: str) -> None:
    """skip_reading_prefix_cache is about reading."""
    with Lab("full", instance) as lab:
        prompt = lab.prompt(4 * lab.chunk + 1)
        lab.ask(prompt, skip_reading_prefix_cache=True)
        lab.wipe()

        assert 0 == lab.ask(prompt, skip_reading_prefix_cache=True).external_tokens
        lab.wipe()
        assert 4 * lab.chunk == lab.ask(prompt).external_tokens


@pytest.mark.parametrize("family", ["full", "windows", "gdn"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_session_is_stored_as_it_grows(family: str, asynchronous: bool, instance: str) -> None:
    """Each input continues where the last answer was cut off; what all of it was is found by another request."""
    with Lab(family, instance, asynchronous=asynchronous) as lab:
        req_id = lab.add(lab.prompt(50), 7, session=True)
        for number in range(1, 4):
            lab.run(idle_too=False)
            lab.engine.say_more(req_id, lab.prompt(30, seed=number), 7)
        lab.run(idle_too=False)
        lab.engine.end_session(req_id)
        lab.rest()
        lab.wipe()
        asked = lab.engine.asked[req_id]
        whole = [*asked.prompt, *asked.output]
        chunks = len(asked.prompt) // lab.chunk

        assert lab.ask(whole).external_tokens >= chunks * lab.chunk
