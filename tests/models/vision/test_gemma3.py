"""Gemma 3 with pictures against transformers: embeddings and logits, whose pictures see each other.

Made by `tools/references/make_vision_goldens.py`. Chunks end before a picture or after it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.errors import ConfigError
from models.families.gemma import Gemma3VisionModel
from models.registry import load_model, parse_config
from runtime import ops
from runtime.batch import Batch, EncodedTokens
from runtime.engine.scheduling.pictures import Picture, runs_of
from runtime.tensor.tensor import Tensor
from tests.models.driver import ModelDriver, relative_error
from tests.models.vision.cases import load_golden
from tests.models.vision.gemma3_cases import CASES, pixels_of, prompt_of, side_of, write_gemma3

OLD_NAMES = {
    "model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head.",
    "model.vision_tower.": "vision_tower.vision_model.", "model.multi_modal_projector.": "multi_modal_projector.",
}  # fmt: skip


def loaded(folder: Path, case: str, **options: Any) -> Gemma3VisionModel:
    model = load_model(write_gemma3(folder, case), **options)
    assert isinstance(model, Gemma3VisionModel)
    return model


def encoded(model: Gemma3VisionModel, case: str) -> list[tuple[Tensor, ...]]:
    """The pictures' embeddings, a piece at a time."""
    made, side, patch = [], side_of(case), model.config.tower.patch_size
    for picture in pixels_of(case):
        cut = picture[:, : side * patch, : side * patch].reshape(3, side, patch, side, patch)
        encoding = model.tower.start(cut.transpose(1, 3, 0, 2, 4).reshape(side * side, -1), (side, side))
        rows = None
        while rows is None:
            rows = encoding.advance(1)
        made.append(rows)
    return made


def run(model: Gemma3VisionModel, case: str, ids: list[int], sizes: list[int], *, is_causal: bool = False) -> Any:
    _, firsts, num_tokens = prompt_of(case)
    pictures = encoded(model, case)
    spans = runs_of([Picture(b"", first, 1, num_tokens) for first in firsts])

    def complete(batch: Batch, start: int) -> None:
        found, end = [], start + batch.num_tokens
        until = np.arange(start + 1, end + 1, dtype=np.int32)
        for first, picture in zip(firsts, pictures, strict=True):
            if start <= first < end:
                found.append(EncodedTokens(first - start, picture))
        batch.encoded = tuple(found)
        for first, behind in spans:
            if start <= first < end:
                assert behind <= end
                until[first - start : behind - start] = behind
        if found and not is_causal:
            (batch.bidirectional_until,) = ops.place([until], model.device)

    driver, rows, start = ModelDriver(model, complete=complete, block_size=8), [], 0
    for size in sizes:
        rows.append(driver.step({0: ids[start : start + size]})[0])
        start += size
    assert start == len(ids)
    return np.concatenate(rows)


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
    count, drawn = prompt_of(case)[2], [1] * (len(ids) - length)
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
    first = 3 * prompt_of(case)[2] + 4
    error = relative_error(run(model, case, ids, [first, len(ids) - first]), golden["logits"])
    rough = max(2e-2, golden["bfloat16_error"].item())  # ours may be as large as transformers' own
    assert error < (1e-4 if dtype == "float32" else rough)


def test_names_of_published_files(tmp_path: Path) -> None:
    case = "gemma3_window"
    model = load_model(write_gemma3(tmp_path, case, OLD_NAMES))
    assert isinstance(model, Gemma3VisionModel)
    ids, _ = asked(case)
    assert relative_error(run(model, case, ids, [len(ids)]), load_golden(case).arrays["logits"]) < 1e-5


def test_the_projection_is_never_quantised(tmp_path: Path) -> None:
    case = "gemma3_window"
    model = loaded(tmp_path, case, quantization="fp8")
    ids, _ = asked(case)
    assert relative_error(run(model, case, ids, [len(ids)]), load_golden(case).arrays["logits"]) < 0.3
    assert model.tower.projection.weight.format.name == "float32"


@pytest.mark.parametrize(
    ("where", "changes", "message"),
    [
        ("", {"mm_tokens_per_image": 8}, "mm_tokens_per_image = 8 must be the square of a number into which 6 patches"),
        ("", {"mm_tokens_per_image": 16}, "mm_tokens_per_image = 16 must be the square"),
        ("", {"mm_tokens_per_image": 49}, "mm_tokens_per_image = 49 must be the square"),
        ("", {"image_token_index": 96}, "image_token_index = 96 is not in the vocabulary of 96"),
        ("", {"eoi_token_index": 96}, "eoi_token_index = 96 is not in the vocabulary of 96"),
        ("vision_config", {"model_type": "clip_vision_model"}, "model_type = 'clip_vision_model' is not supported"),
        ("text_config", {"model_type": "gemma2"}, "model_type = 'gemma2' is not supported"),
        ("text_config", {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0 is not supported"),
        ("text_config", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True is not supported"),
    ],
)
def test_configs_that_are_refused(where: str, changes: dict[str, Any], message: str) -> None:
    config = CASES["gemma3_window"]
    with pytest.raises(ConfigError, match=message):
        parse_config({**config, where: {**config[where], **changes}} if where else {**config, **changes})
