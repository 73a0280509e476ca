"""Kubernetes manifests as tests handle them: rendered by kustomize, found, and spoilt."""

import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
OVERLAYS = ("cpu", "gpu-1node", "gpu-multinode")
COMPONENTS = ("api-keys", "httproute", "nginx", "monitoring", "redis")  # kueue: fewer pipelines

Manifest = dict[str, Any]
DELETE = object()


def render(folder: Path, overlay: str, components: Sequence[str] = ()) -> list[Manifest]:
    """What `kubectl apply -k` would send for an overlay, with these components added to it."""
    path = [str(Path(sys.executable).parent)]
    kubectl = shutil.which("kubectl", path=path[0]) or shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl here; the development dependencies have one")
    target = ROOT / "k8s" / "overlays" / overlay
    if components:
        for source in ("k8s", "deployments"):
            shutil.copytree(ROOT / source, folder / source, ignore=shutil.ignore_patterns("pdm-*"))
        target = folder / "k8s" / "overlays" / "tested"
        target.mkdir()
        parts = [f"../../components/{component}" for component in components]
        file = target / "kustomization.yaml"
        file.write_text(yaml.safe_dump({"resources": [f"../{overlay}"], "components": parts}))
    done = subprocess.run(
        [kubectl, "kustomize", str(target)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr  # warnings of what is deprecated
    return list(yaml.safe_load_all(done.stdout))


def find(manifests: Sequence[Manifest], kind: str, name: str | None = None) -> Manifest:
    """The only manifest of a kind and a name."""
    (found,) = (m for m in manifests if m["kind"] == kind and name in (None, m["metadata"]["name"]))
    return found


@dataclass(frozen=True)
class Pod:
    """A pod that these manifests make: its labels, its specification, and how many there are."""

    name: str
    labels: dict[str, str]
    spec: dict[str, Any]
    replicas: int = 1

    @property
    def containers(self) -> list[dict[str, Any]]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    @property
    def ports(self) -> set[str | int]:
        """By name and by number."""
        ports = [p for c in self.spec["containers"] for p in c.get("ports", [])]
        return {p["name"] for p in ports} | {p["containerPort"] for p in ports}

    def matches(self, selector: dict[str, Any]) -> bool:
        return selector["matchLabels"].items() <= self.labels.items()


def head_and_workers(service: Manifest) -> tuple[Manifest, list[Manifest]]:
    cluster = service["spec"]["rayClusterConfig"]
    return cluster["headGroupSpec"], cluster["workerGroupSpecs"]


def pods(manifests: Sequence[Manifest]) -> Iterator[Pod]:
    for manifest in manifests:
        if manifest["kind"] == "RayService":
            head, groups = head_and_workers(manifest)
            yield _pod("head", head["template"])
            for group in groups:
                yield _pod(group["groupName"], group["template"], group["minReplicas"])
        elif manifest["kind"] in ("StatefulSet", "Deployment"):
            spec = manifest["spec"]
            yield _pod(manifest["metadata"]["name"], spec["template"], spec["replicas"])


def _pod(name: str, template: Manifest, replicas: int = 1) -> Pod:
    return Pod(name, template["metadata"].get("labels", {}), template["spec"], replicas)


def spoilt(
    manifests: Sequence[Manifest], kind: str, path: str, value: Any, name: str | None = None
) -> list[Manifest]:
    """A copy with another value at `path` of one manifest ("spec/containers/0/image"), or with none
    (DELETE)."""
    copy = deepcopy(list(manifests))
    place: Any = find(copy, kind, name)
    *steps, last = [int(s) if s.isdigit() else s.replace("~1", "/") for s in path.split("/")]
    for step in steps:
        place = place[step]
    if value is DELETE:
        del place[last]
    else:
        place[last] = value
    return copy
