"""The connection and output settings, each declared once, as a field of `GlobalOptions`, and the run that has them.

Options, environment variables, the keys of contexts, their columns and the help all come from `SETTINGS`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

from bkctl.errors import UsageError

from .columns import Output, RowOrder
from .options import flag, parameter
from .values import checked, parse_duration, parse_switch

if TYPE_CHECKING:
    from .audit import Audit
    from .work import WorkFile

GLOBAL_PANEL: Final = "Connection and output"


class ValueType(NamedTuple):
    """The forms that the values of one type of setting have: as an option, as text, when absent."""

    #: The type of the option; a text is read by `parse`, as that of the environment variable is.
    option: Any = str
    parse: Callable[[str, str], Any] = lambda text, _: text
    #: A value as the text of the environment variable.
    write: Callable[[Any], str] = str
    absent: Any = None


class Setting(NamedTuple):
    """One connection or output setting. `field` is its name in GlobalOptions; `words` are its flags and metavar.

    `shown` names the commands whose help shows the option: all, those that connect, those that ask before they destroy
    something, or the program itself. Every command accepts it.
    """

    field: str
    type: ValueType
    words: str
    help: str
    shown: str = "connects"
    has_variable: bool = True
    in_context: bool = False

    @property
    def flag(self) -> str:
        """The long flag, which gives the setting all its other names."""
        return self.words.split()[0]

    @property
    def key(self) -> str:
        """The key in the configuration file: `tls-ca`."""
        return self.flag.removeprefix("--")

    @property
    def variable(self) -> str | None:
        """The environment variable: `BKCTL_TLS_CA`."""
        return f"BKCTL_{self.key.replace('-', '_').upper()}" if self.has_variable else None

    @property
    def parameter_name(self) -> str:
        """The name of the option's parameter in a command's signature, distinct from the command's own parameters."""
        return f"g_{self.field}"

    def parameter(self, *, hidden: bool) -> Parameter:
        """Return the option as a keyword-only parameter of a command's signature."""
        switch = self.type.option is bool
        help = f"{self.help} [{self.variable}{'=1' if switch else ''}]" if self.has_variable else self.help
        info = flag(self.words, help, hidden=hidden, rich_help_panel=GLOBAL_PANEL)
        return parameter(self.parameter_name, Annotated[self.type.option, info], False if switch else None)

    def from_option(self, value: Any) -> Any:
        """Return the setting that the option's value stands for. Raises UsageError."""
        if isinstance(value, str):
            return self.type.parse(value, self.flag)
        return self.type.absent if value is None else tuple(value) if isinstance(value, list) else value

    def from_toml(self, value: Any, where: str) -> Any:
        """Return the setting that a value of the configuration file stands for. Raises UsageError."""
        form: Any = {bool: bool, list[str]: list}.get(self.type.option, str)
        if not isinstance(value, form) or (form is list and not all(isinstance(each, str) for each in value)):
            raise UsageError(f"{where}: {self.key} has a value of the wrong kind: {value!r}")
        return self.from_option(value)

    def to_toml(self, value: Any) -> Any:
        """Return the value to write to the configuration file for the setting `value`."""
        return list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value


def _names(text: str, flag: str) -> tuple[str, ...]:
    names = tuple(filter(None, (name.strip() for name in text.split(","))))
    if not names:
        raise UsageError(f"{flag} {text!r}: names no column", hint="give names with commas between")
    return names


def _output(text: str, name: str) -> Output:
    if text not in set(Output):
        raise UsageError(f"{name}={text!r}: not a form of output", hint=f"one of {', '.join(Output)}")
    return Output(text)


#: The types of the fields of GlobalOptions.
_TYPES: Final = {
    "str | None": ValueType(),
    "Path | None": ValueType(Path, lambda text, _: Path(text), lambda path: str(path.absolute())),
    "bool": ValueType(bool, parse_switch, lambda value: "1" if value else "0", absent=False),
    "tuple[str, ...]": ValueType(list[str], lambda text, _: tuple(text.replace(",", " ").split()), " ".join, absent=()),
    "float | None": ValueType(parse=checked(parse_duration, lambda seconds: seconds > 0, "must be more than 0")),
    "Output | None": ValueType(Output, _output),
    "tuple[str, ...] | None": ValueType(parse=_names),
    "RowOrder | None": ValueType(parse=lambda text, _: RowOrder.parse(text)),
}


def _setting(words: str, help: str, default: Any = None, **more: Any) -> Any:
    """Declare a field of GlobalOptions by what Setting takes, but for the field's name and type."""
    return field(default=default, metadata={"words": words, "help": help, **more})


def _login(words: str, help: str, default: Any = None) -> Any:
    """Declare a setting of the metadata store's login or TLS, which only the program's own help shows."""
    return _setting(words, help, default, in_context=True, shown="program")


@dataclass(frozen=True, slots=True)
class GlobalOptions:
    """The options that stand before the group or after the command; None, False or empty where not given."""

    metadata_uri: str | None = _setting(
        "--metadata-uri -u URI",
        "Metadata store: zk://HOST:PORT/ledgers, etcd://HOST:PORT/SCOPE, sqlite:///FILE, or "
        "hbase://HOST:PORT/PREFIX: HOST is HBase's ZooKeeper, which keeps all but the ledgers.",
        in_context=True,
    )
    conf: Path | None = _setting(
        "--conf -c FILE",
        "A bookie's bk_server.conf (or Pulsar's bookkeeper.conf): its cluster and directories.",
        shown="always",
    )
    context: str | None = _setting("--context -x CONTEXT", "A named connection of the configuration file.")
    bundle: Path | None = _setting(
        "--bundle FILE",
        "Read a bundle of 'diagnose bundle' in place of a cluster: metadata, health and load as they were.",
        shown="program",
    )
    bookie_addresses: tuple[str, ...] = _setting(
        "--bookie-address ID=HOST:PORT",
        "Reach bookie ID at HOST:PORT instead of its advertised address; repeatable.",
        (),
        in_context=True,
    )
    tls_ca: Path | None = _setting(
        "--tls-ca FILE",
        "Use TLS to bookies; PEM file of the authorities that sign their certificates.",
        in_context=True,
    )
    tls_certificate: Path | None = _setting(
        "--tls-cert FILE", "Client certificate for bookies that require one (PEM, with --tls-ca).", in_context=True
    )
    tls_key: Path | None = _setting("--tls-key FILE", "Private key of --tls-cert (PEM).", in_context=True)
    metadata_tls: bool = _login("--metadata-tls", "Use TLS to the metadata store.", False)
    metadata_tls_ca: Path | None = _login(
        "--metadata-tls-ca FILE", "Use TLS to the metadata store, with these authorities (PEM) instead of the system's."
    )
    metadata_tls_certificate: Path | None = _login(
        "--metadata-tls-cert FILE", "Client certificate for the metadata store (PEM)."
    )
    metadata_tls_key: Path | None = _login("--metadata-tls-key FILE", "Private key of --metadata-tls-cert (PEM).")
    metadata_user: str | None = _login(
        "--metadata-user NAME", "Log in to the metadata store: etcd, or ZooKeeper's digest scheme."
    )
    metadata_password_file: Path | None = _login(
        "--metadata-password-file FILE",
        "File with that user's password; BKCTL_METADATA_PASSWORD holds the password itself.",
    )
    metadata_sasl: bool = _login("--metadata-sasl", "Log in to ZooKeeper by SASL (DIGEST-MD5) instead.", False)
    metadata_creator_acl: bool = _login(
        "--metadata-creator-acl", "Create ZooKeeper nodes for that user alone, as zkEnableSecurity in --conf.", False
    )
    timeout_s: float | None = _setting(
        "--timeout DURATION", "Longest wait without progress from a server (default 30s)."
    )
    connect_timeout_s: float | None = _setting(
        "--connect-timeout DURATION",
        "Longest wait for a connection to a server (default 10s, or --timeout if that is shorter).",
    )
    output: Output | None = _setting(
        "--output -o FORM", f"Form of output: {', '.join(Output)} (default table).", shown="always"
    )
    columns: tuple[str, ...] | None = _setting(
        "--columns NAME,…",
        "Print only these columns, in this order, by their titles or JSON names: state,length.",
        shown="always",
        has_variable=False,
    )
    sort: RowOrder | None = _setting(
        "--sort COLUMN",
        "Sort the rows by this column; -COLUMN puts the largest first.",
        shown="always",
        has_variable=False,
    )
    yes: bool = _setting("--yes -y", "Do not ask before destroying.", False, shown="asks", has_variable=False)

    def over(self, defaults: GlobalOptions) -> GlobalOptions:
        """Return these options where they are given, else `defaults`; bookie addresses are added to those there."""
        values = ((each.field, getattr(self, each.field)) for each in SETTINGS)
        given = {name: value for name, value in values if value is not None and value is not False}
        given["bookie_addresses"] = defaults.bookie_addresses + self.bookie_addresses
        return replace(defaults, **given)

    def tls_files(self, *, metadata: bool = False) -> tuple[str | None, str | None, str | None]:
        """Return the PEM files of the authorities, of the client certificate and of its key."""
        files = (self.tls_ca, self.tls_certificate, self.tls_key)
        if metadata:
            files = (self.metadata_tls_ca, self.metadata_tls_certificate, self.metadata_tls_key)
        ca, certificate, key = (None if path is None else str(path) for path in files)
        return ca, certificate, key


SETTINGS: Final = tuple(Setting(each.name, _TYPES[str(each.type)], **each.metadata) for each in fields(GlobalOptions))
#: The settings that a context may have.
CONTEXT_SETTINGS: Final = tuple(setting for setting in SETTINGS if setting.in_context)


def global_parameters(
    *, connects: bool, asks: bool, program: bool = False, besides: Iterable[Parameter] = ()
) -> tuple[Parameter, ...]:
    """Return the options accepted before the group and after the command, hidden where the command ignores them.

    `program`: the options are shown in the program's own help. Left out are options of which the command has its own,
    `besides`.
    """
    # Typer keeps the first name of an annotated option as its default.
    infos = [each.annotation.__metadata__[0] for each in besides]
    taken = {flag for info in infos for flag in (info.default, *(info.param_decls or ())) if isinstance(flag, str)}
    visible = {"always": True, "connects": connects, "asks": asks, "program": program}
    return tuple(each.parameter(hidden=not visible[each.shown]) for each in SETTINGS if each.flag not in taken)


def read_options(values: Mapping[str, Any]) -> GlobalOptions:
    """Return the values of `global_parameters`, by parameter name. Raises UsageError."""
    given = {each: values[each.parameter_name] for each in SETTINGS if each.parameter_name in values}
    return GlobalOptions(**{each.field: each.from_option(value) for each, value in given.items()})


def read_environment(environment: Mapping[str, str]) -> GlobalOptions:
    """Return the options that BKCTL_… variables give; an empty variable counts as absent. Raises UsageError."""
    given = ((each, each.variable and environment.get(each.variable)) for each in SETTINGS)
    return GlobalOptions(**{each.field: each.type.parse(text, str(each.variable)) for each, text in given if text})


#: Options of the program that may stand anywhere → the field of Session that they set.
SESSION_FLAGS: Final = {
    "-v": "verbose", "--verbose": "verbose", "-q": "quiet", "--quiet": "quiet", "--no-color": "no_color",
    "--debug": "debug",
}  # fmt: skip


@dataclass
class Session:
    """One invocation: its words, and the options before the group. Kept in Typer's context."""

    words: list[str] = field(default_factory=list)
    #: The name of the command, as `bkctl ledger delete`.
    command: str = "bkctl"
    began_at: float = field(default_factory=time.monotonic)
    globals: GlobalOptions = field(default_factory=GlobalOptions)
    verbose: bool = False
    quiet: bool = False
    no_color: bool = False
    debug: bool = False
    #: The state that an interrupted command leaves, and how to continue.
    interrupted: str | None = None
    #: Set for a command that works for long; `main` writes its end.
    work: WorkFile | None = None
    #: Set for a command that changes something; `main` writes its end.
    audit: Audit | None = None
    #: The form of output, once it is known.
    output: Output | None = None

    def note(self, **fields: str) -> None:
        """Add fields to the audit of this run, where there is one."""
        if self.audit is not None:
            self.audit.note(**fields)

    def work_of_run(self) -> WorkFile:
        """Return the work of this run, whose id begins that of the audit log where the run changes something."""
        if self.work is None:
            from .work import WorkFile, progress_directory

            run_id = os.urandom(3).hex() if self.audit is None else self.audit.id
            began = time.time() - (time.monotonic() - self.began_at)
            self.work = WorkFile(progress_directory(os.environ), run_id[:6], ["bkctl", *self.words], began)
        return self.work
