"""How many requests are in the house, and whether more may come in."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from service.api.errors import ApiError
from service.metrics import Rejection

RETRY_AFTER_S = 2


class Door:
    """Counts the texts that are being generated, those that wait for a slot included. Beyond
    `most` no request is let in; one with several choices comes in as a whole."""

    def __init__(
        self, most: int | None = None, on_refusal: Callable[[Rejection], None] = lambda _: None
    ) -> None:
        self._most, self._on_refusal = most, on_refusal
        self.inside = 0
        self.is_closed = False

    def check(self) -> None:
        """Raises ApiError 503 for a server that is shutting down, 429 for a full one."""
        if self.is_closed:
            self._on_refusal("shutting_down")
            raise ApiError(
                503,
                "The server is shutting down; try again.",
                code="shutting_down",
                retry_after_s=RETRY_AFTER_S,
            )
        if self._most is not None and self.inside >= self._most:
            self._on_refusal("queue_full")
            raise queue_full()

    @contextmanager
    def entered(self, texts: int) -> Iterator[None]:
        """Raises what `check` does."""
        self.check()
        self.inside += texts
        try:
            yield
        finally:
            self.inside -= texts


def queue_full() -> ApiError:
    return ApiError(
        429,
        "Too many requests wait for this server; try again.",
        code="queue_full",
        retry_after_s=RETRY_AFTER_S,
    )
