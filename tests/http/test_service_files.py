"""The units and alerts in docs/service: what they start and ask for exists."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from configparser import RawConfigParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.raw_http import call

from bkctl.config import BookieConfig

from .conftest import make_bookie

ROOT = Path(__file__).resolve().parent.parent.parent
SERVICE = ROOT / "docs" / "service"
PROGRAM = "/opt/bkctl/bin/bkctl"
UNITS = sorted(SERVICE.glob("*.service"))
#: Of Prometheus itself.
WORDS = {"up", "increase", "or", "abs", "max", "timestamp"}


def commands() -> set[str]:
    return set(re.findall(r"^### bkctl (.+)$", (ROOT / "docs" / "commands.md").read_text(), re.MULTILINE))


def service_of(unit: Path) -> dict[str, str]:
    parser = RawConfigParser(strict=True)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(unit.read_text())
    return dict(parser["Service"])


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((SERVICE / "alerts.yml").read_text())["groups"]
    return list(group["rules"])


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_units_start_commands_with_options_that_exist(unit: Path) -> None:
    program, *words = service_of(unit)["ExecStart"].split()
    assert program == PROGRAM
    assert " ".join(words[:2]) in commands()
    shown = subprocess.run(
        [sys.executable, "-m", "bkctl", *words, "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert all(word in shown for word in words if word.startswith("--") and word != "--conf")


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_units_are_valid(unit: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze")
    (copy := tmp_path / unit.name).write_text(unit.read_text().replace(PROGRAM, "/bin/true"))
    verified = subprocess.run(["systemd-analyze", "verify", "--man=no", copy], capture_output=True, text=True)
    assert (verified.returncode, [line for line in verified.stderr.splitlines() if unit.stem in line]) == (0, [])


def test_the_bookies_unit_has_descriptors_for_its_connections() -> None:
    descriptors = int(service_of(SERVICE / "bkctl-bookie.service")["LimitNOFILE"])
    assert descriptors >= 2 * BookieConfig().server_max_connections


def test_alerts_ask_for_metrics_that_a_bookie_serves(tmp_path: Path, pem: Path) -> None:
    server = make_bookie(
        tmp_path, autoRecoveryDaemonEnabled="true", tlsProviderFactoryClass="TLSContextFactory",
        tlsKeyStoreType="PEM", tlsKeyStore=pem, tlsCertificatePath=pem,
    )  # fmt: skip
    server.start()
    try:
        samples = call(server.http_port, "GET", "/metrics").body.decode().splitlines()
    finally:
        server.stop()
    served = {re.split(r"[{ ]", line)[0] for line in samples if not line.startswith("#")}
    asked = set()
    for rule in rules():
        bare = re.sub(r"\{[^}]*\}|\[\w+\]", "", rule["expr"])
        asked |= set(re.findall(r"[A-Za-z_]\w+", bare)) - WORDS
        for name, labels in re.findall(r"(\w+)\{([^}]*)\}", rule["expr"]):
            pairs = [pair.strip() for pair in labels.split(",") if not re.match(r"job=|\w+=\"\"", pair.strip())]
            assert name in WORDS or any(
                line.startswith(name) and all(pair in line for pair in pairs) for line in samples
            ), rule["expr"]
    assert len(asked) >= 10
    assert asked - served == set()
