"""Log lines: as text or JSON, and never in anybody's way."""

import io
import json
import logging
import threading
import time

import pytest

from lmcache_shm import log
from tools.harness.wait import until


@pytest.fixture
def logger():
    logger = logging.getLogger(log.NAME)
    before = logger.handlers[:], logger.level, logger.propagate
    yield logger
    for handler in logger.handlers:
        handler.close()
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


def test_lines_for_people_name_the_level_only_when_it_matters(logger):
    stream = io.StringIO()
    log.setup("human", "info", stream)
    logger.info("ready", extra={"fields": {"pid": 7}})
    logger.warning("full")
    logger.debug("not shown")

    first, second = stream.getvalue().splitlines()
    assert first[9:] == "ready  pid=7"
    assert second[9:] == "warning: full"


def test_json_lines_carry_fields_and_exceptions(logger):
    stream = io.StringIO()
    log.setup("json", "info", stream)
    try:
        raise ValueError("odd")
    except ValueError:
        logger.exception("failed", extra={"fields": {"pid": 7}})

    item = json.loads(stream.getvalue())
    assert (item["level"], item["message"], item["pid"]) == ("error", "failed", 7)
    assert "ValueError: odd" in item["exception"]


def test_setting_up_twice_does_not_write_twice(logger):
    stream = io.StringIO()
    log.setup(stream=stream)
    log.setup(stream=stream)
    logger.info("once")

    assert stream.getvalue().count("once") == 1


class Stuck(io.StringIO):
    """A pipe whose reader has stopped, until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def write(self, text: str) -> int:
        assert self.released.wait(10)
        return super().write(text)


def test_whoever_logs_does_not_wait_for_a_reader_that_has_stopped(logger):
    stream = Stuck()
    log.setup("human", "info", stream, threaded=True)
    began = time.monotonic()
    for i in range(5000):
        logger.info("line %d", i)
    assert time.monotonic() - began < 2.0
    stream.released.set()
    logger.handlers[0].close()

    lines = stream.getvalue().splitlines()
    assert lines[0].endswith("line 0")
    assert 900 < len(lines) < 1100


def test_dropped_lines_are_counted(logger):
    stream = Stuck()
    log.setup("human", "info", stream, threaded=True)
    for i in range(1500):
        logger.info("line %d", i)
    stream.released.set()
    until(lambda: not logger.handlers[0]._lines.qsize(), "all lines are written")
    logger.info("last")
    logger.handlers[0].close()

    tail = stream.getvalue().splitlines()[-2:]
    assert "lines were dropped: nobody took them" in tail[0]
    assert tail[1].endswith("last")
