"""The connection and output settings, each declared once, as a field of `GlobalOptions`.

Options, environment variables, the keys of contexts, their columns and the help all come from `SETTINGS`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum, auto
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer

from bkctl.errors import UsageError

from .columns import Output, RowOrder
from .values import parse_duration, parse_switch

GLOBAL_PANEL: Final = "Connection and output"


class ValueType(Enum):
    """The type of a setting's value."""

    TEXT = auto()
    FILE = auto()
    SWITCH = auto()
    ADDRESSES = auto()
    DURATION = auto()
    OUTPUT = auto()
    NAMES = auto()
    ORDER = auto()


class Shown(Enum):
    """The commands whose help shows an option; every command accepts it."""

    ALWAYS = auto()
    #: Commands that connect to a cluster.
    CONNECTS = auto()
    #: Commands that ask before they destroy something.
    ASKS = auto()
    #: The program itself.
    PROGRAM = auto()


#: The types of options that are not texts.
_OPTION_TYPES: Final[dict[ValueType, Any]] = {
    ValueType.FILE: Path,
    ValueType.SWITCH: bool,
    ValueType.ADDRESSES: list[str],
    ValueType.OUTPUT: Output,
}


class Setting(NamedTuple):
    """One connection or output setting. `field` is its name in GlobalOptions; `flag` gives all its other names."""

    field: str
    flag: str
    help: str
    type: ValueType = ValueType.TEXT
    short: str | None = None
    metavar: str | None = None
    shown: Shown = Shown.CONNECTS
    has_variable: bool = True
    in_context: bool = False

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
        switch = self.type is ValueType.SWITCH
        variable = f" [{self.variable}{'=1' if switch else ''}]" if self.has_variable else ""
        flags = [self.flag] if self.short is None else [self.flag, self.short]
        option = typer.Option(
            *flags, metavar=self.metavar, hidden=hidden, help=self.help + variable, rich_help_panel=GLOBAL_PANEL
        )
        plain_type: Any = _OPTION_TYPES.get(self.type, str)
        return Parameter(
            self.parameter_name,
            Parameter.KEYWORD_ONLY,
            default=False if switch else None,
            annotation=Annotated[plain_type, option],
        )

    def from_option(self, value: Any) -> Any:
        """Return the setting that the option's value stands for. Raises UsageError."""
        if self.type is ValueType.DURATION:
            return None if value is None else _timeout(value, self.flag)
        if self.type is ValueType.NAMES:
            return None if value is None else _names(value, self.flag)
        if self.type is ValueType.ORDER:
            return None if value is None else RowOrder.parse(value)
        return tuple(value or ()) if self.type is ValueType.ADDRESSES else value

    def from_variable(self, text: str) -> Any:
        """Return the setting that the environment variable's text stands for. Raises UsageError."""
        name = str(self.variable)
        match self.type:
            case ValueType.FILE:
                return Path(text)
            case ValueType.SWITCH:
                return parse_switch(text, name)
            case ValueType.ADDRESSES:
                return tuple(text.replace(",", " ").split())
            case ValueType.DURATION:
                return _timeout(text, name)
            case ValueType.OUTPUT:
                if text not in set(Output):
                    raise UsageError(f"{name}={text!r}: not a form of output", hint=f"one of {', '.join(Output)}")
                return Output(text)
        return text

    def to_variable(self, value: Any) -> str:
        """Return the text of the environment variable that gives this value; `from_variable` reads it."""
        match self.type:
            case ValueType.SWITCH:
                return "1" if value else "0"
            case ValueType.ADDRESSES:
                return " ".join(value)
            case ValueType.FILE:
                return str(value.absolute())
        return str(value)

    def from_toml(self, value: Any, where: str) -> Any:
        """Return the setting that a value of the configuration file stands for. Raises UsageError."""
        if self.type is ValueType.ADDRESSES:
            fits = isinstance(value, list) and all(isinstance(item, str) for item in value)
        else:
            fits = isinstance(value, bool if self.type is ValueType.SWITCH else str)
        if not fits:
            raise UsageError(f"{where}: {self.key} has a value of the wrong kind: {value!r}")
        if self.type is ValueType.ADDRESSES:
            return tuple(value)
        return Path(value) if self.type is ValueType.FILE else value

    def to_toml(self, value: Any) -> Any:
        """Return the value to write to the configuration file for the setting `value`."""
        if self.type is ValueType.ADDRESSES:
            return list(value)
        return str(value) if self.type is ValueType.FILE else value


def _timeout(text: str, name: str) -> float:
    seconds = parse_duration(text, name)
    if not seconds:
        raise UsageError(f"{name} {text}: must be more than 0")
    return seconds


def _names(text: str, flag: str) -> tuple[str, ...]:
    names = tuple(filter(None, (name.strip() for name in text.split(","))))
    if not names:
        raise UsageError(f"{flag} {text!r}: names no column", hint="give names with commas between")
    return names


def _setting(flag: str, help: str, type: ValueType = ValueType.TEXT, **more: Any) -> Any:
    """Declare a field of GlobalOptions by what Setting takes, but for the field's name."""
    default: Any = {ValueType.SWITCH: False, ValueType.ADDRESSES: ()}.get(type)
    metavar = {ValueType.FILE: "FILE", ValueType.DURATION: "DURATION"}.get(type)
    return field(default=default, metadata={"flag": flag, "help": help, "type": type, "metavar": metavar, **more})


def _login(flag: str, help: str, type: ValueType = ValueType.TEXT, **more: Any) -> Any:
    """Declare a setting of the metadata store's login or TLS, which only the program's own help shows."""
    return _setting(flag, help, type, in_context=True, shown=Shown.PROGRAM, **more)


@dataclass(frozen=True, slots=True)
class GlobalOptions:
    """The options that stand before the group or after the command; None, False or empty where not given."""

    metadata_uri: str | None = _setting(
        "--metadata-uri",
        "Metadata store: zk://HOST:PORT/ledgers, etcd://HOST:PORT/SCOPE, sqlite:///FILE, or "
        "hbase://HOST:PORT/PREFIX: HOST is HBase's ZooKeeper, which keeps all but the ledgers.",
        short="-u",
        metavar="URI",
        in_context=True,
    )
    conf: Path | None = _setting(
        "--conf",
        "A bookie's bk_server.conf (or Pulsar's bookkeeper.conf): its cluster and directories.",
        ValueType.FILE,
        short="-c",
        shown=Shown.ALWAYS,
    )
    context: str | None = _setting(
        "--context", "A named connection of the configuration file.", short="-x", metavar="CONTEXT"
    )
    bundle: Path | None = _setting(
        "--bundle",
        "Read a bundle of 'diagnose bundle' in place of a cluster: metadata, health and load as they were.",
        ValueType.FILE,
        shown=Shown.PROGRAM,
    )
    bookie_addresses: tuple[str, ...] = _setting(
        "--bookie-address",
        "Reach bookie ID at HOST:PORT instead of its advertised address; repeatable.",
        ValueType.ADDRESSES,
        metavar="ID=HOST:PORT",
        in_context=True,
    )
    tls_ca: Path | None = _setting(
        "--tls-ca",
        "Use TLS to bookies; PEM file of the authorities that sign their certificates.",
        ValueType.FILE,
        in_context=True,
    )
    tls_certificate: Path | None = _setting(
        "--tls-cert",
        "Client certificate for bookies that require one (PEM, with --tls-ca).",
        ValueType.FILE,
        in_context=True,
    )
    tls_key: Path | None = _setting("--tls-key", "Private key of --tls-cert (PEM).", ValueType.FILE, in_context=True)
    metadata_tls: bool = _login("--metadata-tls", "Use TLS to the metadata store.", ValueType.SWITCH)
    metadata_tls_ca: Path | None = _login(
        "--metadata-tls-ca",
        "Use TLS to the metadata store, with these authorities (PEM) instead of the system's.",
        ValueType.FILE,
    )
    metadata_tls_certificate: Path | None = _login(
        "--metadata-tls-cert", "Client certificate for the metadata store (PEM).", ValueType.FILE
    )
    metadata_tls_key: Path | None = _login(
        "--metadata-tls-key", "Private key of --metadata-tls-cert (PEM).", ValueType.FILE
    )
    metadata_user: str | None = _login(
        "--metadata-user", "Log in to the metadata store: etcd, or ZooKeeper's digest scheme.", metavar="NAME"
    )
    metadata_password_file: Path | None = _login(
        "--metadata-password-file",
        "File with that user's password; BKCTL_METADATA_PASSWORD holds the password itself.",
        ValueType.FILE,
    )
    metadata_sasl: bool = _login(
        "--metadata-sasl", "Log in to ZooKeeper by SASL (DIGEST-MD5) instead.", ValueType.SWITCH
    )
    metadata_creator_acl: bool = _login(
        "--metadata-creator-acl",
        "Create ZooKeeper nodes for that user alone, as zkEnableSecurity in --conf.",
        ValueType.SWITCH,
    )
    timeout_s: float | None = _setting(
        "--timeout", "Longest wait without progress from a server (default 30s).", ValueType.DURATION
    )
    connect_timeout_s: float | None = _setting(
        "--connect-timeout",
        "Longest wait for a connection to a server (default 10s, or --timeout if that is shorter).",
        ValueType.DURATION,
    )
    output: Output | None = _setting(
        "--output",
        f"Form of output: {', '.join(Output)} (default table).",
        ValueType.OUTPUT,
        short="-o",
        metavar="FORM",
        shown=Shown.ALWAYS,
    )
    columns: tuple[str, ...] | None = _setting(
        "--columns",
        "Print only these columns, in this order, by their titles or JSON names: state,length.",
        ValueType.NAMES,
        metavar="NAME,…",
        shown=Shown.ALWAYS,
        has_variable=False,
    )
    sort: RowOrder | None = _setting(
        "--sort",
        "Sort the rows by this column; -COLUMN puts the largest first.",
        ValueType.ORDER,
        metavar="COLUMN",
        shown=Shown.ALWAYS,
        has_variable=False,
    )
    yes: bool = _setting(
        "--yes", "Do not ask before destroying.", ValueType.SWITCH, short="-y", shown=Shown.ASKS, has_variable=False
    )

    def over(self, defaults: GlobalOptions) -> GlobalOptions:
        """Return these options where they are given, else `defaults`; bookie addresses are added to those there."""
        given = {
            setting.field: value
            for setting in SETTINGS
            if (value := getattr(self, setting.field)) is not None and value is not False
        }
        given["bookie_addresses"] = defaults.bookie_addresses + self.bookie_addresses
        return replace(defaults, **given)

    def tls_files(self) -> tuple[str | None, str | None, str | None]:
        """Return the PEM files of the authorities, of the client certificate and of its key."""
        ca, certificate, key = (
            None if path is None else str(path) for path in (self.tls_ca, self.tls_certificate, self.tls_key)
        )
        return ca, certificate, key


SETTINGS: Final = tuple(Setting(each.name, **each.metadata) for each in fields(GlobalOptions))


def context_settings() -> Iterator[Setting]:
    """Yield the settings that a context may have."""
    return (setting for setting in SETTINGS if setting.in_context)


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
    visible = {
        Shown.ALWAYS: True,
        Shown.CONNECTS: connects,
        Shown.ASKS: asks,
        Shown.PROGRAM: program,
    }
    return tuple(
        setting.parameter(hidden=not visible[setting.shown]) for setting in SETTINGS if setting.flag not in taken
    )


def read_options(values: Mapping[str, Any]) -> GlobalOptions:
    """Return the values of `global_parameters`, by parameter name. Raises UsageError."""
    return GlobalOptions(
        **{
            each.field: each.from_option(values[each.parameter_name])
            for each in SETTINGS
            if each.parameter_name in values
        }
    )


def read_environment(environment: Mapping[str, str]) -> GlobalOptions:
    """Return the options that BKCTL_… variables give; an empty variable counts as absent. Raises UsageError."""
    given: dict[str, Any] = {}
    for setting in SETTINGS:
        if setting.variable is not None and (text := environment.get(setting.variable)):
            given[setting.field] = setting.from_variable(text)
    return GlobalOptions(**given)
