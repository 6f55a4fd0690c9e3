"""Temporary folders that do not outlive their users: what a killed process left, the next one removes."""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.harness.leftovers import is_ours

_OURS = re.compile(r"lmcshm-tool-(\d+)-")


@contextmanager
def scratch_folder() -> Iterator[str]:
    """A folder for this process's sockets and files, removed at the end; those of dead processes go now."""
    for left in Path(tempfile.gettempdir()).iterdir():
        match = _OURS.match(left.name)
        if match and is_ours(left) and not Path("/proc", match[1]).exists():
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"lmcshm-tool-{os.getpid()}-") as folder:
        yield folder
