"""The generated protobuf modules are what `make protos` makes of their .proto files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.waiting import LIMIT_S

ROOT = Path(__file__).parents[1]
PROTOS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "bkctl").rglob("*.proto"))


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("protos")
    protoc = [sys.executable, "-m", "grpc_tools.protoc", "-I."]
    outputs = [f"--python_out={directory}", f"--pyi_out={directory}"]
    subprocess.run([*protoc, *outputs, *PROTOS], cwd=ROOT, check=True, timeout=LIMIT_S)
    return directory


@pytest.mark.parametrize("name", PROTOS)
@pytest.mark.parametrize("suffix", ["_pb2.py", "_pb2.pyi"])
def test_generated_modules_are_current(generated: Path, name: str, suffix: str) -> None:
    module = name.removesuffix(".proto") + suffix
    assert (ROOT / module).read_text() == (generated / module).read_text(), "run make protos"


def test_no_generated_module_is_left_behind() -> None:
    modules = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "bkctl").rglob("*_pb2.py"))
    assert modules == [name.removesuffix(".proto") + "_pb2.py" for name in PROTOS]
