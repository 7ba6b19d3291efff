"""Gemma 4 with pictures against transformers: embeddings and logits, in any chunks.

Made by `tools/references/make_vision_goldens.py`. Pictures that see each other in some layers are not cut.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.families.pictures.gemma4_pictures import Gemma4PictureModel
from models.registry import load_model
from runtime.tensor.tensor import Tensor
from tests.models.driver import relative_error
from tests.models.vision.cases import encoded_by_pieces, load_golden, run_cut, seeing_each_other, write_golden
from tests.models.vision.gemma4_cases import CASES, SEEDS, num_tokens, patches_of, prompt_of

DEVICES = ("emulated:sm_80", "emulated:sm_90a")


def loaded(folder: Path, case: str, **options: Any) -> Gemma4PictureModel:
    model = load_model(write_golden(folder, case, CASES[case]), **options)
    assert isinstance(model, Gemma4PictureModel)
    return model


def run(
    model: Gemma4PictureModel, case: str, ids: list[int], sizes: list[int], pictures: list[tuple[Tensor, ...]]
) -> Any:
    firsts, is_whole = prompt_of(case)[1], model.whole_picture_tokens is not None
    spans = [(first, first + num_tokens(index)) for index, first in enumerate(firsts)]

    return run_cut(model, ids, firsts, pictures, sizes, seeing_each_other(model, spans if is_whole else []))


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
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_float32_on_emulated_gpus(tmp_path: Path, case: str, device: str) -> None:
    model = loaded(tmp_path, case, device=device, dtype="float32")
    assert relative_error(run_in_two(model, case), load_golden(case).arrays["logits"]) < 1e-4


@pytest.mark.emulator
@pytest.mark.exhaustive
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_bfloat16_on_emulated_gpus(tmp_path: Path, case: str, device: str) -> None:
    """Over some seeds of weights the error beside float32 arithmetic is no larger than transformers' own, on average;
    that is 0.03 to 0.41 of the largest logit, by seed."""
    ours, theirs = [], load_golden(case).arrays["bfloat16_errors"]
    for seed in SEEDS:
        folder = write_golden(tmp_path / str(seed), case, CASES[case], seed=seed, is_rounded=True)
        models = load_model(folder, dtype="float32"), load_model(folder, device=device, dtype="bfloat16")
        exact, rough = (run_in_two(model, case) for model in models)  # type: ignore[arg-type]
        ours.append(relative_error(rough, exact))
    assert len(theirs) == len(ours)
    assert np.log(ours).mean() <= np.log(theirs).mean()


def run_in_two(model: Gemma4PictureModel, case: str) -> Any:
    """The logits, in two chunks."""
    ids, first = asked(case)[0], prompt_of(case)[1][1] - 1
    pictures = [model.tower(*each) for each in patches_of(case)]
    return run(model, case, ids, [first, len(ids) - first], pictures)
