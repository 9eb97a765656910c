"""The way of a run to its cluster, bookies, servers and files, as options, environment and context name them."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

from bkctl.columns import counted
from bkctl.errors import NotFound, Unsupported, UsageError
from bkctl.ids import parse_bookie_address

from .audit import shown_uri
from .contexts import LOCAL_CONTEXT, Contexts
from .job import LongWork
from .options import option, read_password_file
from .printer import Printer
from .settings import GlobalOptions, Session

if TYPE_CHECKING:
    import ssl

    from bkctl.client.ledger import BookKeeper
    from bkctl.config import BookieConfig, ClientConfig
    from bkctl.files.directories import BookieDirectories
    from bkctl.http.bookie_client import BookieApi
    from bkctl.http.bookie_load import BookieVitals
    from bkctl.http.bundle import RecordedCluster
    from bkctl.http.client import ApiClient
    from bkctl.metadata.cluster import Cluster, RegisteredBookie
    from bkctl.metadata.store import StoreSecurity
    from bkctl.protocol.messages import Protocol

#: Options, nearest first, each with the words that name it in messages; None for the environment.
Levels = list[tuple[str | None, GlobalOptions]]
TIMEOUT_S_DEFAULT: Final = 30.0
CONNECT_TIMEOUT_S_DEFAULT: Final = 10.0
#: Our bookies' HTTP servers have so long, all together, to answer what they cannot serve; --timeout may shorten it.
METRICS_WAIT_S: Final = 5.0
#: HTTP servers without an answer that a note names.
SILENT_SHOWN_MAX: Final = 3


class NoClusterNamed(UsageError):
    """No option, variable, context or local cluster names a cluster."""


class Connection(NamedTuple):
    """The metadata store to open, and the source of its name (for messages).

    `context` is the context's name, if a context named it; `settings` are the context's other settings.
    """

    uri: str
    source: str
    context: str | None = None
    settings: GlobalOptions = GlobalOptions()


def connect_to(levels: Levels, environment: Mapping[str, str]) -> Connection:
    """Return the connection: of the first of `levels` (nearest first) that names one, current context, local cluster.

    A level is a place on the command line, or the environment (None). Within a level, a URI takes precedence over a
    configuration file, and that over a context. A file without a cluster hides the environment, the current context and
    the local cluster: its bookie must not be taken for one of theirs.
    Raises NoClusterNamed when nothing names a cluster, NotFound for a context or file that is not there.
    """
    without: Path | None = None
    for source, options in levels:
        if source is None and without is not None:
            break
        if options.metadata_uri is not None:
            named = "BKCTL_METADATA_URI" if source is None else f"--metadata-uri {source}"
            return Connection(options.metadata_uri, named)
        if options.conf is not None:
            from bkctl.config import read_properties

            uri = read_properties(options.conf).metadata_service_uri
            if uri is not None:
                return Connection(uri, "BKCTL_CONF" if source is None else str(options.conf))
            without = without or options.conf
        if options.context is not None:
            found = context_connection(options.context, environment)
            return found._replace(source="BKCTL_CONTEXT") if source is None else found
    if without is not None:
        raise NoClusterNamed(
            f"{without} names no cluster: no metadataServiceUri and no zkServers", hint="add --metadata-uri URI"
        )
    current = Contexts.read(environment).current
    if current is not None:
        return context_connection(current, environment)
    if (local := local_uri()) is not None:
        return Connection(local, "the local cluster")
    raise NoClusterNamed(
        "No cluster is named", hint="add --metadata-uri URI or --conf FILE, or start one with 'bkctl local up'"
    )


class Login(NamedTuple):
    """The login of the store that --to names, which is not the connection's; None if no user is named."""

    user: Annotated[str | None, option("--to-user NAME", "Log in to the target; never with --metadata-user.")] = None
    password_file: Annotated[
        Path | None,
        option(
            "--to-password-file FILE",
            "File with that user's password. For TLS or SASL name a context: --to context:NAME.",
            Path,
        ),
    ] = None

    def over(self, settings: GlobalOptions) -> GlobalOptions:
        """Return the settings with this login in place of theirs, if there is one."""
        if self.user is None and self.password_file is None:
            return settings
        return replace(settings, metadata_user=self.user, metadata_password_file=self.password_file)


NO_LOGIN: Final = Login()


def context_connection(name: str, environment: Mapping[str, str]) -> Connection:
    """Return the connection of a context: one of the configuration file, or the local cluster. Raises NotFound."""
    contexts = Contexts.read(environment)
    if name == LOCAL_CONTEXT and name not in contexts.names:
        local = local_uri()
        if local is None:
            raise NotFound(f"Context {name!r}: no local cluster is up", hint="'bkctl local up' starts one")
        return Connection(local, "the local cluster", name)
    settings = contexts.get(name)
    assert settings.metadata_uri is not None
    return Connection(settings.metadata_uri, f"context {name}", name, replace(settings, metadata_uri=None))


def context_names(contexts: Contexts) -> list[str]:
    """Return the contexts of the file, and the local cluster's if one is up."""
    names = contexts.names
    return [*names, LOCAL_CONTEXT] if LOCAL_CONTEXT not in names and local_uri() is not None else names


def store_security(options: GlobalOptions, environment: Mapping[str, str]) -> StoreSecurity:
    """Return TLS and login of the metadata store as `options` give them. Raises UsageError, OSError (password file)."""
    from bkctl.metadata.store import StoreSecurity

    password: bytes | None = None
    if options.metadata_password_file is not None:
        password = read_password_file(options.metadata_password_file)
    elif options.metadata_user is not None and "BKCTL_METADATA_PASSWORD" in environment:
        password = os.fsencode(environment["BKCTL_METADATA_PASSWORD"])
    creator_acl = options.metadata_creator_acl
    if options.conf is not None and not creator_acl:
        from bkctl.config import read_properties

        creator_acl = (read_properties(options.conf).get("zkEnableSecurity") or "").lower() == "true"
    ca, certificate, key = options.tls_files(metadata=True)
    return StoreSecurity(
        tls=options.metadata_tls or ca is not None, ca=ca, certificate=certificate, key=key, user=options.metadata_user,
        password=None if password is None else password.decode("utf-8", "surrogateescape"),
        sasl=options.metadata_sasl, creator_acl=creator_acl,
    )  # fmt: skip


def local_uri() -> str | None:
    """Return the metadata URI of the local cluster that is up, None if none is."""
    from bkctl.bookie.local import active_cluster

    cluster = active_cluster()
    return None if cluster is None else cluster.metadata_uri


def parse_bookie_addresses(texts: tuple[str, ...]) -> dict[str, tuple[str, int]]:
    """Return bookie id → (host, port) of `ID=HOST:PORT` texts; the later of two for an id counts. Raises UsageError."""
    return dict(parse_bookie_address(text, "--bookie-address") for text in texts)


class Access:
    """Opens what the options of a run name."""

    def __init__(self, session: Session, levels: Levels, options: GlobalOptions, out: Printer, job: LongWork) -> None:
        self._session, self._levels, self._options, self._out, self._job = session, levels, options, out, job
        self.timeout_s = options.timeout_s if options.timeout_s is not None else TIMEOUT_S_DEFAULT
        connect_s = options.connect_timeout_s
        self.connect_timeout_s = min(CONNECT_TIMEOUT_S_DEFAULT, self.timeout_s) if connect_s is None else connect_s
        self.conf: Path | None = options.conf
        self.bundle: Path | None = options.bundle
        #: The bundle, once `cluster` has read it.
        self.recorded: RecordedCluster | None = None
        parse_bookie_addresses(options.bookie_addresses)
        #: The connection that the run has used so far.
        self.opened: Connection | None = None
        #: By URL and time to answer: one that is asked again and again warns once.
        self._bookie_apis: dict[tuple[str, float], BookieApi] = {}
        #: The bookies whose HTTP servers gave no answer when they were asked last.
        self._silent: set[str] = set()

    def connection(self) -> Connection:
        """Return the metadata URI in effect, and its source. Raises UsageError if no cluster is named."""
        if self.opened is None:
            self.opened = connect_to(self._levels, os.environ)
        return self.opened

    def standing_connection(self) -> Connection:
        """Return the connection of commands without connection options. Raises as `connection`."""
        return connect_to(self._levels[2:], os.environ)

    def given_connection(self) -> Connection:
        """Return the metadata URI that options name, a context's not. Raises UsageError when they name none."""
        given: Levels = [(source, replace(options, context=None)) for source, options in self._levels[:2]]
        if all(options.metadata_uri is None and options.conf is None for _, options in given):
            raise UsageError("No cluster is named", hint="add --metadata-uri URI or --conf FILE")
        return connect_to(given, {})

    def connection_settings(self) -> GlobalOptions:
        """Return the merged options, including the settings of a context. Raises as `connection`."""
        return self._options.over(self.connection().settings)

    @property
    def names_metadata(self) -> bool:
        """True if a metadata URI or a context counts; for commands that can do without."""
        if all(options.metadata_uri is None and options.context is None for _, options in self._levels):
            return False
        try:
            self.connection()
        except NoClusterNamed:  # The --conf of a bookie without a cluster hides the environment's.
            return False
        return True

    def cluster(self, *, create_store: bool = False) -> Cluster:
        """Return the cluster that the options name, a context manager; `create_store` creates its SQLite file."""
        if self.bundle is not None:
            from bkctl.http.bundle import RecordedCluster

            self.recorded = RecordedCluster(self.bundle)
            bundled, at = self.recorded.open()
            self._out.note(f"Everything is of {at}, from the bundle {self.bundle}")
            return bundled
        connection = self.connection()
        self._out.detail(f"cluster {shown_uri(connection.uri)} ({connection.source})")
        cluster = self._open(connection.uri, self.security(connection), create_store=create_store)
        self._session.note(metadataUri=shown_uri(connection.uri), connection=connection.source)
        if self._session.audit is not None:
            self._session.audit.begin()
        return cluster

    def security(self, connection: Connection) -> StoreSecurity:
        """Return TLS and login of the metadata store of `connection`."""
        return store_security(self._options.over(connection.settings), os.environ)

    def open_other_cluster(self, text: str, *, login: Login = NO_LOGIN, create_store: bool = False) -> Cluster:
        """Return a second cluster, named by URI or `context:NAME`, with the timeout of the first. The caller closes it.

        It is logged in to as `login` says, else as its URI or its context does; the connection's own login goes to the
        servers of the connection only. With `create_store` a SQLite file is made where there is none; a cluster in it
        is not.
        """
        from bkctl.metadata.uri import parse_uri

        is_context, name = text.startswith("context:"), text.removeprefix("context:")
        connection = context_connection(name, os.environ) if is_context else Connection(text, "its URI")
        place, options, environment, shared = parse_uri(connection.uri), connection.settings, {}, None
        with suppress(UsageError):
            own = self.connection()
            here = parse_uri(own.uri)
            if (here.driver, set(here.hosts)) == (place.driver, set(place.hosts)):
                environment = dict(os.environ) if login == NO_LOGIN else {}
                if connection.context is None:
                    options, shared = self._options.over(own.settings), here.security
        security = store_security(login.over(options), environment)
        if place.security is not None and login == NO_LOGIN:
            security = place.security.over(security)
        return self._open(connection.uri, security.over(shared), create_store=create_store)

    def _open(self, uri: str, security: StoreSecurity, *, create_store: bool) -> Cluster:
        from bkctl.metadata.cluster import open_cluster

        self._job.quiet_libraries()
        with self._job.working(f"Connecting to {shown_uri(uri)}", listed=False):
            return open_cluster(
                uri, timeout_s=self.timeout_s, connect_timeout_s=self.connect_timeout_s,
                create_store=create_store, security=security,
            )  # fmt: skip

    def bookkeeper(
        self, cluster: Cluster, protocol: Protocol | None = None, *, only: Collection[str] | None = None
    ) -> BookKeeper:
        """Return a client of `cluster` with the options' timeout, TLS and bookie addresses; an async context manager.

        `only` these bookies get new ledgers.
        """
        from bkctl.client.ledger import BookKeeper
        from bkctl.protocol.messages import Protocol

        self.refuse_bundle("Bookies cannot be asked")
        return BookKeeper(
            cluster, protocol=protocol or Protocol.V3, tls=self.bookie_tls(), timeout_s=self.timeout_s,
            connect_timeout_s=self.connect_timeout_s, addresses=self.bookie_addresses(), only=only,
            config=self.client_config(),
        )  # fmt: skip

    def refuse_bundle(self, problem: str) -> None:
        """Raise Unsupported, with this problem, if a bundle is in the cluster's place."""
        if self.bundle is not None:
            raise Unsupported(
                f"{problem}: {self.bundle} is a bundle",
                hint="it answers from metadata, and 'cluster health', 'why', 'top --once'; name a cluster for the rest",
            )

    def client_config(self) -> ClientConfig:
        """Return the settings of placement and reads in --conf, under Java's names, or their defaults."""
        from bkctl.config import ClientConfig, read_properties

        return ClientConfig() if self.conf is None else ClientConfig.from_properties(read_properties(self.conf))

    def bookie_tls(self, refresh_s: float = 0) -> ssl.SSLContext | None:
        """Return the TLS settings for connections to bookies, None without --tls-ca; `refresh_s` as `client_tls`."""
        from bkctl.metadata.store import client_tls

        ca, certificate, key = self.connection_settings().tls_files()
        if ca is None and (certificate or key):
            raise UsageError("--tls-cert and --tls-key require --tls-ca", hint="add the authorities' PEM file")
        return None if ca is None else client_tls(ca, certificate, key, refresh_s=refresh_s)

    def bookie_addresses(self) -> dict[str, tuple[str, int]]:
        """Return the addresses in --bookie-address: bookie id → host and port."""
        return parse_bookie_addresses(self.connection_settings().bookie_addresses)

    def http_client(self, url: str, *, is_registered: bool = False) -> ApiClient:
        """Return a client of the HTTP server at `url`, with timeout and TLS of the options and BKCTL_API_TOKEN.

        `is_registered`: the metadata store names `url`, so that the token goes there only as `token_for_registered`
        says.
        """
        self.refuse_bundle(f"The server {url} cannot be asked")
        from bkctl.http.client import ApiClient
        from bkctl.http.server_url import token_for_registered
        from bkctl.metadata.store import client_tls

        options = self._options
        with suppress(UsageError):  # Nothing names a cluster, and nothing has to.
            options = options.over(self.connection().settings)
        self._out.detail(f"HTTP server {url}")
        ca, certificate, key = options.tls_files()
        tls = client_tls(ca, certificate, key) if url.lower().startswith("https:") else None
        given = token = os.environ.get("BKCTL_API_TOKEN") or None
        if is_registered:
            token = token_for_registered(url, token, has_authorities=ca is not None)
            if token != given:
                self._out.warn(
                    f"the token does not go to {url}, which the metadata store names: "
                    "use https with --tls-ca, or give the server as --bookie-url"
                )
        client = ApiClient(
            url, token=token, timeout_s=self.timeout_s, connect_timeout_s=self.connect_timeout_s, tls=tls
        )
        if token is not None and not client.server.is_private:
            self._out.warn(f"the token goes to {url} unencrypted; use https where the server has it")
        return client

    @property
    def metrics_wait_s(self) -> float:
        """The time in which a bookie's HTTP server has to answer, where all are asked."""
        return min(self.timeout_s, METRICS_WAIT_S)

    def bookie_api(self, bookie: RegisteredBookie, *, timeout_s: float | None = None) -> BookieApi:
        """Return the HTTP server that a bookie registered, at its host in --bookie-address if that has one."""
        from bkctl.http.bookie_client import BookieApi
        from bkctl.http.server_url import bookie_url

        host, _ = self.bookie_addresses().get(bookie.bookie_id, (None, 0))
        place = bookie_url(bookie, host), self.timeout_s if timeout_s is None else timeout_s
        if place not in self._bookie_apis:
            client = self.http_client(place[0], is_registered=True)
            client.timeout_s = place[1]
            self._bookie_apis[place] = BookieApi(client)
        return self._bookie_apis[place]

    def metrics_api(self, bookie: RegisteredBookie) -> BookieApi:
        """Return a bookie's HTTP server, which has `metrics_wait_s` to answer."""
        return self.bookie_api(bookie, timeout_s=self.metrics_wait_s)

    def vitals(self, bookies: list[RegisteredBookie]) -> dict[str, BookieVitals]:
        """Return what the HTTP servers of bookies say of their health; note those without an answer, once."""
        from bkctl.http.bookie_load import cluster_vitals

        return cluster_vitals(bookies, self.metrics_api, wait_s=self.metrics_wait_s, silent=self._note_silent)

    def _note_silent(self, problems: Mapping[str, str]) -> None:
        if problems.keys() - self._silent:
            shown = "; ".join(map(": ".join, [*problems.items()][:SILENT_SHOWN_MAX]))
            self._out.note(
                f"{counted(len(problems), 'HTTP server')} of bookies gave no answer, so their certificates, clocks, "
                f"ledgers set aside and slow disks are not known ({shown})"
            )
        self._silent = {*problems}

    def config(self) -> BookieConfig:
        """Return the bookie's settings in `--conf`. Raises UsageError without one."""
        from bkctl.config import BookieConfig

        if self.conf is None:
            raise UsageError("No bookie configuration is given", hint="add --conf bk_server.conf")
        return BookieConfig.load(self.conf)

    @property
    def names_databases(self) -> bool:
        """True if `--conf` is given, and names DbLedgerStorage, which has databases and no index files."""
        return self.conf is not None and self.config().ledger_storage_class.endswith(".DbLedgerStorage")

    def directories(self, given: Iterable[Path] | None, *, needed: bool = True) -> BookieDirectories:
        """Return the directories to read: the given ones, else the directories in `--conf`.

        Raises UsageError if `needed` directories are missing, NotFound if they hold no file of a bookie.
        """
        from bkctl.files.directories import BookieDirectories

        places = list(given or ())
        if places:
            return BookieDirectories.at(*places).of_a_bookie()
        if self.conf is not None:
            config = self.config()
            found = BookieDirectories(config.journal_directories, config.ledger_directories, config.index_directories)
            # A missing directory concerns only the commands that read it.
            exist = all(place.is_dir() for place in (*found.journal_dirs, *found.ledger_dirs, *found.index_dirs))
            return found.of_a_bookie() if exist else found
        if needed:
            raise UsageError(
                "No directory is given", hint="name the bookie's directories, or add --conf bk_server.conf"
            )
        return BookieDirectories()
