"""The OpenAPI document, and a fuzzer that asks by it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import schemathesis
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from support.raw_http import call, local_authorization
from support.servers import REPOSITORY
from support.waiting import LIMIT_S

from bkctl.errors import UsageError
from bkctl.http import bookie_metrics
from bkctl.http.app import ENDPOINTS, OPENAPI_PATH
from bkctl.http.bookie_endpoints import CHANGEABLE
from bkctl.http.endpoints import Body, Value, ValueKind, document

#: Requests to each endpoint.
EXAMPLES = 12
#: 503 while the last one is being worked on.
ONE_AT_A_TIME = ("/autorecovery/bookie", "/autorecovery/decommission")


def test_the_document_names_every_endpoint_of_apaches_server(bookie: Any) -> None:
    found = call(bookie.http_port, "GET", OPENAPI_PATH).json
    assert found["openapi"] == "3.1.0"
    operations = {
        (method, path) for path, methods in found["paths"].items() for method in methods if path != OPENAPI_PATH
    }
    assert {("get", "/heartbeat"), ("post", "/heartbeat"), ("put", "/heartbeat"), ("delete", "/heartbeat")} < operations
    assert len(operations) == 37 + 3 + 1  # heartbeat answers every method; ours has ledger_scopes
    assert len({path for _, path in operations}) == 31
    names = [each["operationId"] for methods in found["paths"].values() for each in methods.values()]
    assert len(names) == len(set(names))


def test_manual_names_every_endpoint_and_changeable_setting() -> None:
    text = (REPOSITORY / "docs" / "rest.md").read_text()
    named = re.findall(r"^\| (B|) *\| (any|[A-Z]+) `([^`]+)`", text, re.MULTILINE)
    assert {(mark == "B", method, path.replace("P/", "/api/v1/", 1)) for mark, method, path in named} == {
        (each.of_bookie, each.method, each.path) for each in ENDPOINTS
    } | {
        (False, "any", "/heartbeat"), (False, "GET", OPENAPI_PATH),
    }  # fmt: skip
    settings = text.partition("## Settings that can be changed")[2].partition("##")[0]
    assert set(re.findall(r"`(\w+)`", settings)) == CHANGEABLE


def test_manual_names_every_metric_of_our_own() -> None:
    rendered = set(re.findall(r'"(bkctl_[a-z_]+)"', Path(bookie_metrics.__file__).read_text()))
    assert len(rendered) > 5
    manual, security = ((REPOSITORY / "docs" / name).read_text() for name in ("rest.md", "security.md"))
    tabled = set(re.findall(r"^\| `(bkctl_[a-z_]+)`", manual, re.MULTILINE))
    assert tabled == {name for name in rendered if not name.startswith("bkctl_server_")}
    assert [name for name in rendered - tabled if name not in security] == []


def test_gateway_document_requires_bookie_parameter() -> None:
    found = document(ENDPOINTS, gateway=True, needs_token=True)
    state = found["paths"]["/api/v1/bookie/state"]["get"]
    assert [each["name"] for each in state["parameters"] if each["required"]] == ["bookie"]
    assert "parameters" not in found["paths"]["/api/v1/bookie/cluster_info"]["get"]
    assert found["security"] == [{"token": []}]


def test_generated_requests_do_not_crash_the_bookie(bookie: Any) -> None:
    port = bookie.http_port
    schema = schemathesis.openapi.from_dict(call(port, "GET", OPENAPI_PATH).json)
    schema.config.update(base_url=f"http://127.0.0.1:{port}", headers=local_authorization(port))
    asked = set()
    for found in schema.get_all_operations():
        operation = found.ok()
        _fuzz(operation, GenerationMode.POSITIVE)
        if operation.query or operation.body:
            _fuzz(operation, GenerationMode.NEGATIVE)
        asked.add((operation.method, operation.path))
    assert len(asked) == 42
    assert bookie.running
    assert call(port, "GET", "/heartbeat").body == b"OK\n"
    assert "Traceback" not in bookie.log_tail(size_max=1 << 22)


def _fuzz(operation: Any, mode: GenerationMode) -> None:
    """Ask `operation` with requests that it allows, or that it does not; always the same ones."""

    @hypothesis.settings(
        max_examples=EXAMPLES, deadline=None, database=None, derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        checks = [content_type_conformance, response_schema_conformance, status_code_conformance]
        if not case.path.endswith(ONE_AT_A_TIME):
            checks.append(not_a_server_error)
        response = case.call(timeout=LIMIT_S)
        assert response.status_code != 401
        case.validate_response(response, checks=checks)

    ask()


def test_a_body_with_a_name_twice_is_refused_in_words_of_json() -> None:
    body = Body((Value("readOnly", "Whether.", ValueKind.BOOLEAN),))
    assert body.parse(b'{"readOnly":true}') == {"readOnly": True}
    for data, problem in (
        (b'{"readOnly":false,"readOnly":true}', "The body has a name twice"),
        (b'{"readOnly":null}', "readOnly must be true or false, not null"),
    ):
        with pytest.raises(UsageError, match=problem):
            body.parse(data)
