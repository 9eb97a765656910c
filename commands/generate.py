"""Writes completions, man pages, `docs/schemas/` and other generated documents from the commands.

`python -m bkctl.commands.generate` writes them below the current directory.
A test holds the files in the repository equal to what this makes.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, NamedTuple

from bkctl import __version__
from bkctl.bookie.local import STORAGE_CLASSES
from bkctl.errors import EXIT_CODES
from bkctl.files.directories import FileKind

from . import translations
from .kit import next_steps
from .kit.columns import Output
from .kit.command import Declaration, declaration_of
from .kit.documents import ERROR_SCHEMA
from .kit.parser import Group, help_record, shown_names
from .kit.settings import GLOBAL_PANEL, SETTINGS
from .main import GROUPS, RootGroup, root

#: The completion of a value, by the metavar of its option or argument.
DYNAMIC: Final = {
    "LEDGER": "ledger",
    "BOOKIE": "bookie",
    "JOURNAL": "journal",
    "LOG": "entrylog",
    "CONTEXT": "context",
    "SCOPE": "scope",
    "RACK": "rack",
}
FILES: Final = ("FILE", "DIR")
#: Values of options whose type does not say which there are, by name or metavar.
WORDS: Final = {
    "STATE": ("OPEN", "IN_RECOVERY", "CLOSED"),
    "--digest": ("CRC32C", "CRC32", "HMAC", "DUMMY"),
    "--digest-type": ("CRC32C", "CRC32", "HMAC", "DUMMY"),
    "--storage": tuple(STORAGE_CLASSES),
    "--kind": tuple(kind.value for kind in FileKind),
    "COMMAND": (*GROUPS, "connection", "exit-codes"),
}
#: A bar within a cell of a table.
BAR: Final = "\\|"
_ENVIRONMENT: Final = (
    *((setting.variable, f"As {setting.flag}.") for setting in SETTINGS if setting.variable is not None),
    ("BKCTL_METADATA_PASSWORD", "The password of --metadata-user, instead of --metadata-password-file."),
    (
        "BKCTL_AUDIT_LOG",
        "Where commands that change something are noted: a file instead of bkctl/audit.ndjson under XDG_STATE_HOME or "
        "~/.local/state, or none.",
    ),
    ("BKCTL_BOOKIE_URL", "As --bookie-url, where neither that nor --bookie is given."),
    ("BKCTL_API_TOKEN", "The token that goes to the HTTP servers of bookies and gateways, and that a gateway wants."),
    ("BKCTL_LEDGER_PASSWORD", "The ledger password of commands that take --password."),
    ("BKCTL_CONFIG", "The configuration file, instead of bkctl/config.toml under XDG_CONFIG_HOME or ~/.config."),
    ("NO_COLOR", "No colours, whatever it is set to."),
)
#: Files that bkctl keeps for a user, and their purpose.
_FILES: Final = (
    ("~/.config/bkctl/config.toml", "Contexts. XDG_CONFIG_HOME, or BKCTL_CONFIG for the file, moves it."),
    (
        "~/.local/state/bkctl/",
        "audit.ndjson and audit.ndjson.1, of 8 MiB at most: the log of commands that change something. undo/: files "
        "for 'bkctl metadata undo', kept until you delete them. progress/: the state of commands that work for long. "
        "XDG_STATE_HOME moves it.",
    ),
    (
        "~/.local/share/bkctl/",
        "cluster/: the local cluster. local-cluster: which local cluster is up. http/: tokens of running HTTP servers. "
        "XDG_DATA_HOME moves it.",
    ),
    ("~/.cache/bkctl/completion/", "Candidates for the shell's completion. XDG_CACHE_HOME moves it."),
)


class Option(NamedTuple):
    """An option or argument as the user sees it."""

    names: tuple[str, ...]
    metavar: str
    help: str
    choices: tuple[str, ...]
    is_flag: bool
    panel: str | None
    repeatable: bool


class Page(NamedTuple):
    """A command with all that its help says."""

    path: tuple[str, ...]
    usage: str
    help: str
    arguments: tuple[Option, ...]
    options: tuple[Option, ...]
    children: tuple[Page, ...]
    examples: tuple[str, ...]
    declaration: Declaration | None

    @property
    def own_options(self) -> tuple[Option, ...]:
        """The options without connection and output options and --help."""
        return tuple(each for each in self.options if each.panel != GLOBAL_PANEL and "--help" not in each.names)

    @property
    def groups(self) -> tuple[Page, ...]:
        """The children that have commands."""
        return tuple(child for child in self.children if child.children)

    @property
    def leaves(self) -> tuple[Page, ...]:
        """The children that are commands."""
        return tuple(child for child in self.children if not child.children)

    @property
    def name(self) -> str:
        """The words of the command, without `bkctl`."""
        return " ".join(self.path)

    @property
    def commands(self) -> Iterator[Page]:
        """The commands below this page, in order."""
        return (each for each in self.walk() if not each.children)

    def walk(self) -> Iterator[Page]:
        """Yield this page and all below it, in order."""
        yield self
        for child in self.children:
            yield from child.walk()


def read_pages() -> Page:
    """Return the tree of all commands."""
    tree: RootGroup = root()
    for name in GROUPS:
        tree.load(name)
    tree.load_program()
    return _page(tree, (), None)


def _page(command: Any, path: tuple[str, ...], parent: Any) -> Page:
    context = command.context_class(
        command, info_name=path[-1] if path else "bkctl", parent=parent, **command.context_settings
    )
    arguments: list[Option] = []
    options: list[Option] = []
    for param in command.get_params(context):
        record = help_record(param, context)
        if record is None:
            continue
        is_argument = param.param_type_name == "argument"
        choices = tuple(str(choice.value) for choice in param.type_descriptor.choices or ())
        metavar = param.metavar or ("|".join(choices) if choices else param.bare_type().upper())
        if not choices and "|" in metavar and "[" not in metavar:
            choices = tuple(word for word in metavar.split("|") if word.islower())
        option = Option(
            () if is_argument else (*sorted(shown_names(param), key=len),),
            "" if getattr(param, "is_flag", False) else metavar,
            re.sub(r"\s+", " ", record[1]).strip(),
            choices,
            bool(getattr(param, "is_flag", False)),
            getattr(param, "rich_help_panel", None),
            bool(getattr(param, "multiple", False)) or param.nargs == -1,
        )
        (arguments if is_argument else options).append(option)
    children: tuple[Page, ...] = ()
    if isinstance(command, Group):
        children = tuple(
            _page(child, (*path, name), context) for name, child in command.commands.items() if not child.hidden
        )
        if command.default is not None:
            # The group takes the options of the command that runs without a name.
            options = list(next(child for child in children if child.path[-1] == command.default).options)
    usage = " ".join(["bkctl", *path, *command.collect_usage_pieces(context)])
    examples = tuple((command.epilog or "").splitlines()) if path else ()
    return Page(
        path, usage, command.help or "", tuple(arguments), tuple(options), children, examples, declaration_of(command)
    )  # fmt: skip


# --- man ------------------------------------------------------------------------------------------------------------


def _troff(text: str) -> str:
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("\u2026", "...").replace("\u2019", "'")
    return "\n".join(f"\\&{line}" if line.startswith((".", "'")) else line for line in text.split("\n"))


def _man_options(options: tuple[Option, ...]) -> Iterator[str]:
    for option in options:
        names = ", ".join(f"\\fB{_troff(name)}\\fR" for name in option.names)
        metavar = f" \\fI{_troff(option.metavar)}\\fR" if option.metavar else ""
        yield f".TP\n{names}{metavar}" if names else f".TP\n\\fI{_troff(option.metavar)}\\fR"
        yield _troff(option.help)


def _man_paragraphs(text: str) -> Iterator[str]:
    for paragraph in text.split("\n\n"):
        yield f".PP\n{_troff(' '.join(paragraph.split()))}"


def _man_command(leaf: Page) -> Iterator[str]:
    yield f".SS {_troff(leaf.usage)}"
    yield from _man_paragraphs(leaf.help)
    yield from _man_options(leaf.arguments)
    yield from _man_options(leaf.own_options)
    if leaf.examples:
        yield ".PP\nExamples:\n.PP\n.nf"
        yield from (f"    {_troff(example)}" for example in leaf.examples)
        yield ".fi"


def man_page(tree: Page, group: Page | None, version: str) -> str:
    """Return one page in troff: the program's, or that of a group."""
    name = "bkctl" if group is None else f"bkctl-{group.path[0]}"
    page = tree if group is None else group
    summary = page.help.split("\n")[0].rstrip(".")
    lines = [
        f'.TH "{_troff(name.upper())}" "1" "" "bkctl {version}" "bkctl Manual"',
        ".SH NAME",
        f"{_troff(name)} \\- {_troff(summary[:1].lower() + summary[1:])}",
        ".SH SYNOPSIS",
        f"\\fB{_troff('bkctl' if group is None else 'bkctl ' + group.name)}\\fR [\\fIOPTIONS\\fR] \\fICOMMAND\\fR ...",
    ]
    if group is None:
        lines.append(".SH DESCRIPTION")
        lines.extend(_man_paragraphs(_DESCRIPTION))
        lines.append(".SH GROUPS")
        lines.extend(f".TP\n\\fB{_troff(f'bkctl-{each.name}')}\\fR(1)\n{_troff(each.help)}" for each in tree.groups)
        lines.append(".SH COMMANDS")
        for leaf in tree.leaves:
            lines.extend(_man_command(leaf))
        lines.append(".SH OPTIONS")
        lines.extend(_man_options(tree.options))
        lines.append(".SH ENVIRONMENT")
        for variable, text in _ENVIRONMENT:
            lines.append(f".TP\n\\fB{_troff(variable)}\\fR\n{_troff(text)}")
        lines.append(".SH FILES")
        lines.append(f".PP\n{_troff(_FILES_KEPT)}")
        for path, text in _FILES:
            lines.append(f".TP\n\\fI{_troff(path)}\\fR\n{_troff(text)}")
    else:
        lines.append(".SH COMMANDS")
        for leaf in group.commands:
            lines.extend(_man_command(leaf))
        lines.append(".SH OPTIONS")
        lines.append(
            f".PP\n{_troff('Connection and output options, as --output and --metadata-uri, are in')} \\fBbkctl\\fR(1)."
        )
    lines.append(".SH EXIT STATUS")
    for code, meaning in EXIT_CODES.items():
        lines.append(f".TP\n\\fB{code}\\fR\n{_troff(meaning)}")
    others = ["bkctl(1)"] if group is not None else []
    others += [f"bkctl-{child.name}(1)" for child in tree.groups if child is not group]
    lines += [".SH SEE ALSO", ", ".join(f"\\fB{_troff(each[:-3])}\\fR(1)" for each in others)]
    return "\n".join(lines) + "\n"


_DESCRIPTION: Final = """\
bkctl administers Apache BookKeeper: running clusters, the files of a bookie that runs or is dead, and clusters of \
its own bookies. Every ledger id has 128 bits (BP-35): a ledger scope id and a ledger id.

A ledger is named by a decimal or 0x ledger id, by SCOPE:ID, by its qualified name of 32 hex digits, or by a UUID.

Connection and output options stand before the group or after the command; the later one counts. Without any the \
environment counts, then the current context of the configuration file, then the local cluster that is up.

A program bkctl-NAME on the PATH is the command bkctl NAME, unless bkctl has a command of that name. It gets the words \
behind the name, and options before it as BKCTL_ variables. Help lists such programs.

Data goes to stdout, all else to stderr, where errors and warnings begin with bkctl:; the error that ends a command is \
an object with -o json. -o json prints one document, ndjson one object a line, csv a header and rows, id the keys \
alone. Ledger ids are strings in JSON, binary data is base64, times are ISO 8601 in UTC."""

_FILES_KEPT: Final = """\
bkctl keeps these for each user. Uninstalling bkctl leaves them: delete them by hand."""


# --- docs/commands.md -----------------------------------------------------------------------------------------------


def _markdown_options(options: tuple[Option, ...]) -> Iterator[str]:
    for option in options:
        head = ", ".join(option.names) or option.metavar
        metavar = f" {option.metavar}" if option.metavar and option.names else ""
        text = option.help.replace("|", BAR).replace("<", "&lt;")
        yield f"| `{f'{head}{metavar}'.replace('|', BAR)}` | {text} |"


def _markdown_command(leaf: Page) -> Iterator[str]:
    yield from (f"### bkctl {leaf.name}", "", f"    {leaf.usage}", "")
    for paragraph in leaf.help.split("\n\n"):
        yield from (" ".join(paragraph.split()), "")
    if leaf.arguments or leaf.own_options:
        yield from ("| option | |", "| --- | --- |")
        yield from (*_markdown_options(leaf.arguments), *_markdown_options(leaf.own_options), "")
    if leaf.examples:
        yield from ("Examples:", "", *(f"    {example}" for example in leaf.examples), "")


def markdown(tree: Page) -> str:
    """Return the reference of all commands."""
    lines = ["# Commands", "", "Generated by `python -m bkctl.commands.generate`.", ""]
    for paragraph in _DESCRIPTION.split("\n\n"):
        lines += [paragraph, ""]
    lines += ["## Options of every command", "", "| option | |", "| --- | --- |"]
    lines += [*_markdown_options(tree.options), ""]
    lines += ["## Exit codes", "", "| code | meaning |", "| --- | --- |"]
    lines += [*(f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items()), ""]
    lines += ["## Files", "", _FILES_KEPT, "", "| path | |", "| --- | --- |"]
    lines += [*(f"| `{path}` | {text} |" for path, text in _FILES), ""]
    lines += ["## bkctl", ""]
    for leaf in tree.leaves:
        lines += _markdown_command(leaf)
    for group in tree.groups:
        lines += [f"## {group.name}", "", group.help, ""]
        for leaf in group.commands:
            lines += _markdown_command(leaf)
    return "\n".join(lines).rstrip() + "\n"


# --- completions ----------------------------------------------------------------------------------------------------


class SharedOptions:
    """All options of the commands, each once, and the lists of them that many commands end with.

    A new command adds lines to a script and changes no other: an option is keyed by its name, with a hash where
    most options of that name differ from it; a list of connection and output options by the first command with it.
    """

    def __init__(self, tree: Page) -> None:
        counts = Counter(option for page in tree.walk() for option in page.options)
        self._keys: dict[Option, str] = {}
        for option, _ in counts.most_common():
            key = next(filter(_is_long, option.names))
            taken = key in self._keys.values()
            self._keys[option] = f"{key}.{hashlib.sha256(repr(option).encode()).hexdigest()[:4]}" if taken else key
        self.options = tuple((key, option) for option, key in sorted(self._keys.items(), key=itemgetter(1)))
        self._endings: dict[tuple[Option, ...], str] = {}
        for page in tree.walk():
            if page.path:
                self._endings.setdefault(_split(page)[1], "_".join(["end", *page.path]).replace("-", "_"))
        self.endings = tuple((name, ending) for ending, name in self._endings.items())

    def keys(self, options: Iterable[Option]) -> str:
        """Return the keys of `options`, separated by spaces."""
        return " ".join(self._keys[option] for option in options)

    def of(self, page: Page) -> tuple[tuple[Option, ...], str]:
        """Return the options that `page` has before its ending, and `$NAME` of that ending, or ""."""
        own, ending = _split(page)
        return (own, f"${self._endings[ending]}") if ending in self._endings else (page.options, "")


def _split(page: Page) -> tuple[tuple[Option, ...], tuple[Option, ...]]:
    """Split the options of a page before its connection and output options and --help."""
    own = page.own_options
    return own, page.options[len(own) :]


def _value_kind(option: Option) -> str:
    """Return how a value is completed: `words a b`, `files`, `ledger` … or `none`."""
    words = option.choices or next((WORDS[name] for name in option.names if name in WORDS), ())
    if words or option.metavar in WORDS:
        return "words " + " ".join(words or WORDS[option.metavar])
    if option.names and "--output" in option.names:
        return f"words {' '.join(Output)}"
    if option.metavar in DYNAMIC:
        return DYNAMIC[option.metavar]
    if option.metavar in FILES:
        return "files"
    return "none"


def _option_names(tree: Page, is_wanted: Callable[[Option], bool]) -> list[str]:
    """Return the names of the options that are wanted, sorted."""
    return sorted({name for page in tree.walk() for option in filter(is_wanted, page.options) for name in option.names})


def _value_takers(tree: Page) -> list[str]:
    return _option_names(tree, lambda option: not option.is_flag)


def _sh(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def bash_completion(tree: Page) -> str:
    """Return the bash script."""
    shared = SharedOptions(tree)

    def names(options: Iterable[Option]) -> str:
        return " ".join(map(_long_names, options))

    cases: list[str] = []
    for page in tree.walk():
        own, ending = shared.of(page)
        at = " ".join(filter(None, [names(own), ending]))
        words = f" words={_sh(' '.join(child.path[-1] for child in page.children))}" if page.children else ""
        argument = f" argument={_sh(_value_kind(page.arguments[0]))}" if page.arguments else ""
        cases.append(f'{_sh(page.name)}) at="{at}"{words}{argument} ;;')
    options = [option for page in tree.walk() for option in page.options]
    shorts = {name: option.names[-1] for option in options for name in option.names if not _is_long(name)}
    return (
        _BASH.replace("@ENDINGS@", "\n".join(f"  local {name}={_sh(names(end))}" for name, end in shared.endings))
        .replace("@CASES@", "\n".join(cases))
        .replace("@SHORTS@", " ".join(f"{short}) previous={long} ;;" for short, long in shorts.items()))
        .replace("@KINDS@", "\n".join(_bash_kinds(tree)))
        .replace("@TAKERS@", " ".join(_value_takers(tree)))
        .replace("@REPEATABLE@", " ".join(_option_names(tree, lambda option: option.repeatable)))
        .replace("@GROUPS@", "|".join(_sh(page.name) for page in tree.walk() if page.children and page.path))
    )


def _long_names(option: Option) -> str:
    return " ".join(filter(_is_long, option.names))


def _bash_kinds(tree: Page) -> Iterator[str]:
    """Yield the cases that choose what completes the value of an option: exceptions of commands, then the rule."""
    options = [
        (page.name, name, "" if option.is_flag else _value_kind(option))
        for page in tree.walk()
        for option in page.options
        for name in filter(_is_long, option.names)
    ]
    kinds: dict[str, Counter[str]] = {}
    for _, name, kind in options:
        kinds.setdefault(name, Counter())[kind] += 1
    rules = {name: counts.most_common(1)[0][0] for name, counts in kinds.items()}
    exceptions: dict[str, list[str]] = {}
    for page_name, name, kind in options:
        if kind != rules[name]:
            exceptions.setdefault(kind, []).append(_sh(f"{page_name}:{name}"))
    for kind, places in exceptions.items():
        yield f"{'|'.join(places)}) kind={_sh(kind)} ;;"
    by_kind: dict[str, list[str]] = {}
    for name, kind in rules.items():
        # The script itself completes nothing behind a name that takes a value anywhere.
        if kind != "none" and (kind or len(kinds[name]) > 1):
            by_kind.setdefault(kind, []).append(name)
    for kind, names in by_kind.items():
        yield f"{'|'.join(f'*:{name}' for name in names)}) kind={_sh(kind)} ;;"


def _is_long(name: str) -> bool:
    return name.startswith("--")


_BASH: Final = r"""# bash completion for bkctl; generated by python -m bkctl.commands.generate

_bkctl() {
  local IFS=$' \t\n' line current previous path='' words='' argument='none' kind='' word skip='' open=yes
  local takers=' @TAKERS@ '
  local -a typed
  line=${COMP_LINE:0:COMP_POINT}
  read -r -a typed <<< "$line"
  [[ $line == *' ' ]] && typed+=('')
  current=${typed[-1]}
  previous=${typed[-2]:-}
  local value=$current repeatable=' @REPEATABLE@ '
  if [[ $current == --*=* ]]; then previous=${current%%=*} value=${current#*=} argument=none; fi
  for word in "${typed[@]:1:${#typed[@]}-2}"; do
    if [[ -n $skip ]]; then skip=''; continue; fi
    case $word in
      -*) [[ $takers == *" $word "* ]] && skip=yes ;;
      *)
        if [[ $open == yes ]]; then
          path="${path:+$path }$word"
          case $path in @GROUPS@) ;; *) open='' ;; esac
        fi ;;
    esac
  done
  local at=''
@ENDINGS@
  case $path in
@CASES@
  esac
  words+=" $at"
  case $previous in @SHORTS@ esac
  if [[ $previous == -* && " $words " == *" $previous "* ]]; then
    case "$path:$previous" in
@KINDS@
*) [[ $takers == *" $previous "* ]] && kind='none' ;;
    esac
  fi
  words+=' '
  for word in "${typed[@]:1:${#typed[@]}-2}"; do
    word=${word%%=*}
    [[ $word == --* && $repeatable != *" $word "* ]] && words=${words/ $word / }
  done
  COMPREPLY=()
  if [[ -z $kind && $current == --*=* ]]; then kind=none; fi
  if [[ -z $kind ]]; then
    if [[ $current == -* || $argument == none ]]; then kind="words $words"; else kind=$argument; fi
  fi
  case $kind in
    words*) mapfile -t COMPREPLY < <(compgen -W "${kind#words}" -- "$value") ;;
    files) compopt -o default 2>/dev/null ;;
    none) ;;
    *) mapfile -t COMPREPLY < <(_BKCTL_COMPLETE=$kind "${typed[0]}" "${typed[@]:1:${#typed[@]}-2}" "$value" 2>/dev/null)
       [[ ${#COMPREPLY[@]} -eq 0 && $kind != ledger && $kind != bookie ]] && compopt -o default 2>/dev/null ;;
  esac
  # A word that holds a colon is several words to readline: give it only what follows the last colon.
  if [[ $value == *:* && $COMP_WORDBREAKS == *:* ]]; then
    local prefix=${value%"${value##*:}"} index
    for index in "${!COMPREPLY[@]}"; do COMPREPLY[index]=${COMPREPLY[index]#"$prefix"}; done
  elif [[ $value != "$current" && $COMP_WORDBREAKS != *=* ]]; then
    COMPREPLY=("${COMPREPLY[@]/#/$previous=}")
  fi
}

complete -F _bkctl bkctl
"""


def zsh_completion(tree: Page) -> str:
    """Return the zsh function, for a directory of fpath."""
    shared = SharedOptions(tree)
    options = "\n".join(f"{_sh(key)} {_zsh_option(option)}" for key, option in shared.options)
    endings = "\n".join(f"  local -a {name}=({shared.keys(ending)})" for name, ending in shared.endings)
    cases: list[str] = []
    for page in tree.walk():
        own, ending = shared.of(page)
        at = " ".join(filter(None, [shared.keys(own), ending]))
        rest = " ".join(_sh(_zsh_argument(argument)) for argument in page.arguments)
        cases.append(f"{_sh(page.name)}) at=({at})" + (f" rest=({rest})" if rest else "") + " ;;")
    groups: list[str] = []
    for page in tree.walk():
        if page.children:
            lines = "\n".join(f"{_sh(f'{child.path[-1]}:{_zsh_text(_summary(child))}')}" for child in page.children)
            groups.append(f"{_sh(page.name)}) commands=(\n{lines}) ;;")
    return (
        _ZSH.replace("@OPTIONS@", options)
        .replace("@ENDINGS@", endings)
        .replace("@CASES@", "\n".join(cases))
        .replace("@GROUPS@", "\n".join(groups))
    )


_ZSH: Final = r"""#compdef bkctl
# generated by python -m bkctl.commands.generate

_bkctl_dynamic() {
  local -a found
  found=(${(f)"$(_BKCTL_COMPLETE=$1 "${(Q)bkctl_words[@]}" 2>/dev/null)"})
  if (( $#found )); then compadd -- $found; elif [[ $1 != (ledger|bookie) ]]; then _files; fi
}

_bkctl_options() {
  typeset -gA _bkctl_specs=(
@OPTIONS@
  )
}

# Complete the words behind the command $1: a group ("" is bkctl itself), or a command.
_bkctl_at() {
  local state line name=$1
  local -a at rest commands specs
@ENDINGS@
  case $name in
@CASES@
  esac
  for state in $at; do
    for line in ${=_bkctl_specs[$state]%%|*}; do specs+=("$line${_bkctl_specs[$state]#*|}"); done
  done
  specs+=($rest)
  case $name in
@GROUPS@
    *) _arguments "$specs[@]"; return ;;
  esac
  _arguments -C "$specs[@]" '1: :->command' '*:: :->rest'
  case $state in
    command) _describe command commands ;;
    rest) (( ${commands[(I)${(b)line[1]}:*]} )) && _bkctl_at "${name:+$name }$line[1]" ;;
  esac
}

_bkctl() {
  local -a bkctl_words=("${(@)words[1,CURRENT]}")
  (( $+_bkctl_specs )) || _bkctl_options
  _bkctl_at ''
}

# A function of fpath runs; a script that is sourced registers the function, and sets completion up where nothing did.
if [[ $funcstack[1] == _bkctl ]]; then
  _bkctl "$@"
else
  (( $+functions[compdef] )) || { autoload -Uz compinit && compinit -i }
  compdef _bkctl bkctl
fi
"""


def _summary(page: Page) -> str:
    return page.help.split("\n")[0]


def _zsh_text(text: str) -> str:
    for char in "\\[]:":
        text = text.replace(char, "\\" + char)
    return text


def _zsh_action(option: Option) -> str:
    kind = _value_kind(option)
    if kind.startswith("words "):
        return f"({kind.removeprefix('words ')})"
    return {"files": "_files", "none": " "}.get(kind, f"{{_bkctl_dynamic {kind}}}")


def _zsh_option(option: Option) -> str:
    """Return an option as one word of zsh: its names, a bar, and the rest of their specification."""
    value = "" if option.is_flag else f":{_zsh_text(option.metavar)}:{_zsh_action(option)}"
    star = "*" if option.repeatable else ""
    names = " ".join(f"{star}{name}{'=' if _is_long(name) and not option.is_flag else ''}" for name in option.names)
    return _sh(f"{names}|[{_zsh_text(option.help)}]{value}")


def _zsh_argument(argument: Option) -> str:
    return f"{'*' if argument.repeatable else ''}:{_zsh_text(argument.metavar)}:{_zsh_action(argument)}"


def fish_completion(tree: Page) -> str:
    """Return the fish script."""
    shared = SharedOptions(tree)
    cases: list[str] = []
    groups: list[str] = []
    for page in tree.walk():
        own, ending = shared.of(page)
        argument = "commands" if page.children else _fish_argument(page)
        ids = " ".join(filter(None, [argument, shared.keys(own), ending]))
        cases.append(f"case {_sh(page.name)}; set ids {ids}")
        if page.children:
            lines = " ".join(f"{child.path[-1]} {_sh(_summary(child))}" for child in page.children)
            groups.append(f"case {_sh(page.name)}; printf '%s\\t%s\\n' {lines}")
    options = []
    for key, option in shared.options:
        names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names)
        options.append(f"__bkctl {key} {names}{'' if option.is_flag else _fish_value(option)} -d {_sh(option.help)}")
    for page in {_fish_argument(page): page for page in tree.walk() if page.arguments}.values():
        value = _fish_value(page.arguments[0]).replace(" -r -F", " -F").replace(" -x", " -f")
        options.append(f"__bkctl {_fish_argument(page)}{value}")
    return (
        _FISH.replace("@TAKERS@", "|".join(_value_takers(tree)))
        .replace("@NESTED@", " ".join(_sh(page.name) for page in tree.walk() if page.children and len(page.path) == 2))
        .replace(
            "@ENDINGS@",
            "\n".join(f"    set -l {name} {shared.keys(end)}" for name, end in shared.endings),
        )
        .replace("@CASES@", "\n".join(cases))
        .replace("@GROUPS@", "\n".join(groups))
        .replace("@OPTIONS@", "\n".join(options))
    )


def _fish_argument(page: Page) -> str:
    """Return the name for how the first argument of a command is completed, "" without one."""
    return _value_kind(page.arguments[0]).replace(" ", "-") if page.arguments else ""


def _fish_value(option: Option) -> str:
    kind = _value_kind(option)
    if kind.startswith("words "):
        return f" -x -a {_sh(kind.removeprefix('words '))}"
    if kind == "files":
        return " -r -F"
    return " -x" if kind == "none" else f" -x -a {_sh(f'(__bkctl_dynamic {kind})')}"


_FISH: Final = r"""# fish completion for bkctl; generated by python -m bkctl.commands.generate

function __bkctl_path
    set -l path
    set -l skip 0
    for word in (commandline -opc)[2..-1]
        if test $skip = 1
            set skip 0
        else if string match -q -- '-*' $word
            string match -qr -- '^(@TAKERS@)$' $word; and set skip 1
        else if test (count $path) -lt 2; or contains -- "$path" @NESTED@
            set -a path $word
        end
    end
    echo "$path"
end

function __bkctl_has
    set -l line (commandline -cp | string collect)
    if test "$line" != "$__bkctl_line"
        set -l ids
@ENDINGS@
        switch (__bkctl_path)
@CASES@
        end
        set -g __bkctl_line $line
        set -g __bkctl_ids $ids
    end
    contains -- $argv[1] $__bkctl_ids
end

function __bkctl_commands
    switch (__bkctl_path)
@GROUPS@
    end
end

function __bkctl_dynamic
    set -l words (commandline -opc) (commandline -ct)
    _BKCTL_COMPLETE=$argv[1] $words[1] $words[2..-1] 2>/dev/null
end

function __bkctl
    complete -c bkctl -n "__bkctl_has $argv[1]" $argv[2..-1]
end

complete -c bkctl -n '__bkctl_has commands' -f -a '(__bkctl_commands)'
@OPTIONS@
functions -e __bkctl
"""


# --- writing --------------------------------------------------------------------------------------------------------


def completion_script(shell: str) -> str:
    """Return the completion script of `bash`, `zsh` or `fish`."""
    return {"bash": bash_completion, "zsh": zsh_completion, "fish": fish_completion}[shell](read_pages())


def generated_files() -> dict[str, str]:
    """Return the generated files: path below the repository's root → content."""
    tree = read_pages()
    files = {
        "completions/bkctl.bash": bash_completion(tree),
        "completions/_bkctl": zsh_completion(tree),
        "completions/bkctl.fish": fish_completion(tree),
        "docs/commands.md": markdown(tree),
        "docs/from-the-shell.md": translations.markdown(),
        "docs/health.md": next_steps.markdown(),
        "man/bkctl.1": man_page(tree, None, __version__),
    }
    files["docs/schemas/error.json"] = _schema_text(ERROR_SCHEMA)
    for page in tree.commands:
        if page.declaration is not None and page.declaration.prints:
            files[f"docs/schemas/{'-'.join(page.path)}.json"] = _schema_text(page.declaration.schema(page.name))
    for group in tree.groups:
        files[f"man/bkctl-{group.name}.1"] = man_page(tree, group, __version__)
    return files


def _schema_text(schema: dict[str, Any]) -> str:
    return json.dumps(schema, indent=2) + "\n"


def main() -> None:
    """Write the files below the directory given (default: the current one)."""
    base = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    for name, content in generated_files().items():
        path = base / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


if __name__ == "__main__":
    main()
