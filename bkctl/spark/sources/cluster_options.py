"""The connection to a live cluster from the options of a data source, and a client for code that is not asynchronous.

Options end up in plans and logs, so they contain no secrets: they name the file or environment variable that has the
secret where the task runs. Nothing here needs Spark.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Final, TypeVar

from bkctl.errors import UsageError
from bkctl.ids import parse_bookie_address
from bkctl.metadata.cluster import Cluster, open_cluster
from bkctl.metadata.store import NO_SECURITY, Closing, StoreSecurity, client_tls
from bkctl.metadata.uri import parse_uri
from bkctl.protocol.connection import new_event_loop
from bkctl.spark.sources.options import SourceOptions

if TYPE_CHECKING:
    from bkctl.client.ledger import BookKeeper

T = TypeVar("T")

TIMEOUT_S_DEFAULT: Final = 30
#: Options of every source that connects to a cluster; only `metadataUri` is required.
CONNECTION_OPTIONS: Final = (
    "metadataUri",
    "metadataUser",
    "metadataPasswordFile",
    "metadataPasswordEnv",
    "metadataSasl",
    "metadataCreatorAcl",
    "metadataTls",
    "metadataTlsCa",
    "metadataTlsCert",
    "metadataTlsKey",
    "bookieAddress",
    "tlsCa",
    "tlsCert",
    "tlsKey",
    "timeoutSeconds",
)


class ClusterOptions:
    """The checked connection options of a data source; a plain value without secrets, which pickles.

    Raises UsageError, also for a `metadataUri` with a password in it; Unsupported for an unknown kind of store.
    """

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self.uri = options.needed("metadataUri")
        location = parse_uri(self.uri)
        if location.security is not None and location.security.password is not None:
            raise UsageError(
                "The metadata URI has a password in it, and options are printed in plans",
                hint="name the user by metadataUser (--metadata-user), and where the password is by "
                "metadataPasswordFile (--metadata-password-file) or metadataPasswordEnv",
            )
        self.timeout_s = float(options.integer("timeoutSeconds", TIMEOUT_S_DEFAULT, 1))
        self.bookie_addresses = dict(
            parse_bookie_address(text, "bookieAddress") for text in options.words("bookieAddress")
        )
        if (options.text("tlsCert") or options.text("tlsKey")) and not options.text("tlsCa"):
            raise UsageError("tlsCert and tlsKey go with tlsCa", hint="add the authorities' PEM file")
        for name in ("metadataSasl", "metadataCreatorAcl", "metadataTls"):
            options.flag(name)

    def open(self) -> Cluster:
        """Return the open cluster, which the caller closes; reads the secrets. Raises as `open_cluster`."""
        options = self._options
        password = options.secret("metadataPassword")
        ca = options.text("metadataTlsCa")
        security = StoreSecurity(
            tls=options.flag("metadataTls") or ca is not None,
            ca=ca,
            certificate=options.text("metadataTlsCert"),
            key=options.text("metadataTlsKey"),
            user=options.text("metadataUser"),
            password=None if password is None else password.decode("utf-8", "surrogateescape"),
            sasl=options.flag("metadataSasl"),
            creator_acl=options.flag("metadataCreatorAcl"),
        )
        return open_cluster(
            self.uri, timeout_s=self.timeout_s, security=NO_SECURITY if security == NO_SECURITY else security
        )

    def bookkeeper(self, cluster: Cluster) -> BookKeeper:
        """Return a client of `cluster` with these options' TLS, timeout and bookie addresses."""
        from bkctl.client.ledger import BookKeeper

        options = self._options
        ca = options.text("tlsCa")
        tls = None if ca is None else client_tls(ca, options.text("tlsCert"), options.text("tlsKey"))
        return BookKeeper(cluster, tls=tls, timeout_s=self.timeout_s, addresses=self.bookie_addresses)


class Client(Closing):
    """A cluster and its client, open until `close`; a context manager. `run` runs a coroutine to its end.

    The event loop runs only inside `run`, so a coroutine should leave no request in flight.
    """

    def __init__(self, options: ClusterOptions) -> None:
        self.cluster = options.open()
        try:
            self._runner = asyncio.Runner(loop_factory=new_event_loop)
            self.bookkeeper = options.bookkeeper(self.cluster)
        except BaseException:
            self.cluster.close()
            raise

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return or raise the result of `work`."""
        return self._runner.run(work)

    def close(self) -> None:
        try:
            self._runner.run(self.bookkeeper.close())
        finally:
            self._runner.close()
            self.cluster.close()
