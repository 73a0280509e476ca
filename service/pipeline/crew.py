"""Threads that do one thing each, all at once, again and again."""

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")
Task = Callable[[], T]


class Crew(Generic[T]):
    """A thread for each task of a round. A pool's queue and futures cost tens of microseconds a
    task, and their reader wakes up for each; of many short tasks that is a good part."""

    def __init__(self, size: int, name: str) -> None:
        self._inboxes: list[SimpleQueue[Task[T] | None]] = [SimpleQueue() for _ in range(size)]
        self._results: list[T | BaseException | None] = [None] * size
        self._unfinished, self._lock = 0, threading.Lock()
        self._round_is_over: SimpleQueue[None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, args=(k,), name=f"{name}-{k}", daemon=True)
            for k in range(size)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, tasks: Sequence[Task[T]]) -> list[T]:
        """Does a task in each of the first threads. Returns all results, or raises the first
        task's exception, once all are done."""
        self._unfinished = len(tasks)
        for inbox, task in zip(self._inboxes, tasks, strict=False):
            inbox.put(task)
        self._round_is_over.get()
        results: list[T] = []
        for result in self._results[: len(tasks)]:
            if isinstance(result, BaseException):
                raise result
            results.append(result)  # type: ignore[arg-type]  # each task has left its own
        return results

    def _work(self, k: int) -> None:
        while (task := self._inboxes[k].get()) is not None:
            try:
                self._results[k] = task()
            except BaseException as error:
                self._results[k] = error
            del task  # it may hold large tensors
            with self._lock:
                self._unfinished -= 1
                last = self._unfinished == 0
            if last:
                self._round_is_over.put(None)

    def close(self) -> None:
        for inbox in self._inboxes:
            inbox.put(None)
        for thread in self._threads:
            thread.join()
