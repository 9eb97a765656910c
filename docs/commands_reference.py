"""Write man pages, `docs/schemas/` and other pages from the commands: part of `make generate`.

A schema in `docs/schemas/` describes the document of one command; `$defs/row` in it a line of `-o ndjson`. A test holds
the files in the repository equal to what this makes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from bkctl import __version__
from bkctl.columns import Columns
from bkctl.commands.kit.columns import Output
from bkctl.commands.kit.command import Declaration, declaration_of
from bkctl.commands.kit.next_steps import STEPS
from bkctl.commands.kit.parser import Group, Option, context_of, read_parameters
from bkctl.commands.kit.settings import GLOBAL_PANEL, SETTINGS
from bkctl.commands.main import root
from bkctl.commands.translations import PULSAR, TRANSLATIONS
from bkctl.errors import EXIT_CODES
from bkctl.metadata.admin.health_codes import HealthCode

ROOT: Final = Path(__file__).resolve().parent.parent
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
    def commands(self) -> list[Page]:
        """The commands below this page, in order."""
        return [each for each in self.walk() if not each.children]

    def walk(self) -> Iterator[Page]:
        """Yield this page and all below it, in order."""
        yield self
        for child in self.children:
            yield from child.walk()


def read_pages() -> Page:
    """Return the tree of all commands."""
    return _page(root(), (), None)


def _page(command: Any, path: tuple[str, ...], parent: Any) -> Page:
    context = context_of(command, path[-1] if path else "bkctl", parent)
    found = [option for _, option in read_parameters(command, context)]
    options = tuple(option for option in found if option.names)
    children: tuple[Page, ...] = ()
    if isinstance(command, Group):
        loaded: list[tuple[str, Any]] = [(name, command.get_command(context, name)) for name in [*command.commands]]
        children = tuple(_page(child, (*path, name), context) for name, child in loaded if not child.hidden)
        if command.default is not None:
            # The group takes the options of the command that runs without a name.
            options = next(child for child in children if child.path[-1] == command.default).options
    return Page(
        path,
        " ".join(["bkctl", *path, *command.collect_usage_pieces(context)]),
        command.help or "",
        tuple(option for option in found if not option.names),
        options,
        children,
        tuple((command.epilog or "").splitlines()) if path else (),
        declaration_of(command),
    )


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


def _man_terms(terms: Iterable[tuple[object, str]], font: str = "B") -> Iterator[str]:
    return (f".TP\n\\f{font}{_troff(str(term))}\\fR\n{_troff(text)}" for term, text in terms)


def man_page(tree: Page, group: Page | None, version: str) -> str:
    """Return one page in troff: the program's, or that of a group."""
    page = tree if group is None else group
    name = "bkctl" if group is None else f"bkctl-{group.name}"
    summary = page.help.split("\n")[0].rstrip(".")
    sections: dict[str, Iterable[str]] = {
        "NAME": [f"{_troff(name)} \\- {_troff(summary[:1].lower() + summary[1:])}"],
        "SYNOPSIS": [f"\\fB{_troff(' '.join(['bkctl', *page.path]))}\\fR [\\fIOPTIONS\\fR] \\fICOMMAND\\fR ..."],
    }
    commands = [line for leaf in (tree.leaves if group is None else group.commands) for line in _man_command(leaf)]
    if group is None:
        sections |= {
            "DESCRIPTION": _man_paragraphs(_DESCRIPTION),
            "GROUPS": [f".TP\n\\fB{_troff(f'bkctl-{each.name}')}\\fR(1)\n{_troff(each.help)}" for each in tree.groups],
            "COMMANDS": commands,
            "OPTIONS": _man_options(tree.options),
            "ENVIRONMENT": _man_terms(_ENVIRONMENT),
            "FILES": [f".PP\n{_troff(_FILES_KEPT)}", *_man_terms(_FILES, "I")],
        }
    else:
        options = _troff("Connection and output options, as --output and --metadata-uri, are in")
        sections |= {"COMMANDS": commands, "OPTIONS": [f".PP\n{options} \\fBbkctl\\fR(1)."]}
    others = [f"bkctl-{child.name}" for child in tree.groups if child is not group]
    seen = others if group is None else ["bkctl", *others]
    sections |= {
        "EXIT STATUS": _man_terms(EXIT_CODES.items()),
        "SEE ALSO": [", ".join(f"\\fB{_troff(each)}\\fR(1)" for each in seen)],
    }
    lines = [f'.TH "{_troff(name.upper())}" "1" "" "bkctl {version}" "bkctl Manual"']
    for title, content in sections.items():
        lines += [f".SH {title}", *content]
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


def _markdown_table(head: str, rows: Iterable[tuple[object, str]]) -> list[str]:
    return [f"| {head} |", "| --- | --- |", *(f"| {term} | {text} |" for term, text in rows), ""]


def _markdown_options(options: Iterable[Option]) -> list[str]:
    rows = []
    for option in options:
        metavar = f" {option.metavar}" if option.metavar and option.names else ""
        head = f"{', '.join(option.names) or option.metavar}{metavar}".replace("|", BAR)
        rows.append((f"`{head}`", option.help.replace("|", BAR).replace("<", "&lt;")))
    return _markdown_table("option |", rows) if rows else []


def _markdown_paragraphs(text: str) -> list[str]:
    return [line for paragraph in text.split("\n\n") for line in (" ".join(paragraph.split()), "")]


def _markdown_command(leaf: Page) -> list[str]:
    lines = [f"### bkctl {leaf.name}", "", f"    {leaf.usage}", "", *_markdown_paragraphs(leaf.help)]
    lines += _markdown_options([*leaf.arguments, *leaf.own_options])
    return lines + (["Examples:", "", *(f"    {each}" for each in leaf.examples), ""] if leaf.examples else [])


def markdown(tree: Page) -> str:
    """Return the reference of all commands."""
    lines = [
        "# Commands", "", "Generated by `docs/commands_reference.py`.", "", *_markdown_paragraphs(_DESCRIPTION),
        "## Options of every command", "", *_markdown_options(tree.options),
        "## Exit codes", "", *_markdown_table("code | meaning", EXIT_CODES.items()),
        "## Files", "", _FILES_KEPT, "", *_markdown_table("path |", ((f"`{path}`", text) for path, text in _FILES)),
        "## bkctl", "", *(line for leaf in tree.leaves for line in _markdown_command(leaf)),
    ]  # fmt: skip
    for group in tree.groups:
        lines += [f"## {group.name}", "", group.help, ""]
        lines += [line for leaf in group.commands for line in _markdown_command(leaf)]
    return "\n".join(lines).rstrip() + "\n"


# --- docs/health.md, docs/from-the-shell.md ---------------------------------------------------------------------------


def health_page() -> str:
    """Return docs/health.md: the findings of health and of the checks."""
    lines = [
        "# Findings",
        "",
        "`bkctl cluster health` prints findings by code, and `OK` without any. Codes are stable: scripts and",
        "`cluster health mute` name them. `cluster health detail` fills the next command in. Generated by",
        "`docs/commands_reference.py`.",
        "",
        "| code | severity | when | next command | why |",
        "| --- | --- | --- | --- | --- |",
        *(
            f"| [`{each}`](runbooks/{each}.md) | {each.severity} | {each.what} | `{each.next}` | {each.why} |"
            for each in HealthCode
        ),
    ]
    for check, steps in STEPS.items():
        lines += ["", f"## {check}", "", "| finding | next command | why |", "| --- | --- | --- |"]
        lines += [f"| `{kind}` | `{step.command}` | {step.why} |" for kind, step in steps.items()]
    return "\n".join(lines) + "\n"


def shell_page() -> str:
    """Return docs/from-the-shell.md."""
    lines = [
        "# From the Java shell",
        "",
        "The commands of Apache's shell, of Java's bkctl and of `pulsar-admin bookies`, and ours for each. Typed after",
        "`bkctl`, a name of the others is answered with ours. Options are in `bkctl help COMMAND`. Generated by",
        "`docs/commands_reference.py`.",
        "",
        "| `bookkeeper shell` | Java's `bkctl` | `bkctl` | |",
        "| --- | --- | --- | --- |",
    ]
    lines += [
        f"| {_code(each.shell)} | {_code(each.java)} | {_code(each.ours)} | {each.note} |" for each in TRANSLATIONS
    ]
    lines += ["", "| `pulsar-admin bookies` | `bkctl` | |", "| --- | --- | --- |"]
    lines += [f"| {_code(each.shell)} | {_code(each.ours)} | {each.note} |" for each in PULSAR]
    return "\n".join(lines) + "\n"


def _code(text: str) -> str:
    return f"`{text}`" if text else "–"


# --- docs/schemas -----------------------------------------------------------------------------------------------------


_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
_ERROR_FIELDS: Final = {
    "code": {"type": "string", "description": "The kind of error: ledgerNotFound, usage, ENOENT"},
    "exitCode": {"type": "integer"},
    "message": {"type": "string", "description": "What failed, on what, and why"},
    "hint": {"type": ["string", "null"], "description": "What to do"},
}


def _object(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


#: An error on stderr with `-o json`.
ERROR_SCHEMA: Final[dict[str, Any]] = {
    "$schema": _DIALECT,
    "title": "An error, as one line on stderr with -o json",
    **_object({"error": _object(_ERROR_FIELDS, [*_ERROR_FIELDS])}, ["error"]),
}


def row_schema(columns: Columns) -> dict[str, Any]:
    """Return the schema of one row. A row of `--watch -o ndjson` that went has `removed`."""
    fields = [(column, *field) for column in columns.columns for field in column.properties()]
    properties = {name: shape for _, name, shape in fields} | {"removed": {"const": True}}
    return _object(properties, [name for column, name, _ in fields if not column.optional])


def command_schema(declaration: Declaration, name: str) -> dict[str, Any]:
    """Return the schema of what the command `name` prints with `-o json`."""
    shapes = [row_schema(columns) for columns in declaration.forms(Output.JSON)]
    rows = [row for at, row in enumerate(shapes) if row not in shapes[:at]]
    pointers: list[dict[str, Any]] = []
    for document, row in zip(declaration.prints, shapes, strict=True):
        pointer = {"$ref": f"#/$defs/row{rows.index(row) + 1}"}
        pointers.append({"type": "array", "items": pointer} if document.is_list else pointer)
    definitions = {f"row{number}": row for number, row in enumerate(rows, 1)}
    return {
        "$schema": _DIALECT,
        "title": f"bkctl {name} -o json",
        **(pointers[0] if len(pointers) == 1 else {"anyOf": pointers}),
        "$defs": {"row": {"anyOf": [{"$ref": f"#/$defs/{each}"} for each in definitions]}, **definitions},
    }


# --- writing --------------------------------------------------------------------------------------------------------


def generated_files() -> dict[str, str]:
    """Return the generated files: path below the repository's root → content."""
    tree = read_pages()
    files = {
        "docs/commands.md": markdown(tree),
        "docs/from-the-shell.md": shell_page(),
        "docs/health.md": health_page(),
        "man/bkctl.1": man_page(tree, None, __version__),
    }
    files["docs/schemas/error.json"] = _schema_text(ERROR_SCHEMA)
    for page in tree.commands:
        if page.declaration is not None and page.declaration.prints:
            files[f"docs/schemas/{'-'.join(page.path)}.json"] = _schema_text(
                command_schema(page.declaration, page.name)
            )
    for group in tree.groups:
        files[f"man/bkctl-{group.name}.1"] = man_page(tree, group, __version__)
    return files


def _schema_text(schema: dict[str, Any]) -> str:
    return json.dumps(schema, indent=2) + "\n"


if __name__ == "__main__":
    for name, content in generated_files().items():
        path = ROOT / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
