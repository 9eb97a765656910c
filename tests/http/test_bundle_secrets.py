"""Bundles of a cluster with secrets in everything that a bundle collects: none is left in its bytes."""

from __future__ import annotations

import base64
import gzip
import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.command_line import CommandLine

from bkctl.formats.entry import DigestType
from bkctl.formats.metadata import BookieEndpoint, BookieServiceInfo, Cookie, Fragment, LedgerMetadata, LedgerState
from bkctl.http import bundle as bundles
from bkctl.http.bookie_client import GarbageCollection
from bkctl.ids import LedgerId
from bkctl.metadata.cluster import Cluster, open_cluster
from bkctl.metadata.racks import BookieRacks
from bkctl.metadata.underreplication import LedgerMarks

#: Kinds of secrets, as they stand in a file; `@@` is the secret.
TEXTS = {
    "password": "zkPassword=@@",
    "password with spaces": "keystore.password = two words @@",
    "password in a command line": "java -Djavax.net.ssl.keyStorePassword=@@ -cp x",
    "passphrase as an option": "bkctl local up --conf x --passphrase @@",
    "store's pass": "keytool -list -storepass @@ -keystore k.p12",
    "short name": "db.pass=@@",
    "URI": "metadataServiceUri=zk+null://admin:@@@zk1:2181/ledgers",
    "URI with a password only": "clone https://:@@@git.example/x",
    "URI's query": "GET /api?access_token=@@&x=1",
    "percent-encoded query": "GET /login?next=%2Fapi%3Fpassword%3D@@",
    "JDBC": "jdbc:oracle:thin:scott/@@@db:1521:orcl",
    "curl": "curl -u admin:@@ http://b1:8080/metrics",
    "Bearer": "Authorization: Bearer @@",
    "Bearer alone": "sent 'Bearer @@@@' to b1",
    "Basic": "proxy-authorization=Basic @@",
    "Digest": 'Authorization: Digest username="a", response="@@"',
    "ZooKeeper's login": "addauth digest bk:@@",
    "API key": "X-Api-Key: @@",
    "cookie": "Cookie: id=1; JSESSIONID=@@",
    "cookie that is set": "set-cookie: sid=@@; HttpOnly",
    "JWT": "got eyJhbGciOiJIUzI1NiJ9.@@.@@",
    "RSA key": "-----BEGIN RSA PRIVATE KEY-----\n@@\n@@\n-----END RSA PRIVATE KEY-----",
    "key in a setting": "tlsKey=-----BEGIN PRIVATE KEY-----\\n@@\\n-----END PRIVATE KEY-----",
    "key without its end": "-----BEGIN OPENSSH PRIVATE KEY-----\n@@",
    "PGP key": "-----BEGIN PGP PRIVATE KEY BLOCK-----\n\n@@\n-----END PGP PRIVATE KEY BLOCK-----",
    "JAAS": 'sasl.jaas.config=org.apache.Login required username="u" password="@@";',
    "JAAS file": 'Client {\n  org.apache.zookeeper.Login required\n  username="u"\n  password="@@";\n};',
    "AWS key id": "using AKIA@@@@@@ for S3",
    "AWS secret": "aws_secret_access_key = @@",
    "S3 of a broker": "s3ManagedLedgerOffloadCredentialSecret=@@",
    "S3 id of a broker": "s3ManagedLedgerOffloadCredentialId=@@",
    "variable": "export AWS_SESSION_TOKEN=@@",
    "Azure": "DefaultEndpointsProtocol=https;AccountName=x;AccountKey=@@;EndpointSuffix=y",
    "signed URL": "PUT https://x.blob/y?sv=1&sig=@@",
    "Google": "key AIza@@@@@@@@ of maps",
    "GitHub": "fetch with ghp_@@@@@@",
    "Slack": "hook xoxb-@@@@",
    "Vault": "login hvs.@@@@@@",
    "OAuth": '{"client_secret": "@@", "x": 1}',
    "broker's parameters": "brokerClientAuthenticationParameters=@@",
    "keytab's contents": "keytab: BQIAAABH@@@@@@@@",
    "hashed password": "admin:$2y$05$@@@@@@",
    "XML": "<property>\n  <name>fs.s3a.secret.key</name>\n  <value>@@</value>\n</property>",
    "XML element": "<trustStorePassword>@@</trustStorePassword>",
    "Kubernetes": "- name: BK_PASSWORD\n  value: @@",
    "environment in JSON": '{"name": "DB_PASSWORD", "value": "@@"}',
    "YAML block": "tls-private-key: |\n  @@\n  @@",
    "YAML list": "passwords:\n  - @@\n  - @@",
    "JSON list": '"tokens": [\n  "@@",\n  "@@"\n]',
    "YAML block with a gap": "password: >-\n  @@\n\n  @@",
    "behind a path": "tlsKeyStorePasswordPath=/etc/pw tlsKeyStorePassword=@@",
    "continued line": "zkPassword=a\\\n    @@\\\n    @@",
}  # fmt: skip
SECRETS = {kind: f"Qz{number:02}Xv7Kw" for number, kind in enumerate(TEXTS)}
PLANTED = {kind: text.replace("@@", SECRETS[kind]) for kind, text in TEXTS.items()}
#: Names of settings, whose values are secrets whatever they look like.
NAMES = (
    "httpServerKeyStorePassword", "bookieAuthToken", "aws.secretKey", "tls.key.passphrase", "metadata-credential",
    "keyStorePass", "sasl.jaas.config", "brokerClientAuthenticationParameters", "apiKey", "Authorization", "Cookie",
)  # fmt: skip
#: Lines that support needs, and which look like secrets a little.
SHOWN = (
    "tlsKeyStorePasswordPath=/etc/bookkeeper/Keep01", "keytab=/etc/Keep02.keytab", "Keep03 pass over 7 ledgers",
    "digest mismatch in entry Keep04", "zkServers=zk1:2181,Keep05:2181", "metadataServiceUri=zk://zk1:2181/Keep06",
    "ledger 0000000000000000000000000000000c of Keep07", "bypass=Keep08", "bkctl ledger list -u zk://h:2181/Keep09",
)  # fmt: skip


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster with every kind of secret in every place of its metadata."""
    with open_cluster(f"sqlite://{tmp_path}/m.db", create=True) as cluster:
        everything = dict(enumerate(PLANTED.values()))
        info = BookieServiceInfo(
            tuple(BookieEndpoint(text, 1, "h", "http", (text,), (text,)) for text in everything.values()),
            {f"property-{number}": text for number, text in everything.items()} | dict.fromkeys(NAMES, "Qz90Xv7Kw"),
        )
        cluster.bookies.register("b1", info)
        instance_id = cluster.instance_id()
        cluster.cookies.write("b1", Cookie("b1", tuple(everything.values()), ("/l",), instance_id=instance_id), -1)
        custom = {f"c{number}": text.encode() for number, text in everything.items()}
        custom |= dict.fromkeys(NAMES, b"Qz91Xv7Kw") | {"shown": "\n".join(SHOWN).encode()}
        for ledger in (LedgerId(0, 3), LedgerId(7, 3)):
            metadata = LedgerMetadata(
                1, 1, 1, DigestType.CRC32C, b"Qz92Xv7Kw", (Fragment(0, ("b1",)),), state=LedgerState.CLOSED,
                last_entry_id=9, length=90, ctime_ms=1, format_version=3, custom_metadata=custom,
            )  # fmt: skip
            cluster.ledgers.create(ledger, metadata)
        LedgerMarks(cluster.store).add(LedgerId(0, 3), ["b1"])
        cluster.store.put("ledgers-damaged", b"Qz93Xv7Kw", None)
        BookieRacks(cluster).set(["b1"], "/r1", hostname="password=Qz94Xv7Kw")
        yield cluster


class Api:
    """A bookie's HTTP server that keeps no secret."""

    def metrics(self) -> str:
        return "\n".join(f"# HELP x\n{text}" for text in (*PLANTED.values(), *SHOWN))

    def config(self) -> dict[str, Any]:
        found: dict[str, Any] = {f"setting{number}": text for number, text in enumerate(PLANTED.values())}
        nested = {"password": {"deep": ["Qz95Xv7Kw"]}, "list": [*PLANTED.values()]}
        keys = dict.fromkeys(PLANTED.values(), "x")
        pairs = [{"name": name, "value": "Qz96Xv7Kw"} for name in NAMES]
        return found | dict.fromkeys(NAMES, "Qz97Xv7Kw") | {"nested": nested, "keys": keys, "pairs": pairs}

    def garbage_collection(self) -> GarbageCollection:
        return GarbageCollection(False, None, None, (), last_round_problem="\n".join(PLANTED.values()))


def test_no_secret_that_is_planted_anywhere_is_in_a_bundle(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [f"{kind}\n{text}\n{kind}" for kind, text in PLANTED.items()]
    named = [f"{name}{between}Qz98Xv7Kw" for name in NAMES for between in ("=", ": ", " = ", '": "', "='")]
    text = "\n".join((*lines, *named, *SHOWN))
    log, conf = tmp_path / "bookie.log", tmp_path / "bk_server.conf"
    conf.write_text(text)
    # The bundle takes the end of a log: it begins within a password.
    size = bundles.MEMBER_SIZE_BYTES_MAX - len("99Xv7Kw\n") - len(f"\n{text}".encode())
    log.write_text("x\n" * 10 + "password=Qz99Xv7Kw\n" + "y" * size + f"\n{text}")
    bookie = SimpleNamespace(bookie_id="b1", log=log, conf=conf)
    local = SimpleNamespace(metadata_uri=cluster.uri, bookies=lambda: [bookie])
    monkeypatch.setattr(bundles, "active_cluster", lambda: local)
    add = bundles.add_cluster
    monkeypatch.setattr(
        bundles, "add_cluster", lambda to, of, _, *more, **how: add(to, of, lambda _: Api(), *more, **how)
    )
    file = tmp_path / "b.tar.gz"
    done = CommandLine(cluster.uri)("diagnose", "bundle", file, "--pause", "1ms", "--timeout", "2s")
    assert done.code == 0, done.err
    data = gzip.decompress(file.read_bytes())
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        members = {each.name.removeprefix("bkctl-bundle/"): archive.extractfile(each) for each in archive}
        contents = {name: found.read().decode() for name, found in members.items() if found is not None}
    records = [json.loads(line) for line in contents["metadata.ndjson"].splitlines()]
    contents["values"] = "\n".join(
        base64.b64decode(record["value"]).decode("latin-1") for record in records if "value" in record
    )
    kinds = {secret: kind for kind, secret in SECRETS.items()}
    left = {
        (name, kinds.get(text[at : at + 9], text[at : at + 9]))
        for name, text in contents.items()
        for at in range(len(text))
        if text.startswith("Qz", at) and text[at + 4 : at + 9] == "Xv7Kw"
    }
    assert left == set()
    assert "99Xv7Kw" not in data.decode("latin-1")
    for name in ("logs/b1.txt", "conf/b1.txt", "metrics-1/b1.txt", "values"):
        lost = [number for number in range(1, len(SHOWN) + 1) if f"Keep0{number}" not in contents[name]]
        assert not lost, (name, lost)
    answer = CommandLine(None)("ledger", "list", "--all-scopes", "-o", "ndjson", "--bundle", file)
    assert [row["ledgerId"] for row in answer.rows] == ["3", "3"]


def test_the_login_of_the_metadata_store_is_not_in_a_bundle(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "uri", "etcd://root:Qz99Xv7Kw@etcd:2379/scope")
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        bundles.Bundle(archive, 1 << 20).export(cluster)
    assert b"etcd:2379" in file.getvalue()
    assert b"Qz99Xv7Kw" not in file.getvalue()
