"""`bkctl api get|put|delete`: single calls of a REST API; `api` has the app and imports this."""

from __future__ import annotations

import codecs
import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Annotated, Any, Final, NamedTuple

import typer

from bkctl.columns import Column, Columns, Kind
from bkctl.errors import UsageError

from ..bookie.server import BookieServerOption, server
from ..kit.command import Run, command, group
from ..kit.options import DryRun, size_option
from ..kit.texts import plain_lines

app = group()

#: The longest body of a request: settings, or the bytes of some metadata.
BODY_SIZE_BYTES_MAX: Final = 16 << 20

#: The first parts of the paths below /api/v1.
API_GROUPS: Final = frozenset(("autorecovery", "bookie", "config", "ledger"))
#: Paths of the servers that are not below /api/v1.
OWN_PATHS: Final = frozenset(("", "heartbeat", "metrics", "openapi.json"))

PathArgument = Annotated[
    str,
    typer.Argument(
        metavar="PATH", help="The path, with or without /api/v1: bookie/state, /api/v1/bookie/state, /heartbeat."
    ),
]


class PlannedRequest(NamedTuple):
    """A request that a dry run does not send."""

    method: str
    url: str
    body_size_bytes: int | None


REQUEST_COLUMNS = Columns(
    Column("METHOD", "method", "method"),
    Column("URL", "url", "url"),
    Column("BODY", "bodySize", "body_size_bytes", Kind.SIZE),
    key="url",
)
MaxSize = Annotated[int, size_option("--max-size", "Refuse a larger response (exit code 7).", default="64MiB")]


@command(app, "get", connects=True, examples=("bkctl api get bookie/state --bookie-url http://127.0.0.1:8080",))
def get(run: Run, path: PathArgument, which: BookieServerOption, size_max: MaxSize) -> None:
    """Send GET to an HTTP server, and print the response.

    The server is that of a bookie, or a gateway to bookies. A response with a status other than 2xx is an error, with
    the server's message.
    """
    _call(run, which, "GET", path, None, size_max)


@command(
    app,
    "put",
    connects=True,
    changes=None,
    examples=("bkctl api put /api/v1/bookie/gc --bookie-url http://127.0.0.1:8080",),
)
def put(
    run: Run,
    path: PathArgument,
    which: BookieServerOption,
    size_max: MaxSize,
    body: Annotated[
        str | None, typer.Option("--body", metavar="JSON|@FILE", help="The JSON to send, or @FILE (@-: stdin).")
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Send PUT to an HTTP server, and print the response.

    May change the bookie or the cluster. The server's OpenAPI document, and Apache BookKeeper's documentation of its
    HTTP API, describe what each path accepts.
    """
    data = None if body is None else _body(body)
    _call(run, which, "PUT", path, data, size_max, changes=True, dry_run=dry_run)


@command(
    app,
    "delete",
    connects=True,
    changes=None,
    asks=True,
    examples=("bkctl api delete '/api/v1/ledger/delete?ledger_id=5' --bookie b1:3181 --yes",),
)
def delete(run: Run, path: PathArgument, which: BookieServerOption, size_max: MaxSize, dry_run: DryRun = False) -> None:
    """Send DELETE to an HTTP server, and print the response.

    For example /api/v1/ledger/delete?ledger_id=5.
    """
    _call(run, which, "DELETE", path, None, size_max, changes=True, dry_run=dry_run)


def _full(path: str) -> str:
    """Return the path on the server: below /api/v1, where `path` may leave that out, or one of its own."""
    from bkctl.http.bookie_client import API_PREFIX

    place = path.removeprefix("/")
    is_own = place.startswith("api/") or place.partition("?")[0] in OWN_PATHS
    if is_own or (path.startswith("/") and place.partition("/")[0] not in API_GROUPS):
        return f"/{place}"
    return f"{API_PREFIX}/{place}"


def _call(
    run: Run, which: Any, method: str, path: str, body: bytes | None, size_max: int,
    *, changes: bool = False, dry_run: bool = False,
) -> None:  # fmt: skip
    path = _full(path)
    with server(run, which, changes=changes and not dry_run) as found:
        client = found.api.client
        if dry_run:
            url = f"{found.url}{client.target(path, found.api.query)}"
            run.out.show(PlannedRequest(method, url, None if body is None else len(body)), REQUEST_COLUMNS)
            return
        client.target(path)  # An invalid path is refused before the user is asked.
        if method == "DELETE":
            run.consent.confirm(f"{client.url}{path} would be deleted")
        with client.exchange(method, path, found.api.query, body, streams=True) as answer:
            run.out.detail(f"{answer.status} {answer.content_type or 'without a content type'}")
            if not 200 <= answer.status < 300:
                raise client.error_of(answer, method, path)
            chunks = answer.chunks(size_max)
            if sys.stdout.isatty():
                for text in _readable(chunks):
                    run.out.text(text)
            else:
                for chunk in chunks:
                    run.out.raw(chunk)


def _readable(chunks: Iterator[bytes]) -> Iterator[str]:
    """Yield the answer for a terminal: nothing that steers it, and a line end at the end."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    last = "\n"
    for chunk in chunks:
        text = decoder.decode(chunk).replace("\r\n", "\n")
        if text:
            yield plain_lines(text)
            last = text[-1]
    if last != "\n":
        yield "\n"


def _body(text: str) -> bytes:
    """Return the bytes to send. Raises UsageError for bytes that are not JSON, or too many."""
    if text == "@-" and sys.stdin is None:
        raise UsageError("stdin is closed, so no body can be read")
    data = text.encode("utf-8", "surrogateescape")
    if text.startswith("@"):
        with nullcontext(sys.stdin.buffer) if text == "@-" else open(text[1:], "rb") as stream:
            data = stream.read(BODY_SIZE_BYTES_MAX + 1)
    if len(data) > BODY_SIZE_BYTES_MAX:
        raise UsageError(f"--body: larger than {BODY_SIZE_BYTES_MAX:,} bytes")
    try:
        json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UsageError("--body: not JSON", hint="quote it for the shell, or give it as @FILE") from error
    return data
