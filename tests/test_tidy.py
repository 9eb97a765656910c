"""English and names that a test can hold: no riddles in docstrings, comments and messages, one class a name."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent

#: A docstring names what it does or is; these begin a riddle.
RIDDLE = re.compile(r"(What|Whether|That|Those|Who|Whose|How|Where|Why|When|Which)\b")
#: Phrases with a plainer form: "is not a directory", "unchanged", "continues", "rebuilt", "reported".
BANNED = re.compile(
    r"\b(?:(?:is|are|was|were|be) no(?! longer\b| more than\b| later than\b| less than\b) [a-z]+|nobody(?!:)|made anew"
    r"|goes on\b"
    r"|is told\b|are told\b|was told\b|those of\b|of use\b|put back as\b|such, or\b|takes? note\b|as it is told"
    r"|formatted away\b|broken off\b)",
)


def modules(rooms: Sequence[str] = ("bkctl", "commands")) -> list[Path]:
    """Return every Python file of the rooms, generated ones left out."""
    found = [path for room in rooms for path in ROOT.glob(f"{room}/**/*.py")]
    return sorted(path for path in found if not path.stem.endswith("_pb2") and path != Path(__file__).resolve())


ALL = ("bkctl", "commands", "tests", "benchmarks")


class Prose(NamedTuple):
    """The line and text of the docstrings, comments (a line each) and strings of a file."""

    docstrings: list[tuple[int, str]]
    comments: list[tuple[int, str]]
    strings: list[tuple[int, str]]


@cache
def prose(path: Path) -> Prose:
    """Read a file once for both tests of it."""
    source = path.read_text()
    found = Prose([], [], [])
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.strings.append((node.lineno, node.value))
        has_docstring = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if has_docstring and (text := ast.get_docstring(node)):
            found.docstrings.append((node.body[0].lineno, text))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            found.comments.append((token.start[0], token.string.lstrip("#: ")))
    return found


def begins_a_comment(lines: list[str], line: int) -> bool:
    """Return True if line number `line` is a comment, and the line above is not one."""
    return lines[line - 1].lstrip().startswith("#") and not (line > 1 and lines[line - 2].lstrip().startswith("#"))


@pytest.mark.parametrize("path", modules(ALL), ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_and_comments_begin_with_a_verb_or_a_noun(path: Path) -> None:
    lines = path.read_text().splitlines()
    # A comment's further lines, and the end of a line of code, may begin with any word.
    own = [(line, text) for line, text in prose(path).comments if begins_a_comment(lines, line)]
    found = [f"{path}:{line}: {text[:70]}" for line, text in [*prose(path).docstrings, *own] if RIDDLE.match(text)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", modules(ALL), ids=lambda path: str(path.relative_to(ROOT)))
def test_prose_states_the_fact(path: Path) -> None:
    """The strings of tests are data, but for docstrings."""
    is_product = path.is_relative_to(ROOT / "bkctl") or path.is_relative_to(ROOT / "commands")
    texts = [*prose(path).comments, *(prose(path).strings if is_product else prose(path).docstrings)]
    found = [f"{path}:{line}: {match[0]}" for line, text in texts for match in BANNED.finditer(text)]
    assert not found, "\n".join(found)


def test_test_names_state_the_behaviour() -> None:
    names = r"def (test_(?:what|that|those|whoever|who|whose|nobody|somebody)_\w+)"
    found = [f"{path}: {name}" for path in ROOT.glob("tests/**/*.py") for name in re.findall(names, path.read_text())]
    assert not found, "\n".join(found)


def test_public_classes_have_one_name_each() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in modules():
        if path == ROOT / "bkctl/sync.py":
            continue  # the twin of each class of the client has its name
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(ROOT)))
    twice = {name: where for name, where in places.items() if len(where) > 1}
    assert not twice
