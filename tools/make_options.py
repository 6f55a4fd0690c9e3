"""Write docs/options.md from lmcache_shm/config.py: ``python -m tools.make_options`` (``--check``: only compare)."""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from lmcache_shm.config import OPTIONS, Option, switch

TARGET = Path(__file__).parents[1] / "docs" / "options.md"
HEAD = """\
# Options

<!-- Made by tools/make_options.py from lmcache_shm/config.py: change it there. -->

There is one table of options, and three ways to set one. A flag (or a connector option) wins over the environment, which
wins over the default. A name that is unknown or misspelt, and a value that is not valid, is an error of one line that names
the nearest option or what is expected. `lmcache-shm config` shows every option, the value in force, and where it comes from.

| who | how | example |
|---|---|---|
| server, commands | a flag | `lmcache-shm server --l1-size-gb 64` |
| both | an environment variable | `LMCACHE_SHM_INSTANCE=prod` |
| engine | a key in `kv_connector_extra_config` | `"lmcache_shm.deadline_ms": 100` |
"""
SECTIONS = {
    "both": ("Server and engine", "Set alike on both sides: that is how they find each other."),
    "server": ("Server", "Flags of `lmcache-shm server`."),
    "engine": ("Engine", "Keys of `kv_connector_extra_config` in `--kv-transfer-config`."),
}


def page() -> str:
    parts = [HEAD]
    for scope, (title, text) in SECTIONS.items():
        chosen = [option for option in OPTIONS.values() if option.scope == scope]
        parts.append(f"\n## {title}\n\n{text}\n\n{table(chosen, scope)}")
    return "".join(parts)


def table(options: Iterable[Option], scope: str) -> str:
    lines = ["| option | default | unit | what it does |", "|---|---|---|---|"]
    lines += [
        f"| {'<br>'.join(ways(option, scope))} | {option.shown} | {option.unit} | {option.help} |"
        for option in options
    ]
    return "\n".join(lines) + "\n"


def ways(option: Option, scope: str) -> list[str]:
    flag = f"`{option.flag}`"
    if option.check is switch:
        flag += f", `--no-{option.flag[2:]}`"
    found = [flag] if scope in {"server", "both"} else []
    if scope in {"engine", "both"}:
        found.append(f"`{option.connector}`")
    return [*found, f"`{option.env}`"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        same = TARGET.exists() and TARGET.read_text(encoding="utf-8") == page()
        print(f"{TARGET}: {'up to date' if same else 'differs; run python -m tools.make_options'}")
        return int(not same)
    TARGET.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
