"""Writes `completions/`, `man/` and `docs/commands.md` from the commands: `python -m bkctl.commands.generate`.

A test holds the files in the repository equal to what this makes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from bkctl.errors import EXIT_CODES

from ._command import Group
from ._options import GLOBAL_PANEL
from .main import GROUPS, RootGroup, root

#: What a value is completed with: by the metavar of its option or argument.
DYNAMIC: Final = {"LEDGER": "ledger", "BOOKIE": "bookie", "JOURNAL": "journal", "LOG": "entrylog", "CONTEXT": "context"}
FILES: Final = ("FILE", "DIR")
#: A bar within a cell of a table.
BAR: Final = "\\|"
_ENVIRONMENT: Final = (
    ("BKCTL_METADATA_URI, BKCTL_CONF, BKCTL_CONTEXT", "Where to connect, where no option says it."),
    ("BKCTL_BOOKIE_ADDRESS", "As --bookie-address; several are separated by spaces or commas."),
    ("BKCTL_TLS_CA, BKCTL_TLS_CERT, BKCTL_TLS_KEY", "As --tls-ca, --tls-cert, --tls-key."),
    ("BKCTL_OUTPUT, BKCTL_TIMEOUT", "As --output and --timeout."),
    (
        "BKCTL_METADATA_TLS, BKCTL_METADATA_TLS_CA, BKCTL_METADATA_TLS_CERT, BKCTL_METADATA_TLS_KEY, "
        "BKCTL_METADATA_USER, BKCTL_METADATA_PASSWORD_FILE, BKCTL_METADATA_SASL, BKCTL_METADATA_CREATOR_ACL",
        "As the options of these names; BKCTL_METADATA_PASSWORD is the password itself.",
    ),
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

    @property
    def name(self) -> str:
        """The words of the command, without `bkctl`."""
        return " ".join(self.path)

    def walk(self) -> Iterator[Page]:
        """This page and all below, in order."""
        yield self
        for child in self.children:
            yield from child.walk()


def read_pages() -> Page:
    """The tree of all commands."""
    tree: RootGroup = root()
    for name in GROUPS:
        tree.load(name)
    return _page(tree, (), None)


def _page(command: Any, path: tuple[str, ...], parent: Any) -> Page:
    context = command.context_class(command, info_name=path[-1] if path else "bkctl", parent=parent)
    arguments: list[Option] = []
    options: list[Option] = []
    for param in command.get_params(context):
        record = param.get_help_record(context)
        if record is None:
            continue
        is_argument = param.param_type_name == "argument"
        choices = tuple(str(choice.value) for choice in param.type_descriptor.choices or ())
        metavar = param.metavar or ("|".join(choices) if choices else param.bare_type().upper())
        option = Option(
            () if is_argument else (*sorted(param.opts, key=len),),
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
    usage = " ".join(["bkctl", *path, *command.collect_usage_pieces(context)])
    return Page(path, usage, command.help or "", tuple(arguments), tuple(options), children)


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


def man_page(tree: Page, group: Page | None, version: str) -> str:
    """One page in troff: the program's, or that of a group."""
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
        lines.extend(f".TP\n\\fB{_troff(f'bkctl-{each.name}')}\\fR(1)\n{_troff(each.help)}" for each in tree.children)
        lines.append(".SH OPTIONS")
        lines.extend(_man_options(tree.options))
        lines.append(".SH ENVIRONMENT")
        for variable, text in _ENVIRONMENT:
            lines.append(f".TP\n\\fB{_troff(variable)}\\fR\n{_troff(text)}")
    else:
        lines.append(".SH COMMANDS")
        for leaf in group.walk():
            if leaf.children:
                continue
            lines.append(f".SS {_troff(leaf.usage)}")
            lines.extend(_man_paragraphs(leaf.help))
            lines.extend(_man_options(leaf.arguments))
            own = tuple(
                option for option in leaf.options if option.panel != GLOBAL_PANEL and option.names != ("--help",)
            )
            lines.extend(_man_options(own))
        lines.append(".SH OPTIONS")
        lines.append(
            f".PP\n{_troff('Connection and output options, as --output and --metadata-uri, are in')} \\fBbkctl\\fR(1)."
        )
    lines.append(".SH EXIT STATUS")
    for code, meaning in EXIT_CODES.items():
        lines.append(f".TP\n\\fB{code}\\fR\n{_troff(meaning)}")
    others = ["bkctl(1)"] if group is not None else []
    others += [f"bkctl-{child.name}(1)" for child in tree.children if child is not group]
    lines += [".SH SEE ALSO", ", ".join(f"\\fB{_troff(each[:-3])}\\fR(1)" for each in others)]
    return "\n".join(lines) + "\n"


_DESCRIPTION: Final = """\
bkctl administers Apache BookKeeper: running clusters, the files of a bookie that runs or is dead, and clusters of \
its own bookies. Every ledger id has 128 bits (BP-35): a ledger scope id and a ledger id.

A ledger is named by a decimal or 0x ledger id, by SCOPE:ID, by its qualified name of 32 hex digits, or by a UUID.

Connection and output options stand before the group or after the command; the later one counts. Without any the \
environment counts, then the current context of the configuration file, then the local cluster that is up.

Data goes to stdout, all else to stderr. -o json prints one document, ndjson one object a line, csv a header and \
rows, id the keys alone. Ledger ids are strings in JSON, binary data is base64, times are ISO 8601 in UTC."""


# --- docs/commands.md -----------------------------------------------------------------------------------------------


def _markdown_options(options: tuple[Option, ...]) -> Iterator[str]:
    for option in options:
        head = ", ".join(option.names) or option.metavar
        metavar = f" {option.metavar}" if option.metavar and option.names else ""
        text = option.help.replace("|", BAR).replace("<", "&lt;")
        yield f"| `{f'{head}{metavar}'.replace('|', BAR)}` | {text} |"


def markdown(tree: Page) -> str:
    """The reference of all commands."""
    lines = ["# Commands", "", "Generated by `python -m bkctl.commands.generate`.", ""]
    for paragraph in _DESCRIPTION.split("\n\n"):
        lines += [paragraph, ""]
    lines += ["## Options of every command", "", "| option | |", "| --- | --- |"]
    lines += [*_markdown_options(tree.options), ""]
    lines += ["## Exit codes", "", "| code | meaning |", "| --- | --- |"]
    lines += [*(f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items()), ""]
    for group in tree.children:
        lines += [f"## {group.name}", "", group.help, ""]
        for leaf in group.walk():
            if leaf.children:
                continue
            lines += [f"### bkctl {leaf.name}", "", f"    {leaf.usage}", ""]
            for paragraph in leaf.help.split("\n\n"):
                lines += [" ".join(paragraph.split()), ""]
            own = tuple(
                option for option in leaf.options if option.panel != GLOBAL_PANEL and option.names != ("--help",)
            )
            if leaf.arguments or own:
                lines += ["| option | |", "| --- | --- |"]
                lines += [*_markdown_options(leaf.arguments), *_markdown_options(own), ""]
    return "\n".join(lines).rstrip() + "\n"


# --- completions ----------------------------------------------------------------------------------------------------


def _words(page: Page) -> list[str]:
    children = [child.path[-1] for child in page.children]
    return children + [name for option in page.options for name in option.names if name.startswith("--")]


def _value_kind(option: Option) -> str:
    """How a value is completed: `words a b`, `files`, `ledger` … or `none`."""
    if option.choices:
        return "words " + " ".join(option.choices)
    if option.names and "--output" in option.names:
        return "words table json ndjson csv id"
    if option.metavar in DYNAMIC:
        return DYNAMIC[option.metavar]
    if option.metavar in FILES:
        return "files"
    return "none"


def _sh(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def bash_completion(tree: Page) -> str:
    """The bash script."""
    cases: list[str] = []
    for page in tree.walk():
        values: dict[str, list[str]] = {}
        for option in page.options:
            if not option.is_flag:
                values.setdefault(_value_kind(option), []).extend(option.names)
        lines = [f"    {_sh(page.name)})"]
        if values:
            lines.append("      case $previous in")
            for kind, names in values.items():
                lines.append(f"        {'|'.join(names)}) kind={_sh(kind)} ;;")
            lines.append("      esac")
        lines.append(f"      words={_sh(' '.join(_words(page)))}")
        if page.arguments:
            lines.append(f"      argument={_sh(_value_kind(page.arguments[0]))}")
        lines.append("      ;;")
        cases.append("\n".join(lines))
    takers = " ".join(
        sorted({name for page in tree.walk() for option in page.options if not option.is_flag for name in option.names})
    )
    groups = "|".join(_sh(page.name) for page in tree.walk() if page.children and page.path)
    return _BASH.replace("@CASES@", "\n".join(cases)).replace("@TAKERS@", takers).replace("@GROUPS@", groups)


_BASH: Final = r"""# bash completion for bkctl; generated by python -m bkctl.commands.generate

_bkctl() {
  local IFS=$' \t\n' line current previous path='' words='' argument='none' kind='' word skip='' open=yes
  local -a typed
  line=${COMP_LINE:0:COMP_POINT}
  read -r -a typed <<< "$line"
  [[ $line == *' ' ]] && typed+=('')
  current=${typed[-1]}
  previous=${typed[-2]:-}
  for word in "${typed[@]:1:${#typed[@]}-2}"; do
    if [[ -n $skip ]]; then skip=''; continue; fi
    case $word in
      -*) case " @TAKERS@ " in *" $word "*) skip=yes ;; esac ;;
      *)
        if [[ $open == yes ]]; then
          path="${path:+$path }$word"
          case $path in @GROUPS@) ;; *) open='' ;; esac
        fi ;;
    esac
  done
  case $path in
@CASES@
  esac
  COMPREPLY=()
  if [[ -z $kind ]]; then
    if [[ $current == -* || $argument == none ]]; then kind="words $words"; else kind=$argument; fi
  fi
  case $kind in
    words*) mapfile -t COMPREPLY < <(compgen -W "${kind#words}" -- "$current") ;;
    files) compopt -o default 2>/dev/null ;;
    none) ;;
    *) mapfile -t COMPREPLY < <(_BKCTL_COMPLETE=$kind "${typed[0]}" "${typed[@]:1}" 2>/dev/null)
       [[ ${#COMPREPLY[@]} -eq 0 && $kind != ledger && $kind != bookie ]] && compopt -o default 2>/dev/null ;;
  esac
  # A word that holds a colon is several words to readline: give it only what follows the last colon.
  if [[ $current == *:* && $COMP_WORDBREAKS == *:* ]]; then
    local prefix=${current%"${current##*:}"} index
    for index in "${!COMPREPLY[@]}"; do COMPREPLY[index]=${COMPREPLY[index]#"$prefix"}; done
  fi
}

complete -F _bkctl bkctl
"""


def zsh_completion(tree: Page) -> str:
    """The zsh function, for a directory of fpath."""
    functions = [_zsh_function(page) for page in tree.walk()]
    return (
        "#compdef bkctl\n# generated by python -m bkctl.commands.generate\n\n"
        + _ZSH
        + "\n".join(functions)
        + '\n_bkctl "$@"\n'
    )


_ZSH: Final = r"""_bkctl_dynamic() {
  local -a found
  found=(${(f)"$(_BKCTL_COMPLETE=$1 "${(Q)bkctl_words[@]}" 2>/dev/null)"})
  if (( $#found )); then compadd -- $found; elif [[ $1 != (ledger|bookie) ]]; then _files; fi
}

"""


def _zsh_text(text: str) -> str:
    for char in "\\[]:":
        text = text.replace(char, "\\" + char)
    return text.replace("'", "'\\''")


def _zsh_action(option: Option) -> str:
    kind = _value_kind(option)
    if kind.startswith("words "):
        return f"({kind.removeprefix('words ')})"
    return {"files": "_files", "none": " "}.get(kind, f"{{_bkctl_dynamic {kind}}}")


def _zsh_function(page: Page) -> str:
    name = "_".join(["_bkctl", *page.path]).replace("-", "_")
    specs: list[str] = []
    for option in page.options:
        text = _zsh_text(option.help)
        value = "" if option.is_flag else f":{_zsh_text(option.metavar)}:{_zsh_action(option)}"
        for each in option.names:
            star = "*" if option.repeatable else ""
            specs.append(f"'{star}{each}[{text}]{value}'")
    if page.children:
        commands = " ".join(f"'{child.path[-1]}:{_zsh_text(child.help.split(chr(10))[0])}'" for child in page.children)
        cases = "\n".join(
            f"        {child.path[-1]}) {'_'.join(['_bkctl', *child.path]).replace('-', '_')} ;;"
            for child in page.children
        )
        start = '  local -a bkctl_words=("${(@)words[1,CURRENT]}")\n' if not page.path else ""
        body = " \\\n    ".join(["  _arguments -C", *specs, "'1: :->command'", "'*:: :->rest'"])
        return (
            f"{name}() {{\n  local state line\n{start}{body}\n  case $state in\n    command)\n"
            f"      local -a commands=({commands})\n      _describe command commands ;;\n"
            f"    rest)\n      case $line[1] in\n{cases}\n      esac ;;\n  esac\n}}\n"
        )
    for argument in page.arguments:
        star = "*" if argument.repeatable else ""
        specs.append(f"'{star}:{_zsh_text(argument.metavar)}:{_zsh_action(argument)}'")
    return f"{name}() {{\n" + " \\\n    ".join(["  _arguments", *specs]) + "\n}\n"


def fish_completion(tree: Page) -> str:
    """The fish script."""
    lines = ["# fish completion for bkctl; generated by python -m bkctl.commands.generate", "", _FISH]
    for page in tree.walk():
        condition = f"__bkctl_at {_sh(page.name)}"
        for child in page.children:
            help_text = child.help.split("\n")[0]
            lines.append(f"complete -c bkctl -n {_sh(condition)} -f -a {_sh(child.path[-1])} -d {_sh(help_text)}")
        for option in page.options:
            names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names)
            value = "" if option.is_flag else _fish_value(option)
            lines.append(f"complete -c bkctl -n {_sh(condition)} {names}{value} -d {_sh(option.help)}")
        for argument in page.arguments[:1]:
            value = _fish_value(argument).replace(" -r -F", " -F").replace(" -x", " -f")
            lines.append(f"complete -c bkctl -n {_sh(condition)}{value}")
    return "\n".join(lines) + "\n"


def _fish_value(option: Option) -> str:
    kind = _value_kind(option)
    if kind.startswith("words "):
        return f" -x -a {_sh(kind.removeprefix('words '))}"
    if kind == "files":
        return " -r -F"
    return " -x" if kind == "none" else f" -x -a {_sh(f'(__bkctl_dynamic {kind})')}"


_FISH: Final = r"""function __bkctl_at
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
    test "$path" = "$argv[1]"
end

function __bkctl_dynamic
    set -l words (commandline -opc) (commandline -ct)
    _BKCTL_COMPLETE=$argv[1] $words[1] $words[2..-1] 2>/dev/null
end
"""


# --- writing --------------------------------------------------------------------------------------------------------


def generated_files() -> dict[str, str]:
    """Path below the repository's root → content, of all files that are generated."""
    from bkctl import __version__

    tree = read_pages()
    takers = sorted(
        {name for page in tree.walk() for option in page.options if not option.is_flag for name in option.names}
    )
    nested = " ".join(_sh(page.name) for page in tree.walk() if page.children and len(page.path) == 2)
    fish = fish_completion(tree).replace("@TAKERS@", "|".join(takers)).replace("@NESTED@", nested)
    files = {
        "completions/bkctl.bash": bash_completion(tree),
        "completions/_bkctl": zsh_completion(tree),
        "completions/bkctl.fish": fish,
        "docs/commands.md": markdown(tree),
        "man/bkctl.1": man_page(tree, None, __version__),
    }
    for group in tree.children:
        files[f"man/bkctl-{group.name}.1"] = man_page(tree, group, __version__)
    return files


def main() -> None:
    """Write the files below the directory given (default: the current one)."""
    base = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    for name, content in generated_files().items():
        path = base / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


if __name__ == "__main__":
    main()
