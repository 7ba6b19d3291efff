"""Gemma 3 with pictures against transformers: embeddings and logits, whose pictures see each other.

Made by `tools/references/make_vision_goldens.py`. Chunks end before a picture or after it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.families.gemma import Gemma3VisionModel
from models.registry import load_model
from runtime.engine.scheduling.pictures import Picture, runs_of
from runtime.tensor.tensor import Tensor
from tests.models.driver import relative_error
from tests.models.vision.cases import encoded_by_pieces, load_golden, run_cut, seeing_each_other, write_golden
from tests.models.vision.square_cases import GEMMA3 as CASES
from tests.models.vision.square_cases import num_tokens_of, patches_of, prompt_of, side_of
from tests.models.vision.test_llava import OLD_NAMES


def loaded(folder: Path, case: str, names: dict[str, str] | None = None, **options: Any) -> Gemma3VisionModel:
    model = load_model(write_golden(folder, case, CASES[case], names), **options)
    assert isinstance(model, Gemma3VisionModel)
    return model


def encoded(model: Gemma3VisionModel, case: str) -> list[tuple[Tensor, ...]]:
    return encoded_by_pieces(model, [(each, (side_of(case),) * 2) for each in patches_of(case)])


def run(model: Gemma3VisionModel, case: str, ids: list[int], sizes: list[int], *, is_causal: bool = False) -> Any:
    firsts, pictures = prompt_of(case)[1], encoded(model, case)
    spans = runs_of([Picture(b"", first, 1, num_tokens_of(case)) for first in firsts])

    return run_cut(model, ids, firsts, pictures, sizes, seeing_each_other(model, [] if is_causal else spans))


def asked(case: str) -> tuple[list[int], int]:
    """The prompt with what was drawn behind it, but for the last; and the prompt's length."""
    ids = prompt_of(case)[0]
    return [*ids, *load_golden(case).arrays["greedy"].tolist()[:-1]], len(ids)


@pytest.mark.parametrize("case", CASES)
def test_float32_on_the_cpu(tmp_path: Path, case: str) -> None:
    golden, model = load_golden(case).arrays, loaded(tmp_path, case)
    made = np.stack([rows[0].numpy() for rows in encoded(model, case)])
    assert relative_error(made.reshape(-1, made.shape[-1]), golden["embeddings"].reshape(-1, made.shape[-1])) < 1e-5
    ids, length = asked(case)
    count, drawn = num_tokens_of(case), [1] * (len(ids) - length)
    whole = run(model, case, ids, [length, *drawn])
    assert relative_error(whole, golden["logits"]) < 1e-5
    assert whole[length - 1 :].argmax(1).tolist() == golden["greedy"].tolist()
    for sizes in ([count, 1, 1, 2 * count, 1, 1, 1, count], [count + 1, 2 * count + 3, 1, count]):
        cut = run(model, case, ids, [*sizes, *drawn])
        assert cut.tobytes() == whole.tobytes()
    assert relative_error(run(model, case, ids, [length, *drawn], is_causal=True), golden["logits"]) > 1e-2


@pytest.mark.emulator
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("case", "device", "dtype"),
    [
        (case, device, dtype)
        for case in CASES
        for device in ("emulated:sm_80", "emulated:sm_90a")
        for dtype in ("float32", "bfloat16")
    ],
)
def test_on_emulated_gpus(tmp_path: Path, case: str, device: str, dtype: str) -> None:
    golden, model = load_golden(case).arrays, loaded(tmp_path, case, device=device, dtype=dtype)
    ids, _ = asked(case)
    first = 3 * num_tokens_of(case) + 4
    error = relative_error(run(model, case, ids, [first, len(ids) - first]), golden["logits"])
    rough = max(2e-2, golden["bfloat16_error"].item())  # ours may be as large as transformers' own
    assert error < (1e-4 if dtype == "float32" else rough)


def test_names_of_published_files(tmp_path: Path) -> None:
    case = "gemma3_window"
    model = loaded(tmp_path, case, OLD_NAMES)
    ids, _ = asked(case)
    assert relative_error(run(model, case, ids, [len(ids)]), load_golden(case).arrays["logits"]) < 1e-5


def test_the_projection_is_never_quantised(tmp_path: Path) -> None:
    case = "gemma3_window"
    model = loaded(tmp_path, case, quantization="fp8")
    ids, _ = asked(case)
    assert relative_error(run(model, case, ids, [len(ids)]), load_golden(case).arrays["logits"]) < 0.3
    assert model.tower.projection.weight.format.name == "float32"
