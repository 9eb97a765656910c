"""Our image in the place of Pulsar's under its Helm chart: jobs, pods, probes, a rolling restart, a broker on top.

The scripts below run what the containers of the chart run, in its order (apache/pulsar-helm-chart, charts/pulsar:
templates/bookkeeper-cluster-initialize.yaml, bookkeeper-statefulset.yaml, autorecovery-statefulset.yaml,
_bookkeeper.tpl); the variables come from its config maps, with the defaults of values.yaml.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import NamedTuple

import pytest
import yaml
from support.pods import ROOT, JavaInPod, Network, Pod, PodZooKeeper, require_namespaces
from support.servers import Java, conversation
from support.waiting import eventually

pytestmark = pytest.mark.java

INIT = """
bin/apply-config-from-env.py conf/bookkeeper.conf
export BOOKIE_MEM=-Xmx128M
until nslookup zookeeper; do sleep 1; done
timeout 15 bin/bookkeeper shell whatisinstanceid && echo 'there is a cluster' && exit
bin/bookkeeper shell initnewcluster
"""
VERIFY = """
set -e
bin/apply-config-from-env.py conf/bookkeeper.conf
export BOOKIE_MEM=-Xmx128M
until timeout 15 bin/bookkeeper shell whatisinstanceid; do sleep 3; done
"""
BOOKIE = """
export PULSAR_PREFIX_defaultRocksdbConf=conf/default_rocksdb.conf
export PULSAR_PREFIX_entryLocationRocksdbConf=conf/entry_location_rocksdb.conf
export PULSAR_PREFIX_ledgerMetadataRocksdbConf=conf/ledger_metadata_rocksdb.conf
[ -x bin/update-rocksdb-conf-from-env.py ] && [ -f "$PULSAR_PREFIX_entryLocationRocksdbConf" ] || exit 9
bin/update-rocksdb-conf-from-env.py "$PULSAR_PREFIX_entryLocationRocksdbConf"
bin/apply-config-from-env.py conf/bookkeeper.conf
OPTS="$OPTS -Dlog4j2.formatMsgNoLookups=true" exec bin/pulsar bookie
"""
RECOVERY = """
bin/apply-config-from-env.py conf/bookkeeper.conf
OPTS="$OPTS -Dlog4j2.formatMsgNoLookups=true" exec bin/bookkeeper autorecovery
"""


def common(metadata_uri: str) -> dict[str, str]:
    return {
        "zkServers": "", "zkLedgersRootPath": "", "metadataServiceUri": metadata_uri, "httpServerEnabled": "true",
        "httpServerPort": "8000", "useHostNameAsBookieID": "true",
    }  # fmt: skip


BOOKIE_ENV = {
    "autoRecoveryDaemonEnabled": "false", "journalMaxBackups": "0",
    "journalDirectories": "/pulsar/data/bookkeeper/journal",
    "PULSAR_PREFIX_journalDirectories": "/pulsar/data/bookkeeper/journal",
    "ledgerDirectories": "/pulsar/data/bookkeeper/ledgers",
    "PULSAR_MEM": "-Xms128m -Xmx256m -XX:MaxDirectMemorySize=256m\n", "PULSAR_GC": "-XX:+UseZGC\n",
    "minorCompactionThreshold": "0.2", "minorCompactionInterval": "360", "majorCompactionThreshold": "0.8",
    "majorCompactionInterval": "10800", "gcWaitTime": "300000", "isForceGCAllowWhenNoSpace": "true",
    "PULSAR_PREFIX_entryLocationCompactionInterval": "86400", "diskUsageLwmThreshold": "0.99",
    "diskUsageWarnThreshold": "0.99", "diskUsageThreshold": "0.99", "diskCheckInterval": "1800",
    "dbStorage_rocksDB_writeBufferSizeMB": "8", "dbStorage_rocksDB_blockCacheSize": "8388608",
}  # fmt: skip
RECOVERY_ENV = {
    "BOOKIE_MEM": "-Xms64m -Xmx128m\n", "PULSAR_PREFIX_useV2WireProtocol": "true",
    # Pulsar's 30 s are the time that a restart would wait for.
    "openLedgerRereplicationGracePeriod": "1000",
}  # fmt: skip


class Release(NamedTuple):
    """The pods of a release of the chart."""

    network: Network
    zookeeper: PodZooKeeper
    bookies: list[Pod]
    recovery: list[Pod]
    #: A pod that only runs commands.
    toolset: Pod
    outputs: dict[str, str]


@pytest.fixture(scope="module")
def release(java: Java, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    require_namespaces()
    with ExitStack() as stack:
        network = Network(tmp_path_factory.mktemp("pods"))
        stack.callback(network.close)
        zookeeper = PodZooKeeper(network, java, 2)
        zookeeper.start()
        stack.callback(zookeeper.kill)
        env = common(f"zk+hierarchical://{zookeeper.connect_string}/ledgers")
        toolset = Pod(network, "toolset-0", 3, "", env)
        bookies = [Pod(network, f"bookie-{n}", 10 + n, BOOKIE, env | BOOKIE_ENV) for n in range(4)]
        recovery = [Pod(network, f"recovery-{n}", 20 + n, RECOVERY, env | RECOVERY_ENV) for n in range(2)]
        job = Pod(network, "init-0", 30, INIT, env | BOOKIE_ENV)
        early = bookies[0].run(
            "bin/apply-config-from-env.py conf/bookkeeper.conf\nbin/bookkeeper shell whatisinstanceid"
        )
        outputs = {"early": f"{early.returncode}"}
        for name in ("init", "again"):
            done = job.run(f"timeout 60 sh -c '{INIT.replace(chr(39), chr(34))}'")
            assert done.returncode == 0, done.stdout + done.stderr
            outputs[name] = done.stdout
        assert bookies[0].run(VERIFY).returncode == 0
        for pod in (*bookies, *recovery):
            stack.callback(pod.kill)
            pod.launch()
        for pod in bookies:
            pod.wait_ready()
        yield Release(network, zookeeper, bookies, recovery, toolset, outputs)


def test_the_init_job_makes_a_cluster_once_and_init_containers_wait_for_it(release: Release) -> None:
    assert release.outputs["early"] != "0"
    assert "there is a cluster" not in release.outputs["init"]
    assert "there is a cluster" in release.outputs["again"]


def test_probes_of_every_bookie_answer_on_the_pod_s_address(release: Release) -> None:
    for pod in release.bookies:
        assert pod.probe("/api/v1/bookie/state") == 200
        assert pod.probe("/api/v1/bookie/is_ready") == 200
        assert pod.probe("/metrics") == 200
        assert pod.probe("/api/v1/config/server_config") in (401, 403)


def test_bookies_register_by_their_host_names_and_say_what_has_no_effect(release: Release) -> None:
    prepare = "bin/apply-config-from-env.py conf/bookkeeper.conf >&2\n"
    listed = release.toolset.run(f"{prepare}bin/bookkeeper shell listbookies -rw -h")
    assert listed.returncode == 0, listed.stderr
    for pod in release.bookies:
        assert pod.bookie_id in listed.stdout
    log = release.bookies[0].log_tail(0, 1 << 20)
    for name in ("PULSAR_MEM", "PULSAR_GC", "OPTS", "defaultRocksdbConf", "ledgerMetadataRocksdbConf"):
        assert any(name in line and "no effect" in line for line in log.splitlines()), name
    for pod in release.recovery:
        eventually(lambda pod=pod: "useV2WireProtocol" in pod.log_tail(0, 1 << 20))
        assert pod.running


def test_the_way_down_of_our_own_manifests_moves_writers_until_the_next_start(release: Release) -> None:
    manifests = yaml.safe_load_all((ROOT / "deploy/bookies.yaml").read_text())
    (spec,) = (each["spec"]["template"]["spec"] for each in manifests if each["kind"] == "StatefulSet")
    *_, command = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    pod = release.bookies[3]
    stopped = pod.run(command.replace(":8080", ":8000"))
    assert stopped.returncode == 0, stopped.stderr
    listed = "bin/apply-config-from-env.py conf/bookkeeper.conf >&2\nbin/bookkeeper shell listbookies"
    assert pod.bookie_id in release.toolset.run(f"{listed} -ro").stdout
    assert pod.probe("/api/v1/bookie/state") == 200
    pod.stop()
    pod.replace()
    pod.start()
    assert pod.bookie_id in release.toolset.run(f"{listed} -rw").stdout


def test_a_broker_loses_nothing_while_bookies_are_killed_and_rolled(release: Release) -> None:
    uri = f"zk+hierarchical://{release.zookeeper.connect_string}/ledgers"
    topic, count = "persistent://public/default/orders", 0
    prepare = "bin/apply-config-from-env.py conf/bookkeeper.conf >&2\n"
    java = JavaInPod(release.network, 40)
    store = f"zk:{release.zookeeper.connect_string}"
    with conversation(java, "org.apache.pulsar.broker.PulsarBroker", store, uri, "NONE", 1, errors_raise=True) as ask:

        def produce() -> None:
            nonlocal count
            ask("produce", topic, 15)
            count += 15

        ask("subscribe", topic, "all", 0)  # Messages before a subscription may be deleted.
        produce()
        release.bookies[0].kill()
        produce()
        release.bookies[0].replace()
        release.bookies[0].start()
        for pod in release.bookies:
            guard = f"{prepare}bkctl --conf conf/bookkeeper.conf bookies ok-to-stop {pod.bookie_id}"
            eventually(lambda guard=guard: release.toolset.run(guard).returncode == 0)
            pod.stop()
            pod.replace()
            assert pod.run(VERIFY).returncode == 0
            pod.start()
            produce()
        ask("subscribe", topic, "all", count)
        checked = release.toolset.run(f"{prepare}bkctl --conf conf/bookkeeper.conf pulsar check --pause 1s")
        assert checked.returncode == 0, checked.stdout + checked.stderr
