"""What an engine has in memory, through resets, updates, sleep and new names; and how vLLM is watched for them."""

import sys
import threading
import time
from concurrent.futures import Future
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lmcache_shm.client.fingerprint import Unidentified
from lmcache_shm.client.weights import PRIVATE, Weights
from lmcache_shm.vllm import hooks


def weights(version: str = "", *, engine: str = "engine") -> Weights:
    made = Weights(engine, version, lambda: "loaded")
    made.find()
    assert made.wait(5)
    return made


def is_private(made: Weights) -> bool:
    return str(made.identity).startswith(PRIVATE)


# ------------------------------------------------------------------------------------- loaded
def test_until_they_are_known_there_is_no_identity() -> None:
    go = threading.Event()
    made = Weights("engine", "", lambda: str(go.wait(5)))
    made.find()
    assert made.identity is None
    assert not made.wait(0.01)
    go.set()

    assert made.wait(5)
    assert made.identity == "True"


def test_a_given_name_stands_for_the_files() -> None:
    """Nothing is read for it."""

    def unread() -> str:
        raise AssertionError

    made = Weights("engine", "run 7", unread)
    made.find()

    assert made.wait(0)
    assert made.identity == "version:run 7"


@pytest.mark.parametrize(
    "error", [Unidentified("model.bin changed"), OSError("gone"), ZeroDivisionError("bug")]
)
def test_weights_without_identity_are_shared_with_nobody(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def unknown() -> str:
        raise error

    both = [Weights("engine", "", unknown) for _ in range(2)]
    for made in both:
        made.find()
        assert made.wait(5)

    assert is_private(both[0])
    assert both[0].identity != both[1].identity
    if isinstance(error, Unidentified):
        warned = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
        assert "model.bin changed; start it again, or name its weights" in warned[0]


def test_whoever_waits_is_let_go_at_the_end() -> None:
    made = Weights("engine", "", lambda: str(threading.Event().wait(60)))
    made.close()

    assert made.wait(0)
    assert is_private(made)


# ------------------------------------------------------------------------------------ changes
def test_after_a_reset_or_a_change_they_are_nobody_elses() -> None:
    made = weights()
    made.reset()
    first = made.identity
    assert is_private(made)
    made.reset()
    second = made.identity
    assert made.changed(time.monotonic())

    assert is_private(made)
    assert len({first, second, made.identity}) == 3


def test_a_change_of_before_a_reset_is_known() -> None:
    """Workers tell of it with the next step; the framework that made it has long reset the cache."""
    made = weights()
    at = time.monotonic()
    made.reset()
    after_reset = made.identity

    assert not made.changed(at)
    assert made.identity == after_reset
    assert made.changed(time.monotonic())
    assert made.identity != after_reset


def test_replicas_that_are_told_the_same_name_share_again() -> None:
    one, other, alone = weights("run"), weights("run"), weights("another run")
    for made in (one, other, alone):
        made.reset()
        made.name("2")

    assert one.identity == other.identity == "version:run/2"
    assert alone.identity != one.identity
    one.reset()
    assert is_private(one), "a name says nothing of what came after"


def test_a_name_means_nothing_where_the_weights_had_none(caplog: pytest.LogCaptureFixture) -> None:
    """Two runs on one host may well count from 1, both."""
    made = weights()
    caplog.set_level("INFO")
    made.name("1")
    made.name("2")

    assert made.identity == "loaded"
    assert sum("does not let engines share" in r.getMessage() for r in caplog.records) == 1


# -------------------------------------------------------------------------------------- sleep
def sleep(made: Weights, level: int, *, reset: bool = True) -> None:
    made.sleep_begins()
    if reset:
        made.reset()
    made.sleeps(level)


def test_weights_that_sleep_at_level_1_come_back() -> None:
    made = weights()
    sleep(made, 1)
    assert (made.identity, made.since) == ("loaded", float("-inf"))
    made.reset()
    updated = made.identity
    sleep(made, 1)

    assert made.identity == updated


def test_weights_that_sleep_at_level_2_are_gone() -> None:
    made = weights()
    sleep(made, 2)

    assert is_private(made)


def test_a_reset_beside_a_sleep_counts() -> None:
    """Before it, or in its place: only the reset that belongs to the sleep itself means nothing."""
    made = weights()
    made.reset()
    sleep(made, 1, reset=False)
    assert is_private(made)
    made = weights()
    made.sleep_begins()
    made.reset()  # somebody's, while vLLM waits for requests to end
    made.reset()
    made.sleeps(1)
    assert is_private(made)
    made = weights()
    made.sleep_begins()
    made.reset()
    made.changed(time.monotonic())
    made.sleeps(1)
    assert is_private(made)


# -------------------------------------------------------------------------------------- hooks
class Model:
    def load_weights(self, names: list[str]) -> set[str]:
        """Doc."""
        if not names:
            raise ValueError("nothing")
        return set(names)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Modules with the names that are watched; classes as vLLM's, as far as it matters."""

    class Worker:
        def __init__(self) -> None:
            self.model_runner = SimpleNamespace(get_model=Model, get_draft_model=lambda: None)
            self.model = Model()
            self.model_runner.get_model = lambda: self.model
            self.slept: list[int] = []

        def reload_weights(self, *args: Any, **kwargs: Any) -> None:
            self.model.load_weights(["a"])

        def update_weights(self, update_info: dict[str, Any]) -> None:
            raise RuntimeError("the trainer went away")

        def sleep(self, level: int = 1) -> None:
            self.slept.append(level)

        def discard(self, tags: tuple[str, ...]) -> None:
            pass

        def get_kv_connector_handshake_metadata(self) -> str:
            return "facts"

    class EngineCore:
        def __init__(self, engine: str) -> None:
            self.vllm_config = SimpleNamespace(instance_id=engine)
            self.pause: Future[None] | None = None
            self.reset = lambda: None

        def sleep(self, level: int = 1, mode: str = "abort") -> Any:
            if self.pause is None and level:
                self.reset()
            return self.pause

        def set_weight_version(self, weight_version: str) -> None:
            self.version = weight_version

    made = ModuleType("w")
    made.Worker, made.EngineCore = Worker, EngineCore  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_vllm", made)
    hooks.watch_worker("fake_vllm")
    hooks.watch_engine("fake_vllm")
    return made


def changes_of(what: Any) -> int:
    before = hooks.CHANGES.count
    what()
    return hooks.CHANGES.count - before


def test_every_way_to_change_weights_is_counted(vllm: Any) -> None:
    worker = vllm.Worker()
    assert changes_of(lambda: worker.model.load_weights(["a"])) == 0
    assert worker.get_kv_connector_handshake_metadata() == "facts"

    assert changes_of(lambda: worker.model.load_weights(["a"])) == 1
    assert changes_of(lambda: worker.reload_weights(weights_path="/a")) > 0
    with pytest.raises(RuntimeError, match="went away"):
        worker.update_weights({})
    with pytest.raises(ValueError, match="nothing"):
        worker.model.load_weights([])
    assert changes_of(lambda: worker.sleep(2)) == 1
    assert changes_of(lambda: worker.discard(("weights",))) == 1
    assert changes_of(lambda: worker.sleep(level=1)) == 0
    assert changes_of(lambda: worker.discard(("kv_cache",))) == 0
    assert worker.slept == [2, 1]


def test_an_update_that_failed_half_way_is_a_change(vllm: Any) -> None:
    before = hooks.CHANGES.count
    with pytest.raises(RuntimeError):
        vllm.Worker().update_weights({})

    assert hooks.CHANGES.count == before + 1
    assert 0 < hooks.CHANGES.at <= time.monotonic()


def test_watching_twice_counts_once(vllm: Any) -> None:
    hooks.watch_worker("fake_vllm")
    worker = vllm.Worker()
    worker.get_kv_connector_handshake_metadata()
    worker.get_kv_connector_handshake_metadata()

    assert changes_of(lambda: worker.model.load_weights(["a"])) == 1
    assert worker.model.load_weights.__doc__ == "Doc."


def test_what_vllm_does_not_have_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = ModuleType("empty")
    empty.Worker = empty.EngineCore = type("Bare", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_vllm", empty)
    hooks.watch_worker("fake_vllm")
    hooks.watch_engine("fake_vllm")
    hooks.watch_worker("not_imported")
    hooks.watch_engine("not_imported")


def test_an_engines_sleep_and_version_reach_its_own_weights_only(vllm: Any) -> None:
    mine, others = weights("run", engine="mine"), weights("run", engine="others")
    core = vllm.EngineCore("mine")
    others.reset()
    core.reset = mine.reset
    core.sleep(1)
    assert mine.identity == "version:run"
    assert is_private(others), "another engine's sleep does not take back this one's reset"
    core.set_weight_version("5")

    assert core.version == "5"
    assert mine.identity == "version:run/5"
    assert is_private(others)


def test_a_sleep_that_waits_for_requests_ends_later(vllm: Any) -> None:
    mine = weights(engine="mine")
    core = vllm.EngineCore("mine")
    core.pause = Future()
    future = core.sleep(level=1, mode="wait")
    mine.reset()
    assert is_private(mine)
    future.set_result(None)

    assert mine.identity == "loaded"


def test_a_sleep_that_failed_is_none(vllm: Any) -> None:
    mine = weights(engine="mine")
    core = vllm.EngineCore("mine")
    core.pause = Future()
    core.sleep(1)
    mine.reset()
    core.pause.set_exception(RuntimeError("blocks are held"))

    assert is_private(mine)


def test_the_methods_that_are_watched_are_vllms() -> None:
    """The real classes have them, with the arguments that are read."""
    import inspect

    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.gpu_worker import Worker

    for name in ("reload_weights", "reset_weights", "update_weights", "finish_weight_update"):
        assert callable(getattr(Worker, name))
    assert list(inspect.signature(Worker.sleep).parameters) == ["self", "level"]
    assert list(inspect.signature(Worker.discard).parameters) == ["self", "tags"]
    assert list(inspect.signature(Worker.get_kv_connector_handshake_metadata).parameters) == [
        "self"
    ]
    assert list(inspect.signature(EngineCore.sleep).parameters) == ["self", "level", "mode"]
    named = inspect.signature(EngineCore.set_weight_version).parameters
    assert list(named) == ["self", "weight_version"]
