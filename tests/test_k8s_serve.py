"""What the CPU overlay's RayService serves, really served."""

import httpx
import pytest

from tests.manifests import find, render
from tests.serving import serve
from tests.test_serve import FRANCE, MODEL, PARIS


@pytest.mark.full
def test_the_rendered_configuration_serves(tmp_path, default_model) -> None:  # noqa: ARG001
    """Autoscaled, as on a cluster; only host and port are others."""
    text = find(render(tmp_path, "cpu"), "RayService")["spec"]["serveConfigV2"]
    with serve(tmp_path / "log", text=text) as served:
        ready = httpx.get(f"{served.url}/ready", timeout=10).json()
        assert ready == {"ready": True, "detail": "serving", "speculation": "lookup+pdm"}
        body = {"model": MODEL, "messages": FRANCE, "temperature": 0}
        answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=60).json()
        assert answer["choices"][0]["message"]["content"] == PARIS
        # A worker's readiness probe asks this one.
        assert httpx.get(f"{served.url}/-/healthz", timeout=10).text == "success"
