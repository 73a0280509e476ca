"""Which fields manifests may have: Kubernetes' own kinds by its published schemas, the RayService
by that of its operator, the few others by the closed schemas below, which know what we use."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from tests.manifests import ROOT, Manifest, pods

KUBERNETES = "1.37"
SCHEMA = Path(
    os.environ.get("SPD_RAYSERVICE_SCHEMA")
    or ROOT.parent / "shared" / "kuberay" / "rayservice.schema.json"
)


def closed(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    """A schema of objects with these fields and no others."""
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": list(required),
        "additionalProperties": False,
    }


def listed(items: Any, least: int = 1) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least}


STRING = {"type": "string", "minLength": 1}
STRINGS = {"type": "object", "additionalProperties": STRING}
DURATION = {"type": "string", "pattern": "^([0-9]+(h|m|s|ms))+$"}
PATH = closed({"type": {"enum": ["Exact", "PathPrefix"]}, "value": {"pattern": "^/"}})
ENDPOINT = closed(
    {"port": STRING},
    relabelings=listed(closed({"sourceLabels": listed(STRING), "targetLabel": STRING})),
)
RULE = closed(
    {
        "alert": {"pattern": "^Spd[A-Z][A-Za-z]+$"},
        "expr": STRING,
        "for": DURATION,
        "labels": closed({"severity": {"enum": ["info", "warning", "critical"]}}),
        "annotations": closed({"summary": STRING}, description=STRING, runbook_url=STRING),
    }
)
OTHER_KINDS = {
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): closed(
        {
            "parentRefs": listed(closed({"name": STRING}, namespace=STRING, sectionName=STRING)),
            "hostnames": listed(STRING),
            "rules": listed(
                closed(
                    {
                        "matches": listed(closed({"path": PATH})),
                        "timeouts": closed({"request": DURATION}),
                        "backendRefs": listed(
                            closed({"name": STRING, "port": {"type": "integer"}})
                        ),
                    }
                )
            ),
        }
    ),
    ("monitoring.coreos.com/v1", "PodMonitor"): closed(
        {
            "selector": closed({"matchLabels": STRINGS}),
            "podMetricsEndpoints": listed(ENDPOINT),
        },
        podTargetLabels=listed(STRING),
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): closed(
        {"groups": listed(closed({"name": STRING, "rules": listed(RULE)}, interval=DURATION))}
    ),
}


def fields_of_kubernetes(manifests: Sequence[Manifest]) -> list[str]:
    """Of its own kinds, and of the pods inside of a RayService."""
    known = [m for m in manifests if "." not in m["apiVersion"].split("/")[0]]
    known += [m for m in manifests if m["apiVersion"].split("/")[0].endswith(".k8s.io")]
    known = [m for m in known if (m["apiVersion"], m["kind"]) not in OTHER_KINDS]
    made = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": pod.name}, "spec": pod.spec}
        for pod in pods(manifests)
    ]
    problems = []
    for manifest in [*known, *made]:
        where = f"{manifest['kind']} {manifest['metadata']['name']}"
        try:
            kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
        except kubernetes_validate.ValidationError as error:
            problems.append(f"{where}: {error.json_path}: {error.message}")
        except kubernetes_validate.SchemaNotFoundError:
            problems.append(f"{where}: Kubernetes has no such kind")
    return problems


def fields_of_other_kinds(manifests: Sequence[Manifest]) -> list[str]:
    """Of the kinds of Gateway API and Prometheus operator."""
    problems = []
    for manifest in manifests:
        group = manifest["apiVersion"].split("/")[0]
        if not group.startswith(("gateway.", "monitoring.")):
            continue
        schema = OTHER_KINDS.get((manifest["apiVersion"], manifest["kind"]))
        if schema is None:
            problems.append(f"{manifest['apiVersion']} {manifest['kind']} is not known")
        else:
            problems += violations(schema, manifest["spec"], manifest["kind"])
    return problems


def fields_of_the_ray_service(manifests: Sequence[Manifest]) -> list[str]:
    """By the schema of the operator's CustomResourceDefinition."""
    if not SCHEMA.is_file():
        pytest.skip(f"no schema of RayService at {SCHEMA} (or SPD_RAYSERVICE_SCHEMA)")
    schema = json.loads(SCHEMA.read_text())
    services = [m for m in manifests if m["apiVersion"].startswith("ray.io/")]
    return [p for m in services for p in violations(schema, m, m["kind"])]


def violations(schema: dict[str, Any], value: Any, what: str) -> list[str]:
    found = jsonschema.Draft202012Validator(schema).iter_errors(value)
    return [f"{what}: {error.json_path}: {error.message}" for error in found]
