"""Pods as Pulsar's chart makes them of its values, by release: TLS, several volumes, emptyDir, Pulsar's own driver.

tests/data/pulsar_chart/pods.yaml has variables, commands and scripts as the chart's templates render them.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

pytest.importorskip("cryptography.x509")

from support.certificates import Authority, mount_secret
from support.pods import DOMAIN, Network, Pod, PodZooKeeper, require_namespaces
from support.servers import Java
from support.waiting import eventually

pytestmark = pytest.mark.java

PODS = yaml.safe_load((Path(__file__).parent.parent / "data/pulsar_chart/pods.yaml").read_text())
PREPARE = "bin/apply-config-from-env.py conf/bookkeeper.conf >&2\n"
SIMPLE_TEST = f"{PREPARE}bin/bookkeeper shell simpletest -ensemble 1 -writeQuorum 1 -ackQuorum 1 -numEntries 9"


class ChartPod(Pod):
    """A pod with the variables and containers of one that the chart made."""

    def __init__(self, network: Network, name: str, number: int, made: dict[str, Any], env: dict[str, str]) -> None:
        *self.init, main = (f"exec {shlex.join(each)}" for each in made["containers"])
        super().__init__(network, name, number, main, env)
        (self.home / "pulsar/certs").mkdir()

    def write_scripts(self, scripts: dict[str, str]) -> None:
        """Mount the chart's scripts."""
        for name, text in scripts.items():
            path = self.home / "pulsar" / ("keytool" if name == "keytool.sh" else "bin") / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            path.chmod(0o755)

    def run_init(self) -> str:
        """Run the init containers in their order; return what they print."""
        printed = ""
        for command in self.init:
            done = self.run(command, 180)
            assert done.returncode == 0, done.stdout + done.stderr
            printed += done.stdout + done.stderr
        return printed


class Release(NamedTuple):
    """A ZooKeeper, the job, a bookie and an auto-recovery."""

    network: Network
    authority: Authority
    job: ChartPod
    bookie: ChartPod
    recovery: ChartPod

    def mount_certificates(self, serial: int, *pods: ChartPod) -> None:
        """Mount certificates signed by the authority, or replace them."""
        for pod in pods or (self.job, self.bookie, self.recovery):
            certs = pod.home / "pulsar/certs"
            mount_secret(certs / "ca", {"ca.crt": self.authority.pem})
            mount_secret(certs / "extra", {"ca.crt": Authority().pem})
            (certs / "cacerts").mkdir(exist_ok=True)
            for number, name in enumerate(("toolset", "bookie", "autorecovery")):
                mount_secret(certs / name, self.authority.files(f"pulsar-{name}.{DOMAIN}", serial + number))


def made_release(name: str, java: Java, directory: Path, stack: ExitStack) -> Release:
    require_namespaces()
    pods = PODS[name]
    network = Network(directory)
    stack.callback(network.close)
    authority = Authority()
    server = directory / "server.pem"
    server.write_bytes(authority.files("pulsar-zookeeper", 1)["tls-combined.pem"])
    trusted = directory / "ca.pem"
    trusted.write_bytes(authority.pem)
    zookeeper = PodZooKeeper(
        network, java, 2,
        "serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory\nsecureClientPort=2281\n"
        f"ssl.keyStore.location={server}\nssl.trustStore.location={trusted}\nssl.clientAuth=need\n",
    )  # fmt: skip
    zookeeper.port = 2181
    with network.hosts.open("a") as hosts:
        for alias in ("", "-0.pulsar-zookeeper.bk", "-2.pulsar-zookeeper.bk", "-2.pulsar-zookeeper-headless.bk"):
            hosts.write(f"10.99.0.2 pulsar-zookeeper{alias}\n")
    zookeeper.start()
    stack.callback(zookeeper.kill)
    of_bookie, of_recovery = ({**pods[each]["env"]} for each in ("bookie", "recovery"))
    # The disk of the machine may be nearly full.
    of_bookie |= dict.fromkeys(("diskUsageLwmThreshold", "diskUsageWarnThreshold", "diskUsageThreshold"), "0.99")
    if "PULSAR_PREFIX_tlsCertFilesRefreshDurationSeconds" in of_bookie:
        of_bookie["PULSAR_PREFIX_tlsCertFilesRefreshDurationSeconds"] = "1"
    release = Release(
        network,
        authority,
        ChartPod(network, "pulsar-bookie-init-0", 30, pods["bookie-init"], of_bookie),
        ChartPod(network, "pulsar-bookie-0", 10, pods["bookie"], of_bookie),
        ChartPod(network, "pulsar-recovery-0", 20, pods["recovery"], of_recovery),
    )
    for pod in (release.job, release.bookie, release.recovery):
        pod.write_scripts(pods.get("scripts", {}))
    release.mount_certificates(10)
    release.job.run_init()
    done = release.job.run(release.job.script, 120)
    assert done.returncode == 0, done.stdout + done.stderr
    for pod in (release.bookie, release.recovery):
        stack.callback(pod.kill)
        pod.run_init()
        pod.launch()
    release.bookie.wait_ready()
    return release


@pytest.fixture
def made(request: pytest.FixtureRequest, java: Java, tmp_path: Path) -> Iterator[Release]:
    with ExitStack() as stack:
        yield made_release(request.param, java, tmp_path, stack)


def metrics_of(pod: Pod) -> str:
    return pod.run("curl -sf http://127.0.0.1:8000/metrics").stdout


@pytest.mark.parametrize("made", ["4.7.0-tls", "4.0.1-tls", "3.0.0-tls"], indirect=True)
def test_tls_to_zookeeper_and_bookies(made: Release) -> None:
    bookie = made.bookie
    tested = bookie.run(SIMPLE_TEST)
    assert tested.returncode == 0, tested.stdout + tested.stderr
    eventually(lambda: made.recovery.probe("/metrics") == 200)
    log = bookie.log_tail(0, 1 << 20)
    if "PULSAR_PREFIX_bookieWhatever" in bookie.env:
        assert "bookieWhatever, numAddWorkerThread have no effect: the bookie does not know this key" in log
        first = metrics_of(bookie)
        for server in ("bookie", "metadata"):
            assert f'bookie_certificate_expiry_seconds{{server="{server}"}}' in first
    for directory in bookie.env["ledgerDirectories"].split(",") + bookie.env["journalDirectories"].split(","):
        assert (bookie.home / directory.removeprefix("/") / "current").is_dir()
    made.mount_certificates(50, bookie)
    if "PULSAR_PREFIX_tlsCertFilesRefreshDurationSeconds" in bookie.env:
        eventually(lambda: "are in use" in bookie.log_tail(0, 1 << 20))
    assert "are refused" not in bookie.log_tail(0, 1 << 20)
    assert bookie.probe("/api/v1/bookie/state") == 200


@pytest.mark.parametrize("made", ["4.7.0-empty-dirs"], indirect=True)
def test_bookies_without_volumes_start_anew_with_pulsar_s_metadata_driver(made: Release) -> None:
    bookie = made.bookie
    assert bookie.run(SIMPLE_TEST).returncode == 0
    bookie.stop()
    bookie.replace()
    shutil.rmtree(bookie.home / "pulsar/data/bookkeeper")
    bookie.run_init()
    bookie.start()
    tested = bookie.run(SIMPLE_TEST)
    assert tested.returncode == 0, tested.stdout + tested.stderr
    shell = f"{PREPARE}bin/pulsar zookeeper-shell -server pulsar-zookeeper ls /pre/ledgers"
    assert "available" in bookie.run(shell).stdout
