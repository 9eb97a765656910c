"""Apache's client over TLS on our bookie, as brokers of Pulsar's chart with tls.bookie.enabled are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography.x509")

from support.certificates import Authority, mount_secret
from support.own_bookies import OwnBookie
from support.servers import DB, Java, format_cluster, shell_conf, wait_for

pytestmark = pytest.mark.java


def test_apache_s_client_speaks_tls_with_certificates_on_both_sides(java: Java, zookeeper: Any, tmp_path: Path) -> None:
    uri = zookeeper.metadata_uri(zookeeper.new_root())
    format_cluster(java, uri, tmp_path)
    authority, certs = Authority(), tmp_path / "certs"
    mount_secret(certs, {"ca.crt": authority.pem, **authority.files("bookie.bk", 1)})
    tls = {
        "tlsProviderFactoryClass": "org.apache.bookkeeper.tls.TLSContextFactory", "tlsProvider": "JDK",
        "tlsKeyStoreType": "PEM", "tlsKeyStore": certs / "tls.key", "tlsCertificatePath": certs / "tls.crt",
        "tlsTrustStoreType": "PEM", "tlsTrustStore": certs / "ca.crt", "tlsClientAuthentication": "true",
    }  # fmt: skip
    bookie = OwnBookie(
        uri, tmp_path / "bookie", storage=DB,
        settings={**tls, "tlsRequired": "true", "tlsCertFilesRefreshDurationSeconds": 1},
    )  # fmt: skip
    conf = shell_conf(tmp_path / "client.conf", uri, tls)

    def said(of: Path) -> str:
        """Output of the shell, whose exit code is 0 in any case; it reads the last entry again."""
        shell = ("simpletest", "-ensemble", "1", "-writeQuorum", "1", "-ackQuorum", "1", "-numEntries", "9")
        done = java.shell(of, *shell)
        return done.stdout + done.stderr

    bookie.start()
    try:
        assert "quorum failed" not in said(conf)
        assert "quorum failed" in said(shell_conf(tmp_path / "plain.conf", uri))
        mount_secret(certs, {"ca.crt": authority.pem, **authority.files("bookie.bk", 2)})
        wait_for(lambda: "are in use" in bookie.log_tail(0, 1 << 20), "the renewed certificate")
        assert "quorum failed" not in said(conf)
    finally:
        bookie.kill()
