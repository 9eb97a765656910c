"""The programs of Pulsar's `bin/` that its Helm chart runs: `bookkeeper`, `pulsar`, and those that write settings.

Each name and option of theirs is declared once, with the words of ours. Source: bin/bookkeeper, bin/pulsar,
BookieShell, docker/pulsar/scripts/apply-config-from-env.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

from bkctl.errors import BkctlError, UsageError
from bkctl.redaction import is_secret_name
from bkctl.rocksdb_conf import PREFIX, update_from_env

from .main import error_report, run
from .translations import TRANSLATIONS

CONF: Final = "conf/bookkeeper.conf"
_YES: Final = "-y"
#: The shell's options, `short long` without dashes, and ours: `{}` stands for a value, "" is done anyway, and
#: `> COMMAND` is another command.
OPTIONS_OF_THE_SHELL: Final[dict[str, dict[str, str]]] = {
    "autorecovery": {
        "e enable": "> autorecovery enable", "d disable": "> autorecovery disable",
        "s status": "> autorecovery status",
    },
    "bookieformat": {"n nonInteractive": "", "f force": "", "d deleteCookie": "--delete-cookie"},
    "decommissionbookie": {"bookieid": "{}"},
    "deleteledger": {"l ledgerid": "--ledger-id={}", "f force": _YES},
    "endpointinfo": {"b bookieid": "{}"},
    "ledgermetadata": {"l ledgerid": "--ledger-id={}"},
    "listbookies": {
        "rw readwrite": "--state=rw", "ro readonly": "--state=ro", "a all": "--state=all", "h hostnames": "",
    },
    "listledgers": {"m meta": "", "bookieid": "--bookie={}"},
    "listunderreplicated": {
        "mr missingreplica": "--missing={}", "emr excludingmissingreplica": "--not-missing={}",
        "pmr printmissingreplica": "", "prw printreplicationworkerid": "", "c onlydisplayledgercount": "--count",
    },
    "lostbookierecoverydelay": {"g get": "", "s set": "{}"},
    "metaformat": {"n nonInteractive": "", "f force": ""},
    "nukeexistingcluster": {"p zkledgersrootpath": "", "i instanceid": "--yes-really={}", "f force": ""},
    "readledger": {
        "l ledgerid": "--ledger-id={}", "fe firstentryid": "--from={}", "le lastentryid": "--to={}",
        "b bookie": "--bookie={}", "r force-recovery": "--recover", "m msg": "--body",
    },
    "recover": {
        "q query": "--query", "dr dryrun": "--dry-run", "f force": _YES, "l ledger": "--ledger={}",
        "sk skipOpenLedgers": "--skip-open", "d deleteCookie": "--delete-cookie",
        "sku skipUnrecoverableLedgers": "--skip-unrecoverable",
    },
    "simpletest": {
        "e ensemble": "--ensemble-size={}", "w writeQuorum": "--write-quorum={}", "a ackQuorum": "--ack-quorum={}",
        "n numEntries": "--entries={}",
    },
}  # fmt: skip
#: Options with a value that is not one of ours.
_VALUES: Final = frozenset({"p zkledgersrootpath"})
#: Commands that never ask in Java.
_UNASKED: Final = frozenset({"decommissionbookie"})
_SHELL: Final = {each.shell: each.ours for each in TRANSLATIONS if each.shell} | {"bookieinit": "bookie init"}
#: Programs of bin/bookkeeper and bin/pulsar.
_SERVERS: Final = {"bookie": ("bookie", "start"), "autorecovery": ("autorecovery", "run")}
#: Variables with options of a JVM.
_JVM: Final = ("BOOKIE_EXTRA_OPTS", "BOOKIE_GC", "BOOKIE_MEM", "OPTS", "PULSAR_EXTRA_OPTS", "PULSAR_GC", "PULSAR_MEM")


def shell_words(name: str, arguments: list[str]) -> tuple[list[str], set[str]]:
    """Return our words for a command of the shell, and the names (`short long`) of the options that were given.

    Raises UsageError for a command or an option that is not known.
    """
    if name not in _SHELL:
        raise UsageError(f"No such command of the shell: {name}", hint="'bkctl --help' lists ours")
    command, words, given = _SHELL[name], [_YES] * (name in _UNASKED), set[str]()
    known = {short: each for each in OPTIONS_OF_THE_SHELL.get(name, {}) for short in each.split()}
    rest = iter(arguments)
    for argument in rest:
        option, equals, value = argument.lstrip("-").partition("=")
        if not argument.startswith("-") or argument == "-":
            words.append(argument)
            continue
        if option not in known:
            raise UsageError(f"{name}: {argument} has no counterpart", hint=f"see 'bkctl {command} --help'")
        given.add(known[option])
        ours = OPTIONS_OF_THE_SHELL[name][known[option]]
        if "{}" in ours or known[option] in _VALUES:
            text = value if equals else next(rest, None)
            if text is None:
                raise UsageError(f"{name}: {argument} needs a value")
            ours = ours.format(text)
        if ours.startswith("> "):
            command = ours[2:]
        elif ours:
            words.append(ours)
    return [*command.split(), *words], given


def _shell(conf: str, arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("help", "-h", "-help", "--help"):
        print(
            "bin/bookkeeper shell COMMAND [OPTIONS], by 'bkctl':",
            *(f"  {a} → {b}" for a, b in _SHELL.items()),
            sep="\n",
        )
        return 0 if arguments else 2
    name, *rest = arguments
    words, given = shell_words(name, rest)
    is_forced = "f force" in given and ("n nonInteractive" in given or name == "nukeexistingcluster")
    if name == "bookieformat" and is_forced:
        words.append(f"--yes-really={_bookie_id(conf)}")
    elif name == "nukeexistingcluster" and is_forced and "i instanceid" not in given:
        words.append(f"--yes-really={_instance_id(conf)}")
    elif name == "metaformat":
        return _format_metadata(conf, is_forced)
    return run([*words, "--conf", conf])


def _format_metadata(conf: str, is_forced: bool) -> int:
    found = _instance_id(conf)
    if found:
        code = run(["cluster", "nuke", *([f"--yes-really={found}"] if is_forced else []), "--conf", conf])
        if code:
            return code
    return run(["cluster", "init", "--conf", conf])


def _instance_id(conf: str) -> str:
    """Return the cluster's instance id, "" before there is one."""
    command = [sys.executable, "-m", "bkctl", "cluster", "id", "-o", "id", "--conf", conf]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout.strip()


def _bookie_id(conf: str) -> str:
    from bkctl.bookie.cookies import bookie_id_of
    from bkctl.config import BookieConfig

    return bookie_id_of(BookieConfig.load(conf))


def _serve(program: str, conf: str, arguments: list[str]) -> int:
    """Run a bookie or auto-recovery; `arguments` can name another file of settings."""
    if arguments and (len(arguments) != 2 or arguments[0] not in ("-c", "-conf", "--conf")):
        raise UsageError(f"{program}: unknown arguments {' '.join(arguments)}", hint="only --conf FILE is known")
    if given := [name for name in _JVM if os.environ.get(name)]:
        _say(f"{', '.join(given)} have no effect: no JVM runs here; dbStorage_writeCacheMaxSizeMb and "
             "dbStorage_readAheadCacheMaxSizeMb size a bookie's caches")  # fmt: skip
    return run([*_SERVERS[program], "--conf", arguments[1] if arguments else conf])


def _take_zookeeper_tls() -> None:
    """Let ZooKeeper's TLS options for a JVM, which the chart writes into conf/*env.sh, configure bkctl."""
    texts = [os.environ.get(name, "") for name in _JVM]
    texts += [path.read_text() for name in ("pulsar_env.sh", "bkenv.sh") if (path := Path("conf", name)).exists()]
    options = dict(re.findall(r"-Dzookeeper\.([\w.]+)=([^\s\"\\]+)", "\n".join(texts)))
    if options.get("client.secure") != "true":
        return
    files = {"CA": "ssl.trustStore.location", "CERT": "ssl.keyStore.location", "KEY": "ssl.keyStore.location"}
    os.environ.setdefault("BKCTL_METADATA_TLS", "1")
    for name, option in files.items():
        if option in options:
            os.environ.setdefault(f"BKCTL_METADATA_TLS_{name}", options[option])


def _zookeeper_shell(arguments: list[str]) -> int:
    """Run `ls`, `get` or `create`, as the chart's jobs do. Source: ZooKeeperMain."""
    from kazoo.client import KazooClient
    from kazoo.exceptions import KazooException
    from kazoo.handlers.threading import KazooTimeoutError

    words = [word for word in arguments if word != "-r"]
    servers = "localhost:2181"
    if words[:1] == ["-server"] and len(words) > 1:
        servers, words = words[1], words[2:]
    if len(words) < 2 or words[0] not in ("ls", "get", "create"):
        raise UsageError("zookeeper-shell knows ls, get and create PATH only", hint="use Pulsar's own image for others")
    of = os.environ.get
    files = {"ca": of("BKCTL_METADATA_TLS_CA"), "certfile": of("BKCTL_METADATA_TLS_CERT")}
    client = KazooClient(
        servers, use_ssl="BKCTL_METADATA_TLS" in os.environ, keyfile=of("BKCTL_METADATA_TLS_KEY"), **files
    )
    try:
        client.start()
        if words[0] == "create":
            print("Created", client.create(words[1], " ".join(words[2:]).encode()))
        elif words[0] == "ls":
            print(f"[{', '.join(sorted(client.get_children(words[1])))}]")
        else:
            print(client.get(words[1])[0].decode(errors="replace"))
    except (KazooException, KazooTimeoutError) as error:
        raise BkctlError(f"{words[0]} {words[1]} at {servers}: {type(error).__name__} {error}") from error
    finally:
        client.stop()
        client.close()
    return 0


def _bookkeeper(arguments: list[str]) -> int:
    conf = os.environ.get("BOOKIE_CONF") or CONF
    return _run_named(arguments, conf, {"shell": partial(_shell, conf)}, "bin/bookkeeper {} is not here", "{}")


def _pulsar(arguments: list[str]) -> int:
    conf = os.environ.get("PULSAR_BOOKKEEPER_CONF") or CONF
    programs = {"zookeeper-shell": _zookeeper_shell, "version": lambda _: run(["version"])}
    unknown = "bin/pulsar {} is not in the image of a bookie"
    return _run_named(arguments, conf, programs, unknown, "{}; else Pulsar's image")


def _run_named(
    arguments: list[str], conf: str, programs: dict[str, Callable[[list[str]], int]], unknown: str, known: str
) -> int:
    """Run the server, or one of `programs`, that the first argument names. Raises UsageError for other names."""
    name, *rest = arguments or [""]
    _take_zookeeper_tls()
    programs |= {server: partial(_serve, server, conf) for server in _SERVERS}
    if name not in programs:
        raise UsageError(unknown.format(name), hint=f"one of {known.format(', '.join(programs))}")
    return programs[name](rest)


def apply_env(path: Path, prefix: str, env: Mapping[str, str] = os.environ) -> list[str]:
    """Replace settings in a file by variables named as its keys, comments included, or `prefix` and a key.

    The last line of a key is replaced; keys that the file lacks are appended. Returns what was done, a line each.
    """
    lines = path.read_text().splitlines(keepends=True)
    places: dict[str, int] = {}
    for index, line in enumerate(lines):
        key, equals, _ = line.strip().partition("=")
        if equals:
            places[key.removeprefix("#").strip()] = index
    done = []

    def put(word: str, key: str, value: str) -> None:
        value = value.strip()
        shown = "********" if is_secret_name(key) else value
        done.append(f"[{path}] {word} config {key} = {shown}")
        text = f"{key}={value}\n"
        if key in places:
            lines[places[key]] = text
        else:
            lines.append(text)

    for key in sorted(env.keys() & places.keys()):
        put("Applying", key, env[key])
    lines.append("\n")  # The last line may lack its end.
    for variable in sorted(each for each in env if each.startswith(prefix)):
        key = variable.removeprefix(prefix)
        put("Updating" if key in places else "Adding", key, env[variable])
    path.write_text("".join(lines))
    return done


def _apply_config(arguments: list[str]) -> int:
    from argparse import ArgumentParser

    parser = ArgumentParser(description="Replace settings of files by environment variables.")
    parser.add_argument("--prefix", default=PREFIX, help="of variables whose keys are added, too (%(default)s)")
    parser.add_argument("files", nargs="+", type=Path)
    given = parser.parse_args(arguments)
    for path in given.files:
        print(*apply_env(path, given.prefix), sep="\n")
    return 0


def _update_rocksdb(arguments: list[str]) -> int:
    update_from_env(Path(arguments[0] if arguments else "conf/entry_location_rocksdb.conf"))
    return 0


def _say(text: str) -> None:
    print(f"{Path(sys.argv[0]).name}: {text}", file=sys.stderr)


PROGRAMS: Final[dict[str, Callable[[list[str]], int]]] = {
    "apply-config-from-env.py": _apply_config,
    "bookkeeper": _bookkeeper,
    "pulsar": _pulsar,
    "update-rocksdb-conf-from-env.py": _update_rocksdb,
}


def main() -> None:
    """Run the program that this process was started as."""
    from .kit.interrupts import end_at_once

    end_at_once()
    try:
        code = PROGRAMS[Path(sys.argv[0]).name](sys.argv[1:])
    except (BkctlError, OSError) as error:
        report = error_report(error)
        _say(report.line)
        code = report.exit_code
    sys.exit(code)
