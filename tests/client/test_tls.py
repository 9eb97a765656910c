"""TLS from PEM files: who is trusted, who is let in, and what is said when not."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from pathlib import Path

import pytest

from bkctl.errors import NotEnoughBookies, UsageError
from bkctl.metadata.store import client_tls
from bkctl.protocol.messages import Protocol

x509 = pytest.importorskip("cryptography.x509")


class Authority:
    """A certificate authority that issues PEM files into a directory."""

    def __init__(self, directory: Path, name: str) -> None:
        from cryptography.hazmat.primitives.asymmetric import ec

        self.directory = directory
        self.name = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, name)])
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.pem = directory / f"{name}.pem"
        self._write(self.pem, self._certificate(self.name, self.key.public_key(), None), None)

    def issue(self, name: str, host: str) -> Path:
        """One PEM file with the certificate for `host` and its key."""
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, name)])
        path = self.directory / f"{name}.pem"
        self._write(path, self._certificate(subject, key.public_key(), host), key)
        return path

    def _certificate(self, subject, public_key, host):
        from cryptography.hazmat.primitives import hashes

        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject).issuer_name(self.name).public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=host is None, path_length=None), critical=True)
        )  # fmt: skip
        if host is not None:
            names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))])
            builder = builder.add_extension(names, critical=False)
        return builder.sign(self.key, hashes.SHA256())

    @staticmethod
    def _write(path, certificate, key):
        from cryptography.hazmat.primitives import serialization as s

        pem = certificate.public_bytes(s.Encoding.PEM)
        if key is not None:
            pem += key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())
        path.write_bytes(pem)


SIZES = {"ensemble_size": 1, "write_quorum_size": 1, "ack_quorum_size": 1}


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path, "authority")


def bookie_tls(authority, host="127.0.0.1"):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority.issue("bookie", host))
    context.load_verify_locations(authority.pem)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


@pytest.mark.parametrize("protocol", list(Protocol))
async def test_both_sides_are_authenticated_by_their_certificates(fake_cluster, authority, protocol):
    context = client_tls(str(authority.pem), str(authority.issue("client", "127.0.0.1")))
    bookie = fake_cluster(1, tls=bookie_tls(authority))
    async with bookie as cluster, cluster.client(tls=context, protocol=protocol) as client:
        async with await client.create_ledger(**SIZES) as writer:
            for i in range(100):
                writer.add(b"%d" % i * 1000)
        reader = await client.open_ledger(writer.ledger_id)
        assert [e.payload async for e in reader.read(0, 99)] == [b"%d" % i * 1000 for i in range(100)]


@pytest.mark.parametrize("problem", ["no certificate", "other authority", "other host"])
async def test_a_bookie_that_cannot_be_trusted_or_does_not_trust_us_is_unavailable(
    fake_cluster, authority, tmp_path, problem
):
    host = "192.0.2.1" if problem == "other host" else "127.0.0.1"
    mine = str(authority.issue("client", "127.0.0.1"))
    ca = str(authority.pem)
    if problem == "other authority":
        ca = str(Authority(tmp_path, "stranger").pem)
    context = client_tls(ca, None if problem == "no certificate" else mine)
    async with fake_cluster(1, tls=bookie_tls(authority, host)) as cluster:
        async with cluster.client(tls=context, timeout_s=2) as client:
            writer = await client.create_ledger(**SIZES)
            with pytest.raises(NotEnoughBookies):
                await writer.add(b"x")
        assert cluster.bookies[0].received == []
        if problem == "other host":
            lenient = client_tls(ca, mine, verify_hostname=False)
            async with cluster.client(tls=lenient) as client:
                writer = await client.create_ledger(**SIZES)
                assert await writer.add(b"x") == 0


async def test_a_bookie_without_tls_is_unavailable_to_a_client_that_wants_it(fake_cluster, authority):
    context = client_tls(str(authority.pem))
    async with fake_cluster(1) as cluster, cluster.client(tls=context) as client:
        writer = await client.create_ledger(**SIZES)
        with pytest.raises(NotEnoughBookies):
            await writer.add(b"x")
        assert cluster.bookies[0].received == []


def test_files_that_are_not_pem_are_refused(authority, tmp_path):
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("nothing")
    for arguments in (
        {"ca": str(nonsense)},
        {"ca": str(tmp_path / "missing.pem")},
        {"ca": str(authority.pem), "certificate": str(nonsense)},
        {"ca": str(authority.pem), "key": str(nonsense)},
    ):
        with pytest.raises(UsageError):
            client_tls(**arguments)
