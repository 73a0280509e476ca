"""Metrics: the page made of several nodes' expositions, and the buckets."""

import asyncio
import socket
from itertools import pairwise

import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from service import metrics, metrics_page
from service.metrics_page import MetricsPage, merge, scrape_nodes

NODE = """\
# HELP ray_spd_cycle_seconds A \\"cycle\\".
# TYPE ray_spd_cycle_seconds histogram
ray_spd_cycle_seconds_bucket{{NodeAddress="{node}",le="0.1"}} 1.0
ray_spd_cycle_seconds_bucket{{NodeAddress="{node}",le="+Inf"}} 2.0
ray_spd_cycle_seconds_count{{NodeAddress="{node}"}} 2.0
ray_spd_cycle_seconds_sum{{NodeAddress="{node}"}} 0.5
# HELP ray_node_cpu Not ours.
# TYPE ray_node_cpu gauge
ray_node_cpu{{NodeAddress="{node}"}} 7.0
# HELP ray_spd_prompt_tokens_total Tokens.
# TYPE ray_spd_prompt_tokens_total counter
ray_spd_prompt_tokens_total{{NodeAddress="{node}",model_name="a\\"b\\\\c"}} 3.0
# HELP ray_serve_replicas Replicas.
# TYPE ray_serve_replicas gauge
ray_serve_replicas{{NodeAddress="{node}"}} 1.0
"""


def _samples(page: bytes) -> dict[str, list[tuple[str, float]]]:
    families = list(text_string_to_metric_families(page.decode()))
    assert len({family.name for family in families}) == len(families)
    return {
        family.name: [(s.labels.get("NodeAddress", ""), s.value) for s in family.samples]
        for family in families
    }


def test_merge() -> None:
    page = merge([NODE.format(node="a"), NODE.format(node="b")])
    assert page.count(b"# TYPE ray_spd_cycle_seconds histogram") == 1
    assert page.count(b"# HELP ray_spd_prompt_tokens_total Tokens.") == 1
    assert b"ray_node" not in page
    samples = _samples(page)
    assert samples["ray_spd_prompt_tokens"] == [("a", 3.0), ("b", 3.0)]
    assert samples["ray_serve_replicas"] == [("a", 1.0), ("b", 1.0)]
    assert len(samples["ray_spd_cycle_seconds"]) == 8
    assert samples["ray_spd_metrics_nodes_unreachable"] == [("", 0.0)]
    assert b'model_name="a\\"b\\\\c"' in page


@pytest.mark.parametrize("lost", [None, "ray_spd_x{ nonsense"])
def test_merge_without_a_node(lost: str | None) -> None:
    samples = _samples(merge([NODE.format(node="a"), lost]))
    assert samples["ray_serve_replicas"] == [("a", 1.0)]
    assert samples["ray_spd_metrics_nodes_unreachable"] == [("", 1.0)]


async def test_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = 0

    async def good(_: web.Request) -> web.Response:
        nonlocal reads
        reads += 1
        return web.Response(text=NODE.format(node="a"))

    async def slow(_: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    app = web.Application()
    app.router.add_get("/good", good)
    app.router.add_get("/slow", slow)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    listener = socket.create_server(("127.0.0.1", 0))
    await web.SockSite(runner, listener).start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    endpoints = [f"{url}/{path}" for path in ("good", "missing", "slow")] + ["http://127.0.0.1:1"]
    monkeypatch.setattr(metrics_page, "NODE_TIMEOUT_S", 0.3)
    monkeypatch.setattr(metrics_page, "node_endpoints", lambda: endpoints)
    try:
        samples = _samples(await scrape_nodes(endpoints))
        page = MetricsPage()
        first, second = await asyncio.gather(page(), page())
    finally:
        await runner.cleanup()
    assert samples["ray_serve_replicas"] == [("a", 1.0)]
    assert samples["ray_spd_metrics_nodes_unreachable"] == [("", 3.0)]
    assert first == second
    assert reads == 2  # the two pages were one


@pytest.mark.parametrize(
    "buckets", [metrics.TOKEN_SECONDS, metrics.FIRST_TOKEN_SECONDS, metrics.REQUEST_SECONDS]
)
def test_buckets(buckets: tuple[float, ...]) -> None:
    assert all(low < high for low, high in pairwise(buckets))


def test_token_buckets_resolve_cycles() -> None:
    assert metrics.TOKEN_SECONDS[0] == 0.0005
    assert sum(0.004 <= bound <= 0.011 for bound in metrics.TOKEN_SECONDS) >= 5
