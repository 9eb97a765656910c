"""`bkctl api` and `bkctl console`: the REST API of a cluster called and served, and its pages for a browser."""

from __future__ import annotations

import codecs
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from bkctl.columns import Column, Columns, Kind
from bkctl.errors import UsageError

from .bookie.server import BookieServerOption, server
from .kit.audit import shown_uri
from .kit.columns import PlainRow, fields
from .kit.command import Printer, Run, command, group, object_of
from .kit.options import flag, size_option, word
from .kit.texts import plain_lines
from .kit.values import checked, parse_number

if TYPE_CHECKING:
    from bkctl.http.server_settings import HttpSettings

app = group()
console_app = group()

BookieTokenFile = Annotated[
    Path | None, flag("--bookie-token-file FILE", "The token of the bookies' servers (else none).")
]
GATEWAY_COLUMNS = Columns(
    *fields(Kind.TEXT, url="URL", metadataUri="METADATA URI", authentication="AUTHENTICATION"),
    Column("PID", "pid", lambda _: os.getpid(), Kind.INTEGER),
    key="url",
)


@command(app, "serve", connects=True, prints=object_of(GATEWAY_COLUMNS))
def serve(
    run: Run,
    host: Annotated[str, flag("--host HOST", "The address to listen on.")] = "127.0.0.1",
    port: Annotated[str, flag("--port PORT", "The port to listen on; 0: any.")] = "8080",
    token_file: Annotated[
        Path | None, flag("--token-file FILE", "Clients must send this token (else BKCTL_API_TOKEN).")
    ] = None,
    bookie_token_file: BookieTokenFile = None,
    read_only_token_file: Annotated[
        Path | None, flag("--read-only-token-file FILE", "Clients that send this token may read, without secrets.")
    ] = None,
    server_certificate: Annotated[
        Path | None, flag("--server-cert FILE", "Serve https with this PEM certificate.")
    ] = None,
    server_key: Annotated[
        Path | None, flag("--server-key FILE", "Private key of --server-cert, if not in the same file.")
    ] = None,
    client_ca: Annotated[
        Path | None, flag("--client-ca FILE", "Accept clients whose certificate these authorities (PEM) signed.")
    ] = None,
    closed_probes: Annotated[bool, flag("--closed-probes", "/heartbeat requires the token too.")] = False,
) -> None:
    """Serve the REST API of a cluster, in the foreground.

    SIGTERM, SIGHUP or Ctrl-C stops the server. Requests about one bookie (?bookie=ID) are forwarded to that bookie's
    own HTTP server. Beyond loopback the server requires a token or client certificates; on loopback it creates a token
    that your commands find. Only /heartbeat needs no token. Its own token is never sent to a bookie; that of
    --bookie-token-file only to loopback, or over https with --tls-ca. --tls-ca, --tls-cert and --tls-key apply to
    connections to bookies. TLS files that change are loaded again within five minutes. /openapi.json describes the API;
    a browser finds the console, which only reads, under /.

    $ bkctl api serve --port 8080
    """
    from bkctl.http import load_server
    from bkctl.metadata.store import TLS_REFRESH_S

    load_server()
    from bkctl.http.server_settings import HttpSettings, read_token, tls_context

    number = _port(port, "--port")
    if server_certificate is None and (server_key or client_ca):
        raise UsageError("--server-key and --client-ca require --server-cert", hint="add the server's certificate")
    token, source = os.environ.get("BKCTL_API_TOKEN") or None, "BKCTL_API_TOKEN of 'bkctl api serve'"
    if token_file is not None:
        token, source = read_token(token_file), str(token_file)
    server_tls = None
    if server_certificate is not None:
        paths = (None if path is None else str(path) for path in (client_ca, server_key))
        server_tls = tls_context(str(server_certificate), None, *paths, refresh_s=TLS_REFRESH_S)
    read_only_token = None if read_only_token_file is None else read_token(read_only_token_file)
    settings = HttpSettings(host, number, token, server_tls, read_only_token, not closed_probes, source).checked(
        "give --token-file, or --server-cert with --client-ca, or --host 127.0.0.1"
    )
    _serve(run, settings, bookie_token_file, partial(_show, run.out, settings))


_port: Final = checked(parse_number, lambda port: 0 <= port <= 65535, "ports are 0 to 65535")


def _serve(
    run: Run, settings: HttpSettings, bookie_token_file: Path | None, serving: Callable[[str, str, Path | None], None],
    *, link_key: str | None = None,
) -> None:  # fmt: skip
    """Serve until a signal; call `serving` with the URL, the metadata URI and the file of a token that was made."""
    from bkctl.http import load_server
    from bkctl.http.server_settings import read_token
    from bkctl.metadata.store import TLS_REFRESH_S
    from bkctl.metadata.uri import parse_uri
    from bkctl.tasks import ended_by_signals

    http, connection = load_server(), run.access.connection()
    parse_uri(connection.uri)  # Else each request would be refused, not this command.
    tls = run.access.bookie_tls(TLS_REFRESH_S)
    service = partial(
        http.Service, connection.uri, security=run.access.security(connection), timeout_s=run.access.timeout_s, tls=tls,
        addresses=run.access.bookie_addresses(), config=run.access.client_config(),
    )  # fmt: skip
    bookie_token = None if bookie_token_file is None else read_token(bookie_token_file)
    upstream = http.Upstream(bookie_token, tls, run.access.timeout_s)
    run.job.log()
    server = http.HttpServer(settings)
    port_number = server.bind()
    stopped = threading.Event()
    with ended_by_signals(stopped.set):
        server.start(service, upstream=upstream, link_key=link_key)
        try:
            host = f"[{settings.host}]" if ":" in settings.host else settings.host
            serving(f"{settings.protocol}://{host}:{port_number}", shown_uri(connection.uri), server.token_file)
            stopped.wait()
        finally:
            server.stop()


def _show(out: Printer, settings: HttpSettings, url: str, metadata_uri: str, token_file: Path | None) -> None:
    import ssl

    ways = ["token"] if settings.token is not None else []
    if token_file is not None:
        ways.append(f"token in {token_file}")
    if settings.tls is not None and settings.tls.verify_mode is ssl.CERT_REQUIRED:
        ways.append("certificate")
    row = PlainRow(url=url, metadata_uri=metadata_uri, authentication=" and ".join(ways) or "none")
    out.show(row, GATEWAY_COLUMNS)


# --- calls ------------------------------------------------------------------------------------------------------------

#: The longest body of a request: settings, or the bytes of some metadata.
BODY_SIZE_BYTES_MAX: Final = 16 << 20

#: The first parts of the paths below /api/v1.
API_GROUPS: Final = frozenset(("autorecovery", "bookie", "config", "ledger"))
#: Paths of the servers that are not below /api/v1.
OWN_PATHS: Final = frozenset(("", "heartbeat", "metrics", "openapi.json"))

PathArgument = Annotated[
    str, word("PATH", "The path, with or without /api/v1: bookie/state, /api/v1/bookie/state, /heartbeat.")
]

#: A request that a dry run does not send.
REQUEST_COLUMNS = Columns(
    *fields(Kind.TEXT, method="METHOD", url="URL"), Column("BODY", "bodySize", "body_size_bytes", Kind.SIZE), key="url"
)
MaxSize = Annotated[int, size_option("--max-size", "Refuse a larger response (exit code 7).", default="64MiB")]


@command(app, "get", connects=True)
def get(run: Run, path: PathArgument, which: BookieServerOption, size_max: MaxSize) -> None:
    """Send GET to an HTTP server, and print the response.

    The server is that of a bookie, or a gateway to bookies. A response with a status other than 2xx is an error, with
    the server's message.

    $ bkctl api get bookie/state --bookie-url http://127.0.0.1:8080
    """
    _call(run, which, "GET", path, None, size_max)


@command(app, "put", connects=True, changes=None, dry_run=True)
def put(
    run: Run,
    path: PathArgument,
    which: BookieServerOption,
    size_max: MaxSize,
    body: Annotated[str | None, flag("--body JSON|@FILE", "The JSON to send, or @FILE (@-: stdin).")] = None,
) -> None:
    """Send PUT to an HTTP server, and print the response.

    May change the bookie or the cluster. The server's OpenAPI document, and Apache BookKeeper's documentation of its
    HTTP API, describe what each path accepts.

    $ bkctl api put /api/v1/bookie/gc --bookie-url http://127.0.0.1:8080
    """
    data = None if body is None else _body(body)
    _call(run, which, "PUT", path, data, size_max, changes=True)


@command(app, "delete", connects=True, changes=None, asks=True, dry_run=True)
def delete(run: Run, path: PathArgument, which: BookieServerOption, size_max: MaxSize) -> None:
    """Send DELETE to an HTTP server, and print the response.

    For example /api/v1/ledger/delete?ledger_id=5.

    $ bkctl api delete '/api/v1/ledger/delete?ledger_id=5' --bookie b1:3181 --yes
    """
    _call(run, which, "DELETE", path, None, size_max, changes=True)


def _full(path: str) -> str:
    """Return the path on the server: below /api/v1, where `path` may leave that out, or one of its own."""
    from bkctl.http.bookie_client import API_PREFIX

    place = path.removeprefix("/")
    is_own = place.startswith("api/") or place.partition("?")[0] in OWN_PATHS
    if is_own or (path.startswith("/") and place.partition("/")[0] not in API_GROUPS):
        return f"/{place}"
    return f"{API_PREFIX}/{place}"


def _call(
    run: Run, which: Any, method: str, path: str, body: bytes | None, size_max: int, *, changes: bool = False
) -> None:
    path = _full(path)
    found = server(run, which, changes=changes and not run.dry_run)
    client = found.api.client
    if run.dry_run:
        url = f"{found.url}{client.target(path, found.api.query)}"
        size_bytes = None if body is None else len(body)
        run.out.show(PlainRow(method=method, url=url, body_size_bytes=size_bytes), REQUEST_COLUMNS)
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


# --- the console ------------------------------------------------------------------------------------------------------


#: A console that is being served; `url` opens it once.
CONSOLE_COLUMNS = Columns(Column("URL", "url", "url"), Column("METADATA URI", "metadataUri", "metadata_uri"), key="url")


@command(console_app, "console", connects=True, prints=object_of(CONSOLE_COLUMNS))
def console(
    run: Run,
    port: Annotated[str, flag("--port PORT", "The port on loopback; 0: any.")] = "0",
    browser: Annotated[bool, flag("--browser/--no-browser", "Open the link in a browser.")] = True,
    bookie_token_file: BookieTokenFile = None,
) -> None:
    """Show the cluster in a browser.

    The pages are health, bookies, ledgers, replication, garbage and racks. Serves them on loopback until Ctrl-C, and
    prints a link that works once; the session then lasts 12 hours. The pages change nothing. 'bkctl api serve' serves
    them to others, who sign in with its token.

    $ bkctl console
    $ bkctl console --port 8090
    """
    import secrets

    from bkctl.http import load_console

    load_console()
    from bkctl.http.server_settings import HttpSettings

    settings, key = HttpSettings("127.0.0.1", _port(port, "--port")), secrets.token_urlsafe(24)
    _serve(run, settings, bookie_token_file, partial(_announce, run.out, key, browser), link_key=key)


def _announce(out: Printer, key: str, browser: bool, url: str, metadata_uri: str, made: Path | None) -> None:
    link = f"{url}/console/enter?key={key}"
    out.show(PlainRow(url=link, metadata_uri=metadata_uri), CONSOLE_COLUMNS)
    if browser:
        import webbrowser

        if not webbrowser.open(link):
            out.note("No browser was found: open the link yourself")
