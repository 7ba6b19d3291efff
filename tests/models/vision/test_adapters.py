"""Adapters that change towers: embeddings beside PEFT's, and an engine whose requests show the same picture with
several adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.adapter_changes import changes_of
from models.peft import read_adapter
from models.registry import declare, load_model
from runtime.linear.low_rank import LowRankMaps
from runtime.linear.options import LoadOptions
from tests.models.driver import relative_error
from tests.models.vision import cases, pixtral_cases, square_cases
from tests.models.vision.adapter_cases import ADAPTED, write_adapter


def pictures_of(case: str) -> list[tuple[np.ndarray[Any, Any], tuple[int, int]]]:
    if case in cases.CASES:
        return [(cases.patches_of(case, index), grid) for index, grid in enumerate(cases.GRIDS)]
    if case in pixtral_cases.CASES:
        return [
            (pixtral_cases.patches_of(case, index), grid) for index, grid in enumerate(pixtral_cases.grids_of(case))
        ]
    return [(each, (square_cases.side_of(case),) * 2) for each in square_cases.patches_of(case)]


def written(folder: Path, case: str) -> Path:
    if case in cases.CASES:
        return cases.write_model(folder, case, cases.load_golden(case).shapes)
    return cases.write_golden(folder, case, (square_cases.CASES | pixtral_cases.CASES)[case])


def words_of(model: Any, rows: Any) -> Any:
    """The rows that the tower made, without those of tokens that end lines."""
    if model.line_ends is None:
        return rows
    ends = {each.tobytes() for each in np.asarray(model.embed_tokens.to("cpu").numpy())[list(model.line_ends)]}
    return np.stack([row for row in rows if row.tobytes() not in ends])


@pytest.mark.parametrize("case", ADAPTED)
@pytest.mark.parametrize("device", [
    "cpu", *(pytest.param(f"emulated:{each}", marks=[pytest.mark.emulator, pytest.mark.exhaustive])
             for each in ("sm_80", "sm_90a"))
])  # fmt: skip
def test_embeddings_are_as_pefts(tmp_path: Path, case: str, device: str) -> None:
    folder, maps = written(tmp_path / "model", case), LowRankMaps(3, 4)
    model: Any = load_model(folder, addends=maps, device=device, dtype="float32", exact=device != "cpu")
    maps.allocate(LoadOptions(device=model.device, dtype=model.dtype, exact=device != "cpu"))
    found = read_adapter(write_adapter(tmp_path / "adapter", case))
    changes = changes_of(found, maps, model, lambda: declare(folder, dtype="float32").source).pairs
    maps.check(changes)
    before = maps.size_bytes
    plain = [model.tower(*each) for each in pictures_of(case)]
    assert maps.write(1, changes), "towers get memory by the first adapter that changes them"
    assert maps.size_bytes > before
    with np.load(cases.FOLDER / "adapters.npz") as stored:
        wanted = [stored[f"{case}_embeddings"]]
        deep = sorted(name for name in stored if name.startswith(f"{case}_deepstack"))
        wanted += [stored[name] for name in deep]
    made = [model.tower(*each, 1) for each in pictures_of(case)]
    for part, theirs in enumerate(wanted):
        ours = np.concatenate([words_of(model, rows[part].to("cpu").numpy()) for rows in made])
        assert relative_error(ours, theirs) < 2e-5
    again = [model.tower(*each) for each in pictures_of(case)]
    for one, other, own in zip(plain, again, made, strict=True):
        assert one[0].to("cpu").numpy().tobytes() == other[0].to("cpu").numpy().tobytes()
        assert relative_error(own[0].to("cpu").numpy(), one[0].to("cpu").numpy()) > 1e-2
    encoding, rows = model.tower.start(*pictures_of(case)[0], 1), None
    while rows is None:
        rows = encoding.advance(1)
    assert rows[0].to("cpu").numpy().tobytes() == made[0][0].to("cpu").numpy().tobytes()
