"""Private keys that are encrypted: one clear error, and no question at a terminal."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from support.command_line import CommandLine

from bkctl.bookie.network import tls_context as bookie_tls_context
from bkctl.config import BookieConfig
from bkctl.errors import UsageError
from bkctl.http.server_settings import tls_context as http_tls_context
from bkctl.metadata.store import client_tls

PASSWORD = "open sesame"


@pytest.fixture
def encrypted(pem: Path, tmp_path: Path) -> Path:
    """The key of `pem`, encrypted."""
    key = serialization.load_pem_private_key(pem.read_bytes(), None)
    path = tmp_path / "encrypted.pem"
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(PASSWORD.encode()),
        )
    )
    return path


@pytest.fixture
def password_file(tmp_path: Path) -> Callable[[str | None], str | None]:
    def write(password: str | None) -> str | None:
        if password is None:
            return None
        (tmp_path / "password").write_text(password)
        return str(tmp_path / "password")

    return write


@pytest.mark.parametrize("kind", ["client", "bookie", "http"])
def test_an_encrypted_key_opens_with_its_password_only(
    kind: str, pem: Path, encrypted: Path, password_file: Callable[[str | None], str | None]
) -> None:
    def context(password: str | None) -> ssl.SSLContext | None:
        if kind == "client":
            return client_tls(str(pem), str(pem), str(encrypted), key_password=password)
        if kind == "http":
            return http_tls_context(str(pem), password, None, str(encrypted))
        return bookie_tls_context(
            BookieConfig(
                tls_provider_factory_class="x", tls_key_store_type="PEM", tls_certificate_path=str(pem),
                tls_key_store=str(encrypted), tls_key_store_password_path=password_file(password),
            )
        )  # fmt: skip

    assert context(PASSWORD) is not None
    for wrong, problem in ((None, "no password is given"), ("wrong", "the given password does not open it")):
        with pytest.raises(UsageError, match=f"private key in {encrypted} is encrypted, and {problem}"):
            context(wrong)


def test_a_command_on_a_terminal_does_not_ask_for_a_password(pem: Path, encrypted: Path) -> None:
    code, shown = CommandLine(None).terminal(
        "bookie", "state", "--bookie-url", "https://127.0.0.1:1", "--tls-ca", pem, "--tls-cert", pem,
        "--tls-key", encrypted, columns=400,
    )  # fmt: skip
    assert code == 2
    assert "is encrypted, and no password is given" in shown
    assert "pass phrase" not in shown
