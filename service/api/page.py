"""The page at `/`: static files of this package, for browsers. The API does not need it."""

from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

FILES = Path(__file__).parent.parent / "page"
FOLDER = "/page"

# Everything comes from this server, and no text becomes markup or a script: browsers see to it.
_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self'",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",
}
HEADERS = {
    "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in _POLICY.items()),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # asks each time, and gets a 304: a new server has a new page
}


class _Files(StaticFiles):
    def file_response(self, *args: Any, **options: Any) -> Response:
        response = super().file_response(*args, **options)
        response.headers.update(HEADERS)
        return response


def install_page(app: FastAPI) -> None:
    """Adds `/` and the files below `/page`."""
    files = _Files(directory=FILES)
    router = APIRouter()

    @router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page(request: Request) -> Response:
        return await files.get_response("index.html", request.scope)

    app.include_router(router)
    app.mount(FOLDER, files)


def is_page(method: str, path: str) -> bool:
    """Whether this is for the page's files, which anybody may have: they hold no secret, and a
    browser has no key before the page asks for it."""
    return method in ("GET", "HEAD") and (path == "/" or path.startswith(f"{FOLDER}/"))
