"""Pods without Kubernetes: processes in network namespaces with addresses of their own, on one bridge."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.servers import JavaOnPulsar, Server, ZooKeeperServer, require

ROOT = Path(__file__).parents[2]
PULSAR = ROOT / "image/pulsar"
DOMAIN = "bk.svc.cluster.local"

#: Enters a pod: its host name, the cluster's names, and the host's files below a root of its own with /pulsar.
ENTER = """
set -e
name=$1 hosts=$2 home=$3
shift 3
hostname "$name"
mount --bind "$hosts" /etc/hosts
if [ "$home" = - ]; then exec "$@"; fi
root=$home/root
mkdir -p "$root/pulsar"
for each in /*; do
    if [ -L "$each" ]; then [ -e "$root$each" ] || cp -P "$each" "$root$each"
    elif [ -d "$each" ] && [ "$each" != /pulsar ]; then mkdir -p "$root$each"; mount --rbind "$each" "$root$each"
    fi
done
mount --bind "$home/pulsar" "$root/pulsar"
exec chroot "$root" sh -c 'cd /pulsar && exec "$@"' pod "$@"
"""
PROBE = """
import sys, urllib.error, urllib.request
try:
    with urllib.request.urlopen(sys.argv[1], timeout=5) as answer:
        print(answer.status)
except urllib.error.HTTPError as error:
    print(error.code)
except OSError:
    print(0)
"""


def require_namespaces() -> None:
    """Skip the test where no network namespaces can be made."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "hostname"))):
        require("netns", "root, ip, unshare and hostname are needed")
    space = f"bkctl-{os.getpid()}-tried"
    steps = ("ip netns add {0}", "ip -n {0} link add br0 type bridge", "ip netns exec {0} unshare --mount --uts true")
    try:
        for step in steps:
            tried = subprocess.run(step.format(space).split(), capture_output=True, text=True)
            if tried.returncode:  # Nothing that can be installed: a kernel or a container that does not allow it.
                pytest.skip(f"netns: {step}: {tried.stderr}")
    finally:
        subprocess.run(["ip", "netns", "del", space], capture_output=True)


def ip(*words: object) -> None:
    subprocess.run(["ip", *map(str, words)], check=True, capture_output=True)


class Network:
    """A bridge in a namespace of its own, `hub`; the machine's own network is not touched."""

    _numbers = itertools.count()

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.hosts = directory / "hosts"
        self.hosts.write_text("127.0.0.1 localhost\n")
        self._prefix = f"bkctl-{os.getpid()}-{next(self._numbers)}"
        self._spaces: list[str] = []
        self._addresses: dict[str, str] = {}
        self.hub = self.space("hub", 1)

    def space(self, name: str, number: int) -> str:
        """Make a namespace with the address 10.99.0.`number`, whose host is `name`. Returns its name."""
        space = f"{self._prefix}-{name}"
        ip("netns", "add", space)
        self._spaces.append(space)
        if name == "hub":
            ip("-n", space, "link", "add", "br0", "type", "bridge")
            device = "br0"
        else:
            device = "eth0"
            ip("-n", self.hub, "link", "add", f"v{number}", "type", "veth", "peer", "name", device, "netns", space)
            ip("-n", self.hub, "link", "set", f"v{number}", "master", "br0", "up")
            self._addresses[name] = f"10.99.0.{number}"
            service = name.rpartition("-")[0] or name
            with self.hosts.open("a") as hosts:
                hosts.write(f"10.99.0.{number} {name}.{service}.{DOMAIN} {name}\n")
        ip("-n", space, "addr", "add", f"10.99.0.{number}/24", "dev", device)
        for each in (device, "lo"):
            ip("-n", space, "link", "set", each, "up")
        return space

    def enter(self, space: str, name: str, home: Path | None, *command: str) -> list[str]:
        """Return the command that runs `command` in a namespace, with a /pulsar of its own if it has a `home`."""
        inside = ["sh", "-c", ENTER, "enter", name, str(self.hosts), str(home or "-"), *command]
        return ["ip", "netns", "exec", space, "unshare", "--mount", "--uts", *inside]

    def probe(self, url: str) -> int:
        """Return the status that a client elsewhere gets, 0 for none: as the kubelet, with no token."""
        command = ["ip", "netns", "exec", self.hub, sys.executable, "-c", PROBE, url]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    def answers(self, name: str, port: int) -> bool:
        """Return True if a pod's port accepts connections from elsewhere."""
        program = f"import socket; socket.create_connection(({self._addresses[name]!r}, {port}), 5)"
        command = ["ip", "netns", "exec", self.hub, sys.executable, "-c", program]
        return subprocess.run(command, capture_output=True).returncode == 0

    def close(self) -> None:
        for space in reversed(self._spaces):
            subprocess.run(["ip", "netns", "del", space], capture_output=True)


class Pod(Server):
    """A pod from our image: /pulsar as in the image, the variables of a config map, and the script of its container."""

    def __init__(self, network: Network, name: str, number: int, script: str, env: Mapping[str, str]) -> None:
        self.network, self.host, self.address = network, name, f"10.99.0.{number}"
        self.home = network.directory / name
        self.script = script
        self._space = network.space(name, number)
        # The image has no nslookup and no keytool but those in /pulsar/bin.
        path = f"{Path(sys.executable).parent}:/pulsar/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        self.env = {"PATH": path, "HOME": "/pulsar/data", "PYTHONPATH": str(ROOT), "LANG": "C.UTF-8", **env}
        super().__init__(name, self.home / "log", lambda: self._command_of(self.script), self._serves)
        shutil.copytree(PULSAR, self.home / "pulsar")

    @property
    def bookie_id(self) -> str:
        return f"{self.host}.{self.host.rpartition('-')[0]}.{DOMAIN}:3181"

    def _command_of(self, script: str) -> list[str]:
        settings = [f"{name}={value}" for name, value in self.env.items()]
        return self.network.enter(self._space, self.host, self.home, "env", "-i", *settings, "sh", "-c", script)

    def run(self, script: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        """Run a script in the pod to its end, as an init container does."""
        return subprocess.run(self._command_of(script), capture_output=True, text=True, timeout=timeout_s)

    def replace(self) -> None:
        """Give the pod a new container: the files of the image; volumes stay."""
        for part in ("bin", "conf"):
            shutil.rmtree(self.home / "pulsar" / part)
            shutil.copytree(PULSAR / part, self.home / "pulsar" / part)

    def probe(self, path: str) -> int:
        return self.network.probe(f"http://{self.address}:8000{path}")

    def _serves(self) -> bool:
        return self.probe("/api/v1/bookie/is_ready") == 200


class PodZooKeeper(ZooKeeperServer):
    """A ZooKeeper that the pods reach at `zookeeper`."""

    def __init__(self, network: Network, java: Any, number: int, config: str = "") -> None:
        self._network = network
        self._space = network.space("zookeeper", number)
        super().__init__(java, network.directory / "zookeeper", config=f"clientPortAddress=0.0.0.0\n{config}")

    @property
    def connect_string(self) -> str:
        return f"zookeeper:{self.port}"

    def _arguments(self) -> list[str]:
        return self._network.enter(self._space, "zookeeper", None, *super()._arguments())

    def _serves(self) -> bool:
        return self._network.answers("zookeeper", self.port)


class JavaInPod(JavaOnPulsar):
    """Pulsar's broker in a namespace of the network."""

    def __init__(self, network: Network, number: int) -> None:
        super().__init__()
        self._network, self._space = network, network.space("broker", number)

    def command(self, *arguments: Any, **options: Any) -> list[str]:
        return self._network.enter(self._space, "broker", None, *super().command(*arguments, **options))
