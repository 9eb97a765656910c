"""Builds the OpenAPI 3.1 document of the API from the endpoints' declarations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from bkctl import __version__
from bkctl.http.bookie_client import BOOKIE_PARAMETER
from bkctl.http.endpoints import JSON, STRING, STRING_OR_NULL, TEXT, ApiEndpoint, Value, error_codes, object_of

_ERROR: Final = object_of(error=STRING, hint=STRING_OR_NULL)
_BOOKIE: Final = Value(
    BOOKIE_PARAMETER, "The bookie to ask; the gateway forwards the request to its HTTP server.", required=True
)


def document(
    endpoints: Iterable[ApiEndpoint], *, gateway: bool, needs_token: bool, open_probes: bool = True
) -> dict[str, Any]:
    """Return the document of these endpoints. On a `gateway`, endpoints of a bookie have a parameter that names it."""
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        methods = ("get", "put", "post", "delete") if endpoint.any_method else (endpoint.method.lower(),)
        for method in methods:
            operation = paths.setdefault(endpoint.path, {})[method] = _operation(endpoint, method, gateway)
            if needs_token and endpoint.is_open(open_probes=open_probes, gateway=gateway):
                operation["security"] = []
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "bkctl",
            "version": __version__,
            "description": "Apache BookKeeper's REST API with the ledger scopes of BP-35.",
        },
        "paths": paths,
        "components": {"schemas": {"Error": _ERROR}},
    }
    if needs_token:
        found["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"token": []}]
    return found


def _operation(endpoint: ApiEndpoint, method: str, gateway: bool) -> dict[str, Any]:
    name = "-".join(part for part in endpoint.path.split("/") if part not in ("", "api", "v1"))
    operation: dict[str, Any] = {
        "operationId": f"{method}-{name}",
        "summary": endpoint.summary,
        "responses": _responses(endpoint, gateway),
    }
    parameters = [
        {
            "name": value.name,
            "in": "query",
            "description": value.help,
            "required": value.required,
            "schema": value.schema(in_body=False),
        }
        for value in (*endpoint.values, *([_BOOKIE] if gateway and endpoint.of_bookie else []))
    ]
    if parameters:
        operation["parameters"] = parameters
    if endpoint.body is not None:
        operation["requestBody"] = {
            "required": endpoint.body.needed,
            "content": {JSON: {"schema": endpoint.body.schema()}},
        }
    return operation


def _responses(endpoint: ApiEndpoint, gateway: bool) -> dict[str, Any]:
    if isinstance(endpoint.answer, str):
        content: dict[str, Any] = {endpoint.answer: {"schema": STRING}}
    else:
        content = {JSON: {"schema": endpoint.answer}}
    if endpoint.text_too:
        content[TEXT] = {"schema": STRING}
    responses: dict[str, Any] = {"200": {"description": "Done", "content": content}}
    codes = dict(error_codes(endpoint))
    if gateway and endpoint.of_bookie:
        codes = {400: "A value is missing, or does not parse", 404: "The bookie does not exist", **codes}
        codes[502] = "The bookie's server sent an invalid answer"
    for code, meaning in sorted(codes.items()):
        responses[str(code)] = {
            "description": meaning,
            "content": {JSON: {"schema": {"$ref": "#/components/schemas/Error"}}},
        }
    return responses
