"""Declares endpoints of the REST API: one declaration for routing, checks of requests, and the OpenAPI document.

    @ENDPOINTS.get("/api/v1/bookie/state", "Whether the bookie runs, and takes entries.", answer=STATE)
    def state(bookie: Bookie, call: ApiCall) -> Mapping[str, bool]: ...

A handler returns the value of the JSON answer, the text of another answer, or a Response. A handler that is not a
coroutine is called with the bookie, in the bookie's event loop, or with the cluster, in a thread.

Source of paths, names, types and key forms: HttpRouter and the services of org.apache.bookkeeper.server.http.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partialmethod
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from starlette.responses import Response, StreamingResponse

from bkctl import __version__
from bkctl.errors import UsageError
from bkctl.http.bookie_client import BOOKIE_PARAMETER
from bkctl.ids import I64_MAX, parse_scope_id

if TYPE_CHECKING:
    from bkctl.http.service import Service


PREFIX: Final = "/api/v1"
JSON: Final = "application/json"
TEXT: Final = "text/plain; charset=utf-8"
#: The longest message of an error, since a request can put much into it.
MESSAGE_LENGTH_MAX: Final = 1000

Schema: TypeAlias = Mapping[str, Any]
F = TypeVar("F", bound=Callable[..., Any])

BOOLEAN: Final[Schema] = {"type": "boolean"}
INTEGER: Final[Schema] = {"type": "integer", "format": "int64"}
STRING: Final[Schema] = {"type": "string"}
STRING_OR_NULL: Final[Schema] = {"type": ["string", "null"]}


def object_of(**properties: Schema) -> Schema:
    """Return the schema of an object with all these properties, and perhaps more."""
    return {"type": "object", "properties": dict(properties), "required": list(properties)}


def map_of(value: Schema) -> Schema:
    """Return the schema of an object with any names and such values."""
    return {"type": "object", "additionalProperties": dict(value)}


def list_of(item: Schema) -> Schema:
    """Return the schema of an array."""
    return {"type": "array", "items": dict(item)}


class ValueKind(Enum):
    """The type of a value in a query or a body."""

    TEXT = "string"
    INTEGER = "integer"
    BOOLEAN = "boolean"
    #: In a query: present or absent, whatever its value.
    FLAG = "flag"
    #: In a body: an array of texts.
    TEXTS = "array"


#: The form of values in words, and its check; others are strings.
_FORMS: Final[Mapping[ValueKind, tuple[str, Callable[[Any], bool]]]] = {
    ValueKind.TEXTS: ("an array of strings", lambda given: isinstance(given, list) and {*map(type, given)} <= {str}),
    ValueKind.INTEGER: ("a whole number", lambda given: type(given) is int),
    ValueKind.BOOLEAN: ("true or false", lambda given: isinstance(given, bool)),
}


@dataclass(frozen=True, slots=True)
class Value:
    """A value of a query or a body. Integers are from `least` to `most`; with `choices`, only these texts are valid."""

    name: str
    help: str
    kind: ValueKind = ValueKind.TEXT
    required: bool = False
    least: int = 0
    most: int = I64_MAX
    choices: tuple[str, ...] = ()

    def of_query(self, text: str) -> Any:
        """Return the value of a text in a query. Raise UsageError."""
        if self.kind is ValueKind.FLAG:
            return True
        digits = text.removeprefix("-")
        is_number = digits.isascii() and digits.isdecimal() and len(digits) <= 20
        return self.of_body(int(text) if self.kind is ValueKind.INTEGER and is_number else text)

    def of_body(self, value: Any) -> Any:
        """Return the value of JSON in a body; booleans may be strings. Raise UsageError."""
        if self.kind is ValueKind.BOOLEAN and isinstance(value, str):
            value = {"true": True, "false": False}.get(value.lower(), value)
        wanted, is_right = _FORMS.get(self.kind, ("a string", lambda given: isinstance(given, str)))
        if not is_right(value):
            raise self._refuse(value, wanted)
        if self.choices and value not in self.choices:
            raise self._refuse(value, f"one of {', '.join(self.choices)}")
        if self.kind is ValueKind.INTEGER and not self.least <= value <= self.most:
            raise self._refuse(value, f"from {self.least} to {self.most}")
        return value

    def _refuse(self, given: Any, wanted: str) -> UsageError:
        return UsageError(f"{self.name} must be {wanted}, not {json.dumps(given)}"[:MESSAGE_LENGTH_MAX])

    def schema(self, *, in_body: bool) -> Schema:
        """Return the JSON schema of the value."""
        if self.kind is ValueKind.TEXTS:
            return list_of(STRING)
        if self.kind is ValueKind.INTEGER:
            return {**INTEGER, "minimum": self.least, "maximum": self.most}
        if self.kind is ValueKind.BOOLEAN:
            texts = {"type": "string", "enum": ["true", "false"]}
            return {"oneOf": [BOOLEAN, texts]} if in_body else texts
        if self.choices:
            return {"type": "string", "enum": list(self.choices)}
        return STRING


@dataclass(frozen=True, slots=True)
class Body:
    """The JSON object in a request's body. `needed`: it is required; `open_values` describes a body with any names."""

    values: tuple[Value, ...] = ()
    needed: bool = True
    #: At least one of the values is required.
    needs_value: bool = False
    open_values: str = ""

    def parse(self, data: bytes) -> dict[str, Any]:
        """Return the object in `data` with checked values; {} for an empty body. Raise UsageError."""
        if not data.strip():
            if self.needed:
                raise UsageError("The request has no body", hint=f"send a JSON object with {self._names()}")
            return {}
        try:
            found = json.loads(data, parse_constant=_refuse_constant, object_pairs_hook=_each_once)
        except (ValueError, RecursionError):
            raise UsageError("The body is not JSON", hint=f"send a JSON object with {self._names()}") from None
        if not isinstance(found, dict):
            raise UsageError("The body is not a JSON object", hint=f"send a JSON object with {self._names()}")
        if self.open_values:
            return found
        known = {value.name: value for value in self.values}
        unknown = sorted(found.keys() - known.keys())
        if unknown:
            message = f"The body has unknown values: {', '.join(unknown)}"
            raise UsageError(message[:MESSAGE_LENGTH_MAX], hint=f"known values: {self._names()}")
        for value in self.values:
            if value.required and value.name not in found:
                raise UsageError(f"The body lacks {value.name}: {value.help.removesuffix('.')}")
        if self.needs_value and not found:
            raise UsageError(f"The body lacks {' or '.join(known)}")
        return {name: known[name].of_body(given) for name, given in found.items()}

    def _names(self) -> str:
        return self.open_values or ", ".join(value.name for value in self.values)

    def schema(self) -> Schema:
        """Return the JSON schema of the body."""
        if self.open_values:
            return {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean"]}}
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {
                value.name: {**value.schema(in_body=True), "description": value.help} for value in self.values
            },
            "additionalProperties": False,
        }
        if required := [value.name for value in self.values if value.required]:
            schema["required"] = required
        if self.needs_value:
            schema["minProperties"] = 1
        return schema


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise UsageError("The body has a name twice")
    return found


def _refuse_constant(text: str) -> Any:
    raise ValueError(text)


@dataclass(frozen=True, slots=True)
class ApiCall:
    """A checked request: the values of its query and of its body (none without a body), and the service."""

    service: Service
    values: Mapping[str, Any]
    body: Mapping[str, Any]
    #: False for a client with the read-only token: its answers contain no passwords.
    sees_secrets: bool = True


Handler: TypeAlias = Callable[[ApiCall], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class ApiEndpoint:
    """One method of one path.

    `answer` is the schema of its JSON answer, or the media type of another answer. `errors` has the meanings of the
    endpoint's own status codes. `of_bookie`: the endpoint is about one bookie, and a gateway forwards it.
    """

    method: str
    path: str
    summary: str
    handler: Handler = field(repr=False)
    answer: Schema | str
    values: tuple[Value, ...] = ()
    body: Body | None = None
    errors: Mapping[int, str] = field(default_factory=dict)
    of_bookie: bool = False
    #: If there is nothing to do, the answer is plain text.
    text_too: bool = False
    #: Any method is valid, as in Apache's server.
    any_method: bool = False
    #: The answer holds no secrets, and monitors ask for it: it needs no token, unless the settings say so.
    probe: bool = False
    #: A GET that changes something: it needs the full token, and is refused to browsers.
    acts: bool = False
    #: The longest time for the answer in seconds; None: the default.
    timeout_s: float | None = None

    def is_open(self, *, open_probes: bool, gateway: bool) -> bool:
        """Return True for a probe that every client may ask. A `gateway` would add its own token to one it forwards."""
        return self.probe and open_probes and not (gateway and self.of_bookie)

    async def respond(self, call: ApiCall) -> Response:
        """Return the handler's answer as a response. Raise its errors."""
        found = await self.handler(call)
        if isinstance(found, Response):
            return found
        return text_answer(found, self.answer) if isinstance(self.answer, str) else json_answer(found)

    @property
    def only_reads(self) -> bool:
        """True if the endpoint changes nothing, so that the read-only token suffices."""
        return (self.method == "GET" or self.any_method) and not self.acts

    def parse_query(self, pairs: Iterable[tuple[str, str]]) -> dict[str, Any]:
        """Return the values of a query string. Raise UsageError, also for a value that is given twice and differs.

        Undeclared values are ignored, as in Apache's server, except by DELETE: a misspelt scope would delete another
        ledger.
        """
        query: dict[str, str] = {}
        known = {"bookie", *(value.name for value in self.values)}
        for name, text in pairs:
            if name in known and query.setdefault(name, text) != text:
                raise UsageError(f"{name} is given twice: {query[name]!r} and {text!r}"[:MESSAGE_LENGTH_MAX])
            if self.method == "DELETE" and name not in known:
                message = f"The query has an unknown value: {name}"
                raise UsageError(message[:MESSAGE_LENGTH_MAX], hint=f"known values: {', '.join(sorted(known))}")
        values = {}
        for value in self.values:
            if value.name in query:
                values[value.name] = value.of_query(query[value.name])
            elif value.required:
                raise UsageError(f"{value.name} is missing: {value.help.removesuffix('.')}")
        return values


class Endpoints(list[ApiEndpoint]):
    """Endpoints in the order of their declarations, all of a bookie or all of a cluster."""

    def __init__(self, *, of_bookie: bool) -> None:
        super().__init__()
        self._of_bookie = of_bookie

    def _declare(self, method: str, path: str, summary: str, **settings: Any) -> Callable[[F], F]:
        """Declare the decorated handler; `settings` are fields of ApiEndpoint."""

        def declare(function: F) -> F:
            handler = function if iscoroutinefunction(function) else self._asking(function)
            self.append(ApiEndpoint(method, path, summary, handler, of_bookie=self._of_bookie, **settings))
            return function

        return declare

    def _asking(self, question: Callable[[Any, ApiCall], Any]) -> Handler:
        """Return a handler that calls a short function with the bookie or the cluster."""

        async def handle(call: ApiCall) -> Any:
            if self._of_bookie:
                return await call.service.bookie.ask(lambda bookie: question(bookie, call))
            return await asyncio.to_thread(question, await call.service.cluster(), call)

        return handle

    get: partialmethod[Callable[[F], F]] = partialmethod(_declare, "GET")
    put: partialmethod[Callable[[F], F]] = partialmethod(_declare, "PUT")
    delete: partialmethod[Callable[[F], F]] = partialmethod(_declare, "DELETE")


# --- answers ---------------------------------------------------------------------------------------------------------


def json_text(value: Any, level: int = 0) -> str:
    """Return JSON with Jackson's indentation, as Apache's server does, for clients that read it line by line."""
    if isinstance(value, Mapping):
        if not value:
            return "{ }"
        indent = "\n" + "  " * (level + 1)
        inner = f",{indent}".join(
            f"{json.dumps(str(name), ensure_ascii=False)} : {json_text(item, level + 1)}"
            for name, item in value.items()
        )
        return f"{{{indent}{inner}\n{'  ' * level}}}"
    if isinstance(value, list | tuple):
        return f"[ {', '.join(json_text(item, level) for item in value)} ]" if value else "[ ]"
    return json.dumps(value, ensure_ascii=False)


def json_answer(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response with `value` as JSON."""
    return Response(_encoded(json_text(value)), status, headers, JSON)


def text_answer(text: str, media_type: str = TEXT) -> Response:
    """Return a response of text."""
    return Response(_encoded(text), media_type=media_type)


def error_answer(
    status: int, message: str, hint: str | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a response for an error: `{"error": …, "hint": …}`."""
    return json_answer({"error": message[:MESSAGE_LENGTH_MAX], "hint": hint}, status, headers)


async def streamed_object(entries: AsyncIterator[list[tuple[str, str]]]) -> Response:
    """Return a response that streams one JSON object of `entries` (names, and values as JSON).

    The first batch is awaited, so that early errors get a status code of their own. Raise the errors of `entries`.
    """
    first = await anext(entries, None)

    async def parts() -> AsyncIterator[bytes]:
        before, batch = "{", first
        while batch is not None:
            lines = []
            for name, value in batch:
                lines.append(f"{before}\n  {json.dumps(name, ensure_ascii=False)} : {value}")
                before = ","
            yield _encoded("".join(lines))
            batch = await anext(entries, None)
        yield b"\n}" if before == "," else b"{ }"

    return StreamingResponse(parts(), media_type=JSON)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "replace")  # a request may put half a surrogate pair into a message


#: Every scope, as the value of a scope parameter.
ALL_SCOPES: Final = "*"
LIMIT_MAX: Final = 1_000_000
#: Items that are sent as one piece, which bounds the memory of an endless answer.
BATCH_COUNT: Final = 1000

SCOPES: Final = Value("ledger_scope_id", f"Ledgers of this scope (BP-35); default 0, {ALL_SCOPES} for all scopes.")


def scope_of(call: ApiCall) -> int | None:
    """Return the scope that the request names; None for all scopes. Raise UsageError."""
    text = call.values.get("ledger_scope_id", "0")
    return None if text == ALL_SCOPES else parse_scope_id(text)


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
        "operationId": f"{method}-{name}", "summary": endpoint.summary, "responses": _responses(endpoint, gateway),
    }  # fmt: skip
    parameters = [
        {
            "name": value.name, "in": "query", "description": value.help, "required": value.required,
            "schema": value.schema(in_body=False),
        }
        for value in (*endpoint.values, *([_BOOKIE] if gateway and endpoint.of_bookie else []))
    ]  # fmt: skip
    if parameters:
        operation["parameters"] = parameters
    if endpoint.body is not None:
        content = {JSON: {"schema": endpoint.body.schema()}}
        operation["requestBody"] = {"required": endpoint.body.needed, "content": content}
    return operation


_INVALID: Final = {400: "A value is missing, or does not parse"}
#: Errors of all endpoints.
_ERRORS: Final[Mapping[int, str]] = {
    401: "The token is missing or wrong",
    403: "The request does not come from where it may",
    408: "The request did not come in time",
    500: "Stored data is damaged, or the server is at fault",
    503: "Too much to do, or a server behind it cannot be reached",
    504: "A server behind it did not answer in time",
}


def _responses(endpoint: ApiEndpoint, gateway: bool) -> dict[str, Any]:
    is_text, is_forwarded = isinstance(endpoint.answer, str), gateway and endpoint.of_bookie
    content: dict[Any, Any] = {endpoint.answer if is_text else JSON: {"schema": STRING if is_text else endpoint.answer}}
    if endpoint.text_too:
        content[TEXT] = {"schema": STRING}
    codes = {
        **(_INVALID if endpoint.values or endpoint.body is not None or is_forwarded else {}),
        **({404: "The bookie does not exist"} if is_forwarded else {}),
        **_ERRORS, **endpoint.errors,
        **({413: "The body is too large"} if endpoint.body is not None else {}),
        **({502: "The bookie's server sent an invalid answer"} if is_forwarded else {}),
    }  # fmt: skip
    error = {JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {
        "200": {"description": "Done", "content": content},
        **{str(code): {"description": meaning, "content": error} for code, meaning in sorted(codes.items())},
    }
