"""Translated kernels are kept on disk: another process translates nothing, and a damaged file harms nobody."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from runtime.emulator.translation import object_cache
from runtime.emulator.translation.object_cache import Entry
from runtime.emulator.translation.program import load
from runtime.errors import DeviceError
from tests.runtime.emulator.running import entry, run

BODY = "mad.lo.u32 %r0, %r1, 7, 3;"
EXPECTED = [7 * n + 3 for n in range(32)]

OTHER_PROCESS = f"""
import sys
from pathlib import Path
from tests.runtime.emulator.running import entry, run
kernel = entry({BODY!r}, cache=Path(sys.argv[1]))
print(run(kernel)[0].tolist() == {EXPECTED!r}, kernel.program.num_translated)
"""


def test_a_second_process_translates_nothing(tmp_path: Path) -> None:
    for num_translated in ("1", "0"):
        done = subprocess.run(
            [sys.executable, "-c", OTHER_PROCESS, str(tmp_path)], capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == ["True", num_translated]


@pytest.mark.parametrize("name", ["store_4x1", "range_find", "cp_async"])
def test_an_operation_is_compiled_after_those_that_it_calls(name: str) -> None:
    """In a process that needs it before all others, as when another process compiles the rest."""
    code = "from runtime.emulator.translation import operations, program\n"
    code += f"print(operations.compile_operation({name!r}) > 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


def test_files_are_the_users_alone(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    run(entry(BODY, cache=folder))
    (generation,) = folder.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE(generation.stat().st_mode) == 0o700
    (file,) = generation.iterdir()  # no partial file, no lock
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "header"])
def test_a_damaged_file_is_made_anew(tmp_path: Path, damage: str) -> None:
    run(entry(BODY, cache=tmp_path))
    (file,) = tmp_path.glob("*/*")
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
    assert len(list(tmp_path.glob("*/*"))) == 2


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


def test_what_one_architecture_has_translated_serves_another(tmp_path: Path) -> None:
    """Where the texts differ in nothing but their `.version` and `.target`, which no translation looks at."""
    first = entry(BODY, cache=tmp_path)
    run(first)
    text = first.program.text
    other = re.sub(r"\.target \w+", ".target sm_89", re.sub(r"\.version [\d.]+", ".version 7.1", text))
    assert other != text
    second = load(other, tmp_path).kernel()
    assert run(second)[0].tolist() == EXPECTED
    assert (first.program.num_translated, second.program.num_translated) == (1, 0)
    assert object_cache.key_of(text) == object_cache.key_of(other) != object_cache.key_of(other.replace("7", "8"))


def test_a_folder_that_others_write_is_refused(tmp_path: Path) -> None:
    run(entry(BODY, cache=tmp_path / "kernels"))
    (tmp_path / "kernels").chmod(0o777)
    with pytest.raises(DeviceError, match=r"others may write.*chmod 700"):
        run(entry(BODY, cache=tmp_path / "kernels"))


def test_threads_that_want_one_kernel_translate_it_once(tmp_path: Path) -> None:
    kernels = [entry(BODY, cache=tmp_path) for _ in range(4)]
    threads = [threading.Thread(target=lambda kernel=kernel: kernel.translation) for kernel in kernels]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(kernel.program.num_translated for kernel in kernels) == 1
    assert len(list(tmp_path.glob("*/*"))) == 1
