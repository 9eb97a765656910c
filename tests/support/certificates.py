"""PEM files for tests that change certificates."""

from __future__ import annotations

import datetime
import ipaddress
import os
import tempfile
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def write_pair(certificate: Path, key: Path, serial: int, *, days: float = 30, begins_days: float = -1) -> None:
    """Replace both files, which may be one, by a new key and its own certificate for 127.0.0.1."""
    secret = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"bookie-{serial}")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(secret.public_key())
        .serial_number(serial)
        .not_valid_before(now + datetime.timedelta(days=begins_days))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(secret, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    texts = {certificate: made.public_bytes(serialization.Encoding.PEM)}
    key_text = secret.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    texts[key] = key_text + texts.get(key, b"")
    for path, text in texts.items():
        replace(path, text)


def replace(path: Path, text: bytes) -> None:
    """Replace the file in one step, as tools that renew certificates do."""
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(text)
    os.replace(new, path)


class Authority:
    """A certificate authority, whose own certificate is `pem`."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")])
        made = self._builder(self._name, 1, 365).public_key(self._key.public_key())
        made = made.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.pem = made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def _builder(self, name: x509.Name, serial: int, days: float) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .serial_number(serial)
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=days))
        )

    def files(self, name: str, serial: int, days: float = 30) -> dict[str, bytes]:
        """The files of a secret as cert-manager writes them, for a host, all below it, and loopback."""
        secret = ec.generate_private_key(ec.SECP256R1())
        loopback = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        names = x509.SubjectAlternativeName([x509.DNSName(name), x509.DNSName(f"*.{name}"), loopback])
        made = self._builder(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), serial, days)
        made = made.public_key(secret.public_key()).add_extension(names, critical=False)
        certificate = made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        plain = serialization.NoEncryption()
        key = secret.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
        return {"tls.crt": certificate, "tls.key": key, "tls-combined.pem": key + certificate}


def mount_secret(directory: Path, files: dict[str, bytes]) -> None:
    """Write the files as the kubelet does, or replace all of them at once: by links to `..data`, a link itself."""
    directory.mkdir(parents=True, exist_ok=True)
    version = Path(tempfile.mkdtemp(prefix="..", dir=directory))
    version.chmod(0o755)
    for name, content in files.items():
        (version / name).write_bytes(content)
        if not (directory / name).is_symlink():
            (directory / name).symlink_to(f"..data/{name}")
    (directory / "..data_tmp").symlink_to(version.name)
    os.replace(directory / "..data_tmp", directory / "..data")
