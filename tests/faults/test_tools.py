"""The long tools, for a few seconds."""

import subprocess
import sys


def run(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


def test_a_short_soak_of_random_faults_ends_with_a_clean_table() -> None:
    said = run("tools.soak", "--seconds", "12", "--seed", "3")
    for line in ("| **wrong bytes** | 0 |", "| **stuck requests** | 0 |"):
        assert line in said
    assert "| **leaks** (memory, names, pins, reservations, quarantine) | 0 |" in said


def test_a_short_flood_of_malformed_frames_harms_nothing() -> None:
    said = run("tools.fuzz_frames", "--frames", "4000", "--seed", "2")
    assert "frames looked at" in said
