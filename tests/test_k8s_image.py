"""The image, as far as that goes without a registry: its Dockerfile, and that it fits the rest."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from tests.manifests import OVERLAYS, ROOT, find, pods, render

DOCKERFILE = (ROOT / "Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def hadolint(text: str) -> str:
    """The linter's complaints."""
    near = str(Path(sys.executable).parent)
    program = shutil.which("hadolint", path=near) or shutil.which("hadolint")
    if program is None:
        pytest.skip("no hadolint here; the development dependencies have one")
    command = [program, "--no-color", "-"]
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr == ""
    return done.stdout


def test_lint() -> None:
    assert hadolint(DOCKERFILE) == ""


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("USER 1000:100", "USER root", "DL3002"),
        ("WORKDIR /opt/spd", "WORKDIR spd", "DL3000"),
        ("COPY --chown=1000:100 service service", "ADD service service", "DL3020"),
        ("RUN python -c 'import service.app", "RUN sudo python -c 'import service.app", "DL3004"),
        ("FROM ${BASE}", "FROM rayproject/ray", "DL3006"),
    ],
)
def test_lint_finds(old, new, complaint) -> None:
    assert old in DOCKERFILE
    assert complaint in hadolint(DOCKERFILE.replace(old, new))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_versions(tmp_path, overlay) -> None:
    """Ray of the image, of the cluster and of the project; the image and the project."""
    manifests = render(tmp_path, overlay)
    ray = find(manifests, "RayService")["spec"]["rayClusterConfig"]["rayVersion"]
    bases = re.findall(r"rayproject/ray:([0-9.]+)-py(3)(\d+)-", DOCKERFILE)
    assert len(bases) == 2  # the default, and the one for GPUs
    for version, major, minor in bases:
        assert version == ray
        assert f"{major}.{minor}" in SpecifierSet(PROJECT["requires-python"])
    (wanted,) = (d for d in PROJECT["dependencies"] if d.startswith("ray[serve]"))
    assert ray in SpecifierSet(wanted.removeprefix("ray[serve]"))
    images = {c["image"] for pod in pods(manifests) for c in pod.containers}
    assert images == {f"spd-serve:{PROJECT['version']}"}
    assert f"-t spd-serve:{PROJECT['version']} " in DOCKERFILE


def test_it_runs_as_the_pods_do(tmp_path) -> None:
    """The image's last user is the pods', and no other file gets into it than it copies."""
    users = re.findall(r"^USER (\d+):(\d+)$", DOCKERFILE, re.MULTILINE)
    for pod in pods(render(tmp_path, "cpu")):
        context = pod.spec["securityContext"]
        assert (context["runAsUser"], context["runAsGroup"]) == tuple(map(int, users[-1]))
    copied = re.findall(r"^COPY --chown=1000:100 (.+) \S+$", DOCKERFILE, re.MULTILINE)
    sources = {source for line in copied for source in line.split()}
    kept = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert sources == set(kept)
    assert all((ROOT / source).exists() for source in sources)
