"""Tiny models that read pictures, and what they are asked.

The tests and `tools/references/make_vision_goldens.py` share them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runtime import ops
from runtime.batch import Batch, EncodedTokens
from runtime.tensor.tensor import Tensor
from tests.models.driver import ModelDriver
from tests.models.folders import write_safetensors
from tests.models.golden_weights import golden_tensor, rounded_to_bfloat16

FOLDER = Path(__file__).parent
IMAGE = 90  # the token that stands for pictures
SEED = 21

GRIDS = ((4, 6), (2, 2), (14, 10), (2, 8))
"""Of patches: in a prompt the first two stand side by side."""

PROMPT = (3, 17, *(IMAGE,) * 6, *(IMAGE,) * 1, 5, 81, 44, 9, *(IMAGE,) * 35, 7, 30, *(IMAGE,) * 4)
"""Pictures after text, beside each other, between text, and last."""

FIRST = tuple(np.flatnonzero(np.diff([0, *(token == IMAGE for token in PROMPT)]) == 1).tolist())

_ROPE = {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [4, 3, 3], "mrope_interleaved": True}


def _case(
    architecture: str, model_type: str, text: dict[str, Any], vision: dict[str, Any] | None = None, **own: Any
) -> dict[str, Any]:
    """`None` leaves a field out."""
    made = {
        "architectures": [architecture],
        "model_type": model_type,
        "image_token_id": IMAGE,
        "video_token_id": 91,
        "vision_start_token_id": 92,
        "vision_end_token_id": 93,
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": f"{model_type}_text",
            "vocab_size": 96, "hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 3,
            "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 20, "max_position_embeddings": 128,
            "rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False, "dtype": "float32",
            "rope_parameters": _ROPE, **text,
        },
        "vision_config": {
            "model_type": f"{model_type}_vision",
            "depth": 3, "hidden_size": 36, "num_heads": 3, "intermediate_size": 52, "out_hidden_size": 40,
            "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2, "num_position_embeddings": 25,
            "deepstack_visual_indexes": [0, 2], "hidden_act": "gelu_pytorch_tanh", "in_channels": 3, **(vision or {}),
        },
        **own,
    }  # fmt: skip
    for name in ("text_config", "vision_config"):
        made[name] = {key: value for key, value in made[name].items() if value is not None}
    return made


CASES: dict[str, dict[str, Any]] = {
    "qwen3_vl": _case("Qwen3VLForConditionalGeneration", "qwen3_vl", {}),
    "qwen3_vl_moe": _case(
        "Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe",
        {
            "num_key_value_heads": 3, "moe_intermediate_size": 24, "num_experts": 5, "num_experts_per_tok": 2,
            "mlp_only_layers": [1],
        },
        tie_word_embeddings=False,
    ),
    # Windows of 3 x 3 tokens, of which most are cut at the edges.
    "qwen2_5_vl": _case(
        "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl",
        {
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": None, "attention_bias": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [3, 4, 3]},
        },
        {
            "num_position_embeddings": None, "deepstack_visual_indexes": None, "hidden_act": "silu", "window_size": 24,
            "fullatt_block_indexes": [1],
        },
        tie_word_embeddings=False,
    ),
    "qwen2_vl": _case(
        "Qwen2VLForConditionalGeneration", "qwen2_vl",
        {
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": None, "attention_bias": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [3, 4, 3]},
        },
        {
            "num_position_embeddings": None, "deepstack_visual_indexes": None, "out_hidden_size": None,
            "intermediate_size": None, "hidden_act": "quick_gelu", "embed_dim": 36, "hidden_size": 40, "mlp_ratio": 2,
        },
    ),
}  # fmt: skip

_HYBRID = {
    "num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"], "head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}  # fmt: skip
_NO_DEEPSTACK = {"deepstack_visual_indexes": []}

HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_vl": _case("Qwen3_5ForConditionalGeneration", "qwen3_5", _HYBRID, _NO_DEEPSTACK),
    "qwen3_5_moe_vl": _case(
        "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe",
        {
            **_HYBRID, "intermediate_size": None, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20,
            "num_experts": 6, "num_experts_per_tok": 2,
        },
        _NO_DEEPSTACK, tie_word_embeddings=False,
    ),
}  # fmt: skip
"""Whose decoders keep states: their experts are stored outputs first."""

CASES |= HYBRIDS


@dataclass(frozen=True)
class Golden:
    """What transformers made of a case."""

    shapes: dict[str, tuple[int, ...]]
    arrays: dict[str, np.ndarray[Any, Any]]


def load_golden(case: str) -> Golden:
    shapes = {
        name: tuple(shape) for name, shape in json.loads((FOLDER / f"{case}.json").read_text(encoding="utf-8")).items()
    }
    with np.load(FOLDER / f"{case}.npz") as stored:
        return Golden(shapes, dict(stored))


def patches_of(case: str, index: int) -> np.ndarray[Any, Any]:
    """A picture's patches, normalised: `[rows * columns, 3 * frames * patch_size**2]`."""
    vision = CASES[case]["vision_config"]
    width = 3 * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    rows, columns = GRIDS[index]
    return golden_tensor(f"picture.{index}.weight", (rows * columns, width), SEED) * np.float32(np.sqrt(width / 3.0))


def stored_tensors(shapes: dict[str, tuple[int, ...]], *, inputs_first: bool = True) -> dict[str, np.ndarray[Any, Any]]:
    """A case's weights as checkpoints have them: experts' matrices are stored inputs first; transformers 5 writes them
    outputs first, as it has them."""
    tensors = {name: golden_tensor(name, shape, SEED) for name, shape in shapes.items()}
    return {
        name: np.ascontiguousarray(each.transpose(0, 2, 1)) if inputs_first and ".experts." in name else each
        for name, each in tensors.items()
    }


def write_model(
    folder: Path, case: str, shapes: dict[str, tuple[int, ...]], stored_as: str = "F32", *, inputs_first: bool = True,
    config: dict[str, Any] | None = None,
) -> Path:  # fmt: skip
    """A model folder with the case's weights, or with those of another config."""
    import ml_dtypes

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or CASES[case]), encoding="utf-8")
    tensors = stored_tensors(shapes, inputs_first=inputs_first and case not in HYBRIDS)
    if stored_as == "BF16":
        tensors = {name: rounded_to_bfloat16(each).astype(ml_dtypes.bfloat16) for name, each in tensors.items()}
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def write_golden(
    folder: Path, case: str, config: dict[str, Any], names: dict[str, str] | None = None, *, seed: int = SEED,
    is_rounded: bool = False,
) -> Path:  # fmt: skip
    """A folder with the weights of a golden, under other names where `names` says so by their beginnings; from another
    `seed`, or rounded to bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = {}
    for name, shape in load_golden(case).shapes.items():
        begin = next((each for each in names or {} if name.startswith(each)), None)
        stored = name if names is None or begin is None else names[begin] + name[len(begin) :]
        weights = golden_tensor(name, shape, seed)
        tensors[stored] = rounded_to_bfloat16(weights) if is_rounded else weights
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def encoded_by_pieces(
    model: Any, pictures: Sequence[tuple[np.ndarray[Any, Any], tuple[int, int]]]
) -> list[tuple[Tensor, ...]]:
    """The tower's rows of pictures, each patches and their grid, a piece at a time."""
    made = []
    for patches, grid in pictures:
        encoding, rows = model.tower.start(patches, grid), None
        while rows is None:
            rows = encoding.advance(1)
        made.append(rows)
    return made


def pieces_in(
    batch: Batch, start: int, firsts: Sequence[int], pictures: Sequence[tuple[Tensor, ...]]
) -> tuple[EncodedTokens, ...]:
    """The parts of pictures, whose tokens begin at `firsts`, that a batch of one chunk from `start` on has."""
    found = []
    for first, picture in zip(firsts, pictures, strict=True):
        low, high = max(first, start), min(first + picture[0].shape[0], start + batch.num_tokens)
        if low < high:
            found.append(EncodedTokens(low - start, tuple(part[low - first : high - first] for part in picture)))
    return tuple(found)


def run_cut(
    model: Any, ids: Sequence[int], firsts: Sequence[int], pictures: Sequence[tuple[Tensor, ...]],
    sizes: Sequence[int], complete: Callable[[Batch, int], None] = lambda batch, start: None,
) -> np.ndarray[Any, Any]:  # fmt: skip
    """The logits of all tokens, computed so many at a time, which may cut pictures; `complete` is `ModelDriver`'s."""

    def with_pictures(batch: Batch, start: int) -> None:
        batch.encoded = pieces_in(batch, start, firsts, pictures)
        complete(batch, start)

    return ModelDriver(model, complete=with_pictures, block_size=8).in_pieces(ids, sizes)


def seeing_each_other(model: Any, spans: Sequence[tuple[int, int]]) -> Callable[[Batch, int], None]:
    """`run_cut`'s `complete` for pictures whose tokens see each other: the first token of each, and the one after it.
    No chunk ends within one."""

    def complete(batch: Batch, start: int) -> None:
        end = start + batch.num_tokens
        until = np.arange(start + 1, end + 1, dtype=np.int32)
        for first, after in spans:
            if start <= first < end:
                assert after <= end
                until[first - start : after - start] = after
        if batch.encoded and spans:
            (batch.bidirectional_until,) = ops.place([until], model.device)

    return complete
