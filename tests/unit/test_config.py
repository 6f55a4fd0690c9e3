"""Options: one table, one line for each mistake, and a known origin for each value."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_shm.config import (
    ENGINE,
    OPTIONS,
    SERVER,
    Config,
    ConfigError,
    connector_config,
    server_config,
)


def one_line(error: pytest.ExceptionInfo[ConfigError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_defaults_are_those_the_readers_of_the_docs_expect():
    config = server_config({}, {})

    assert config.instance == "default"
    assert config.chunk_size == 0
    assert config.l1_size_gb == 4.0
    assert config.eviction_policy == "LRU"
    assert config.separate_object_groups
    assert config.deadline_ms == 250.0
    assert set(config.origins.values()) == {"default"}


def test_every_default_passes_its_own_check():
    for option in OPTIONS.values():
        shown = option.shown if option.name == "chunk_size" else option.default
        assert option.check(shown) == option.default, option.name


def test_every_option_tells_what_it_is_for():
    for option in OPTIONS.values():
        assert option.help.endswith("."), option.name
        assert option.shown, option.name
        assert option in SERVER or option in ENGINE


def test_what_is_typed_wins_over_the_environment_which_wins_over_the_default():
    environ = {"LMCACHE_SHM_CHUNK_SIZE": "512", "LMCACHE_SHM_L1_SIZE_GB": "2.5", "PATH": "x"}
    config = server_config({"chunk_size": "256", "keep_arena": True}, environ)

    assert (config.chunk_size, config.l1_size_gb, config.keep_arena) == (256, 2.5, True)
    assert config.origins["chunk_size"] == "--chunk-size"
    assert config.origins["l1_size_gb"] == "LMCACHE_SHM_L1_SIZE_GB"
    assert config.origins["fresh"] == "default"


def test_an_empty_variable_is_as_good_as_none():
    assert server_config({}, {"LMCACHE_SHM_INSTANCE": ""}).instance == "default"


@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [
        ("chunk_size", "0", "auto, or tokens"),
        ("chunk_size", "12.5", "auto, or tokens"),
        ("chunk_size", "-3", "auto, or tokens"),
        ("l1_size_gb", "lots", "a number from"),
        ("l1_size_gb", "nan", "a number from"),
        ("l1_size_gb", "-1", "a number from"),
        ("l1_size_gb", "1e9", "a number from"),
        ("eviction_policy", "FIFO", "one of LRU"),
        ("checksum", "maybe", "one of off, store, verify"),
        ("instance", "../../etc", "a name of at most 48"),
        ("instance", "", "a name of at most 48"),
        ("instance", "x" * 49, "a name of at most 48"),
        ("metrics_port", "65536", "a whole number from 0 to 65535"),
        ("log_format", "xml", "one of human, json"),
    ],
)
def test_a_bad_value_is_told_in_one_line_with_what_is_expected(flag, value, expected):
    with pytest.raises(ConfigError) as error:
        server_config({flag: value}, {})

    line = one_line(error)
    assert line.startswith("--" + flag.replace("_", "-"))
    assert repr(value) in line
    assert f"expected {expected}" in line


def test_a_bad_value_in_the_environment_names_the_variable():
    with pytest.raises(ConfigError, match=r"^LMCACHE_SHM_FRESH: 'perhaps' .* true or false"):
        server_config({}, {"LMCACHE_SHM_FRESH": "perhaps"})


def test_a_misspelt_variable_is_an_error_with_the_nearest_name():
    with pytest.raises(ConfigError) as error:
        server_config({}, {"LMCACHE_SHM_CHUNKSIZE": "256"})

    assert "did you mean LMCACHE_SHM_CHUNK_SIZE?" in one_line(error)


def test_variables_of_the_test_and_fault_harnesses_are_no_options():
    server_config({}, {"LMCACHE_SHM_TEST_RUN": "1", "LMCACHE_SHM_FAILPOINT": "x"})


def test_connector_options_are_checked_by_the_same_table():
    config = connector_config(
        {"lmcache_shm.instance": "blue", "lmcache_shm.deadline_ms": 100, "other.key": 1}, {}
    )

    assert (config.instance, config.deadline_ms) == ("blue", 100.0)
    assert config.origins["deadline_ms"] == "lmcache_shm.deadline_ms"
    assert config.ignored == ("other.key",)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("lmcache_shm.deadline", "lmcache_shm.deadline_ms"),
        ("lmcache_shm.instnace", "lmcache_shm.instance"),
        ("deadline_ms", "lmcache_shm.deadline_ms"),
        ("lmcache-shm.deadline_ms", "lmcache_shm.deadline_ms"),
        ("lmcacheshm.autostart_gb", "lmcache_shm.autostart_gb"),
    ],
)
def test_a_misspelt_connector_key_is_an_error_with_the_nearest_name(key, nearest):
    with pytest.raises(ConfigError) as error:
        connector_config({key: 1}, {})

    assert f"did you mean {nearest}?" in one_line(error)


def test_an_option_of_the_server_in_the_connector_says_where_it_belongs():
    with pytest.raises(ConfigError, match=r"lmcache-shm server --l1-size-gb 8"):
        connector_config({"lmcache_shm.l1_size_gb": 8}, {})


def test_the_engine_ignores_the_server_s_variables_but_not_their_misspelling():
    assert connector_config({}, {"LMCACHE_SHM_L1_SIZE_GB": "nonsense"}).l1_size_gb == 4.0
    with pytest.raises(ConfigError):
        connector_config({}, {"LMCACHE_SHM_L1_SIZE": "4"})


@given(st.sampled_from(sorted(OPTIONS)), st.text() | st.integers() | st.floats() | st.none())
def test_no_value_does_worse_than_one_line(name, value):
    try:
        config = server_config({name: value}, {})
    except ConfigError as error:
        assert "\n" not in str(error)
    else:
        assert isinstance(config, Config)


@given(st.dictionaries(st.text(), st.text() | st.integers() | st.booleans()))
def test_no_connector_dictionary_does_worse_than_one_line(extra):
    try:
        connector_config(extra, {})
    except ConfigError as error:
        assert "\n" not in str(error)


def test_a_runtime_dir_is_made_absolute():
    assert server_config({"runtime_dir": "x"}, {}).runtime_dir == str(Path("x").absolute())
