"""Patches of vLLM for tiny models on a CPU. They touch only processes that ask for them by $TINY_MODELS_HOOKS."""

import importlib
import os

VARIABLE = "TINY_MODELS_HOOKS"
_installed: set[str] = set()


def install_named() -> None:
    """Install each hook named in $TINY_MODELS_HOOKS (comma-separated) once per process."""
    for name in filter(None, os.environ.get(VARIABLE, "").split(",")):
        if name not in _installed:
            _installed.add(name)
            importlib.import_module(f"{__name__}.{name}").install()
