"""`bkctl bookies`: the set of bookies of a cluster."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from ._command import Run, command, group
from ._output import GREEN, RED, YELLOW, Column, Columns, Kind

app = group()


class State(StrEnum):
    """Which bookies to list."""

    RW = "rw"
    RO = "ro"
    DOWN = "down"
    ALL = "all"


def _address(bookie: Any) -> str | None:
    address = bookie.address
    if address is None:
        return None
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _endpoints(bookie: Any) -> list[dict[str, Any]]:
    return [
        {
            "id": endpoint.id,
            "protocol": endpoint.protocol,
            "host": endpoint.host,
            "port": endpoint.port,
            "auth": list(endpoint.auth),
            "extensions": list(endpoint.extensions),
        }
        for endpoint in (bookie.info.endpoints if bookie.info is not None else ())
    ]


def _endpoints_text(endpoints: list[dict[str, Any]]) -> str:
    return ", ".join(f"{each['protocol']}://{each['host']}:{each['port']}" for each in endpoints) or "-"


BOOKIE_COLUMNS = Columns(
    Column("BOOKIE", "bookieId", "bookie_id"),
    Column("STATE", "state", "state", style={"rw": GREEN, "ro": YELLOW, "down": RED}),
    Column("ADDRESS", "address", _address),
    Column("SCOPES", "ledgerScopes", "ledger_scopes", Kind.BOOLEAN),
    Column("ENDPOINTS", "endpoints", _endpoints, Kind.NESTED, flexible=True, text=_endpoints_text),
    key="bookieId",
)


@command(app, "list", connects=True)
def list_bookies(
    run: Run,
    state: Annotated[
        State, typer.Option("--state", help="rw, ro, down (it has a cookie, but is not registered) or all.")
    ] = State.ALL,
) -> None:
    """List the bookies: state, address, whether they carry ledger scopes, endpoints."""
    with run.cluster() as cluster:
        bookies = cluster.bookies.list(include_down=state in (State.ALL, State.DOWN))
        run.render((bookie for bookie in bookies if state in (State.ALL, bookie.state)), BOOKIE_COLUMNS)
