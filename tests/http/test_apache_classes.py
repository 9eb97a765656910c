"""Apache's own classes read the answers of our server, and refuse fields that they do not have."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final

import pytest
from support.raw_http import call
from support.servers import Java

from bkctl.client.ledger import BookKeeper
from bkctl.http.app import ENDPOINTS
from bkctl.http.endpoints import PREFIX
from bkctl.metadata.cluster import open_cluster
from bkctl.metadata.underreplication import LedgerMarks

SERVICES: Final = "org.apache.bookkeeper.server.http.service"
MAP, LIST = "java.util.LinkedHashMap", "java.util.ArrayList"
#: Each path with a JSON answer: the class that Apache's clients and tests read it into, and a query.
CLASSES: Final = {
    f"{PREFIX}/bookie/cluster_info": (f"{SERVICES}.ClusterInfoService$ClusterInfo", ""),
    f"{PREFIX}/bookie/state": (f"{SERVICES}.BookieStateService$BookieState", ""),
    f"{PREFIX}/bookie/state/readonly": (f"{SERVICES}.BookieStateReadOnlyService$ReadOnlyState", ""),
    f"{PREFIX}/bookie/sanity": (f"{SERVICES}.BookieSanityService$BookieSanity", ""),
    f"{PREFIX}/bookie/info": (f"{SERVICES}.BookieInfoService$BookieInfo", ""),
    f"{PREFIX}/bookie/gc_details": (LIST, ""),
    f"{PREFIX}/autorecovery/list_under_replicated_ledger": (LIST, ""),
    **{f"{PREFIX}/{path}": (MAP, query) for path, query in (
        ("bookie/ledger_scopes", ""), ("bookie/list_bookies", ""), ("bookie/list_bookie_info", ""), ("bookie/gc", ""),
        ("bookie/gc/suspend_compaction", ""), ("bookie/entry_location_compact", ""), ("bookie/last_log_mark", ""),
        ("bookie/list_disk_file", ""), ("config/server_config", ""), ("autorecovery/status", ""),
        ("ledger/list", "print_metadata=true&decode_meta=true"), ("ledger/metadata", "ledger_id=0"),
        ("ledger/read", "ledger_id=0"),
    )},
}  # fmt: skip


@pytest.fixture(scope="module")
def answers(bookie: Any) -> dict[str, Any]:
    """The JSON answers of a bookie with a ledger, marked under-replicated, by path."""

    async def write() -> None:
        with open_cluster(str(bookie.settings["metadataServiceUri"])) as cluster:
            async with BookKeeper(cluster) as bookkeeper:
                one = {"ensemble_size": 1, "write_quorum_size": 1, "ack_quorum_size": 1}
                async with await bookkeeper.create_ledger_adv(0, **one) as writer:
                    await writer.add(b"entry")
                LedgerMarks(cluster.store).add(writer.ledger, ["127.0.0.1:1"])

    asyncio.run(write())
    found = {}
    for path, (_, query) in CLASSES.items():
        answer = call(bookie.http_port, "GET", f"{path}?{query}")
        assert answer.status == 200, (path, answer)
        found[path] = answer.json
    return found


def test_every_json_answer_is_checked() -> None:
    assert set(CLASSES) == {
        each.path for each in ENDPOINTS if each.method == "GET" and not isinstance(each.answer, str)
    }


@pytest.mark.java
def test_apaches_classes_read_every_answer_whole(java: Java, answers: dict[str, Any]) -> None:
    asked = "".join(f"{CLASSES[path][0]}\t{json.dumps(answer)}\n" for path, answer in answers.items())
    lines = java.run("RestAnswers", input=asked).stdout.splitlines()
    read = dict(zip(answers, map(json.loads, lines), strict=True))
    assert read == answers


def test_scopes_have_a_path_of_their_own(answers: dict[str, Any]) -> None:
    assert answers[f"{PREFIX}/bookie/ledger_scopes"] == {"ledgerScopesBookiesCount": 1}
    assert not [name for name in answers[f"{PREFIX}/bookie/cluster_info"] if "cope" in name]
