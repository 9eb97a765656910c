"""Every program in docs/python.md, and the examples, against a local cluster; the reference beside the docstrings."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from support.command_line import CommandLine
from support.waiting import LIMIT_S

from bkctl import BookKeeper, Protocol, WriteFlag, sync
from bkctl.errors import LedgerFenced, LedgerNotFound, Unauthorized

#: No connection, task or file is left open.
STRICT = ("-W", "error::ResourceWarning", "-W", "error::RuntimeWarning")
ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/python.md").read_text()
PROGRAMS = re.findall(r"^## (.+?)$|^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def programs() -> Iterator[object]:
    """Yield each program with the heading above it as its name."""
    heading = ""
    for title, program in PROGRAMS:
        heading = title or heading
        if program:
            yield pytest.param(program, id=heading)


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    shell = CommandLine(None)
    assert shell("local", "up", "--bookies", 3, "--dir", tmp_path_factory.mktemp("local") / "cluster").code == 0
    yield json.loads(shell("cluster", "id", "-o", "json").out)["metadataUri"]
    shell("local", "down")


def module(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.mark.parametrize("program", list(programs()))
def test_programs_of_the_page_run(uri: str, program: str) -> None:
    assert program.count("zk://zk1:2181/ledgers") == 1
    ran = subprocess.run(
        [sys.executable, *STRICT, "-c", program.replace("zk://zk1:2181/ledgers", uri)],
        capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout


def test_the_page_has_a_program_for_each_task() -> None:
    assert len([program for _, program in PROGRAMS if program]) >= 7


def test_the_reference_is_the_docstrings() -> None:
    program = "import python_reference as r; print(r.updated(r.PAGE.read_text()), end='')"
    printed = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT / "docs", capture_output=True, text=True, check=True
    ).stdout
    assert printed == PAGE, "run 'make generate'"


@pytest.mark.parametrize(("protocol", "scope_id"), [(Protocol.V2, 0), (Protocol.V3, 0), (Protocol.V3, 7)])
def test_our_bookies_serve_batches_deferred_sync_and_fences(uri: str, protocol: Protocol, scope_id: int) -> None:
    flags = WriteFlag.NONE if protocol is Protocol.V2 else WriteFlag.DEFERRED_SYNC
    with sync.BookKeeper(uri, protocol=protocol) as one, sync.BookKeeper(uri, protocol=protocol) as two:
        writer = one.create_ledger_adv(
            ledger_scope_id=scope_id, write_quorum_size=3, password=b"secret", write_flags=flags
        )
        writer.add_all([b"%d" % number * 300 for number in range(100)])
        writer.flush()
        if flags:
            assert writer.last_add_confirmed == -1
            writer.force()
        assert [entry.entry_id for entry in writer.batch_read(10, 5)] == [10, 11, 12, 13, 14]
        with pytest.raises(Unauthorized):
            two.open_ledger(writer.ledger, password=b"wrong", recovery=True)
        reader = two.open_ledger(writer.ledger, password=b"secret", recovery=True)
        assert [entry.payload for entry in reader.read()] == [b"%d" % number * 300 for number in range(100)]
        assert 1 <= len(reader.batch_read(0, 100, 3000)) < 100
        with pytest.raises(LedgerFenced):
            writer.add(b"late")
        two.delete_ledger(writer.ledger)


def test_a_second_program_takes_the_write_ahead_log_over(uri: str) -> None:
    example = module("examples/write_ahead_log.py")

    async def run() -> None:
        async with BookKeeper(uri) as one, BookKeeper(uri) as two:
            first, second = example.WriteAheadLog(one, 301), example.WriteAheadLog(two, 301)
            await first.open()
            await first.put(a="1", b="2")
            await second.open()
            assert second.values == {"a": "1", "b": "2"}
            with pytest.raises(LedgerFenced):
                await first.put(a="lost")
            await second.put(a="3")
            await second.compact()
            await second.put(c="4")
            await first.close()
            # Two that take it over at once: one of them has it in the end.
            await asyncio.gather(first.open(), second.open())
            outcomes = await asyncio.gather(first.put(d="5"), second.put(d="6"), return_exceptions=True)
            assert sorted(type(outcome).__name__ for outcome in outcomes) == ["LedgerFenced", "NoneType"]
            await first.open()
            assert first.values | {"d": ""} == {"a": "3", "b": "2", "c": "4", "d": ""}
            await first.close()
            await second.close()

    asyncio.run(run())


def test_the_blob_store_gives_back_what_was_put(uri: str) -> None:
    example = module("examples/blob_store.py")
    with sync.BookKeeper(uri) as bookkeeper:
        store = example.BlobStore(bookkeeper)
        blobs = [b"", b"small", bytes(range(256)) * 10_000]
        names = [store.put(blob) for blob in blobs]
        assert len({name.partition("-")[0] for name in names}) == 1
        assert [store.get(name) for name in names] == blobs
        store.close()
        assert store.get(names[2]) == blobs[2]
        assert store.delete_before(0) == 0
        assert store.delete_before(1 << 60) == 1
        with pytest.raises(LedgerNotFound):
            store.get(names[0])


@pytest.mark.parametrize("example", ["write_ahead_log", "blob_store"])
def test_examples_run_as_programs(uri: str, tmp_path: Path, example: str) -> None:
    def run(*arguments: object) -> str:
        command = [sys.executable, *STRICT, ROOT / f"examples/{example}.py", uri, *map(str, arguments)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        assert (ran.returncode, ran.stderr) == (0, "")
        return ran.stdout

    if example == "write_ahead_log":
        assert json.loads(run(302, "a=1")) == {"a": "1"}
        assert json.loads(run(302, "b=2")) == {"a": "1", "b": "2"}
    else:
        (tmp_path / "file").write_text("content")
        assert run("get", run("put", tmp_path / "file").strip()) == "content"
