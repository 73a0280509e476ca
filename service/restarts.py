"""How often pipelines have been started anew. Every replica of a deployment sees the same: the
record is in the cluster's key-value store, since a replica that fails takes all of its own along.
"""

import hashlib
import json
import time
from dataclasses import asdict, dataclass, replace
from typing import Protocol

from service.config import Settings

NAMESPACE = b"spd"
CACHE_S = 1.0


class Store(Protocol):
    """A key-value store that the whole cluster sees."""

    def put(self, key: str, value: str) -> None: ...

    def all(self, prefix: str) -> dict[str, str]: ...

    def delete(self, key: str) -> None: ...


class ClusterStore:
    """That of Ray's control plane. Ray has no public call for it; Serve itself uses this one."""

    def put(self, key: str, value: str) -> None:
        from ray.experimental import internal_kv

        internal_kv._internal_kv_put(key, value, namespace=NAMESPACE)

    def all(self, prefix: str) -> dict[str, str]:
        from ray.experimental import internal_kv

        found = {}
        for key in internal_kv._internal_kv_list(prefix, namespace=NAMESPACE):
            value = internal_kv._internal_kv_get(key, namespace=NAMESPACE)
            if value is not None:
                found[key.decode()] = value.decode()
        return found

    def delete(self, key: str) -> None:
        from ray.experimental import internal_kv

        internal_kv._internal_kv_del(key, namespace=NAMESPACE)


@dataclass(frozen=True, slots=True)
class Start:
    """When a replica was started, in seconds of the epoch, whether in place of a lost one, and why
    it failed itself, if it could tell."""

    at: float
    is_restart: bool
    failure: str | None = None


class Restarts:
    """The record of one deployment. A replica that ends as it should is forgotten; so a start is a
    restart where as many others as there should be have not been forgotten."""

    def __init__(self, app: str, settings: Settings, store: Store) -> None:
        digest = hashlib.sha256(settings.model_dump_json().encode()).hexdigest()[:16]
        self._prefix = f"{app}/{digest}/"  # another configuration begins at zero
        self._replicas = settings.pipeline.replicas
        self._most = settings.limits.max_restarts
        self._window_s = settings.limits.restart_window_s
        self._store = store
        self._known: dict[str, Start] = {}
        self._expires = 0.0

    def started(self, replica: str) -> Start:
        start = Start(time.time(), is_restart=len(self._starts()) >= self._replicas)
        self._put(replica, start)
        return start

    def failed(self, replica: str, start: Start, failure: str) -> None:
        self._put(replica, replace(start, failure=failure))

    def last_failure(self) -> str | None:
        """Why the newest replica of those that could tell has failed."""
        told = [start for start in self._starts() if start.failure is not None]
        return max(told, key=lambda start: start.at).failure if told else None

    def noted(self) -> dict[str, Start]:
        """The record, by replica."""
        self._starts()
        return dict(self._known)

    def _put(self, replica: str, start: Start) -> None:
        self._store.put(self._prefix + replica, json.dumps(asdict(start)))
        self._expires = 0.0

    def ended(self, replica: str) -> None:
        """A replica ended because it was told to."""
        self._store.delete(self._prefix + replica)

    def wait_s(self) -> float:
        """How long the window forbids one more restart; 0 where it does not."""
        now = time.time()
        recent = sorted(
            start.at
            for start in self._starts()
            if start.is_restart and now - start.at < self._window_s
        )
        if len(recent) <= self._most:
            return 0.0
        return recent[len(recent) - self._most - 1] + self._window_s - now

    def given_up(self) -> str | None:
        """In words for clients and operators, if no pipeline is started for now."""
        wait = self.wait_s()
        if wait <= 0:
            return None
        return (
            f"It was restarted more than {self._most} times in {self._window_s:g} s; the next try "
            f"is in {wait:.0f} s."
        )

    def _starts(self) -> list[Start]:
        """Of all replicas, at most a second old: many requests may ask."""
        if time.monotonic() >= self._expires:
            noted = self._store.all(self._prefix)
            self._known = {replica: Start(**json.loads(noted[replica])) for replica in noted}
            self._expires = time.monotonic() + CACHE_S
        return list(self._known.values())
