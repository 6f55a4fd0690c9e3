"""The benchmark measures what it says; its figures are not tested."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from lmcache_shm.cli import bench, bench_device, bench_results, bench_transfer
from lmcache_shm.cli.bench_transfer import KIB, SHAPES, KvMemory, LayerGroup, Shape
from tools.bench.page_sweep import page_sweep
from tools.harness.simulated_device import HostFixture

ROOT = Path(__file__).parents[3]


def small(shape: Shape) -> list[LayerGroup]:
    """The shape's groups with two layers and pages of a sixteenth."""
    return [
        LayerGroup(
            g.name,
            2,
            max(64, g.page_bytes // 16 // 64 * 64),
            g.pages_per_chunk,
            g.page_stride // 16 // 64 * 64 + 64 if g.page_stride else 0,
            g.stored_pages,
            g.order,
            g.heads,
        )
        for g in shape.groups
    ]


@pytest.mark.parametrize(
    "shape", [*SHAPES.values(), *page_sweep()], ids=lambda shape: shape.name.replace(" ", "-")
)
def test_every_shape_can_be_built(shape):
    """Bytes of a slot are layers x stored pages x page bytes, whatever the order in memory."""
    for group in small(shape):
        kv = KvMemory(group, 2)
        part = kv.layout.parts[0]

        assert part.pages.page_bytes == group.layers * group.page_bytes
        assert part.stored_pages == (group.stored_pages or group.pages_per_chunk)
        assert kv.block_ids.shape == (2, part.stored_pages)
        assert len(set(kv.block_ids.ravel().tolist())) == kv.block_ids.size


def test_bytes_per_page_of_the_models():
    """As their configurations say: KV heads x head size x 2 x bf16 x tokens of a block."""
    sizes = {name: [g.page_bytes for g in shape.groups] for name, shape in SHAPES.items()}

    assert sizes["llama-8b"] == [64 * KIB]
    assert sizes["gemma3-27b"] == [128 * KIB] * 2
    assert sizes["gpt-oss-120b"] == [32 * KIB] * 2
    assert sizes["qwen3.5-27b"][1] < SHAPES["qwen3.5-27b"].groups[1].page_stride


def test_copies_are_measured_and_shown(monkeypatch):
    monkeypatch.setattr(bench_transfer, "TARGET_BYTES", 1 << 20)
    shape = Shape("tiny", 64, (LayerGroup("full", 4, 4096, 4),))
    labels: list[str] = []

    rows = bench_transfer.run([shape], 1, labels.append)

    assert labels == ["tiny"]
    assert all(row["store_gbs"] > 0 and row["load_ratio"] > 0 for row in rows)
    assert rows[0]["first_store_gbs"] > 0
    text = io.StringIO()
    bench_results.show(
        {"machine": bench.machine(), "transfer": rows}, Console(file=text, width=100)
    )
    assert "tiny" in text.getvalue()


def test_two_threads_are_judged_where_memcpy_itself_gains():
    row = {"threads": 2, "case": "x", "store_gain": 1.6, "load_gain": 1.4}

    (line,) = bench_results._thread_lines([{**row, "memcpy_gain": 1.7}])
    assert "store 1.60x, load 1.40x (bar 1.5x: not met)" in line
    (line,) = bench_results._thread_lines([{**row, "memcpy_gain": 1.7, "load_gain": 1.5}])
    assert "bar 1.5x: met" in line
    (line,) = bench_results._thread_lines([{**row, "memcpy_gain": 1.2}])
    assert "not judged" in line


def test_gains_are_those_of_one_round_each():
    """Whole rounds may be slow, as the second and third are here: the ratio of the medians would be 0.8."""
    one = {name: [1.0, 4.0, 10.0] for name in ("memcpy", "store", "load")}
    two = {name: [0.5, 8.0, 5.0] for name in one}

    row = bench_transfer._row(2, 10**9, two, one)

    assert row["store_gain"] == row["memcpy_gain"] == 2.0
    assert row["store_ratio"] == 1.0
    assert row["store_gbs"] == 0.2


def test_device_back_ends_are_measured_on_the_simulated_device():
    speed = bench_device.run(
        HostFixture(), 1, lambda _: None, total=1 << 20, sizes=(1 << 16, 1 << 18)
    )

    assert {row["backend"] for row in speed["rows"]} == {
        "batch", "kernel", "rows", "ranges", "auto"
    }  # fmt: skip
    assert set(speed["peak_gbs"]) == {"store", "load", "both"}
    text = io.StringIO()
    bench_results.show_device(speed, Console(file=text, width=100))
    assert "256 KiB" in text.getvalue()
    assert "the kernel beats batched copies for pages below" in text.getvalue()


def test_crossover_is_the_last_size_at_which_the_kernel_wins_throughout():
    def rows(*speeds: tuple[float, float]):
        return [
            {"page_kib": 4 << i, "backend": name, "store_gbs": 0.0 + speed, "load_gbs": 1.0}
            for i, pair in enumerate(speeds)
            for name, speed in zip(("kernel", "batch"), pair, strict=True)
        ]

    assert bench_device.crossover(rows((9, 1), (5, 4), (3, 8), (9, 8)))["store"] == 8 * KIB + 1
    assert bench_device.crossover(rows((1, 9)))["store"] == 0


def test_bars_depend_on_the_bytes_that_are_contiguous():
    assert bench_results.copy_bar({"lane_kib": 32}) == 0.90
    assert bench_results.copy_bar({"lane_kib": 8}) == 0.70


@pytest.mark.parametrize("arguments", [["--model-shape", "no-such"], ["--device", "cuda"]])
def test_what_cannot_be_measured_is_said_in_one_line(arguments):
    if "cuda" in arguments and pytest.importorskip("torch").cuda.is_available():
        pytest.skip("there is a GPU")
    done = command("bench", "transfer", *arguments)

    assert done.returncode != 0
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_gpu_check_runs_on_the_simulated_device(tmp_path):
    """The program that proves the CUDA path is itself proved: bytes and races of one layout."""
    out = tmp_path / "result.json"
    done = subprocess.run(
        [
            sys.executable,
            "tools/gpu_check.py",
            "--device",
            "cpu",
            "--only",
            "DeepSeek",
            "--rounds",
            "1",
            "--json",
            str(out),
        ],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert (len(result["checks"]), result["failed"], result["never_used"]) == (8, 0, [])
    used = {row["backend"]: row["used"] for row in result["checks"]}
    assert {requested: used[requested] for requested in ("batch", "kernel", "ranges")} == {
        requested: requested for requested in ("batch", "kernel", "ranges")
    }
    assert set(used["rows"].split("+")) <= {"rows", "ranges"}  # of slots in two registrations
    assert result["speed"]["rows"]


BLIND = """
import sys
sys.path.insert(0, "tools")
sys.modules["vllm"] = None  # a machine without vLLM will do
from tools.harness.simulated_device import SimulatedDevice
SimulatedDevice.wait = lambda self, kind, event: None
SimulatedDevice.copy_kernel = None  # "not callable": as from a Triton that does not work
import gpu_check
sys.argv = ["gpu_check", "--device", "cpu", "--only", "DeepSeek", "--rounds", "1"]
sys.exit(gpu_check.main())
"""


@pytest.mark.slow
def test_gpu_check_notices_an_engine_that_ignores_events():
    """Negative control: without the wait, stores read too early and loads write too early. And where a back
    end cannot be used, the others' success does not hide it."""
    done = subprocess.run(
        [sys.executable, "-c", BLIND],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )

    assert done.returncode == 1, done.stdout + done.stderr
    assert "8 checks, 2 failed" in done.stdout
    assert "never used, though the device has them: kernel" in done.stdout


def test_a_back_end_that_another_one_stood_in_for_is_not_measured(monkeypatch):
    """Or the table would show the batch's figures under the kernel's name."""
    fixture = HostFixture()
    fixture.device.fail("copy_kernel")

    speed = bench_device.run(fixture, 1, lambda _: None, total=1 << 20, sizes=(1 << 16,))

    assert {row["backend"] for row in speed["rows"]} == {"batch", "rows", "ranges", "auto"}


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from lmcache_shm.cli.app import main; main()", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
