"""Commands run as real other users, whatever folders the interpreter and the checkout live in."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tools.harness import leftovers

ROOT = Path(__file__).parents[2]
# The interpreter may live in a folder that only root may enter: in a mount namespace of its own each command
# finds it, the packages and the checkout at an open place. /tmp, /dev/shm and /proc are everybody's, as always.
_ENTER = """
mount -t tmpfs -o mode=755 t /mnt && mkdir /mnt/python /mnt/site /mnt/code &&
mount --bind "$1" /mnt/python && mount --bind "$2" /mnt/site && mount --bind "$3" /mnt/code || exit 77
uid=$4; before=$5; shift 5
cd / && eval "$before" && exec setpriv --reuid $uid --regid $uid --clear-groups --pdeathsig TERM "$@"
"""
PYTHON = f"/mnt/python/bin/python{sys.version_info.major}.{sys.version_info.minor}"


class User:
    """Someone on this host, by uid; `runtime` is his runtime directory if nothing says otherwise."""

    def __init__(self, uid: int) -> None:
        self.uid = uid
        self.runtime = Path(f"/tmp/lmcache-shm-{uid}")

    def segments(self, instance: str = "default") -> list[Path]:
        """Paths of the data and the meta segment of his server."""
        data = f"/dev/shm/lmcache_shm.{self.uid}.{instance}"
        return [Path(data), Path(data + ".meta")]

    def start(
        self, *words: str, before: str = ":", caps: str = "", **environ: str
    ) -> subprocess.Popen[str]:
        """Run a command as this user, without a HOME. `before`: shell commands that root runs just before."""
        setpriv = [f"--inh-caps=+{caps}", f"--ambient-caps=+{caps}"] if caps else []
        code = [sys.base_prefix, sysconfig.get_paths()["purelib"], str(ROOT)]
        return subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", _ENTER, "sh", *code, str(self.uid), before, *setpriv, *words],
            env={
                "PATH": os.environ["PATH"], "PYTHONPATH": "/mnt/code:/mnt/site", "PYTHONDONTWRITEBYTECODE": "1",
                "LD_LIBRARY_PATH": "/mnt/python/lib",
                leftovers.MARK: leftovers.mark(), **environ,
            },
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, *words: str, **options: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*words, **options)
        try:
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
        assert "Traceback" not in err, err
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def command(self, *words: str, **options: str) -> subprocess.CompletedProcess[str]:
        """`lmcache-shm WORDS`."""
        return self.run(PYTHON, "-m", "lmcache_shm", *words, **options)

    def python(self, program: str, *words: str, **options: str) -> str:
        """What a program prints; it must end well."""
        done = self.run(PYTHON, "-c", program, *words, **options)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def refusal(self, *words: str, **options: str) -> str:
        """The one line on stderr that a command ends with."""
        done = self.command(*words, **options)
        assert done.returncode in {1, 2}, done
        lines = done.stderr.splitlines()
        assert len(lines) == 1, done.stderr
        return lines[0].removeprefix("lmcache-shm: ")

    def serve(self, *words: str, **environ: str) -> tuple[subprocess.Popen[str], str]:
        """A server, and what it said until it was ready."""
        process = self.start(
            PYTHON, "-m", "lmcache_shm", "server", "--l1-size-gb", "0.0625", *words, **environ
        )
        said = ""
        assert process.stdout is not None
        while "vllm serve" not in said:
            line = process.stdout.readline()
            if not line:
                raise AssertionError(f"the server did not start: {said}{process.communicate()[1]}")
            said += line
        return process, said

    def give(self, path: Path, mode: int = 0o600) -> Path:
        """Make what is there his."""
        path.chmod(mode) if not path.is_symlink() else None
        os.chown(path, self.uid, self.uid, follow_symlinks=False)
        return path


def users_of_this_run() -> tuple[User, User]:
    """Two users that no other run on this host has. Skips where nobody can become another user."""
    if os.geteuid() != 0:
        pytest.skip("needs root to become another user")
    pair = User(1_000_000 + 2 * os.getpid()), User(1_000_001 + 2 * os.getpid())
    done = pair[1].start("true")
    done.communicate()
    if done.returncode:
        pytest.skip("needs private mounts and free uids to become another user")
    return pair
