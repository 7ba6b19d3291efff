"""What goldens cannot show of the families: numbers that depend on a model's size or on the length asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from models.base import Model
from models.configuration.json_fields import read_json_object
from models.decoder import Decoder
from models.errors import ConfigError
from models.families.gemma import GemmaModel
from models.families.phi3 import Phi3Model
from models.makers.declaring_maker import DeclaringMaker
from models.registry import parse_config
from models.rope import make_rope_table
from runtime.dtype import DType, bfloat16, float16, float32
from runtime.linear.options import LoadOptions
from tests.models.folders import GOLDENS


def fields_of(case: str, **changes: Any) -> dict[str, Any]:
    values = {**read_json_object(GOLDENS / case / "config.json"), **changes}
    return {name: value for name, value in values.items() if value is not ...}


@pytest.mark.parametrize(("dtype", "scale"), [(bfloat16, 55.5), (float16, 55.4375), (float32, np.float32(3072**0.5))])
def test_gemmas_embeddings_are_multiplied_by_a_number_of_the_weights_type(dtype: DType, scale: float) -> None:
    config = parse_config(fields_of("gemma3_odd", hidden_size=3072, num_hidden_layers=1, layer_types=...))
    model: Model = GemmaModel(config, DeclaringMaker(LoadOptions(dtype=dtype), 8))  # type: ignore[arg-type]
    assert isinstance(model, Decoder)
    assert model.embedding_scale == scale


@pytest.mark.parametrize(("max_positions", "switch"), [(8, None), (16, None), (17, 16), (128, 16)])
def test_phi_has_both_tables_if_sequences_may_outgrow_the_original_context(
    max_positions: int, switch: int | None
) -> None:
    config = parse_config(fields_of("phi3_longrope"))
    model = Phi3Model(config, DeclaringMaker(LoadOptions(), max_positions))  # type: ignore[arg-type]
    assert model.longrope_threshold == switch
    table = model.rope_of(0)
    assert table is not None
    assert table.cos.shape == (max_positions + (switch or 0), 6)


def test_queries_of_ministral_grow_with_each_original_context() -> None:
    config = parse_config(fields_of("ministral3_positions"))
    (rope,) = set(config.layer_ropes)  # type: ignore[attr-defined]
    table = make_rope_table(rope, 20)
    assert table.q_scales is not None
    expected = 1 + 0.5 * np.log1p(np.arange(20) // 8)
    np.testing.assert_allclose(table.q_scales.array, expected, rtol=1e-6)


def test_layers_with_and_without_windows_and_rotations() -> None:
    gemma = parse_config(fields_of("gemma3_odd", layer_types=..., num_hidden_layers=12))
    assert [window is None for window in gemma.layer_windows] == [index % 6 == 5 for index in range(12)]
    thetas = [rope.theta for rope in gemma.layer_ropes]  # type: ignore[attr-defined]
    assert thetas == [1e6 if index % 6 == 5 else 1e4 for index in range(12)]
    smol = parse_config(fields_of("smollm3_odd", no_rope_layers=[1, 0, 0, 1], layer_types=...))
    assert [rope is None for rope in smol.layer_ropes] == [False, True, True, False]  # type: ignore[attr-defined]


REFUSED = [
    ("gemma2_odd", {"sliding_window": None}, "sliding_window is null"),
    ("gemma3_odd", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
    ("gemma2_odd", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
    ("olmo2_odd", {"clip_qkv": 8.0}, "clip_qkv = 8.0"),
    (
        "olmo3_windows",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "truncate": False},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
        "full_attention: truncate is false: transformers does not read it",
    ),
    ("smollm3_odd", {"no_rope_layers": [1, 2, 0, 1]}, "no_rope_layers must be at least 4 numbers 0 or 1"),
    ("ministral3_positions", {"rope_parameters": {"rope_type": "default"}}, "'default' is not supported"),
    ("phi3_window_odd", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "'linear' is not supported"),
    ("granite_multipliers", {"logits_scaling": 0}, "logits_scaling"),
]


@pytest.mark.parametrize(("case", "changes", "words"), REFUSED, ids=[f"{r[0]}-{next(iter(r[1]))}" for r in REFUSED])
def test_what_a_family_has_not_is_refused_by_name(case: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_config(fields_of(case, **changes))
