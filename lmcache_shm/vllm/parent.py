"""Which configuration the scheduler obeys when our connector is a child of another one."""

import sys
from types import FrameType
from typing import Any

from vllm.v1.core.sched.interface import SchedulerInterface


def obeyed_config(own: Any) -> Any:
    """The KVTransferConfig of the scheduler that is being built; `own` if that is it, or if none is being built.

    Under MultiConnector each child gets a copy of the configuration with a KVTransferConfig of its own, of which
    the scheduler reads nothing. Only the calls that led here know the scheduler.
    """
    frame: FrameType | None = sys._getframe()  # noqa: SLF001
    while frame is not None:
        builder = frame.f_locals.get("self")
        if isinstance(builder, SchedulerInterface):
            return builder.vllm_config.kv_transfer_config
        frame = frame.f_back
    return own
