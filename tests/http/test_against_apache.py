"""Each endpoint on our bookie and on Apache's, in one cluster: the same names, types, key forms and values."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from support.own_bookies import OwnBookie
from support.raw_http import Answer, call, http_port
from support.servers import INTERLEAVED, ApacheBookie, Java, ZooKeeperServer, format_cluster, free_port

from bkctl.client.ledger import BookKeeper
from bkctl.formats.entry import DigestType
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import Cluster, open_cluster
from bkctl.metadata.ledger_columns import LEDGER_COLUMNS
from bkctl.metadata.underreplication import LedgerMarks

V1 = "/api/v1"
PAYLOADS = [b'he"llo\xc3\xa9\x00\n%d<>/' % number for number in range(3)]
#: Fields of a ledger that Apache's objects have; `ADDED` are ours.
OF_APACHE = {
    "ledgerId", "metadataFormatVersion", "state", "ensembleSize", "writeQuorumSize", "ackQuorumSize", "digestType",
    "length", "lastEntryId", "ctime", "customMetadata",
}  # fmt: skip
ADDED = {name for column in LEDGER_COLUMNS.columns for name, _ in column.properties()} - OF_APACHE | {
    "scopedDeletesHeldBack"
}
MARKED = {LedgerId(0, 0): ["127.0.0.1:1", "b:2"], LedgerId(0, 1): ["127.0.0.1:1"]}


class Pair(NamedTuple):
    """The two bookies, and where their HTTP servers are."""

    apache: ApacheBookie
    ours: OwnBookie
    apache_port: int
    our_port: int
    cluster: Cluster

    def ask(self, method: str, path: str, body: object = None) -> tuple[Answer, Answer]:
        """The answers of Apache's bookie and of ours."""
        return call(self.apache_port, method, path, body), call(self.our_port, method, path, body)


async def fill(cluster: Cluster) -> None:
    """Ledgers 0 (closed), 1 (open, with an entry beyond its last confirmed one), 2 … 119, and some in scopes."""
    async with BookKeeper(cluster) as bookkeeper:
        for digest_type in (DigestType.HMAC, DigestType.CRC32C):
            writer = await bookkeeper.create_ledger(
                ensemble_size=2, digest_type=digest_type, password=b"pw", custom_metadata={"k": b"v\xff"}
            )
            for payload in PAYLOADS:
                await writer.add(payload)
            if digest_type is DigestType.HMAC:
                await writer.close()
        for _ in range(118):
            await bookkeeper.create_ledger(ensemble_size=1, write_quorum_size=1, ack_quorum_size=1)
        scoped = await bookkeeper.create_ledger_adv(
            (1 << 64) - 3, ledger_scope_id=7, ensemble_size=1, write_quorum_size=1, ack_quorum_size=1
        )
        await scoped.add(b"scoped")
        await scoped.close()


@pytest.fixture(scope="module")
def pair(java: Java, zookeeper: ZooKeeperServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("http")
    uri = zookeeper.metadata_uri(zookeeper.new_root())
    format_cluster(java, uri, directory)
    common = {"httpServerEnabled": "true", "httpServerHost": "127.0.0.1", "verifyMetadataOnGC": "true"}
    apache_port = free_port()
    server_class = "org.apache.bookkeeper.http.vertx.VertxHttpServer"
    apache = ApacheBookie(
        java, uri, directory / "apache", INTERLEAVED,
        settings={**common, "httpServerClass": server_class, "httpServerPort": apache_port},
    )  # fmt: skip
    ours = OwnBookie(uri, directory / "ours", storage=INTERLEAVED, settings={**common, "httpServerPort": 0})
    apache.launch()
    ours.launch()
    try:
        apache.wait_ready()
        ours.wait_ready()
        with open_cluster(uri) as cluster:
            asyncio.run(fill(cluster))
            yield Pair(apache, ours, apache_port, http_port(ours), cluster)
    finally:
        apache.kill()
        ours.kill()


@pytest.fixture
def marked(pair: Pair) -> Iterator[Pair]:
    """Two ledgers are marked under-replicated."""
    marks = LedgerMarks(pair.cluster.store)
    for ledger, missing in MARKED.items():
        marks.add(ledger, missing)
    yield pair
    for ledger in MARKED:
        marks.remove(ledger)


def without_added(value: Any) -> Any:
    """The value without what we add to Apache's objects."""
    if isinstance(value, dict):
        return {name: without_added(each) for name, each in value.items() if name not in ADDED}
    return [without_added(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("GET", f"{V1}/ledger/list{query}") for query in (
            "", "?page=1", "?print_metadata=false", "?print_metadata=true", "?print_metadata=true&decode_meta=true",
            "?print_metadata=true&page=1", "?print_metadata=true&page=2", "?print_metadata=true&page=3",
            "?print_metadata=true&decode_meta=true&page=1", "?decode_meta=true",
        )),
        *(("GET", f"{V1}/ledger/metadata?ledger_id={ledger}") for ledger in (0, 1, 2)),
        *(("GET", f"{V1}/ledger/read?ledger_id=0{query}") for query in (
            "", "&start_entry_id=1", "&start_entry_id=1&end_entry_id=1", "&end_entry_id=-1", "&end_entry_id=99",
            "&page=1", "&page=2", "&page=1&start_entry_id=1&end_entry_id=2", "&start_entry_id=9",
        )),
        ("GET", f"{V1}/ledger/read?ledger_id=1"),
        ("GET", f"{V1}/ledger/read?ledger_id=2"),
        *(("GET", f"{V1}/bookie/list_bookies{query}") for query in (
            "", "?type=ro", "?type=rw", "?print_hostnames=true", "?print_hostnames=false", "?type=other",
        )),
        ("GET", f"{V1}/bookie/cluster_info"),
        ("GET", f"{V1}/bookie/state"),
        ("GET", f"{V1}/bookie/state/readonly"),
        ("GET", f"{V1}/bookie/sanity"),
        ("GET", f"{V1}/bookie/entry_location_compact"),
        ("GET", f"{V1}/bookie/gc/suspend_compaction"),
        ("GET", f"{V1}/autorecovery/status"),
        ("PUT", f"{V1}/autorecovery/status?enabled=false"),
        ("PUT", f"{V1}/autorecovery/status?enabled=TRUE"),
    ],
)  # fmt: skip
def test_cluster_json_equals_apaches(pair: Pair, method: str, path: str) -> None:
    apache, ours = pair.ask(method, path)
    assert (apache.status, ours.status) == (200, 200)
    assert without_added(ours.json) == apache.json
    assert ours.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    "query",
    [
        "", "?printmissingreplica", "?printmissingreplica=false", "?missingreplica=b:2", "?excludingmissingreplica=b:2",
        "?missingreplica=127.0.0.1:1&excludingmissingreplica=b:2&printmissingreplica", "?missingreplica=%20",
    ],
)  # fmt: skip
def test_under_replicated_lists_equal_apaches(marked: Pair, query: str) -> None:
    apache, ours = marked.ask("GET", f"{V1}/autorecovery/list_under_replicated_ledger{query}")
    assert (apache.status, ours.status) == (200, 200)
    assert ours.json == apache.json
    apache, ours = marked.ask("GET", f"{V1}/bookie/cluster_info")
    assert without_added(ours.json) == apache.json
    assert ours.json["clusterUnderReplicated"]


#: Requests in order, since each changes the answer to the next.
TALKS = {
    "heartbeat": [(method, "/heartbeat", None) for method in ("GET", "POST", "PUT", "DELETE")],
    "ready": [("GET", f"{V1}/bookie/is_ready", None), ("PUT", f"{V1}/bookie/expand_storage", None)],
    "gc": [
        ("PUT", f"{V1}/bookie/gc", body)
        for body in (None, "", {}, {"forceMajor": False, "forceMinor": True}, {"forceMajor": "true"})
    ],
    "compaction": [
        ("PUT", f"{V1}/bookie/gc/suspend_compaction", {"suspendMajor": True}),
        ("GET", f"{V1}/bookie/gc/suspend_compaction", None),
        ("PUT", f"{V1}/bookie/gc/suspend_compaction", {"suspendMajor": True, "suspendMinor": True}),
        ("PUT", f"{V1}/bookie/gc/resume_compaction", {"resumeMajor": True, "resumeMinor": True}),
        ("PUT", f"{V1}/bookie/gc/suspend_compaction", {"suspendMinor": True}),
        ("PUT", f"{V1}/bookie/gc/suspend_compaction", {"suspendMajor": False}),
        ("GET", f"{V1}/bookie/gc/suspend_compaction", None),
        ("PUT", f"{V1}/bookie/gc/resume_compaction", {"resumeMinor": True}),
        ("GET", f"{V1}/bookie/gc/suspend_compaction", None),
    ],
    "mode": [
        ("PUT", f"{V1}/bookie/state/readonly", {"readOnly": True}),
        ("PUT", f"{V1}/bookie/state/readonly", {"readOnly": True}),
        ("GET", f"{V1}/bookie/state", None),
        ("PUT", f"{V1}/bookie/state/readonly", {"readOnly": False}),
        ("GET", f"{V1}/bookie/state", None),
    ],
    "locations": [
        ("PUT", f"{V1}/bookie/entry_location_compact", body)
        for body in ({}, {"entryLocationRocksDBCompact": False}, {"entryLocationRocksDBCompact": True})
    ],
    "delay": [
        ("PUT", f"{V1}/autorecovery/lost_bookie_recovery_delay", {"delay_seconds": 5}),
        ("GET", f"{V1}/autorecovery/lost_bookie_recovery_delay", None),
        ("PUT", f"{V1}/autorecovery/lost_bookie_recovery_delay", {"delay_seconds": 0}),
        ("GET", f"{V1}/autorecovery/lost_bookie_recovery_delay", None),
    ],
}


@pytest.mark.parametrize("talk", TALKS)
def test_texts_equal_apaches_to_the_byte(pair: Pair, talk: str) -> None:
    for method, path, body in TALKS[talk]:
        apache, ours = pair.ask(method, path, body)
        assert (apache.status, ours.status) == (200, 200)
        said = apache.body.replace(pair.apache.bookie_id.encode(), pair.ours.bookie_id.encode())
        if method == "GET" and path.endswith("_compaction"):  # in the order of a HashMap
            assert ours.json == apache.json
        else:
            assert ours.body == said


def test_varying_answers_have_apaches_form(pair: Pair) -> None:
    def digits(answer: Answer) -> list[Any]:
        assert answer.status == 200
        text = str(sorted(answer.json.items())).replace(pair.apache.bookie_id, pair.ours.bookie_id)
        return re.split(r"[0-9a-f.]*[0-9][0-9a-f.]*", text)

    apache, ours = pair.ask("GET", f"{V1}/bookie/info")
    assert ours.json["totalSpace"] == apache.json["totalSpace"]
    assert {name: type(value) for name, value in ours.json.items()} == {"freeSpace": int, "totalSpace": int}

    apache, ours = pair.ask("GET", f"{V1}/bookie/list_bookie_info")
    assert list(ours.json)[-1] == list(apache.json)[-1] == "ClusterInfo: "
    assert digits(ours) == digits(apache)

    apache, ours = pair.ask("GET", f"{V1}/bookie/last_log_mark")
    assert digits(ours) == digits(apache)

    for query in ("", "?file_type=journal", "?file_type=entrylog", "?file_type=index", "?file_type=other"):
        apache, ours = pair.ask("GET", f"{V1}/bookie/list_disk_file{query}")
        assert apache.status == ours.status == 200
        assert ours.json.keys() == apache.json.keys()
        for kind, ending in {"journal": "txn", "entrylog": "log", "index": "idx"}.items():
            for answer in (apache, ours):
                names = answer.json.get(f"{kind} files", "")
                assert re.fullmatch(rf"((\w+/)*[0-9a-f]+\.{ending}\t)*", names)

    apache, ours = pair.ask("GET", f"{V1}/bookie/gc_details")
    (apache_status,), (our_status,) = apache.json, without_added(ours.json)
    assert {name: type(value) for name, value in our_status.items()} == {
        name: type(value) for name, value in apache_status.items()
    }
    apache, ours = pair.ask("GET", f"{V1}/bookie/gc")
    assert {ours.json["is_in_force_gc"], apache.json["is_in_force_gc"]} <= {"true", "false"}


def test_settings_are_strings_under_the_same_names(pair: Pair) -> None:
    apache, ours = pair.ask("GET", f"{V1}/config/server_config")
    own = {"bookiePort", "httpServerClass", "httpServerPort", "journalDirectory", "ledgerDirectories"}
    assert {name: ours.json[name] for name in apache.json.keys() - own} == {
        name: value for name, value in apache.json.items() if name not in own
    }
    assert all(isinstance(value, str) for value in ours.json.values())
    assert ours.json["bookiePort"] == str(pair.ours.port)
    assert ours.json["httpServerPort"] == str(pair.our_port)


def test_delete_answers_equal_apaches(pair: Pair) -> None:
    said = []
    for number, port in ((110, pair.apache_port), (111, pair.our_port)):
        answer = call(port, "DELETE", f"{V1}/ledger/delete?ledger_id={number}")
        assert answer.status == 200
        said.append(answer.body.replace(str(number).encode(), b"N"))
        listed = [call(each, "GET", f"{V1}/ledger/list").json for each in (pair.apache_port, pair.our_port)]
        assert listed[0] == listed[1]
        assert str(number) not in listed[0]
    assert said[0] == said[1] == b'"Deleted ledger: N"'


def test_the_http_server_is_registered_as_apaches_is(pair: Pair) -> None:
    found = {}
    for bookie in pair.cluster.bookies.list():
        assert bookie.info is not None
        found[bookie.bookie_id] = [each._replace(port=0) for each in bookie.info.endpoints]
        ports = {each.id: each.port for each in bookie.info.endpoints}
        assert ports["httpserver"] == (pair.our_port if bookie.bookie_id == pair.ours.bookie_id else pair.apache_port)
    assert found[pair.ours.bookie_id] == found[pair.apache.bookie_id]


#: method, path, body, Apache's code, ours: where ours is another one. docs/rest.md has the reasons.
DEVIATIONS = [
    ("GET", "/metrics", None, 500, 200),
    ("PATCH", "/heartbeat", None, 405, 405),
    ("GET", "/heartbeat/", None, 200, 200),
    ("GET", f"{V1}/bookie/state/", None, 200, 200),
    ("GET", f"{V1}/nothing", None, 404, 404),
    ("GET", f"{V1}/ledger/metadata?ledger_id=x", None, 500, 400),
    ("GET", f"{V1}/ledger/metadata?ledger_id=777777", None, 500, 404),
    ("GET", f"{V1}/ledger/metadata", None, 404, 400),
    ("PUT", f"{V1}/ledger/metadata?ledger_id=0", None, 404, 405),
    ("GET", f"{V1}/ledger/read?ledger_id=777777", None, 500, 404),
    ("GET", f"{V1}/ledger/read?ledger_id=0&start_entry_id=2&end_entry_id=1", None, 500, 400),
    ("GET", f"{V1}/ledger/read?ledger_id=0&start_entry_id=x", None, 500, 400),
    ("GET", f"{V1}/ledger/read?ledger_id=0&page=0", None, 200, 400),
    ("GET", f"{V1}/ledger/list?print_metadata=true&page=0", None, 200, 400),
    ("GET", f"{V1}/ledger/list?print_metadata=yes", None, 200, 400),
    ("GET", f"{V1}/ledger/delete?ledger_id=0", None, 404, 405),
    ("DELETE", f"{V1}/ledger/delete", None, 404, 400),
    ("DELETE", f"{V1}/ledger/delete?ledger_id=777777", None, 200, 404),
    ("POST", f"{V1}/bookie/gc", None, 405, 405),
    ("PUT", f"{V1}/bookie/gc", {"forceMinr": True}, 200, 400),
    ("PUT", f"{V1}/bookie/gc", {"forceMajor": 1}, 200, 400),
    ("PUT", f"{V1}/bookie/gc", "[]", 400, 400),
    ("PUT", f"{V1}/bookie/gc/suspend_compaction", None, 400, 400),
    ("PUT", f"{V1}/bookie/gc/suspend_compaction", {}, 400, 400),
    ("PUT", f"{V1}/bookie/gc/suspend_compaction", {"suspendMajor": "false"}, 500, 200),
    ("GET", f"{V1}/bookie/gc/resume_compaction", None, 404, 405),
    ("PUT", f"{V1}/bookie/state", None, 404, 405),
    ("PUT", f"{V1}/bookie/state/readonly", None, 500, 400),
    ("PUT", f"{V1}/bookie/state/readonly", {}, 200, 400),
    ("PUT", f"{V1}/bookie/state/readonly", {"readOnly": "x"}, 500, 400),
    ("PUT", f"{V1}/bookie/entry_location_compact", None, 400, 400),
    (
        "PUT", f"{V1}/bookie/entry_location_compact",
        {"entryLocationRocksDBCompact": True, "entryLocations": "/a"}, 400, 400,
    ),
    ("PUT", f"{V1}/bookie/entry_location_compact", {"entryLocationRocksDBCompact": "false"}, 500, 200),
    ("PUT", f"{V1}/config/server_config", None, 404, 400),
    ("PUT", f"{V1}/config/server_config", {"unknown": 1}, 200, 400),
    ("PUT", f"{V1}/autorecovery/status", None, 400, 400),
    ("PUT", f"{V1}/autorecovery/status?enabled=yes", None, 200, 400),
    ("PUT", f"{V1}/autorecovery/status?enabled=true", None, 200, 200),
    ("POST", f"{V1}/autorecovery/status", None, 404, 405),
    ("GET", f"{V1}/autorecovery/list_under_replicated_ledger", None, 404, 404),
    ("GET", f"{V1}/autorecovery/who_is_auditor", None, 404, 404),
    ("PUT", f"{V1}/autorecovery/trigger_audit", None, 404, 404),
    ("PUT", f"{V1}/autorecovery/lost_bookie_recovery_delay", None, 404, 400),
    ("PUT", f"{V1}/autorecovery/lost_bookie_recovery_delay", {}, 404, 400),
    ("PUT", f"{V1}/autorecovery/lost_bookie_recovery_delay", {"delay_seconds": "5"}, 500, 400),
    ("PUT", f"{V1}/autorecovery/bookie", None, 404, 400),
    ("PUT", f"{V1}/autorecovery/bookie", {"bookie_src": ["a:1"], "bookie_dest": ["b:1"]}, 404, 400),
    ("PUT", f"{V1}/autorecovery/decommission", {}, 404, 400),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path", "body", "apache_code", "our_code"), DEVIATIONS)
def test_differing_codes_are_documented(
    pair: Pair, method: str, path: str, body: object, apache_code: int, our_code: int
) -> None:
    apache, ours = pair.ask(method, path, body)
    assert (apache.status, ours.status) == (apache_code, our_code)
    if our_code != 200:
        assert ours.error


def test_gateway_forwards_apaches_answers(pair: Pair, gateway: Callable[..., Any]) -> None:
    port = gateway(pair.cluster.uri).http_port
    named = f"bookie={pair.apache.bookie_id}"
    for path in ("state", "info", "gc/suspend_compaction", "list_disk_file?file_type=journal", "nothing_of_the_kind"):
        direct = call(pair.apache_port, "GET", f"{V1}/bookie/{path}")
        passed_on = call(port, "GET", f"{V1}/bookie/{path}{'&' if '?' in path else '?'}{named}")
        assert passed_on.status == direct.status
        if path not in ("info", "nothing_of_the_kind"):
            assert passed_on.body == direct.body
    assert call(port, "GET", f"{V1}/ledger/list").json == call(pair.apache_port, "GET", f"{V1}/ledger/list").json


def test_recovery_and_decommission_start_as_apaches(pair: Pair) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    for path, body in (("bookie", {"bookie_src": [nobody]}), ("decommission", {"bookie_src": nobody})):
        theirs, ours = call(pair.apache_port, "PUT", f"{V1}/autorecovery/{path}", body), None
        while ours is None or ours.status == 503:  # the last one is being worked on
            ours = call(pair.our_port, "PUT", f"{V1}/autorecovery/{path}", body)
        assert (ours.status, ours.body) == (theirs.status, theirs.body)
        assert ours.status == 200


def test_registered_bookie_is_neither_recovered_nor_decommissioned(pair: Pair) -> None:
    answer = call(pair.our_port, "PUT", f"{V1}/autorecovery/decommission", {"bookie_src": pair.apache.bookie_id})
    assert answer.status == 409
    assert "registered" in answer.error
    for body in (
        {"bookie_src": [pair.apache.bookie_id], "delete_cookie": True},
        {"bookie_src": [pair.apache.bookie_id]},
    ):
        assert call(pair.our_port, "PUT", f"{V1}/autorecovery/bookie", body).status == 409
    assert call(pair.our_port, "PUT", f"{V1}/autorecovery/bookie", {"bookie_src": []}).status == 400


def test_scoped_ledgers_are_listed_beside_apaches(pair: Pair) -> None:
    name = f"{7:016x}{(1 << 64) - 3:016x}"
    port = pair.our_port
    assert call(port, "GET", f"{V1}/ledger/list?ledger_scope_id=7").json == {name: None}
    assert call(port, "GET", f"{V1}/ledger/list?ledger_scope_id=8").json == {}
    everything = call(port, "GET", f"{V1}/ledger/list?ledger_scope_id=*").json
    assert list(everything)[-1] == name
    assert everything == call(port, "GET", f"{V1}/ledger/list").json | {name: None}
    assert list(call(port, "GET", f"{V1}/ledger/list?after=5&limit=3").json) == ["6", "7", "8"]
    by_name = call(port, "GET", f"{V1}/ledger/metadata?ledger_qualified_name={name}").json
    by_id = call(port, "GET", f"{V1}/ledger/metadata?ledger_id={(1 << 64) - 3}&ledger_scope_id=7").json
    assert by_name == by_id
    assert by_name[name]["ledgerId"] == str((1 << 64) - 3)
    assert by_name[name]["ledgerScopeId"] == "7"
    assert by_name[name]["ledgerQualifiedName"] == name
    for encoding, text in (("ascii", "scoped"), ("utf8", "scoped"), ("hex", "73636f706564"), ("base64", "c2NvcGVk")):
        read = call(port, "GET", f"{V1}/ledger/read?ledger_qualified_name={name}&encoding={encoding}")
        assert read.json == {"0": text}
    contradiction = call(port, "GET", f"{V1}/ledger/metadata?ledger_qualified_name={name}&ledger_scope_id=8")
    assert contradiction.status == 400

    marks = LedgerMarks(pair.cluster.store)
    marks.add(LedgerId(7, (1 << 64) - 3), ["b:2"])
    try:
        path = f"{V1}/autorecovery/list_under_replicated_ledger"
        assert call(port, "GET", path).status == 404
        assert call(port, "GET", f"{path}?ledger_scope_id=7").json == [name]
        assert call(port, "GET", f"{path}?ledger_scope_id=*&printmissingreplica").json == {name: ["b:2"]}
        assert call(port, "GET", f"{V1}/bookie/cluster_info").json["clusterUnderReplicated"]
    finally:
        marks.remove(LedgerId(7, (1 << 64) - 3))
