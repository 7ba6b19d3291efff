"""Pixtral, Mistral 3 and Ministral 3 against transformers: the tower's embeddings and the logits, however a prompt is
cut; then through the engine.

Made by `tools/references/make_vision_goldens.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.errors import ConfigError
from models.families.llava import LlavaModel
from models.registry import load_model, parse_config
from runtime.tensor.tensor import Tensor
from tests.models.driver import mean_relative_error, relative_error
from tests.models.vision.cases import IMAGE, load_golden, write_golden
from tests.models.vision.cut_prompts import run_cut
from tests.models.vision.pixtral_cases import CASES, END, LINE_END, grids_of, patches_of, prompt_of
from tests.models.vision.test_llava import OLD_NAMES


def loaded(folder: Path, case: str, names: dict[str, str] | None = None, **options: Any) -> LlavaModel:
    model = load_model(write_golden(folder, case, CASES[case], names), **options)
    assert isinstance(model, LlavaModel)
    return model


def encoded(model: LlavaModel, case: str) -> list[tuple[Tensor, ...]]:
    """The pictures' embeddings, a layer at a time."""
    made = []
    for index, grid in enumerate(grids_of(case)):
        encoding, rows = model.tower.start(patches_of(case, index), grid), None
        while rows is None:
            rows = encoding.advance(1)
        made.append(rows)
    return made


def run(model: LlavaModel, case: str, sizes: list[int]) -> np.ndarray[Any, Any]:
    ids, firsts = prompt_of(case)
    return run_cut(model, ids, firsts, encoded(model, case), sizes)


@pytest.mark.parametrize("case", CASES)
def test_float32_on_the_cpu(tmp_path: Path, case: str) -> None:
    golden, model = load_golden(case).arrays, loaded(tmp_path, case)
    ids, firsts = prompt_of(case)
    pictures = encoded(model, case)
    rows = [
        row
        for first, (picture,) in zip(firsts, pictures, strict=True)
        for place, row in enumerate(picture.numpy(), first)
        if ids[place] == IMAGE
    ]
    assert relative_error(np.stack(rows), golden["embeddings"]) < 1e-5
    for sizes in ([len(ids)], [1] * len(ids), [2, 3, len(ids) - 5]):
        assert relative_error(run_cut(model, ids, firsts, pictures, sizes), golden["logits"]) < 1e-5


@pytest.mark.emulator
@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("device", ["emulated:sm_80", "emulated:sm_90a"])
@pytest.mark.parametrize("case", CASES)
def test_on_emulated_gpus(tmp_path: Path, case: str, device: str, dtype: str) -> None:
    """In bfloat16 about as near as transformers."""
    golden, model = load_golden(case).arrays, loaded(tmp_path, case, device=device, dtype=dtype)
    made = run(model, case, [7, len(prompt_of(case)[0]) - 7])
    largest, mean = relative_error(made, golden["logits"]), mean_relative_error(made, golden["logits"])
    if dtype == "float32":
        assert largest < 1e-4
    else:
        assert mean < 1.15 * golden["bfloat16_mean_error"].item()
        assert largest < max(2e-2, 1.6 * golden["bfloat16_error"].item())


@pytest.mark.parametrize("case", ["pixtral", "mistral3"])
def test_names_of_published_files(tmp_path: Path, case: str) -> None:
    names = {**OLD_NAMES, "model.vision_tower.": "vision_tower."}
    model = loaded(tmp_path, case, names)
    count = len(prompt_of(case)[0])
    assert relative_error(run(model, case, [count]), load_golden(case).arrays["logits"]) < 1e-5


@pytest.mark.parametrize("case", ["pixtral", "mistral3"])
def test_any_schedule_draws_the_same(tmp_path: Path, case: str) -> None:
    pytest.importorskip("PIL", reason="needs Pillow (extra vision)")
    from runtime.engine.sampling_params import SamplingParams
    from runtime.images.patches import make_patches, normalised
    from runtime.llm import LLM

    model = loaded(tmp_path, case)
    rule, draw = model.patch_rule, np.random.RandomState(5)
    pictures = [draw.randint(0, 256, (20, 30, 3)).astype(np.uint8), draw.randint(0, 256, (40, 13, 3)).astype(np.uint8)]
    ids, firsts, rows = list[int](), list[int](), []
    for picture in pictures:
        patches = make_patches(picture, rule)
        lines, across = rule.token_grid(patches.rows, patches.columns)
        firsts.append(len(ids))
        ids += [*([IMAGE] * (across - 1) + [LINE_END]) * lines][:-1] + [END]
        rows.append(model.tower(normalised(patches.pixels, rule), patches.grid))
    ids += [7, 8]
    expected = list[int]()
    for _ in range(8):
        expected.append(int(run_cut(model, ids + expected, firsts, rows, [len(ids + expected)])[-1].argmax()))
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    for options in ({"max_num_batched_tokens": 7}, {"overlap": "on"}, {"num_blocks": 24, "preemption": "recompute"}):
        given: dict[str, Any] = {"block_size": 8, "max_num_seqs": 4, "max_model_len": 128, "compile_ahead": False}
        with LLM(tmp_path, skip_tokenizer_init=True, **{**given, **options}) as llm:
            asked = {"prompt_token_ids": [IMAGE, IMAGE, 7, 8], "images": pictures}
            for _ in range(2):  # the second time from cached pages
                outputs = llm.generate([asked, asked], params, use_tqdm=False)
                assert [output.outputs[0].token_ids for output in outputs] == [expected] * 2
                assert outputs[0].prompt_token_ids == ids


@pytest.mark.parametrize(
    ("case", "where", "changes", "message"),
    [
        ("pixtral", "", {"vision_feature_select_strategy": "default"}, "must be full: Pixtral has no class token"),
        ("pixtral", "vision_config", {"head_dim": 12}, "head_dim = 12 is not supported"),
        ("pixtral", "vision_config", {"num_attention_heads": 5}, "= 5 must divide hidden_size = 24"),
        ("mistral3", "", {"vision_feature_layer": [-1, -2]}, "vision_feature_layer names 2 layers"),
        ("mistral3", "text_config", {"model_type": "llama"}, "'llama' must be one of mistral, ministral3"),
        ("mistral3", "vision_config", {"model_type": "clip_vision_model"}, "'clip_vision_model' is not supported"),
    ],
)
def test_configs_that_are_refused(case: str, where: str, changes: dict[str, Any], message: str) -> None:
    config = CASES[case]
    with pytest.raises(ConfigError, match=message):
        parse_config({**config, where: {**config[where], **changes}} if where else {**config, **changes})
