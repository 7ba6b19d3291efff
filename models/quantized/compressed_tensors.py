"""`quant_method: compressed-tensors`: groups of modules with the formats of their weights and activations.

    format                 tensors of a module X                                          scales
    int-quantized          X.weight int8 [N, K]                                           X.weight_scale
    float-quantized        X.weight e4m3 [N, K]                                           X.weight_scale
    naive-quantized        one of these two
    pack-quantized         X.weight_packed int32 [N, ceil(K * bits / 32)]: integers above their smallest, the lowest
                           bits of a word first; X.weight_shape: [N, K]                   X.weight_scale
    nvfp4-pack-quantized   X.weight_packed uint8 [N, K / 2]                               X.weight_scale e4m3 over
                                                                                          X.weight_global_scale
    mxfp4-pack-quantized   X.weight_packed uint8 [N, K / 2]                               X.weight_scale e8m0
    mxfp8-quantized        X.weight e4m3 [N, K]                                           X.weight_scale e8m0

`nvfp4-e5m3-pack-quantized` is `nvfp4-pack-quantized` without a scale for all; `X.weight_scale` is uint8, numbers of 5
bits of exponent and 3 of mantissa, without a sign.

By `strategy` there is a scale for all (`tensor`), one a row (`channel`), a group of a row (`group`, `tensor_group`) or
a block. Integers without `symmetric` have `X.weight_zero_point`, packed along N where the weight is packed. With
`X.weight_g_idx` columns are in any order of groups.

Granite's experts, which stand in one tensor, may have a scale a row: X.weight [E, N, K], X.weight_scale [E, N, 1].

A group's `targets` are modules' names, patterns (`re:`) or the class `Linear`, which is every matrix; names take
precedence over patterns, and patterns over classes. Modules in `ignore` are stored in floats.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np

from models.configuration.json_fields import Fields
from models.quantized.fp8 import SCALES, as_bytes, scale_part
from models.quantized.gptq import unpacked, widened
from models.quantized.parts import FLOATS, Array, MatrixParts, ModuleTensors, Part, compiled, refusal, unchanged
from runtime.linear.quantized import ActivationScheme, NumberKind, QuantizedLayout

_TYPES = ("I32", "I8", "U8", "F8_E4M3")
_CLASSES = ("Linear",)
_ACTIVATIONS: dict[tuple[str, int], NumberKind] = {("float", 8): "fp8", ("int", 8): "int8", ("float", 4): "fp4"}


@dataclass(frozen=True, slots=True)
class Numbers:
    """The config's description of weights or activations."""

    kind: str  # "int" or "float"
    bits: int
    strategy: str
    group_size: int
    block: tuple[int, int] | None
    is_symmetric: bool
    is_dynamic: bool

    @property
    def scale_block(self) -> tuple[int, int]:
        """Rows by elements that share a scale; 0 means all."""
        if self.strategy in ("group", "tensor_group"):
            return 1, self.group_size
        if self.strategy == "block":
            assert self.block is not None
            return self.block
        return (1, 0) if self.strategy == "channel" else (0, 0)


@dataclass(frozen=True, slots=True)
class Group:
    """A group of modules that are quantised alike."""

    name: str
    format: str
    weights: Numbers
    activation: ActivationScheme | None


@dataclass(frozen=True, slots=True)
class Target:
    """A name, a pattern or a class, and the group that it leads to."""

    text: str
    pattern: re.Pattern[str] | None
    group: Group | None

    @staticmethod
    def of(fields: Fields, name: str, text: str, group: Group | None) -> Target:
        """From a config's list. Raises `ConfigError`."""
        pattern = compiled(fields, name, text.removeprefix("re:")) if text.startswith("re:") else None
        return Target(text, pattern, group)

    def names(self, module: str) -> bool:
        """Whether it names the module, not its class."""
        return self.text == module if self.pattern is None else self.pattern.match(module) is not None


@dataclass(frozen=True, slots=True)
class CompressedTensorsScheme:
    """See the module."""

    targets: tuple[Target, ...]
    ignored: tuple[Target, ...]

    @classmethod
    def read(cls, fields: Fields) -> Self:
        """From `quantization_config`. Raises `ConfigError`."""
        for name in ("global_compression_ratio", "moe_sparsity_config", "provider", "quantization_status", "version"):
            fields.raw(name)
        fields.raw("attention_input_activations")  # of queries and pages, which are floats here, or have own scales
        fields.expect("transform_config", {})
        if fields.has("sparsity_config"):
            sparsity = fields.object("sparsity_config")
            for name in ("global_sparsity", "sparsity_structure", "targets", "ignore", "registry_requires_subclass"):
                sparsity.raw(name)
            sparsity.expect("format", "dense")
        _read_kv_cache(fields)
        usual = fields.string("format", None)
        if usual not in (None, "mixed-precision", *_FORMATS):
            raise fields.error("format", f"{usual!r:.80} is not supported; supported are {', '.join(_FORMATS)}")
        targets = []
        groups = fields.object("config_groups")
        if not groups.names():
            raise fields.error("config_groups", "is missing or empty")
        for name in groups.names():
            section = groups.object(name)
            found = section.strings("targets") or []
            group = _group(section, name, usual)
            for target in found:
                if target not in _CLASSES and re.fullmatch(r"[A-Z]\w*", target):
                    raise section.error("targets", f"names the class {target!r:.80}, must be 'Linear' or a module")
                targets.append(Target.of(section, "targets", target, group))
        targets.sort(key=lambda target: (target.pattern is not None, target.text in _CLASSES, target.text))
        ignored = tuple(Target.of(fields, "ignore", text, None) for text in fields.strings("ignore") or ())
        return cls(tuple(targets), ignored)

    def matrix(self, module: ModuleTensors) -> MatrixParts | None:
        is_quantised = module.has("weight_packed") or module.has("weight_scale")
        if not is_quantised:
            return None
        stored = module.take("weight_packed" if module.has("weight_packed") else "weight", _TYPES)
        if any(target.names(module.name) for target in self.ignored):
            raise refusal(stored, f"is {stored.type_name}, but `ignore` names the module")
        found = [target.group for target in self.targets if target.names(module.name)]
        found += [target.group for target in self.targets if target.text in _CLASSES]
        if not found or found[0] is None:
            raise refusal(stored, f"is {stored.type_name}, but no target of config_groups names the module")
        form = FORMS[found[0].format]
        return matrix_in_form(module, found[0], form) if form.part else _packed_integers(module, found[0])


def _packed_integers(module: ModuleTensors, group: Group) -> MatrixParts:
    numbers = group.weights
    packed = module.take("weight_packed", ("I32",), (None, None))
    shape = module.take("weight_shape", ("I64", "I32"), (2,))
    width, depth = (int(size) for size in shape.array())
    wanted = width, -(-depth * numbers.bits // 32)
    if packed.shape != wanted or depth < 1:
        raise refusal(packed, f"is {list(packed.shape)}, must be {list(wanted)}: {shape.name!r} is {[width, depth]}")
    form = FORMS[group.format]
    layout, scales = _layout(module, group, "int4" if numbers.bits <= 4 else "int8", (width, depth), form)
    zeros = None
    if layout.has_zeros:
        rows, columns = layout.scale_shape
        stored = module.take("weight_zero_point", ("I32",), (-(-rows * numbers.bits // 32), columns))

        def zeros_of(words: Array) -> Array:
            return np.ascontiguousarray(unpacked(words.T, numbers.bits)[:, :rows].T)

        zeros = Part(stored, zeros_of)

    def codes_of(words: Array) -> Array:
        if numbers.bits in (4, 8):
            return np.ascontiguousarray(words).view(np.uint8)[:, : layout.code_shape[1]]
        return widened(unpacked(words, numbers.bits)[:, :depth], numbers.bits, is_centred=not layout.has_zeros)

    order = Part(module.take("weight_g_idx", ("I32", "I64"), (depth,))) if layout.has_order else None
    return MatrixParts(layout, Part(packed, codes_of), scales, zeros, order)


def _above_smallest(array: Array) -> Array:
    """Integers from -128 as integers from 0."""
    return array.view(np.uint8) ^ np.uint8(128)


@dataclass(frozen=True, slots=True)
class Form:
    """A format: the kind, bits and strategies that the config may name, and the tensors of a matrix.

    Attributes:
        part, stored: the weight's name and type; "" for integers in words, which are read otherwise.
        number, scales: the kind of its numbers, and types of their scales.
        convert: from the stored weight, or zeros, to codes.
        meanings: float32 [256], what a byte of a scale means; None if its type says it.
    """

    kind: str
    bits: tuple[int, ...]
    strategies: tuple[str, ...]
    part: str = ""
    stored: str = ""
    number: NumberKind = "int8"
    scales: tuple[str, ...] = FLOATS
    convert: Callable[[Array], Array] = unchanged
    meanings: Array | None = None


def _unsigned_e5m3() -> Array:
    """The value of each byte; the largest is NaN."""
    byte = np.arange(256)
    exponent, mantissa = byte >> 3, (byte & 7) / 8
    values = np.where(exponent == 0, np.ldexp(mantissa, -14), np.ldexp(1 + mantissa, exponent - 15)).astype(np.float32)
    values[255] = np.nan
    return values


_EXPONENTS = ("U8", "F8_E8M0")
FORMS = {
    "int-quantized": Form("int", (8,), ("tensor", "channel", "group"), "weight", "I8", convert=_above_smallest),
    "float-quantized": Form(
        "float", (8,), ("tensor", "channel", "group", "block"), "weight", "F8_E4M3", "fp8", convert=as_bytes
    ),
    "pack-quantized": Form("int", (2, 3, 4, 5, 6, 7, 8), ("channel", "group")),
    "nvfp4-pack-quantized": Form("float", (4,), ("tensor_group",), "weight_packed", "U8", "fp4", ("F8_E4M3",)),
    "nvfp4-e5m3-pack-quantized": Form(
        "float", (4,), ("tensor_group",), "weight_packed", "U8", "fp4", ("U8",), meanings=_unsigned_e5m3()
    ),
    "mxfp4-pack-quantized": Form("float", (4,), ("group",), "weight_packed", "U8", "fp4", _EXPONENTS),
    "mxfp8-quantized": Form("float", (8,), ("group",), "weight", "F8_E4M3", "fp8", _EXPONENTS, as_bytes),
}
_FORMATS = (*FORMS, "naive-quantized")


def matrix_in_form(module: ModuleTensors, group: Group, form: Form) -> MatrixParts:
    """A matrix whose codes are stored one by one, or in pairs; or those of all experts, one under another."""
    weight, is_nvfp4 = module.take(form.part, (form.stored,)), group.format == "nvfp4-pack-quantized"
    stack_shape = weight.shape if len(weight.shape) == 3 and group.weights.strategy == "channel" else None
    if stack_shape is None:
        module.take(form.part, (form.stored,), (None, None))
    shape = math.prod(weight.shape[:-1]), weight.shape[-1] * (2 if form.number in ("fp4", "int4") else 1)
    layout, scales = _layout(module, group, form.number, shape, form, has_divisor=is_nvfp4)
    zeros = input_scale = None
    if layout.has_zeros:
        zeros = Part(module.take("weight_zero_point", ("I8",), layout.scale_shape), form.convert)
    is_static = form.scales is FLOATS and layout.activation is not None and layout.activation.is_static
    name = "input_global_scale" if is_nvfp4 else "input_scale"
    if is_static or (is_nvfp4 and module.has(name)):
        input_scale = module.take_scalar(name)
    return MatrixParts(
        layout, Part(weight, lambda array: form.convert(array).reshape(layout.code_shape)), scales, zeros,
        input_scale=input_scale, divisor=module.take_scalar("weight_global_scale") if is_nvfp4 else None,
        stack_shape=stack_shape,
    )  # fmt: skip


def _layout(
    module: ModuleTensors, group: Group, kind: NumberKind, shape: tuple[int, ...], form: Form,
    *, has_divisor: bool = False,
) -> tuple[QuantizedLayout, Part]:  # fmt: skip
    """The layout by the config, and the scales, which must fit it."""
    scale, block = module.take("weight_scale", form.scales), group.weights.scale_block
    dtype = SCALES[scale.type_name] if form.meanings is None else form.meanings.dtype
    has_order = module.has("weight_g_idx")
    layout = QuantizedLayout(
        kind, (shape[0], shape[1]), block, dtype, has_zeros=not group.weights.is_symmetric,
        has_order=has_order, has_divisor=has_divisor, activation=group.activation,
    )  # fmt: skip
    wanted = layout.scale_shape
    of_experts = len(scale.shape) == 3 and (math.prod(scale.shape[:2]), scale.shape[2]) == wanted
    if not (scale.shape == wanted or of_experts or (block[1] == 0 and scale.shape in ((), wanted[:1]))):
        raise refusal(scale, f"is {list(scale.shape)}, must be {list(wanted)} for a matrix {list(shape)} by"
                      f" {group.name}'s strategy {group.weights.strategy}")  # fmt: skip
    if (meanings := form.meanings) is not None:
        return layout, Part(scale, lambda array: meanings[array].reshape(wanted))
    return layout, scale_part(scale, wanted)


def _group(fields: Fields, name: str, usual: str | None) -> Group:
    format = fields.string("format", usual)
    if format not in _FORMATS:
        raise fields.error("format", f"{format!r:.80} is not supported; supported are {', '.join(_FORMATS)}")
    if not fields.has("weights"):
        raise fields.error("weights", "is missing: a group without quantised weights")
    fields.expect("output_activations", None)
    weights = _numbers(fields.object("weights"))
    if format == "naive-quantized":
        format = "float-quantized" if weights.kind == "float" else "int-quantized"
    form = FORMS[format]
    section = fields.object("weights")
    for field, found, allowed in (
        ("type", weights.kind, (form.kind,)), ("num_bits", weights.bits, form.bits),
        ("strategy", weights.strategy, form.strategies), ("dynamic", weights.is_dynamic, (False,)),
        ("symmetric", weights.is_symmetric, (True,) if form.kind == "float" else (True, False)),
    ):  # fmt: skip
        if found not in allowed:
            raise section.error(field, f"is {found!r:.80}, must be {' or '.join(map(repr, allowed))} for {format}")
    if weights.strategy == "tensor" and not weights.is_symmetric:
        raise section.error("strategy", "is 'tensor', must be 'channel' or 'group' where symmetric is false")
    activation = None
    if fields.has("input_activations"):
        section = fields.object("input_activations")
        said = _numbers(section)
        if (said.kind, said.bits) not in _ACTIVATIONS:
            raise section.error("num_bits", f"is {said.bits} of type {said.kind!r}, must be 8, or 4 of 'float'")
        size = said.group_size if said.strategy in ("group", "tensor_group") else 0
        is_static = not said.is_dynamic and said.strategy == "tensor"
        activation = ActivationScheme(_ACTIVATIONS[said.kind, said.bits], size, is_static)
    else:
        fields.raw("input_activations")
    return Group(name, format, weights, activation)


def _numbers(fields: Fields) -> Numbers:
    for name in ("observer", "observer_kwargs", "actorder", "scale_dtype", "zp_dtype"):
        fields.raw(name)
    size = fields.integer("group_size", None, least=-1, most=1 << 20)
    strategy = fields.string("strategy", None)
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if strategy not in ("tensor", "channel", "group", "tensor_group", "block", "token"):
        raise fields.error("strategy", f"{strategy!r:.80} is not supported")
    if strategy in ("group", "tensor_group") and (size is None or size < 1):
        raise fields.error("group_size", f"is {size}, must be more than 0 for the strategy {strategy!r}")
    block = None
    if strategy == "block":
        value = fields.raw("block_structure")
        if isinstance(value, str) and re.fullmatch(r"\d{1,7}x\d{1,7}", value):
            value = [int(each) for each in value.split("x")]
        if (
            not isinstance(value, list)
            or len(value) != 2
            or not all(type(each) is int and 0 < each < 1 << 20 for each in value)
        ):
            raise fields.error("block_structure", f"must be [rows, elements], not {value!r:.80}")
        block = value[0], value[1]
    else:
        fields.expect("block_structure", None)
    kind = fields.string("type", "int")
    if kind not in ("int", "float"):
        raise fields.error("type", f"is {kind!r:.80}, must be 'int' or 'float'")
    dynamic = fields.raw("dynamic")
    if dynamic not in (None, True, False, "local"):
        raise fields.error("dynamic", f"is {dynamic!r:.80}, must be true, false or 'local'")
    return Numbers(
        kind, fields.integer("num_bits", 8, most=16), strategy, max(0, size or 0), block,
        fields.boolean("symmetric", True), bool(dynamic),
    )  # fmt: skip


def _read_kv_cache(fields: Fields) -> None:
    """Checks `kv_cache_scheme`. Pages here are floats, or have scales of their own, so nothing else comes of it."""
    if not fields.has("kv_cache_scheme"):
        fields.raw("kv_cache_scheme")
        return
    section = fields.object("kv_cache_scheme")
    said = _numbers(section)
    if (said.kind, said.bits) not in (("float", 8), ("int", 8)):
        raise section.error("num_bits", f"is {said.bits} of type {said.kind!r:.80}, must be 8")
