"""ZooKeepers that are guarded: TLS, the `digest` scheme, SASL; and what only its creator may change."""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from kazoo.client import KazooClient
from kazoo.security import READ_ACL_UNSAFE, make_digest_acl
from support import servers

from bkctl.client.ledger_survey import LedgerSurvey, survey_ledgers
from bkctl.errors import Unauthorized, Unreachable, UsageError
from bkctl.formats.entry import DigestType
from bkctl.formats.metadata import BookieServiceInfo, Fragment, LedgerMetadata
from bkctl.ids import LedgerId
from bkctl.metadata.admin.check import check_metadata
from bkctl.metadata.admin.health_codes import HealthCode
from bkctl.metadata.admin.ledger_changes import replace_bookie
from bkctl.metadata.admin.undo import UndoFile
from bkctl.metadata.cluster import Cluster, open_cluster
from bkctl.metadata.store import NEW, NO_SECURITY, MetadataStore, StoreSecurity, map_each, value_of
from bkctl.metadata.underreplication import LedgerMarks, mark_path
from bkctl.replication.marking import audit_bookies

METADATA = LedgerMetadata(1, 1, 1, DigestType.CRC32C, b"", (Fragment(0, ("bookie-1",)),))
USER, PASSWORD = "bookkeeper", "se:cret"
DIGEST = StoreSecurity(user=USER, password=PASSWORD, creator_acl=True)
SASL = StoreSecurity(user=USER, password=PASSWORD, creator_acl=True, sasl=True)
LEDGERS = 150  # enough for a connection that reads many at once


@pytest.fixture(scope="module")
def guarded(java: Any, pem: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A ZooKeeper with a plain port, a TLS port that asks for a certificate, `digest`, and SASL for who wants it."""
    directory = tmp_path_factory.mktemp("guarded")
    jaas = directory / "jaas.conf"
    jaas.write_text(
        f'Server {{ org.apache.zookeeper.server.auth.DigestLoginModule required user_{USER}="{PASSWORD}"; }};\n'
        f'Client {{ org.apache.zookeeper.server.auth.DigestLoginModule required username="{USER}"'
        f' password="{PASSWORD}"; }};\n'
    )
    secure_port = servers.free_port()
    config = (
        "serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory\n"
        f"secureClientPort={secure_port}\nsecureClientPortAddress=127.0.0.1\n"
        f"ssl.keyStore.location={pem}\nssl.keyStore.type=PEM\n"
        f"ssl.trustStore.location={pem}\nssl.trustStore.type=PEM\nssl.clientAuth=need\n"
        "authProvider.1=org.apache.zookeeper.server.auth.SASLAuthenticationProvider\n"
    )
    server = servers.ZooKeeperServer(
        java, directory / "zookeeper", config=config, options=(f"-Djava.security.auth.login.config={jaas}",)
    )
    server.start()
    server.secure_port = secure_port  # type: ignore[attr-defined]
    server.jaas = jaas  # type: ignore[attr-defined]
    yield server
    server.kill()


def tls(pem: Path, **others: Any) -> StoreSecurity:
    return StoreSecurity(tls=True, ca=str(pem), certificate=str(pem), key=str(pem), **others)


def work(cluster: Cluster) -> None:
    """Everything that goes over the wire: writes, listings, many reads at once, ephemerals, watches."""
    ids = [LedgerId(scope, number * 10_000) for scope in (0, 7) for number in range(LEDGERS // 2)]
    for found in map_each(lambda ledger: cluster.ledgers.create(ledger, METADATA), ids):
        value_of(found)
    assert [ledger for ledger, found in cluster.ledgers.read_many(cluster.ledgers.ledgers(None))] == ids
    assert cluster.store.many is not None  # type: ignore[attr-defined]
    cluster.bookies.register("bookie-1", BookieServiceInfo())
    assert [bookie.bookie_id for bookie in cluster.bookies.list()] == ["bookie-1"]
    assert cluster.ledgers.new_ledger_id().ledger_id == 0
    LedgerMarks(cluster.store).add(ids[0], ["bookie-1"])
    cluster.ledgers.remove(ids[0])


def acls(server: Any, root: str, security: StoreSecurity) -> dict[str, str]:
    """Path → who may do what there, of everything below `root`; that a certificate is a login too is left out."""
    with ExitStack() as stack:
        client = KazooClient(server.connect_string)
        client.start()
        stack.callback(client.close)
        stack.callback(client.stop)
        if security.user is not None:
            client.add_auth("digest", f"{security.user}:{security.password}")
        found: dict[str, str] = {}

        def look(path: str) -> None:
            (found[path],) = (
                f"{acl.id.scheme}:{acl.id.id.partition(':')[0]}:{','.join(acl.acl_list)}"
                for acl in client.get_acls(path)[0]
                if acl.id.scheme != "x509"
            )
            if not path.endswith("/L0000"):
                for name in client.get_children(path):
                    look(f"{path}/{name}")

        look(root)
        return found


@pytest.mark.parametrize("login", [NO_SECURITY, DIGEST, SASL], ids=["open", "digest", "sasl"])
@pytest.mark.parametrize("secure", [False, True], ids=["plain", "tls"])
def test_every_operation_works_on_a_server_with_tls_and_login(
    guarded: Any, pem: Path, login: StoreSecurity, secure: bool
) -> None:
    root = guarded.new_root()
    port = guarded.secure_port if secure else guarded.port
    security = login
    if secure:
        security = tls(pem, user=login.user, password=login.password, sasl=login.sasl, creator_acl=login.creator_acl)
    with open_cluster(f"zk://127.0.0.1:{port}{root}", create=True, security=security) as cluster:
        work(cluster)
        if not login.sasl:
            expected = f"digest:{USER}:ALL" if login.user else "world:anyone:ALL"
            assert set(acls(guarded, root, login).values()) == {expected}
    if login.user is None:
        return
    uri = guarded.metadata_uri(root)
    with open_cluster(uri) as stranger, pytest.raises(Unauthorized) as caught:
        stranger.layout()
    assert caught.value.exit_code == 1
    assert str(guarded.port) in str(caught.value)
    with open_cluster(uri, security=login) as again:
        assert len(list(again.ledgers.ledgers(None))) == LEDGERS - 1


def test_apache_and_bkctl_share_nodes_with_creator_acls(
    guarded: Any, java: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = guarded.new_root(), guarded.new_root()
    login = (f"-Djava.security.auth.login.config={guarded.jaas}", "-Dzookeeper.fips-mode=false")
    monkeypatch.setattr(servers, "JVM_OPTIONS", (*servers.JVM_OPTIONS, *login))
    for root in (ours, theirs):
        uri = guarded.metadata_uri(root)
        conf = servers.shell_conf(tmp_path / "shell.conf", uri, {"zkEnableSecurity": "true"})
        if root == theirs:
            java.shell(conf, "initnewcluster", check=True)
            with open_cluster(uri) as stranger, pytest.raises(Unauthorized):
                stranger.layout()
        with open_cluster(uri, create=True, security=SASL) as cluster:
            cluster.ledgers.create(LedgerId(0, 5), METADATA)
        assert re.search(r"ledgerI[dD](=|: )5\b", java.shell(conf, "listledgers", check=True).stdout)
        java.shell(conf, "deleteledger", "-ledgerid", 5, "-force", check=True)
        with open_cluster(uri, security=SASL) as cluster:
            assert list(cluster.ledgers.ledgers()) == []


@pytest.mark.parametrize("count", [3, LEDGERS])
def test_a_refused_ledger_stops_no_other(guarded: Any, count: int) -> None:
    root, refused = guarded.new_root(), LedgerId(0, count // 2)
    with open_cluster(guarded.metadata_uri(root), create=True) as cluster:
        ids = [LedgerId(0, number) for number in range(count)]
        for found in map_each(lambda ledger: cluster.ledgers.create(ledger, METADATA), ids):
            value_of(found)
        client = cluster.store._connection.client  # type: ignore[attr-defined]
        client.set_acls(f"{root}/{cluster.ledgers.path(refused)}", [make_digest_acl("other", "secret", all=True)])

        errors = {ledger: found for ledger, found in cluster.ledgers.read_many(ids) if isinstance(found, Exception)}
        assert list(errors) == [refused]
        assert isinstance(errors[refused], Unauthorized)
        assert str(errors[refused]).find(cluster.ledgers.path(refused)) > 0
        with pytest.raises(Unauthorized):
            list(cluster.store.get_many(map(cluster.ledgers.path, ids)))
        survey = LedgerSurvey(())
        survey_ledgers(cluster, survey, ids)
        assert survey.tallies[HealthCode.METADATA_UNREADABLE, 0] == (1, (refused,))
        assert audit_bookies(cluster, scoped=False) == {"bookie-1": count - 1}
        # A mark that is refused stops no other, either.
        client.set_acls(f"{root}/{mark_path(ids[0])}", [make_digest_acl("other", "secret", all=True)])
        assert audit_bookies(cluster, scoped=False) == {"bookie-1": count - 2}
        assert [each.ledger for each in check_metadata(cluster, 0) if each.code == "refused"] == [ids[0], refused]
        client.set_acls(f"{root}/{cluster.ledgers.path(ids[0])}", READ_ACL_UNSAFE)
        kept = [each.ledger for each in replace_bookie(cluster, "bookie-1", "bookie-2") if each.problem is not None]
        assert kept == [ids[0], refused]
        changed = cluster.ledgers.read(ids[-1]).metadata.ensembles
        assert [fragment.bookies for fragment in changed] == [("bookie-2",)]


def test_refused_change_names_its_node_and_leaves_no_undo_file(guarded: Any, tmp_path: Path) -> None:
    root = guarded.new_root()
    with open_cluster(guarded.metadata_uri(root), create=True) as cluster:
        store = cluster.store
        for path in ("INSTANCEID", "available", ""):
            store._connection.client.set_acls(f"{root}/{path}".rstrip("/"), READ_ACL_UNSAFE)  # type: ignore[attr-defined]

        def refused(change: Callable[[MetadataStore], object], node: str) -> None:
            with UndoFile(tmp_path / "undo", cluster, []) as kept, pytest.raises(Unauthorized) as caught:
                change(kept.recorded().store)
            assert caught.value.message.endswith(f" refuses access to {root}/{node}")
            assert "--metadata-user" in (caught.value.hint or "")
            assert (kept.count, list(tmp_path.iterdir())) == (0, [])

        refused(lambda store: store.put("INSTANCEID", b"", None), "INSTANCEID")
        refused(lambda store: store.put("new", b"", NEW), "new")
        refused(lambda store: store.put("some/new/node", b"", NEW), "some/new/node")
        refused(lambda store: store.delete("INSTANCEID"), "INSTANCEID")
        refused(
            lambda store: value_of(store.put_many([("INSTANCEID", b"", 0), ("available", b"", 0)])[0]), "INSTANCEID"
        )
        with pytest.raises(Unauthorized, match=f"{root}/new"):
            store.put_all([("new", b""), ("new/one", b"")])


def test_wrong_login_is_unauthorized_in_time(guarded: Any) -> None:
    root = guarded.new_root()
    uri = guarded.metadata_uri(root)
    open_cluster(uri, create=True, security=DIGEST).close()
    wrong = StoreSecurity(user=USER, password="wrong")
    with open_cluster(uri, security=wrong) as cluster, pytest.raises(Unauthorized):
        cluster.instance_id()
    wrong_sasl = StoreSecurity(user=USER, password="wrong", sasl=True)
    with open_cluster(uri, security=wrong_sasl) as cluster:
        with pytest.raises(Unauthorized):
            cluster.instance_id()
        client = cluster.store._connection.client  # type: ignore[attr-defined]
        servers.wait_for(lambda: client.client_state == "CLOSED", "the end of kazoo's attempts")
        with pytest.raises(Unauthorized) as caught:
            cluster.instance_id()
        refused = cluster.store.put_many([("INSTANCEID", b"", 0), ("available", b"", 0)])
        assert [type(each) for each in refused] == [Unauthorized, Unauthorized]
    assert PASSWORD not in repr(DIGEST)
    assert "wrong" not in str(caught.value)


def test_tls_failures_name_the_reason(guarded: Any, pem: Path, tmp_path: Path) -> None:
    uri = f"zk://127.0.0.1:{guarded.secure_port}/ledgers"

    def problem(uri: str, security: StoreSecurity, timeout_s: float = 3) -> str:
        with pytest.raises(Unreachable) as caught:
            open_cluster(uri, timeout_s=timeout_s, security=security)
        return str(caught.value)

    # A busy server gives the reason late.
    told = (problem(uri, StoreSecurity(tls=True), timeout_s).lower().replace("_", " ") for timeout_s in (3, 30, 120))
    assert any("certificate verify failed" in each or "self-signed" in each for each in told)
    named = uri.replace("127.0.0.1", "localhost")
    assert "localhost" in problem(named, tls(pem))
    open_cluster(named, create=True, security=tls(pem, verify_hostname=False)).close()
    plain_port = problem(guarded.metadata_uri(), tls(pem))
    assert str(guarded.port) in plain_port
    assert str(guarded.secure_port) in problem(uri, NO_SECURITY)
    bad = tmp_path / "bad.pem"
    bad.write_text("no certificate")
    for security in (StoreSecurity(tls=True, ca=str(bad)), StoreSecurity(tls=True, ca=str(tmp_path / "missing"))):
        with pytest.raises(UsageError, match=r"bad\.pem|missing"):
            open_cluster(uri, security=security)


def test_contradicting_security_settings_are_refused() -> None:
    wrong: list[Callable[[], StoreSecurity]] = [
        lambda: StoreSecurity(ca="ca.pem"),
        lambda: StoreSecurity(tls=True, key="key.pem"),
        lambda: StoreSecurity(user="a"),
        lambda: StoreSecurity(password="a"),
        lambda: StoreSecurity(sasl=True),
    ]
    for make in wrong:
        with pytest.raises(UsageError):
            make()
    assert NO_SECURITY.tls_context() is None
    context = StoreSecurity(tls=True).tls_context()
    assert context is not None
    assert context.verify_mode is ssl.CERT_REQUIRED
