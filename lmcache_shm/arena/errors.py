"""Errors of an arena; each text is one line that names the fix."""


class ArenaError(Exception):
    """The arena cannot be made, mapped or trusted."""


class InstanceBusy(ArenaError):
    """Another live server owns the instance. `pid` is 0 when it is not known."""

    def __init__(self, instance: str, pid: int) -> None:
        who = f"process {pid}" if pid else "another process"
        super().__init__(
            f"instance {instance} is served by {who}; stop it, or choose another --instance"
        )
        self.pid = pid


class AdoptError(ArenaError):
    """There is no arena to adopt, or it differs from the one wanted, or it is damaged: see `reason`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class NotOurs(ArenaError):
    """Another user's file, or something that is no file, stands where one of ours should be."""


class RuntimeDirError(ArenaError):
    """The runtime directory is not safe or not writable."""
