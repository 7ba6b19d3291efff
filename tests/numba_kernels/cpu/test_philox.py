"""Philox4x32-10 against the known-answer vectors of Random123 (kat_vectors), and the oracle against the same."""

from __future__ import annotations

import numpy as np
import pytest

from numba_kernels.cpu.intrinsics.scalars import philox
from tests.oracles import sampling as oracle

VECTORS = [
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), VECTORS)
def test_known_answers(counter, key, words):
    assert tuple(oracle.philox(counter, key)) == words
    assert tuple(int(w) for w in philox(*(np.uint32(v) for v in (*counter, *key)))) == words
