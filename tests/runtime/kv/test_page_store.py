"""A folder of pages holds what was written, or nothing: under kills, with another process beside, on a full disk."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from runtime.kv.page_store import DiskPages, Fill, PageLostError
from tests.runtime.kv.storing_pages import MOST_BYTES, PAGE_BYTES, name_of, open_store, planes_of, write
from tests.waiting import wait_until


def read(store: DiskPages, numbers: list[int]) -> list[NDArray[np.uint8]]:
    """The bytes of pages that the store has."""
    planes = [np.empty((len(numbers), size), np.uint8) for size in PAGE_BYTES[0]]
    row = 0
    for run in store.runs([name_of(number).key for number in numbers]):

        def take(fill: Fill, row: int = row, count: int = run.num_pages) -> None:
            for plane, pages in enumerate(planes):
                fill(plane, pages[row : row + count])

        store.read(run, take)
        row += run.num_pages
    return planes


def known(store: DiskPages) -> list[int]:
    return [number for number in range(3100) if store.find([name_of(number).key]) != [None]]


def check(store: DiskPages) -> int:
    """Reads every page that the store says it has. Returns how many."""
    numbers = known(store)
    for number in numbers:
        assert store.find([name_of(number).key]) == [name_of(number)]
    for found, expected in zip(read(store, numbers), planes_of(numbers)):
        assert (found == expected).all()
    return len(numbers)


def test_pages_are_found_again_with_their_names_and_bytes(tmp_path: Path) -> None:
    store = open_store(tmp_path / "pages")
    write(store, [7, 3, 4, 5])
    write(store, [6, 3])
    store.close()
    again = open_store(tmp_path / "pages")
    assert known(again) == [3, 4, 5, 6, 7]
    assert sorted(again.inside(name_of(3).parent), key=lambda each: each.tokens) == [name_of(3)]
    assert [run.num_pages for run in again.runs([name_of(number).key for number in (4, 5, 6)])] == [2, 1]
    assert check(again) == 5
    assert again.num_pages() == [6]
    assert again.find([b"another"]) == [None]
    again.close()


def test_a_page_of_two_files_is_found_until_both_are_gone(tmp_path: Path) -> None:
    store = open_store(tmp_path / "pages")
    write(store, [3, 4])
    write(store, [5, 3])
    store.close()
    gone = [run.file for run in store.runs([name_of(number).key for number in (3, 5)])]
    assert len(set(gone)) == 2
    for file, left in zip(gone, ([3, 5], [])):
        os.unlink(tmp_path / "pages" / "model" / file)
        store.refresh()
        assert known(store) == left
        assert store.inside(name_of(3).parent) == [name_of(3)] * (3 in left)
        assert check(store) == len(left)


def test_the_least_recently_used_files_go_first(tmp_path: Path) -> None:
    size = 4096 + 20 * sum(PAGE_BYTES[0])
    store = open_store(tmp_path / "pages", 3 * size)
    for first in (0, 100, 200):
        write(store, list(range(first, first + 20)))
        time.sleep(0.05)
    store.close()
    store = open_store(tmp_path / "pages", 3 * size)
    read(store, [0])
    write(store, list(range(300, 320)))
    store.close()
    store.refresh()
    assert known(store) == [*range(20), *range(200, 220), *range(300, 320)]
    other = open_store(tmp_path / "pages", 3 * size)
    run = other.runs([name_of(200).key])[0]
    os.unlink(tmp_path / "pages" / "model" / run.file)
    with pytest.raises(PageLostError, match="cannot be read"):
        read(other, [200])
    assert other.find([name_of(200).key]) == [None]
    other.close()


def test_a_file_that_was_read_since_it_was_listed_stays(tmp_path: Path) -> None:
    size = 4096 + 20 * sum(PAGE_BYTES[0])
    store = open_store(tmp_path / "pages", 3 * size)
    for first in (0, 100, 200, 300):
        if first == 300:
            read(store, [0])
        write(store, list(range(first, first + 20)))
        wait_until(lambda first=first: store.find([name_of(first).key]) != [None])  # type: ignore[misc]
        time.sleep(0.05)
    store.close()
    store.refresh()
    assert known(store) == [*range(20), *range(200, 220), *range(300, 320)]


@pytest.mark.parametrize("num_kills", [5, pytest.param(200, marks=pytest.mark.exhaustive)])
def test_a_kill_at_any_moment_leaves_whole_pages_alone(num_kills: int, tmp_path: Path) -> None:
    """Two processes write to the folder at a time; one of them is killed."""
    rng, folder, found = random.Random(num_kills), tmp_path / "pages", 0
    children: list[subprocess.Popen[str]] = []
    try:
        for number in range(num_kills):
            while len(children) < 2:
                command = [sys.executable, "-m", "tests.runtime.kv.storing_pages", str(folder), str(rng.random())[2:]]
                children.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
                out = children[-1].stdout
                assert out is not None
                assert out.readline() == "ready\n"
            time.sleep(rng.random() ** 2 * 0.5)
            killed = children.pop(0)
            killed.kill()
            killed.communicate()
            if number % 2:  # without the other, too: then nothing may be lost between finding and reading
                last = children.pop()
                last.kill()
                last.communicate()
                store = open_store(folder)
                found += check(store)
                store.close()
                files = [each.stat().st_size for each in (folder / "model").iterdir()]
                assert sum(files) <= 2 * MOST_BYTES + sum(sorted(files)[-2:])
    finally:
        for each in children:
            each.kill()
            each.communicate()
    assert found > 0
