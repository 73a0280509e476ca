"""One fault under load: streams of every kind run, it happens at a random moment, and each stream
is compared with the undisturbed one."""

import random
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tests.chaos.deployment import Deployment
from tests.chaos.faults import Fault
from tests.chaos.streams import Stream, bodies, start

TOKENS = 400
LONGEST_S = 200
HIT_S = 0.3  # a stream that never paused for so long was in another pipeline


@dataclass(frozen=True, slots=True)
class Round:
    """What one fault did. Seconds of pause are those of the streams that felt it; `stall` is how
    long this process itself stood still, through no fault of the server's."""

    graph: str
    fault: str
    replicas: int
    running: int
    identical: int
    differences: tuple[str, ...]
    pauses: tuple[float, ...]
    stall: float

    @property
    def median(self) -> float:
        return statistics.median(self.pauses) if self.pauses else 0.0

    @property
    def longest(self) -> float:
        return max(self.pauses, default=0.0)


def play(deployment: Deployment, fault: Fault, wanted: Sequence[Stream], seed: int) -> Round:
    chance = random.Random(f"{fault.name} {deployment.replicas} {seed}")
    streams = [
        Stream(deployment.url, body, after=chance.randrange(3, TOKENS // 4))
        for body in bodies(TOKENS)
    ]
    with stalls() as stall:
        threads = start(streams)
        for stream in streams:
            stream.begun.wait(LONGEST_S)
        time.sleep(chance.random() * 0.05)  # anywhere in a cycle
        running = sum([stream.mark() for stream in streams])
        fault.inject(deployment)
        for thread in threads:
            thread.join(LONGEST_S)
    deployment.withdraw()
    differences = [
        f"{number}: {difference}"
        for number, (a, b) in enumerate(zip(streams, wanted, strict=True))
        if (difference := a.difference(b)) is not None
    ]
    return Round(
        graph=deployment.graph,
        fault=fault.name,
        replicas=deployment.replicas,
        running=running,
        identical=len(streams) - len(differences),
        differences=tuple(differences),
        pauses=tuple(s.pause for s in streams if s.pause >= HIT_S),
        stall=stall[0],
    )


@contextmanager
def stalls() -> Iterator[list[float]]:
    """The longest time that this process did not run."""
    longest, over = [0.0], threading.Event()

    def watch() -> None:
        last = time.monotonic()
        while not over.wait(0.02):
            now = time.monotonic()
            longest[0], last = max(longest[0], now - last), now

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield longest
    finally:
        over.set()
        thread.join()
