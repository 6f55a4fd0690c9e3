"""The demo is stopped at an awkward moment: nothing that it started outlives it (the fixture of every test sees to that)."""

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tools.scratch import scratch_folder

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda n: n.name
)
@pytest.mark.parametrize("moment", ["a server", "vLLM"], ids=["server starts", "engine loads"])
def test_a_stopped_demo_leaves_nothing(number: signal.Signals, moment: str, tmp_path: Path) -> None:
    """Ctrl-C, a service manager's SIGTERM, and kill −9, while the server or the first engine starts."""
    command = [sys.executable, "-m", "tools.demo", "--model", "llama", "--size-mb", "64"]
    with subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as demo:
        assert demo.stderr is not None
        for line in demo.stderr:
            if f"starting {moment}" in line:
                break
        demo.send_signal(number)
        try:
            demo.communicate(timeout=60)
        finally:
            demo.kill()

    assert demo.returncode == (-9 if number == signal.SIGKILL else 128 + number)
    with scratch_folder():  # what a demo that was killed left, the next tool removes
        pass
    assert not list(Path(tempfile.gettempdir()).glob(f"lmcshm-tool-{demo.pid}-*"))
