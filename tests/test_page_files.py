"""The page's files: who gets them, with what headers, and that a wheel has them."""

import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from service.api.page import FILES
from tests.api_server import BEARER, LIMIT, guarded_api
from tests.fake_pipeline import FakePipeline

NAMES = sorted(file.name for file in FILES.iterdir())


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakePipeline, str]]:
    """With keys: the page needs none."""
    with guarded_api() as served:
        yield served


def test_the_page(http: httpx.Client) -> None:
    response = http.get("/")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.text == (FILES / "index.html").read_text()
    assert http.head("/").status_code == 200


@pytest.mark.parametrize("path", ["/", *(f"/page/{name}" for name in NAMES)])
def test_headers(http: httpx.Client, path: str) -> None:
    response = http.get(path)
    assert response.headers["content-security-policy"] == (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    assert response.headers["cache-control"] == "no-cache"
    again = http.get(path, headers={"If-None-Match": response.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("path", ["/page/nothing.js", "/page/", "/page/..%2Fapi/page.py"])
def test_no_other_files(http: httpx.Client, path: str) -> None:
    response = http.get(path)
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "not_found"


def test_the_page_opens_nothing_else(http: httpx.Client, url: str) -> None:
    """Only reading it needs no key."""
    for method, path in [("POST", "/"), ("POST", "/page/main.js"), ("GET", "/page"), ("GET", "//")]:
        assert http.request(method, f"{url}{path}").status_code == 401
    assert http.post("/", headers=BEARER, content=b"x" * (LIMIT + 1)).status_code == 413
    assert http.post("/", headers=BEARER).status_code == 405


def test_it_is_no_part_of_the_api(http: httpx.Client) -> None:
    paths = http.get("/openapi.json", headers=BEARER).json()["paths"]
    assert not [path for path in paths if path == "/" or path.startswith("/page")]


def test_all_that_is_needed_is_here() -> None:
    """No file of another host, and none that is missing."""
    needed = set()
    for name in NAMES:
        text = (FILES / name).read_text()
        assert set(re.findall(r"https?://[a-z0-9.]+", text)) <= {"http://www.w3.org"}
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
        assert not re.search(r"\bstyle=|\bon[a-z]+=\"", text), "the policy forbids it"
        needed |= set(re.findall(r'(?:href|src)="page/([^"]+)"', text))
        needed |= set(re.findall(r'from "\./([^"]+)"', text))
    assert needed == set(NAMES) - {"index.html"}


@pytest.mark.full
def test_a_wheel_has_them(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", str(tmp_path), "."]
    subprocess.run(command, cwd=Path(__file__).parent.parent, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {f"service/page/{name}" for name in NAMES} <= set(names)
