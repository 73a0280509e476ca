"""What must hold between the parts of the manifests. A check returns its complaints, in words."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import promql_parser

from service.metrics import METRICS
from tests.manifests import Manifest, Pod, find, head_and_workers, pods

# Made by who installs (docs/kubernetes.md) and by the operator.
SECRETS = {"spd-api-keys": {"keys"}, "spd-hub": {"token"}, "spd-redis": {"password"}}
OPERATORS_SERVICES = {"spd-serve-svc": {8000}, "spd-head-svc": {8265}}


def what_the_operator_refuses(manifests: Sequence[Manifest]) -> list[str]:
    """What its schema lets pass, and it does not."""
    service = find(manifests, "RayService")
    spec, name = service["spec"], service["metadata"]["name"]
    cluster = spec["rayClusterConfig"]
    head, groups = head_and_workers(service)
    version = tuple(int(part) for part in str(cluster.get("rayVersion", "0")).split("."))
    fault_tolerant = "gcsFaultToleranceOptions" in cluster
    faults = {
        "a RayService's name": not re.fullmatch(r"[a-z]([a-z0-9-]{0,45}[a-z0-9])?", name),
        "upgradeStrategy.type": spec["upgradeStrategy"]["type"] not in ("NewCluster", "None"),
        "authOptions without rayVersion": "authOptions" in cluster and version < (2, 52),
        "enableK8sTokenAuth": "enableK8sTokenAuth" in cluster.get("authOptions", {}),
        "autoscalerOptions alone": "autoscalerOptions" in cluster
        and not cluster.get("enableInTreeAutoscaling"),
    }
    for part in (head, *groups):
        where, params = part.get("groupName", "head"), part["rayStartParams"]
        pod = part["template"]["spec"]
        env = {e["name"] for c in pod["containers"] for e in c.get("env", [])}
        doubled = {"num-cpus", "num-gpus", "memory", "resources"} & params.keys()
        faults |= {
            f"{where}: resources twice": "resources" in part and bool(doubled),
            f"{where}: labels": "labels" in params,
            f"{where}: values of rayStartParams are text": any(
                not isinstance(v, str) for v in params.values()
            ),
            f"{where}: restartPolicy": pod.get("restartPolicy", "Never") != "Never",
            f"{where}: Redis twice": fault_tolerant
            and bool(env & {"RAY_REDIS_ADDRESS", "REDIS_PASSWORD"} or "redis-password" in params),
        }
    for group in groups:
        least, most = group["minReplicas"], group["maxReplicas"]
        faults[f"{group['groupName']}: replicas"] = not least <= group["replicas"] <= most
    return [f"the operator refuses: {fault}" for fault, is_so in faults.items() if is_so]


def pods_are_restricted(manifests: Sequence[Manifest]) -> list[str]:
    """Kubernetes' pod security standard `restricted`, and a root file system that is read only."""
    cluster = find(manifests, "RayService")["spec"]["rayClusterConfig"]
    problems = []
    for pod in pods(manifests):
        context = pod.spec.get("securityContext", {})
        if not (context.get("runAsNonRoot") and context.get("runAsUser")):
            problems.append(f"{pod.name}: runs as root")
        if context.get("seccompProfile") != {"type": "RuntimeDefault"}:
            problems.append(f"{pod.name}: no seccompProfile")
        allowed = {"name", "emptyDir", "configMap", "secret", "persistentVolumeClaim"}
        problems += [
            f"{pod.name}: volume {v['name']} is of the host"
            for v in pod.spec.get("volumes", [])
            if v.keys() - allowed
        ]
        if any(pod.spec.get(field) for field in ("hostNetwork", "hostPID", "hostIPC")):
            problems.append(f"{pod.name}: is not apart from its host")
        for container in pod.containers:
            own = container.get("securityContext", {})
            where = f"{pod.name}/{container['name']}"
            problems += _loose(own, where)
            if own.get("readOnlyRootFilesystem") is not True:
                problems.append(f"{where}: its file system can be written")
            if container["resources"]["limits"] != container["resources"]["requests"]:
                problems.append(f"{where}: requests differ from limits")
    scaler = cluster.get("autoscalerOptions", {"securityContext": None})["securityContext"]
    return problems + ([] if scaler is None else _loose(scaler, "autoscaler"))


def _loose(context: dict[str, Any], where: str) -> list[str]:
    tight = context.get("allowPrivilegeEscalation") is False
    dropped = context.get("capabilities") == {"drop": ["ALL"]}
    return [] if tight and dropped and not context.get("privileged") else [f"{where}: is loose"]


def names_lead_somewhere(manifests: Sequence[Manifest]) -> list[str]:
    """Every Secret, ConfigMap, claim, account and service that is named is there, or is known to
    be made by somebody else."""
    made = {(m["kind"], m["metadata"]["name"]) for m in manifests}
    problems = []
    for kind, name, key in references(manifests):
        if kind == "Secret":
            found = key in SECRETS.get(name, ())
        elif kind == "Service" and name in OPERATORS_SERVICES:
            found = key in OPERATORS_SERVICES[name]
        else:
            found = (kind, name) in made
        if not found:
            problems.append(f"there is no {kind} {name}" + (f" with {key}" if key else ""))
    return problems


def references(value: Any) -> Iterator[tuple[str, str, Any]]:
    """(kind, name, key or port) of all that is named anywhere in `value`."""
    if isinstance(value, list):
        for item in value:
            yield from references(item)
    if not isinstance(value, dict):
        return
    for field, item in value.items():
        match field, item:
            case "secretKeyRef", {"name": name, "key": key}:
                yield "Secret", name, key
            case "configMap", {"name": name}:
                yield "ConfigMap", name, None
            case "persistentVolumeClaim", {"claimName": name}:
                yield "PersistentVolumeClaim", name, None
            case "serviceAccountName", name:
                yield "ServiceAccount", name, None
            case "redisAddress", address:
                yield "Service", address.split("/")[2].split(":")[0], None
            case "backendRefs", backends:
                yield from (("Service", b["name"], b["port"]) for b in backends)
            case "backend", {"service": service}:
                yield "Service", service["name"], service["port"]["number"]
            case _:
                yield from references(item)


def selectors_select(manifests: Sequence[Manifest]) -> list[str]:
    """Every selector meets pods, and they have the ports that it is for; what is mounted exists."""
    all_pods = list(pods(manifests))
    problems = []
    for manifest in manifests:
        where = f"{manifest['kind']} {manifest['metadata']['name']}"
        for selector, ports in _selections(manifest):
            met = [pod for pod in all_pods if pod.matches(selector)]
            if not met:
                problems.append(f"{where}: no pod has {selector['matchLabels']}")
            missing = {p for p in ports if not any(p in pod.ports for pod in met)}
            problems += [f"{where}: no such pod has a port {port}" for port in sorted(missing)]
    return problems + [problem for pod in all_pods for problem in _mounts(pod)]


def _selections(manifest: Manifest) -> Iterator[tuple[dict[str, Any], set[str]]]:
    """The selectors of a manifest, with the ports that they are for."""
    spec = manifest.get("spec", {})
    match manifest["kind"]:
        case "NetworkPolicy":
            inward = [p["port"] for r in spec.get("ingress", []) for p in r.get("ports", [])]
            yield spec["podSelector"], set(inward)
            for rule in spec.get("egress", []):
                for peer in rule.get("to", []):
                    yield peer["podSelector"], {p["port"] for p in rule.get("ports", [])}
        case "PodMonitor":
            yield spec["selector"], {e["port"] for e in spec["podMetricsEndpoints"]}
        case "PodDisruptionBudget" | "StatefulSet":
            yield spec["selector"], set()
        case "Service":
            yield {"matchLabels": spec["selector"]}, {p["targetPort"] for p in spec["ports"]}


def _mounts(pod: Pod) -> list[str]:
    volumes = {v["name"] for v in pod.spec.get("volumes", [])}
    mounts = {m["name"] for c in pod.containers for m in c.get("volumeMounts", [])}
    if pod.name == "spd-redis":
        volumes.add("data")  # its volumeClaimTemplates
    return [f"{pod.name}: no volume {name}" for name in sorted(mounts - volumes)]


def rules_ask_for_metrics_that_exist(manifests: Sequence[Manifest]) -> list[str]:
    """PromQL that parses, of names that service/metrics.py has."""
    problems = []
    for group in find(manifests, "PrometheusRule")["spec"]["groups"]:
        for rule in group["rules"]:
            try:
                promql_parser.parse(rule["expr"])
            except ValueError as error:
                problems.append(f"{rule['alert']}: {error}")
            asked = set(re.findall(r"\bray_\w+", rule["expr"]))
            problems += [
                f"{rule['alert']}: there is no metric {name}"
                for name in sorted(asked - exported_metrics())
            ]
            if not asked:
                problems.append(f"{rule['alert']}: asks for no metric of Ray's")
    return problems


def exported_metrics() -> set[str]:
    return {name for metric in METRICS for name in metric.series}
