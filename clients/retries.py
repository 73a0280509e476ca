"""Which requests are sent again, and when."""

import random
from dataclasses import dataclass

from clients.errors import ApiError, ClientError, RequestTimeoutError, TransportError

# Not 504: the server's own deadline is over, and would be again.
RETRIED = frozenset({408, 429, 500, 502, 503})
JITTER = 0.25


@dataclass(frozen=True, slots=True)
class Retries:
    """Up to `most` more tries of a request that failed before the first byte of its answer. Pauses
    double; a server that asks for a longer one than `longest_pause_s` gets no further try."""

    most: int = 2
    first_pause_s: float = 0.5
    longest_pause_s: float = 30.0

    def pause_s(self, failures: int, error: ClientError, chance: random.Random) -> float | None:
        """How long to wait after the `failures`-th failure (from 1); None: no more tries."""
        if failures > self.most or not _may_pass(error):
            return None
        asked = error.retry_after_s if isinstance(error, ApiError) else None
        if asked is None:
            pause = min(self.longest_pause_s, self.first_pause_s * 2.0 ** (failures - 1))
            return pause * (1 - JITTER * chance.random())
        # Never before the time that was asked for, and not all clients at once.
        return asked * (1 + JITTER * chance.random()) if asked <= self.longest_pause_s else None


def _may_pass(error: ClientError) -> bool:
    if isinstance(error, ApiError):
        return error.status in RETRIED
    # After a timeout the server may still be at work on the first one.
    return isinstance(error, TransportError) and not isinstance(error, RequestTimeoutError)
