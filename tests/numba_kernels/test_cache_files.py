"""Files found by content: locks between threads and processes, and disks that refuse."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from numba_kernels import cache, cache_files
from numba_kernels.cache_files import cache_root, locked, read_entry, write_entry

ROOT = Path(__file__).resolve().parents[2]


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    write_entry(tmp_path / "a", {"number": 1, "name": "ä"}, b"\n\0\n")
    assert read_entry(tmp_path / "a") == ({"number": 1, "name": "ä"}, b"\n\0\n")
    assert read_entry(tmp_path / "b") is None
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_lock_keeps_others_out_until_it_is_left(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with locked(path) as is_mine:
        assert is_mine
        with locked(path, is_waiting=False) as is_second:
            assert not is_second
        with locked(tmp_path / "other", is_waiting=False) as is_other:
            assert is_other
    with locked(path, is_waiting=False) as is_mine:
        assert is_mine
    assert list(tmp_path.iterdir()) == []


def test_a_lock_is_left_by_an_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), locked(tmp_path / "file"):
        _ = 1 / 0
    with locked(tmp_path / "file", is_waiting=False) as is_mine:
        assert is_mine


def test_another_process_waits_and_a_killed_one_lets_go(tmp_path: Path) -> None:
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom numba_kernels.cache_files import locked\n"
        "with locked(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(600)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "file")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with locked(tmp_path / "file", is_waiting=False) as is_mine:
            assert not is_mine
        process.kill()
    with locked(tmp_path / "file") as is_mine:
        assert is_mine


def test_without_a_disk_there_is_no_lock_and_no_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    path = tmp_path / "file" / "below"
    with locked(path, is_waiting=False) as first, locked(path) as second:
        assert first
        assert second
    write_entry(path, {}, b"")
    assert read_entry(path) is None


def test_the_root_is_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_root("kernels") == Path("/somewhere/xserv/kernels")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_root("emulator") == Path("/home/somebody/.cache/xserv/emulator")


@pytest.mark.parametrize("reason", ["no folder", "full disk"])
def test_a_cache_that_cannot_be_written_is_said_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reason: str
) -> None:
    """By one folder of this process and those that it starts, which goes with it."""
    home, temporary = tmp_path / "home", tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.setenv(cache_files.TEMPORARY, "")  # so that it is taken away again
    monkeypatch.delenv(cache_files.TEMPORARY)
    monkeypatch.setattr(cache_files, "_warned", [])
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    if reason == "no folder":
        home.write_text("a file in its place", encoding="utf-8")
    else:
        home.mkdir()

        def refuse(folder: Path) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(cache, "check_writable", refuse)
    first, second = cache.folder_for("a"), cache.folder_for("b")
    assert first != second
    assert {first.parent, second.parent} == {Path(os.environ[cache_files.TEMPORARY], "numba")}
    assert cache.folder_for("a") == first
    cache_files.write_entry(first / "code", {"a": 1}, b"code")
    assert cache_files.read_entry(first / "code") == ({"a": 1}, b"code")
    (said,) = [record.getMessage() for record in caplog.records]
    assert str(home) in said
    assert "XDG_CACHE_HOME" in said
    cache_files._remove(os.environ[cache_files.TEMPORARY], os.getpid())
    assert list(temporary.iterdir()) == []


def test_a_disk_that_gets_full_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(cache_files.TEMPORARY, raising=False)
    monkeypatch.setattr(cache_files, "_warned", [])
    (tmp_path / "file").touch()
    for name in ("a", "b"):
        cache_files.write_entry(tmp_path / "file" / name, {}, b"code")
    assert len(caplog.records) == 1
