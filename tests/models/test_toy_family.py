"""The family of docs/examples: its file alone, in a folder of families, makes a model that runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import models.families
from models.errors import ConfigError, WeightsError
from models.families import known_architectures
from models.registry import load_model
from tests.models.driver import logits_of, relative_error
from tests.models.folders import write_safetensors
from tests.oracles import dense
from tests.oracles.attention import attention

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY, EPS = 24, 40, 3, 1, 8, 61, 1e-5
CONFIG = {
    "architectures": ["ToyForCausalLM"], "model_type": "toy", "hidden_size": HIDDEN, "intermediate_size": INNER,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "num_hidden_layers": 2,
    "vocab_size": VOCABULARY, "max_position_embeddings": 64, "rms_norm_eps": EPS, "rope_theta": 1e4,
    "tie_word_embeddings": False, "hidden_act": "silu", "residual_scale": 0.5,
}  # fmt: skip


@pytest.fixture(autouse=True)
def toy_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The example as `toy.py` in a temporary folder of families."""
    folder = tmp_path / "families"
    folder.mkdir()
    shutil.copyfile(EXAMPLES / "family.py", folder / "toy.py")
    monkeypatch.setattr(models.families, "__path__", [*models.families.__path__, str(folder)])
    known_architectures.cache_clear()
    yield
    known_architectures.cache_clear()


def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    layer = {
        "norm": (HIDDEN,), "q_proj": (HEADS * HEAD_DIM, HIDDEN), "k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "v_proj": (KV_HEADS * HEAD_DIM, HIDDEN), "o_proj": (HIDDEN, HEADS * HEAD_DIM), "gate_proj": (INNER, HIDDEN),
        "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER),
    }  # fmt: skip
    shapes = {f"model.layers.{i}.{name}.weight": shape for i in range(2) for name, shape in layer.items()}
    shapes |= {f"{name}.weight": (VOCABULARY, HIDDEN) for name in ("model.embed_tokens", "lm_head")}
    shapes["model.norm.weight"] = (HIDDEN,)
    return {name: (rng.standard_normal(shape) * 0.3).astype(np.float32) for name, shape in shapes.items()}


def expected_logits(tensors: dict[str, np.ndarray], ids: list[int]) -> np.ndarray:
    angles = np.outer(np.arange(len(ids)), 1e4 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM))
    x = tensors["model.embed_tokens.weight"][ids].astype(np.float64)
    for index in range(2):
        weight = {
            name.split(".")[3]: tensor for name, tensor in tensors.items() if name.startswith(f"model.layers.{index}.")
        }
        h = dense.rms_norm(x, weight["norm"], EPS)
        q, k, v = (dense.linear(h, weight[f"{name}_proj"]).reshape(len(ids), -1, HEAD_DIM) for name in "qkv")
        q, k = (dense.rotate(part, np.cos(angles)[:, None], np.sin(angles)[:, None], False) for part in (q, k))
        attended = attention(q, k, v, HEAD_DIM**-0.5 * CONFIG["residual_scale"]).reshape(len(ids), -1)
        hidden = dense.silu(dense.linear(h, weight["gate_proj"])) * dense.linear(h, weight["up_proj"])
        x = x + dense.linear(attended, weight["o_proj"]) + dense.linear(hidden, weight["down_proj"])
    return dense.linear(dense.rms_norm(x, tensors["model.norm.weight"], EPS), tensors["lm_head.weight"])


def write_folder(folder: Path, tensors: dict[str, np.ndarray], **fields: object) -> Path:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **fields}))
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def test_it_runs_as_numpy_does(tmp_path: Path) -> None:
    tensors = weights()
    model = load_model(write_folder(tmp_path, tensors))
    ids = np.random.default_rng(1).integers(0, VOCABULARY, 23).tolist()
    expected = expected_logits(tensors, ids)
    assert relative_error(logits_of(model, ids), expected) <= 1e-4
    assert relative_error(logits_of(model, ids, [1, 9, 13]), expected) <= 1e-4


def test_what_it_does_not_read_and_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="norm_after"):
        load_model(write_folder(tmp_path, weights(), norm_after=True))
    lacking = weights()
    del lacking["model.layers.1.down_proj.weight"]
    with pytest.raises(WeightsError, match=r"model\.layers\.1\.down_proj\.weight"):
        load_model(write_folder(tmp_path, lacking))
