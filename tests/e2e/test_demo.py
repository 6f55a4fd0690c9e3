"""The README's one command: what it promises is what it prints, and nothing of it is left."""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUN = {
    "ttft_s", "prompt_tokens", "local_hit_tokens", "external_hit_tokens", "tokens_equal_to_baseline",
    "logprobs_equal_to_baseline",
}  # fmt: skip


def test_the_readmes_demo_serves_from_the_arena_with_equal_outputs() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (options,) = re.findall(r"^\./bin/demo (.+)$", readme, flags=re.MULTILINE)
    # bin/demo is this, after it has made sure of its environment.
    command = [sys.executable, "-m", "tools.demo", *options.split(), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for name in ("cold", "warm", "second_engine"):
        assert set(found[name]) >= RUN
        assert found[name]["tokens_equal_to_baseline"]
        assert found[name]["logprobs_equal_to_baseline"]
    assert found["warm"]["external_hit_tokens"] > found["cold"]["external_hit_tokens"]
    assert found["second_engine"]["external_hit_tokens"] > 0
    assert found["negative_control"]["output_changed"]
    # The README shows a run of this very demo.
    shown = re.findall(r"┃ ([a-zA-Z ]+?) ┃", done.stdout.splitlines()[2])
    assert all(name in readme for name in shown)
    assert {group["rule"] for group in found["groups"]} == {"full", "recurrent"}
