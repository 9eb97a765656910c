"""`--tls-ca`, `--tls-cert`, `--tls-key`: commands talk TLS to bookies that ask for it, with PEM files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.own_bookies import OwnBookie

from bkctl.metadata.cluster import open_cluster

from .conftest import Cli

SHAPE = ["--ensemble-size", "1", "--write-quorum", "1", "--ack-quorum", "1"]


@pytest.fixture
def tls_bookie(tmp_path: Path, pem: Path) -> Iterator[str]:
    """The metadata URI of one bookie of ours that wants a client certificate."""
    uri = f"sqlite://{tmp_path / 'metadata.db'}"
    open_cluster(uri, create=True).close()
    bookie = OwnBookie(
        uri,
        tmp_path / "bookie",
        settings={
            "tlsProviderFactoryClass": "org.apache.bookkeeper.tls.TLSContextFactory",
            "tlsKeyStoreType": "PEM",
            "tlsKeyStore": pem,
            "tlsCertificatePath": pem,
            "tlsTrustStoreType": "PEM",
            "tlsTrustStore": pem,
            "tlsClientAuthentication": "true",
        },
    )
    try:
        bookie.start()
        yield uri
    finally:
        bookie.kill()


def test_a_ledger_is_written_and_read_over_tls(tls_bookie: str, pem: Path, tmp_path: Path, cli: Cli) -> None:
    lines = tmp_path / "lines"
    lines.write_text("one\ntwo\n")
    tls = ["--tls-ca", pem, "--tls-cert", pem, "--tls-key", pem]
    written = cli("-u", tls_bookie, "ledger", "write", lines, *SHAPE, "-o", "id", *tls)
    assert written.code == 0, written.err
    ledger = written.out.strip()
    for protocol in ("v2", "v3"):
        read = ["ledger", "read", ledger, "--body", "--format", "raw", "--protocol", protocol]
        found = cli("-u", tls_bookie, *tls, *read)
        assert (found.code, found.out) == (0, "onetwo"), found.err


def test_missing_certificates_and_authorities_are_refused_in_one_line(
    tls_bookie: str, pem: Path, tmp_path: Path, cli: Cli
) -> None:
    entry = tmp_path / "entry"
    entry.write_text("x\n")
    write = ["-u", tls_bookie, "--timeout", "3", "ledger", "write", entry, *SHAPE]
    for wrong, code in (
        (["--tls-ca", pem], 6),
        (["--tls-cert", pem, "--tls-key", pem], 2),
        (["--tls-ca", tmp_path / "none.pem"], 2),
    ):
        refused = cli(*write, *wrong)
        assert refused.code == code, refused
        assert refused.err.splitlines()[-1].startswith("bkctl: "), refused.err
        assert "Traceback" not in refused.err
