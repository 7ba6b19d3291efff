"""`quant_method: modelopt`: exports of NVIDIA's Model Optimizer, by `quant_algo`.

    quant_algo                   tensors of a module X
    FP8                          X.weight e4m3 [N, K]; X.weight_scale and X.input_scale: one number each
    FP8_PER_CHANNEL_PER_TOKEN    X.weight e4m3 [N, K]; X.weight_scale [N]
    NVFP4, W4A16_NVFP4           X.weight uint8 [N, K / 2], element 2j in the low half of byte j; X.weight_scale e4m3
                                 [N, K / 16] times X.weight_scale_2, one number; X.input_scale (NVFP4): one number
    MXFP8                        X.weight e4m3 [N, K]; X.weight_scale [N, K / 32]: exponents, 127 above their value
    MIXED_PRECISION              `quantized_layers` says which of these for each module

`hf_quant_config.json` has it in an object `quantization`; config.json has it flat, with other names for excluded
modules (`ignore`) and pages (`kv_cache_scheme`). Names of excluded modules may have the wildcards of a shell.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from models.configuration.json_fields import Fields
from models.quantized.fp8 import SCALES, as_bytes, scale_part
from models.quantized.parts import FLOATS, Array, MatrixParts, ModuleTensors, Part, refusal
from runtime.linear.quantized import ActivationScheme, QuantizedLayout

QUANT_CONFIG = "hf_quant_config.json"
"""The file beside config.json, which old folders have alone."""

_GROUPS = {"FP8": 0, "FP8_PER_CHANNEL_PER_TOKEN": 0, "NVFP4": 16, "W4A16_NVFP4": 16, "MXFP8": 32}
_MIXED = "MIXED_PRECISION"
_MOST_PATTERNS = 1 << 16


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A module's storage; `group_size` 0 means no groups."""

    name: str
    group_size: int

    @classmethod
    def read(cls, fields: Fields) -> Self:
        """From the object that has `quant_algo`. Raises `ConfigError`."""
        name = fields.string("quant_algo")
        if name not in _GROUPS:
            raise fields.error("quant_algo", f"{name!r:.80} is not supported; supported are {', '.join(_GROUPS)}")
        fields.expect("has_zero_point", False)
        fields.expect("pre_quant_scale", False)
        usual = _GROUPS[name]
        size = fields.integer("group_size", usual, least=0, most=1 << 20)
        if bool(size) != bool(usual):
            raise fields.error("group_size", f"is {size}, must be {'more than 0' if usual else '0'} for {name}")
        return cls(name, size)


@dataclass(frozen=True, slots=True)
class ModelOptScheme:
    """See the module.

    Attributes:
        usual: of modules that `layers` does not name, or None if they are stored in floats.
        layers: of modules by name.
        excluded: patterns of modules that are stored in floats.
    """

    usual: Algorithm | None
    layers: Mapping[str, Algorithm]
    excluded: tuple[str, ...]

    @classmethod
    def read(cls, fields: Fields) -> Self:
        """From `quantization_config`, or all of hf_quant_config.json. Raises `ConfigError`."""
        fields.raw("producer")
        if fields.has("quantization"):
            fields = fields.object("quantization")
            fields.expect("quant_method", "modelopt")
        fields.raw("config_groups")  # repeats quant_algo
        _read_pages(fields)
        excluded = [name for key in ("exclude_modules", "ignore") for name in fields.strings(key) or ()]
        if len(excluded) > _MOST_PATTERNS:
            raise fields.error("exclude_modules", f"has {len(excluded)} names, must have at most {_MOST_PATTERNS}")
        layers = {}
        if fields.has("quantized_layers"):
            section = fields.object("quantized_layers")
            layers = {name: Algorithm.read(section.object(name)) for name in section.names()}
        usual = None
        if fields.raw("quant_algo") == _MIXED:
            fields.raw("group_size")  # each layer has its own
            if not layers:
                raise fields.error("quantized_layers", f"is missing or empty, which quant_algo {_MIXED} needs")
        elif fields.has("quant_algo"):
            usual = Algorithm.read(fields)
        return cls(usual, layers, tuple(excluded))

    def matrix(self, module: ModuleTensors) -> MatrixParts | None:
        if module.type_of("weight") not in ("F8_E4M3", "U8"):
            return None
        weight = module.take("weight", ("F8_E4M3", "U8"), (None, None))
        if any(fnmatch.fnmatchcase(module.name, pattern) for pattern in self.excluded):
            raise refusal(weight, f"is {weight.type_name}, but exclude_modules names the module")
        algorithm = self.layers.get(module.name, self.usual)
        if algorithm is None:
            raise refusal(weight, f"is {weight.type_name}, but quantized_layers does not name the module")
        return _nvfp4(module, algorithm) if "NVFP4" in algorithm.name else _fp8(module, algorithm)


def _fp8(module: ModuleTensors, algorithm: Algorithm) -> MatrixParts:
    weight = module.take("weight", ("F8_E4M3",), (None, None))
    shape, size = (weight.shape[0], weight.shape[1]), algorithm.group_size
    scale = module.take("weight_scale", ("U8", "F8_E8M0") if size else FLOATS)
    is_static = algorithm.name == "FP8"
    layout = QuantizedLayout(
        "fp8", shape, (0, 0) if is_static else (1, size), SCALES[scale.type_name],
        activation=ActivationScheme("fp8", size, is_static),
    )  # fmt: skip
    wanted = layout.scale_shape
    if scale.shape not in (((), (1,)) if is_static else (wanted,) if size else (wanted[:1], wanted)):
        raise refusal(scale, f"is {list(scale.shape)}, must be {[] if is_static else list(wanted)} for a matrix"
                      f" {list(shape)} in {algorithm.name}")  # fmt: skip
    input_scale = module.take_scalar("input_scale") if is_static else None
    return MatrixParts(layout, Part(weight, as_bytes), scale_part(scale, wanted), input_scale=input_scale)


def _nvfp4(module: ModuleTensors, algorithm: Algorithm) -> MatrixParts:
    weight = module.take("weight", ("U8",), (None, None))
    shape = weight.shape[0], 2 * weight.shape[1]
    rounds_x = algorithm.name == "NVFP4"
    layout = QuantizedLayout(
        "fp4", shape, (1, algorithm.group_size), SCALES["F8_E4M3"], has_factor=True,
        activation=ActivationScheme("fp4", algorithm.group_size) if rounds_x else None,
    )  # fmt: skip
    scale = module.take("weight_scale", ("F8_E4M3",), layout.scale_shape)
    factor, input_scale = module.take_scalar("weight_scale_2"), None
    if rounds_x:
        stored = module.take_scalar("input_scale").stored
        input_scale = Part(stored, _reciprocal)
    return MatrixParts(layout, Part(weight), scale_part(scale, layout.scale_shape), factor=factor,
                       input_scale=input_scale)  # fmt: skip


def _reciprocal(array: Array) -> Array:
    with np.errstate(all="ignore"):  # 0 becomes infinity, which is refused
        return np.reciprocal(array.astype(np.float32))


def _read_pages(fields: Fields) -> None:
    """Checks the KV cache's fields. Pages here are floats, or have scales of their own."""
    fields.expect("kv_cache_quant_algo", "FP8", "NVFP4")
    if isinstance(fields.raw("kv_cache_scheme"), dict):
        section = fields.object("kv_cache_scheme")
        section.expect("num_bits", 8, 4)
        section.expect("type", "float")
        section.expect("dynamic", False, True)
        section.integer("group_size", 0, least=0)
    else:
        fields.expect("kv_cache_scheme", "FP8", "NVFP4")
