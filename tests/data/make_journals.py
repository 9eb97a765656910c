"""Make golden journals: of every version, and what Apache's bookies write with other settings than the usual ones.

    .venv/bin/python tests/data/make_journals.py 4.18.0 4.1.0 4.0.0

Needs Java and Maven. Writes `tests/data/journals/<version>/` anew:

    4.18.0/v4/       version 4, two journal directories, two ledger directories
    4.18.0/aligned/  version 5, each group filled up to 1024 bytes
    4.18.0/reused/   version 6, files of older journals taken again for new ones (ReusableJournals.java): old records
                     stand behind the new ones
    4.1.0/v3/        version 3, by the bookie of that release (OldBookie.java)
    4.0.0/v1/        version 1, likewise
    4.0.0/v2/        no release wrote version 2: the records of `v1` behind its header

In each of them `journal-N/`, `ledgers-N/` and `shell.json`: what `readjournal` and `lastmark` answered (4.18.0 answered
for the old ones).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from make import compact, cut_zeros, lines  # noqa: E402
from support import apache_shell, servers  # noqa: E402
from support.servers import (  # noqa: E402
    BOOKIE_OPTIONS,
    INTERLEAVED,
    ApacheBookie,
    Java,
    ZooKeeperServer,
    format_cluster,
    write_conf,
    write_ledgers,
)

#: Directory → (journal directories, ledger directories, settings).
BOOKIES: dict[str, tuple[int, int, dict[str, object]]] = {
    "v4": (2, 2, {"journalFormatVersionToWrite": 4, "fileInfoFormatVersionToWrite": 0}),
    "aligned": (1, 1, {"journalFormatVersionToWrite": 5, "fileInfoFormatVersionToWrite": 0,
                       "journalAlignmentSize": 1024}),
    "reused": (1, 1, {"journalChannelProvider": "ReusableJournals", "journalReuseFiles": "true", "journalMaxBackups": 3,
                      "journalMaxSizeMB": 0, "flushInterval": 100}),
}  # fmt: skip
SETTINGS = {"logSizeLimit": 40_000, "journalBufferedWritesThreshold": 4096}


class Bookie(ApacheBookie):
    """An Apache bookie that finds the programs of tests/java on its class path."""

    def _arguments(self) -> list[str]:
        return self.java.command(
            "org.apache.bookkeeper.server.Main", "--conf", self.conf, log4j="server", own=True, options=BOOKIE_OPTIONS
        )


def directories(work: Path, name: str, kind: str, count: int) -> list[Path]:
    return [work / name / f"{kind}-{number}" for number in range(count)]


def settings_of(work: Path, name: str) -> dict[str, object]:
    journals, ledgers, settings = BOOKIES[name]
    return {
        **SETTINGS, **settings,
        "journalDirectories": ",".join(map(str, directories(work, name, "journal", journals))),
        "ledgerDirectories": ",".join(map(str, directories(work, name, "ledgers", ledgers))),
    }  # fmt: skip


def ask_shell(shell: Callable[..., Any], target: Path) -> dict[str, Any]:
    answers: dict[str, Any] = {"lastMarks": apache_shell.last_marks(shell("lastmark").stdout), "journals": {}}
    for journal in sorted(target.glob("journal-*/current/*.txn")):
        text = shell("readjournal", "-dir", journal.parent, journal).stdout
        answers["journals"][str(journal.relative_to(target))] = {
            "version": apache_shell.journal_version(text), "records": compact(apache_shell.records(text))
        }  # fmt: skip
    return answers


POM = """<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>
<groupId>bkctl</groupId><artifactId>old</artifactId><version>1</version><dependencies><dependency>
<groupId>org.apache.bookkeeper</groupId><artifactId>bookkeeper-server</artifactId><version>{version}</version><exclusions>
<exclusion><groupId>com.sun.jdmk</groupId><artifactId>jmxtools</artifactId></exclusion>
<exclusion><groupId>com.sun.jmx</groupId><artifactId>jmxri</artifactId></exclusion>
<exclusion><groupId>javax.jms</groupId><artifactId>jms</artifactId></exclusion>
</exclusions></dependency></dependencies></project>"""
OLD = {"4.1.0": ("v3",), "4.0.0": ("v1", "v2")}


def old_entries() -> str:
    """Entries in hex as OldBookie takes them, in groups; as the clients of that time sealed them."""
    from bkctl.formats.entry import DigestManager, DigestType
    from bkctl.ids import LedgerId

    lines = []
    for ledger_id in (1, 2, 7, (1 << 62) + 5):
        digest, length = DigestManager(LedgerId(0, ledger_id), DigestType.CRC32, b""), 0
        for entry_id in range(10):
            payload = bytes((65 + entry_id,)) * entry_id**3
            length += len(payload)
            lines.append((digest.seal(entry_id, entry_id - 1, length, payload) + payload).hex())
            if entry_id % 3 == 0:
                lines.append("")
    return "\n".join([*lines, "", ""])


def make_old(version: str) -> None:
    java = Java("4.18.0")
    work = Path(tempfile.gettempdir()) / f"bkctl-golden-journals-{version}"
    shutil.rmtree(work, ignore_errors=True)
    jars = servers.CACHE / version
    if not jars.is_dir():
        work.mkdir()
        (work / "pom.xml").write_text(POM.format(version=version))
        goal = ["dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={jars}"]
        subprocess.run(["mvn", "-q", "-B", "-ntp", "-f", str(work / "pom.xml"), *goal], check=True)
    made = work / "made"
    made.mkdir(parents=True)
    command = [java.java, "-cp", f"{jars}/*", str(HERE / "OldBookie.java"), str(made)]
    subprocess.run(command, input=old_entries(), text=True, check=True, timeout=120)
    (file,) = made.glob("journal-0/**/*.txn")
    cut_zeros(file)
    golden = work / "golden"
    for name in OLD[version]:
        journal = golden / name / "journal-0" / "current" / file.name
        journal.parent.mkdir(parents=True)
        (golden / name / "ledgers-0" / "current").mkdir(parents=True)
        header = b"BKLG\0\0\0\2" if name == "v2" else b""
        journal.write_bytes(header + file.read_bytes())
        copy = work / "asked" / name
        shutil.copytree(golden / name, copy)
        conf = servers.offline_conf(work / "ask.conf", copy / "journal-0", copy / "ledgers-0", INTERLEAVED)
        answers = ask_shell(lambda *arguments, conf=conf: java.shell(conf, *arguments), copy)
        (golden / name / "shell.json").write_text(lines({"bookkeeper": version, **answers}) + "\n")
    shutil.rmtree(HERE / "journals" / version, ignore_errors=True)
    shutil.copytree(golden, HERE / "journals" / version)
    shutil.rmtree(work)


def make(version: str) -> None:
    java = Java(version)
    work = Path(tempfile.gettempdir()) / f"bkctl-golden-journals-{version}"
    shutil.rmtree(work, ignore_errors=True)
    zookeeper = ZooKeeperServer(java, work / "zookeeper")
    zookeeper.start()
    uri = zookeeper.metadata_uri(zookeeper.new_root())
    format_cluster(java, uri, work)
    bookies = [Bookie(java, uri, work / name, INTERLEAVED, settings=settings_of(work, name)) for name in BOOKIES]
    for bookie in bookies:
        bookie.launch()
    for bookie in bookies:
        bookie.wait_ready()
    write_ledgers(java, uri, "v3", small=True)
    for bookie in bookies:
        # Without a last checkpoint: something is left behind the marks.
        bookie.kill()
    zookeeper.kill()

    golden = work / "golden"
    for bookie, name in zip(bookies, BOOKIES, strict=True):
        target = golden / name
        ignore = shutil.ignore_patterns("*.log", "*.idx", "[0-9a-f]")
        for directory in sorted(bookie.directory.glob("*-[0-9]")):
            shutil.copytree(directory, target / directory.name, ignore=ignore)
        for journal in target.glob("journal-*/current/*.txn"):
            cut_zeros(journal)
        copy = work / "asked" / name
        shutil.copytree(target, copy)
        settings = {**bookie.settings, **settings_of(work / "asked", name)}
        settings.pop("journalChannelProvider", None)  # not on the shell's class path
        conf = write_conf(work / "ask.conf", settings)

        def shell(*arguments: object, conf: Path = conf) -> Any:
            return java.shell(conf, *arguments)

        (target / "shell.json").write_text(lines({"bookkeeper": version, **ask_shell(shell, copy)}) + "\n")
    shutil.rmtree(HERE / "journals" / version, ignore_errors=True)
    shutil.copytree(golden, HERE / "journals" / version)
    shutil.rmtree(work)


if __name__ == "__main__":
    for each in sys.argv[1:]:
        (make_old if each in OLD else make)(each)
