"""Bookies whose HTTP servers are made up: their registrations, metrics and answers."""

from __future__ import annotations

from typing import Any

from support.fake_http import Reply, Turns

from bkctl.formats.metadata import BookieEndpoint, BookieServiceInfo
from bkctl.http.bookie_client import BookieApi
from bkctl.http.client import ApiClient
from bkctl.http.server_url import bookie_url
from bkctl.metadata.cluster import Cluster, RegisteredBookie

API = "GET /api/v1/bookie"


def api_of(bookie: RegisteredBookie) -> BookieApi:
    """The HTTP server that a bookie registered."""
    return BookieApi(ApiClient(bookie_url(bookie)))


def metrics(adds: int, reads: int, *, gc: str = "bookie_gc") -> Reply:
    """The metrics of a bookie with two journals, in Apache's form."""
    add, sync = "bookkeeper_server_ADD_ENTRY_REQUEST", "bookie_journal_JOURNAL_SYNC"
    lines = [
        f"# TYPE {add} summary",
        f'{add}{{success="false",quantile="0.99"}} 900',
        f'{add}{{success="true",quantile="0.5"}} 1.25',
        f'{add}{{success="true",quantile="0.95"}} 2.5',
        f'{add}{{success="true",quantile="0.99"}} 7.5',
        f'{add}{{success="true",quantile="0.999"}} NaN',
        f'{add}_count{{success="false"}} 1',
        f'{add}_count{{success="true"}} {adds - 1}',
        f'bookkeeper_server_READ_ENTRY_REQUEST_count{{success="true"}} {reads}',
        f'{sync}{{success="true",quantile="0.99",journalIndex="0"}} 3',
        f'{sync}{{success="true",quantile="0.99",journalIndex="1"}} 4.5',
        'bookie_journal_JOURNAL_QUEUE_SIZE{journalIndex="0"} 2',
        'bookie_journal_JOURNAL_QUEUE_SIZE{journalIndex="1"} 3',
        "bookie_ledgers_count 17",
        f"{gc}_MAJOR_COMPACTION_TOTAL 3",
        f"{gc}_MINOR_COMPACTION_TOTAL 4",
        f"{gc}_RECLAIMED_COMPACTION_SPACE_BYTES 1000",
        f"{gc}_RECLAIMED_DELETION_SPACE_BYTES 24",
    ]
    return Reply("".join(f"{line}\n" for line in lines).encode())


def replies(*answers: Any) -> dict[str, Any]:
    collector = {
        "forceCompacting": False, "majorCompacting": True, "minorCompacting": False, "lastMajorCompactionTime": 1,
        "lastMinorCompactionTime": 1, "majorCompactionCounter": 3, "minorCompactionCounter": 4,
    }  # fmt: skip
    return {
        "GET /metrics": Turns(answers),
        f"{API}/info": {"freeSpace": 250, "totalSpace": 1000},
        f"{API}/gc": {"is_in_force_gc": "false"},
        f"{API}/gc/suspend_compaction": {"isMinorGcSuspended": "false", "isMajorGcSuspended": "false"},
        f"{API}/gc_details": [collector],
    }


def register(cluster: Cluster, bookie_id: str, url: str | None) -> None:
    """Register a bookie with the HTTP server at `url`."""
    endpoints = [BookieEndpoint("bookie", 3181, "127.0.0.1", "bookie-rpc")]
    if url is not None:
        endpoints.append(BookieEndpoint("httpserver", int(url.rpartition(":")[2]), "127.0.0.1", "http"))
    cluster.bookies.register(bookie_id, BookieServiceInfo(tuple(endpoints)))
