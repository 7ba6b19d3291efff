"""A process that writes pages to a folder until it is killed.

python -m tests.runtime.kv.storing_pages DIR SEED
"""

from __future__ import annotations

import hashlib
import random
import sys
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from runtime.kv.page_store import DiskPages, PageName

PAGE_BYTES = [[4096, 512, 12]]
MOST_BYTES = 1 << 21


def name_of(number: int) -> PageName:
    key = hashlib.sha256(b"%d" % number).digest()
    return PageName(key, hashlib.sha256(b"%d" % (number // 2)).digest(), b"%d" % number)


def planes_of(numbers: list[int]) -> list[NDArray[np.uint8]]:
    """The bytes of these pages, which follow from their numbers."""
    planes = [np.empty((len(numbers), size), np.uint8) for size in PAGE_BYTES[0]]
    for row, number in enumerate(numbers):
        for plane, pages in enumerate(planes):
            pages[row] = np.random.default_rng([number, plane]).integers(0, 256, pages.shape[1], np.uint8)
    return planes


def open_store(folder: Path, most_bytes: int = MOST_BYTES) -> DiskPages:
    return DiskPages(folder, "model", most_bytes, PAGE_BYTES)


def write(store: DiskPages, numbers: list[int]) -> None:
    store.write(0, [name_of(number) for number in numbers], planes_of(numbers))


if __name__ == "__main__":
    opened, rng = open_store(Path(sys.argv[1])), random.Random(int(sys.argv[2]))
    print("ready", flush=True)
    while True:
        first = rng.randrange(3000)
        write(opened, list(range(first, first + rng.randrange(1, 60))))
        while not opened.has_room:
            time.sleep(0.001)
