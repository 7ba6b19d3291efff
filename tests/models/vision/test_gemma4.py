"""Gemma 4 with pictures against transformers: embeddings and logits, in any chunks.

Made by `tools/references/make_vision_goldens.py`. Pictures that see each other in some layers are not cut.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.families.gemma4_pictures import Gemma4PictureModel
from models.registry import load_model
from runtime import ops
from runtime.batch import Batch
from runtime.tensor.tensor import Tensor
from tests.models.driver import relative_error
from tests.models.vision.cases import encoded_by_pieces, load_golden, run_cut, write_golden
from tests.models.vision.gemma4_cases import CASES, num_tokens, patches_of, prompt_of


def loaded(folder: Path, case: str, **options: Any) -> Gemma4PictureModel:
    model = load_model(write_golden(folder, case, CASES[case]), **options)
    assert isinstance(model, Gemma4PictureModel)
    return model


def run(
    model: Gemma4PictureModel, case: str, ids: list[int], sizes: list[int], pictures: list[tuple[Tensor, ...]]
) -> Any:
    firsts = prompt_of(case)[1]
    spans = [(first, first + num_tokens(index)) for index, first in enumerate(firsts)]

    def complete(batch: Batch, start: int) -> None:
        end = start + batch.num_tokens
        until = np.arange(start + 1, end + 1, dtype=np.int32)
        for first, after in spans:
            if start <= first < end:
                assert after <= end
                until[first - start : after - start] = after
        if batch.encoded and model.whole_picture_tokens is not None:
            (batch.bidirectional_until,) = ops.place([until], model.device)

    if model.whole_picture_tokens is None:
        return run_cut(model, ids, firsts, pictures, sizes)
    return run_cut(model, ids, firsts, pictures, sizes, complete)


def asked(case: str) -> tuple[list[int], int]:
    """The prompt with what was drawn after it, but for the last; and the prompt's length."""
    ids = prompt_of(case)[0]
    return [*ids, *load_golden(case).arrays["greedy"].tolist()[:-1]], len(ids)


@pytest.mark.parametrize("case", CASES)
def test_float32_on_the_cpu(tmp_path: Path, case: str) -> None:
    golden, model = load_golden(case).arrays, loaded(tmp_path, case)
    pictures = encoded_by_pieces(model, patches_of(case))
    made = np.concatenate([rows[0].numpy() for rows in pictures])
    assert relative_error(made, golden["embeddings"]) < 1e-5
    for (patches, grid), rows in zip(patches_of(case), pictures, strict=True):
        assert model.tower(patches, grid)[0].numpy().tobytes() == rows[0].numpy().tobytes()
    ids, length = asked(case)
    drawn = [1] * (len(ids) - length)
    whole = run(model, case, ids, [length, *drawn], pictures)
    assert relative_error(whole, golden["logits"]) < 1e-4
    assert whole[length - 1 :].argmax(1).tolist() == golden["greedy"].tolist()
    first = prompt_of(case)[1][1] - 1
    cuts = [[4 + num_tokens(0), first - num_tokens(0) - 4, length - first]]
    if model.whole_picture_tokens is None:
        cuts += [[1] * length, [6, 5, 7, length - 18]]
    for sizes in cuts:
        assert run(model, case, ids, [*sizes, *drawn], pictures).tobytes() == whole.tobytes()


def test_published_names_of_the_model_without_a_tower(tmp_path: Path) -> None:
    """Goldens have those of transformers' classes."""
    case, own, embedder = "gemma4_unified", "model.embed_vision.", "model.vision_embedder."
    names = {f"{own}{part}": f"{embedder}{part}" for part in ("patch_", "pos_")}
    names[f"{own}multimodal_embedder."] = own
    model = load_model(write_golden(tmp_path, case, CASES[case], names))
    assert isinstance(model, Gemma4PictureModel)
    made = np.concatenate([model.tower(*each)[0].numpy() for each in patches_of(case)])
    assert relative_error(made, load_golden(case).arrays["embeddings"]) < 1e-5


@pytest.mark.emulator
@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("device", ["emulated:sm_80", "emulated:sm_90a"])
@pytest.mark.parametrize("case", CASES)
def test_on_emulated_gpus(tmp_path: Path, case: str, device: str, dtype: str) -> None:
    golden, model = load_golden(case).arrays, loaded(tmp_path, case, device=device, dtype=dtype)
    pictures = [model.tower(*each) for each in patches_of(case)]
    ids, _ = asked(case)
    first = prompt_of(case)[1][1] - 1
    error = relative_error(run(model, case, ids, [first, len(ids) - first], pictures), golden["logits"])
    rough = 1.5 * golden["bfloat16_error"].item()  # of transformers' own
    assert error < (1e-4 if dtype == "float32" else rough)
