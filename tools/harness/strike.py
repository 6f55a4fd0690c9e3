"""Strike one process at one step, under load, and see everybody recover."""

import signal
from typing import Any

from tools.harness import failpoints
from tools.harness.cluster import Cluster
from tools.harness.engines import EngineProcess
from tools.harness.points import TRANSFER, Point
from tools.harness.wait import LONG_S, until

STORE = TRANSFER + "strided:RunCopier.store"
ATTEMPTS = 4
"""What is armed may have been killed, or cut off from the server, by the fault before."""
ATTEMPT_S = 12.0


def strike(cluster: Cluster, point: Point, when: str, do: str) -> None:
    """Arm it, bring it about, go on until it has struck: a test of nothing must not pass."""
    fault = failpoints.spec(point.at, when, point.nth, do)
    before = struck(cluster, point.at)
    for _ in range(ATTEMPTS):
        cluster.settle()
        victim = cluster.engines[0]
        arm(cluster, victim, point, fault)
        guest = provoke(cluster, point.by, victim)
        done = cluster.work(lambda: struck(cluster, point.at) > before, ATTEMPT_S)
        if guest is not None:
            cluster.settle()
            cluster.dismiss(guest)
        if done:
            return
    raise AssertionError(f"never reached: {when} {point.at}; {dict(cluster.total())}")


def arm(cluster: Cluster, victim: EngineProcess, point: Point, fault: dict[str, Any]) -> None:
    if point.process == "restart":
        cluster.kill_server()
        cluster.start_server(fault)
    elif point.process == "server":
        cluster.arm_server(fault)
    elif point.process == "scheduler":
        victim.tell(arm=fault)
    else:
        victim.tell(arm=fault, rank=int(victim.options["world"]) - 1)


def struck(cluster: Cluster, at: str) -> int:
    return sum(one["at"] == at for one in cluster.struck())


def provoke(cluster: Cluster, by: str, engine: EngineProcess) -> EngineProcess | None:
    """What brings a rare step about; the engine that came for it, if one did."""
    if by in {"clear", "reconnect"}:
        engine.tell(**{by: True})
    elif by == "kill worker":
        engine.tell(arm=failpoints.spec(STORE, "before", 2), rank=0)
    elif by == "lose scheduler":
        lose_scheduler(cluster, engine)
    elif by == "another size":
        return cluster.add_engines({"world": 1, "space": "other"})[0]
    return None


def lose_scheduler(cluster: Cluster, engine: EngineProcess, *, document: int | None = None) -> int:
    """Kill a scheduler while a worker of it is stopped in the middle of a copy; that worker's pid."""
    before = struck(cluster, STORE)
    # The third slot of a job is the second chunk's of the full group: the copy that lands late is in it.
    engine.ask(arm=failpoints.spec(STORE, "before", 3, "stop"), rank=0)
    if document is None:
        cluster.drive(lambda: struck(cluster, STORE) > before, "a worker stopped in a store")
    else:
        engine.tell(document=document, chunks=5)
        until(lambda: struck(cluster, STORE) > before, "a worker stopped in a store", LONG_S)
    pid = int(cluster.struck()[-1]["pid"])
    engine.process.send_signal(signal.SIGKILL)
    engine.process.wait()
    return pid
