"""A second deployment, with other choices. In a file of its own: `serve run` joins a cluster that
runs already, as that of tests/test_serve.py does until its last test."""

import httpx
import pytest

from tests.serving import serve
from tests.test_serve import FRANCE, PARIS


@pytest.mark.full
def test_a_folder_in_one_process_without_token_authentication(tmp_path, default_model) -> None:
    """`model` is a Hugging Face folder here, under a name of its own; the graph is threads."""
    args = {
        "model": str(default_model),
        "served_model_name": "mine",
        "pipeline": {"graph": "local"},
        "drafter": {"kind": "off"},
        "api": {"keys_file": str(tmp_path / "keys")},
    }
    (tmp_path / "keys").write_text("# ours\nfirst-key\nsecond-key\n")
    with serve(tmp_path / "log", args, RAY_AUTH_MODE="disabled") as served:
        body = {"model": "mine", "messages": FRANCE, "temperature": 0}
        url = f"{served.url}/v1/chat/completions"
        assert httpx.post(url, json=body, timeout=60).status_code == 401
        key = {"Authorization": "Bearer second-key"}
        answer = httpx.post(url, json=body, headers=key, timeout=60)
        assert answer.json()["choices"][0]["message"]["content"] == PARIS
        assert httpx.get(f"{served.url}/ready").json()["speculation"] == "off"
