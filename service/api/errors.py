"""Every error leaves as OpenAI's error object, whatever raised it."""

import re
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from typing_extensions import TypedDict

CLIENT_CLOSED_REQUEST = 499  # nginx's number for an answer that nobody waits for


class ErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorObject(TypedDict):
    error: ErrorDetail


class ApiError(Exception):
    """An error that a client may read. `param` is the dotted name of the field at fault. After
    `retry_after_s` the same request may do better."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}

    def body(self) -> ErrorObject:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        if self.status == 429:
            kind = "rate_limit_error"
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """What /openapi.json says of a route's errors. Without `default`, FastAPI would add a 422."""
    other = {"model": ErrorObject, "description": "Any other error."}
    return {**{status: {"model": ErrorObject} for status in statuses}, "default": other}


def internal_error() -> ApiError:
    """What a client learns of an exception that nobody foresaw: nothing. The log has the rest."""
    return ApiError(500, "Internal server error.")


def install_handlers(app: FastAPI) -> None:
    """Maps every exception that may leave a route to an error object. The rest, which nobody
    foresaw, are for `service.api.guard.Unforeseen`."""

    @app.exception_handler(ApiError)
    async def known(_: Request, error: ApiError) -> JSONResponse:
        return JSONResponse(error.body(), error.status, headers=error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse(_from_validation(error).body(), 400)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        body = _from_http(request, error).body()
        return JSONResponse(body, error.status_code, headers=error.headers)

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)


def _from_validation(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong. Pydantic's messages say what would be right; the input that
    they come with stays out."""
    first: dict[str, Any] = error.errors()[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"The body is not valid JSON: {first['ctx']['error']}.")
    param = ".".join(str(part) for part in first["loc"][1:])
    if not param:
        return ApiError(400, "The body must be a JSON object, sent as application/json.")
    return ApiError(400, f"{param}: {first['msg']}.", param=param)


def _from_http(request: Request, error: HTTPException) -> ApiError:
    if error.status_code == 404:
        return ApiError(404, "There is no such path.", code="not_found")
    if error.status_code == 405:
        message = f"This path does not take {request.method}."
        return ApiError(405, message, code="method_not_allowed")
    name = re.sub(r"\W+", "_", HTTPStatus(error.status_code).phrase.lower())
    return ApiError(error.status_code, str(error.detail), code=name)
