"""Metrics: their definitions, and the page made of several nodes' expositions."""

import asyncio
import re
import socket
import threading
from itertools import pairwise
from pathlib import Path

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from service import metrics, metrics_page
from service.metrics import METRICS, Metric
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


async def test_without_a_list_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The nodes are those that were there; before there were any, something is missing."""
    read: list[list[str]] = []

    async def scrape(endpoints: list[str]) -> bytes:
        read.append(list(endpoints))
        return merge([None])

    def hangs() -> list[str]:
        is_over.wait(10)
        return ["late"]

    def fails() -> list[str]:
        raise RuntimeError("the head is gone")

    is_over = threading.Event()
    monkeypatch.setattr(metrics_page, "NODE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(metrics_page, "CACHE_S", 0.0)
    page = MetricsPage()
    monkeypatch.setattr(metrics_page, "node_endpoints", fails)
    assert _samples(await page())["ray_spd_metrics_nodes_unreachable"] == [("", 1.0)]
    monkeypatch.setattr(metrics_page, "scrape_nodes", scrape)
    for look, known in ((lambda: ["a", "b"], ["a", "b"]), (fails, ["a", "b"]), (hangs, ["a", "b"])):
        monkeypatch.setattr(metrics_page, "node_endpoints", look)
        await page()
        assert read.pop() == known
    is_over.set()


def test_constant_labels_are_left_out() -> None:
    """Half of the page otherwise. What tells processes and nodes apart stays."""
    labels = 'NodeAddress="a",WorkerId="w",SessionName="s",Version="2",otel_scope_name="x"'
    page = merge([f"# TYPE ray_spd_x gauge\nray_spd_x{{{labels}}} 1.0\n"]).decode()
    assert 'ray_spd_x{NodeAddress="a",WorkerId="w"} 1.0' in page.splitlines()


names = st.sampled_from(["ray_spd_a", "ray_spd_b", "ray_serve_c", "ray_other"])
values = st.floats(allow_nan=False, allow_infinity=False)


@settings(max_examples=30)
@given(st.lists(st.none() | st.dictionaries(names, st.dictionaries(st.text(), values)), max_size=4))
def test_merging_keeps_every_sample(nodes: list[dict[str, dict[str, float]] | None]) -> None:
    """Of any number of nodes, whatever the values of labels."""

    def exposition(node: int, families: dict[str, dict[str, float]]) -> str:
        registry = CollectorRegistry()
        for name, samples in families.items():
            gauge = Gauge(name, name, ["NodeAddress", "x"], registry=registry)
            for label, value in samples.items():
                gauge.labels(str(node), label).set(value)
        return generate_latest(registry).decode()

    page = merge(None if f is None else exposition(n, f) for n, f in enumerate(nodes))
    families = list(text_string_to_metric_families(page.decode()))
    assert len({family.name for family in families}) == len(families)
    merged = {
        (s.name, s.labels.get("NodeAddress", ""), s.labels.get("x", "")): s.value
        for family in families
        for s in family.samples
    }
    wanted = {
        (name, str(node), label): value
        for node, found in enumerate(nodes)
        for name, samples in (found or {}).items()
        for label, value in samples.items()
        if name != "ray_other"
    }
    missing = sum(node is None for node in nodes)
    assert merged == wanted | {("ray_spd_metrics_nodes_unreachable", "", ""): missing}


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_definitions(metric: Metric) -> None:
    assert re.fullmatch(r"[a-z][a-z0-9_]*[a-z]", metric.name)
    assert not metric.name.endswith(("_total", "_count", "_sum", "_bucket"))
    assert metric.help.endswith(".")
    assert (metric.kind == "histogram") == bool(metric.buckets)
    assert all(low < high for low, high in pairwise(metric.buckets))


def test_the_documentation_lists_every_metric() -> None:
    lines = (Path(__file__).parent.parent / "docs" / "metrics.md").read_text().splitlines()
    for origin in ("ingress", "pipeline", "page"):
        table = [_row(metric) for metric in METRICS if metric.origin == origin]
        begin = lines.index(table[0])
        assert lines[begin : begin + len(table)] == table
    assert len(METRICS) == len({metric.name for metric in METRICS})


def _row(metric: Metric) -> str:
    label = metric.label or ""
    if metric.values:
        label += ": " + ", ".join(metric.values)
    return f"| `{metric.exported}` | {metric.kind} | {label} | {metric.help} |"


def test_token_buckets_resolve_cycles() -> None:
    assert metrics.TOKEN_SECONDS[0] == 0.0005
    assert sum(0.004 <= bound <= 0.011 for bound in metrics.TOKEN_SECONDS) >= 5
