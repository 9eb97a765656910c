from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bkctl.errors import Unsupported, UsageError
from bkctl.metadata.store import NO_SECURITY, StoreSecurity
from bkctl.metadata.uri import LEDGER_MANAGER_TYPES, MetadataUri, parse_uri


@pytest.mark.parametrize(
    ("text", "driver", "manager_type", "connect_string", "path"),
    [
        ("zk+hierarchical://127.0.0.1:2181/ledgers", "zk", "hierarchical", "127.0.0.1:2181", "/ledgers"),
        ("zk://zk1/ledgers", "zk", "null", "zk1:2181", "/ledgers"),
        ("zk+null://zk1:1;zk2:2;zk3:3/a/b/ledgers", "zk", "null", "zk1:1,zk2:2,zk3:3", "/a/b/ledgers"),
        ("zk+flat://zk1:1,zk2/ledgers/", "zk", "flat", "zk1:1,zk2:2181", "/ledgers"),
        ("ZK+LongHierarchical://zk1", "zk", "longhierarchical", "zk1:2181", "/ledgers"),
        ("zk+longlonghierarchical://[::1]:1;[fe80::1]/x", "zk", "longlonghierarchical", "[::1]:1,[fe80::1]:2181", "/x"),
        ("etcd://e1:2379;e2/scope", "etcd", "null", "e1:2379,e2:2379", "/scope"),
        ("etcd+hierarchical://e1:2379,e2:2380/a/b", "etcd", "null", "e1:2379,e2:2380", "/a/b"),
        ("ETCD+longhierarchical://[::1]", "etcd", "null", "[::1]:2379", "/ledgers"),
        ("hbase://h1:2181;h2/prod", "hbase", "null", "h1:2181,h2:2181", "/prod"),
        ("HBase://h1", "hbase", "null", "h1:2181", "/bookkeeper"),
        ("hbase://h1,h2:1/ns:prod-1?znode=/hbase-unsecure", "hbase", "null", "h1:2181,h2:1", "/ns:prod-1"),
        ("sqlite:///var/lib/my data/m.db", "sqlite", "null", "", "/var/lib/my data/m.db"),
        ("metadata-store:zk:z1:2181,z2:2181/ledgers", "zk", "null", "z1:2181,z2:2181", "/ledgers"),
        ("metadata-store:z1:2181;z2:2181/chroot", "zk", "null", "z1:2181,z2:2181", "/chroot"),
        ("metadata-store:zk:z1", "zk", "null", "z1:2181", "/"),
        ("metadata-store:zk:z1/", "zk", "null", "z1:2181", "/"),
    ],
)  # fmt: skip
def test_every_form_is_read(text: str, driver: str, manager_type: str, connect_string: str, path: str) -> None:
    uri = parse_uri(text)
    assert (uri.driver, uri.manager_type, uri.connect_string, uri.path) == (driver, manager_type, connect_string, path)
    assert uri.pulsar == text.startswith("metadata-store")
    assert parse_uri(uri.text) == uri


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is empty"),
        ("   ", "is empty"),
        ("/ledgers", "no scheme"),
        ("127.0.0.1:2181", "no scheme"),
        ("zk:/127.0.0.1", "'://'"),
        ("localhost:2181/ledgers", "'://'"),
        ("zk:///ledgers", "names no host"),
        ("zk://", "names no host"),
        ("zk://a;;b/ledgers", "empty host"),
        ("zk://a;/ledgers", "empty host"),
        ("zk://a:0/ledgers", "'0' is not a port"),
        ("zk://a:65536/ledgers", "'65536' is not a port"),
        ("zk://a:x/ledgers", "'x' is not a port"),
        ("zk://a:/ledgers", "'' is not a port"),
        ("zk://a:1:2/ledgers", "'a:1:2' is not HOST:PORT"),
        ("zk://::1/ledgers", "not HOST:PORT"),
        ("zk://[::1/ledgers", "not HOST:PORT"),
        ("zk://user@a/ledgers", "user name"),
        ("zk://a/", "root path is empty"),
        ("zk://a//ledgers", "empty, '.' or '..'"),
        ("zk://a/x/../ledgers", "empty, '.' or '..'"),
        ("zk://a/ledgers?x=1", "query"),
        ("zk://a/led gers", "blanks"),
        ("zk://a/ledgers\n", "blanks"),
        ("sqlite://metadata.db", "absolute"),
        ("sqlite:metadata.db", "'://'"),
        ("sqlite:///tmp/", "directory"),
        ("sqlite+flat:///tmp/m.db", "no ledger manager type"),
        ("sqlite:///tmp/m\0.db", "control characters"),
        ("etcd+ms://e1/x", "no ledger manager type"),
        ("hbase+flat://h1/x", "no ledger manager type"),
        ("hbase://h1/a/b", "prefix of HBase's table names"),
        ("hbase://h1/a b", "blanks"),
        ("hbase://h1/.a", "prefix of HBase's table names"),
        ("hbase:///x", "names no host"),
        ("hbase://h1/x?root=/hbase", "only znode"),
        ("hbase://h1/x?znode=hbase", "path of HBase's nodes"),
        ("hbase://h1/x?znode=/", "path of HBase's nodes"),
        ("hbase://h1/x?znode=/a/../b", "path of HBase's nodes"),
        ("metadata-store:", "names no host"),
        ("zk://" + "a" * 5000, "characters"),
    ],
)
def test_malformed_uri_is_refused_with_the_problem(text: str, problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_uri(text)
    assert problem in caught.value.message


@pytest.mark.parametrize(
    "text",
    [
        "zk+ms://h/ledgers",
        "zk+x://h/ledgers",
        "consul://h/ledgers",
        "ms://h",
        "metadata-store:rocksdb:///data",
        "metadata-store:etcd:http://h:2379",
        "metadata-store:oxia://h:6648",
        "metadata-store:memory:local",
    ],
)
def test_unknown_stores_are_unsupported(text: str) -> None:
    with pytest.raises(Unsupported) as caught:
        parse_uri(text)
    assert caught.value.exit_code == 8
    assert "\n" not in str(caught.value)


hosts = st.from_regex(r"[a-z0-9][a-z0-9.-]{0,20}", fullmatch=True) | st.just("[::1]")
parts = st.from_regex(r"[A-Za-z0-9_-]{1,12}", fullmatch=True)


@given(
    st.sampled_from(LEDGER_MANAGER_TYPES),
    st.lists(st.tuples(hosts, st.integers(1, 65535)), min_size=1, max_size=5),
    st.lists(parts, min_size=1, max_size=4),
)
def test_uri_text_parses_to_an_equal_uri(manager_type: str, pairs: list[tuple[str, int]], path: list[str]) -> None:
    uri = MetadataUri("zk", manager_type, tuple(pairs), "/" + "/".join(path))
    assert parse_uri(uri.text) == uri
    assert parse_uri(uri.text.replace(";", ",")) == uri


beginnings = st.sampled_from(["", "zk://", "etcd://", "hbase://", "sqlite:///", "metadata-store:", "zk+"])


@given(st.builds("{}{}".format, beginnings, st.text(max_size=60)))
def test_any_text_is_a_uri_or_one_clear_error(text: str) -> None:
    try:
        uri = parse_uri(text)
    except (UsageError, Unsupported) as error:
        message = str(error)
    else:
        message = ""
        assert parse_uri(uri.text) == uri
    assert "\n" not in message


@pytest.mark.parametrize("scheme", ["zk", "ms", "zk+hierarchical"])
def test_a_password_in_a_uri_is_refused_and_not_repeated(scheme: str) -> None:
    with pytest.raises((UsageError, Unsupported)) as caught:
        parse_uri(f"{scheme}://admin:s3cr@t@host:2181/ledgers")
    assert "s3cr" not in str(caught.value)
    assert "@host:2181/ledgers" in str(caught.value)


def test_an_etcd_uri_may_name_user_password_and_tls() -> None:
    uri = parse_uri("etcd://ann:p%40s%3As@a:1;b/x?ca=/etc/ca.pem&cert=/c.pem&key=/k.pem")
    assert uri.text == "etcd://a:1;b:2379/x"
    assert uri.security == StoreSecurity(
        tls=True, ca="/etc/ca.pem", certificate="/c.pem", key="/k.pem", user="ann", password="p@s:s"
    )
    assert "p@s" not in repr(uri)
    assert parse_uri("etcd://a/x?tls=true").security == StoreSecurity(tls=True)
    assert parse_uri("etcd://a/x").security is None
    assert uri.security is not None
    bob = StoreSecurity(user="bob", password="other")
    assert bob.over(uri.security) == replace(uri.security, user="bob", password="other")
    assert NO_SECURITY.over(uri.security) == uri.security
    assert bob.over(None) == bob


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("etcd://ann@a/x", "password"),
        ("etcd://:p@a/x", "password"),
        ("etcd://a/x?tls=maybe", "true or false"),
        ("etcd://a/x?user=ann", "'user'"),
        ("etcd://a/x?ca=/c&tls=false", "TLS files"),
        ("etcd://a/x?key=/k", "certificate"),
    ],
)
def test_wrong_login_and_tls_options_of_an_etcd_uri_are_refused(text: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        parse_uri(text)
