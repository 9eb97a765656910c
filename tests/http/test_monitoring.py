"""Dashboards, alerts and runbooks: a real Prometheus scrapes real bookies under load, and runs every query."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.certificates import write_pair
from support.command_line import CommandLine
from support.own_bookies import OwnBookie
from support.own_cluster import start_all
from support.raw_http import http_port
from support.servers import DB, SORTED, Server, free_port, require, wait_for

from bkctl.metadata.admin.health_codes import HealthCode
from bkctl.metadata.cluster import open_cluster

ROOT = Path(__file__).resolve().parent.parent.parent
_SPEC = importlib.util.spec_from_file_location("monitoring", ROOT / "docs" / "monitoring.py")
assert _SPEC is not None
assert _SPEC.loader is not None
monitoring: Any = importlib.util.module_from_spec(_SPEC)
sys.modules["monitoring"] = monitoring
_SPEC.loader.exec_module(monitoring)

#: Only a defect reaches it.
LIMIT_S = 90
ALERTS = ROOT / "docs" / "service" / "alerts.yml"
#: Queries of other dashboards that cannot return data here, and why.
WITHOUT_DATA = {
    "kubelet_volume_stats": "Kubernetes' own metrics",
    "bookie_ledger_dir__pulsar_data_bookkeeper_ledgers_0_usage": "the path of Pulsar's image is in the name",
    "JOURNAL_CB_QUEUE_SIZE": "Apache's bookie has no such queue any more",
    "MINOR_COMPACTION_COUNT": "a former name",
    "DELETED_LEDGER_COUNT": "a former name",
    "thread_executor_queue": "our bookie has no such threads",
    "/ sum(irate(bookie_read_cache_hits": "0 / 0 unless clients read on in ledgers that memory has forgotten",
    "bookie_SERVER_STATUS == 0": "data only while a bookie is read-only",
}
#: Series with which an alert fires, and with which it does not, for promtool; `instance` is added.
SERIES = {
    "BookieDown": ('up{job="bookkeeper"}', "0", "1"),
    "BookieUnregistered": ("bkctl_unregistered_seconds", "30", "0"),
    "BookieReadOnly": ("bookie_SERVER_STATUS", "0", "1"),
    "BookieDirectoryFull": ("bookie_ledger_writable_dirs", "1", "2"),
    "BookieLedgersUnavailable": ("bkctl_set_aside_ledgers", "3", "0"),
    "BookieLedgersUnreadable": ("bkctl_unreadable_ledgers", "3", "0"),
    "BookieCertificateExpires": ("bookie_certificate_expiry_seconds", "3600", "99999999"),
    "BookieJournalSlow": ('bookie_journal_JOURNAL_SYNC{success="true", quantile="0.99"}', "2000", "3"),
    "BookieClockSkewed": ("bkctl_clock_seconds", "100+60", "0+60"),
    "NoAuditor": ("auditor_elected", "0", "1"),
    "ReplicationFails": ('replication_worker_rereplicate_count{success="false"}', "0+1", "0"),
    "BookieIndexLost": ("bkctl_gc_unindexed_ledgers", "1", "0"),
    "BookieKeepsDeletedLedgers": ("bkctl_gc_scoped_held_back", "1", "0"),
    "BookieUnexpectedErrors": ("bkctl_unexpected_errors_total", "0+1", "0"),
    "BookieDescriptorsShort": ('process_open_fds{job="bookkeeper"}', "95", "5"),
    "LedgerEntriesLost": ("auditor_NUM_LEDGERS_HAVING_NO_REPLICA_OF_AN_ENTRY", "1", "0"),
}
#: The metric that the alert compares with.
BESIDE = {
    "BookieDirectoryFull": "bookie_ledger_num_dirs",
    "BookieDescriptorsShort": 'process_max_fds{job="bookkeeper"}',
}


# --- generated files --------------------------------------------------------------------------------------------------


def test_alerts_dashboards_runbooks_and_the_list_of_metrics_are_generated() -> None:
    files = monitoring.generated_files()
    stale = [name for name, text in files.items() if not (ROOT / name).exists() or (ROOT / name).read_text() != text]
    assert stale == [], "run make generate"
    assert {path.stem for path in (ROOT / "docs/runbooks").iterdir()} == {
        Path(name).stem for name in files if name.startswith("docs/runbooks/")
    }


def test_each_health_code_and_each_alert_has_a_runbook() -> None:
    for code in HealthCode:
        text = (ROOT / f"docs/runbooks/{code}.md").read_text()
        assert code.what in text
        assert re.findall(r"^## (.+)$", text, re.MULTILINE) == ["What it means", "What to look at", "What to do"]
    for rule in rules():
        page = (ROOT / rule["annotations"]["runbook"]).read_text()
        assert rule["alert"] in page
        assert rule["expr"] in page


def documented_commands() -> Iterator[tuple[str, str]]:
    """Yield page and command of runbooks and alerts, and of the guides' blocks."""
    for pages, command in (
        ("runbooks/*.md", r"`bkctl ([^`]+)`"),
        ("service/alerts.yml", r"'bkctl ([^'\n]+)'"),
        ("guides/*.md", r"^    bkctl (.+?)(?:  +#.*)?$"),
    ):
        for page in (ROOT / "docs").glob(pages):
            yield from ((page.name, line) for line in re.findall(command, page.read_text(), re.MULTILINE))


def test_no_command_of_runbooks_guides_and_alerts_lacks_an_argument(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command runs without a cluster: exit code 2 comes first."""
    monkeypatch.chdir(tmp_path)
    filled = {"LEDGER": "1", "$L": "1", "BOOKIE": "b1:3181", "$B": "b1:3181", "$NEW": f"sqlite:///{tmp_path}/new.db"}
    bkctl = CommandLine(f"sqlite:///{tmp_path}/none.db")
    found = set(documented_commands()) - {("bookie-slow.md", "top")}
    assert len(found) > 100
    refused = []
    for page, line in sorted(found):
        answer = bkctl(*(filled.get(word, word) for word in shlex.split(line)), "--timeout", "5s")
        refused += [(page, line, answer.err)] if answer.code == 2 else []
    assert refused == []


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    return list(group["rules"])


# --- promtool ---------------------------------------------------------------------------------------------------------


def tool(name: str) -> str:
    return shutil.which(name) or require("prometheus", f"no {name}: .ci/prepare installs it")


def with_instance(series: str) -> str:
    return f'{series[:-1]}, instance="b1"}}' if series.endswith("}") else f'{series}{{instance="b1"}}'


def test_promtool_accepts_the_rules() -> None:
    checked = subprocess.run([tool("promtool"), "check", "rules", ALERTS], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_each_alert_fires_on_its_series_and_not_on_sound_ones(tmp_path: Path) -> None:
    assert {rule["alert"] for rule in rules()} == SERIES.keys()
    cases = []
    for rule in rules():
        series, bad, good = SERIES[rule["alert"]]
        for value, fires in ((bad, True), (good, False)):
            values = f"{value}x100" if "+" in value else f"{value}+0x100"
            beside = "2+0x100" if "dirs" in BESIDE.get(rule["alert"], "") else "100+0x100"
            inputs = [{"series": with_instance(series), "values": values}]
            if rule["alert"] in BESIDE:
                inputs.append({"series": with_instance(BESIDE[rule["alert"]]), "values": beside})
            query = f'count(ALERTS{{alertname="{rule["alert"]}", alertstate="firing"}})'
            expected = [{"labels": "{}", "value": 1}] if fires else []
            cases.append({
                "interval": "1m", "input_series": inputs,
                "promql_expr_test": [{"expr": query, "eval_time": "90m", "exp_samples": expected}],
            })  # fmt: skip
    (tmp_path / "tests.yml").write_text(
        yaml.safe_dump({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": cases})
    )
    tested = subprocess.run([tool("promtool"), "test", "rules", tmp_path / "tests.yml"], capture_output=True, text=True)
    assert tested.returncode == 0, tested.stdout + tested.stderr


# --- Prometheus -------------------------------------------------------------------------------------------------------


class Prometheus(Server):
    """A Prometheus that scrapes bookies each second, with our alerts, which do not wait."""

    def __init__(self, directory: Path, targets: list[str]) -> None:
        directory.mkdir()
        self.port = free_port()
        alerts = re.sub(r"for: \w+", "for: 1s", ALERTS.read_text())
        (directory / "alerts.yml").write_text(alerts)
        scrape = {
            "job_name": "bookkeeper",
            "static_configs": [{"targets": targets, "labels": {"cluster": "test"}}],
            "relabel_configs": [{"source_labels": ["__address__"], "target_label": "kubernetes_pod_name"}],
        }
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": ["alerts.yml"], "scrape_configs": [scrape],
        }  # fmt: skip
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
        command = [
            tool("prometheus"), f"--config.file={directory / 'prometheus.yml'}",
            f"--storage.tsdb.path={directory / 'data'}", f"--web.listen-address=127.0.0.1:{self.port}",
        ]  # fmt: skip
        super().__init__(
            "prometheus", directory / "log", lambda: command, lambda: "ready to receive" in self.log_tail()
        )

    def get(self, path: str, **query: str) -> Any:
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]

    def has_data(self, expr: str) -> bool:
        """True if the query returns a number."""
        found = self.get("query", query=expr)["result"]
        return any(math.isfinite(float(each["value"][1])) for each in found)

    def firing(self) -> set[str]:
        return {each["labels"]["alertname"] for each in self.get("alerts")["alerts"] if each["state"] == "firing"}


def bkctl(*arguments: object) -> str:
    command = [sys.executable, "-m", "bkctl", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Watched:
    """Five bookies under load, and the Prometheus that scrapes them."""

    def __init__(self, directory: Path) -> None:
        self.uri = f"sqlite://{directory / 'metadata.db'}"
        open_cluster(self.uri, create=True).close()
        pair = directory / "pair.pem", directory / "key.pem"
        write_pair(*pair, 1, days=3)
        pair[0].write_text(pair[0].read_text() + pair[1].read_text())
        common = {
            "httpServerEnabled": "true", "httpServerHost": "127.0.0.1", "httpServerPort": 0, "gcWaitTime": 1000,
            "autoRecoveryDaemonEnabled": "true", "lostBookieRecoveryDelay": 0, "auditorPeriodicBookieCheckInterval": 2,
            "openLedgerRereplicationGracePeriod": 1000, "flushInterval": 500,
        }  # fmt: skip
        tls = {
            "tlsProviderFactoryClass": "TLSContextFactory", "tlsKeyStoreType": "PEM", "tlsKeyStore": pair[0],
            "tlsCertificatePath": pair[0],
        }  # fmt: skip
        self.bookies = [
            OwnBookie(self.uri, directory / f"bookie-{number}", storage=storage, settings=common | more)
            for number, (storage, more) in enumerate([(DB, {}), (DB, tls), (DB, {}), (SORTED, {}), (DB, {})])
        ]
        #: Bookies whose TLS and read-only state the tests look at.
        self.needed = self.bookies[1:3]
        self.victim = self.bookies[4]
        start_all(self.bookies)
        self.prometheus = Prometheus(
            directory / "prometheus", [f"127.0.0.1:{http_port(each)}" for each in self.bookies]
        )
        self.prometheus.start()

    def load(self, seconds: int) -> subprocess.Popen[bytes]:
        """Begin to add and read."""
        load = [
            "bench",
            "mixed",
            "--duration",
            f"{seconds}s",
            "--rate",
            "400",
            "--ledgers",
            "3",
            "--random",
            "-u",
            self.uri,
        ]
        return subprocess.Popen([sys.executable, "-m", "bkctl", *load], stdout=subprocess.DEVNULL)

    def kill(self) -> None:
        for server in (self.prometheus, *self.bookies):
            server.kill()


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    tool("prometheus")
    directory = tmp_path_factory.mktemp("watched")
    made = Watched(directory)
    try:
        body = directory / "body"
        body.write_text("".join(f"entry {number} {'x' * 200}\n" for number in range(300)))
        uri = ("-u", made.uri)
        write = ("ledger", "write", "--ensemble-size", 3, "--write-quorum", 3, "--ack-quorum", 2, body)
        ledgers = [bkctl(*write, *more, *uri, "-o", "id").split()[0] for more in ((), ("--ledger-scope-id", "7"))]
        load = made.load(12)
        time.sleep(2)  # a checkpoint: reads find the entries in entry logs
        for ledger in ledgers:
            bkctl("ledger", "read", ledger, *uri, "-o", "ndjson")
        load.wait(60)
        shown = bkctl("ledger", "show", ledgers[0], *uri, "-o", "json")
        made.victim = next(each for each in made.bookies[::-1] if each.bookie_id in shown and each not in made.needed)
        made.victim.stop()  # workers copy what it had
        yield made
    finally:
        made.kill()


def dashboard_queries() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in (Path(__file__).with_name("dashboard_queries.txt")).read_text().splitlines()[1:]:
        if line.startswith("# "):
            found[line[2:]] = queries = []
        else:
            queries.append(line)
    return found


def test_every_panel_of_ours_and_of_known_dashboards_returns_data(watched: Watched) -> None:
    prometheus = watched.prometheus
    wait_for(
        lambda: prometheus.has_data("replication_worker_NUM_BYTES_WRITTEN_count > 0"), "a replicated ledger", LIMIT_S
    )
    load = watched.load(LIMIT_S)
    try:
        wait_for(lambda: empty_queries(prometheus) == [], "data for all queries", LIMIT_S)
    finally:
        print(*empty_queries(prometheus), sep="\n")
        load.terminate()
        load.wait(60)


def empty_queries(prometheus: Prometheus) -> list[str]:
    """The queries without data that should have some."""
    variables = {"$job": ".*", "$instance": ".*", "$__rate_interval": "1m", "$__range": "1m"}
    ours = [
        re.sub(r"\$\w+", lambda found: variables[found[0]], expr)
        for panels in monitoring.DASHBOARDS.values()
        for panel in panels
        if not panel.idle
        for expr in panel.queries.values()
    ]
    empty = [expr for expr in ours if not prometheus.has_data(expr)]
    for name, queries in dashboard_queries().items():
        without = [expr for expr in queries if not prometheus.has_data(expr)]
        print(f"{name}: {len(queries) - len(without)} of {len(queries)} return data")
        empty += [f"{name}: {expr}" for expr in without if not any(part in expr for part in WITHOUT_DATA)]
    return empty


def test_alerts_fire_when_their_faults_are_made(watched: Watched) -> None:
    prometheus = watched.prometheus
    bkctl("bookie", "readonly", "on", "--bookie", watched.bookies[2].bookie_id, "-u", watched.uri)
    wanted = {"BookieDown", "BookieReadOnly", "BookieCertificateExpires"}
    wait_for(lambda: wanted <= prometheus.firing(), f"{wanted} to fire", LIMIT_S)
    assert prometheus.firing() - wanted <= {"NoAuditor", "ReplicationFails", "BookieClockSkewed"}
