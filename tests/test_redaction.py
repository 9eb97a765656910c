"""Secret settings, and URIs without their secrets."""

from __future__ import annotations

import pytest

from bkctl.redaction import is_secret_name, without_user_info


@pytest.mark.parametrize(
    "name",
    [
        "httpServerKeyStorePassword", "aToken", "spark.authenticate.secret", "spark.hadoop.fs.s3a.access.key",
        "fs.s3a.secret.key", "fs.azure.account.key.here.blob.core.windows.net", "accessKey", "api_key", "private-key",
        "master-key", "ledgerPasswd", "some.credential", "fs.azure.sas.box.here", "sig", "X-Amz-Signature",
    ],
)  # fmt: skip
def test_settings_with_secrets_are_known_by_their_names(name: str) -> None:
    assert is_secret_name(name)
    assert is_secret_name(name.upper())


@pytest.mark.parametrize(
    "name", ["httpServerTokenFile", "tlsKeyStorePasswordPath", "bookiePort", "tlsKeyStore", "keystoreType", "sassafras"]
)
def test_settings_about_secrets_are_shown(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("etcd://ann:x@h:1/s", "etcd://***@h:1/s"),
        ("etcd://ann:p/w@h:1", "etcd://***@h:1"),
        ("etcd://ann:p@ss@h:1", "etcd://***@h:1"),
        ("etcd://ann:/@/@h:1", "etcd://***@h:1"),
        ("etcd:http://ann:p?w#@h:1", "etcd:http://***@h:1"),
        ("etcd://ann:p w@h:1", "etcd://***@h:1"),
        ("a=etcd://ann:x@h,b", "a=etcd://***@h,b"),
        ("zk://h:2181/ledgers", "zk://h:2181/ledgers"),
        ("sqlite:///data/me@here/db", "sqlite:///data/me@here/db"),
        ("me@example", "me@example"),
    ],
)
def test_users_and_passwords_in_uris_are_hidden(uri: str, shown: str) -> None:
    assert without_user_info(uri, "***") == shown
