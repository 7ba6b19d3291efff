"""From a model folder to a loaded model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from models.architecture import Architecture
from models.base import Model
from models.checkpoint import Checkpoint, open_checkpoint
from models.config import FLOAT_DTYPES, ModelConfig
from models.dummy import DummyCheckpoint
from models.families import known_architectures
from models.harmless_fields import is_harmless
from models.json_fields import Fields, config_path, read_json_object
from models.weights import Weights
from runtime.device.device import Device
from runtime.dtype import DType, float32
from runtime.errors import InvalidArgumentError
from runtime.linear.weight import check_gemm, check_quantization

LoadFormat = Literal["auto", "safetensors", "dummy"]


def load_config(folder: str | Path) -> ModelConfig:
    """The typed form of `folder`/config.json.

    Raises `ConfigError`, naming file, field and value, for a file that is missing or not JSON, a field that
    is missing or out of range, an unknown architecture, and a field that no family knows.
    """
    path = config_path(folder)
    return parse_config(read_json_object(path), str(path))


def parse_config(values: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """The typed form of a `config.json` already read; `where` names it in errors."""
    fields = Fields(values, where)
    architecture = find_architecture(fields)
    fields.owner = architecture.name
    config = architecture.read_config(fields)
    fields.refuse_unread(is_harmless)
    return replace(config, architecture=architecture.name)


def find_architecture(fields: Fields) -> Architecture:
    """By `architectures`, or by `model_type` where the file names none."""
    known = known_architectures()
    names, model_type = fields.strings("architectures"), fields.string("model_type", None)
    supported = ", ".join(known)
    if names:
        architecture = next((known[name] for name in names if name in known), None)
        if architecture is None:
            shown = ", ".join(names)[:200]
            raise fields.error("architectures", f"{shown!r} is not supported; supported are {supported}")
        if model_type not in (None, architecture.model_type):
            raise fields.error("model_type", f"{model_type!r:.80} contradicts the architecture {architecture.name}")
        return architecture
    if model_type is None:
        raise fields.error("architectures", "is missing, and model_type too")
    architecture = next((one for one in known.values() if one.model_type == model_type), None)
    if architecture is None:
        raise fields.error("model_type", f"{model_type!r:.80} is not supported; supported are {supported}")
    return architecture


def load_model(
    folder: str | Path,
    *,
    device: Device | str = "cpu",
    dtype: DType | str = "auto",
    load_format: LoadFormat = "auto",
    seed: int = 0,
    max_model_len: int | None = None,
    gemm: str = "auto",
    exact: bool = False,
    quantization: str = "none",
) -> Model:
    """Load the model in `folder`.

    Args:
        folder: holds `config.json` and safetensors.
        device: where the weights go.
        dtype: "auto" keeps the stored types; float32, float16 or bfloat16 converts every weight while loading.
        load_format: "safetensors" (which is what "auto" means), or "dummy": seeded random weights from the config.
        seed: of the dummy weights.
        max_model_len: tokens that a sequence will have at most, to keep position tables small; None: the config's
            `max_position_embeddings`, which is also the limit.
        gemm: which matrix product a GPU uses, one of `runtime.linear.weight.GEMM_TIERS`.
        exact: whether a product gives a row the same bits in any batch (attention is told by the batch).
        quantization: what the matrices of linear maps are made into, tensor by tensor, one of
            `runtime.linear.weight.QUANTIZATIONS`.

    Raises:
        ModelLoadError: naming the file, the tensor or field, and the value at fault.
        InvalidArgumentError: for an argument that is not one of the above.
    """
    folder = Path(folder)
    device = Device.parse(device)
    wanted = None if dtype == "auto" else _float_dtype(dtype)
    if load_format not in ("auto", "safetensors", "dummy"):
        raise InvalidArgumentError(
            f"load_format must be auto, safetensors or dummy, not {load_format!r}", param="load_format"
        )
    check_gemm(gemm, device)
    check_quantization(quantization, device)
    config = load_config(folder)
    limit = config.max_position_embeddings
    if max_model_len is not None and not 1 <= max_model_len <= limit:
        raise InvalidArgumentError(
            f"max_model_len must be from 1 to {limit} (max_position_embeddings), not {max_model_len}",
            param="max_model_len",
        )
    model_class = known_architectures()[config.architecture].model_class
    layout = model_class.tensor_layout(config)
    source: Checkpoint | DummyCheckpoint
    if load_format == "dummy":
        source = DummyCheckpoint(layout, seed, wanted or config.dtype or float32)
    else:
        source = open_checkpoint(folder)
        source.fit(layout)
    weights = Weights(source, wanted, device, gemm, exact=exact, quantization=quantization)
    return model_class(config, weights, device, max_model_len or limit)


def _float_dtype(dtype: DType | str) -> DType:
    parsed = DType.parse(dtype)
    if parsed not in FLOAT_DTYPES:
        raise InvalidArgumentError(
            f"dtype must be auto, float32, float16 or bfloat16, not {dtype!r}", param="dtype"
        )
    return parsed
