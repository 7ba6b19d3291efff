"""`quant_method: fp8`: e4m3 matrices with a scale by block, by row or for all, as DeepSeek and Qwen publish them.

    X.weight            e4m3 [N, K]
    X.weight_scale_inv  [ceil(N / rows), ceil(K / elements)] with `weight_block_size`, else one number or one a row;
                        it is a factor, in spite of its name. `X.weight_scale` is the same.
    X.input_scale       of `activation_scheme: static`: one number; or `X.activation_scale`

Experts may stand in one tensor, as transformers has them in memory, and saves those of Gemma 4:

    X            e4m3 [experts, N, K]
    X_scale_inv  [experts, ceil(N / rows), ceil(K / elements)]; [experts, 1 or 2, 1] without `weight_block_size`, or
                 two where N is that of a gate and of a map beside it, whose rows would have one
    X_activation_scale  [experts], of `activation_scheme: static`; experts' inputs are not rounded here

Scales of e8m0 (`scale_fmt: ue8m0`) are powers of two, and may be stored as bytes.

`quant_method: mxfp4`: experts as gpt-oss stores them, e2m1 in blocks of 32 with e8m0 scales.

    X_blocks  uint8 [experts, N, K / 32, 16]: element 2j of a block in the low half of its byte j
    X_scales  uint8 [experts, N, K / 32]: exponents, 127 above their value

X in floats would be [experts, K, N].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import ml_dtypes
import numpy as np

from models.checkpoints.stored_tensor import StoredTensor
from models.configuration.json_fields import Fields
from models.quantized.parts import FLOATS, Array, MatrixParts, ModuleTensors, Part, UnconvertedModules, refusal
from runtime.linear.quantized import ActivationScheme, QuantizedLayout

SCALES = {
    "F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu), "U8": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}  # fmt: skip
"""The meaning of scales by the file's name of their type; bytes are exponents."""


def scale_part(stored: StoredTensor, shape: tuple[int, int]) -> Part:
    """The scales in the layout's type and shape."""
    dtype = SCALES[stored.type_name]
    return Part(stored, lambda array: array.view(dtype).reshape(shape))


def as_bytes(array: Array) -> Array:
    """The bits of numbers of one byte each."""
    return array.view(np.uint8)


_REPEATED = (
    "act_bits", "act_data_type", "act_dynamic", "act_group_size", "act_sym", "autoround_version",
    "block_name_to_quantize", "data_type", "dequantize", "enable_quanted_input", "extra_config", "group_size", "iters",
    "nsamples", "seqlen",
)  # fmt: skip
"""auto-round's fields, which say the same by other names; `dequantize` makes transformers dequantise while loading."""


@dataclass(frozen=True, slots=True)
class Fp8Scheme:
    """See the module.

    Attributes:
        block: `weight_block_size`, or None for one scale for all or one a row.
        is_static: whether activations have a scale in the checkpoint.
        has_exponents: whether scales are stored as e8m0.
        unconverted: modules that are stored in floats.
    """

    block: tuple[int, int] | None
    is_static: bool
    has_exponents: bool
    unconverted: UnconvertedModules

    @classmethod
    def read(cls, fields: Fields) -> Self:
        """From `quantization_config`. Raises `ConfigError`."""
        fields.expect("fmt", "e4m3", "float8_e4m3fn")
        fields.expect("expert_dtype", "fp8")
        fields.expect("modules_to_convert", [])
        fields.expect("kv_cache_scheme", "static", "dynamic")
        for name in _REPEATED:
            fields.raw(name)
        fields.expect("bits", 8)
        fields.expect("sym", True)
        scheme = fields.string("activation_scheme", "dynamic")
        if scheme not in ("dynamic", "static"):
            raise fields.error("activation_scheme", f"is {scheme!r:.80}, must be 'dynamic' or 'static'")
        scale_format = fields.string("scale_fmt", "float")
        if scale_format not in ("float", "ue8m0"):
            raise fields.error("scale_fmt", f"is {scale_format!r:.80}, must be 'float' or 'ue8m0'")
        names = [name for name in ("modules_to_not_convert", "ignored_layers") if fields.has(name)]
        patterns = [pattern for name in names for pattern in fields.strings(name) or ()]
        return cls(
            block=_block(fields),
            is_static=scheme == "static",
            has_exponents=scale_format == "ue8m0",
            unconverted=UnconvertedModules(fields, names[0] if names else "", patterns),
        )

    def matrix(self, module: ModuleTensors) -> MatrixParts | None:
        if module.has(STACK):
            return self._stack(module)
        if not module.type_of("weight").startswith("F8_"):
            return None
        weight = module.take("weight", ("F8_E4M3",), (None, None))
        if module.name in self.unconverted:
            raise refusal(weight, "is F8_E4M3, but modules_to_not_convert names the module")
        width, depth = weight.shape
        types = ("U8", "F8_E8M0", *FLOATS) if self.has_exponents else FLOATS
        scale = module.take("weight_scale" if module.has("weight_scale") else "weight_scale_inv", types)
        block = self.block
        if block is None:
            block = (1, 0) if scale.shape in ((width,), (width, 1)) and width > 1 else (0, 0)
        input_scale = None
        if self.is_static:
            input_scale = module.take_scalar("activation_scale" if module.has("activation_scale") else "input_scale")
        layout = QuantizedLayout(
            "fp8", (width, depth), block, SCALES[scale.type_name],
            activation=ActivationScheme("fp8", 0 if self.block is None else block[1], self.is_static),
        )  # fmt: skip
        wanted = layout.scale_shape
        if scale.shape != wanted and not (self.block is None and scale.shape in ((), (wanted[0],))):
            raise refusal(scale, f"is {list(scale.shape)}, must be {list(wanted)}: {weight.name!r} is {[width, depth]}")
        return MatrixParts(layout, Part(weight, as_bytes), scale_part(scale, wanted), input_scale=input_scale)

    def _stack(self, module: ModuleTensors) -> MatrixParts:
        """The experts' matrices one under another, each row with the scales of its blocks."""
        weight = module.take(STACK, ("F8_E4M3",), (None, None, None))
        if module.name in self.unconverted:
            raise refusal(weight, "is F8_E4M3, but modules_to_not_convert names the module")
        scale = module.take(STACK_SCALES, ("U8", "F8_E8M0", *FLOATS) if self.has_exponents else FLOATS)
        experts, width, depth = weight.shape
        if module.has(STACK_INPUT_SCALES):
            module.take(STACK_INPUT_SCALES, FLOATS, (experts,))
        high, wide = self.block or (width, depth)
        counts, groups = {-(-width // high)}, -(-depth // wide)
        if counts == {1} and width % 2 == 0:
            counts.add(2)
        if len(scale.shape) != 3 or scale.shape not in {(experts, count, groups) for count in counts}:
            wanted = " or ".join(str([experts, count, groups]) for count in sorted(counts))
            raise refusal(scale, f"is {list(scale.shape)}, must be {wanted}: {weight.name!r} is {list(weight.shape)}")
        rows = width // 2 if scale.shape[1] == 2 and -(-width // high) == 1 else high
        dtype = SCALES[scale.type_name]
        layout = QuantizedLayout(
            "fp8", (experts * width, depth), (1, self.block[1] if self.block else 0), dtype,
            activation=None if self.is_static else ActivationScheme("fp8", self.block[1] if self.block else 0),
        )  # fmt: skip

        def of_each_row(array: Array) -> Array:
            return np.repeat(array.view(dtype), rows, axis=1)[:, :width].reshape(layout.scale_shape)

        return MatrixParts(
            layout, Part(weight, lambda array: as_bytes(array).reshape(layout.code_shape)), Part(scale, of_each_row),
            stack_shape=(experts, width, depth),
        )  # fmt: skip


def _block(fields: Fields) -> tuple[int, int] | None:
    value = fields.raw("weight_block_size")
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2:
        raise fields.error("weight_block_size", f"must be [rows, elements], not {value!r:.80}")
    sizes = Fields({"weight_block_size[0]": value[0], "weight_block_size[1]": value[1]}, fields.where)
    return sizes.integer("weight_block_size[0]", most=1 << 20), sizes.integer("weight_block_size[1]", most=1 << 20)


STACK, STACK_SCALES, STACK_INPUT_SCALES = "stack", "scale_inv", "activation_scale"
"""The parts of a tensor of all experts, whose name is the module's."""
STACKED_PARTS = ("blocks", "scales")
_BLOCK = 32


@dataclass(frozen=True, slots=True)
class Mxfp4Scheme:
    """See the module."""

    @classmethod
    def read(cls, fields: Fields) -> Self:
        """From `quantization_config`. Raises `ConfigError`."""
        fields.strings("modules_to_not_convert")  # a note: tensors in blocks are recognised by their names
        fields.raw("dequantize")  # makes transformers dequantise while loading
        return cls()

    def matrix(self, module: ModuleTensors) -> MatrixParts | None:
        if not module.has("blocks"):
            return None
        blocks = module.take("blocks", ("U8",), (None, None, None, _BLOCK // 2))
        if not module.has("scales"):
            raise refusal(blocks, f"has no scales: tensor '{module.name}_scales' is missing")
        scales = module.take("scales", ("U8",), blocks.shape[:3])
        num_experts, width, num_blocks, _ = blocks.shape
        shape = num_experts * width, num_blocks * _BLOCK
        layout = QuantizedLayout("fp4", shape, (1, _BLOCK), SCALES["U8"])
        return MatrixParts(
            layout,
            Part(blocks, lambda array: array.reshape(layout.code_shape)),
            Part(scales, lambda array: array.view(SCALES["U8"]).reshape(layout.scale_shape)),
            stack_shape=(num_experts, shape[1], width),
        )
