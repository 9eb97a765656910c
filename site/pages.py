"""Pages that lie outside docs/, and links to them: a hook of MkDocs."""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mkdocs.structure.files import File

from bkctl.http.app import Api
from bkctl.http.endpoints import document

ROOT = Path(__file__).parents[1]
#: The path in the repository of each page outside docs/, and its path in the site.
OUTSIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security-policy.md",
    "benchmarks/README.md": "benchmarks-how.md",
}
#: Directories that pages link to; a page lists their files.
LISTED = ("docs/schemas", "docs/service")
_LINK = re.compile(r"(\]\()([^)#\s]+)([^)]*\))")


def on_files(files: Any, config: Any) -> Any:
    for path, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text("utf-8")))
    for directory in LISTED:
        names = sorted(path.name for path in (ROOT / directory).iterdir())
        content = f"# Files\n\n{''.join(f'- [{name}]({name})' + chr(10) for name in names)}"
        files.append(File.generated(config, f"{directory.removeprefix('docs/')}/index.md", content=content))
    api: Any = Api(SimpleNamespace(samples=None))  # type: ignore[arg-type]
    described = document(api.endpoints, gateway=True, needs_token=True)
    files.append(File.generated(config, "openapi.json", content=json.dumps(described, indent=2)))
    files.append(File.generated(config, "openapi.md", content="\n".join(_openapi(described))))
    return files


def _openapi(described: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a page of all endpoints of a gateway."""
    yield "# REST endpoints\n"
    yield f"The OpenAPI {described['openapi']} document of a gateway; [openapi.json](openapi.json) is the file."
    yield "[REST](rest.md) says how the API is served, and what a bookie's own server leaves out. `bookie` names the"
    yield 'bookie to a gateway. Errors are `{"error": …}`.\n'
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            yield f"## {method.upper()} {path}\n\n{operation['summary']}\n"
            if operation.get("security") == []:
                yield "No token is needed.\n"
            if parameters := operation.get("parameters"):
                yield "| parameter | type | |\n| --- | --- | --- |"
                for each in parameters:
                    needed = " (required)" if each["required"] else ""
                    help_text = each["description"].replace("|", "\\|")
                    yield f"| `{each['name']}` | {_type(each['schema'])} | {help_text}{needed} |"
                yield ""
            if body := operation.get("requestBody"):
                yield from _schema("Body" if body["required"] else "Body, or none", body["content"])
            for code, answer in operation["responses"].items():
                if code == "200":
                    yield from _schema("Answer", answer["content"])
            yield "| status | |\n| --- | --- |"
            yield from (f"| {code} | {answer['description']} |" for code, answer in operation["responses"].items())
            yield ""


def _type(schema: dict[str, Any]) -> str:
    kind = schema.get("type", "string")
    words = " or ".join(kind) if isinstance(kind, list) else str(kind)
    return f"{words}: {', '.join(f'`{each}`' for each in schema['enum'])}" if "enum" in schema else words


def _schema(title: str, content: dict[str, Any]) -> Iterator[str]:
    for media_type, each in content.items():
        yield f"{title}, `{media_type}`:\n\n```json\n{json.dumps(each['schema'], indent=2)}\n```\n"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Return the page with links from where it lies in the repository turned into links of the site."""
    here = page.file.src_uri
    inside = {site: path for path, site in OUTSIDE.items()}
    source = inside.get(here) or f"docs/{here}"

    def turned(link: re.Match[str]) -> str:
        before, target, after = link.groups()
        if "://" in target or target.startswith(("mailto:", "/")):
            return link[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if path in OUTSIDE:
            site = OUTSIDE[path]
        elif path.startswith("docs/"):
            site = path.removeprefix("docs/") + ("/index.md" if path in LISTED else "")
        else:
            site = _plain(path, config, files)
        return before + posixpath.relpath(site, posixpath.dirname(here) or ".") + after

    return _LINK.sub(turned, markdown)


def _plain(path: str, config: Any, files: Any) -> str:
    """Return the site's path of a file outside docs/ that a page links to; it becomes part of the site."""
    site = f"files/{path}"
    if (ROOT / path).is_file() and files.get_file_from_path(site) is None:
        files.append(File.generated(config, site, content=(ROOT / path).read_bytes()))
    return site
