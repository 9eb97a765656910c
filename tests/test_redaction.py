"""Secret settings, and URIs without their secrets."""

from __future__ import annotations

import re

import pytest

from bkctl.redaction import is_secret_name, without_secrets, without_secrets_in, without_user_info


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


#: A line of a log or a file of settings, with S where the secret is.
PLANTED = [
    "zkPassword=S", "password: S", '{"passwd": "S"}', "-Djavax.net.ssl.keyStorePassword=S -jar", "pwd = S",
    "passphrase S",     "--password S --yes", "tlsKeyStorePassword=a S", "aws_secret_access_key = S",
    "accessKey=S", "api_key: S",
    "apikey=S",     "private-key=S", "masterKey=S", "clientSecret: S", "token=S", "X-Auth-Token: S",
    "credentials=S", "sig=S&x=1",
    "?sas=S", "signature=S", "zk+null://user:S@host:2181/ledgers", "https://S@host/", "Authorization: Basic S",
    "Proxy-Authorization: S", "got Bearer Sabcdefgh from", "Cookie: id=S", 'sasl.jaas.config=Login required x="S";',
    "-----BEGIN RSA PRIVATE KEY-----\nS\n-----END RSA PRIVATE KEY-----", "-----BEGIN PRIVATE KEY-----\nS",
    "id eyJhbGciS.S.S",
    "key AKIASSSSSSSSSSSSSSSS used", "key ghp_SSSSSSSSSSSSSSSSSSSS used", "key xoxb-SSSSSSSSSSSS used",
]  # fmt: skip


@pytest.mark.parametrize("line", PLANTED)
def test_no_planted_secret_is_left_in_a_text(line: str) -> None:
    secret = "Zq7Zq7"
    planted = line.replace("S", secret) if "SSSS" in line else re.sub(r"\bS|S\b", secret, line)
    assert secret in planted
    for text in (planted, f"before\n{planted}\nafter"):
        found = without_secrets(text, "<hidden>")
        assert secret not in found, found
        assert "<hidden>" in found
    assert secret not in str(without_secrets_in({"lines": [planted], "aToken": secret}, "<hidden>"))


@pytest.mark.parametrize("line", ["tlsKeyStorePasswordPath=/etc/pw", "2026-11-24 INFO Ledger 12 is replicated"])
def test_texts_without_secrets_stay(line: str) -> None:
    assert without_secrets(line, "<hidden>") == line
