"""What can go wrong in a running pipeline, by name."""

import signal
from collections.abc import Callable
from dataclasses import dataclass

from tests.chaos.deployment import PROCESS, WATCHDOG_S, Deployment

STAGE, PDM, REPLICA = "StageActor", "DrafterActor", "ServeReplica:spd:Pipeline"


@dataclass(frozen=True, slots=True)
class Fault:
    """`inject` does it. `pause_s`: what a stream may wait beyond the restart of a pipeline."""

    name: str
    inject: Callable[[Deployment], None]
    pause_s: float = 0.0
    restarts: bool = True


def _signal(name: str, title: str, which: int, sign: signal.Signals) -> Fault:
    pause = WATCHDOG_S if sign == signal.SIGSTOP else 0.0
    return Fault(f"{name} {sign.name}", lambda d: d.signal(title, which, sign), pause)


def _raise(place: str, text: str = "chaos", *, restarts: bool = True) -> Fault:
    what = "out of memory" if text == "memory" else "raises"
    return Fault(f"{place} {what}", lambda d: d.order(place, text), restarts=restarts)


RAY_FAULTS = (
    _signal("first stage", STAGE, 0, signal.SIGKILL),
    _signal("last stage", STAGE, -1, signal.SIGKILL),
    _signal("PDM", PDM, 0, signal.SIGKILL),
    _signal("replica", REPLICA, 0, signal.SIGKILL),
    _raise("stage-0.forward"),
    _raise("stage-1.forward", "memory"),
    _raise("stage-1.accept"),
    _raise("stage-1.report"),
    _raise("drafter.accept"),
    _raise("drafter.draft", restarts=False),
    _signal("last stage", STAGE, -1, signal.SIGSTOP),
    _signal("PDM", PDM, 0, signal.SIGSTOP),
)

# Of the processes of `graph: local`; on two cores the last one drafts too.
LOCAL_FAULTS = (
    _signal("first stage", PROCESS, 0, signal.SIGKILL),
    _signal("last stage", PROCESS, -1, signal.SIGKILL),
    _signal("replica", REPLICA, 0, signal.SIGKILL),
    _signal("first stage", PROCESS, 0, signal.SIGSTOP),
    _signal("last stage", PROCESS, -1, signal.SIGSTOP),
)

FAULTS = {"ray": RAY_FAULTS, "local": LOCAL_FAULTS}  # by graph
