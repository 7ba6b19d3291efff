"""Tiles of experts' products, one beside another."""

from __future__ import annotations

import pytest

from numba_kernels.cuda.experts import hopper
from tools.gpu.kernels import experts_tuning
from tools.gpu.sections import Options


@pytest.mark.emulator
@pytest.mark.exhaustive
def test_every_tile_is_timed() -> None:
    (case,) = experts_tuning.cases(Options("emulated:sm_90a", is_quick=True))
    found = case.run()["us"]
    unpacked = [f"unpacked {tile}" for tile in hopper.UNPACKING_TILES]
    assert list(found) == ["mma.sync", *map(str, hopper.TILES), *unpacked]
    assert all(us > 0 for us in found.values())
