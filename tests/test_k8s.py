"""The manifests of k8s/, checked as far as that goes without a cluster. Each check is proven by
manifests that it must refuse."""

from collections.abc import Callable
from typing import Any

import pytest
from yamllint import linter
from yamllint.config import YamlLintConfig

from tests.manifest_checks import (
    names_lead_somewhere,
    pods_are_restricted,
    rules_ask_for_metrics_that_exist,
    selectors_select,
    what_the_operator_refuses,
)
from tests.manifest_schemas import (
    fields_of_kubernetes,
    fields_of_other_kinds,
    fields_of_the_ray_service,
)
from tests.manifest_serving import ends_gracefully, pipelines_fit, serve_config
from tests.manifests import COMPONENTS, DELETE, OVERLAYS, ROOT, Manifest, find, render, spoilt

SERVED = {
    "cpu": "smollm2-135m-n2.yaml",
    "gpu-1node": "qwen3-8b-n4.yaml",
    "gpu-multinode": "llama-3.1-8b-n8.yaml",
}
CHECKS = [
    fields_of_kubernetes,
    fields_of_other_kinds,
    fields_of_the_ray_service,
    serve_config,
    pipelines_fit,
    ends_gracefully,
    what_the_operator_refuses,
    pods_are_restricted,
    names_lead_somewhere,
    selectors_select,
]
HEAD = "spec/rayClusterConfig/headGroupSpec/template/spec"
GROUP = "spec/rayClusterConfig/workerGroupSpecs/0"
WORKER = f"{GROUP}/template/spec"


@pytest.fixture(scope="module")
def everything(tmp_path_factory) -> list[Manifest]:
    """The CPU overlay with all components beside Kueue's."""
    return render(tmp_path_factory.mktemp("k8s"), "cpu", COMPONENTS)


@pytest.mark.parametrize("components", [(), COMPONENTS], ids=["plain", "components"])
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlays(tmp_path, overlay, components) -> None:
    manifests = render(tmp_path, overlay, components)
    schemaless = [check for check in CHECKS if check is not fields_of_the_ray_service]
    assert [problem for check in schemaless for problem in check(manifests)] == []
    assert "Namespace" not in {m["kind"] for m in manifests}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_ray_services_fit_the_operators_schema(tmp_path, overlay) -> None:
    parts = (*COMPONENTS, "kueue")
    assert fields_of_the_ray_service(render(tmp_path, overlay, parts)) == []


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_is_served_is_the_deployments_file(tmp_path, overlay) -> None:
    """Byte for byte: `serve run` of the file serves the same."""
    text = (ROOT / "deployments" / SERVED[overlay]).read_text()
    manifests = render(tmp_path, overlay)
    assert find(manifests, "RayService")["spec"]["serveConfigV2"] == text
    assert find(manifests, "ConfigMap")["data"] == {"serve.yaml": text}  # and no other ConfigMap


def test_kueue_counts_a_fixed_number_of_pods(tmp_path) -> None:
    manifests = render(tmp_path, "cpu", ["kueue"])
    service = find(manifests, "RayService")
    assert service["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "spd"
    assert service["spec"]["rayClusterConfig"]["enableInTreeAutoscaling"] is False
    assert [problem for check in CHECKS[3:] for problem in check(manifests)] == []


def test_without_a_key_no_pod_starts(everything) -> None:
    """An optional Secret that is missing would open the API."""
    cluster = find(everything, "RayService")["spec"]["rayClusterConfig"]
    templates = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for template in templates:
        spec = template["template"]["spec"]
        for container in [*spec["initContainers"], *spec["containers"]]:
            (key,) = (e for e in container["env"] if e["name"] == "SPD_API_KEYS")
            assert key["valueFrom"]["secretKeyRef"] == {"name": "spd-api-keys", "key": "keys"}


def test_what_is_reachable_from_outside(everything) -> None:
    """The API without its metrics; of the pods only its port."""
    rule = find(everything, "HTTPRoute")["spec"]["rules"][0]
    routed = {match["path"]["value"] for match in rule["matches"]}
    nginx = find(everything, "Ingress")["spec"]["rules"][0]["http"]["paths"]
    assert routed == {path["path"] for path in nginx}
    assert routed == {"/v1", "/tokenize", "/detokenize", "/version", "/ready"}
    policy = find(everything, "NetworkPolicy", "spd")["spec"]["ingress"]
    assert [rule["ports"] for rule in policy if "from" not in rule] == [[{"port": "serve"}]]
    guarded = find(everything, "RayService")["spec"]["rayClusterConfig"]["authOptions"]
    assert guarded == {"mode": "token"}


def test_yaml_is_tidy() -> None:
    """Doubled keys above all, which YAML's readers let pass."""
    config = YamlLintConfig((ROOT / "k8s" / ".yamllint.yaml").read_text())
    files = [f for part in ("k8s", "deployments") for f in (ROOT / part).rglob("*.yaml")]
    assert len(files) > 25
    problems = [f"{f}: {p}" for f in files for p in linter.run(f.read_text(), config)]
    assert problems == []
    assert [p.rule for p in linter.run("a: 1\na: 2\n", config)] == ["key-duplicates"]


def test_alerts(everything) -> None:
    assert rules_ask_for_metrics_that_exist(everything) == []


def test_the_dashboard_is_where_grafanas_sidecar_looks(everything) -> None:
    found = find(everything, "ConfigMap", "spd-dashboard")
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    file = ROOT / "k8s" / "components" / "monitoring" / "dashboard.json"
    assert found["data"] == {"spd.json": file.read_text()}


def changed(old: str, new: str) -> Callable[[str], str]:
    def change(text: str) -> str:
        assert old in text
        return text.replace(old, new)

    return change


POLICY = "NetworkPolicy:spd"
SERVE = "spec/serveConfigV2"
WRONG: list[tuple[Any, str, str, Any, str]] = [
    # check, kind, path, what stands there then, a word of the complaint
    (fields_of_kubernetes, POLICY, "spec/ingres", [], "ingres"),
    (
        fields_of_kubernetes,
        "PodDisruptionBudget:spd-worker",
        "spec/minAvaliable",
        1,
        "minAvaliable",
    ),
    (fields_of_kubernetes, "Ingress", "apiVersion", "extensions/v1beta1", "no such kind"),
    (fields_of_kubernetes, "RayService", f"{HEAD}/containers/0/imge", "x", "imge"),
    (fields_of_kubernetes, "RayService", f"{WORKER}/initContainers/0/env/0/value", 1, "string"),
    (fields_of_other_kinds, "HTTPRoute", "spec/rules/0/timeouts/request", "0 s", "0 s"),
    (fields_of_other_kinds, "HTTPRoute", "spec/rules/0/filter", [], "filter"),
    (fields_of_other_kinds, "HTTPRoute", "apiVersion", "gateway.networking.k8s.io/v2", "known"),
    (fields_of_other_kinds, "PodMonitor", "spec/podMetricsEndpoints/0/prt", "x", "prt"),
    (fields_of_other_kinds, "PrometheusRule", "spec/groups/0/rules/0/for", "5 minutes", "5 min"),
    (fields_of_the_ray_service, "RayService", "spec/serveConfig", "", "serveConfig"),
    (fields_of_the_ray_service, "RayService", "spec/serveConfigV2", {"a": 1}, "string"),
    (fields_of_the_ray_service, "RayService", f"{GROUP}/maxReplicas", "four", "four"),
    (fields_of_the_ray_service, "RayService", f"{GROUP}/groupName", DELETE, "groupName"),
    (fields_of_the_ray_service, "RayService", f"{WORKER}/containers/0/imge", "x", "imge"),
    (
        serve_config,
        "ConfigMap:spd-serve-config",
        "data/serve.yaml",
        "applications: []",
        "another deployment",
    ),
    (serve_config, SERVE, "", changed("applications:", "aplications:"), "'aplications'"),
    (serve_config, SERVE, "", changed("route_prefix: /", "rout_prefix: /"), "'rout_prefix'"),
    (serve_config, SERVE, "", changed("route_prefix: /", "route_prefix: spd"), "route_prefix"),
    (serve_config, SERVE, "", changed("host: 0.0.0.0", "hst: 0.0.0.0"), "'hst'"),
    (serve_config, SERVE, "", changed("host: 0.0.0.0", "host: 127.0.0.1"), "0.0.0.0:8000"),
    (serve_config, SERVE, "", changed("max_replicas", "max_replica"), "'max_replica'"),
    (serve_config, SERVE, "", changed("max_replicas: 3", "max_replicas: 0"), "max_replicas"),
    (serve_config, SERVE, "", changed("stages: 2", "stage: 2"), "pipeline.stage"),
    (serve_config, SERVE, "", changed("service.app:build", "service.app"), "import_path"),
    (serve_config, SERVE, "", changed("name: Ingress", "name: ingress"), "ingress"),
    (
        serve_config,
        SERVE,
        "",
        changed("applications:", "proxy_location: HeadOnly\napplications:"),
        "proxy_location",
    ),
    (pipelines_fit, SERVE, "", changed("stages: 2", "stages: 3"), "1 pipelines do not fit"),
    (pipelines_fit, SERVE, "", changed("max_replicas: 3", "max_replicas: 4"), "4 pipelines"),
    (pipelines_fit, SERVE, "", changed("actor: 0.4", "actor: 0.2"), "more than 1 pipelines"),
    (pipelines_fit, "PodDisruptionBudget:spd-worker", "spec/minAvailable", 2, "keeps 2"),
    (ends_gracefully, "RayService", f"{WORKER}/terminationGracePeriodSeconds", 200, "ascend"),
    (ends_gracefully, "RayService", f"{WORKER}/containers/0/lifecycle", DELETE, "not told"),
    (ends_gracefully, "RayService", "spec/rayClusterDeletionDelaySeconds", 60, "old cluster"),
    (ends_gracefully, SERVE, "", changed("timeout_s: 120", "timeout_s: 290"), "ascend"),
    (what_the_operator_refuses, "RayService", "metadata/name", "Spd", "name"),
    (what_the_operator_refuses, "RayService", "metadata/name", "s" * 48, "name"),
    (what_the_operator_refuses, "RayService", "spec/upgradeStrategy/type", "Newcluster", "type"),
    (what_the_operator_refuses, "RayService", f"{GROUP}/minReplicas", 4, "replicas"),
    (what_the_operator_refuses, "RayService", f"{GROUP}/rayStartParams/num-cpus", 2, "text"),
    (what_the_operator_refuses, "RayService", f"{GROUP}/rayStartParams/labels", "a=b", "labels"),
    (what_the_operator_refuses, "RayService", f"{WORKER}/restartPolicy", "Always", "restart"),
    (
        what_the_operator_refuses,
        "RayService",
        "spec/rayClusterConfig/rayVersion",
        "2.51.0",
        "authOptions",
    ),
    (
        what_the_operator_refuses,
        "RayService",
        f"{HEAD}/containers/0/env/0/name",
        "REDIS_PASSWORD",
        "Redis twice",
    ),
    (pods_are_restricted, "RayService", f"{HEAD}/securityContext/runAsNonRoot", False, "root"),
    (pods_are_restricted, "RayService", f"{WORKER}/securityContext/runAsUser", 0, "root"),
    (pods_are_restricted, "RayService", f"{WORKER}/hostNetwork", True, "apart"),
    (
        pods_are_restricted,
        "RayService",
        f"{WORKER}/volumes/0",
        {"name": "models", "hostPath": {"path": "/"}},
        "of the host",
    ),
    (
        pods_are_restricted,
        "RayService",
        f"{WORKER}/initContainers/0/securityContext/capabilities",
        {"drop": ["NET_RAW"]},
        "pipelines/preflight: is loose",
    ),
    (
        pods_are_restricted,
        "StatefulSet",
        "spec/template/spec/containers/0/securityContext/readOnlyRootFilesystem",
        DELETE,
        "can be written",
    ),
    (
        pods_are_restricted,
        "RayService",
        "spec/rayClusterConfig/autoscalerOptions/securityContext",
        {},
        "autoscaler: is loose",
    ),
    (
        names_lead_somewhere,
        "ConfigMap:spd-serve-config",
        "metadata/name",
        "other",
        "ConfigMap spd-serve-config",
    ),
    (names_lead_somewhere, "ServiceAccount", "metadata/name", "other", "spd-worker"),
    (names_lead_somewhere, "Service", "metadata/name", "other", "Service spd-redis"),
    (names_lead_somewhere, "HTTPRoute", "spec/rules/0/backendRefs/0/port", 80, "spd-serve-svc"),
    (
        names_lead_somewhere,
        "RayService",
        f"{HEAD}/containers/0/env/5/valueFrom/secretKeyRef/key",
        "key",
        "Secret spd-api-keys with key",
    ),
    (selectors_select, POLICY, "spec/podSelector/matchLabels", {"app": "spd"}, "no pod has"),
    (selectors_select, POLICY, "spec/ingress/1/ports/0/port", "http", "port http"),
    (selectors_select, "PodMonitor", "spec/podMetricsEndpoints/0/port", "metric", "port metric"),
    (
        selectors_select,
        "PodDisruptionBudget:spd-worker",
        "spec/selector/matchLabels/app.kubernetes.io~1component",
        "workers",
        "no pod has",
    ),
    (selectors_select, "RayService", f"{WORKER}/volumes/0/name", "model", "no volume models"),
    (
        rules_ask_for_metrics_that_exist,
        "PrometheusRule",
        "spec/groups/0/rules/0/expr",
        "rate(ray_spd_request_success[5m]) > 0",
        "no metric ray_spd_request_success",
    ),
    (
        rules_ask_for_metrics_that_exist,
        "PrometheusRule",
        "spec/groups/0/rules/0/expr",
        "sum(ray_spd_num_requests_waiting",
        "SpdNoPipeline",
    ),
]


@pytest.mark.parametrize(
    ("check", "kind", "path", "value", "word"),
    WRONG,
    ids=[f"{check.__name__}-{word}" for check, *_, word in WRONG],
)
def test_what_is_wrong_is_found(everything, check, kind, path, value, word) -> None:
    assert check(everything) == []
    if kind == SERVE:
        served = value(find(everything, "RayService")["spec"]["serveConfigV2"])
        wrong = spoilt(everything, "RayService", SERVE, served)
        wrong = spoilt(wrong, "ConfigMap", "data/serve.yaml", served, "spd-serve-config")
    else:
        kind, _, name = kind.partition(":")
        wrong = spoilt(everything, kind, path, value, name or None)
    problems = check(wrong)
    assert any(word in problem for problem in problems), problems
