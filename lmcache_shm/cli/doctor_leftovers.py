"""What dead servers left: segments in /dev/shm, sockets and locks in the runtime directory."""

from collections.abc import Iterator
from pathlib import Path

