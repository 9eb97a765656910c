"""The manifests in deploy/ fit Kubernetes' schemas, the image, and one another."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from release.conftest import ROOT

from bkctl.config import BookieConfig

DEPLOY = ROOT / "deploy"
#: Releases of Kubernetes whose schemas the manifests fit.
VERSIONS = ("1.30.0", "latest")


def objects() -> list[dict[str, Any]]:
    names = yaml.safe_load((DEPLOY / "kustomization.yaml").read_text())["resources"]
    return [each for name in names for each in yaml.safe_load_all((DEPLOY / name).read_text())]


def workloads() -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each for each in objects() if each["kind"] in ("StatefulSet", "Deployment")}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("found", objects(), ids=lambda each: f"{each['kind']}-{each['metadata']['name']}")
def test_manifests_fit_the_schemas(found: dict[str, Any], version: str) -> None:
    import kubernetes_validate  # Two seconds, which every process of the tests would spend.

    if version == "latest":
        version = kubernetes_validate.latest_version()
    kubernetes_validate.validate(found, version, strict=True)


@pytest.mark.parametrize("name", ["bookie", "autorecovery"])
def test_containers_run_as_the_image_s_user_on_a_read_only_root(name: str) -> None:
    pod = workloads()[name]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 10000
    assert "USER 10000:10000" in (ROOT / "Containerfile").read_text()
    volumes = {each["name"] for each in pod["volumes"]}
    volumes |= {each["metadata"]["name"] for each in workloads()[name]["spec"].get("volumeClaimTemplates", [])}
    for container in (*pod["initContainers"], *pod["containers"]):
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] is True
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert container["image"] == "bkctl"
        mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
        assert set(mounts.values()) <= volumes
        assert {"/tmp", "/var/lib/bkctl", "/etc/bookkeeper"} <= mounts.keys()


def test_probes_ports_and_the_way_down_are_those_of_the_settings() -> None:
    config = BookieConfig.load(DEPLOY / "bk_server.conf")
    assert config.warnings == ()
    (bookie,) = workloads()["bookie"]["spec"]["template"]["spec"]["containers"]
    ports = {each["name"]: each["containerPort"] for each in bookie["ports"]}
    assert ports == {"bookie": config.bookie_port, "http": config.http_server_port}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert bookie[probe]["httpGet"]["port"] == "http"
    assert "bookie readonly on" in bookie["lifecycle"]["preStop"]["exec"]["command"][-1]
    mounts = {each["mountPath"] for each in bookie["volumeMounts"]}
    assert {*config.journal_directories, *config.ledger_directories} <= mounts


def test_the_budget_and_the_headless_service_are_of_the_bookies() -> None:
    of = {each["kind"]: each for each in objects()}
    labels = of["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
    assert of["PodDisruptionBudget"]["spec"]["maxUnavailable"] == 1
    assert of["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    assert of["Service"]["spec"]["selector"] == labels
    assert of["Service"]["spec"]["clusterIP"] == "None"
    assert of["StatefulSet"]["spec"]["serviceName"] == of["Service"]["metadata"]["name"]
