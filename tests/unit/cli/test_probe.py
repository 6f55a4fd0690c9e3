"""What probe makes of vLLM's facts: N, chunk sizes, step budget, command lines, and what it says."""

import io
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from lmcache_shm.cli import app, probe


def group(kind: str = "full_attention", block: int = 16, **changes: Any) -> dict[str, Any]:
    facts = {
        "group": 0, "kind": kind, "spec": "Spec", "window": None, "attention_chunk": None,
        "block_size": block, "tokens_per_block": block, "layers": ["layer.0", "layer.1"],
        "content_bytes": 4096, "page_bytes": 4096, "cacheable": True,
    }  # fmt: skip
    return facts | changes


def facts(*groups: dict[str, Any], **changes: Any) -> dict[str, Any]:
    result = {
        "vllm": "0.32.0", "platform": "cpu", "device": "cpu", "device_assumed": False,
        "architecture": "SomeForCausalLM", "recurrent": any(g["kind"] == "mamba" for g in groups),
        "mamba_cache_mode": "align", "prefix_caching": True, "dtype": "bfloat16",
        "kv_cache_dtype": "auto", "backends": ["CPU_ATTN"], "max_model_len": 8192,
        "n": groups[0]["block_size"] if groups else 0, "auto_chunk": 256,
        "chunk_sizes": [256, 512, 768, 1024, 1280], "refusal": "", "groups": list(groups),
    }  # fmt: skip
    return result | changes


def printed(result: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    stream = io.StringIO()
    probe.show(result, probe.advise("org/model", [], result), Console(file=stream, width=100))
    return stream.getvalue() + capsys.readouterr().out


def option(line: str, name: str) -> str:
    words = shlex.split(line)
    return words[words.index(name) + 1]


def test_no_chunk_size_is_said_so(capsys: pytest.CaptureFixture[str]) -> None:
    nothing = {"auto_chunk": 0, "chunk_sizes": [], "refusal": "no chunk size fits this model"}

    text = printed(facts(group()) | nothing, capsys)

    assert "note: no chunk size fits this model" in text
    assert "chunk sizes:" not in text
    assert "--chunk-size auto" in text


def test_recurrent_models_get_align_mode_and_the_largest_exact_step_budget() -> None:
    advice = probe.advise("m", [], facts(group("mamba", 160), group(block=160)))

    assert advice.max_num_batched_tokens == 319
    assert option(advice.engine, "--mamba-cache-mode") == "align"
    assert option(advice.engine, "--max-num-batched-tokens") == "319"
    assert "--enable-prefix-caching" in advice.engine


def test_other_models_get_no_recurrent_options() -> None:
    advice = probe.advise("m", [], facts(group()))

    assert advice.max_num_batched_tokens is None
    assert "mamba" not in advice.engine
    assert "batched" not in advice.engine


def test_what_the_user_typed_is_kept_and_not_repeated() -> None:
    typed = ["--max_num_batched_tokens", "200", "--kv-cache-dtype=fp8", "--mamba-cache-mode=align"]

    line = probe.advise("m", typed, facts(group("mamba", 160))).engine

    assert option(line, "--max_num_batched_tokens") == "200"
    assert line.count("batched") == 1
    assert line.count("mamba-cache-mode") == 1
    assert "--kv-cache-dtype=fp8" in line


def test_the_command_lines_are_complete() -> None:
    advice = probe.advise("org/model", [], facts(group(block=784), auto_chunk=784))

    assert option(advice.server, "--chunk-size") == "784"
    transfer = json.loads(option(advice.engine, "--kv-transfer-config"))
    assert transfer == {
        "kv_connector": "LMCacheShmConnector",
        "kv_connector_module_path": "lmcache_shm.vllm",
        "kv_role": "kv_both",
    }
    assert shlex.split(advice.engine)[:3] == ["vllm", "serve", "org/model"]


def test_people_see_platform_groups_and_lines_that_are_not_wrapped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = printed(facts(group("mamba", 160, content_bytes=68608), group(block=160)), capsys)

    assert "resolved for cpu (this machine)" in text
    assert "N = 160 tokens" in text
    assert "recurrent state" in text
    assert "68,608" in text
    assert "160 ≤ max_num_batched_tokens < 320" in text
    assert any(line.startswith("vllm serve") and line.endswith("}'") for line in text.splitlines())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"device_assumed": True, "device": "assumed 9.0"}, "no such GPU here: assumed 9.0"),
        ({"prefix_caching": False}, "prefix caching off"),
        ({"recurrent": True, "mamba_cache_mode": "all"}, "mamba cache mode is all; use"),
        ({"refusal": "no rule for this group"}, "note: no rule for this group"),
        ({"max_model_len": 8}, "no prompt is as long as one block"),
    ],
)
def test_what_stands_in_the_way_is_said(
    change: dict[str, Any], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in printed(facts(group()) | change, capsys)


def test_without_vllm_the_error_says_where_to_run_it() -> None:
    log = "Traceback\n  File x\nModuleNotFoundError: No module named 'vllm'\n"

    assert "run probe where vLLM is" in probe._last_words(log)


def test_the_last_error_line_of_a_dead_process_is_shown() -> None:
    log = "INFO x\nusage: vllm serve\nvllm serve: error: unrecognized arguments: --nope\n\n"

    assert probe._last_words(log) == "vllm serve: error: unrecognized arguments: --nope"
    assert "ended without a word" in probe._last_words("")


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A resolver process that answers with the dict's `answer` and keeps what it was asked."""
    box: dict[str, Any] = {"answer": facts(group())}

    def run(command: list[str], **options: Any) -> None:
        assert [sys.executable, "-m", "lmcache_shm.vllm.probe.resolve"] == command[:3]
        box["request"] = json.loads(Path(command[3]).read_text())
        if box["answer"] is TimeoutError:
            raise subprocess.TimeoutExpired(command, options["timeout"])
        Path(command[4]).write_text(json.dumps(box["answer"]))

    monkeypatch.setattr(probe.subprocess, "run", run)
    return box


@pytest.fixture
def command() -> typer.Typer:
    app = typer.Typer()
    app.command(context_settings=probe.PROBE_CONTEXT)(probe.probe)
    return app


def test_unknown_options_go_to_vllm_and_json_is_one_object(
    answer: dict[str, Any], command: typer.Typer
) -> None:
    result = CliRunner().invoke(
        command, ["org/model", "--json", "--tensor-parallel-size", "2", "--platform", "cuda:9.0"]
    )

    assert result.exit_code == 0, result.output
    asked = {"model": "org/model", "args": ["--tensor-parallel-size", "2"], "platform": "cuda:9.0"}
    assert asked == answer["request"]
    said = json.loads(result.stdout)
    assert (said["n"], said["auto_chunk"]) == (16, 256)
    assert said["engine"].startswith("vllm serve org/model --tensor-parallel-size 2")


def test_vllms_reason_is_the_error(
    answer: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    answer["answer"] = {"error": "ValueError: no such model"}

    with pytest.raises(SystemExit) as end:
        app.main(["probe", "org/model"])

    assert end.value.code == 1
    assert capsys.readouterr().err == "lmcache-shm: ValueError: no such model\n"


def test_a_platform_that_does_not_exist_is_refused(command: typer.Typer) -> None:
    assert CliRunner().invoke(command, ["org/model", "--platform", "tpu"]).exit_code == 2


def test_a_silent_resolver_is_given_up(answer: dict[str, Any]) -> None:
    answer["answer"] = TimeoutError

    with pytest.raises(probe.ProbeError, match="did not resolve"):
        probe.resolve("org/model", [], timeout_s=1)
