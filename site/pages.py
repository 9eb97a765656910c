"""Pages that lie outside docs/, and links to them: a hook of MkDocs."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

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
    return files


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
