"""`bkctl api serve` and `bkctl console`: the REST API of a cluster, and its pages for a browser."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from bkctl.columns import Column, Columns, Kind
from bkctl.errors import UsageError

from ..kit.command import Access, LongWork, Printer, command, group, object_of
from ..kit.values import parse_number

if TYPE_CHECKING:
    from bkctl.http.server_settings import HttpSettings

app = group()
console_app = group()

BookieTokenFile = Annotated[
    Path | None,
    typer.Option("--bookie-token-file", metavar="FILE", help="The token of the bookies' servers (else none)."),
]


class Gateway(NamedTuple):
    """A running gateway."""

    url: str
    metadata_uri: str
    authentication: str


GATEWAY_COLUMNS = Columns(
    Column("URL", "url", "url"),
    Column("METADATA URI", "metadataUri", "metadata_uri"),
    Column("AUTHENTICATION", "authentication", "authentication"),
    Column("PID", "pid", lambda _: os.getpid(), Kind.INTEGER),
    key="url",
)


@command(app, "serve", connects=True, examples=("bkctl api serve --port 8080",), prints=object_of(GATEWAY_COLUMNS))
def serve(
    out: Printer,
    access: Access,
    job: LongWork,
    host: Annotated[str, typer.Option("--host", metavar="HOST", help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[str, typer.Option("--port", metavar="PORT", help="The port to listen on; 0: any.")] = "8080",
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", metavar="FILE", help="Clients must send this token (else BKCTL_API_TOKEN)."),
    ] = None,
    bookie_token_file: BookieTokenFile = None,
    read_only_token_file: Annotated[
        Path | None,
        typer.Option(
            "--read-only-token-file", metavar="FILE", help="Clients that send this token may read, without secrets."
        ),
    ] = None,
    server_certificate: Annotated[
        Path | None, typer.Option("--server-cert", metavar="FILE", help="Serve https with this PEM certificate.")
    ] = None,
    server_key: Annotated[
        Path | None,
        typer.Option("--server-key", metavar="FILE", help="Private key of --server-cert, if not in the same file."),
    ] = None,
    client_ca: Annotated[
        Path | None,
        typer.Option(
            "--client-ca", metavar="FILE", help="Accept clients whose certificate these authorities (PEM) signed."
        ),
    ] = None,
    closed_probes: Annotated[bool, typer.Option("--closed-probes", help="/heartbeat requires the token too.")] = False,
) -> None:
    """Serve the REST API of a cluster, in the foreground.

    SIGTERM, SIGHUP or Ctrl-C stops the server. Requests about one bookie (?bookie=ID) are forwarded to that bookie's
    own HTTP server. Beyond loopback the server requires a token or client certificates; on loopback it creates a token
    that your commands find. Only /heartbeat needs no token. Its own token is never sent to a bookie; that of
    --bookie-token-file only to loopback, or over https with --tls-ca. --tls-ca, --tls-cert and --tls-key apply to
    connections to bookies. TLS files that change are loaded again within five minutes. /openapi.json describes the API;
    a browser finds the console, which only reads, under /.
    """
    from bkctl.http import load_server

    load_server()
    from bkctl.http.server_settings import HttpSettings, read_token, tls_context
    from bkctl.metadata.store import TLS_REFRESH_S

    number = _port(port)
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
    _serve(access, job, settings, bookie_token_file, partial(_show, out, settings))


def _port(text: str) -> int:
    number = parse_number(text, "--port")
    if not 0 <= number <= 65535:
        raise UsageError(f"--port {text}: ports are 0 to 65535")
    return number


def _serve(
    access: Access, job: LongWork, settings: HttpSettings, bookie_token_file: Path | None,
    serving: Callable[[str, str, Path | None], None], *, link_key: str | None = None,
) -> None:  # fmt: skip
    """Serve until a signal; call `serving` with the URL, the metadata URI and the file of a token that was made."""
    from bkctl.http import load_server
    from bkctl.http.server_settings import read_token
    from bkctl.metadata.store import TLS_REFRESH_S
    from bkctl.tasks import ended_by_signals

    http = load_server()
    connection = access.connection()
    security = access.security(connection)
    tls, addresses = access.bookie_tls(TLS_REFRESH_S), access.bookie_addresses()
    config = access.client_config()
    bookie_token = None if bookie_token_file is None else read_token(bookie_token_file)
    upstream = http.Upstream(bookie_token, tls, access.timeout_s)
    job.log()
    server = http.HttpServer(settings)
    port_number = server.bind()
    stopped = threading.Event()
    with ended_by_signals(stopped.set):
        server.start(
            lambda: http.Service(
                connection.uri, security=security, timeout_s=access.timeout_s, tls=tls, addresses=addresses,
                config=config,
            ),
            upstream=upstream,
            link_key=link_key,
        )  # fmt: skip
        try:
            host = settings.host
            serving(
                f"{settings.protocol}://{f'[{host}]' if ':' in host else host}:{port_number}",
                connection.uri, server.token_file,
            )  # fmt: skip
            stopped.wait()
        finally:
            server.stop()


def _show(out: Printer, settings: HttpSettings, url: str, metadata_uri: str, made: Path | None) -> None:
    out.show(Gateway(url, metadata_uri, _authentication(settings, made)), GATEWAY_COLUMNS)


def _authentication(settings: HttpSettings, token_file: Path | None) -> str:
    import ssl

    ways = ["token"] if settings.token is not None else []
    if token_file is not None:
        ways.append(f"token in {token_file}")
    if settings.tls is not None and settings.tls.verify_mode is ssl.CERT_REQUIRED:
        ways.append("certificate")
    return " and ".join(ways) or "none"


# --- the console ------------------------------------------------------------------------------------------------------


class OpenConsole(NamedTuple):
    """A console that is being served; `url` opens it once."""

    url: str
    metadata_uri: str


CONSOLE_COLUMNS = Columns(Column("URL", "url", "url"), Column("METADATA URI", "metadataUri", "metadata_uri"), key="url")


@command(
    console_app,
    "console",
    connects=True,
    examples=("bkctl console", "bkctl console --port 8090"),
    prints=object_of(CONSOLE_COLUMNS),
)
def console(
    out: Printer,
    access: Access,
    job: LongWork,
    port: Annotated[str, typer.Option("--port", metavar="PORT", help="The port on loopback; 0: any.")] = "0",
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the link in a browser.")] = True,
    bookie_token_file: BookieTokenFile = None,
) -> None:
    """Show the cluster in a browser.

    The pages are health, bookies, ledgers, replication, garbage and racks. Serves them on loopback until Ctrl-C, and
    prints a link that works once; the session then lasts 12 hours. The pages change nothing. 'bkctl api serve' serves
    them to others, who sign in with its token.
    """
    import secrets

    from bkctl.http import load_console

    load_console()
    from bkctl.http.server_settings import HttpSettings

    settings, key = HttpSettings("127.0.0.1", _port(port)), secrets.token_urlsafe(24)
    _serve(access, job, settings, bookie_token_file, partial(_announce, out, key, browser), link_key=key)


def _announce(out: Printer, key: str, browser: bool, url: str, metadata_uri: str, made: Path | None) -> None:
    link = f"{url}/console/enter?key={key}"
    out.show(OpenConsole(link, metadata_uri), CONSOLE_COLUMNS)
    if browser:
        import webbrowser

        if not webbrowser.open(link):
            out.note("No browser was found: open the link yourself")
