"""A real Prometheus scrapes a running deployment: two ingresses, two pipelines of emulated devices.

It reads Ray's exporter on the node (job `nodes`) and GET /metrics of the API (job `page`), and both
must tell what the clients know. The deployment also sends its spans to a collector.
"""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import httpx
import pytest
import yaml

from service.metrics import METRICS
from tests.prometheus import Prometheus, expressions, needs_prometheus, prometheus, promtool
from tests.serving import Served, serve
from tests.test_alerts import DASHBOARD, RULES
from tests.test_tracing import CALLER, PARENT, TRACE, Collected, collector

pytestmark = needs_prometheus

MODEL = "emulated"
STAGES = 3
REQUESTS, TOKENS = 24, 20
JOBS = ("nodes", "page")
# Labels of Prometheus, Serve and Ray.
FOREIGN = {
    *("__name__", "instance", "job", "le"),
    *("application", "deployment", "replica"),
    *("Component", "NodeAddress", "SessionName", "Version", "WorkerId"),
    *(f"otel_scope_{part}" for part in ("name", "version", "schema_url")),
}
DEPLOYMENT = {
    "applications": [
        {
            "name": "spd",
            "route_prefix": "/",
            "import_path": "service.app:build",
            "args": {
                "model": "smollm2-135m-instruct",
                "served_model_name": MODEL,
                "device": "emulated",
                "emulated": {
                    "stage_ms": 3,
                    "draft_ms": 2,
                    "acceptance": 0.8,
                    "hidden_size": 64,
                },
                "pipeline": {"graph": "local", "stages": STAGES, "slots": 2, "replicas": 2},
                "drafter": {"kind": "pdm"},
                "limits": {"queue": 2},
            },
            "deployments": [{"name": "Ingress", "num_replicas": 2}],
        }
    ]
}


def deployment(collector_url: str) -> str:
    """As a serve YAML."""
    (application,) = DEPLOYMENT["applications"]
    args = application["args"] | {"tracing": {"endpoint": collector_url}}
    return yaml.safe_dump({"applications": [application | {"args": args}]})


@dataclass
class Known:
    """What the clients of the deployment know of their requests."""

    requests: int = 0
    prompt_tokens: int = 0
    cached: int = 0
    generated: int = 0
    accepted: int = 0
    rejected: int = 0


@dataclass
class Watched:
    served: Served
    prometheus: Prometheus
    known: Known
    collected: Collected


def ask(url: str, number: int) -> dict[str, int]:
    """One chat; its usage."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"{number} is the number of this request."}],
        "max_tokens": TOKENS,
        "temperature": 0,
    }
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    details = usage["completion_tokens_details"]
    return {
        "requests": 1,
        "prompt_tokens": usage["prompt_tokens"],
        "cached": usage["prompt_tokens_details"]["cached_tokens"],
        "generated": usage["completion_tokens"],
        "accepted": details["accepted_prediction_tokens"],
        "rejected": details["rejected_prediction_tokens"],
    }


def burst(url: str, known: Known, first: int) -> None:
    with ThreadPoolExecutor(4) as clients:
        for usage in clients.map(lambda n: ask(url, n), range(first, first + REQUESTS)):
            for name, count in usage.items():
                setattr(known, name, getattr(known, name) + count)


def scraping(served: Served, folder: Path) -> dict:
    """Both ways, as docs/metrics.md shows them."""
    (folder / "rules.yaml").write_text(yaml.safe_dump(RULES))
    return {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(folder / "rules.yaml")],
        "scrape_configs": [
            {
                "job_name": "nodes",
                "file_sd_configs": [
                    {"files": ["/tmp/ray/session_latest/prom_metrics_service_discovery.json"]}
                ],
                # The file names a job of its own.
                "relabel_configs": [{"target_label": "job", "replacement": "nodes"}],
            },
            {
                "job_name": "page",
                "static_configs": [{"targets": [served.url.removeprefix("http://")]}],
            },
        ],
    }


@contextmanager
def watched_deployment(folder: Path) -> Iterator[Watched]:
    # Ray reports each ten seconds by default.
    report = {"RAY_metrics_report_interval_ms": "1000", "OTEL_BSP_SCHEDULE_DELAY": "100"}
    with (
        collector() as collected,
        serve(folder / "log", text=deployment(collected.url), **report) as served,
        prometheus(folder, scraping(served, folder)) as watcher,
    ):
        # Counters must be seen before they count, histograms come with their first observation.
        for job in JOBS:
            watcher.wait_until(f'count(ray_spd_generation_tokens_total{{job="{job}"}}) == 2')
        known = Known()
        for number in range(2):
            burst(served.url, known, number * REQUESTS)
            # Pipelines count tokens, ingresses requests; each process reports on its own.
            told = {
                "generation_tokens_total": known.generated,
                "request_success_total": known.requests,
            }
            for job, (name, count) in product(JOBS, told.items()):
                watcher.wait_until(f'sum(ray_spd_{name}{{job="{job}"}}) == {count}')
        yield Watched(served, watcher, known, collected)


@pytest.fixture(scope="module")
def watched(tmp_path_factory, default_model) -> Iterator[Watched]:  # noqa: ARG001
    with watched_deployment(tmp_path_factory.mktemp("scrape")) as watched:
        yield watched


@pytest.mark.parametrize("job", JOBS)
def test_it_tells_what_the_clients_know(watched: Watched, job: str) -> None:
    """Over both pipelines and both ingresses."""
    known = watched.known
    wanted = {
        "request_success_total": known.requests,
        'request_success_total{finished_reason="length"}': known.requests,
        "time_to_first_token_seconds_count": known.requests,
        "e2e_request_latency_seconds_count": known.requests,
        "request_queue_time_seconds_count": known.requests,
        "prompt_tokens_total": known.prompt_tokens,
        "prefix_cache_queries_total": known.prompt_tokens,
        "prefix_cache_hits_total": known.cached,
        "generation_tokens_total": known.generated,
        "inter_token_latency_seconds_count": known.generated - known.requests,
        "pipeline_decoded_tokens_total": known.generated - known.requests,
        "spec_decode_num_drafts_total": known.accepted + known.rejected,
        "spec_decode_num_accepted_tokens_total": known.accepted,
        "spec_decode_num_accepted_tokens_per_pos_total": known.accepted,
        "pipeline_flushes_total": known.rejected,
        "admission_rejections_total": 0,
        "requests_resumed_total": 0,
        "num_requests_running": 0,
        "num_requests_waiting": 0,
        "pipeline_slots": 4,
    }
    assert known.requests == 2 * REQUESTS
    assert known.generated == known.requests * TOKENS
    for name, count in wanted.items():
        name, _, labels = name.partition("{")
        selector = f'ray_spd_{name}{{job="{job}"{", " + labels if labels else "}"}'
        watched.prometheus.wait_until(f"sum({selector}) == {count}")
    pipelines = f'count(ray_spd_generation_tokens_total{{job="{job}"}} > 0)'
    assert watched.prometheus.value(pipelines) == 2, "both pipelines had work"
    finished = f'count(sum by (replica) (ray_spd_request_success_total{{job="{job}"}}) > 0)'
    assert watched.prometheus.value(finished) == 2, "both ingresses had requests"


@pytest.mark.parametrize("job", JOBS)
def test_every_metric_is_there(watched: Watched, job: str) -> None:
    """With the labels that it says it has, beside those of Ray and Serve, and all their values."""
    found: dict[str, list[dict[str, str]]] = {}
    for labels, _ in watched.prometheus.query(f'{{__name__=~"ray_spd_.*", job="{job}"}}'):
        found.setdefault(labels["__name__"], []).append(labels)
    metrics = [m for m in METRICS if job == "page" or m.origin != "page"]
    assert found.keys() == {name for metric in metrics for name in metric.series}
    for metric in metrics:
        own = {"model_name", metric.label} - {None} if metric.origin != "page" else set()
        for name in metric.series:
            assert {frozenset(labels.keys() - FOREIGN) for labels in found[name]} == {
                frozenset(own)
            }
            if metric.label:
                values = set(metric.values or map(str, range(STAGES)))
                assert {labels[metric.label] for labels in found[name]} == values


def test_times_add_up(watched: Watched) -> None:
    """Emulated stages take 3 ms or, where the machine is busy, more; the PDM 2."""

    def mean(name: str) -> float:
        spent, count = (
            watched.prometheus.value(f'sum(ray_spd_{name}_{part}{{job="nodes"}})')
            for part in ("spent_total", "count")
        )
        return spent / count

    assert mean("stage_forward_seconds") >= 0.003
    assert mean("draft_forward_seconds") >= 0.002
    slowest = mean("cycle_seconds") - mean("graph_overhead_seconds")
    assert mean("stage_forward_seconds") <= slowest < mean("cycle_seconds")
    assert mean("verify_seconds") < mean("stage_forward_seconds")
    length = 'ray_spd_request_equivalent_accept_length_bucket{job="nodes"}'
    median = watched.prometheus.value(f"histogram_quantile(0.5, sum by (le) ({length}))")
    total = watched.prometheus.value(
        'max(ray_spd_pipeline_stages{job="nodes"})'
        ' * sum(ray_spd_pipeline_decoded_tokens_total{job="nodes"})'
        ' / sum(ray_spd_pipeline_decode_cycles_total{job="nodes"})'
    )
    assert 1.4 < total < 2.6  # 3 / (3 - 2 * 0.8) = 2.1 for long texts
    assert median == pytest.approx(total, abs=0.5)


def test_the_page_is_the_same_from_every_ingress(watched: Watched) -> None:
    def truth() -> frozenset[str]:
        page = httpx.get(f"{watched.served.url}/metrics", timeout=30).text
        return frozenset(line for line in page.splitlines() if line.startswith("ray_spd_"))

    first = truth()
    assert len(first) > 500
    assert {truth() for _ in range(4)} == {first}


def test_names_are_as_prometheus_wants_them(watched: Watched) -> None:
    """All that promtool has against them is how Ray writes its own labels."""
    page = httpx.get(f"{watched.served.url}/metrics", timeout=30).text
    ours = "".join(f"{line}\n" for line in page.splitlines() if "ray_spd_" in line.split("{")[0])
    checked = promtool("check", "metrics", text=ours)
    problems = set((checked.stdout + checked.stderr).splitlines())
    assert {p for p in problems if "camelCase" not in p} == set()
    assert promtool("check", "metrics", text="# TYPE badName counter\nbadName 1\n").returncode == 3


@pytest.mark.parametrize(("title", "expression"), expressions(DASHBOARD))
def test_every_panel_has_data(watched: Watched, title: str, expression: str) -> None:
    for name, value in {
        "$__rate_interval": "5m",
        "$job": "nodes",
        "$model_name": MODEL,
        "$replica": ".*",
    }.items():
        expression = expression.replace(name, value)
    assert "$" not in expression
    assert watched.prometheus.query(expression), title


@pytest.mark.parametrize("rule", RULES["groups"][0]["rules"], ids=lambda rule: rule["alert"])
def test_every_alert_is_evaluated_over_series_that_exist(watched: Watched, rule: dict) -> None:
    """None fires here."""
    (loaded,) = [r for r in watched.prometheus.rules() if r["name"] == rule["alert"]]
    assert loaded["health"] == "ok", loaded
    assert loaded["state"] == "inactive"
    asked = set(re.findall(r"ray_spd_\w+", rule["expr"]))
    assert asked
    for name in asked:
        assert watched.prometheus.query(name), name


def test_spans_through_serve(watched: Watched) -> None:
    """A caller's header comes through Serve's proxy, the engine's times back."""
    body = {"model": MODEL, "prompt": "x", "max_tokens": TOKENS, "temperature": 0}
    url = f"{watched.served.url}/v1/completions"
    assert httpx.post(url, json=body, headers=CALLER, timeout=60).status_code == 200
    spans = {span.name: span for span in watched.collected.wait_for(TRACE, 4)}
    assert spans.keys() == {"llm_request", "queue", "prefill", "decode"}
    request = spans.pop("llm_request")
    assert request.parent_span_id == PARENT.to_bytes(8)
    said = {a.key: a.value for a in request.attributes}
    assert said["spd.request_id"].string_value == CALLER["X-Request-Id"]
    assert said["gen_ai.usage.output_tokens"].int_value == TOKENS
    least = said["spd.cycles"].int_value * 3_000_000  # ns, of the cycles behind the first token
    decode = spans["decode"]
    assert decode.end_time_unix_nano - decode.start_time_unix_nano > least * 0.9
    for span in spans.values():
        assert span.parent_span_id == request.span_id
        assert request.start_time_unix_nano <= span.start_time_unix_nano
        assert span.end_time_unix_nano <= request.end_time_unix_nano


def test_clients_that_go_and_one_that_is_turned_away(watched: Watched) -> None:
    """Last: the sums above are exact no more. A stream of so many choices fills the queue of its
    ingress; with a second one at the other ingress, or refused by the same one, a third has no
    way in."""
    url = f"{watched.served.url}/v1/completions"
    endless = {"model": MODEL, "prompt": "x", "max_tokens": 2000, "n": 8, "stream": True}
    with ExitStack() as open_streams:
        statuses = []
        for _ in range(3):
            stream = httpx.stream("POST", url, json=endless, timeout=60)
            statuses.append(open_streams.enter_context(stream).status_code)
    assert statuses[0] == 200
    assert 429 in statuses
    for series in (
        'request_success_total{finished_reason="abort", job="%s"}',
        'admission_rejections_total{reason="queue_full", job="%s"}',
    ):
        for job in JOBS:
            watched.prometheus.wait_until(f"sum(ray_spd_{series % job}) > 0")
