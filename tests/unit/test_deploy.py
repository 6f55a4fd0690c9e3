"""The deployment examples, read as the tools that take them would: keys, options, and what must agree.

No container runs here. Each check returns complaints, and each is shown to complain about a sabotaged file.
"""

import copy
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache_shm.cli import app, doctor_engine
from lmcache_shm.config import OPTIONS

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "deploy"
UNIT = FOLDER / "lmcache-shm@.service"
UID = "1000"
TABLE_GB = 1.0
"""More than the slot table of 64 GiB, and vLLM's own use, need."""

# Of the Compose specification and of Kubernetes' Pod, what our files use: a misspelt key is in neither.
SERVICE = {
    "image", "build", "command", "user", "pid", "ports", "volumes", "environment", "restart", "stop_grace_period",
    "healthcheck", "depends_on", "ulimits", "deploy",
}  # fmt: skip
POD = {"shareProcessNamespace", "securityContext", "initContainers", "containers", "volumes"}
CONTAINER = {
    "name", "image", "restartPolicy", "args", "env", "ports", "startupProbe", "resources", "volumeMounts",
}  # fmt: skip


def load(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


def flags_of(command: str) -> set[str]:
    return {flag for parameter in app.load(command).params for flag in parameter.opts}


def wrong_words(words: list[str]) -> Iterator[str]:
    """Of a command line of ours."""
    if words[0] not in app.COMMANDS:
        yield f"no command {words[0]}"
    else:
        unknown = {word for word in words if word.startswith("--")} - flags_of(words[0])
        yield from (f"{words[0]} has no option {word}" for word in unknown)


def wrong_engine(words: list[str]) -> Iterator[str]:
    text = words[words.index("--kv-transfer-config") + 1]
    yield from (f.text for f in doctor_engine.transfer_config(text, {})[0] if f.level != "ok")


def arena_gb(words: list[str]) -> float:
    return float(words[words.index("--l1-size-gb") + 1])


def wrong_environment(names: dict[str, str]) -> Iterator[str]:
    known = {option.env for option in OPTIONS.values()}
    yield from (
        f"no variable {n}" for n in names if n.startswith("LMCACHE_SHM_") and n not in known
    )


def unknown(given: dict[str, Any], known: set[str], where: str) -> Iterator[str]:
    yield from (f"{where}: unknown key {key}" for key in set(given) - known)


# ----------------------------------------------------------------------------------------- compose
def compose(tree: dict[str, Any]) -> Iterator[str]:
    yield from unknown(tree, {"services", "volumes"}, "compose")
    cache, engine = tree["services"]["cache"], tree["services"]["engine"]
    mounts = []
    for name, service in tree["services"].items():
        yield from unknown(service, SERVICE, name)
        yield from wrong_environment(service["environment"])
        if service.get("user", "").partition(":")[0] != UID:
            yield f"{name} runs as another user than the image's directory belongs to"
        if service.get("pid") != "host":
            yield f"{name}: pid {service.get('pid')}"
        mounts.append(dict(text.split(":")[1::-1] for text in service["volumes"]))
        for volume in mounts[-1].values():
            if volume not in tree["volumes"]:
                yield f"{name}: no volume {volume}"
    folder = cache["environment"]["LMCACHE_SHM_RUNTIME_DIR"]
    for path in ("/dev/shm", folder):
        if len({mount.get(path, name) for name, mount in enumerate(mounts)}) != 1:
            yield f"{path} is not one volume"
    if engine["environment"]["LMCACHE_SHM_RUNTIME_DIR"] != folder:
        yield "two runtime directories"
    shm = tree["volumes"][mounts[0]["/dev/shm"]]["driver_opts"]
    size = re.search(r"\bsize=(\d+)g\b", shm["o"])
    if shm["type"] != "tmpfs" or not size or int(size[1]) < arena_gb(cache["command"]) + TABLE_GB:
        yield "/dev/shm is too small"
    yield from wrong_words(cache["command"])
    yield from wrong_words(cache["healthcheck"]["test"][2:])
    yield from wrong_engine(engine["command"])
    if engine["depends_on"]["cache"]["condition"] != "service_healthy":
        yield "the engine does not wait for the server"
    if int(cache["stop_grace_period"].rstrip("s")) <= OPTIONS["drain_s"].default:
        yield "killed before it has drained"
    if engine["ulimits"]["memlock"] != -1:
        yield "little locked memory"


# -------------------------------------------------------------------------------------- kubernetes
def kubernetes(tree: dict[str, Any]) -> Iterator[str]:
    yield from unknown(tree, {"apiVersion", "kind", "metadata", "spec"}, "pod")
    if (tree["apiVersion"], tree["kind"]) != ("v1", "Pod"):
        yield "no pod"
    spec = tree["spec"]
    yield from unknown(spec, POD, "spec")
    if not spec.get("shareProcessNamespace"):
        yield "processes do not see each other"
    security = spec["securityContext"]
    yield from unknown(security, {"runAsUser", "runAsGroup", "fsGroup"}, "securityContext")
    if str(security["runAsUser"]) != UID:
        yield "another user"
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    (cache,), (engine,) = spec["initContainers"], spec["containers"]
    for container in (cache, engine):
        yield from unknown(container, CONTAINER, container["name"])
        env = {item["name"]: item["value"] for item in container["env"]}
        yield from wrong_environment(env)
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        if not set(mounts.values()) <= set(volumes):
            yield f"{container['name']}: no such volume"
        if not any(env["LMCACHE_SHM_RUNTIME_DIR"].startswith(f"{path}/") for path in mounts):
            yield f"{container['name']}: the socket is not below a shared volume"
        if volumes[mounts["/dev/shm"]]["emptyDir"].get("medium") != "Memory":
            yield f"{container['name']}: /dev/shm is no memory"
        memory = container["resources"]
        if memory["limits"]["memory"] != memory["requests"]["memory"]:
            yield f"{container['name']}: memory is not guaranteed"
        if _gib(memory["limits"]["memory"]) < arena_gb(cache["args"]) + TABLE_GB:
            yield f"{container['name']}: less memory than it may touch"
    if cache["volumeMounts"] != engine["volumeMounts"]:
        yield "other mounts"
    if len({str(c["env"][0]) for c in (cache, engine)}) != 1:
        yield "two runtime directories"
    size = _gib(volumes["shm"]["emptyDir"]["sizeLimit"])
    if size < arena_gb(cache["args"]) + TABLE_GB:
        yield "/dev/shm is too small"
    if cache.get("restartPolicy") != "Always":
        yield "no sidecar: the engine would never start"
    yield from wrong_words(cache["args"])
    yield from wrong_words(cache["startupProbe"]["exec"]["command"][1:])
    yield from wrong_engine(engine["args"])


def _gib(text: str) -> float:
    return float(text.removesuffix("Gi"))


CHECKS: dict[str, Callable[[Any], Iterator[str]]] = {
    "compose.yaml": compose,
    "kubernetes.yaml": kubernetes,
}


@pytest.mark.parametrize("name", CHECKS)
def test_the_file_is_sound(name: str):
    assert list(CHECKS[name](load(name))) == []


# By file: where something is put, what, and the complaint.
SABOTAGE = [
    ("compose.yaml", "services.engine.ulimit", {"memlock": -1}, "unknown key ulimit"),
    ("compose.yaml", "services.engine.user", "0:0", "another user"),
    ("compose.yaml", "services.engine.pid", "service:cache", "pid service:cache"),
    ("compose.yaml", "services.engine.volumes", ["cache-run:/run/lmcache-shm"], "/dev/shm is not one volume"),
    ("compose.yaml", "volumes.shm.driver_opts.o", "size=60g", "too small"),
    ("compose.yaml", "services.cache.command", ["server", "--l1-size", "--l1-size-gb", "64"], "no option --l1-size"),
    ("compose.yaml", "services.cache.stop_grace_period", "1s", "drained"),
    ("compose.yaml", "services.cache.environment.LMCACHE_SHM_RUNTIMEDIR", "/x", "no variable"),
    ("kubernetes.yaml", "spec.shareProcessNamespaces", True, "unknown key shareProcessNamespaces"),
    ("kubernetes.yaml", "spec.shareProcessNamespace", False, "do not see each other"),
    ("kubernetes.yaml", "spec.volumes.0.emptyDir", {"sizeLimit": "70Gi"}, "no memory"),
    ("kubernetes.yaml", "spec.volumes.0.emptyDir.sizeLimit", "64Gi", "too small"),
    ("kubernetes.yaml", "spec.containers.0.resources.limits.memory", "16Gi", "less memory"),
    ("kubernetes.yaml", "spec.initContainers.0.restartPolicy", "Never", "no sidecar"),
    ("kubernetes.yaml", "spec.initContainers.0.env.0.value", "/tmp/x", "not below a shared volume"),
    ("kubernetes.yaml", "spec.containers.0.args", ["m", "--kv-transfer-config", "{}"], "kv_connector"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "where", "what", "complaint"), SABOTAGE)
def test_a_sabotaged_file_is_not(name: str, where: str, what: Any, complaint: str):
    tree = copy.deepcopy(load(name))
    *path, last = [int(word) if word.isdigit() else word for word in where.split(".")]
    place = tree
    for step in path:
        place = place[step]
    place[last] = what

    assert complaint in "\n".join(CHECKS[name](tree))


# -------------------------------------------------------------------------------------- Dockerfile
def instructions() -> list[tuple[str, str]]:
    text = (FOLDER / "Dockerfile").read_text(encoding="utf-8")
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line]  # type: ignore[misc]


def test_the_images_are_those_that_the_docs_build():
    """The last stage is the default one."""
    stages = [
        re.fullmatch(r"(\S+) AS (\w+)", text) for word, text in instructions() if word == "FROM"
    ]
    assert all(stages)
    names = [stage[2] for stage in stages if stage]
    docs = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")

    assert names[-1] == "server"
    assert set(re.findall(r"--target (\w+)", docs)) <= set(names)
    assert {service["build"].get("target", "server") for service in load("compose.yaml")["services"].values()} <= set(names)  # fmt: skip
    pinned = re.search(r"vllm>=(\d+\.\d+),", (ROOT / "pyproject.toml").read_text())
    assert pinned
    assert stages[0][1].startswith(f"vllm/vllm-openai:v{pinned[1]}.")  # type: ignore[index]


def test_the_images_run_our_commands_as_one_user():
    said = instructions()
    by_word = dict(said)

    assert {word for word, _ in said} <= {"FROM", "COPY", "RUN", "ENV", "USER", "STOPSIGNAL", "ENTRYPOINT", "CMD"}  # fmt: skip
    assert yaml.safe_load(by_word["ENTRYPOINT"]) == ["lmcache-shm"]
    assert list(wrong_words(yaml.safe_load(by_word["CMD"]))) == []
    assert by_word["USER"].partition(":")[0] == UID
    assert all(f"-o {UID}" in text for word, text in said if word == "RUN" and "install -d" in text)
    for word, text in said:
        if word == "COPY":
            assert (ROOT / text.split()[0]).exists()
        if word == "ENV":
            assert list(wrong_environment({text.partition("=")[0]: ""})) == []


# ----------------------------------------------------------------------------------------- systemd
def test_the_unit_starts_the_server_with_options_that_exist():
    text = UNIT.read_text(encoding="utf-8")
    (start,) = re.findall(r"^ExecStart=\S+ (.+)$", text, flags=re.MULTILINE)
    (seconds,) = re.findall(r"^TimeoutStopSec=(\d+)$", text, flags=re.MULTILINE)

    assert list(wrong_words(shlex.split(start))) == []
    assert list(wrong_environment(dict.fromkeys(re.findall(r"LMCACHE_SHM_\w+", text), ""))) == []
    assert int(seconds) > OPTIONS["drain_s"].default


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_takes_the_unit(tmp_path: Path):
    text = UNIT.read_text(encoding="utf-8").replace("/opt/lmcache-shm/bin/lmcache-shm", "/bin/true")

    assert verified(text, tmp_path) == ""
    assert "RestartSecs" in verified(text.replace("RestartSec", "RestartSecs"), tmp_path)


def verified(text: str, folder: Path) -> str:
    """What systemd says of a unit."""
    unit = folder / UNIT.name
    unit.write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False
    )
    return done.stderr
