"""The Containerfile works, step by step, in a root file system of Debian; compose.yaml fits it. No engine is needed."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from release.conftest import BIN, ROOT, copy_checkout
from support.go_programs import go_program
from support.servers import require

CONTAINERFILE = ROOT / "Containerfile"


class Step(NamedTuple):
    """An instruction of a Containerfile."""

    name: str
    text: str


def stages() -> list[list[Step]]:
    """Return the steps of each stage of the Containerfile."""
    text = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", CONTAINERFILE.read_text(), flags=re.MULTILINE))
    steps = [Step(*line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]
    found: list[list[Step]] = []
    for step in steps:
        if step.name == "FROM":
            found.append([])
        found[-1].append(step)
    return found


def build_context(target: Path) -> Path:
    """Copy what a builder sends to an engine: the checkout but for what .dockerignore leaves out."""
    checkout = copy_checkout(target.with_name("checkout"))
    rules = (ROOT / ".dockerignore").read_text().split()
    for path in sorted(checkout.rglob("*")):
        if path.is_file() and is_sent(path.relative_to(checkout), rules):
            (target / path.relative_to(checkout)).parent.mkdir(parents=True, exist_ok=True)
            path.rename(target / path.relative_to(checkout))
    return target


def is_sent(path: Path, rules: list[str]) -> bool:
    """Return True unless the last rule of .dockerignore for a file, or a directory above it, leaves it out."""
    sent, names = True, [path, *path.parents[:-1]]
    for rule in rules:
        pattern = rule.removeprefix("!")
        tail, depth = pattern.removeprefix("**/"), len(Path(pattern).parts)
        if any(name.match(tail) and (tail != pattern or len(name.parts) == depth) for name in names):
            sent = rule.startswith("!")
    return sent


def compose() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "compose.yaml").read_text())


def test_containerfile_passes_hadolint() -> None:
    done = subprocess.run([BIN / "hadolint", CONTAINERFILE], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_image_runs_as_a_user_without_a_compiler_and_checks_its_health() -> None:
    final = {step.name: step.text for step in stages()[-1]}
    assert final["USER"] == "10000:10000"
    assert "RUN" not in final
    assert final["WORKDIR"] == "/pulsar"
    assert json.loads(final["ENTRYPOINT"]) == ["bkctl"]
    assert '"bkctl", "bookie", "ready"' in final["HEALTHCHECK"]
    assert json.loads(final["VOLUME"]) == ["/var/lib/bookkeeper", "/var/lib/bkctl"]


def test_compose_names_only_what_it_declares() -> None:
    project = compose()
    services = project["services"]
    assert {"zookeeper", "bookie-1", "bookie-2", "bookie-3", "gateway", "prometheus"} <= set(services)
    for name, service in services.items():
        for config in service.get("configs", []):
            assert (ROOT / project["configs"][config["source"]]["file"]).is_file(), name
        assert set(service.get("secrets", [])) <= set(project["secrets"])
        assert {volume.partition(":")[0] for volume in service.get("volumes", [])} <= set(project["volumes"])
        assert set(service.get("depends_on", {})) <= set(services)
        if service["image"] == "bkctl":
            assert service["read_only"] is True
            assert service["cap_drop"] == ["ALL"]
            assert "/tmp" in service["tmpfs"]
    targets = yaml.safe_load((ROOT / "image/prometheus.yml").read_text())["scrape_configs"][0]["static_configs"]
    assert [target.partition(":")[0] for target in targets[0]["targets"]] == ["bookie-1", "bookie-2", "bookie-3"]


@pytest.mark.long
def test_compose_file_is_valid_and_complete() -> None:
    """compose-go is what `docker compose config` loads a file with."""
    load = go_program("github.com/compose-spec/compose-go/v2", "/cmd", "v2.9.1")
    done = subprocess.run([load, "compose.yaml"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    project = yaml.safe_load(done.stdout)
    assert project["services"].keys() == compose()["services"].keys()
    bookie = project["services"]["bookie-3"]
    assert bookie["read_only"] is True
    assert bookie["depends_on"]["init"]["condition"] == "service_completed_successfully"
    assert project["services"]["init"]["depends_on"]["zookeeper"]["condition"] == "service_healthy"
    published = [port for service in project["services"].values() for port in service.get("ports", [])]
    assert {port["host_ip"] for port in published} == {"127.0.0.1"}


def test_the_image_is_built_from_everything_that_a_wheel_holds(tmp_path: Path) -> None:
    context = build_context(tmp_path / "context")
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = [pattern for patterns in setuptools["data-files"].values() for pattern in patterns]
    assert [pattern for pattern in patterns if not list(context.glob(pattern))] == []
    directories = setuptools["package-dir"]
    packages = [directories.get(name, name.replace(".", "/")) for name in setuptools["packages"]]
    packages = [re.sub("^bkctl/commands", "commands", name) for name in packages]
    assert [name for name in packages if not (context / name).is_dir()] == []
    copied = [word for step in stages()[0] if step.name == "COPY" for word in step.text.split()[:-1]]
    assert [name for name in copied if not (context / name).exists()] == []
    assert not (context / "CONTRIBUTING.md").exists()
    assert not list(context.rglob("*.so"))


@pytest.fixture(scope="module")
def debian(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root file system with Python, as the images that the Containerfile begins with have one; kept in .cache."""
    if os.geteuid() != 0 or shutil.which("debootstrap") is None or shutil.which("unshare") is None:
        require("debootstrap", "debootstrap, unshare and root are needed")
    packed = ROOT / ".cache/debian-python.tar"
    root = tmp_path_factory.mktemp("debian") / "root"
    if not packed.exists():
        packages = "python3,python3-venv,libpython3-dev,ca-certificates"
        command = ["debootstrap", "--variant=minbase", f"--include={packages}", "bookworm", str(root)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            require("debootstrap", done.stdout[-500:] + done.stderr[-500:])
        packed.parent.mkdir(exist_ok=True)
        subprocess.run(["tar", "-C", root, "-cf", f"{packed}.new", "."], check=True)
        Path(f"{packed}.new").rename(packed)
        shutil.rmtree(root)
    return packed


def unpack(packed: Path, root: Path) -> None:
    root.mkdir(parents=True)
    subprocess.run(["tar", "-C", root, "-xf", packed], check=True)


class Chroot:
    """Carries out the steps of a stage in a root file system."""

    def __init__(self, root: Path, context: Path, earlier: dict[str, Path]) -> None:
        self.root, self._context, self._earlier = root, context, earlier
        self.env = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
        self._directory = "/"

    def take(self, step: Step) -> None:
        """Carry out a step; those that only describe the image do nothing."""
        if step.name == "RUN":
            self._run(step.text)
        elif step.name == "ENV":
            self.env |= dict(pair.split("=", 1) for pair in shlex.split(step.text))
        elif step.name == "WORKDIR":
            self._directory = step.text
            (self.root / step.text.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif step.name == "COPY":
            words = step.text.split()
            options = dict(word.removeprefix("--").split("=") for word in words if word.startswith("--"))
            *sources, target = [word for word in words if not word.startswith("--")]
            self._copy(sources, target, options)

    def _copy(self, sources: list[str], target: str, options: dict[str, str]) -> None:
        origin = self._earlier[options["from"]] if "from" in options else self._context
        to = self.root / target.lstrip("/")
        to.mkdir(parents=True, exist_ok=True)
        for source in sources:
            path = origin / source.lstrip("/")
            subprocess.run(["cp", "-a", f"{path}/." if path.is_dir() else path, to], check=True)
            if "chown" in options:
                for child in path.iterdir():
                    subprocess.run(["chown", "-R", options["chown"], to / child.name], check=True)

    def _run(self, command: str) -> None:
        script = f"cd {self._directory} && {command}"
        for name in ("resolv.conf", "pip.conf", "ssl/certs/ca-certificates.crt"):
            if Path("/etc", name).exists():
                shutil.copy(Path("/etc", name), self.root / "etc" / name)
        network = {name: value for name, value in os.environ.items() if re.match(r"(PIP_|HTTPS?_|SSL_CERT_FILE)", name)}
        inside = f"mount --rbind /dev {self.root}/dev && exec chroot {self.root} sh -c {shlex.quote(script)}"
        done = subprocess.run(
            ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", inside],
            env=network | self.env, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"


@pytest.fixture(scope="module")
def image(debian: Path, tmp_path_factory: pytest.TempPathFactory) -> Chroot:
    """The root file system that the Containerfile describes."""
    tmp = tmp_path_factory.mktemp("image")
    context = build_context(tmp / "context")
    earlier: dict[str, Path] = {}
    for number, steps in enumerate(stages()):
        chroot = Chroot(tmp / f"stage-{number}", context, earlier)
        unpack(debian, chroot.root)
        for step in steps:
            chroot.take(step)
        words = steps[0].text.split()
        earlier[words[2] if "AS" in words else str(number)] = chroot.root
    return chroot


@pytest.mark.long
def test_any_user_of_group_0_can_write_what_pulsar_s_chart_writes(image: Chroot) -> None:
    for name in ("pulsar/conf", "pulsar/conf/bookkeeper.conf", "pulsar/data", "pulsar/bin", "var/lib/bkctl"):
        found = (image.root / name).stat()
        assert (found.st_uid, found.st_gid) == (10000, 0), name
        assert found.st_mode >> 3 & 7 == found.st_mode >> 6 & 7, name


#: Mounts of a container with a read-only root: volumes, a temporary directory, /proc and /dev, and loopback alone.
CONTAINER = """
set -e
root=$1 volume=$2 conf=$3
shift 3
ip link set lo up
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mount -t tmpfs -o uid=10000,gid=10000,mode=0700 tmpfs "$root/var/lib/bkctl"
mkdir -p "$root/etc/bookkeeper"
mount --bind "$volume" "$root/var/lib/bookkeeper"
mount --bind "$conf" "$root/etc/bookkeeper"
mount -o remount,bind,ro "$root"
exec /usr/sbin/chroot --userspec=10000:10000 "$root" "$@"
"""

SESSION = r"""
set -eu
bkctl() { command bkctl -c /etc/bookkeeper/bk_server.conf "$@"; }
test "$(id -u)" = 10000
! touch /somewhere 2>/dev/null
! command -v gcc >/dev/null
bkctl version -o json
bkctl cluster init >/dev/null
# As a pod of Pulsar's chart, whose root can be written to.
cp -r /pulsar /tmp/pulsar
(
    cd /tmp/pulsar
    metadataServiceUri=$(sed -n 's/^metadataServiceUri=//p' /etc/bookkeeper/bk_server.conf)
    export metadataServiceUri
    bin/apply-config-from-env.py conf/bookkeeper.conf
    bin/update-rocksdb-conf-from-env.py conf/entry_location_rocksdb.conf
    bin/bookkeeper shell whatisinstanceid
    nslookup 127.0.0.1
) >&2
start() {
    command bkctl bookie start --conf /etc/bookkeeper/bk_server.conf >/tmp/bookie.out 2>/tmp/bookie.err &
    bookie=$!
    command bkctl bookie ready --bookie-url http://127.0.0.1:8080 --wait --deadline 120s >/dev/null || {
        cat /tmp/bookie.err >&2; exit 1; }
}
start
HEALTH
ONE="--ensemble-size 1 --write-quorum 1 --ack-quorum 1"
ledger=$(echo "kept in the volume" | bkctl ledger write --ledger-scope-id 7 $ONE -o id)
kill -TERM "$bookie"
wait "$bookie"
! HEALTH >/dev/null 2>&1
start
bkctl ledger read "$ledger" --body --format utf8
kill -TERM "$bookie"
wait "$bookie"
"""


@pytest.mark.long
def test_steps_of_the_containerfile_make_a_bookie_on_a_read_only_root(image: Chroot, tmp_path: Path) -> None:
    volume, conf = tmp_path / "volume", tmp_path / "conf"
    volume.mkdir()
    conf.mkdir()
    os.chown(volume, 10000, 10000)
    settings = (ROOT / "image/bk_server.conf").read_text()
    # No second container here has ZooKeeper: the store is a file on the volume.
    settings = re.sub(
        r"(?m)^metadataServiceUri=.*", "metadataServiceUri=sqlite:///var/lib/bookkeeper/metadata.db", settings
    )
    (conf / "bk_server.conf").write_text(
        re.sub(r"(?m)^useHostName.*|^useShort.*", "", settings) + "allowLoopback=true\nadvertisedAddress=127.0.0.1\n"
        "diskUsageThreshold=0.99\ndiskUsageWarnThreshold=0.98\n"
    )
    final = {step.name: step.text for step in stages()[-1]}
    health = shlex.join(json.loads(final["HEALTHCHECK"].partition(" CMD ")[2]))
    (conf / "session").write_text(SESSION.replace("HEALTH", f"command {health}"))
    command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--net", "sh", "-c", CONTAINER, "sh"]
    arguments = [str(image.root), str(volume), str(conf), "sh", "/etc/bookkeeper/session"]
    (image.root / "etc/bookkeeper").mkdir(exist_ok=True)
    done = subprocess.run([*command, *arguments], env=image.env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"uncompiledModules": []' in done.stdout
    assert "kept in the volume" in done.stdout
