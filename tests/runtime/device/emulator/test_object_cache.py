"""Translated kernels are kept on disk: another process translates nothing, and a damaged file harms nobody."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.device.emulator import object_cache
from runtime.device.emulator.object_cache import Entry
from tests.runtime.device.emulator.running import entry, run

BODY = "mad.lo.u32 %r0, %r1, 7, 3;"
EXPECTED = [7 * n + 3 for n in range(32)]

OTHER_PROCESS = f"""
import sys
from pathlib import Path
from tests.runtime.device.emulator.running import entry, run
kernel = entry({BODY!r}, cache=Path(sys.argv[1]))
print(run(kernel)[0].tolist() == {EXPECTED!r}, kernel.program.num_translated)
"""


def test_a_second_process_translates_nothing(tmp_path: Path) -> None:
    for num_translated in ("1", "0"):
        done = subprocess.run(
            [sys.executable, "-c", OTHER_PROCESS, str(tmp_path)], capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == ["True", num_translated]


def test_files_are_the_users_alone(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    run(entry(BODY, cache=folder))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (file,) = folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "header"])
def test_a_damaged_file_is_made_anew(tmp_path: Path, damage: str) -> None:
    run(entry(BODY, cache=tmp_path))
    (file,) = tmp_path.iterdir()
    sound = file.read_bytes()
    broken = {
        "cut": sound[: len(sound) // 2],
        "flip": sound[:-9] + bytes([sound[-9] ^ 1]) + sound[-8:],
        "empty": b"",
        "header": b"something else" + sound,
    }[damage]
    file.write_bytes(broken)
    kernel = entry(BODY, cache=tmp_path)
    assert run(kernel)[0].tolist() == EXPECTED
    assert kernel.program.num_translated == 1
    assert object_cache.load(file.name, tmp_path) is not None


def test_another_text_is_another_kernel(tmp_path: Path) -> None:
    run(entry(BODY, cache=tmp_path))
    assert run(entry(BODY.replace("3;", "4;"), cache=tmp_path))[0].tolist() == [7 * n + 4 for n in range(32)]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("in the way")
    assert run(entry(BODY, cache=file / "below"))[0].tolist() == EXPECTED
    object_cache.store("key", Entry({}, b""), file / "below")
    assert object_cache.load("key", file / "below") is None


def test_what_is_stored_is_what_is_loaded(tmp_path: Path) -> None:
    entry_ = Entry({"a": [1, 2], "b": "ä"}, os.urandom(1000))
    object_cache.store("key", entry_, tmp_path)
    assert object_cache.load("key", tmp_path) == entry_
    assert object_cache.load("other", tmp_path) is None
    assert object_cache.key_of("ab", "c") != object_cache.key_of("a", "bc")
