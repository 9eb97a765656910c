"""Files that the disk seam creates: their modes, and that planted links are not followed."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.simulated_disk import SimulatedFiles

from bkctl.disk import Files, atomic_write, create_unfinished, make_private_directory


@pytest.fixture(autouse=True)
def _open_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("make", [lambda root: Files(), SimulatedFiles], ids=["real", "simulated"])
def test_new_files_are_hidden_from_other_users(tmp_path: Path, make: type[SimulatedFiles]) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    files = make(root)
    files.make_directory(root / "a" / "b")
    files.open(root / "a" / "b" / "file", create=True).close()
    files.replace(root / "a" / "replaced", b"x")
    assert mode(root / "a") == mode(root / "a" / "b") == 0o750
    assert mode(root / "a" / "b" / "file") == mode(root / "a" / "replaced") == 0o640


def test_stricter_umask_applies(tmp_path: Path) -> None:
    os.umask(0o077)
    Files().make_directory(tmp_path / "a")
    Files().open(tmp_path / "a" / "file", create=True).close()
    assert (mode(tmp_path / "a"), mode(tmp_path / "a" / "file")) == (0o700, 0o600)


def test_private_directory_and_its_new_parents_are_closed_under_any_umask(tmp_path: Path) -> None:
    os.umask(0)
    (tmp_path / "there").mkdir()
    for _ in range(2):
        make_private_directory(tmp_path / "there" / "a" / "b")
    assert mode(tmp_path / "there") == 0o777  # not ours to change
    assert mode(tmp_path / "there" / "a") == mode(tmp_path / "there" / "a" / "b") == 0o700
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError, match="file"):
        make_private_directory(tmp_path / "file" / "a")


def test_unfinished_file_has_a_random_name(tmp_path: Path) -> None:
    target = tmp_path / "target"
    made = [create_unfinished(target) for _ in range(20)]
    assert len({path for path, _ in made}) == 20
    assert {path.parent for path, _ in made} == {tmp_path}
    for path, descriptor in made:
        assert mode(path) == 0o600
        os.close(descriptor)


def test_unfinished_file_never_follows_a_planted_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "urandom", bytes)  # a name that was guessed
    victim = tmp_path / "victim"
    planted, descriptor = create_unfinished(tmp_path / "target")
    os.close(descriptor)
    planted.unlink()
    planted.symlink_to(victim)
    with pytest.raises(FileExistsError):
        create_unfinished(tmp_path / "target")
    assert not victim.exists()


def test_created_files_never_follow_a_planted_link(tmp_path: Path) -> None:
    """Offline commands run as root in directories that belong to the bookie's user."""
    victim, target, planted = (tmp_path / name for name in ("victim", "VERSION", "VERSION.new"))
    victim.write_bytes(b"root's")
    planted.symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        Files().replace(target, b"chosen by the owner of the directory")
    with pytest.raises(OSError, match="symbolic links"):
        Files().open(planted, create=True)
    assert victim.read_bytes() == b"root's"
    assert not target.exists()
    planted.unlink()
    planted.write_bytes(b"left by a crash, and longer than what follows")
    Files().replace(target, b"new")
    assert target.read_bytes() == b"new"
    assert not planted.exists()


def test_opening_does_not_wait_for_the_other_end_of_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "1.log")
    for open_file in (Files().open, Files().open_to_read):
        with pytest.raises(OSError, match=r"1\.log"):
            open_file(tmp_path / "1.log")


def test_atomic_write_replaces_the_whole_content(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"old")
    with atomic_write(target) as stream:
        stream.write(b"new")
        assert target.read_bytes() == b"old"
    assert target.read_bytes() == b"new"
    assert mode(target) == 0o600
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("overwrite", [True, False])
def test_failed_atomic_write_leaves_the_directory_unchanged(tmp_path: Path, overwrite: bool) -> None:
    target = tmp_path / "target"

    def write() -> None:
        with atomic_write(target, overwrite=overwrite) as stream:
            stream.write(b"part")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert list(tmp_path.iterdir()) == []


def test_atomic_write_refuses_a_file_created_meanwhile(tmp_path: Path) -> None:
    target = tmp_path / "target"

    def write() -> None:
        with atomic_write(target, overwrite=False) as stream:
            stream.write(b"mine")
            target.write_bytes(b"theirs")

    with pytest.raises(FileExistsError):
        write()
    assert target.read_bytes() == b"theirs"
    assert list(tmp_path.iterdir()) == [target]
