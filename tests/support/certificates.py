"""PEM files for tests that change certificates."""

from __future__ import annotations

import datetime
import ipaddress
import os
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
