"""Obstacles for a stranger in the tracked files."""

from __future__ import annotations

import html
import os
import re
import shutil
import subprocess
import sys
import tarfile
from itertools import dropwhile, takewhile
from pathlib import Path

import pytest
from commands_reference import read_pages

from bkctl import __version__
from bkctl.commands.kit.columns import Output
from bkctl.metadata.admin.health import read_only_finding

ROOT = Path(__file__).resolve().parent.parent


def tracked() -> list[Path]:
    """The tracked text files, golden files left out."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in names.split("\0") if name and not re.match(r"tests/data/\d", name)]
    return [path for path in paths if path.is_file()]


def hits(pattern: str, paths: list[Path]) -> list[str]:
    """`path:line: text` of each line that matches."""
    wanted = re.compile(pattern)
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in paths
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if wanted.search(line)
    ]


def test_no_path_of_somebodys_machine() -> None:
    assert hits(r"(^|[^\w.])/(work|farm|home|Users)/", tracked()) == []


def test_no_registry_host() -> None:
    hosts = r"pypi[.]org|pythonhosted[.]org|repo1?[.]maven[.]|maven[.]org|npmjs[.]|crates[.]io|proxy[.]golang"
    assert hits(hosts, tracked()) == []


def test_nothing_unfinished_and_no_check_disarmed() -> None:
    markers = (
        r"\bTO[D]O\b|\bFIX[M]E\b|\bXX[X]\b|NotImplemented[E]rror|assert [T]rue( |$)"
        r"|mark[.]xfail|# type: ignor[e]$"
    )
    sources = {".py", ".java", ".md", ".toml", ".sh"}
    assert hits(markers, [path for path in tracked() if path.suffix in sources]) == []


def test_the_two_commands_of_the_readme_exist() -> None:
    readme = (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    for command in ("demo", "test"):
        assert f"make {command}" in readme
        assert re.search(rf"^{command}:", makefile, re.MULTILINE)


@pytest.mark.parametrize("name", [".ci/run", "demo/run.sh"])
def test_scripts_are_executable_and_parse(name: str) -> None:
    script = ROOT / name
    assert os.access(script, os.X_OK)
    shell = script.read_text().splitlines()[0].rpartition("/")[2].removeprefix("env ")
    subprocess.run([shell, "-n", str(script)], check=True)


def test_the_changelog_has_the_version() -> None:
    sections = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    if ".dev" in __version__:
        assert sections[0] == "Unreleased"
        assert f"bkctl calls itself {__version__} until then" in (ROOT / "CHANGELOG.md").read_text()
    assert not [name for name in sections[1:] if "nreleased" in name]


def test_the_source_archive_has_what_its_readme_names(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", "77")
    for path in tracked():
        name = path.relative_to(ROOT)
        if name.parts[0] not in ("tests", "benchmarks") or name.match("tests/*.py"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, tmp_path / name)
    (tmp_path / "image/token").write_text("secret")
    build = "from setuptools import build_meta; build_meta.build_sdist('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path, capture_output=True, check=True)
    (archive,) = (tmp_path / "dist").iterdir()
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    assert set(re.findall(r"\]\(([^):#]+)[)#]", (ROOT / "README.md").read_text())) <= names
    assert {"demo/run.sh", "Makefile", "CHANGELOG.md", "docs/schemas/version.json"} <= names
    sources = {str(path.relative_to(ROOT)) for path in tracked() if path.suffix in (".c", ".h", ".proto")}
    assert sources - names == set()
    assert not [name for name in names if name.startswith("tests")]
    assert "image/token" not in names


def test_secrets_that_the_documents_place_in_the_checkout_are_ignored() -> None:
    tracked()  # skips without git
    secrets = re.findall(r"^ +file: (image/token)$", (ROOT / "compose.yaml").read_text(), re.MULTILINE)
    written = [name for page in ROOT.glob("docs/**/*.md") for name in re.findall(r">(\w+/\w+)", page.read_text())]
    ignored = subprocess.run(["git", "check-ignore", *secrets], cwd=ROOT, capture_output=True, text=True)
    assert ignored.stdout.split() == secrets == written == ["image/token"]


PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *sorted(f"docs/{path.name}" for path in ROOT.glob("docs/*.md")),
]


@pytest.mark.parametrize("page", PAGES)
def test_links_of_the_documents_lead_to_files(page: str) -> None:
    path = ROOT / page
    links = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", path.read_text())
    files = [link for link in links if "://" not in link]
    assert [link for link in files if not (path.parent / link).exists()] == []


def test_no_document_installs_bkctl_by_a_name_that_an_index_would_have_to_know() -> None:
    pages = [ROOT / page for page in PAGES if page != "CHANGELOG.md"]
    assert hits(r"""pip.* install.*[ '"]bkctl(\[| |'|"|$)|^ *name: bkctl\[""", pages) == []
    assert "bkctl is not on PyPI" in " ".join((ROOT / "README.md").read_text().split())


def test_contributing_names_targets_and_files_that_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {word for words in re.findall(r"`make ([a-z ]+)", text) for word in words.split()}
    assert named <= targets
    assert {"fast", "format", "lint", "types", "test", "generate", "protos", "bench", "picture"} <= named
    paths = re.findall(r"`((?:bkctl|commands|tests|docs|benchmarks|completions|man|\.ci)/[\w./-]*)`", text)
    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_readme_is_short_and_names_commands_that_exist() -> None:
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 125
    reference = set(re.findall(r"^### bkctl (.+)$", (ROOT / "docs/commands.md").read_text(), re.MULTILINE))
    groups = {name.split()[0] for name in reference}
    named = set(re.findall(r"bkctl ((?:[a-z-]+ ){0,2}[a-z-]+)", readme))
    commands = {name for name in named if name.split()[0] in groups and " " in name}
    assert len(commands) > 20
    # The command itself, with an argument behind it, or a group of its own (`cluster health`).
    unknown = {
        name
        for name in commands
        if not any(f"{name} ".startswith(f"{each} ") or each.startswith(f"{name} ") for each in reference)
    }
    assert unknown == set()


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("terminal", "bookies list"),
        ("local-up", "local up"),
        ("health", "cluster health"),
        ("ledger-list", "ledger list"),
        ("drain", "bookies drain"),
        ("top", "top"),
    ],
)
def test_pictures_of_the_terminal_are_shown_and_fetch_nothing(name: str, command: str) -> None:
    picture = (ROOT / f"docs/{name}.svg").read_text()
    assert f"bkctl {command}".replace(" ", "&#160;") in picture
    assert "url(http" not in picture
    assert "@import" not in picture
    pages = (ROOT / "README.md").read_text() + (ROOT / "docs/pictures.md").read_text()
    assert f"{name}.svg)" in pages


def picture_texts(name: str) -> list[str]:
    """Return the pieces of text of a picture, in its order."""
    picture = (ROOT / f"docs/{name}.svg").read_text()
    return [html.unescape(text).replace("\xa0", " ") for text in re.findall(r"<text[^>]*>([^<]*)</text>", picture)]


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("terminal", "bookies list"),
        ("terminal", "ledger read"),
        ("local-up", "local up"),
        ("ledger-list", "ledger list"),
        ("drain", "bookies drain"),
    ],
)
def test_pictures_have_the_columns_that_commands_print(name: str, command: str) -> None:
    """Titles are in capitals. A column that is new and does not fit the picture may be missing there."""
    (page,) = (page for page in read_pages().commands if page.name == command)
    assert page.declaration is not None
    declared = {column.title for columns in page.declaration.forms(Output.TABLE) for column in columns.columns}
    texts = picture_texts(name)
    begin = next(number for number, text in enumerate(texts) if text.startswith(f"bkctl {command}"))
    titles = list(takewhile(str.isupper, dropwhile(lambda text: not text.isupper(), texts[begin:])))
    assert len(titles) > 3
    assert {title.strip() for title in titles} - declared == set(), "run `make picture`"


def test_the_picture_of_findings_has_the_words_of_today() -> None:
    text = re.sub(r"[\s│]+", " ", " ".join(picture_texts("health")))
    (used,) = re.findall(r"([\d.]+)% of its disks", text)
    finding = read_only_finding("bookie-3", float(used), 95.0)
    assert finding.message in text, "run `make picture`"
    assert finding.advice in text, "run `make picture`"
