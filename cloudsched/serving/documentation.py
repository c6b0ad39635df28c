"""The OpenAPI document and its pages: FastAPI, fed from the models of the wire."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any, NamedTuple

from fastapi import Body, FastAPI
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from cloudsched import __version__
from cloudsched.serving import schemas

FLEET = {
    "resources": ["cpu", "memory"],
    "servers": [
        {"capacity": [1.0, 1.0], "idle_w": 100.0, "max_w": 300.0, "exponent": 1.4},
        {"capacity": [0.7, 0.7], "idle_w": 70.0, "max_w": 180.0, "exponent": 1.2},
    ],
}
DECISION = {
    "cluster": "edge-7",
    "fleet": FLEET,
    "servers": [{"mode": "active"}, {"mode": "asleep"}],
    "running": [{"server": 0, "demand": [0.5, 0.25], "ticks_left": 12}],
    "queue": [
        {"id": "render-1", "demand": [0.25, 0.5], "duration": 30, "waited": 1},
        {"id": "render-2", "demand": [0.5, 0.5], "duration": 5, "laxity": 2},
    ],
}
EVENTS = {
    "events": [
        {"kind": "tick", "id": "t-0"},
        {"kind": "arrival", "id": "a-1", "job": "x", "demand": [0.25, 0.5], "duration": 9},
    ]
}
POD = {
    "metadata": {"name": "web-1"},
    "spec": {"containers": [{"resources": {"requests": {"cpu": "500m", "memory": "1Gi"}}}]},
}
NODE = {
    "metadata": {"name": "node-a", "annotations": {"cloudsched.io/used": '{"cpu": "1500m"}'}},
    "status": {"allocatable": {"cpu": "4", "memory": "16Gi"}},
}
EXTENDER = {"Pod": POD, "Nodes": {"items": [NODE]}}


WRITE = (400, 401, 404, 413, 422, 429, 503)
READ = (401, 429, 503)


class Operation(NamedTuple):
    """One call, as the document describes it."""

    method: str
    path: str
    summary: str
    request: type[BaseModel] | None
    reply: type[BaseModel] | None
    example: Any = None
    refusals: tuple[int, ...] = (400, 401, 413, 422, 429, 503)
    status: int = 200


OPERATIONS = (
    Operation(
        "POST",
        "/v1/decisions",
        "The decisions of this tick for one cluster",
        schemas.DecisionRequest,
        schemas.DecisionReply,
        DECISION,
        WRITE,
    ),
    Operation(
        "POST",
        "/v1/decisions/batch",
        "The same for many clusters in one call",
        schemas.BatchRequest,
        schemas.BatchReply,
        {"requests": [DECISION]},
        WRITE,
    ),
    Operation(
        "POST",
        "/v1/clusters",
        "Register a cluster whose state is kept",
        schemas.ClusterRequest,
        schemas.ClusterView,
        {"id": "edge-7", "fleet": FLEET},
        (409, *WRITE),
        201,
    ),
    Operation(
        "GET",
        "/v1/clusters/{id}",
        "The state of a cluster",
        None,
        schemas.ClusterView,
        None,
        (404, *READ),
    ),
    Operation(
        "POST",
        "/v1/clusters/{id}/events",
        "What happened; the decisions it causes",
        schemas.EventsRequest,
        schemas.EventsReply,
        EVENTS,
        (409, *WRITE),
    ),
    Operation(
        "GET", "/v1/policies", "The policy versions in use", None, schemas.PoliciesView, None, READ
    ),
    Operation(
        "POST",
        "/v1/policies",
        "Load a version: active, canary or shadow",
        schemas.PolicyRequest,
        schemas.PoliciesView,
        {"source": "power_aware+headroom", "role": "canary", "share": 0.1},
    ),
    Operation(
        "DELETE",
        "/v1/policies/{role}",
        "End the trial of a canary or shadow",
        None,
        schemas.PoliciesView,
        None,
        (404, 409, *READ),
    ),
    Operation(
        "POST", "/k8s/filter", "Kubernetes extender/v1: which nodes fit", None, None, EXTENDER
    ),
    Operation(
        "POST",
        "/k8s/prioritize",
        "Kubernetes extender/v1: which nodes are best",
        None,
        None,
        EXTENDER,
    ),
    Operation("GET", "/metrics", "Prometheus metrics of all replicas", None, None, None, READ),
    Operation("GET", "/healthz", "Whether the process is alive", None, None, None, ()),
    Operation("GET", "/readyz", "Whether the policy is loaded", None, None, None, (503,)),
)

REASONS = {
    400: "The body is not JSON",
    401: "The token is missing or wrong",
    404: "No such cluster or fleet",
    409: "Impossible in this state; nothing was changed",
    413: "The body is too large",
    422: "The body is not what this call takes",
    429: "Too many requests from one caller; see Retry-After",
    503: "Too much in hand; see Retry-After",
}


def documentation_app() -> FastAPI:
    """Return the application that serves /openapi.json and /docs, and refuses all else."""
    app = FastAPI(
        title="cloudsched",
        version=__version__,
        summary="Which job runs on which server, and which servers sleep.",
        redoc_url=None,
    )
    for operation in OPERATIONS:
        _describe(app, operation)
    schema = app.openapi()
    schema["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    for path, methods in schema["paths"].items():
        for method in methods.values():
            # FastAPI's own idea of a refusal; ours is `Problem`.
            if 422 not in method.pop("x-refusals"):
                method["responses"].pop("422", None)
            method["security"] = [] if path in ("/healthz", "/readyz") else [{"token": []}]
    schema["components"]["schemas"].pop("HTTPValidationError", None)
    schema["components"]["schemas"].pop("ValidationError", None)

    @app.exception_handler(404)
    async def not_found(*_: Any) -> JSONResponse:
        return JSONResponse({"error": "No such path; /openapi.json lists them."}, 404)

    @app.exception_handler(405)
    async def not_allowed(request: Any, error: Any) -> JSONResponse:
        return JSONResponse(
            {"error": f"{request.method} is not for this path."}, 405, headers=error.headers
        )

    return app


def _describe(app: FastAPI, operation: Operation) -> None:
    extra: dict[str, Any] = {"x-refusals": list(operation.refusals)}
    if operation.request is None and operation.example is not None:
        content = {"schema": {"type": "object"}, "example": operation.example}
        extra["requestBody"] = {"required": True, "content": {"application/json": content}}
    app.add_api_route(
        operation.path,
        _stand_in(operation),
        methods=[operation.method],
        summary=operation.summary,
        response_model=operation.reply,
        status_code=operation.status,
        responses={
            status: {"model": schemas.Problem, "description": REASONS[status]}
            for status in operation.refusals
        },
        openapi_extra=extra,
        operation_id=f"{operation.method.lower()}{operation.path}".replace("/", "_"),
    )


def _stand_in(operation: Operation) -> Callable[..., Any]:
    """Return a function that only tells FastAPI what the call takes; the ingress answers it."""

    async def stand_in(**_: Any) -> None:
        raise NotImplementedError

    parameters = [
        Parameter(word, Parameter.KEYWORD_ONLY, annotation=str)
        for word in ("id", "role")
        if f"{{{word}}}" in operation.path
    ]
    if operation.request is not None:
        body = Body(openapi_examples={"example": {"value": operation.example}})
        parameters.append(
            Parameter(
                "document", Parameter.KEYWORD_ONLY, annotation=operation.request, default=body
            )
        )
    stand_in.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return stand_in
