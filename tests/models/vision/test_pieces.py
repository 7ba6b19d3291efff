"""Towers stop within their layers: however a picture is shared out between steps, its bits are the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.registry import load_model
from tests.models.golden_weights import golden_tensor
from tests.models.vision import cases, square_cases


def _write_qwen(folder: Path, case: str) -> Path:
    return cases.write_model(folder, case, cases.load_golden(case).shapes)


def _write_square(folder: Path, case: str) -> Path:
    return cases.write_golden(folder, case, square_cases.CASES[case])


FAMILIES: dict[str, Callable[[Path, str], Path]] = {
    "qwen3_vl": _write_qwen,
    "qwen2_5_vl": _write_qwen,
    "gemma3_rest": _write_square,
    "llava_clip_mistral": _write_square,
}


def _pictures(model: Any, case: str) -> list[tuple[np.ndarray[Any, Any], tuple[int, int]]]:
    """Two that may have different sizes: a large one, and another."""
    if case in cases.CASES:
        return [(cases.patches_of(case, index), cases.GRIDS[index]) for index in (2, 0)]
    config = getattr(model.config, "pictures", model.config).tower
    shape = (config.side**2, 3 * config.patch_size**2)
    return [(golden_tensor(f"picture.{index}.weight", shape, 21) * 20, (config.side,) * 2) for index in range(2)]


@pytest.mark.parametrize("case", FAMILIES)
def test_pieces_change_no_bit(tmp_path: Path, case: str) -> None:
    """Nor does what is computed between two of them, nor how large they are, each another one than the last."""
    model: Any = load_model(FAMILIES[case](tmp_path, case))
    picture, another = _pictures(model, case)
    whole = model.tower(*picture)
    for sizes in ((1, 1), (50, 7), (96, 1, 192), (1 << 40,)):
        encoding, other = model.tower.start(*picture), model.tower.start(*another)
        made, num_calls, other_made = None, 0, None
        while made is None:
            other_made = other_made or other.advance(33)
            before, asked = encoding.num_rows, sizes[num_calls % len(sizes)]
            made = encoding.advance(asked)
            assert made is not None or asked <= encoding.num_rows - before < asked + max(asked, 256)
            num_calls += 1
        for part, wanted in zip(made, whole, strict=True):
            assert part.numpy().tobytes() == wanted.numpy().tobytes()
