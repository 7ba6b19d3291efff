"""`quantization_config` of config.json, and the conversion of a checkpoint's tensors by its `quant_method`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from models.checkpoints.checkpoint import Checkpoint
from models.checkpoints.stored_tensor import StoredTensor
from models.configuration.json_fields import Fields, read_json_object
from models.errors import WeightsError
from models.quantized import auto_round
from models.quantized.compressed_tensors import CompressedTensorsScheme
from models.quantized.fp8 import STACK, STACK_INPUT_SCALES, STACK_SCALES, STACKED_PARTS, Fp8Scheme, Mxfp4Scheme
from models.quantized.gptq import AwqScheme, GptqScheme
from models.quantized.modelopt import QUANT_CONFIG, ModelOptScheme
from models.quantized.parts import MatrixParts, ModuleTensors, QuantizedTensor
from runtime.dtype import DType, bfloat16

FIELD = "quantization_config"
_OTHER_TOOLS = {"quant_method", "sym", "desc_act", "zero_point", "version", "checkpoint_format", "format"}


class QuantizationScheme(Protocol):
    """How a checkpoint is quantised."""

    def matrix(self, module: ModuleTensors) -> MatrixParts | None:
        """The quantised matrix of a module; None if its weight, if it has one, is stored in floats.

        Takes the tensors that it uses. Raises `WeightsError` for a tensor that contradicts the config.
        """


_SCALES_OF_PAGES = (".k_scale", ".v_scale", ".q_scale", "k_proj.output_scale", "v_proj.output_scale")
"""Ends of names of attention's FP8 scales, which are skipped: pages here are floats, or have scales of their own."""

_READERS: dict[str, Callable[[Fields], QuantizationScheme]] = {
    "fp8": Fp8Scheme.read,
    "compressed-tensors": CompressedTensorsScheme.read,
    "gptq": GptqScheme.read,
    **dict.fromkeys(auto_round.NAMES, auto_round.AutoRoundScheme.read),
    "awq": AwqScheme.read,
    "mxfp4": Mxfp4Scheme.read,
    "modelopt": ModelOptScheme.read,
}


def add_quantization(fields: Fields, folder: Path) -> Fields:
    """The fields, with hf_quant_config.json as `quantization_config` if they have none and the folder has that file.
    Raises `ConfigError`, also for a folder of MLX."""
    for name in ("quantization", FIELD):
        said = fields.values().get(name)
        if isinstance(said, dict) and {"bits", "group_size"} <= said.keys() and not _OTHER_TOOLS & said.keys():
            raise fields.error(
                name,
                f"is MLX's ({said.get('mode', 'affine')!s:.20}, {said['bits']} bits, groups of {said['group_size']}):"
                " the folder is for Apple's mlx-lm alone; take the model that it was made from, with --quantization"
                " int4 or int8, or its GGUF, GPTQ or AWQ files; where mlx-lm runs, `mlx_lm.convert --hf-path"
                f" {folder} --mlx-path NEW --dequantize` writes a folder in 16 bits",
            )
    path = folder / QUANT_CONFIG
    if not fields.has(FIELD) and path.is_file():
        fields.insert(FIELD, {**read_json_object(path), "quant_method": "modelopt"}, str(path))
    return fields


def read_quantization(fields: Fields) -> QuantizationScheme | None:
    """The scheme that a config.json names; None if it has none. Raises `ConfigError` by file, field and value."""
    if not fields.has(FIELD):
        fields.raw(FIELD)
        return None
    section = fields.object(FIELD)
    section.owner = "xserv"
    method = section.string("quant_method", None)
    if method is None and section.has("quant_algo"):  # as Model Optimizer writes it into config.json
        method = "modelopt"
    if method is None:
        raise section.error("quant_method", f"is missing; supported are {', '.join(_READERS)}")
    if method not in _READERS:
        raise section.error(
            "quant_method",
            f"{method!r:.80} is not supported; supported are {', '.join(_READERS)}, and GGUF files: take the model in"
            " one of these, or in 16 bits. If its weights are in 16 bits all the same, as tools leave this behind, pass"
            " over it with --hf-overrides '{\"quantization_config\": null}'",
        )
    section.owner = f"quant_method {method}"
    return _READERS[method](section)


def with_quantized(checkpoint: Checkpoint, scheme: QuantizationScheme | None) -> Checkpoint:
    """The checkpoint with one tensor, `NAME.weight`, for each quantised matrix instead of its stored parts,
    and one, `NAME`, for each stack of them; without a scheme all are floats.

    Raises `WeightsError` with every matrix that contradicts the scheme.
    """
    if scheme is None:
        checkpoint.read_float8()
        return checkpoint
    modules: dict[str, dict[str, StoredTensor]] = {}
    for name, stored in checkpoint.tensors.items():
        owner, part = _module_of(name, checkpoint.tensors)
        modules.setdefault(owner, {})[part] = stored
    has_pages = isinstance(scheme, Fp8Scheme | CompressedTensorsScheme | ModelOptScheme)
    problems: list[str] = []
    made: list[tuple[ModuleTensors, MatrixParts]] = []
    left: dict[str, StoredTensor] = {}
    for name, tensors in modules.items():
        module = ModuleTensors(name, tensors)
        try:
            if (parts := scheme.matrix(module)) is not None:
                made.append((module, parts))
        except WeightsError as error:
            problems.append(str(error))
        for part, stored in tensors.items():
            if part not in module.taken and not (has_pages and stored.name.endswith(_SCALES_OF_PAGES)):
                left[stored.name] = stored
    if problems:
        one = len(problems) == 1
        count = "1 matrix is" if one else f"{len(problems)} matrices are"
        raise WeightsError(f"{checkpoint.place}: {count} not as {FIELD} says:", problems)
    dtype = _main_dtype(left)
    for quantized, parts in made:
        taken = [modules[quantized.name][part] for part in sorted(quantized.taken)]
        is_whole_name = not {"blocks", STACK}.isdisjoint(quantized.taken)  # else experts have a module's name
        name = quantized.name if is_whole_name else f"{quantized.name}.weight"
        left[name] = QuantizedTensor(name, parts, taken, dtype)
    return Checkpoint(checkpoint.place, checkpoint.label, left)


def _module_of(name: str, others: Mapping[str, StoredTensor]) -> tuple[str, str]:
    """A tensor's module and its part of it; `X_blocks` and `X_scales` are parts of the stack X, as are X, `X_scale_inv`
    and `X_activation_scale`, but for a module's weight."""
    whole = name.removesuffix(f"_{STACK_SCALES}").removesuffix(f"_{STACK_INPUT_SCALES}")
    if not whole.endswith(".weight") and {whole, f"{whole}_{STACK_SCALES}"} <= others.keys():
        return whole, STACK if name == whole else name.removeprefix(f"{whole}_")
    for part in STACKED_PARTS:
        if name.endswith(f"_{part}"):
            return name.removesuffix(f"_{part}"), part
    owner, _, part = name.rpartition(".")
    return owner, part


def _main_dtype(tensors: Mapping[str, StoredTensor]) -> DType:
    """The type of most numbers that are stored as floats."""
    counts = Counter[DType]()
    for stored in tensors.values():
        if stored.dtype is not None:
            counts[stored.dtype] += math.prod(stored.shape)
    return counts.most_common(1)[0][0] if counts else bfloat16
