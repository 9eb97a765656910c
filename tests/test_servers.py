"""The harness leaves no process behind, and skips only what it may skip."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import compiled
from support.servers import Server, ports, require, wait_for

PROGRAM = """
import os, subprocess, sys, time
from pathlib import Path
from support.servers import Server
sleep = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
server = Server("sleeper", Path(sys.argv[1]), lambda: sleep, lambda: True)
server.start()
print(server.pid, flush=True)
if sys.argv[2] == "detach":  # as the bookies of a local cluster
    print(subprocess.Popen(sleep, start_new_session=True).pid, flush=True)
if sys.argv[2] != "return":
    time.sleep(600)
"""


def is_running(pid: int) -> bool:
    """Return True if the process exists and is not a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


def start(tmp_path: Path, mode: str) -> tuple[subprocess.Popen[str], int]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    run = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "log"), mode], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    return run, int(run.stdout.readline())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_servers_end_with_a_test_run_that_is_killed(tmp_path: Path, number: signal.Signals) -> None:
    run, pid = start(tmp_path, "wait")
    with run:
        assert is_running(pid)
        run.send_signal(number)
        run.wait()
    wait_for(lambda: not is_running(pid), "the server's end")


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_detached_processes_end_with_a_test_run_that_is_killed(tmp_path: Path) -> None:
    run, _ = start(tmp_path, "detach")
    with run:
        assert run.stdout is not None
        pid = int(run.stdout.readline())
        run.kill()
        run.wait()
    wait_for(lambda: not is_running(pid), "the detached process's end")


def test_servers_end_with_a_test_run_that_forgets_them(tmp_path: Path) -> None:
    run, pid = start(tmp_path, "return")
    with run:
        assert run.wait() == 0
    assert not is_running(pid)


def test_a_server_that_ends_at_once_is_reported_with_its_log(tmp_path: Path) -> None:
    server = Server("liar", tmp_path / "log", lambda: ["sh", "-c", "echo no luck; exit 3"], lambda: False)
    with pytest.raises(RuntimeError, match="no luck"):
        server.start()
    assert not server.running


def test_missing_server_skips_unless_it_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BKCTL_TEST_REQUIRE", raising=False)
    with pytest.raises(pytest.skip.Exception, match="java: none here"):
        require("java", "none here")
    monkeypatch.setenv("BKCTL_TEST_REQUIRE", "etcd, strace")
    with pytest.raises(pytest.skip.Exception):
        require("java", "none here")
    for wanted in ("all", "strace,java"):
        monkeypatch.setenv("BKCTL_TEST_REQUIRE", wanted)
        with pytest.raises(pytest.fail.Exception, match="none here"):
            require("java", "none here")


def test_a_module_that_is_older_than_its_source_is_built_or_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "x"\nversion = "1"\n[tool.setuptools]\npackages = []\n'
        '[[tool.setuptools.ext-modules]]\nname = "x"\nsources = ["x.c"]\noptional = true\npy-limited-api = true\n'
    )
    monkeypatch.setattr(compiled, "ROOT", tmp_path)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    (tmp_path / "x.c").write_text("#include <Python.h>\nPyObject *PyInit_x(void) { return NULL; }\n")
    assert compiled.stale() == ["x"]
    if not compiled.can_compile():
        with pytest.raises(pytest.skip.Exception, match="x: no C compiler"):
            compiled.require_compiled()
        return
    compiled.build()
    assert compiled.stale() == []
    (built,) = tmp_path.glob("x.*.so")
    os.utime(built, (1, 1))
    (tmp_path / "x.c").write_text("#error mistaken\n")
    assert "mistaken" in compiled.build()
    with pytest.raises(pytest.fail.Exception, match=r"x: not built[\s\S]*make -B .venv/.test"):
        compiled.require_compiled()


def test_workers_of_a_parallel_run_have_ports_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "2")
    ranges = []
    for worker in ("gw0", "gw1"):
        monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
        ranges.append(set(itertools.islice(ports(), 20_000)))
    if ranges != [{0}, {0}]:  # the system gives connections nearly all ports
        assert min(map(len, ranges)) >= 2_500
        assert ranges[0].isdisjoint(ranges[1])
