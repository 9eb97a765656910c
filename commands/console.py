"""`bkctl console`: a cluster in the browser."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from bkctl.columns import Column, Columns
from bkctl.errors import UsageError

from .api.serve import run_gateway
from .kit.access import Access
from .kit.command import command, group
from .kit.documents import object_of
from .kit.job import LongWork
from .kit.printer import Printer
from .kit.values import parse_number

app = group()


class OpenConsole(NamedTuple):
    """A console that is being served; `url` opens it once."""

    url: str
    metadata_uri: str


CONSOLE_COLUMNS = Columns(Column("URL", "url", "url"), Column("METADATA URI", "metadataUri", "metadata_uri"), key="url")


@command(
    app,
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
    bookie_token_file: Annotated[
        Path | None,
        typer.Option("--bookie-token-file", metavar="FILE", help="The token of the bookies' servers (else none)."),
    ] = None,
) -> None:
    """Show the cluster in a browser.

    The pages are health, bookies, ledgers, replication, garbage and racks. Serves them on loopback until Ctrl-C, and
    prints a link that works once; the session then lasts 12 hours. The pages change nothing. 'bkctl api serve' serves
    them to others, who sign in with its token.
    """
    import secrets

    from bkctl.http import load_console

    load_console()
    from bkctl.http.server_settings import HttpSettings, read_token

    number = parse_number(port, "--port")
    if not 0 <= number <= 65535:
        raise UsageError(f"--port {port}: ports are 0 to 65535")
    key = secrets.token_urlsafe(24)
    token = None if bookie_token_file is None else read_token(bookie_token_file)
    run_gateway(
        access, job, HttpSettings("127.0.0.1", number), token, partial(_announce, out, key, browser), link_key=key
    )


def _announce(out: Printer, key: str, browser: bool, url: str, metadata_uri: str, made: Path | None) -> None:
    link = f"{url}/console/enter?key={key}"
    out.show(OpenConsole(link, metadata_uri), CONSOLE_COLUMNS)
    if browser:
        import webbrowser

        if not webbrowser.open(link):
            out.note("No browser was found: open the link yourself")
