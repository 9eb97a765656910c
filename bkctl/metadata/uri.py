"""Metadata URIs: every form of Apache BookKeeper, Pulsar and bkctl.

    zk[+TYPE]://HOST[:PORT][;HOST…][/ROOT]      TYPE: hierarchical, longhierarchical, longlonghierarchical, flat, null
    etcd[+TYPE]://[USER:PASSWORD@]HOST[:PORT][;HOST…][/SCOPE][?tls=true&ca=FILE&cert=FILE&key=FILE]
                                                 TYPE: any of those; etcd has one layout
    hbase://HOST[:PORT][;HOST…][/PREFIX][?znode=/hbase]
                                                 HBase's ZooKeeper; ledgers are in table PREFIX_ledgers, the rest is in
                                                 ZooKeeper at /bkctl/PREFIX; znode: HBase's zookeeper.znode.parent
    sqlite:///FILE                               absolute, as in file:///
    metadata-store:[zk:]HOSTS[/PATH]             Pulsar's

Source: ZKMetadataDriverBase, ServiceURI, EtcdMetadataDriverBase; Pulsar's AbstractMetadataDriver.
"""

from __future__ import annotations

import os
import re
from typing import Final, NamedTuple

from bkctl.errors import Unsupported, UsageError
from bkctl.metadata.store import StoreSecurity
from bkctl.redaction import without_user_info

ROOT_PATH_DEFAULT: Final = "/ledgers"
ZOOKEEPER_PORT_DEFAULT: Final = 2181
HBASE_PREFIX_DEFAULT: Final = "/bookkeeper"
HBASE_ZNODE_DEFAULT: Final = "/hbase"
ETCD_PORT_DEFAULT: Final = 2379
LEDGER_MANAGER_TYPES: Final = ("hierarchical", "longhierarchical", "longlonghierarchical", "flat", "null")
#: The types that a URI of these stores may name; ZooKeeper's are in parse_uri.
_TYPES: Final = {"etcd": LEDGER_MANAGER_TYPES, "sqlite": (), "hbase": ()}
FORMS_HINT: Final = (
    "write it as zk+hierarchical://HOST:2181/ledgers, etcd://HOST:2379/ledgers, hbase://HOST:2181/PREFIX "
    "or sqlite:///FILE"
)
_URI_LENGTH_MAX: Final = 4096
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9.-]*)(?:\+([A-Za-z0-9.-]*))?://(.*)", re.DOTALL)
_HOST = re.compile(r"[A-Za-z0-9._-]{1,255}|\[[0-9A-Fa-f:.]{2,45}(?:%[A-Za-z0-9._-]+)?\]", re.ASCII)
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")
#: A table's name, or a namespace and that. Source: TableName.
_TABLE_PREFIX: Final = re.compile(r"/(?:[A-Za-z0-9_]+:)?[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}", re.ASCII)
_PORT = re.compile(r"[0-9]{1,5}", re.ASCII)
_PULSAR_STORES = ("rocksdb", "memory", "etcd", "oxia")


class MetadataUri(NamedTuple):
    """A parsed metadata URI.

    `driver` is "zk", "etcd", "hbase" or "sqlite"; `manager_type` one of LEDGER_MANAGER_TYPES ("null": as the LAYOUT
    says); `hosts` are (host, port) pairs, empty for sqlite; `path` is the ledgers root, key scope, table prefix or
    file, with leading "/". `znode` is the path of HBase's own nodes in its ZooKeeper.
    `pulsar`: the URI is a `metadata-store:`, where Pulsar puts the root at PATH/ledgers, and may write no LAYOUT.
    `security` is the login and TLS of an etcd URI; it is not part of `text`, nor printed otherwise.
    """

    driver: str
    manager_type: str
    hosts: tuple[tuple[str, int], ...]
    path: str
    pulsar: bool = False
    security: StoreSecurity | None = None
    znode: str = HBASE_ZNODE_DEFAULT

    @property
    def connect_string(self) -> str:
        """The hosts as `HOST:PORT,HOST:PORT`."""
        return ",".join(f"{host}:{port}" for host, port in self.hosts)

    @property
    def text(self) -> str:
        """The URI in its plain form, which parses to an equal value (`metadata-store:` stays itself)."""
        if self.driver == "sqlite":
            return f"sqlite://{self.path}"
        if self.pulsar:
            return f"metadata-store:{self.driver}:{self.connect_string}{'' if self.path == '/' else self.path}"
        kind = "" if self.manager_type == "null" else f"+{self.manager_type}"
        query = "" if self.znode == HBASE_ZNODE_DEFAULT else f"?znode={self.znode}"
        return f"{self.driver}{kind}://{self.connect_string.replace(',', ';')}{self.path}{query}"

    def identity(self, root: str | None = None) -> str:
        """Return the URI that all spellings of one store share: real path, sorted lower-case hosts, no layout.

        `root` is the root that a `metadata-store:` URI was found to mean; None: PATH/ledgers.
        """
        path = os.path.realpath(self.path) if self.driver == "sqlite" else self.path
        if self.pulsar:
            path = root or f"{path.rstrip('/')}/ledgers"
        hosts = tuple(sorted({(host.lower().rstrip("."), port) for host, port in self.hosts}))
        return self._replace(manager_type="null", hosts=hosts, path=path, pulsar=False).text


def parse_uri(text: str) -> MetadataUri:
    """Read any form of metadata URI.

    Raises UsageError, naming the problem, for another kind of text; Unsupported for a store or a ledger manager type
    that this release does not have.
    """
    if len(text) > _URI_LENGTH_MAX:
        raise UsageError(f"Metadata URI of {len(text)} characters; at most {_URI_LENGTH_MAX} are read")
    if not text.strip():
        raise UsageError("The metadata URI is empty", hint=FORMS_HINT)
    if _UNPRINTABLE.search(text) or (not text.lower().startswith("sqlite:") and re.search(r"\s", text)):
        raise _bad(text, "it contains blanks or control characters")
    if text.lower().startswith("metadata-store:"):
        return _parse_pulsar(text)
    match = _SCHEME.fullmatch(text)
    if match is None:
        has_scheme = re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", text)
        raise _bad(text, "its scheme is not followed by '://'" if has_scheme else "it has no scheme")
    driver, kind, rest = match[1].lower(), match[2], match[3]
    if kind is not None and driver in _TYPES and kind.lower() not in _TYPES[driver]:
        raise _bad(text, f"{driver} has no ledger manager type {kind!r}")
    if driver == "sqlite":
        if not rest.startswith("/"):
            raise _bad(text, "the file must be absolute, as in sqlite:///var/lib/bkctl/metadata.db")
        if rest.endswith("/"):
            raise _bad(text, "it names a directory, not a file")
        # SQLAlchemy's URIs of absolute files have a fourth slash.
        return MetadataUri("sqlite", "null", (), "/" + rest.lstrip("/"))
    if driver == "zk":
        manager_type = "null" if kind is None else kind.lower()
        if manager_type not in LEDGER_MANAGER_TYPES:
            raise Unsupported(
                f"Metadata URI {_shown(text)!r} names the ledger manager type {kind!r}, which bkctl does not support",
                hint=f"it has {', '.join(LEDGER_MANAGER_TYPES)}",
            )
        return MetadataUri("zk", manager_type, *_parse_place(text, rest, ZOOKEEPER_PORT_DEFAULT))
    if driver == "etcd":
        rest, security = _split_security(text, rest)
        return MetadataUri("etcd", "null", *_parse_place(text, rest, ETCD_PORT_DEFAULT), security=security)
    if driver == "hbase":
        return _parse_hbase(text, rest)
    raise Unsupported(
        f"Metadata URI {_shown(text)!r} names the store {match[1]!r}, which bkctl does not support", hint=FORMS_HINT
    )


def _bad(text: str, problem: str) -> UsageError:
    return UsageError(f"Not a metadata URI: {_shown(text)!r}: {problem}", hint=FORMS_HINT)


def _shown(text: str) -> str:
    """Return the URI without its password."""
    return without_user_info(text, "…")


def _parse_hbase(text: str, rest: str) -> MetadataUri:
    rest, question, query = rest.partition("?")
    name, _, znode = query.partition("=")
    if question and name != "znode":
        raise _bad(text, "only znode=/PATH may follow '?'")
    znode = znode.rstrip("/") if question else HBASE_ZNODE_DEFAULT
    if not znode.startswith("/") or any(part in ("", ".", "..") for part in znode[1:].split("/")):
        raise _bad(text, "znode is the path of HBase's nodes in ZooKeeper, as in ?znode=/hbase")
    authority, slash, path = rest.partition("/")
    place = rest if slash else authority + HBASE_PREFIX_DEFAULT
    hosts, path = _parse_place(text, place, ZOOKEEPER_PORT_DEFAULT)
    if not _TABLE_PREFIX.fullmatch(path):
        raise _bad(text, "its path is not a prefix of HBase's table names: letters, digits, '_', '.' and '-'")
    return MetadataUri("hbase", "null", hosts, path, znode=znode)


def _split_security(text: str, rest: str) -> tuple[str, StoreSecurity | None]:
    """Return `rest` without user, password and query, and their settings; None without any."""
    from urllib.parse import parse_qsl, unquote

    rest, _, query = rest.partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True)) if query else {}
    if unknown := sorted(options.keys() - {"tls", "ca", "cert", "key"}):
        raise _bad(text, f"{unknown[0]!r} is not one of tls, ca, cert and key")
    if (tls := options.get("tls")) not in (None, "true", "false"):
        raise _bad(text, "tls is true or false")
    authority, slash, path = rest.partition("/")
    login, at, hosts = authority.rpartition("@")
    user, colon, password = login.partition(":")
    if at and not (user and colon):
        raise _bad(text, "a user needs a password, as in USER:PASSWORD@HOST")
    if not at and not options:
        return rest, None
    security = StoreSecurity(
        tls=tls == "true" or (tls is None and any(options.get(name) for name in ("ca", "cert", "key"))),
        ca=options.get("ca") or None,
        certificate=options.get("cert") or None,
        key=options.get("key") or None,
        user=unquote(user) if at else None,
        password=unquote(password) if at else None,
    )
    return hosts + slash + path, security


def _parse_place(text: str, rest: str, port_default: int) -> tuple[tuple[tuple[str, int], ...], str]:
    """Return the hosts and the path behind a scheme."""
    if "?" in rest or "#" in rest:
        raise _bad(text, "a query or fragment has no meaning in it")
    authority, slash, path = rest.partition("/")
    if "@" in authority:
        raise _bad(text, "a user name has no meaning in it; it is given beside it")
    path = (slash + path).rstrip("/") if slash else ROOT_PATH_DEFAULT
    if not path:
        raise _bad(text, "the ledgers root path is empty")
    if any(part in ("", ".", "..") for part in path[1:].split("/")):
        raise _bad(text, "the ledgers root path has an empty, '.' or '..' part")
    hosts = []
    for item in re.split("[;,]", authority):
        if not item:
            raise _bad(text, "it names no host" if not authority else "an empty host between separators")
        host, colon, port_text = item.rpartition(":")
        if not colon or item.endswith("]"):
            host, port_text = item, str(port_default)
        if not _HOST.fullmatch(host):
            raise _bad(text, f"{item!r} is not HOST:PORT")
        if not _PORT.fullmatch(port_text) or not 0 < int(port_text) <= 65535:
            raise _bad(text, f"{port_text!r} is not a port")
        hosts.append((host, int(port_text)))
    return tuple(hosts), path


def _parse_pulsar(text: str) -> MetadataUri:
    rest = text[len("metadata-store:") :]
    store, colon, tail = rest.partition(":")
    if store.lower() in _PULSAR_STORES and colon:
        raise Unsupported(
            f"Metadata URI {_shown(text)!r} names Pulsar's {store.lower()} store, which bkctl does not support"
        )
    if store.lower() == "zk" and colon:
        rest = tail
    authority, slash, _ = rest.partition("/")
    if slash and not rest[len(authority) :].strip("/"):
        rest = authority
    hosts, path = _parse_place(text, rest, ZOOKEEPER_PORT_DEFAULT)
    return MetadataUri("zk", "null", hosts, path if "/" in rest else "/", pulsar=True)
