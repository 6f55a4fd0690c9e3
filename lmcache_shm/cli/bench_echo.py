"""A process that sends back what it gets: what a Unix socket costs without us."""

import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ONE = """
import socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("ready", flush=True)
peer, _ = listener.accept()
while data := peer.recv(65536):
    peer.sendall(data)
"""
"""For one client, without anything that could be left out."""

MANY = """
import select, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen(64)
print("ready", flush=True)
peers = {}
poll = select.epoll()
for _ in range(int(sys.argv[2])):
    peer, _ = listener.accept()
    peers[peer.fileno()] = peer
    poll.register(peer, select.EPOLLIN)
while peers:
    for number, _ in poll.poll():
        data = peers[number].recv(65536)
        if data:
            peers[number].send(data)
        else:
            peers.pop(number).close()
"""


@contextmanager
def echo_peers(count: int) -> Iterator[list[socket.socket]]:
    """So many connections to one such process."""
    with tempfile.TemporaryDirectory(prefix="lmcache-shm-bench-") as folder:
        path = str(Path(folder) / "echo")
        command = [sys.executable, "-c", ONE if count == 1 else MANY, path, str(count)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            if process.stdout is not None:
                process.stdout.readline()
            peers = [socket.socket(socket.AF_UNIX) for _ in range(count)]
            try:
                for peer in peers:
                    peer.connect(path)
                yield peers
            finally:
                for peer in peers:
                    peer.close()
                process.terminate()
