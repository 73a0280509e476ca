"""The text of GET /metrics, the same from every replica: what all nodes' exporters say of us.

A page of one process's own counters would change with the replica that answers. On Kubernetes
scrape the nodes or this page, not both.
"""

import asyncio
import logging
import time
from collections.abc import Iterable

import aiohttp
import ray
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from service.metrics import PREFIX, UNREACHABLE

log = logging.getLogger("ray.serve")

_SCOPE = ("name", "version", "schema_url")
PREFIXES = (PREFIX, "ray_serve_")
# Of Ray's labels, those that are the same on all series of a node, and half of the text.
CONSTANT = ("SessionName", "Version", *(f"otel_scope_{part}" for part in _SCOPE))
NODE_TIMEOUT_S = 2.0
CACHE_S = 1.0


def node_endpoints() -> list[str]:
    """The exporters' addresses on all alive nodes. Blocks for an answer of Ray's control store."""
    return [
        f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        for node in ray.nodes()
        if node["Alive"]
    ]


class MetricsPage:
    """The page for `create_api`, made anew at most once a second however many ask for it."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._endpoints: list[str] = []
        self._text = b""
        self._expires = 0.0

    async def __call__(self) -> bytes:
        async with self._lock:
            if time.monotonic() >= self._expires:
                await self._look_for_nodes()
                self._text = await scrape_nodes(self._endpoints)
                self._expires = time.monotonic() + CACHE_S
            return self._text

    async def _look_for_nodes(self) -> None:
        """While Ray's control store can't say, the nodes are those that were there."""
        try:
            async with asyncio.timeout(NODE_TIMEOUT_S):
                self._endpoints = await asyncio.to_thread(node_endpoints)
        except Exception as error:  # Ray's own are of many kinds
            log.warning("no list of nodes for /metrics: %r", error)


async def scrape_nodes(endpoints: list[str]) -> bytes:
    """Our metrics of all nodes as one exposition. A node that can't be read is left out and
    counted in `ray_spd_metrics_nodes_unreachable`. Without any, all are."""
    timeout = aiohttp.ClientTimeout(total=NODE_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        answers = await asyncio.gather(*(_read(session, endpoint) for endpoint in endpoints))
    # In a thread: parsing takes tens of milliseconds, and tokens stream through this loop.
    return await asyncio.to_thread(merge, answers or [None])


async def _read(session: aiohttp.ClientSession, endpoint: str) -> str | None:
    try:
        async with session.get(endpoint, raise_for_status=True) as response:
            return await response.text()
    except (aiohttp.ClientError, TimeoutError, UnicodeDecodeError):
        return None


def merge(expositions: Iterable[str | None]) -> bytes:
    """One exposition of several, in which each family stands once, as the format demands. Nodes
    differ by label, so no sample comes twice. None stands for a node that gave none."""
    families: dict[tuple[str, str], Metric] = {}
    unreachable = 0
    for text in expositions:
        try:
            parsed = _families(text) if text is not None else None
        except ValueError:
            parsed = None
        if parsed is None:
            unreachable += 1
            continue
        for family in parsed:
            known = families.setdefault((family.name, family.type), family)
            if known is not family:
                known.samples.extend(family.samples)
    gauge = GaugeMetricFamily(UNREACHABLE.exported, UNREACHABLE.help, unreachable)
    return _render([*families.values(), gauge])


def _families(text: str) -> list[Metric]:
    """Those of ours. The rest are dropped before parsing, which is slow."""
    starts = tuple(f"{lead}{prefix}" for lead in ("", "# HELP ", "# TYPE ") for prefix in PREFIXES)
    ours = "".join(line + "\n" for line in text.split("\n") if line.startswith(starts))
    families = list(text_string_to_metric_families(ours))
    for family in families:
        for sample in family.samples:
            for label in CONSTANT:
                sample.labels.pop(label, None)
    return families


class _Fixed(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _render(families: list[Metric]) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Fixed(families))
    return generate_latest(registry)
