"""Gemma 4 with pictures in GGUF, a file of the text and one of the tower, beside the twin in safetensors.

llama.cpp's own embeddings of these models differ by 1.4 %: its converter writes no activation, so that its towers take
the quick approximation of GELU; with `clip.use_gelu` by 0.25 %, as its convolution and GELU round to float16.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.configuration.preprocessing import read_patch_rule
from models.errors import ConfigError, ModelLoadError
from models.families.pictures.gemma4_pictures import Gemma4PictureModel
from models.registry import load_config, load_model
from tests.models.driver import relative_error
from tests.models.gguf.gemma4_towers import FRAME, write_text, write_tower
from tests.models.gguf.test_mmproj import write_text as write_qwen_text
from tests.models.vision.cases import IMAGE, encoded_by_pieces, load_golden
from tests.models.vision.gemma4_cases import BEGIN, CASES, END, patches_of
from tests.models.vision.test_gemma4 import asked, loaded, run


@pytest.mark.parametrize("case", CASES)
def test_the_twin_s_embeddings_and_logits(tmp_path: Path, case: str) -> None:
    """To the bit; the file is found beside the model, or named."""
    golden, twin = load_golden(case).arrays, loaded(tmp_path / "twin", case)
    (tmp_path / "other").mkdir()
    model, tower = write_text(tmp_path / "model.gguf", case), write_tower(tmp_path / "other" / "tower.gguf", case)
    assert load_config(model).architecture == "Gemma4ForCausalLM"  # nothing lies beside it
    ours = load_model(model, mmproj=str(tower))
    assert isinstance(ours, Gemma4PictureModel)
    assert (ours.patch_rule, ours.frame, ours.whole_picture_tokens) == (
        twin.patch_rule, (BEGIN, END), twin.whole_picture_tokens,
    )  # fmt: skip
    assert read_patch_rule(model, ours.patch_rule, str(tower)) == ours.patch_rule
    pictures, others = (encoded_by_pieces(each, patches_of(case)) for each in (ours, twin))
    made = np.concatenate([rows[0].numpy() for rows in pictures])
    assert made.tobytes() == np.concatenate([rows[0].numpy() for rows in others]).tobytes()
    assert relative_error(made, golden["embeddings"]) < 1e-5
    ids, _ = asked(case)
    sizes = [len(ids) - 1, 1]
    logits = run(ours, case, ids, sizes, pictures)
    assert logits.tobytes() == run(twin, case, ids, sizes, others).tobytes()
    assert relative_error(logits, golden["logits"]) < 1e-4
    tower.rename(tmp_path / "mmproj-F32.gguf")
    assert load_config(model).architecture == CASES[case]["architectures"][0]


def test_only_a_tower_that_fits_is_found(tmp_path: Path) -> None:
    """Another family's is passed over, and so is one of another width."""
    model, other = write_text(tmp_path / "model.gguf", "gemma4_whole"), tmp_path / "qwen.gguf"
    write_tower(tmp_path / "mmproj-a.gguf", "gemma4_whole", **{"clip.vision.projection_dim": 48})
    assert load_config(model).architecture == "Gemma4ForCausalLM"
    fitting = write_tower(tmp_path / "mmproj-b.gguf", "gemma4_causal")  # as wide
    assert load_config(model).architecture == "Gemma4ForConditionalGeneration"
    write_qwen_text(other, "qwen3_vl")
    assert load_config(other).architecture == "Qwen3ForCausalLM"
    with pytest.raises(ConfigError, match=r"projector_type = 'gemma4v' is not supported: it must be 'qwen3vl_merger'"):
        load_config(other, mmproj=str(fitting))


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("gemma4_whole", {"clip.vision.projector_type": "gemma3"}, "must be 'gemma4v', 'gemma4uv', null"),
    ("gemma4_whole", {"clip.use_gelu": False}, "clip.use_gelu = False is not supported"),
    ("gemma4_whole", {"clip.vision.projector.scale_factor": None}, "position_embedding_size = 2240 must be at least"),
    ("gemma4_whole", {"clip.vision.attention.head_count": 5}, "num_attention_heads = 5 must divide hidden_size = 36"),
    ("gemma4_causal", {"clip.vision.block_count": 1}, "tensor .v.blk.1.attn_q.weight. is left over"),
    ("gemma4_unified", {"clip.vision.patch_size": None}, "clip.vision.patch_size is missing"),
    (
        "gemma4_unified",
        {"clip.vision.patch_size": 5},
        r"v.patch_norm.1.weight. is .192., but the config asks for .300.",
    ),
]


@pytest.mark.parametrize(("case", "changes", "message"), WRONG)
def test_a_tower_that_does_not_fit_is_refused(
    tmp_path: Path, case: str, changes: dict[str, Any], message: str
) -> None:  # fmt: skip
    model = write_text(tmp_path / "model.gguf", case)
    tower = write_tower(tmp_path / "tower.gguf", case, **changes)
    with pytest.raises(ModelLoadError, match=message):
        load_model(model, mmproj=str(tower))


@pytest.mark.parametrize("token", [IMAGE, BEGIN, END])
def test_a_vocabulary_without_a_picture_s_tokens_is_refused(tmp_path: Path, token: int) -> None:
    tokens = {index: name for index, name in FRAME.items() if index != token}
    model = write_text(tmp_path / "model.gguf", "gemma4_whole", tokens=tokens)
    tower = write_tower(tmp_path / "tower.gguf", "gemma4_whole")
    with pytest.raises(ConfigError, match=rf"tokenizer.ggml.tokens has no '{FRAME[token]}'".replace("|", r"\|")):
        load_config(model, mmproj=str(tower))
