"""Integers in groups, in words of 32 bits: GPTQ and AWQ.

`quant_method: gptq`: integers of 2, 3, 4 or 8 bits in groups, K first. A column is a stream of bits, cut into words;
integers of 2 and 3 bits are kept in 4.

    X.qweight  int32 [K * bits / 32, N], words along K
    X.qzeros   int32 [groups, N * bits / 32], words along N: zeros less 1 in format "gptq", as they are in
               "gptq_v2"; with `sym` all are the middle, in either convention
    X.scales   [groups, N]
    X.g_idx    int32 [K]: the group of each column. With `desc_act` they are in any order, and the matrix is kept in
               the groups' order.

`dynamic` overrides `bits`, `group_size`, `sym` or `desc_act` of modules whose name matches a pattern, or (`-:PATTERN`)
has them stored in floats. The first pattern counts.

`quant_method: awq`: integers of 4 bits in groups, eight to a word along N in the order 0, 2, 4, 6, 1, 3, 5, 7.

    X.qweight  int32 [K, N / 8]
    X.qzeros   int32 [groups, N / 8]
    X.scales   [groups, N]
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from models.checkpoints.stored_tensor import StoredTensor
from models.configuration.json_fields import REQUIRED, Fields
from models.quantized.fp8 import SCALES
from models.quantized.parts import FLOATS, Array, MatrixParts, ModuleTensors, Part, compiled, refusal
from runtime.linear.quantized import QuantizedLayout, pack_halves, unpack_halves

_PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # of the elements of a word of AWQ, in its halves of bytes
_ROWS_AT_ONCE = 1024
_FROM_TRAINING = (
    "act_group_aware", "backend", "batch_size", "block_name_to_quantize", "cache_block_outputs", "damp_auto_increment",
    "damp_percent", "dataset", "disable_exllama", "exllama_config", "hyb_act", "lm_head", "max_input_length", "meta",
    "model_file_base_name", "model_name_or_path", "model_seqlen", "module_name_preceding_first_block",
    "modules_in_block_to_quantize", "mse", "pad_token_id", "parallel_packing", "quant_method", "quantizer",
    "static_groups", "tokenizer", "true_sequential", "use_cuda_fp16", "use_exllama", "v2", "v2_alpha",
)  # fmt: skip
"""How the numbers were found, or who multiplies with them."""


@dataclass(frozen=True, slots=True)
class GptqModule:
    """How a module's matrix is stored; `group_size` 0 means all of K."""

    bits: int
    group_size: int
    is_symmetric: bool
    is_reordered: bool


@dataclass(frozen=True, slots=True)
class GptqScheme:
    """See the module.

    Attributes:
        usual: of modules that no pattern matches.
        others: patterns and their overrides, or None for floats.
        has_plain_zeros: whether zeros are stored as they are.
    """

    usual: GptqModule
    others: tuple[tuple[re.Pattern[str], GptqModule | None], ...]
    has_plain_zeros: bool

    @classmethod
    def read(cls, fields: Fields) -> Self:
        """From `quantization_config`. Raises `ConfigError`."""
        for name in _FROM_TRAINING:
            fields.raw(name)
        fields.expect("is_marlin_format", False)
        fields.expect("pack_dtype", "int32", "torch.int32")
        fields.expect("method", "gptq")
        names = [name for name in ("checkpoint_format", "format") if fields.has(name)]
        format = fields.string(names[0]) if names else "gptq"
        for name in names:
            if fields.string(name) not in ("gptq", "gptq_v2") or fields.string(name) != format:
                raise fields.error(name, f"is {fields.string(name)!r:.80}, must be 'gptq' or 'gptq_v2'")
        usual = _module(fields, None)
        others = []
        patterns = fields.object("dynamic")
        for pattern in patterns.values():
            changes = patterns.object(pattern)
            said = None if pattern.startswith("-:") else _module(changes, usual)
            others.append((compiled(fields, "dynamic", pattern.removeprefix("+:").removeprefix("-:")), said))
        return cls(usual, tuple(others), format == "gptq_v2")

    def matrix(self, module: ModuleTensors) -> MatrixParts | None:
        if not module.has("qweight"):
            return None
        said = next((said for pattern, said in self.others if pattern.match(module.name)), self.usual)
        qweight = module.take("qweight", ("I32",), (None, None))
        if said is None:
            raise refusal(qweight, "is stored, but `dynamic` says that the module is not quantised")
        depth, width = qweight.shape[0] * 32 // said.bits, qweight.shape[1]
        if module.has("g_idx"):
            depth = module.take("g_idx", ("I32", "I64"), (None,)).shape[0]
            if -(-depth * said.bits // 32) != qweight.shape[0]:
                rows = -(-depth * said.bits // 32)
                raise refusal(qweight, f"is {list(qweight.shape)}, must be [{rows}, any] for {depth}"
                              f" columns of {said.bits} bits")  # fmt: skip
        size = said.group_size or depth
        groups = -(-depth // size)
        scales = module.take("scales", FLOATS, (groups, width))
        qzeros = module.take("qzeros", ("I32",), (groups, -(-width * said.bits // 32)))
        g_idx = Part(module.take("g_idx", ("I32", "I64"))) if module.has("g_idx") else None
        is_reordered = said.is_reordered and groups > 1
        if is_reordered and g_idx is None:
            module.take("g_idx", ("I32",))  # raises if it is missing
        layout = QuantizedLayout(
            "int8" if said.bits == 8 else "int4", (width, depth), (1, size if groups > 1 else 0),
            SCALES[scales.type_name], has_zeros=not said.is_symmetric, has_order=is_reordered,
        )  # fmt: skip

        def zeros(array: Array) -> Array:
            words = array.view(np.uint32)
            if said.bits < 4:
                numbers = unpacked(words, said.bits)[:, :width]
                if not self.has_plain_zeros:
                    numbers = (numbers + np.uint8(1)) & np.uint8((1 << said.bits) - 1)
                return np.ascontiguousarray(numbers.T)
            if not self.has_plain_zeros:
                words = words + np.uint32(0x11111111 if said.bits == 4 else 0x01010101)
            return np.ascontiguousarray(unpacked(words, said.bits)[:, :width].T)

        def check() -> None:
            if said.is_symmetric:
                stored = unpacked(qzeros.array().view(np.uint32), said.bits)[:, :width]
                _check_middle(qzeros, stored, 1 << (said.bits - 1), self.has_plain_zeros)
            if g_idx is not None and not is_reordered:
                _check_in_order(g_idx, size)

        return MatrixParts(
            layout,
            Part(qweight, lambda array: _codes(array, said, layout)),
            Part(scales, lambda array: np.ascontiguousarray(array.T)),
            zeros=None if said.is_symmetric else Part(qzeros, zeros),
            order=g_idx if is_reordered else None,
            checks=(check,),
        )


def _codes(words: Array, said: GptqModule, layout: QuantizedLayout) -> Array:
    """The codes of a matrix; fewer bits than 4 are moved so that a symmetric matrix has its middle at 8."""
    if said.bits >= 4:
        return along_k(words, layout.code_shape[1])
    numbers = unpacked(np.ascontiguousarray(words.T), said.bits)[:, : layout.shape[1]]
    return widened(numbers, said.bits, is_centred=said.is_symmetric)


def widened(numbers: Array, bits: int, *, is_centred: bool) -> Array:
    """Codes of int4 or int8 of numbers of fewer bits; centred ones are moved, so that their middle is 8 or 128."""
    kept = 4 if bits <= 4 else 8
    if is_centred and bits < kept:
        numbers = numbers + np.uint8((1 << (kept - 1)) - (1 << (bits - 1)))
    return pack_halves(numbers) if kept == 4 else numbers


def along_k(words: Array, num_bytes: int) -> Array:
    """Words ``[K * bits / 32, N]`` to rows of bytes ``[N, K * bits / 8]``: a word's lowest bits come first in both."""
    return np.ascontiguousarray(words.T).view(np.uint8)[:, :num_bytes]


def unpacked(words: Array, bits: int) -> Array:
    """Words ``[..., n]`` to the numbers of 2 to 8 bits in them, the lowest first: ``[..., n * 32 / bits]`` uint8, less
    a rest of bits."""
    numbers = np.ascontiguousarray(words).view(np.uint8)
    if bits not in (4, 8):
        stream = np.unpackbits(numbers, axis=-1, bitorder="little")
        whole = stream.shape[-1] // bits * bits
        split = stream[..., :whole].reshape(*stream.shape[:-1], -1, bits)
        return np.packbits(split, axis=-1, bitorder="little")[..., 0]
    return unpack_halves(numbers) if bits == 4 else numbers


def _check_middle(stored: StoredTensor, numbers: Array, middle: int, has_plain_zeros: bool) -> None:
    """All zeros of a symmetric matrix are the middle, stored in either convention: tools convert one without renaming
    the format."""
    if (numbers != middle).any() and (numbers != middle - 1).any():
        usual = middle if has_plain_zeros else middle - 1
        found = numbers[numbers != usual][0]
        raise refusal(stored, f"stores the zero {found}, but with sym all are {middle - 1} (gptq) or {middle}"
                      " (gptq_v2): if groups have zeros of their own, set sym to false in its quantization_config, and"
                      " checkpoint_format to gptq_v2 if zeros are stored as they are, not less 1")  # fmt: skip


def _check_in_order(part: Part, size: int) -> None:
    groups = part.array()
    wrong = groups != np.arange(groups.size) // size
    if wrong.any():
        place = int(np.argmax(wrong))
        raise refusal(part.stored, f"has group {groups[place]} at {place}, but without desc_act that is in group"
                      f" {place // size}")  # fmt: skip


def _module(fields: Fields, usual: GptqModule | None) -> GptqModule:
    default: tuple[Any, ...] = (REQUIRED, REQUIRED, True, False)
    if usual is not None:
        default = (usual.bits, usual.group_size or -1, usual.is_symmetric, usual.is_reordered)
    bits = fields.integer("bits", default[0])
    if bits not in (2, 3, 4, 8):
        raise fields.error("bits", f"is {bits}, must be 2, 3, 4 or 8")
    group_size = fields.integer("group_size", default[1], least=-1, most=1 << 20)
    if group_size == 0:
        raise fields.error("group_size", "is 0, must be -1 (all of a row) or more than 0")
    is_symmetric, is_reordered = fields.boolean("sym", default[2]), fields.boolean("desc_act", default[3])
    return GptqModule(bits, max(0, group_size), is_symmetric, is_reordered)


@dataclass(frozen=True, slots=True)
class AwqScheme:
    """See the module.

    Attributes:
        group_size: 0 means all of K.
        unconverted: parts of names of modules that are stored in floats.
    """

    group_size: int
    unconverted: tuple[str, ...]

    @classmethod
    def read(cls, fields: Fields) -> Self:
        """From `quantization_config`. Raises `ConfigError`."""
        fused = ("do_fuse", "fuse_max_seq_len", "modules_to_fuse")
        for name in (*_FROM_TRAINING, *fused, "zero_point", "desc_act", "sym"):
            fields.raw(name)
        for name in ("version", "format", "checkpoint_format"):
            fields.expect(name, "gemm", "GEMM")
        fields.expect("bits", 4)
        fields.expect("pack_dtype", "int32", "torch.int32")
        fields.expect("method", "awq")
        fields.expect("w_bit", 4)  # as AWQ's first tools call them
        older = fields.integer("q_group_size", 128, least=-1, most=1 << 20)
        group_size = fields.integer("group_size", older, least=-1, most=1 << 20)
        if group_size == 0:
            raise fields.error("group_size", "is 0, must be -1 (all of a row) or more than 0")
        return cls(max(0, group_size), tuple(fields.strings("modules_to_not_convert") or ()))

    def matrix(self, module: ModuleTensors) -> MatrixParts | None:
        if not module.has("qweight"):
            return None
        qweight = module.take("qweight", ("I32",), (None, None))
        if any(name in module.name for name in self.unconverted):
            raise refusal(qweight, "is stored, but modules_to_not_convert names the module")
        depth, width = qweight.shape[0], qweight.shape[1] * 8
        size = self.group_size or depth
        groups = -(-depth // size)
        scales = module.take("scales", FLOATS, (groups, width))
        qzeros = module.take("qzeros", ("I32",), (groups, qweight.shape[1]))
        layout = QuantizedLayout(
            "int4", (width, depth), (1, size if groups > 1 else 0), SCALES[scales.type_name], has_zeros=True
        )
        return MatrixParts(
            layout,
            Part(qweight, _awq_codes),
            Part(scales, lambda array: np.ascontiguousarray(array.T)),
            zeros=Part(qzeros, lambda array: np.ascontiguousarray(_awq_numbers(array).T)),
        )


def _awq_numbers(words: Array) -> Array:
    """Words ``[rows, N / 8]`` to integers ``[rows, N]`` uint8."""
    halves = unpack_halves(np.ascontiguousarray(words).view(np.uint8)).reshape(len(words), -1, 8)
    return halves[:, :, _PLACES].reshape(len(words), -1)


def _awq_codes(words: Array) -> Array:
    """Words ``[K, N / 8]`` to codes ``[N, ceil(K / 2)]``."""
    depth, width = words.shape[0], words.shape[1] * 8
    codes = np.empty((width, -(-depth // 2)), np.uint8)
    for first in range(0, depth, _ROWS_AT_ONCE):  # an even number
        some = _awq_numbers(words[first : first + _ROWS_AT_ONCE])
        codes[:, first // 2 : (first + _ROWS_AT_ONCE) // 2] = pack_halves(np.ascontiguousarray(some.T))
    return codes
