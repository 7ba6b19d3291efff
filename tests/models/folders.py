"""Model folders for tests: the goldens' configs with their weights made again, whole or spoilt on purpose."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tests.models.golden_weights import golden_tensor, rounded_to_bfloat16

GOLDENS = Path(__file__).parent / "goldens"
CASES = sorted(path.name for path in GOLDENS.iterdir() if path.is_dir())

WITH_EXPERTS = [name for name in CASES if "moe" in name or name.startswith(("mixtral", "gpt_oss"))]

Array = np.ndarray[Any, Any]

_NUMPY = {
    "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "I64": np.int64, "BOOL": np.bool_,
    "F64": np.float64,
    "I32": np.int32, "I8": np.int8, "U8": np.uint8, "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2, "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}  # fmt: skip
_NAMES = {np.dtype(numpy): name for name, numpy in _NUMPY.items()}


@dataclass(frozen=True)
class Golden:
    """One case of `tools/references/generate_reference.py`."""

    name: str
    seed: int
    prompt_ids: list[int]
    shapes: dict[str, tuple[int, ...]]
    greedy_ids: dict[str, list[int]]  # by the type of the weights: "float32", "bfloat16"
    logits: dict[str, Array]  # each [tokens, vocabulary] float32

    @property
    def folder(self) -> Path:
        return GOLDENS / self.name


def load_golden(name: str) -> Golden:
    fields = json.loads((GOLDENS / name / "golden.json").read_text(encoding="utf-8"))
    with np.load(GOLDENS / name / "logits.npz") as stored:
        logits = dict(stored)
    shapes = {tensor: tuple(shape) for tensor, shape in fields["tensors"].items()}
    return Golden(name, fields["seed"], fields["prompt_ids"], shapes, fields["greedy_ids"], logits)


def golden_tensors(golden: Golden, stored_as: str = "F32") -> dict[str, Array]:
    """Every tensor of a case; BF16 and F16 hold the values rounded to bfloat16."""
    tensors = {name: golden_tensor(name, shape, golden.seed) for name, shape in golden.shapes.items()}
    if stored_as == "F32":
        return tensors
    return {name: rounded_to_bfloat16(array).astype(_NUMPY[stored_as]) for name, array in tensors.items()}


def write_tiny_qwen3(folder: Path, *, vocab_size: int, eos_token_id: int, max_position_embeddings: int) -> None:
    """The config of a Qwen3 of two layers, whose weights `load_format="dummy"` makes."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": vocab_size,
        "max_position_embeddings": max_position_embeddings,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "eos_token_id": eos_token_id,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def write_safetensors(path: Path, tensors: dict[str, Array], header_changes: dict[str, Any] | None = None) -> None:
    """A safetensors file; `header_changes` replace entries of the header, right or wrong."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, array in tensors.items():
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [position, position + array.nbytes],
        }
        position += array.nbytes
    header.update(header_changes or {})
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    body = b"".join(np.ascontiguousarray(array).tobytes() for array in tensors.values())
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + body)


def write_shards(folder: Path, shards: dict[str, dict[str, Array]], placed: dict[str, str] | None = None) -> None:
    """Several safetensors files and their index; `placed` replaces the index's weight_map."""
    for file, tensors in shards.items():
        write_safetensors(folder / file, tensors)
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    index = {"metadata": {}, "weight_map": weight_map if placed is None else placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def write_model(folder: Path, golden: Golden, stored_as: str = "F32", config: str = "config.json") -> Path:
    """A whole model folder with the weights of a case."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(golden.folder / config, folder / "config.json")
    write_safetensors(folder / "model.safetensors", golden_tensors(golden, stored_as))
    return folder


def change_config(folder: Path, **changes: Any) -> Path:
    """Replace fields of a folder's config.json; `...` removes one. Returns the folder."""
    path = folder / "config.json"
    fields = {**json.loads(path.read_text(encoding="utf-8")), **changes}
    path.write_text(json.dumps({key: value for key, value in fields.items() if value is not ...}), encoding="utf-8")
    return folder


def arrays_of(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz file, which is closed again."""
    with np.load(path) as stored:
        return dict(stored)
